-- Before the migrations: the owner of the schemas, a role that nobody logs in as and that is no superuser. Its name is in
-- the setting mqlayer.owner; empty: the one that the schema in mqlayer.schema has, if that is no superuser's, else
-- mqlayer_owner. All that is there already is handed over to it. Repeated, it does nothing.
DO $do$
DECLARE
    v_schemas text[] := CASE current_setting('mqlayer.schema') WHEN 'mqlayer' THEN ARRAY['mqlayer', 'mqlayer_archive']
                             ELSE ARRAY[current_setting('mqlayer.schema')] END;
    v_owner text := current_setting('mqlayer.owner');
    v_made boolean := false;
    v_one record;
BEGIN
    IF current_setting('server_encoding') <> 'UTF8' THEN
        RAISE EXCEPTION 'server_encoding is %', current_setting('server_encoding') USING ERRCODE = 'MQ010',
            HINT = 'make the database with CREATE DATABASE name ENCODING ''UTF8'' TEMPLATE template0';
    END IF;
    IF v_owner = '' THEN
        v_owner := coalesce((SELECT r.rolname FROM pg_catalog.pg_namespace n
                             JOIN pg_catalog.pg_roles r ON r.oid = n.nspowner
                             WHERE n.nspname = v_schemas[1] AND NOT r.rolsuper), 'mqlayer_owner');
        PERFORM set_config('mqlayer.owner', v_owner, false);
    END IF;
    IF NOT EXISTS (SELECT FROM pg_catalog.pg_roles WHERE rolname = v_owner) THEN
        BEGIN
            EXECUTE format('CREATE ROLE %I NOLOGIN', v_owner);
            v_made := true;
        EXCEPTION
            -- Somebody else makes it, for another database of this server.
            WHEN duplicate_object OR unique_violation THEN NULL;
            WHEN insufficient_privilege THEN
                RAISE EXCEPTION 'the role % is not there, and % may not make it', v_owner, current_user
                    USING ERRCODE = 'MQ011', HINT = format(
                        'have a role with CREATEROLE run: CREATE ROLE %1$I NOLOGIN; GRANT %1$I TO %2$I; '
                        'or name a role that is there: mqlayer migrate --owner ROLE', v_owner, current_user);
        END;
    END IF;
    IF (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = v_owner) THEN
        RAISE EXCEPTION 'the role % is a superuser', v_owner USING ERRCODE = 'MQ011',
            HINT = 'an owner needs no more than its schemas: mqlayer migrate --owner ROLE';
    END IF;
    -- Of a version from 16 on, who makes a role may grant it, and is no member before.
    IF v_made AND NOT (SELECT rolsuper FROM pg_catalog.pg_roles WHERE rolname = current_user) THEN
        EXECUTE format('GRANT %I TO %I', v_owner, current_user);
    END IF;
    IF NOT pg_has_role(current_user, v_owner, 'MEMBER') THEN
        RAISE EXCEPTION '% is no member of the role %', current_user, v_owner USING ERRCODE = 'MQ011',
            HINT = format('have an administrator run: GRANT %I TO %I', v_owner, current_user);
    END IF;
    IF NOT has_database_privilege(v_owner, current_database(), 'CREATE')
       AND NOT coalesce((SELECT bool_and(n.nspowner = v_owner::regrole) AND count(*) = cardinality(v_schemas)
                         FROM pg_catalog.pg_namespace n WHERE n.nspname = ANY(v_schemas)), false) THEN
        BEGIN
            EXECUTE format('GRANT CREATE ON DATABASE %I TO %I', current_database(), v_owner);
        EXCEPTION WHEN insufficient_privilege THEN NULL;
        END;
        -- Without the right to grant it, Postgres only warns.
        IF NOT has_database_privilege(v_owner, current_database(), 'CREATE') THEN
            RAISE EXCEPTION 'the role % may not create schemas in the database %', v_owner, current_database()
                USING ERRCODE = 'MQ011', HINT = format(
                    'have the owner of the database run: GRANT CREATE ON DATABASE %I TO %I', current_database(), v_owner);
        END IF;
    END IF;
    FOR v_one IN
        SELECT format('SCHEMA %I', n.nspname) AS object, 0 AS position FROM pg_catalog.pg_namespace n
        WHERE n.nspname = ANY(v_schemas) AND n.nspowner <> v_owner::regrole
        UNION ALL
        SELECT format('%s %I.%I', CASE c.relkind WHEN 'v' THEN 'VIEW' WHEN 'S' THEN 'SEQUENCE' ELSE 'TABLE' END,
                      n.nspname, c.relname), 1
        FROM pg_catalog.pg_class c JOIN pg_catalog.pg_namespace n ON n.oid = c.relnamespace
        WHERE n.nspname = ANY(v_schemas) AND c.relowner <> v_owner::regrole AND c.relkind IN ('r', 'p', 'v', 'S')
          -- A sequence of a column goes with its table.
          AND NOT (c.relkind = 'S' AND EXISTS (SELECT FROM pg_catalog.pg_depend d
                   WHERE d.classid = 'pg_catalog.pg_class'::regclass AND d.objid = c.oid AND d.deptype IN ('a', 'i')))
        UNION ALL
        SELECT format('FUNCTION %s', p.oid::regprocedure), 2
        FROM pg_catalog.pg_proc p JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname = ANY(v_schemas) AND p.proowner <> v_owner::regrole
        ORDER BY 2, 1
    LOOP
        EXECUTE format('ALTER %s OWNER TO %I', v_one.object, v_owner);
    END LOOP;
END $do$;
