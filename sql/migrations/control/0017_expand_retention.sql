-- How long the archive keeps what a topic published, and what is known of what it does not keep.

ALTER TABLE mqlayer.topic
    -- Days that are older are dropped, once that is so of every topic that has something in them; null: none is.
    ADD COLUMN retention_days int,
    ADD CONSTRAINT topic_retention CHECK (retention_days >= 1);

ALTER TABLE mqlayer_archive.topic
    -- The last batch of a day that was dropped. Earlier ones may be kept, where a snapshot needs them.
    ADD COLUMN dropped_batch bigint NOT NULL DEFAULT 0;

ALTER TABLE mqlayer_archive.outcome_progress
    -- When the last of what is counted in "dropped" was noticed.
    ADD COLUMN dropped_at timestamptz;

-- replayed: the archive gave it to the group, by a replay or backfill.
ALTER TABLE mqlayer_archive.outcome
    DROP CONSTRAINT outcome_word,
    ADD CONSTRAINT outcome_word CHECK (word IN
        ('handled', 'unmatched', 'parked', 'exhausted', 'rejected', 'skipped', 'discarded', 'redriven', 'replayed'));

-- Days go one by one, and not always the oldest first: one that a snapshot needs stays before others that are gone. Of what
-- was dropped since the transaction first looked only the tables are gone for its eyes.
CREATE OR REPLACE FUNCTION mqlayer_archive.batches_v1(p_topic int, p_after bigint) RETURNS bigint LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer_archive AS $$
DECLARE
    v_last    bigint;
    v_dropped bigint;
    v_kept    bigint;
BEGIN
    LOCK TABLE record, outcome IN ACCESS SHARE MODE;
    SELECT t.batch, greatest(t.dropped_batch, (
               SELECT max(d.last_batch) FROM day d WHERE d.topic_id = p_topic
               AND to_regclass('mqlayer_archive.record_' || to_char(d.day, 'YYYYMMDD')) IS NULL))
        INTO v_last, v_dropped FROM topic t WHERE t.topic_id = p_topic;
    v_kept := (SELECT min(d.first_batch) FROM day d WHERE d.topic_id = p_topic AND d.last_batch > v_dropped);
    IF p_after < v_last AND (p_after < v_dropped OR p_after + 1 < coalesce(v_kept, v_last + 1)) THEN
        RAISE EXCEPTION 'batches up to % of topic % were dropped from the archive, after % some that were not read',
            greatest(v_dropped, coalesce(v_kept, v_last + 1) - 1), p_topic, p_after
            USING ERRCODE = 'MQ008', HINT = 'begin a new stream, with a new checkpoint';
    END IF;
    RETURN v_last;
END $$;
