-- An outbox in a Postgres that may have lost commits.

-- On which timeline of its Postgres the outbox is worked on; null before a relay noted it, -1 where commits are known to be
-- missing. And which outbox it goes on in place of, whose source ends.
ALTER TABLE mqlayer_app.identity ADD COLUMN timeline int, ADD COLUMN replaces uuid;

-- The timeline of this server: another one begins with each promotion and with each recovery to a point in time. 0 where
-- a managed Postgres does not tell it.
CREATE FUNCTION mqlayer_app.timeline_v1() RETURNS int LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog AS $$
BEGIN
    RETURN ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int;
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN 0;
END $$;

ALTER TABLE mqlayer_app.identity ALTER COLUMN timeline SET DEFAULT mqlayer_app.timeline_v1();

-- Let an outbox go on under a new source after its Postgres lost commits: seqs that were given out in these are given out
-- again, while partitions hold other messages under them. What is proven to be in Redis is recorded as relayed first; all
-- behind it is numbered anew, from 1. Unlike in outbox_renew_v1 relays may hold leases: whoever meets the server asks for
-- its timeline before anything else. Null where somebody did all that meanwhile; else how many messages wait.
CREATE FUNCTION mqlayer_app.outbox_recover_v1(p_outbox uuid, p_topic_ids int[], p_lps smallint[], p_seqs bigint[])
    RETURNS bigint LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_now int := mqlayer_app.timeline_v1();
    v_count bigint;
BEGIN
    PERFORM FROM mqlayer_app.identity i
        WHERE i.outbox_uuid = p_outbox AND i.timeline IS DISTINCT FROM v_now FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    LOCK TABLE mqlayer_app.counter, mqlayer_app.outbox, mqlayer_app.relayed IN ACCESS EXCLUSIVE MODE;
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
    UPDATE mqlayer_app.identity SET outbox_uuid = gen_random_uuid(), timeline = v_now, replaces = p_outbox;
    SELECT count(*) INTO v_count FROM mqlayer_app.outbox;
    RETURN v_count;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer_app.timeline_v1() FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.outbox_recover_v1(uuid, int[], smallint[], bigint[]) FROM PUBLIC;
