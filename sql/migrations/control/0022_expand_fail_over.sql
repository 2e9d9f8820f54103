-- Nodes that were replaced by their replicas, and a Postgres that may have lost commits.

-- Runs that were armed and replaced since: an old primary that lives on must not be armed again by whoever still meets it.
ALTER TABLE mqlayer.node ADD COLUMN former_runs text[] NOT NULL DEFAULT '{}';

-- Which run of a node was armed last, also while none is: a Postgres that was replaced arms none, and the primary of
-- before must not count as unknown once its replica is armed instead.
ALTER TABLE mqlayer.node ADD COLUMN last_run_id text;
UPDATE mqlayer.node SET last_run_id = armed_run_id;

-- Whose commits this schema is made of: made by the first connection, compared by each one.
CREATE TABLE mqlayer.server (
    only_one  boolean NOT NULL DEFAULT true,
    system_id text NOT NULL,
    -- 0, and an empty id, where the server does not tell it.
    timeline  int NOT NULL,
    since     timestamptz NOT NULL DEFAULT now(),
    -- How often it was replaced by one that may lack commits. Seeks of a group are counted in its row, not by a
    -- sequence: their numbers leap with this.
    replaced  int NOT NULL DEFAULT 0,
    CONSTRAINT server_key PRIMARY KEY (only_one),
    CONSTRAINT server_only_one CHECK (only_one)
);

-- The timeline of this server: another one begins with each promotion and with each recovery to a point in time. 0 where
-- a managed Postgres does not tell it.
CREATE FUNCTION mqlayer.timeline_v1() RETURNS int LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog AS $$
BEGIN
    RETURN ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int;
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN 0;
END $$;

CREATE FUNCTION mqlayer.system_v1() RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog AS $$
BEGIN
    RETURN (SELECT system_identifier::text FROM pg_control_system());
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN '';
END $$;

-- See to what it may mean that this server took another one's place: a standby that was promoted, or a backup, may lack
-- the last commits. Numbers that were given out in these would be given out again, while Redis holds what was done
-- under them: each sequence leaps over more than can have been lost. So do allocations, which are counted in rows, as
-- seeks are: a member that saw the lost ones would take those of now for older ones, hold nothing, and give nothing
-- away. And no node is armed any more, so that whoever holds anything there gets a new epoch, above all that the lost
-- ones gave out, before anybody is served.
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
    UPDATE mqlayer.consumer_group SET allocation = allocation + 1000000;
    UPDATE mqlayer.node SET armed_run_id = NULL;
    UPDATE mqlayer.server SET replaced = replaced + 1;
    INSERT INTO mqlayer.audit (actor, act, object, facts) VALUES ('database', 'postgres replaced', 'control', p_facts);
END $$;

-- Say whether this server is another one than the schema knows, and see to what that may mean.
CREATE FUNCTION mqlayer.server_seen_v1() RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
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
