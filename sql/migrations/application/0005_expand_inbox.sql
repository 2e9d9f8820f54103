-- The inbox: which messages have their effect, one row for each, for handlers to which order says nothing.

CREATE TABLE mqlayer_app.inbox (
    group_id   int NOT NULL,
    -- <source>:<lp>:<seq>, or '=' and a name that the handler gave. What a replay of the archive gives has '@<replay>/' in
    -- front of that: its effects are there once for each replay.
    id         text COLLATE "C" NOT NULL,
    -- The message that it was noted with: while this one may come again, the row stays.
    source_id  int NOT NULL,
    lp         smallint NOT NULL,
    seq        bigint NOT NULL,
    -- The newest seek under which the group was to apply again what it had applied, and came to this message.
    replay     int NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    -- From when its time counts: since it was applied, or since its message was last found waiting somewhere.
    kept_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT inbox_key PRIMARY KEY (group_id, id)
);
CREATE INDEX inbox_kept_at ON mqlayer_app.inbox (group_id, kept_at);

-- Note in the effect's own transaction that a message has its effect. Answers 'current' (go on; noted when the transaction
-- commits) or 'applied' (roll back). Of two that note it at once the second waits, and is answered by what became of the
-- first: so the transaction of a stopped process ends after 60 idle seconds at the latest.
CREATE FUNCTION mqlayer_app.inbox_put_v1(p_group_id int, p_source_id int, p_lp smallint, p_seq bigint,
                                         p_name text DEFAULT NULL, p_seek int DEFAULT 0, p_replay bigint DEFAULT NULL)
    RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
BEGIN
    IF p_name = '' OR octet_length(p_name) > 512 THEN
        RAISE EXCEPTION 'a name in the inbox has 1 to 512 bytes' USING ERRCODE = 'MQ005', HINT = 'use an id';
    END IF;
    IF v_timeout = interval '0' OR v_timeout > interval '60 seconds' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '60s', true);
    END IF;
    INSERT INTO mqlayer_app.inbox AS i (group_id, id, source_id, lp, seq, replay)
        VALUES (p_group_id,
                coalesce('@' || p_replay || '/', '') || coalesce('=' || p_name, concat_ws(':', p_source_id, p_lp, p_seq)),
                p_source_id, p_lp, p_seq, p_seek)
        ON CONFLICT (group_id, id) DO UPDATE
            SET source_id = excluded.source_id, lp = excluded.lp, seq = excluded.seq, replay = excluded.replay,
                applied_at = excluded.applied_at, kept_at = excluded.kept_at
            WHERE i.replay < excluded.replay;
    RETURN CASE WHEN FOUND THEN 'current' ELSE 'applied' END;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer_app.inbox_put_v1(int, int, smallint, bigint, text, int, bigint) FROM PUBLIC;
