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

-- Days go one by one, and not always the oldest first: one that a snapshot needs stays before others that are gone.
CREATE OR REPLACE FUNCTION mqlayer_archive.batches_v1(p_topic int, p_after bigint) RETURNS bigint LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, mqlayer_archive AS $$
DECLARE
    v_last    bigint;
    v_dropped bigint;
    v_kept    bigint := (SELECT min(d.first_batch) FROM day d WHERE d.topic_id = p_topic);
BEGIN
    SELECT t.batch, greatest(t.dropped_batch, coalesce(v_kept, t.batch + 1) - 1) INTO v_last, v_dropped
    FROM topic t WHERE t.topic_id = p_topic;
    IF p_after < least(v_last, v_dropped) THEN
        RAISE EXCEPTION 'batches up to % of topic % were dropped from the archive, after % some that were not read',
            v_dropped, p_topic, p_after
            USING ERRCODE = 'MQ008', HINT = 'begin a new stream, with a new checkpoint';
    END IF;
    RETURN v_last;
END $$;
