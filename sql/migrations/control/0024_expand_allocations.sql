-- A Postgres that lost commits may have lost the last allocations of its groups: a member that saw them takes the ones
-- of now for older ones, holds nothing, and gives nothing away. Allocations are counted in rows, as seeks are, and leap
-- with the sequences. Otherwise as before.
CREATE OR REPLACE FUNCTION mqlayer.server_replaced_v1(p_facts jsonb) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
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
