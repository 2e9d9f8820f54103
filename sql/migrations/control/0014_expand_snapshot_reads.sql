-- Readers of a snapshot ask for it first, in the transaction that reads: what was dropped must not look like a snapshot
-- without records. From here on nobody drops a day under them. What was dropped since the transaction first looked is
-- still there for its eyes, but for the tables.
CREATE FUNCTION mqlayer_archive.snapshot_v1(p_snapshot int) RETURNS int LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer_archive AS $$
BEGIN
    LOCK TABLE record, outcome IN ACCESS SHARE MODE;
    IF NOT EXISTS (SELECT FROM snapshot s WHERE s.snapshot_id = p_snapshot)
       OR EXISTS (SELECT FROM snapshot_topic p JOIN day d USING (topic_id)
                  WHERE p.snapshot_id = p_snapshot AND d.first_batch <= p.batch
                    AND to_regclass('mqlayer_archive.record_' || to_char(d.day, 'YYYYMMDD')) IS NULL) THEN
        RAISE EXCEPTION 'snapshot % was dropped', p_snapshot
            USING ERRCODE = 'MQ007', HINT = 'create one: mqlayer snapshot create NAME';
    END IF;
    RETURN p_snapshot;
END $$;

-- Readers of a stream ask that nothing they did not read was dropped, nor will be under them, and are told where the topic
-- is.
CREATE FUNCTION mqlayer_archive.batches_v1(p_topic int, p_after bigint) RETURNS bigint LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer_archive AS $$
DECLARE
    v_last bigint := (SELECT t.batch FROM topic t WHERE t.topic_id = p_topic);
    v_kept bigint;
BEGIN
    LOCK TABLE record, outcome IN ACCESS SHARE MODE;
    -- The first batch of the last days without a hole: one that a snapshot needs may be left in front of dropped ones.
    v_kept := (SELECT max(k.first_batch)
               FROM (SELECT d.first_batch, max(d.last_batch) OVER (ORDER BY d.first_batch ROWS BETWEEN UNBOUNDED PRECEDING
                                AND 1 PRECEDING) AS before
                     FROM day d WHERE d.topic_id = p_topic
                       AND to_regclass('mqlayer_archive.record_' || to_char(d.day, 'YYYYMMDD')) IS NOT NULL) k
               WHERE k.before IS NULL OR k.before < k.first_batch - 1);
    IF p_after < v_last AND p_after + 1 < coalesce(v_kept, v_last + 1) THEN
        RAISE EXCEPTION 'batches between % and % of topic % were dropped from the archive', p_after,
            coalesce(v_kept, v_last + 1), p_topic
            USING ERRCODE = 'MQ008', HINT = 'begin a new stream, with a new checkpoint';
    END IF;
    RETURN v_last;
END $$;

-- What a stream of the archive reads next, as record_read does for records; what is asked of one topic among many.
CREATE INDEX outcome_by_batch ON mqlayer_archive.outcome (topic_id, batch);

-- The cut has all that was archived of the topic up to the batch, in the days that were kept then: whoever reads it need not
-- look it up for each record. Null: not known.
ALTER TABLE mqlayer_archive.snapshot_topic ADD COLUMN whole boolean;
