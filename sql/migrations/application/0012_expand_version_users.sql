-- Names of versions that are in use, and delayed messages that come while one is cancelled.

-- As of 0011, but a name in use without a row here is one of roles that may consume all groups, which make none: a role
-- with single groups can't take it from them.
CREATE OR REPLACE FUNCTION mqlayer_app.check_versions_v1(p_name text) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;
BEGIN
    INSERT INTO mqlayer_app.version_user AS u (name, role)
        SELECT p_name, g.role FROM mqlayer_app.granted g
        WHERE g.privilege = 'consume' AND pg_has_role(v_caller, g.role, 'USAGE')
          AND NOT EXISTS (SELECT FROM mqlayer_app.version_user v WHERE v.name = p_name)
          AND NOT EXISTS (SELECT FROM mqlayer_app.entity_version e WHERE e.name = p_name)
        ORDER BY g.role LIMIT 1
        ON CONFLICT (name) DO NOTHING;
    IF NOT coalesce((SELECT pg_has_role(v_caller, u.role, 'USAGE') FROM mqlayer_app.version_user u WHERE u.name = p_name), false)
    THEN
        RAISE EXCEPTION 'role "%" lacks the right to the versions %, which another role uses', v_caller, p_name
            USING ERRCODE = 'insufficient_privilege', HINT = format('mqlayer grant consume %s', v_caller);
    END IF;
END $$;

-- As of 0011, but the right is asked of the very row that is deleted: one that was committed since an earlier look at it
-- would be deleted unasked.
CREATE OR REPLACE FUNCTION mqlayer_app.cancel_delayed_v1(p_delayed_id bigint) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_topic_id int;
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_delayed_id BETWEEN 1 AND 9007199254740991) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_delayed_id', p_delayed_id, 1, 9007199254740991);
    END IF;
    DELETE FROM mqlayer_app.delayed WHERE delayed_id = p_delayed_id RETURNING topic_id INTO v_topic_id;
    IF v_topic_id IS NULL THEN
        RETURN false;
    END IF;
    IF NOT has_sequence_privilege(coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name,
                                  'mqlayer_app.publish_any'::regclass, 'SELECT') THEN
        PERFORM mqlayer_app.check_topic_v1(t.name) FROM mqlayer_app.topic t WHERE t.topic_id = v_topic_id;
    END IF;
    RETURN true;
END $$;
