-- Readers of a snapshot ask for it first: what was dropped must not look like a snapshot without records.
CREATE FUNCTION mqlayer_archive.snapshot_v1(p_snapshot int) RETURNS int LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, mqlayer_archive AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM snapshot s WHERE s.snapshot_id = p_snapshot) THEN
        RAISE EXCEPTION 'snapshot % was dropped', p_snapshot
            USING ERRCODE = 'MQ005', HINT = 'create one: mqlayer snapshot create NAME';
    END IF;
    RETURN p_snapshot;
END $$;
