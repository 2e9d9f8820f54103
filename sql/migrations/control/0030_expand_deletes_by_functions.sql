-- Who may delete from a table may lock it against everybody: LOCK TABLE asks for DELETE, TRUNCATE or UPDATE of all
-- columns. Consumers delete by functions from here on, and have no such privilege left.

-- Refuse a caller who may not change the rows of a group.
CREATE FUNCTION mqlayer.check_group_v1(p_group_id int) RETURNS void LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
    v_scope text;
BEGIN
    IF mqlayer.has_v1('work', 'operate', 'consume') OR p_group_id = ANY(mqlayer.groups_v1()) THEN
        RETURN;
    END IF;
    v_scope := (SELECT t.name || '/' || coalesce(b.name, g.name) FROM mqlayer.consumer_group g
                JOIN mqlayer.topic t ON t.topic_id = g.topic_id
                LEFT JOIN mqlayer.consumer_group b ON b.group_id = g.broadcast_of WHERE g.group_id = p_group_id);
    RAISE EXCEPTION 'role "%" lacks the right to consume %', v_caller, coalesce(v_scope, 'group ' || p_group_id)
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'mqlayer grant consume ' || v_caller || coalesce(' --group ' || v_scope, '');
END $$;

-- Refuse a number of rows that no call needs.
CREATE FUNCTION mqlayer.check_count_v1(p_name text, p_count bigint) RETURNS void LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF (p_count BETWEEN 0 AND 10000) IS NOT TRUE THEN
        RAISE EXCEPTION '% is %, its bounds are 0 and 10000', p_name, coalesce(p_count::text, 'null')
            USING ERRCODE = 'MQ009', HINT = 'make several calls';
    END IF;
END $$;

-- Forget members that are gone, joined long ago and own nothing; all of a group that is retired.
CREATE FUNCTION mqlayer.members_forget_v1(p_group_id int) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id);
    DELETE FROM mqlayer.member m
    WHERE m.group_id = p_group_id
      AND (EXISTS (SELECT FROM mqlayer.consumer_group g WHERE g.group_id = p_group_id AND g.state = 'retired')
           OR m.lease_until = '-infinity' AND m.joined_at < now() - interval '1 hour'
              AND NOT EXISTS (SELECT FROM mqlayer.assignment a WHERE a.group_id = m.group_id AND a.member_id = m.member_id));
END $$;

-- Forget where a group started, and what it has drained.
CREATE FUNCTION mqlayer.beginnings_forget_v1(p_group_id int) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id);
    DELETE FROM mqlayer.group_start WHERE group_id = p_group_id;
    DELETE FROM mqlayer.drained WHERE group_id = p_group_id;
END $$;

-- End messages of parked keys that are handled, or dead; note the handled ones for the archive.
CREATE FUNCTION mqlayer.parked_messages_end_v1(p_group_id int, p_lps smallint[], p_sources int[], p_seqs bigint[],
                                               p_handled boolean[], p_given_s double precision, p_actor text)
    RETURNS void LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_seqs', cardinality(p_seqs));
    WITH gone AS (
        DELETE FROM mqlayer.parked_message m
        USING unnest(p_lps, p_sources, p_seqs, p_handled) AS given (lp, source, seq, handled)
        WHERE m.group_id = p_group_id AND m.lp = given.lp AND m.source = given.source AND m.seq = given.seq
        RETURNING m.group_id, m.partition_id, m.log_offset, m.tried, given.handled
    )
    INSERT INTO mqlayer_archive.outcome_queue
        (topic_id, group_id, partition_id, log_offset, word, attempts, delivered_at, actor)
    SELECT g.topic_id, e.group_id, e.partition_id, e.log_offset, 'handled', e.tried + 1,
           statement_timestamp() - make_interval(secs => p_given_s), p_actor
    FROM gone e JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
    WHERE e.handled AND t.archived;
END $$;

-- End a parked key, if nothing of it waits, nobody paused it, and no replay is for it alone; its LP where that was so.
CREATE FUNCTION mqlayer.parked_key_end_v1(p_group_id int, p_lp smallint, p_name bytea) RETURNS SETOF smallint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id);
    RETURN QUERY
        DELETE FROM mqlayer.parked_key k
        WHERE k.group_id = p_group_id AND k.lp = p_lp AND k.name = p_name AND k.paused_at IS NULL
          AND NOT EXISTS (SELECT FROM mqlayer.parked_message m
                          WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name)
          AND NOT EXISTS (SELECT FROM mqlayer.redrive r
                          WHERE r.group_id = k.group_id AND r.name = k.name AND r.state = 'running')
        RETURNING k.lp;
END $$;

-- Forget parked keys that nothing is left of.
CREATE FUNCTION mqlayer.parked_keys_forget_v1(p_group_id int, p_lps smallint[], p_names bytea[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_names', cardinality(p_names));
    DELETE FROM mqlayer.parked_key k USING unnest(p_lps, p_names) AS given (lp, name)
    WHERE k.group_id = p_group_id AND k.lp = given.lp AND k.name = given.name;
END $$;

-- Drop some of what is parked of a retired group, messages before keys; how many messages, or keys, that were.
CREATE FUNCTION mqlayer.retired_messages_drop_v1(p_group_id int, p_limit int) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_gone bigint;
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_limit', p_limit);
    DELETE FROM mqlayer.parked_message WHERE ctid = ANY(ARRAY(
        SELECT m.ctid FROM mqlayer.parked_message m JOIN mqlayer.consumer_group g USING (group_id)
        WHERE m.group_id = p_group_id AND g.state = 'retired' LIMIT p_limit));
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;

CREATE FUNCTION mqlayer.retired_keys_drop_v1(p_group_id int, p_limit int) RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_gone bigint;
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_limit', p_limit);
    DELETE FROM mqlayer.parked_key WHERE ctid = ANY(ARRAY(
        SELECT k.ctid FROM mqlayer.parked_key k JOIN mqlayer.consumer_group g USING (group_id)
        WHERE k.group_id = p_group_id AND g.state = 'retired' LIMIT p_limit));
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer.check_group_v1, mqlayer.check_count_v1, mqlayer.members_forget_v1,
    mqlayer.beginnings_forget_v1, mqlayer.parked_messages_end_v1, mqlayer.parked_key_end_v1,
    mqlayer.parked_keys_forget_v1, mqlayer.retired_messages_drop_v1, mqlayer.retired_keys_drop_v1 FROM PUBLIC;

-- Roles lose what their rights gave them, but for those whose other rights need it.
DO $do$
DECLARE
    v_one record;
BEGIN
    FOR v_one IN
        SELECT DISTINCT c.oid::regclass AS relation, a.grantee::regrole AS role
        FROM (VALUES ('member', '{}'::text[]), ('parked_key', '{}'), ('parked_message', '{operate}'),
                     ('group_start', '{work,operate}'), ('drained', '{work,operate}')) AS v(name, keep)
        JOIN pg_catalog.pg_class c ON c.relnamespace = 'mqlayer'::regnamespace AND c.relname = v.name
        CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) AS a
        WHERE a.privilege_type = 'DELETE' AND a.grantee <> c.relowner
          AND EXISTS (SELECT FROM mqlayer.granted g WHERE g.role = a.grantee)
          AND NOT EXISTS (SELECT FROM mqlayer.granted g WHERE g.role = a.grantee AND g.privilege = ANY(v.keep))
    LOOP
        EXECUTE format('REVOKE DELETE ON %s FROM %s', v_one.relation, v_one.role);
    END LOOP;
END $do$;
