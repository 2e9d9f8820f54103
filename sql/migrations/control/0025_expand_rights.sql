-- Rights of roles: who was granted which, and the rows that each may see and change. The privileges on tables, columns and
-- functions that come with a right stand in mqlayer/postgres/rights.py; `mqlayer grant` gives them.

-- What was given to whom. The owner of this schema and superusers need no row.
CREATE TABLE mqlayer.granted (
    role      regrole NOT NULL,
    privilege text NOT NULL,
    -- A topic, or TOPIC/GROUP; empty: all.
    scope     text NOT NULL DEFAULT '',
    CONSTRAINT granted_key PRIMARY KEY (role, privilege, scope),
    CONSTRAINT granted_privilege CHECK (privilege IN ('publish', 'consume', 'relay', 'work', 'look', 'analyze', 'operate'))
);

-- Who calls: the role that was set, else the one that logged in. Within functions that run as their owner, and in the
-- policies below, current_user is another one.
CREATE FUNCTION mqlayer.caller_v1() RETURNS name LANGUAGE sql STABLE
    SET search_path = pg_catalog, mqlayer, pg_temp
    RETURN coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;

-- Whether the caller has one of these rights without limits, by a grant to it or to a role that it is a member of.
CREATE FUNCTION mqlayer.has_v1(VARIADIC p_privileges text[]) RETURNS boolean LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
BEGIN
    RETURN pg_has_role(v_caller, current_user, 'USAGE') OR EXISTS (
        SELECT FROM mqlayer.granted g
        WHERE g.privilege = ANY(p_privileges) AND g.scope = '' AND pg_has_role(v_caller, g.role, 'USAGE'));
END $$;

-- Whether the caller has a right for a topic, or for TOPIC/GROUP; for an empty scope: without limits.
CREATE FUNCTION mqlayer.has_for_v1(p_privilege text, p_scope text) RETURNS boolean LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
BEGIN
    RETURN pg_has_role(v_caller, current_user, 'USAGE') OR EXISTS (
        SELECT FROM mqlayer.granted g
        WHERE g.privilege = p_privilege AND g.scope IN ('', p_scope) AND pg_has_role(v_caller, g.role, 'USAGE'));
END $$;

-- The groups that the caller may consume by name, with the instances of those that broadcast.
CREATE FUNCTION mqlayer.groups_v1() RETURNS int[] LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
BEGIN
    RETURN (
        WITH named AS (
            SELECT g.group_id FROM mqlayer.granted r
            JOIN mqlayer.topic t ON t.name = split_part(r.scope, '/', 1)
            JOIN mqlayer.consumer_group g ON g.topic_id = t.topic_id AND g.name = split_part(r.scope, '/', 2)
            WHERE r.privilege = 'consume' AND r.scope <> '' AND pg_has_role(v_caller, r.role, 'USAGE'))
        SELECT coalesce(array_agg(group_id), '{}') FROM (
            SELECT group_id FROM named
            UNION ALL
            SELECT i.group_id FROM mqlayer.consumer_group i JOIN named n ON i.broadcast_of = n.group_id) AS theirs);
END $$;

-- Whether the caller may create this group, or this instance of one.
CREATE FUNCTION mqlayer.may_create_group_v1(p_topic_id int, p_name text, p_broadcast_of int) RETURNS boolean LANGUAGE sql STABLE
    SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp
    RETURN mqlayer.has_for_v1('consume', (
        SELECT t.name || '/' || coalesce((SELECT b.name FROM mqlayer.consumer_group b WHERE b.group_id = p_broadcast_of), p_name)
        FROM mqlayer.topic t WHERE t.topic_id = p_topic_id));

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer, mqlayer_archive FROM PUBLIC;

-- Rows of a group are for those who may consume it, and for the processes and people that see to all groups. Each policy
-- calls its functions once per statement. Who only looks changes nothing, whatever else its role was granted.
DO $do$
DECLARE
    v_table text;
    v_reads CONSTANT text := $$(SELECT mqlayer.has_v1('relay', 'work', 'operate', 'consume', 'look', 'analyze'))$$;
    v_writes CONSTANT text := $$(SELECT mqlayer.has_v1('relay', 'work', 'operate', 'consume'))$$;
    v_own CONSTANT text := '%I = ANY((SELECT mqlayer.groups_v1())::int[])';
    v_rule text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY[
        'mqlayer.member', 'mqlayer.assignment', 'mqlayer.group_start', 'mqlayer.drained', 'mqlayer.parked_key',
        'mqlayer.parked_message', 'mqlayer.parked_total', 'mqlayer.parking_change', 'mqlayer.dead_message',
        'mqlayer.failed_attempt', 'mqlayer.failure_count', 'mqlayer.partition_pause', 'mqlayer.redrive',
        'mqlayer_archive.outcome_queue', 'mqlayer_archive.outcome_progress']
    LOOP
        v_rule := format(v_own, 'group_id');
        EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', v_table);
        EXECUTE format('CREATE POLICY read ON %s FOR SELECT USING (%s OR %s)', v_table, v_reads, v_rule);
        EXECUTE format('CREATE POLICY add ON %s FOR INSERT WITH CHECK (%s OR %s)', v_table, v_writes, v_rule);
        EXECUTE format('CREATE POLICY change ON %s FOR UPDATE USING (%s OR %s)', v_table, v_writes, v_rule);
        EXECUTE format('CREATE POLICY remove ON %s FOR DELETE USING (%s OR %s)', v_table, v_writes, v_rule);
    END LOOP;
    -- The settings of a group are known to all who may see groups at all.
    v_rule := format(v_own, 'group_id');
    ALTER TABLE mqlayer.consumer_group ENABLE ROW LEVEL SECURITY;
    CREATE POLICY read ON mqlayer.consumer_group FOR SELECT USING (true);
    EXECUTE format('CREATE POLICY add ON mqlayer.consumer_group FOR INSERT WITH CHECK '
                   '(%s OR mqlayer.may_create_group_v1(topic_id, name, broadcast_of))', v_writes);
    EXECUTE format('CREATE POLICY change ON mqlayer.consumer_group FOR UPDATE USING (%s OR %s)', v_writes, v_rule);
    EXECUTE format('CREATE POLICY remove ON mqlayer.consumer_group FOR DELETE USING (%s)',
                   $$(SELECT mqlayer.has_v1('work', 'operate'))$$);
    -- Consumers lock these rows, for which Postgres wants the right to change them; they change none.
    FOREACH v_table IN ARRAY ARRAY['mqlayer.node', 'mqlayer.partition', 'mqlayer_archive.topic'] LOOP
        EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', v_table);
        EXECUTE format('CREATE POLICY read ON %s FOR SELECT USING (true)', v_table);
        EXECUTE format('CREATE POLICY hold ON %s FOR UPDATE USING (true) WITH CHECK (%s)', v_table,
                       $$(SELECT mqlayer.has_v1('relay', 'work', 'operate'))$$);
        EXECUTE format('CREATE POLICY add ON %s FOR INSERT WITH CHECK (%s)', v_table, $$(SELECT mqlayer.has_v1('operate'))$$);
        EXECUTE format('CREATE POLICY remove ON %s FOR DELETE USING (%s)', v_table, $$(SELECT mqlayer.has_v1('operate'))$$);
    END LOOP;
END $do$;

-- A direct producer ends its own sources: the marks of an ended one are removed.
ALTER TABLE mqlayer.source ADD COLUMN opened_by name NOT NULL DEFAULT mqlayer.caller_v1();
ALTER TABLE mqlayer.source ENABLE ROW LEVEL SECURITY;
CREATE POLICY read ON mqlayer.source FOR SELECT USING (true);
CREATE POLICY add ON mqlayer.source FOR INSERT
    WITH CHECK ((SELECT mqlayer.has_v1('relay', 'work', 'operate')) OR kind = 'direct' AND opened_by = (SELECT mqlayer.caller_v1()));
CREATE POLICY change ON mqlayer.source FOR UPDATE
    USING ((SELECT mqlayer.has_v1('relay', 'work', 'operate')) OR kind = 'direct' AND opened_by = (SELECT mqlayer.caller_v1()));

-- An actor says who he is; this is the role that he was for Postgres.
ALTER TABLE mqlayer.audit ADD COLUMN role name NOT NULL DEFAULT mqlayer.caller_v1();

-- It counts what anybody parks, whose own right is to park.
ALTER FUNCTION mqlayer.parked_count_v1() SECURITY DEFINER;

-- What people may see of messages: all but bodies and headers.
CREATE VIEW mqlayer.parked_fact AS
SELECT group_id, lp, name, source, seq, place, partition_id, log_offset, key, redriven, replay, attempts, tried,
       convert_to(concat_ws(':', source, lp, seq, split_part(encode(m, 'escape'), ':', 4)), 'UTF8') AS m,
       octet_length(m) AS m_size, octet_length(body) AS body_size
FROM mqlayer.parked_message;

CREATE VIEW mqlayer.dead_fact AS
SELECT dead_id, group_id, lp, source, seq, partition_id, log_offset, key, octet_length(body) AS body_size, cause, reason,
       attempts, actor, died_at, redriven_at, redriven_seek, adrift
FROM mqlayer.dead_message;

-- Where the outbox is in this database too, its functions know each group from the moment it is there.
CREATE FUNCTION mqlayer.group_known_v1() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF to_regclass('mqlayer_app.known_group') IS NOT NULL AND has_schema_privilege('mqlayer_app', 'USAGE') THEN
        INSERT INTO mqlayer_app.known_group (group_id, scope)
        SELECT NEW.group_id, t.name || '/' || coalesce(b.name, NEW.name) FROM mqlayer.topic t
        LEFT JOIN mqlayer.consumer_group b ON b.group_id = NEW.broadcast_of
        WHERE t.topic_id = NEW.topic_id
        ON CONFLICT (group_id) DO UPDATE SET scope = excluded.scope;
    END IF;
    RETURN NULL;
EXCEPTION WHEN insufficient_privilege THEN
    -- Another role owns that schema: a relay brings it.
    RETURN NULL;
END $$;
REVOKE EXECUTE ON FUNCTION mqlayer.group_known_v1() FROM PUBLIC;
CREATE TRIGGER group_known AFTER INSERT ON mqlayer.consumer_group
    FOR EACH ROW EXECUTE FUNCTION mqlayer.group_known_v1();
