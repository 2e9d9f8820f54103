-- Readers of a snapshot ask for it first: what was dropped must not look like a snapshot without records.
CREATE FUNCTION mqlayer_archive.snapshot_v1(p_snapshot int) RETURNS int LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, mqlayer_archive AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM snapshot s WHERE s.snapshot_id = p_snapshot) THEN
        RAISE EXCEPTION 'snapshot % was dropped', p_snapshot
            USING ERRCODE = 'MQ007', HINT = 'create one: mqlayer snapshot create NAME';
    END IF;
    RETURN p_snapshot;
END $$;

-- Readers of a stream ask that nothing they did not read was dropped, and are told where the topic is.
CREATE FUNCTION mqlayer_archive.batches_v1(p_topic int, p_after bigint) RETURNS bigint LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, mqlayer_archive AS $$
DECLARE
    v_last bigint := (SELECT t.batch FROM topic t WHERE t.topic_id = p_topic);
    v_kept bigint := (SELECT min(d.first_batch) FROM day d WHERE d.topic_id = p_topic);
BEGIN
    IF p_after < v_last AND p_after + 1 < coalesce(v_kept, v_last + 1) THEN
        RAISE EXCEPTION 'batches % to % of topic % were dropped from the archive', p_after + 1,
            coalesce(v_kept, v_last + 1) - 1, p_topic
            USING ERRCODE = 'MQ008', HINT = 'begin a new stream, with a new checkpoint';
    END IF;
    RETURN v_last;
END $$;

-- What a stream of the archive reads next, as record_read does for records; what is asked of one topic among many.
CREATE INDEX outcome_by_batch ON mqlayer_archive.outcome (topic_id, batch);
