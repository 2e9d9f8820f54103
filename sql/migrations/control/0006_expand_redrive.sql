-- Redrives: dead messages given back to their group, as a job that may be stopped, killed and gone on with.

ALTER TABLE mqlayer.dead_message
    -- How often the group had been sent elsewhere when the message was given back. Until the next time its record in
    -- the stream stands for nothing, whoever reads it: the message is in the group's parked lines, or was handled there.
    ADD COLUMN redriven_seek int;
CREATE INDEX dead_message_stream ON mqlayer.dead_message (group_id, partition_id, log_offset);
-- Key by key, as its messages were published: the order of a redrive.
CREATE INDEX dead_message_line ON mqlayer.dead_message (group_id, lp, key, partition_id, log_offset, dead_id)
    WHERE redriven_at IS NULL;
-- Before which message of its source one that comes again takes its place.
CREATE INDEX parked_message_numbers ON mqlayer.parked_message (group_id, lp, name, source, seq);

CREATE TABLE mqlayer.redrive (
    redrive_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id     int NOT NULL REFERENCES mqlayer.consumer_group,
    -- Which dead messages: see mqlayer/failures/filters.py.
    filter       jsonb NOT NULL,
    -- Later ones are not of it.
    upto_id      bigint NOT NULL,
    -- Messages per second, at most; 0: no limit.
    per_s        double precision NOT NULL,
    actor        text NOT NULL,
    state        text NOT NULL DEFAULT 'running',
    -- The last message that was handled, in the order of dead_message_line.
    at_lp        smallint NOT NULL DEFAULT -1,
    at_key       bytea NOT NULL DEFAULT '',
    at_partition int NOT NULL DEFAULT 0,
    at_offset    bigint NOT NULL DEFAULT 0,
    at_dead_id   bigint NOT NULL DEFAULT 0,
    sent         bigint NOT NULL DEFAULT 0,
    not_sent     bigint NOT NULL DEFAULT 0,
    -- Who works on it, and until when nobody else begins to by himself; by this database's clock, as all times here.
    worker       text,
    lease_until  timestamptz,
    -- Nothing is sent before.
    next_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    CONSTRAINT redrive_state CHECK (state IN ('running', 'done', 'cancelled')),
    CONSTRAINT redrive_rate CHECK (per_s >= 0 AND per_s < 'Infinity'),
    CONSTRAINT redrive_ended CHECK ((state = 'running') = (ended_at IS NULL))
);
CREATE INDEX redrive_running ON mqlayer.redrive (redrive_id) WHERE state = 'running';

-- What a redrive did with each message. sent: given back; already: it lives in the group; no_body: passed over without
-- its body, which can't be sent; gone: no row of it is left.
CREATE TABLE mqlayer.redrive_result (
    redrive_id bigint NOT NULL REFERENCES mqlayer.redrive,
    dead_id    bigint NOT NULL,
    result     text NOT NULL,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT redrive_result_key PRIMARY KEY (redrive_id, dead_id),
    CONSTRAINT redrive_result_word CHECK (result IN ('sent', 'already', 'no_body', 'gone'))
);
