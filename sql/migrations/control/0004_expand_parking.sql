-- What waits or ended outside of Redis: parked keys with all that follows their failed message, messages that left
-- without an effect, and failed attempts. Every write of an owner is under the epoch in force; see docs/failures.md.

ALTER TABLE mqlayer.consumer_group
    -- Grows with whatever an operator or a scan does to parked keys: members look at them again.
    ADD COLUMN parking bigint NOT NULL DEFAULT 0;

-- A key of a group that waits in Postgres: its messages are handled from there, in order, before anything newer.
CREATE TABLE mqlayer.parked_key (
    group_id  int NOT NULL REFERENCES mqlayer.consumer_group,
    lp        smallint NOT NULL,
    -- The key's UTF-8; of a message that stands alone, \xff and its identity.
    name      bytea NOT NULL,
    -- Why it was parked last: retry, exhausted, rejected, paused, redriven.
    cause     text NOT NULL,
    -- When its head is tried next, by this database's clock; null: when an operator says so.
    due_at    timestamptz,
    -- Failed attempts of its head.
    attempts  int NOT NULL DEFAULT 0,
    -- Under which epoch its head was started, while nobody has said how that ended.
    started   bigint,
    -- Whether it was started alone, so that it is to blame if nobody ever says.
    started_alone boolean NOT NULL DEFAULT false,
    parked_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT parked_key_key PRIMARY KEY (group_id, lp, name),
    CONSTRAINT parked_key_cause CHECK (cause IN ('retry', 'exhausted', 'rejected', 'paused', 'redriven'))
);
CREATE INDEX parked_key_due ON mqlayer.parked_key (due_at) WHERE due_at IS NOT NULL;

-- Grows in the order in which messages are parked.
CREATE SEQUENCE mqlayer.parked_place;

CREATE TABLE mqlayer.parked_message (
    group_id     int NOT NULL,
    lp           smallint NOT NULL,
    name         bytea NOT NULL,
    source       int NOT NULL,
    seq          bigint NOT NULL,
    -- A key's messages are handled by (place, seq). One that comes again takes the place of its source's next one.
    place        bigint NOT NULL,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    log_offset   bigint NOT NULL,
    -- As in a record: key, identity with time and headers, body.
    key          bytea NOT NULL,
    m            bytea NOT NULL,
    body         bytea NOT NULL,
    -- Sent again by an operator: later ones of its key may have had their effects, so the fence takes it by itself.
    redriven     boolean NOT NULL DEFAULT false,
    CONSTRAINT parked_message_key PRIMARY KEY (group_id, lp, source, seq),
    CONSTRAINT parked_message_of_key FOREIGN KEY (group_id, lp, name) REFERENCES mqlayer.parked_key
);
CREATE INDEX parked_message_line ON mqlayer.parked_message (group_id, lp, name, place, seq);
CREATE INDEX parked_message_place ON mqlayer.parked_message (group_id, partition_id, log_offset);

-- A message that left a group without its effect, and why: dead letters, and what was passed over.
CREATE TABLE mqlayer.dead_message (
    dead_id      bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id     int NOT NULL REFERENCES mqlayer.consumer_group,
    lp           smallint NOT NULL,
    source       int NOT NULL,
    seq          bigint NOT NULL,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    log_offset   bigint NOT NULL,
    key          bytea NOT NULL,
    m            bytea NOT NULL,
    -- Null where it was passed over on purpose and can't be sent again.
    body         bytea,
    -- exhausted: its attempts; rejected: by the handler or for a final error; skipped: by the handler or the group's
    -- policy; discarded: by an operator.
    cause        text NOT NULL,
    -- What the handler or the operator said, or the last error: its type, text and place.
    reason       text NOT NULL,
    attempts     int NOT NULL,
    -- Who: a member or an operator.
    actor        text NOT NULL,
    died_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Given back to the group: it lives there again.
    redriven_at  timestamptz,
    CONSTRAINT dead_message_once UNIQUE (group_id, lp, source, seq),
    CONSTRAINT dead_message_cause CHECK (cause IN ('exhausted', 'rejected', 'skipped', 'discarded'))
);
CREATE INDEX dead_message_listed ON mqlayer.dead_message (group_id, died_at) WHERE redriven_at IS NULL;

-- Failed attempts, for people: kept while the message waits or is dead, else for a week.
CREATE TABLE mqlayer.failed_attempt (
    group_id  int NOT NULL REFERENCES mqlayer.consumer_group,
    lp        smallint NOT NULL,
    source    int NOT NULL,
    seq       bigint NOT NULL,
    attempt   int NOT NULL,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    member_id text NOT NULL,
    -- An error's type, text and place, or that nobody answered.
    error     text NOT NULL,
    CONSTRAINT failed_attempt_key PRIMARY KEY (group_id, lp, source, seq, attempt, failed_at)
);
CREATE INDEX failed_attempt_old ON mqlayer.failed_attempt (failed_at);
