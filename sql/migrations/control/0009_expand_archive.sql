-- The archive: what was published and what became of it, kept for as long as an operator wants; snapshots of it. See
-- docs/archive.md. Written by archivers only, one at a time per topic: each of their transactions holds the topic's row
-- to its commit and writes the next batch number beside every row, so what is visible up to a batch never changes.

CREATE SCHEMA IF NOT EXISTS mqlayer_archive;
REVOKE ALL ON SCHEMA mqlayer_archive FROM PUBLIC;

-- Whether records are kept in the archive, and trimmed only once they are there.
ALTER TABLE mqlayer.topic ADD COLUMN archived boolean NOT NULL DEFAULT false;

CREATE TABLE mqlayer_archive.topic (
    topic_id int NOT NULL REFERENCES mqlayer.topic,
    -- The last batch. Counts transactions, not rows.
    batch    bigint NOT NULL DEFAULT 0,
    CONSTRAINT topic_key PRIMARY KEY (topic_id)
);

-- How far each partition is in the archive.
CREATE TABLE mqlayer_archive.progress (
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    topic_id     int NOT NULL REFERENCES mqlayer.topic,
    -- The first offset that is not in the archive.
    upto_offset  bigint NOT NULL,
    -- The partition is sealed and all that came before its command record is in the archive.
    complete     boolean NOT NULL DEFAULT false,
    CONSTRAINT progress_key PRIMARY KEY (partition_id)
);
CREATE INDEX progress_by_topic ON mqlayer_archive.progress (topic_id);

-- The contiguous stretch of seqs that the archive holds per source and LP: first to last, both included. The first grows
-- when retention drops records. Identity makes records unique: a seq up to the last is never archived again.
CREATE TABLE mqlayer_archive.mark (
    topic_id  int NOT NULL REFERENCES mqlayer.topic,
    source    int NOT NULL,
    lp        smallint NOT NULL,
    first_seq bigint NOT NULL,
    last_seq  bigint NOT NULL,
    CONSTRAINT mark_key PRIMARY KEY (topic_id, source, lp)
) WITH (fillfactor = 50);

-- Every record of archived topics, once. Append-only; table partitions by the day of archiving are made ahead and
-- dropped as a whole.
CREATE TABLE mqlayer_archive.record (
    topic_id     int NOT NULL,
    batch        bigint NOT NULL,
    -- The route version that brought its partition into force.
    version      int NOT NULL,
    partition_id int NOT NULL,
    log_offset   bigint NOT NULL,
    source       int NOT NULL,
    lp           smallint NOT NULL,
    seq          bigint NOT NULL,
    -- By the publisher's clock.
    published_at timestamptz NOT NULL,
    archived_at  timestamptz NOT NULL,
    -- The key's UTF-8; null: none.
    key          bytea,
    tags         text[],
    -- A JSON object of strings, without the tags; null: none.
    headers      text,
    body         bytea NOT NULL
) PARTITION BY RANGE (archived_at);

-- What became of records, per group: one row for a stretch of offsets of a partition that has all of it in common. A
-- record that a group handled again after a seek has a row for each time.
CREATE TABLE mqlayer_archive.outcome (
    topic_id     int NOT NULL,
    batch        bigint NOT NULL,
    group_id     int NOT NULL,
    partition_id int NOT NULL,
    first_offset bigint NOT NULL,
    last_offset  bigint NOT NULL,
    -- handled; unmatched: not wanted by the group's tag filter; parked: waits in Postgres since; or how it died:
    -- exhausted, rejected, skipped, discarded; redriven: given back to the group.
    word         text NOT NULL,
    -- Begun attempts, the last one included.
    attempts     int NOT NULL,
    -- When the member that settled it was first given it; null: never handled.
    delivered_at timestamptz,
    settled_at   timestamptz NOT NULL,
    -- A member, a receiver or an operator.
    actor        text NOT NULL,
    -- Of what died: what the handler or operator said, or the last error.
    reason       text,
    archived_at  timestamptz NOT NULL,
    CONSTRAINT outcome_range CHECK (first_offset <= last_offset),
    CONSTRAINT outcome_word CHECK (word IN
        ('handled', 'unmatched', 'parked', 'exhausted', 'rejected', 'skipped', 'discarded', 'redriven'))
) PARTITION BY RANGE (archived_at);

-- A cut through the archive: per topic the last batch and the route version, per source and LP a stretch of seqs. What
-- it covers is committed and never changes; retention spares it.
CREATE TABLE mqlayer_archive.snapshot (
    snapshot_id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL,
    -- Records published later are left out; null: all that the archive held.
    upto_at     timestamptz,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT snapshot_name_unique UNIQUE (name),
    CONSTRAINT snapshot_name_form CHECK (name ~ '^[a-z][a-z0-9_.-]{0,62}$')
);

CREATE TABLE mqlayer_archive.snapshot_topic (
    snapshot_id int NOT NULL REFERENCES mqlayer_archive.snapshot ON DELETE CASCADE,
    topic_id    int NOT NULL REFERENCES mqlayer.topic,
    -- Rows of later batches are not of it.
    batch       bigint NOT NULL,
    -- The route version in force; the lineage up to it is in mqlayer.route and mqlayer.partition, which only grow.
    version     int NOT NULL,
    records     bigint NOT NULL,
    CONSTRAINT snapshot_topic_key PRIMARY KEY (snapshot_id, topic_id)
);

CREATE TABLE mqlayer_archive.cut (
    snapshot_id int NOT NULL REFERENCES mqlayer_archive.snapshot ON DELETE CASCADE,
    topic_id    int NOT NULL,
    source      int NOT NULL,
    lp          smallint NOT NULL,
    first_seq   bigint NOT NULL,
    last_seq    bigint NOT NULL,
    CONSTRAINT cut_key PRIMARY KEY (snapshot_id, topic_id, source, lp)
);
