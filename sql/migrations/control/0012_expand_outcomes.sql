-- What becomes of messages of archived topics, on its way into the archive (docs/archive.md, "Outcomes").

-- What comes after what, of one offset: an act in Postgres has the last epoch that was given out by then, a settlement on a
-- node the epoch in force there. Whatever comes again on a node after an act has a higher epoch: of the seek, or of the
-- arming, that brought it back. Clocks say nothing of this: a node's and the database's are two.
ALTER TABLE mqlayer_archive.outcome
    ADD COLUMN epoch bigint NOT NULL,
    -- Within an epoch; acts come after settlements.
    ADD COLUMN place bigint NOT NULL;
CREATE INDEX outcome_by_offset ON mqlayer_archive.outcome (group_id, partition_id, first_offset);

-- What owners and operators did with messages that wait in Postgres, or left their group, in the transaction that did it;
-- until an archiver fetches it.
CREATE TABLE mqlayer_archive.outcome_queue (
    -- Rises with what is done to one message: whoever does it holds what the one before committed.
    place        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     int NOT NULL,
    group_id     int NOT NULL,
    partition_id int NOT NULL,
    log_offset   bigint NOT NULL,
    word         text NOT NULL,
    attempts     int NOT NULL,
    delivered_at timestamptz,
    settled_at   timestamptz NOT NULL DEFAULT statement_timestamp(),
    actor        text NOT NULL,
    reason       text,
    epoch        bigint NOT NULL DEFAULT coalesce(pg_sequence_last_value('mqlayer.epoch'), 0)
);
CREATE INDEX outcome_queue_by_topic ON mqlayer_archive.outcome_queue (topic_id, place);

-- Up to where the entries of a partition and group on its node are in the archive. An entry's place is never given again, so
-- what is not above it was fetched before, also on a node that fell back.
CREATE TABLE mqlayer_archive.outcome_progress (
    group_id     int NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    epoch        bigint NOT NULL,
    place        bigint NOT NULL,
    -- How many offsets the node dropped for lack of an archiver: what became of them is in no row.
    dropped      bigint NOT NULL DEFAULT 0,
    CONSTRAINT outcome_progress_key PRIMARY KEY (group_id, partition_id)
) WITH (fillfactor = 50);

-- All failed attempts of a parked message: those of its key begin anew when an operator releases it.
ALTER TABLE mqlayer.parked_message ADD COLUMN tried int NOT NULL DEFAULT 0;

-- What became of each offset in the end, per group: of a topic, in the batches up to one, or in all.
CREATE FUNCTION mqlayer_archive.final_outcomes_v1(topic text, upto_batch bigint DEFAULT NULL)
RETURNS TABLE (group_name text, partition_id int, log_offset bigint, word text, attempts int, delivered_at timestamptz,
               settled_at timestamptz, actor text, reason text)
LANGUAGE sql STABLE
AS $$
    SELECT DISTINCT ON (g.name, o.partition_id, at.log_offset)
           g.name, o.partition_id, at.log_offset, o.word, o.attempts, o.delivered_at, o.settled_at, o.actor, o.reason
    FROM mqlayer.topic t
    JOIN mqlayer_archive.outcome o ON o.topic_id = t.topic_id
    JOIN mqlayer.consumer_group g ON g.group_id = o.group_id
    CROSS JOIN LATERAL generate_series(o.first_offset, o.last_offset) AS at (log_offset)
    WHERE t.name = final_outcomes_v1.topic AND (upto_batch IS NULL OR o.batch <= upto_batch)
    ORDER BY g.name, o.partition_id, at.log_offset, o.epoch DESC, o.place DESC
$$;
REVOKE ALL ON FUNCTION mqlayer_archive.final_outcomes_v1(text, bigint) FROM PUBLIC;
