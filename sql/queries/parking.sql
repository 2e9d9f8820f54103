-- name: parking_hold
-- The owner's epoch is in force, and no other comes before this transaction ends.
SELECT epoch FROM mqlayer.assignment
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s AND member_id = %(member_id)s AND epoch = %(epoch)s
FOR SHARE;

-- name: pop_parking_hold
-- The epoch of a partition with ordered pop is in force, and no other receiver parks there before this transaction ends.
SELECT epoch FROM mqlayer.assignment
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s AND member_id IS NULL AND epoch = %(epoch)s
FOR NO KEY UPDATE;

-- name: pop_parked_any
-- Whether a key of a group is parked in a range of LPs.
SELECT EXISTS (SELECT FROM mqlayer.parked_key
               WHERE group_id = %(group_id)s AND lp >= %(lp_from)s::int AND lp < %(lp_to)s::int);

-- name: pop_parked_claim
-- Give out parked keys that are due, each for a time and under a number of its own. One that was given out before and is due
-- again was not settled in its time: its first message failed, unless an operator released the key.
-- A join would run a limited subquery once per row where statistics are late, and claim more each time.
WITH due AS MATERIALIZED (
    SELECT lp, name FROM mqlayer.parked_key
    WHERE group_id = %(group_id)s AND lp >= %(lp_from)s::int AND lp < %(lp_to)s::int AND paused_at IS NULL
      AND due_at <= clock_timestamp()
    ORDER BY due_at LIMIT %(count)s FOR UPDATE SKIP LOCKED
)
UPDATE mqlayer.parked_key k
SET started = nextval('mqlayer.epoch'), started_alone = true, released = false,
    attempts = k.attempts + (k.started IS NOT NULL AND NOT k.released)::int,
    due_at = clock_timestamp() + make_interval(secs => %(visible_s)s)
FROM due
WHERE k.group_id = %(group_id)s AND k.lp = due.lp AND k.name = due.name
RETURNING k.lp, k.name, k.started, k.attempts;

-- name: pop_parked_held
-- A parked key, if it is given out under this number; it stays so until this transaction ends.
SELECT attempts FROM mqlayer.parked_key
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s AND started = %(number)s FOR UPDATE;

-- name: pop_parked_waits
-- Whether a message is parked.
SELECT FROM mqlayer.parked_message
WHERE group_id = %(group_id)s AND lp = %(lp)s AND source = %(source)s AND seq = %(seq)s;

-- name: pop_parked_put
-- A parked key waits, for so many seconds or for an operator, with so many failed attempts of its first message.
UPDATE mqlayer.parked_key
SET started = NULL, started_alone = false, released = false, attempts = %(attempts)s, cause = coalesce(%(cause)s, cause),
    due_at = clock_timestamp() + make_interval(secs => %(wait_s)s)
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s;

-- name: pop_parked_extend
-- A parked key stays given out for so many seconds from now on.
UPDATE mqlayer.parked_key SET due_at = clock_timestamp() + make_interval(secs => %(wait_s)s)
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s AND started = %(number)s RETURNING lp;

-- name: pop_parked_tried
-- A parked message failed once more.
UPDATE mqlayer.parked_message SET tried = tried + 1
WHERE group_id = %(group_id)s AND lp = %(lp)s AND source = %(source)s AND seq = %(seq)s;

-- name: parking_number
-- How often others have acted on parked keys of a group.
SELECT parking FROM mqlayer.consumer_group WHERE group_id = %(group_id)s;

-- name: parking_changes
-- Which parked keys these acts of others changed; where any may be, the LP is -1.
SELECT number, lp, name FROM mqlayer.parking_change
WHERE group_id = %(group_id)s AND number > %(after)s AND number <= %(upto)s;

-- name: parked_keys
-- The keys of a group that are parked in ranges of LPs, and in how many seconds each is tried again.
SELECT s.partition_id, k.lp, k.name, k.cause, k.attempts, k.started, k.started_alone,
       CASE WHEN k.paused_at IS NULL THEN date_part('epoch', k.due_at - clock_timestamp()) END
FROM unnest(%(partitions)s::int[], %(lps_from)s::int[], %(lps_to)s::int[]) AS s (partition_id, lp_from, lp_to)
-- OFFSET keeps this a look-up per range: a join would compare each range with all of the group's keys.
CROSS JOIN LATERAL (SELECT * FROM mqlayer.parked_key k
                    WHERE k.group_id = %(group_id)s AND k.lp >= s.lp_from AND k.lp < s.lp_to OFFSET 0) AS k
ORDER BY k.lp, k.name;

-- name: parked_keys_named
-- The same of these keys.
SELECT k.lp, k.name, k.cause, k.attempts, k.started, k.started_alone,
       CASE WHEN k.paused_at IS NULL THEN date_part('epoch', k.due_at - clock_timestamp()) END
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS given (lp, name)
-- As in parked_keys: a join would read all of the group's keys where statistics are late.
CROSS JOIN LATERAL (SELECT * FROM mqlayer.parked_key k
                    WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name OFFSET 0) AS k;

-- name: parked_unsettled
-- What is parked of partitions from an offset of each on: its owner may have died before that was settled. What a replay
-- gave was settled before; that its offset is given out again is for its node, which fell back.
SELECT s.partition_id, m.lp, m.name, m.log_offset
FROM unnest(%(partitions)s::int[], %(committed)s::bigint[]) AS s (partition_id, committed)
-- As in parked_keys: a join would read all that the group has parked.
CROSS JOIN LATERAL (SELECT m.lp, m.name, m.log_offset FROM mqlayer.parked_message m
                    WHERE m.group_id = %(group_id)s AND m.partition_id = s.partition_id AND m.log_offset >= s.committed
                      AND m.replay IS NULL OFFSET 0) AS m;

-- name: dead_unsettled
-- What is dead of partitions from an offset of each on: it is passed over. Also what was given back since the group was
-- last sent elsewhere: it is parked, or was handled from there. And what is adrift in their LPs, for as long as its outbox
-- may send it again.
SELECT s.partition_id, d.source, d.lp, d.seq
FROM unnest(%(partitions)s::int[], %(committed)s::bigint[], %(lps_from)s::int[], %(lps_to)s::int[])
     AS s (partition_id, committed, lp_from, lp_to)
JOIN mqlayer.consumer_group g ON g.group_id = %(group_id)s
CROSS JOIN LATERAL (
    SELECT m.* FROM mqlayer.dead_message m
    WHERE m.group_id = g.group_id AND m.partition_id = s.partition_id AND m.log_offset >= s.committed
    UNION ALL
    SELECT m.* FROM mqlayer.dead_message m
    WHERE m.group_id = g.group_id AND m.lp >= s.lp_from AND m.lp < s.lp_to AND m.log_lost
      AND m.died_at > clock_timestamp() - interval '7 days') AS d
WHERE d.redriven_at IS NULL OR d.redriven_seek = g.seek;

-- name: dead_named
-- Which of these messages are dead, or were given back since the group was last sent elsewhere.
SELECT d.source, d.lp, d.seq FROM mqlayer.dead_message d JOIN mqlayer.consumer_group g USING (group_id)
JOIN unnest(%(lps)s::smallint[], %(sources)s::bigint[], %(seqs)s::bigint[]) AS given (lp, source, seq)
    USING (lp, source, seq)
WHERE d.group_id = %(group_id)s AND (d.redriven_at IS NULL OR d.redriven_seek = g.seek);

-- name: parked_keys_put
-- Park keys; those that are parked stay as they are. Which ones were not.
INSERT INTO mqlayer.parked_key (group_id, lp, name, cause, due_at, attempts)
SELECT %(group_id)s, lp, name, cause, clock_timestamp() + make_interval(secs => wait_s), attempts
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[], %(causes)s::text[], %(waits_s)s::double precision[],
            %(attempts)s::int[]) AS given (lp, name, cause, wait_s, attempts)
ON CONFLICT (group_id, lp, name) DO NOTHING
RETURNING lp, name;

-- name: parked_keys_hold
-- Hold what a page changes of parked keys, in the order in which operators take several: in any other one the two would
-- wait for each other.
SELECT FROM (SELECT DISTINCT lp, name FROM unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS u (lp, name)
             ORDER BY lp, name OFFSET 0) AS given
-- A look-up per key, in that order: a join would read all of the group's keys where statistics are late.
CROSS JOIN LATERAL (SELECT FROM mqlayer.parked_key k
                    WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name FOR UPDATE) AS k;

-- name: parked_keys_there
-- Which of these keys are parked, and what waits in each; they stay so until this transaction ends.
SELECT k.lp, k.name, k.messages, k.bytes
FROM (SELECT DISTINCT lp, name FROM unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS u (lp, name)
      ORDER BY lp, name OFFSET 0) AS given
-- As in parked_keys_hold.
CROSS JOIN LATERAL (SELECT k.lp, k.name, k.messages, k.bytes FROM mqlayer.parked_key k
                    WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name FOR KEY SHARE) AS k;

-- name: parked_room
-- What a group has parked, and how much of it and of one key may be.
SELECT coalesce(t.messages, 0), coalesce(t.bytes, 0), g.parked_messages_limit, g.parked_bytes_limit, g.key_messages_limit,
       g.key_bytes_limit, g.parked_keys_limit
FROM mqlayer.consumer_group g
CROSS JOIN LATERAL (SELECT sum(messages)::bigint AS messages, sum(bytes)::bigint AS bytes
                    FROM mqlayer.parked_total WHERE group_id = g.group_id) AS t
WHERE g.group_id = %(group_id)s;

-- name: parked_in_front
-- Which of these messages are parked, or have a later one parked in their key: of their source, or further on in the log.
SELECT given.source, given.lp, given.seq
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[], %(sources)s::bigint[], %(seqs)s::bigint[], %(offsets)s::bigint[])
     AS given (lp, name, source, seq, log_offset)
-- Ordered as the indexes are: without that a look without anything behind went through all of the key.
WHERE coalesce(
    (SELECT true FROM mqlayer.parked_message m
     WHERE m.group_id = %(group_id)s AND m.lp = given.lp AND m.name = given.name
       AND (m.partition_id, m.log_offset) > (%(partition_id)s::int, given.log_offset)
     ORDER BY m.partition_id, m.log_offset LIMIT 1),
    (SELECT true FROM mqlayer.parked_message m
     WHERE m.group_id = %(group_id)s AND m.lp = given.lp AND m.name = given.name AND m.source = given.source
       AND m.seq >= given.seq
     ORDER BY m.seq LIMIT 1), false);

-- name: parked_messages_put
-- Park messages of parked keys, in order. One that comes again goes in front of what is later of its source, or lies behind
-- it in the log and was not redriven; behind what is earlier of its source, whatever else. What is there itself stays.
WITH put AS (
    INSERT INTO mqlayer.parked_message
        (group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body, attempts, tried)
    SELECT %(group_id)s, lp, name, source, seq,
           CASE WHEN ceiling IS NULL THEN nextval('mqlayer.parked_position')
                ELSE greatest(
                    least(greatest(floor.position, ceiling - 16777216) + nth, ceiling - 1),
                    (SELECT o.position FROM mqlayer.parked_message o
                     WHERE o.group_id = %(group_id)s AND o.lp = line.lp AND o.source = line.source
                       AND o.seq < line.seq AND o.name = line.name ORDER BY o.seq DESC LIMIT 1)) END,
           %(partition_id)s, log_offset, key, m, body, attempts, tried
    FROM (SELECT *, row_number() OVER (PARTITION BY lp, name, ceiling ORDER BY n) AS nth
          FROM (SELECT given.*,
                       -- No further on than what follows it here.
                       min(behind.position) OVER (PARTITION BY lp, name ORDER BY n DESC) AS ceiling
                FROM unnest(%(lps)s::smallint[], %(names)s::bytea[], %(sources)s::bigint[], %(seqs)s::bigint[],
                            %(offsets)s::bigint[], %(keys)s::bytea[], %(ms)s::bytea[], %(bodies)s::bytea[],
                            %(attempts)s::int[], %(tried)s::int[])
                     WITH ORDINALITY AS given (lp, name, source, seq, log_offset, key, m, body, attempts, tried, n)
                CROSS JOIN LATERAL (
                    SELECT least(
                        (SELECT o.position FROM mqlayer.parked_message o
                         WHERE o.group_id = %(group_id)s AND o.lp = given.lp AND o.source = given.source
                           AND o.seq > given.seq AND o.name = given.name ORDER BY o.seq LIMIT 1),
                        (SELECT o.position FROM mqlayer.parked_message o
                         WHERE o.group_id = %(group_id)s AND o.lp = given.lp AND o.name = given.name AND NOT o.redriven
                           AND (o.partition_id, o.log_offset) > (%(partition_id)s::int, given.log_offset)
                         ORDER BY o.partition_id, o.log_offset LIMIT 1)) AS position) AS behind) AS each
          ORDER BY n) AS line
    CROSS JOIN LATERAL (
        SELECT coalesce((SELECT o.position FROM mqlayer.parked_message o
                         WHERE o.group_id = %(group_id)s AND o.lp = line.lp AND o.name = line.name AND o.position < line.ceiling
                         ORDER BY o.position DESC LIMIT 1), 0) AS position) AS floor
    ORDER BY n
    ON CONFLICT (group_id, lp, source, seq) DO NOTHING
    RETURNING lp, name, source, seq, group_id, partition_id, log_offset, tried
), told AS (
    INSERT INTO mqlayer_archive.outcome_queue (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor)
    SELECT g.topic_id, p.group_id, p.partition_id, p.log_offset, 'parked', p.tried, %(member_id)s
    FROM put p JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id) WHERE t.archived
)
SELECT lp, name, source, seq FROM put;

-- name: parked_heads_put
-- Where one of these messages is its key's head now, what was counted of the former head is not its own.
UPDATE mqlayer.parked_key k SET attempts = 0, started = NULL, started_alone = false
FROM (SELECT DISTINCT lp, name FROM unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS each(lp, name)) AS given
WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name
  AND (SELECT format('%%s:%%s:%%s', m.source, m.lp, m.seq) FROM mqlayer.parked_message m
       WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name
       ORDER BY m.position, m.seq LIMIT 1) = ANY(%(identities)s::text[]);

-- name: parked_messages_end
-- Messages of parked keys that are handled, or dead.
SELECT mqlayer.parked_messages_end_v2(%(group_id)s, %(lps)s::smallint[], %(names)s::bytea[], %(sources)s::bigint[],
                                      %(seqs)s::bigint[], %(handled)s::boolean[], %(given_s)s, %(member_id)s);

-- name: parked_key_put
-- How it goes on with a parked key whose message failed: why it waits, for how long, and how often that one failed; not
-- where another one took its place at the head meanwhile. Released since it was started, it is due with all its attempts.
WITH put AS (
    UPDATE mqlayer.parked_key k
    SET cause = %(cause)s, attempts = CASE WHEN k.released THEN 0 ELSE %(attempts)s END,
        due_at = CASE WHEN k.released THEN clock_timestamp()
                      ELSE clock_timestamp() + make_interval(secs => %(wait_s)s) END,
        started = NULL, started_alone = false, released = false
    FROM (SELECT released FROM mqlayer.parked_key
          WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s FOR UPDATE) AS before
    WHERE k.group_id = %(group_id)s AND k.lp = %(lp)s AND k.name = %(name)s
      AND (%(source)s::bigint, %(seq)s::bigint) = (
          SELECT m.source, m.seq FROM mqlayer.parked_message m
          WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name ORDER BY m.position, m.seq LIMIT 1)
    RETURNING before.released, k.group_id, k.lp
), counted AS (
    UPDATE mqlayer.parked_message m SET tried = m.tried + %(tried)s::int FROM put
    WHERE m.group_id = put.group_id AND m.lp = put.lp AND m.source = %(source)s::bigint AND m.seq = %(seq)s::bigint
      AND %(tried)s::int > 0
)
SELECT released FROM put;

-- name: parked_key_start
-- Messages of a parked key are started under an epoch: several, or its first one alone and to blame if nobody answers.
UPDATE mqlayer.parked_key SET started = %(epoch)s, started_alone = %(alone)s, attempts = %(attempts)s,
    released = false
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s;

-- name: parked_key_reschedule
-- Nothing of a parked key is started any more. Attempts are those of its head, so another one has none.
UPDATE mqlayer.parked_key
SET started = NULL, started_alone = false, released = false, attempts = CASE WHEN %(ended)s THEN 0 ELSE attempts END
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s;

-- name: parked_key_end
-- A key is not parked any more, if nothing of it waits, nobody paused it, and no replay is for it alone.
SELECT * FROM mqlayer.parked_key_end_v1(%(group_id)s, %(lp)s::smallint, %(name)s::bytea);

-- name: parked_next
-- The first messages of a parked key, up to so many and so many bytes of bodies; one at the least. Not beyond one of a
-- partition that the group has yet to come to: a group that was sent back gets what lies before it first. Nor, while a
-- replay runs that has newer messages wait, what is behind all that it gave so far: the next ones may come before it.
SELECT log_offset, m, key, body, redriven, replay, attempts
FROM (SELECT *, sum(octet_length(body)) OVER (ORDER BY position, seq) - octet_length(body) AS before,
             bool_and(come_to) OVER (ORDER BY position, seq) AS next
      FROM (SELECT m.position, m.seq, m.log_offset, m.m, m.key, m.body, m.redriven, m.attempts, m.replay,
                   (m.partition_id = %(partition_id)s OR p.state = 'deleted' OR EXISTS (
                       SELECT FROM mqlayer.drained d
                       WHERE d.group_id = m.group_id AND d.partition_id = m.partition_id))
                   AND NOT EXISTS (
                       SELECT FROM mqlayer.redrive r
                       WHERE r.group_id = m.group_id AND r.state = 'running' AND r.newer = 'wait'
                         AND (r.name IS NULL OR r.name = m.name) AND m.replay IS DISTINCT FROM r.redrive_id
                         AND NOT EXISTS (SELECT FROM mqlayer.parked_message o
                                         WHERE o.group_id = m.group_id AND o.lp = m.lp AND o.name = m.name
                                           AND o.position > m.position AND o.replay = r.redrive_id)) AS come_to
            FROM mqlayer.parked_message m JOIN mqlayer.partition p USING (partition_id)
            WHERE m.group_id = %(group_id)s AND m.lp = %(lp)s AND m.name = %(name)s
            ORDER BY m.position, m.seq LIMIT %(count)s) AS head) AS line
WHERE (before < %(bytes)s OR before = 0) AND next ORDER BY position, seq;

-- name: dead_put
-- Messages that leave the group without their effect, and why.
WITH given AS (
    SELECT * FROM unnest(%(lps)s::smallint[], %(sources)s::bigint[], %(seqs)s::bigint[], %(offsets)s::bigint[],
                         %(keys)s::bytea[], %(ms)s::bytea[], %(bodies)s::bytea[], %(causes)s::text[], %(reasons)s::text[],
                         %(attempts)s::int[], %(tried)s::int[])
         AS u (lp, source, seq, log_offset, key, m, body, cause, reason, attempts, tried)
), put AS (
    INSERT INTO mqlayer.dead_message AS d
        (group_id, lp, source, seq, partition_id, log_offset, key, m, body, cause, reason, attempts, actor)
    SELECT %(group_id)s, lp, source, seq, %(partition_id)s, log_offset, key, m, body, cause, reason, attempts,
           %(member_id)s FROM given
    ON CONFLICT (group_id, lp, source, seq) DO UPDATE
    SET partition_id = excluded.partition_id, log_offset = excluded.log_offset, body = excluded.body,
        cause = excluded.cause, reason = excluded.reason, attempts = excluded.attempts, actor = excluded.actor,
        died_at = excluded.died_at, redriven_at = NULL, redriven_seek = NULL
    WHERE d.redriven_at IS NOT NULL
    RETURNING group_id, lp, source, seq, partition_id, log_offset, body IS NOT NULL AS kept, cause, reason, actor
), told AS (
    INSERT INTO mqlayer_archive.outcome_queue
        (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor, reason)
    SELECT g.topic_id, d.group_id, coalesce(m.partition_id, d.partition_id), d.log_offset, d.cause,
           coalesce(m.tried, 0) + given.tried, d.actor, d.reason
    FROM put d JOIN given USING (lp, source, seq) JOIN mqlayer.consumer_group g USING (group_id)
    JOIN mqlayer.topic t USING (topic_id)
    LEFT JOIN mqlayer.parked_message m USING (group_id, lp, source, seq)
    WHERE t.archived
)
SELECT kept, cause = 'expired' FROM put;

-- name: failed_attempts_put
-- Failed attempts, for people.
INSERT INTO mqlayer.failed_attempt (group_id, lp, source, seq, attempt, member_id, error)
SELECT %(group_id)s, lp, source, seq, attempt, %(member_id)s, error
FROM unnest(%(lps)s::smallint[], %(sources)s::bigint[], %(seqs)s::bigint[], %(attempts)s::int[], %(errors)s::text[])
     AS given (lp, source, seq, attempt, error);

-- name: failure_counts_add
-- Add to the counts of what happened to messages and keys of a group that fail.
INSERT INTO mqlayer.failure_count AS c (group_id, partition_id, event, count)
SELECT %(group_id)s, partition_id, event, count
FROM unnest(%(partitions)s::int[], %(events)s::text[], %(counts)s::bigint[]) AS given (partition_id, event, count)
ORDER BY partition_id, event
ON CONFLICT (group_id, partition_id, event) DO UPDATE
SET count = least(c.count + excluded.count, 9007199254740991), last_at = clock_timestamp();

-- name: large_bodies_referenced
-- Which of these large bodies a parked, dead or archived message names.
SELECT named FROM mqlayer.bodies_named_v1(%(ids)s::text[]) AS named;
