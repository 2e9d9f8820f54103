-- Rights of roles in this schema: who was granted which, and for what. As control 0025.

-- What was given to whom. The owner of this schema and superusers need no row.
CREATE TABLE mqlayer_app.granted (
    role      regrole NOT NULL,
    privilege text NOT NULL,
    -- A topic, or TOPIC/GROUP; empty: all.
    scope     text NOT NULL DEFAULT '',
    CONSTRAINT granted_key PRIMARY KEY (role, privilege, scope),
    CONSTRAINT granted_privilege CHECK (privilege IN ('publish', 'consume', 'relay', 'work', 'look', 'analyze', 'operate'))
);

-- Roles that could call the functions before there were rights could call them for everything, and still can.
INSERT INTO mqlayer_app.granted (role, privilege)
SELECT DISTINCT a.grantee::regrole, u.privilege
FROM pg_catalog.pg_proc p CROSS JOIN LATERAL pg_catalog.aclexplode(p.proacl) a
JOIN (VALUES ('publish_v1', 'publish'), ('fence_v1', 'consume')) AS u(function, privilege) ON u.function = p.proname
WHERE p.pronamespace = 'mqlayer_app'::regnamespace AND a.grantee NOT IN (0, p.proowner);

CREATE FUNCTION mqlayer_app.caller_v1() RETURNS name LANGUAGE sql STABLE
    SET search_path = pg_catalog, mqlayer_app, pg_temp
    RETURN coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;

-- Whether the caller has one of these rights without limits, by a grant to it or to a role that it is a member of.
CREATE FUNCTION mqlayer_app.has_v1(VARIADIC p_privileges text[]) RETURNS boolean LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
BEGIN
    RETURN pg_has_role(v_caller, current_user, 'USAGE') OR EXISTS (
        SELECT FROM mqlayer_app.granted g
        WHERE g.privilege = ANY(p_privileges) AND g.scope = '' AND pg_has_role(v_caller, g.role, 'USAGE'));
END $$;

-- Whether the caller has a right for a topic, or for TOPIC/GROUP; for an empty scope: without limits.
CREATE FUNCTION mqlayer_app.has_for_v1(p_privilege text, p_scope text) RETURNS boolean LANGUAGE plpgsql STABLE
    SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
BEGIN
    RETURN pg_has_role(v_caller, current_user, 'USAGE') OR EXISTS (
        SELECT FROM mqlayer_app.granted g
        WHERE g.privilege = p_privilege AND g.scope IN ('', p_scope) AND pg_has_role(v_caller, g.role, 'USAGE'));
END $$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer_app FROM PUBLIC;

-- Steps of the relay and of the worker that need more than their own rights: to empty a slot, to number messages.
ALTER FUNCTION mqlayer_app.outbox_rotate_v1(smallint) SECURITY DEFINER;
ALTER FUNCTION mqlayer_app.delayed_release_v1(int, int) SECURITY DEFINER;
ALTER FUNCTION mqlayer_app.fence_clean_v1(interval, int) SECURITY DEFINER;
ALTER FUNCTION mqlayer_app.outbox_recover_v1(uuid, int[], smallint[], bigint[], boolean[]) SECURITY DEFINER;
ALTER FUNCTION mqlayer_app.outbox_renew_v1(boolean) SECURITY DEFINER;

-- What people may see of messages: all but bodies and headers.
CREATE VIEW mqlayer_app.delayed_fact AS
SELECT delayed_id, topic_id, lp, due_at, created_at, key, octet_length(body) AS body_size FROM mqlayer_app.delayed;

CREATE VIEW mqlayer_app.held_version_fact AS
SELECT name, entity, version, origin, octet_length(body) + octet_length(headers) AS size, held_at
FROM mqlayer_app.held_version;

-- Which group an id is, as TOPIC/GROUP; an instance of a broadcast group counts as its group. Relays bring
-- it from the control schema, whose trigger does so at once where both are in one database.
CREATE TABLE mqlayer_app.known_group (
    group_id int NOT NULL,
    scope    text NOT NULL,
    CONSTRAINT known_group_key PRIMARY KEY (group_id)
);

-- Who uses a name of versions, of the roles that may consume some groups only: the first one, until the row is deleted.
CREATE TABLE mqlayer_app.version_user (
    name text NOT NULL,
    role regrole NOT NULL,
    CONSTRAINT version_user_key PRIMARY KEY (name)
);

DO $do$
BEGIN
    IF to_regclass('mqlayer.consumer_group') IS NOT NULL THEN
        INSERT INTO mqlayer_app.known_group (group_id, scope)
        SELECT g.group_id, t.name || '/' || coalesce(b.name, g.name) FROM mqlayer.consumer_group g
        JOIN mqlayer.topic t ON t.topic_id = g.topic_id
        LEFT JOIN mqlayer.consumer_group b ON b.group_id = g.broadcast_of;
    END IF;
END $do$;

-- Who may look at these numbers may publish to all topics, and consume for all groups. Nobody draws them: Postgres
-- answers for a privilege on an object of its own within an expression and from its cache, without a look into a table.
CREATE SEQUENCE mqlayer_app.publish_any;
CREATE SEQUENCE mqlayer_app.consume_any;

-- Refuse a caller who may not publish to a topic.
CREATE FUNCTION mqlayer_app.check_topic_v1(p_topic text) RETURNS void LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
BEGIN
    IF NOT mqlayer_app.has_for_v1('publish', p_topic) THEN
        RAISE EXCEPTION 'role "%" lacks the right to publish %', v_caller, p_topic
            USING ERRCODE = 'insufficient_privilege', HINT = format('mqlayer grant publish %s --topic %s', v_caller, p_topic);
    END IF;
END $$;

-- Refuse a caller who may not consume for a group.
CREATE FUNCTION mqlayer_app.check_group_v1(p_group_id int) RETURNS void LANGUAGE plpgsql STABLE SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
    v_scope text := (SELECT k.scope FROM mqlayer_app.known_group k WHERE k.group_id = p_group_id);
BEGIN
    IF v_scope IS NULL OR NOT mqlayer_app.has_for_v1('consume', v_scope) THEN
        RAISE EXCEPTION 'role "%" lacks the right to consume %', v_caller, coalesce(v_scope, 'group ' || p_group_id)
            USING ERRCODE = 'insufficient_privilege', HINT = CASE WHEN v_scope IS NULL
                THEN 'a relay has to bring this group''s name here from the control database: start one, and try again'
                ELSE format('mqlayer grant consume %s --group %s', v_caller, v_scope) END;
    END IF;
END $$;

-- Refuse a caller whose groups have nothing to do with a name of versions.
CREATE FUNCTION mqlayer_app.check_versions_v1(p_name text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
BEGIN
    INSERT INTO mqlayer_app.version_user AS u (name, role)
        SELECT p_name, g.role FROM mqlayer_app.granted g
        WHERE g.privilege = 'consume' AND pg_has_role(v_caller, g.role, 'USAGE')
          AND NOT EXISTS (SELECT FROM mqlayer_app.version_user v WHERE v.name = p_name)
        ORDER BY g.role LIMIT 1
        ON CONFLICT (name) DO NOTHING;
    IF NOT coalesce((SELECT pg_has_role(v_caller, u.role, 'USAGE') FROM mqlayer_app.version_user u WHERE u.name = p_name), false)
    THEN
        RAISE EXCEPTION 'role "%" lacks the right to the versions %, which another role uses', v_caller, p_name
            USING ERRCODE = 'insufficient_privilege', HINT = format('mqlayer grant consume %s', v_caller);
    END IF;
END $$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer_app FROM PUBLIC;

-- Each function that callers reach begins with its check; what it does else stays as it was made.
DO $do$
DECLARE
    v_one record;
    v_text text;
    v_place int;
    v_begin CONSTANT text := E'\nBEGIN\n';
    v_unless CONSTANT text := 'IF NOT has_sequence_privilege(coalesce(nullif(current_setting(''role''), ''none''), '
        'session_user::text)::name, ''mqlayer_app.%s_any''::regclass, ''SELECT'') THEN';
BEGIN
    FOR v_one IN SELECT * FROM (VALUES
        ('publish_v1', 'publish', 'mqlayer_app.check_topic_v1(p_topic)'),
        ('publish_once_v1', 'publish', 'mqlayer_app.check_topic_v1(p_topic)'),
        ('publish_at_v1', 'publish', 'mqlayer_app.check_topic_v1(p_topic)'),
        ('publish_many_v1', 'publish',
         'mqlayer_app.check_topic_v1(t.name) FROM (SELECT DISTINCT u.name FROM unnest(p_topics) AS u(name)) AS t'),
        ('publish_many_once_v1', 'publish',
         'mqlayer_app.check_topic_v1(t.name) FROM (SELECT DISTINCT u.name FROM unnest(p_topics) AS u(name)) AS t'),
        ('cancel_delayed_v1', 'publish',
         'mqlayer_app.check_topic_v1(t.name) FROM mqlayer_app.delayed d JOIN mqlayer_app.topic t USING (topic_id) '
         'WHERE d.delayed_id = p_delayed_id'),
        ('fence_v1', 'consume', 'mqlayer_app.check_group_v1(p_group_id)'),
        ('fence_many_v1', 'consume', 'mqlayer_app.check_group_v1(p_group_id)'),
        ('fence_raise_v1', 'consume', 'mqlayer_app.check_group_v1(p_group_id)'),
        ('inbox_put_v1', 'consume', 'mqlayer_app.check_group_v1(p_group_id)'),
        ('version_take_v1', 'consume', 'mqlayer_app.check_versions_v1(p_name)'),
        ('version_released_v1', 'consume', 'mqlayer_app.check_versions_v1(p_name)'),
        ('version_set_v1', 'consume', 'mqlayer_app.check_versions_v1(p_name)')) AS v(name, privilege, check_call)
    LOOP
        v_text := (SELECT pg_catalog.pg_get_functiondef(p.oid) FROM pg_catalog.pg_proc p
                   WHERE p.pronamespace = 'mqlayer_app'::regnamespace AND p.proname = v_one.name);
        v_place := strpos(v_text, v_begin);
        ASSERT v_place > 0, v_one.name;
        EXECUTE overlay(v_text PLACING v_begin || format(v_unless, v_one.privilege) || E'\n        PERFORM '
                        || v_one.check_call || E';\n    END IF;\n' FROM v_place FOR length(v_begin));
    END LOOP;
END $do$;
