-- Behind each migration: functions look names up in pg_temp last. Left out of a search path it comes first for types and
-- tables, so a caller's temporary domain of the name of a type would run his code with the owner's rights. A function
-- whose body was parsed when it was made, and that says nothing of a path, needs none, and is inlined for that.
DO $do$
DECLARE
    v_one record;
BEGIN
    FOR v_one IN
        SELECT p.oid::regprocedure AS function, n.nspname AS schema FROM pg_catalog.pg_proc p
        JOIN pg_catalog.pg_namespace n ON n.oid = p.pronamespace
        WHERE n.nspname IN ('mqlayer', 'mqlayer_app', 'mqlayer_archive') AND pg_has_role(p.proowner, 'USAGE')
          AND (p.prosqlbody IS NULL OR p.proconfig IS NOT NULL)
          AND NOT coalesce(format('search_path=pg_catalog, %s, pg_temp', n.nspname) = ANY(p.proconfig), false)
    LOOP
        EXECUTE format('ALTER FUNCTION %s SET search_path = pg_catalog, %I, pg_temp', v_one.function, v_one.schema);
    END LOOP;
END $do$;
