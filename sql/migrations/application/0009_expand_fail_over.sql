-- An outbox in a Postgres that may have lost commits.

-- Let an outbox go on under a new source after its Postgres lost commits: seqs that were given out in these are given
-- out again, while partitions hold other messages under them. What is proven to be in Redis is recorded as relayed
-- first, and what Redis lost and nobody could send again (p_fallen) as not; all behind it is numbered anew, from 1. Unlike in outbox_renew_v1 relays may hold leases: whoever meets the
-- server asks for its timeline before anything else. What it went on in place of stays known; locks are taken in the
-- order of outbox_renew_v1. Null where somebody did all that meanwhile; else how many messages wait.
CREATE FUNCTION mqlayer_app.outbox_recover_v1(
    p_outbox uuid, p_topic_ids int[], p_lps smallint[], p_seqs bigint[], p_fallen boolean[])
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
        SELECT k.topic_id, k.lp, k.seq FROM unnest(p_topic_ids, p_lps, p_seqs, p_fallen) AS k (topic_id, lp, seq, fallen)
        WHERE NOT k.fallen
        ON CONFLICT (topic_id, lp) DO UPDATE SET seq = excluded.seq WHERE r.seq < excluded.seq;
    UPDATE mqlayer_app.relayed r SET seq = least(r.seq, k.seq)
        FROM unnest(p_topic_ids, p_lps, p_seqs, p_fallen) AS k (topic_id, lp, seq, fallen)
        WHERE k.fallen AND r.topic_id = k.topic_id AND r.lp = k.lp;
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

REVOKE EXECUTE ON FUNCTION mqlayer_app.outbox_recover_v1(uuid, int[], smallint[], bigint[], boolean[]) FROM PUBLIC;
