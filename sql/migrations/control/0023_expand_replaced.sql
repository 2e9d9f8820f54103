-- Which run of a node was armed last, also while none is: a Postgres that was replaced arms none, and the primary of
-- before must not count as unknown once its replica is armed instead.
ALTER TABLE mqlayer.node ADD COLUMN last_run_id text;
UPDATE mqlayer.node SET last_run_id = armed_run_id;

-- How often this schema's server was replaced by one that may lack commits. Seeks of a group are counted in its row, not by
-- a sequence: their numbers leap with this.
ALTER TABLE mqlayer.server ADD COLUMN replaced int NOT NULL DEFAULT 0;
UPDATE mqlayer.server SET replaced = (SELECT count(*) FROM mqlayer.audit WHERE act = 'postgres replaced');

-- See to what lost commits may mean, see server_seen_v1: numbers that were given out in these are not given out again, and
-- nobody is served under an epoch of before.
CREATE FUNCTION mqlayer.server_replaced_v1(p_facts jsonb) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer AS $$
DECLARE
    v_one record;
BEGIN
    FOR v_one IN
        SELECT format('%I.%I', schemaname, sequencename)::regclass AS number, coalesce(last_value, 0) AS last,
               CASE WHEN max_value > 2147483647 THEN 1000000000 WHEN sequencename LIKE 'source%' THEN 1000000
                    ELSE 1000 END AS leap
        FROM pg_sequences WHERE schemaname IN ('mqlayer', 'mqlayer_archive')
    LOOP
        PERFORM setval(v_one.number, v_one.last + v_one.leap);
    END LOOP;
    UPDATE mqlayer.node SET armed_run_id = NULL;
    UPDATE mqlayer.server SET replaced = replaced + 1;
    INSERT INTO mqlayer.audit (actor, act, object, facts) VALUES ('database', 'postgres replaced', 'control', p_facts);
END $$;

CREATE OR REPLACE FUNCTION mqlayer.server_seen_v1() RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer AS $$
DECLARE
    v_system text;
    v_timeline int;
    v_known mqlayer.server;
BEGIN
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION 'it is a standby' USING ERRCODE = 'read_only_sql_transaction',
            HINT = 'add target_session_attrs=read-write to the DSN';
    END IF;
    v_system := mqlayer.system_v1();
    v_timeline := mqlayer.timeline_v1();
    SELECT * INTO v_known FROM mqlayer.server;
    IF v_known.system_id = v_system AND v_timeline IN (v_known.timeline, 0) THEN
        RETURN false;
    END IF;
    INSERT INTO mqlayer.server (system_id, timeline) VALUES (v_system, v_timeline) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN false;
    END IF;
    -- One of all connections that see it does what follows; the others wait, and find it done.
    SELECT * INTO v_known FROM mqlayer.server FOR UPDATE;
    IF v_known.system_id = v_system AND v_timeline IN (v_known.timeline, 0) THEN
        RETURN false;
    END IF;
    IF v_known.system_id = v_system AND v_known.timeline = 0 THEN
        UPDATE mqlayer.server SET timeline = v_timeline;
        RETURN false;
    END IF;
    UPDATE mqlayer.server SET system_id = v_system, timeline = v_timeline, since = now();
    PERFORM mqlayer.server_replaced_v1(jsonb_build_object(
        'timeline', v_timeline, 'before', v_known.timeline, 'another_system', v_known.system_id <> v_system));
    RETURN true;
END $$;
