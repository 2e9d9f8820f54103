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

-- What a stream of the archive reads next; what is asked of one topic among many.
CREATE INDEX record_by_batch ON mqlayer_archive.record (topic_id, batch);
CREATE INDEX outcome_by_batch ON mqlayer_archive.outcome (topic_id, batch);
