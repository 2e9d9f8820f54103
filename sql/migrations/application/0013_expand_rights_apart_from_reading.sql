-- Who may publish or consume everything has USAGE of a sequence, no longer SELECT: that comes with pg_read_all_data and with
-- what is granted to backups and monitoring, which would publish to all topics where they may to one.
DO $do$
DECLARE
    v_text text;
BEGIN
    FOR v_text IN
        SELECT pg_catalog.pg_get_functiondef(p.oid) FROM pg_catalog.pg_proc p
        WHERE p.pronamespace = 'mqlayer_app'::regnamespace AND p.prosrc ~ 'mqlayer_app\.(publish|consume)_any'
    LOOP
        EXECUTE regexp_replace(v_text, '(mqlayer_app\.(publish|consume)_any''::regclass,\s+)''SELECT''', '\1''USAGE''', 'g');
    END LOOP;
    ASSERT NOT EXISTS (SELECT FROM pg_catalog.pg_proc p WHERE p.pronamespace = 'mqlayer_app'::regnamespace
                       AND p.prosrc ~ '(publish|consume)_any''::regclass,\s+''SELECT''');
    -- `mqlayer migrate` gives USAGE behind this to each role that has the right.
    FOR v_text IN
        SELECT DISTINCT format('REVOKE SELECT ON SEQUENCE %s FROM %s', c.oid::regclass, a.grantee::regrole)
        FROM pg_catalog.pg_class c CROSS JOIN LATERAL pg_catalog.aclexplode(c.relacl) a
        WHERE c.relnamespace = 'mqlayer_app'::regnamespace AND c.relname IN ('publish_any', 'consume_any')
          AND a.privilege_type = 'SELECT' AND a.grantee NOT IN (0, c.relowner)
    LOOP
        EXECUTE v_text;
    END LOOP;
END $do$;
