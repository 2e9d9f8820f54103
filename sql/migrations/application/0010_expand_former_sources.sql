-- Which outboxes this one goes on in place of: all that it ever was, so that whatever of their sources is live still is
-- ended. A copy that got an identity of its own ends none: they are its original's.
ALTER TABLE mqlayer_app.identity ALTER COLUMN replaces TYPE uuid[]
    USING CASE WHEN replaces IS NOT NULL THEN ARRAY[replaces] END;

-- As before, and where it takes its original's place (p_keep), the original's source ends. All tables that relays write to
-- come first, the identity last: a relay has locked the one it writes to when it locks the identity that it goes by.
CREATE OR REPLACE FUNCTION mqlayer_app.outbox_renew_v1(p_keep boolean) RETURNS bigint LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_count bigint;
BEGIN
    IF EXISTS (SELECT FROM mqlayer_app.lp_set WHERE lease_until >= now()) THEN
        RAISE EXCEPTION 'a relay works on this outbox' USING ERRCODE = 'MQ005', HINT = 'stop its relays first';
    END IF;
    LOCK TABLE mqlayer_app.counter, mqlayer_app.outbox, mqlayer_app.relayed, mqlayer_app.set_aside
        IN ACCESS EXCLUSIVE MODE;
    IF p_keep THEN
        DELETE FROM mqlayer_app.outbox o USING mqlayer_app.relayed r
            WHERE r.topic_id = o.topic_id AND r.lp = o.lp AND o.seq <= r.seq;
        -- By way of negative numbers: a row's new number may still be another row's old one.
        UPDATE mqlayer_app.outbox o SET seq = r.seq - o.seq FROM mqlayer_app.relayed r
            WHERE r.topic_id = o.topic_id AND r.lp = o.lp;
        UPDATE mqlayer_app.outbox SET seq = -seq WHERE seq < 0;
        UPDATE mqlayer_app.counter c SET seq = c.seq - r.seq FROM mqlayer_app.relayed r
            WHERE r.topic_id = c.topic_id AND r.lp = c.lp;
    ELSE
        TRUNCATE mqlayer_app.outbox;
        UPDATE mqlayer_app.counter SET seq = 0 WHERE seq <> 0;
    END IF;
    TRUNCATE mqlayer_app.relayed, mqlayer_app.set_aside;
    UPDATE mqlayer_app.identity i SET outbox_uuid = gen_random_uuid(), timeline = DEFAULT,
        replaces = CASE WHEN p_keep THEN array_append(i.replaces, i.outbox_uuid) END;
    SELECT count(*) INTO v_count FROM mqlayer_app.outbox;
    RETURN v_count;
END $$;

-- As before, and what it went on in place of stays known. In the same order.
CREATE OR REPLACE FUNCTION mqlayer_app.outbox_recover_v1(
    p_outbox uuid, p_topic_ids int[], p_lps smallint[], p_seqs bigint[])
    RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_now int := mqlayer_app.timeline_v1();
    v_count bigint;
BEGIN
    LOCK TABLE mqlayer_app.counter, mqlayer_app.outbox, mqlayer_app.relayed, mqlayer_app.set_aside
        IN ACCESS EXCLUSIVE MODE;
    PERFORM FROM mqlayer_app.identity i
        WHERE i.outbox_uuid = p_outbox AND i.timeline IS DISTINCT FROM v_now FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    INSERT INTO mqlayer_app.relayed AS r (topic_id, lp, seq)
        SELECT * FROM unnest(p_topic_ids, p_lps, p_seqs)
        ON CONFLICT (topic_id, lp) DO UPDATE SET seq = excluded.seq WHERE r.seq < excluded.seq;
    DELETE FROM mqlayer_app.outbox o USING mqlayer_app.relayed r
        WHERE r.topic_id = o.topic_id AND r.lp = o.lp AND o.seq <= r.seq;
    -- By way of negative numbers: a row's new number may still be another row's old one.
    UPDATE mqlayer_app.outbox o SET seq = r.seq - o.seq FROM mqlayer_app.relayed r
        WHERE r.topic_id = o.topic_id AND r.lp = o.lp;
    UPDATE mqlayer_app.outbox SET seq = -seq WHERE seq < 0;
    UPDATE mqlayer_app.counter c SET seq = greatest(0, c.seq - r.seq) FROM mqlayer_app.relayed r
        WHERE r.topic_id = c.topic_id AND r.lp = c.lp;
    TRUNCATE mqlayer_app.relayed, mqlayer_app.set_aside;
    UPDATE mqlayer_app.identity i SET outbox_uuid = gen_random_uuid(), timeline = v_now,
        replaces = array_append(i.replaces, p_outbox);
    SELECT count(*) INTO v_count FROM mqlayer_app.outbox;
    RETURN v_count;
END $$;
