-- Replays and backfills: what the archive holds, given to a group by the job that gives dead messages back to it.

-- What reads go along: batches are in the order of every key. One batch is of one partition, so its entries are one.
CREATE INDEX record_read ON mqlayer_archive.record (topic_id, batch, partition_id);

ALTER TABLE mqlayer.redrive
    -- dead: dead messages of the group; replay: of the archive, what the group has come past; backfill: of the archive,
    -- what lies before the group's start, ahead of its streams.
    ADD COLUMN kind       text NOT NULL DEFAULT 'dead',
    -- Of the archive only, from here on. Later batches are not of it.
    ADD COLUMN upto_batch bigint,
    ADD COLUMN snapshot_id int,
    -- Per partition the first offset that the group comes to by itself; of the others all is behind it.
    ADD COLUMN bounds     jsonb NOT NULL DEFAULT '{}',
    -- Its messages have places before this one; what is parked meanwhile has places behind it.
    ADD COLUMN place      bigint,
    -- Whether newer messages wait until it is over, or may come between.
    ADD COLUMN newer      text,
    -- The only key that it is for; null: any.
    ADD COLUMN name       bytea,
    -- The last record that was looked at, in the order of batches.
    ADD COLUMN at_batch   bigint NOT NULL DEFAULT 0,
    ADD COLUMN at_record  bigint NOT NULL DEFAULT 0,
    -- How many messages had which result.
    ADD COLUMN results    jsonb NOT NULL DEFAULT '{}',
    ADD CONSTRAINT redrive_kind CHECK (kind IN ('dead', 'replay', 'backfill')),
    ADD CONSTRAINT redrive_newer CHECK (newer IN ('wait', 'between')),
    ADD CONSTRAINT redrive_of_archive
        CHECK ((kind = 'dead') = (upto_batch IS NULL) AND (kind = 'dead') = (place IS NULL)
               AND (kind = 'dead') = (newer IS NULL));
-- One at a time: two would give a key's messages to a group across each other.
CREATE UNIQUE INDEX redrive_one_replay ON mqlayer.redrive (group_id) WHERE state = 'running' AND kind <> 'dead';

-- What a replay did not send, but for what its filter or the group's leaves out.
CREATE TABLE mqlayer.replay_result (
    redrive_id bigint NOT NULL REFERENCES mqlayer.redrive,
    lp         smallint NOT NULL,
    source     int NOT NULL,
    seq        bigint NOT NULL,
    -- already: it waits in the group; dead: it is dead there; ahead: the group has yet to come to it by itself.
    result     text NOT NULL,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT replay_result_key PRIMARY KEY (redrive_id, lp, source, seq),
    CONSTRAINT replay_result_word CHECK (result IN ('already', 'dead', 'ahead'))
);

ALTER TABLE mqlayer.parked_message
    -- Which replay or backfill gave it.
    ADD COLUMN replay bigint;
CREATE INDEX parked_message_replay ON mqlayer.parked_message (replay) WHERE replay IS NOT NULL;

ALTER TABLE mqlayer.parked_key
    DROP CONSTRAINT parked_key_cause,
    ADD CONSTRAINT parked_key_cause
        CHECK (cause IN ('retry', 'exhausted', 'rejected', 'paused', 'redriven', 'replayed'));

-- Places get room between them, for what is replayed in front of what is parked. Nobody parks meanwhile, or what was
-- numbered before would come after it.
LOCK TABLE mqlayer.parked_message IN SHARE ROW EXCLUSIVE MODE;
UPDATE mqlayer.parked_message SET place = place * 16777216;
SELECT setval('mqlayer.parked_place', (SELECT last_value FROM mqlayer.parked_place) * 16777216);
ALTER SEQUENCE mqlayer.parked_place INCREMENT BY 16777216;

ALTER TABLE mqlayer.consumer_group
    -- It begins with what the archive holds, and goes on with the streams. Said once, with its start.
    ADD COLUMN from_archive boolean NOT NULL DEFAULT false,
    ADD CONSTRAINT consumer_group_from_archive CHECK (NOT from_archive OR (mode = 'exclusive' AND start <> 'latest'));
