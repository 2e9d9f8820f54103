-- How much of a group may wait in Postgres, what is there, what was done about failures, and which parked keys operators
-- changed. Counted by triggers, so that whoever parks and takes out counts, also members of the time before.

ALTER TABLE mqlayer.consumer_group
    -- Parked keys of a partition at most.
    ADD COLUMN parked_keys_limit int NOT NULL DEFAULT 10000,
    -- Messages and bytes (of bodies, keys and headers) that are parked of the whole group, and of one key. Beyond these
    -- what would be parked waits in the stream.
    ADD COLUMN parked_messages_limit bigint NOT NULL DEFAULT 10000000,
    ADD COLUMN parked_bytes_limit    bigint NOT NULL DEFAULT 10737418240,
    ADD COLUMN key_messages_limit    bigint NOT NULL DEFAULT 2000000,
    ADD COLUMN key_bytes_limit       bigint NOT NULL DEFAULT 2147483648,
    ADD CONSTRAINT consumer_group_parking_limits CHECK (
        parked_keys_limit > 0 AND parked_messages_limit > 0 AND parked_bytes_limit > 0 AND key_messages_limit > 0
        AND key_bytes_limit > 0);

ALTER TABLE mqlayer.parked_key
    -- What waits in it; 0 for a message that stands alone.
    ADD COLUMN messages bigint NOT NULL DEFAULT 0,
    ADD COLUMN bytes    bigint NOT NULL DEFAULT 0,
    -- Released while its owner had it in hand: what that says of its failed head counts for nothing.
    ADD COLUMN released boolean NOT NULL DEFAULT false;

ALTER TABLE mqlayer.parked_message
    -- Failed attempts from before it was parked, where that was behind others.
    ADD COLUMN attempts int NOT NULL DEFAULT 0;

-- What is parked of a group: the sum over its rows. A connection adds to the row of its own slot, so that members do not
-- wait for each other; a single one may be below 0.
CREATE TABLE mqlayer.parked_total (
    group_id int NOT NULL REFERENCES mqlayer.consumer_group,
    slot     smallint NOT NULL,
    messages bigint NOT NULL,
    bytes    bigint NOT NULL,
    CONSTRAINT parked_total_key PRIMARY KEY (group_id, slot)
);

-- The rows of its keys are held by whoever changes messages of several, in order; its slot comes last.
CREATE FUNCTION mqlayer.parked_count_v1() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    sign CONSTANT int := CASE TG_OP WHEN 'INSERT' THEN 1 ELSE -1 END;
BEGIN
    UPDATE mqlayer.parked_key k SET messages = k.messages + sign * c.messages, bytes = k.bytes + sign * c.bytes
    FROM (SELECT group_id, lp, name, count(*) AS messages,
                 sum(octet_length(body) + octet_length(key) + octet_length(m)) AS bytes
          FROM changed WHERE substr(name, 1, 1) <> '\xff'::bytea GROUP BY group_id, lp, name) AS c
    WHERE k.group_id = c.group_id AND k.lp = c.lp AND k.name = c.name;
    INSERT INTO mqlayer.parked_total AS t (group_id, slot, messages, bytes)
    SELECT group_id, pg_backend_pid() % 256, sign * count(*),
           sign * sum(octet_length(body) + octet_length(key) + octet_length(m))
    FROM changed GROUP BY group_id
    ON CONFLICT (group_id, slot) DO UPDATE
    SET messages = t.messages + excluded.messages, bytes = t.bytes + excluded.bytes;
    RETURN NULL;
END $$;

CREATE TRIGGER parked_message_in AFTER INSERT ON mqlayer.parked_message REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION mqlayer.parked_count_v1();
CREATE TRIGGER parked_message_out AFTER DELETE ON mqlayer.parked_message REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION mqlayer.parked_count_v1();

-- What is there by now: nobody adds to it since the triggers were made.
INSERT INTO mqlayer.parked_total (group_id, slot, messages, bytes)
SELECT group_id, 0, count(*), sum(octet_length(body) + octet_length(key) + octet_length(m))
FROM mqlayer.parked_message GROUP BY group_id;
UPDATE mqlayer.parked_key k SET messages = c.messages, bytes = c.bytes
FROM (SELECT group_id, lp, name, count(*) AS messages,
             sum(octet_length(body) + octet_length(key) + octet_length(m)) AS bytes
      FROM mqlayer.parked_message WHERE substr(name, 1, 1) <> '\xff'::bytea GROUP BY group_id, lp, name) AS c
WHERE k.group_id = c.group_id AND k.lp = c.lp AND k.name = c.name;

-- How often what happened to messages and keys that fail, ever: see mqlayer/events.py.
CREATE TABLE mqlayer.failure_count (
    group_id     int NOT NULL REFERENCES mqlayer.consumer_group,
    -- Its owner alone counts here, so that members do not wait for each other; 0: operators and jobs, under the group's
    -- lock.
    partition_id int NOT NULL,
    event        text NOT NULL,
    count        bigint NOT NULL,
    last_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT failure_count_key PRIMARY KEY (group_id, partition_id, event)
);

-- Which parked keys the last acts of operators and scans changed, by the number that consumer_group.parking had then.
-- Members look at these, and at all where a number is missing here.
CREATE TABLE mqlayer.parking_change (
    group_id int NOT NULL REFERENCES mqlayer.consumer_group,
    number   bigint NOT NULL,
    -- -1: any.
    lp       smallint NOT NULL,
    name     bytea NOT NULL,
    CONSTRAINT parking_change_key PRIMARY KEY (group_id, number, lp, name)
);

ALTER TABLE mqlayer.redrive
    -- Why it waits, where that is not for its rate.
    ADD COLUMN waits text;
