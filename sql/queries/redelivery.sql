-- part: parked_name
-- Under which name a dead message m is parked: as mqlayer/domain/parked_names.py has it.
CASE WHEN %(alone)s::boolean OR m.key = '\xff'::bytea
     THEN '\xff'::bytea || convert_to(format('%%s:%%s:%%s', m.source, m.lp, m.seq), 'UTF8')
     ELSE m.key END;

-- part: parked_reachable
-- The partition of a parked key k does not rest for its group.
NOT EXISTS (SELECT FROM mqlayer.partition_pause pp JOIN mqlayer.partition p USING (partition_id)
            WHERE pp.group_id = k.group_id AND k.lp >= p.lp_from AND k.lp < p.lp_to AND p.state <> 'deleted');

-- part: dead_fits
-- What a filter asks of a dead message d; what is null does not narrow.
(%(key)s::bytea IS NULL OR d.key = %(key)s) AND (%(cause)s::text IS NULL OR d.cause = %(cause)s)
  AND (%(since)s::timestamptz IS NULL OR d.died_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR d.died_at < %(until)s)
  AND (%(min_attempts)s::int IS NULL OR d.attempts >= %(min_attempts)s)
  AND (%(error)s::text IS NULL OR strpos(lower(d.reason), lower(%(error)s)) > 0 OR EXISTS (
      SELECT FROM mqlayer.failed_attempt f
      WHERE f.group_id = d.group_id AND f.lp = d.lp AND f.source = d.source AND f.seq = d.seq
        AND strpos(lower(f.error), lower(%(error)s)) > 0));

-- part: parked_fits
-- What a filter asks of a parked key k; what is null does not narrow.
(%(name)s::bytea IS NULL OR k.name = %(name)s) AND (%(cause)s::text IS NULL OR k.cause = %(cause)s)
  AND (%(since)s::timestamptz IS NULL OR k.parked_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR k.parked_at < %(until)s)
  AND (%(min_attempts)s::int IS NULL OR k.attempts >= %(min_attempts)s)
  AND (NOT %(waiting)s::boolean OR k.due_at IS NULL OR k.paused_at IS NOT NULL)
  AND (%(error)s::text IS NULL OR EXISTS (
      -- What made the key wait is at its head: a key may have millions.
      SELECT FROM (SELECT m.group_id, m.lp, m.source, m.seq FROM mqlayer.parked_fact m
                   WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name
                   ORDER BY m.position, m.seq LIMIT 10) AS m
      JOIN mqlayer.failed_attempt f USING (group_id, lp, source, seq)
      WHERE strpos(lower(f.error), lower(%(error)s)) > 0));

-- part: parked_looked
-- The next parked keys in the order of group, LP and name: at most so many are looked at.
SELECT k.* FROM mqlayer.parked_key k
WHERE (k.group_id, k.lp, k.name) > (%(after_group)s::bigint, %(after_lp)s::smallint, %(after_name)s::bytea)
  AND k.group_id <= %(last_group)s::bigint
  AND (%(name)s::bytea IS NULL OR k.lp = %(lp)s::smallint AND k.name = %(name)s AND k.group_id = ANY(%(group_ids)s::bigint[]))
ORDER BY k.group_id, k.lp, k.name LIMIT %(scan)s;

-- part: parked_shown
-- Parked keys of a page with what waits in each.
SELECT p.group_id, t.name, g.name, p.lp, p.name, p.cause, CASE WHEN p.paused_at IS NULL THEN p.due_at END AS due_at,
       CASE WHEN p.paused_at IS NULL THEN extract(epoch FROM p.due_at - clock_timestamp())::float8 END AS due_in_s, p.attempts, p.started IS NOT NULL AS started,
       p.parked_at,
       -- A message that stands alone is not counted in its key.
       CASE WHEN substr(p.name, 1, 1) = '\xff'::bytea THEN (h.seq IS NOT NULL)::int ELSE p.messages END AS messages,
       CASE WHEN substr(p.name, 1, 1) = '\xff'::bytea THEN coalesce(h.bytes, 0) ELSE p.bytes END AS bytes,
       h.source, h.seq, h.key
FROM page p JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN LATERAL (
    SELECT m.source, m.seq, m.key, m.body_size + octet_length(m.key) + m.m_size AS bytes FROM mqlayer.parked_fact m
    WHERE m.group_id = p.group_id AND m.lp = p.lp AND m.name = p.name ORDER BY m.position, m.seq LIMIT 1) AS h ON true;

-- name: parked_list
-- Parked keys with what waits in each, in the order of group, LP and name, behind a place in it.
WITH page AS (
    SELECT k.* FROM ({parked_looked}) AS k WHERE {parked_fits}
    ORDER BY k.group_id, k.lp, k.name LIMIT %(limit)s
)
{parked_shown}
ORDER BY p.group_id, p.lp, p.name;

-- name: parked_list_ordered
-- The same of the parked keys that are looked at, by another order, behind so many.
WITH page AS (
    SELECT k.*, row_number() OVER (ORDER BY CASE %(order)s::text
               WHEN 'oldest' THEN extract(epoch FROM k.parked_at)::float8 WHEN 'largest' THEN -k.messages::float8
               ELSE extract(epoch FROM k.due_at)::float8 END, k.group_id, k.lp, k.name) AS place
    FROM (SELECT k.* FROM unnest(%(group_ids)s::bigint[]) AS u (group_id)
          CROSS JOIN LATERAL (
              SELECT k.* FROM mqlayer.parked_key k
              WHERE k.group_id = u.group_id
                AND (%(name)s::bytea IS NULL OR k.lp = %(lp)s::smallint AND k.name = %(name)s)
              ORDER BY k.lp, k.name LIMIT %(scan)s) AS k LIMIT %(scan)s) AS k
    WHERE {parked_fits} ORDER BY place OFFSET %(offset)s LIMIT %(limit)s
)
{parked_shown}
ORDER BY p.place;

-- name: parked_list_end
-- Where looking for a page ended; nothing where there is no key behind.
SELECT k.group_id, k.lp, k.name FROM ({parked_looked}) AS k
ORDER BY k.group_id, k.lp, k.name OFFSET %(scan)s - 1 LIMIT 1;

-- name: parked_list_count
-- How many of the next parked keys fit, and how many were looked at.
SELECT count(*) FILTER (WHERE {parked_fits}), count(*) FROM ({parked_looked}) AS k;

-- name: group_ids_named
-- The ids of groups: of all topics, of one, or one of one topic.
SELECT g.group_id FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
WHERE (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
ORDER BY g.group_id;

-- name: parked_messages_list
-- A parked key's messages without their bodies, in the order in which they are handled, behind a place in it.
SELECT m.position, m.source, m.seq, m.partition_id, m.log_offset, m.key, m.m, coalesce(m.large_size, m.body_size), m.redriven,
       (SELECT count(*) FROM mqlayer.failed_attempt f
        WHERE f.group_id = m.group_id AND f.lp = m.lp AND f.source = m.source AND f.seq = m.seq) AS attempts,
       m.large_size IS NOT NULL
FROM mqlayer.parked_fact m
WHERE m.group_id = %(group_id)s AND m.lp = %(lp)s AND m.name = %(name)s
  AND (m.position, m.seq) > (%(after_place)s::bigint, %(after_seq)s::bigint)
ORDER BY m.position, m.seq LIMIT %(limit)s;

-- name: parked_name_of
-- Under which name a message is parked.
SELECT name FROM mqlayer.parked_message
WHERE group_id = %(group_id)s AND lp = %(lp)s AND source = %(source)s AND seq = %(seq)s;

-- name: parked_show
-- A parked message with its body.
SELECT t.name, g.name, m.partition_id, m.log_offset, m.key, m.m, m.body, k.cause, k.parked_at, k.due_at, m.redriven
FROM mqlayer.parked_message m JOIN mqlayer.parked_key k USING (group_id, lp, name)
JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE m.group_id = %(group_id)s AND m.lp = %(lp)s AND m.source = %(source)s AND m.seq = %(seq)s;

-- part: dead_wanted
-- What a page asks of a dead message d by its index; what is null does not narrow.
(%(group_id)s::bigint IS NULL OR d.group_id = %(group_id)s)
  AND (%(key)s::bytea IS NULL OR d.lp = %(lp)s::smallint AND d.key = %(key)s)
  AND (%(since)s::timestamptz IS NULL OR d.died_at >= %(since)s)
  AND (%(until)s::timestamptz IS NULL OR d.died_at < %(until)s)
  AND (%(after)s::bigint IS NULL OR (d.died_at, d.dead_id) < (%(after_at)s::timestamptz, %(after)s::bigint));

-- part: dead_latest
-- The next dead messages, those that died last first: at most so many. Of the indexes alone: with more columns the planner
-- sorts a whole group, of which it has no statistics. Redriven ones have indexes of their own.
SELECT u.dead_id, u.died_at
FROM ((SELECT d.dead_id, d.died_at FROM mqlayer.dead_message d
       WHERE d.redriven_at IS NULL AND {dead_wanted}
       ORDER BY d.died_at DESC, d.dead_id DESC LIMIT %(scan)s)
      UNION ALL
      (SELECT d.dead_id, d.died_at FROM mqlayer.dead_message d
       WHERE %(redriven)s::boolean AND d.redriven_at IS NOT NULL AND {dead_wanted}
       ORDER BY d.died_at DESC, d.dead_id DESC LIMIT %(scan)s)) AS u
ORDER BY u.died_at DESC, u.dead_id DESC LIMIT %(scan)s;

-- part: dead_row
-- The rest of the latest dead messages l, one by one.
SELECT * FROM mqlayer.dead_fact f WHERE f.dead_id = l.dead_id OFFSET 0;

-- name: dead_by_index
-- Let this transaction read dead messages in the order of their index: the planner has no statistics of groups, and would
-- sort all that died before a time.
SELECT set_config('enable_bitmapscan', 'off', true), set_config('enable_sort', 'off', true);

-- name: dead_died
-- When a message died.
SELECT died_at FROM mqlayer.dead_fact WHERE dead_id = %(dead_id)s;

-- name: dead_list
-- Dead messages without their bodies, those that died last first, from behind one of them on.
SELECT d.dead_id, t.name AS topic, g.name AS group_name, d.lp, d.source, d.seq, d.partition_id, d.log_offset, d.key,
       coalesce(d.large_size, d.body_size) AS bytes, d.cause, d.reason, d.attempts, d.actor, d.died_at, d.redriven_at,
       d.large_size IS NOT NULL
FROM (SELECT d.* FROM ({dead_latest}) AS l CROSS JOIN LATERAL ({dead_row}) AS d
      WHERE (%(group_ids)s::bigint[] IS NULL OR d.group_id = ANY(%(group_ids)s::bigint[])) AND {dead_fits}
      ORDER BY l.died_at DESC, l.dead_id DESC LIMIT %(limit)s) AS d
JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
ORDER BY d.died_at DESC, d.dead_id DESC;

-- name: dead_list_end
-- Where looking for a page ended; nothing where no message is behind.
SELECT l.dead_id FROM ({dead_latest}) AS l ORDER BY l.died_at DESC, l.dead_id DESC OFFSET %(scan)s - 1 LIMIT 1;

-- name: dead_list_count
-- How many of the latest dead messages fit, and how many were looked at.
SELECT count(*) FILTER (WHERE (%(group_ids)s::bigint[] IS NULL OR d.group_id = ANY(%(group_ids)s::bigint[])) AND {dead_fits}), count(*)
FROM ({dead_latest}) AS l CROSS JOIN LATERAL ({dead_row}) AS d;

-- part: errors_by_group
-- Errors e by kind and group, the most frequent first: each with its count, its first and last time, the latest text, and how
-- many were looked at.
SELECT e.error, t.name, g.name, count(*), min(e.at), max(e.at), (array_agg(e.line ORDER BY e.at DESC))[1], max(e.looked)
FROM (SELECT left(split_part(l.line, ':', 1), 200) AS error, left(l.line, 500) AS line, l.at, l.group_id,
             count(*) OVER () AS looked FROM looked l) AS e
JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
GROUP BY e.error, t.name, g.name ORDER BY 4 DESC, 1, 2, 3 LIMIT %(limit)s;

-- name: dead_errors
-- The most frequent errors among the latest dead messages.
WITH looked AS (
    SELECT split_part(d.reason, E'\n', 1) AS line, l.died_at AS at, d.group_id
    FROM (SELECT d.dead_id, d.died_at FROM mqlayer.dead_message d
          WHERE (%(group_id)s::bigint IS NULL OR d.group_id = %(group_id)s) AND d.redriven_at IS NULL
          ORDER BY d.died_at DESC, d.dead_id DESC LIMIT %(scan)s) AS l
    CROSS JOIN LATERAL ({dead_row}) AS d)
{errors_by_group};

-- name: attempt_errors
-- The same of the latest failed attempts, whatever became of their messages.
WITH looked AS (
    SELECT split_part(f.error, E'\n', 1) AS line, f.failed_at AS at, f.group_id FROM mqlayer.failed_attempt f
    ORDER BY f.failed_at DESC LIMIT %(scan)s)
{errors_by_group};

-- name: dead_count
-- How many dead messages of a group a redrive would find, and how many of them have no body.
SELECT count(*), count(*) FILTER (WHERE d.body_size IS NULL)
FROM mqlayer.dead_fact d
WHERE d.group_id = %(group_id)s AND d.redriven_at IS NULL
  AND (%(dead_ids)s::bigint[] IS NULL OR d.dead_id = ANY(%(dead_ids)s::bigint[]))
  AND {dead_fits};

-- name: dead_find
-- Dead messages of one identity: one for each group at most.
SELECT d.dead_id, t.name, g.name
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.dead_message d ON d.group_id = g.group_id AND d.lp = %(lp)s AND d.source = %(source)s AND d.seq = %(seq)s
WHERE (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
ORDER BY d.dead_id;

-- name: dead_show
-- A dead message with its body.
SELECT d.group_id, t.name, g.name, d.lp, d.source, d.seq, d.partition_id, d.log_offset, d.key, d.m, d.body, d.cause, d.reason,
       d.attempts, d.actor, d.died_at, d.redriven_at
FROM mqlayer.dead_message d JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE d.dead_id = %(dead_id)s;

-- name: attempts_of
-- Every failed attempt of a message that is known, in the order of their times.
SELECT attempt, failed_at, member_id, error FROM mqlayer.failed_attempt
WHERE group_id = %(group_id)s AND lp = %(lp)s AND source = %(source)s AND seq = %(seq)s
ORDER BY failed_at, attempt LIMIT %(limit)s;

-- name: last_errors
-- The last failed attempt's error of messages in groups.
SELECT f.group_id, f.lp, f.source, f.seq, f.error
FROM unnest(%(group_ids)s::bigint[], %(lps)s::smallint[], %(sources)s::bigint[], %(seqs)s::bigint[])
     AS u (group_id, lp, source, seq)
CROSS JOIN LATERAL (
    SELECT f.* FROM mqlayer.failed_attempt f
    WHERE f.group_id = u.group_id AND f.lp = u.lp AND f.source = u.source AND f.seq = u.seq
    ORDER BY f.failed_at DESC, f.attempt DESC LIMIT 1) f;

-- name: parked_hold
-- Lock a parked key; nothing where it is not parked.
SELECT cause, due_at, attempts, paused_at IS NOT NULL AS paused FROM mqlayer.parked_key
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s FOR UPDATE;

-- name: parked_end
-- Where a parked key's line ends now.
SELECT coalesce(max(position), 0) FROM mqlayer.parked_message
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s;

-- name: parked_release
-- Let parked keys be tried at once, with all of their attempts before them. Where an owner has one in hand, it finds that.
-- Their rows are locked, so each is found at the place where it was looked up: a join by key would read all of the group's
-- keys where statistics are late.
UPDATE mqlayer.parked_key k SET due_at = clock_timestamp(), attempts = 0, released = k.started IS NOT NULL
FROM (SELECT p.ctid FROM unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS given (lp, name)
      CROSS JOIN LATERAL (SELECT p.ctid FROM mqlayer.parked_key p
                          WHERE p.group_id = %(group_id)s AND p.lp = given.lp AND p.name = given.name OFFSET 0) AS p) AS found
WHERE k.ctid = found.ctid AND k.paused_at IS NULL RETURNING k.lp;

-- name: key_pause
-- Let a key rest: parked, and due at no time; nothing where it rests.
INSERT INTO mqlayer.parked_key AS k (group_id, lp, name, cause, paused_at, paused_by)
VALUES (%(group_id)s, %(lp)s, %(name)s, 'paused', clock_timestamp(), %(actor)s)
ON CONFLICT (group_id, lp, name) DO UPDATE SET paused_at = excluded.paused_at, paused_by = excluded.paused_by
WHERE k.paused_at IS NULL RETURNING k.lp;

-- name: key_resume
-- Let a key go on; nothing where it does. One that waits for nothing else is due.
UPDATE mqlayer.parked_key
SET paused_at = NULL, paused_by = NULL,
    due_at = CASE WHEN cause = 'paused' AND due_at IS NULL THEN clock_timestamp() ELSE due_at END
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s AND paused_at IS NOT NULL RETURNING lp;

-- name: key_paused
-- Since when a key rests.
SELECT paused_at FROM mqlayer.parked_key
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s AND paused_at IS NOT NULL;

-- name: parked_heads_failed
-- The heads of parked keys that failed before they were parked.
SELECT h.lp, h.source, h.seq FROM unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS given (lp, name)
CROSS JOIN LATERAL (SELECT h.lp, h.source, h.seq, h.attempts FROM mqlayer.parked_message h
                    WHERE h.group_id = %(group_id)s AND h.lp = given.lp AND h.name = given.name
                    ORDER BY h.position, h.seq LIMIT 1) AS h
WHERE h.attempts > 0;

-- name: parked_head_reset
-- What the head of a parked key failed before it was parked counts no more.
UPDATE mqlayer.parked_message SET attempts = 0
WHERE group_id = %(group_id)s AND lp = %(lp)s AND source = %(source)s AND seq = %(seq)s;

-- name: parked_discard
-- Move the first messages of a parked key, up to a place, to the dead ones; the key's row is locked.
WITH gone AS (
    DELETE FROM mqlayer.parked_message p
    USING (SELECT source, seq FROM mqlayer.parked_message
           WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s AND position <= %(upto)s
           ORDER BY position, seq LIMIT %(limit)s) AS first
    WHERE p.group_id = %(group_id)s AND p.lp = %(lp)s AND p.source = first.source AND p.seq = first.seq
    RETURNING p.*
), told AS (
    INSERT INTO mqlayer_archive.outcome_queue (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor, reason)
    SELECT g.topic_id, e.group_id, e.partition_id, e.log_offset, 'discarded', e.tried, %(actor)s, %(reason)s
    FROM gone e JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id) WHERE t.archived
)
INSERT INTO mqlayer.dead_message AS d
    (group_id, lp, source, seq, partition_id, log_offset, key, m, body, cause, reason, attempts, actor)
SELECT g.group_id, g.lp, g.source, g.seq, g.partition_id, g.log_offset, g.key, g.m, g.body, 'discarded', %(reason)s,
       (SELECT count(*) FROM mqlayer.failed_attempt f
        WHERE f.group_id = g.group_id AND f.lp = g.lp AND f.source = g.source AND f.seq = g.seq), %(actor)s
FROM (SELECT * FROM gone ORDER BY position, seq) AS g
ON CONFLICT (group_id, lp, source, seq) DO UPDATE
SET partition_id = excluded.partition_id, log_offset = excluded.log_offset, body = excluded.body, cause = excluded.cause,
    reason = excluded.reason, attempts = excluded.attempts, actor = excluded.actor, died_at = clock_timestamp(),
    redriven_at = NULL, redriven_seek = NULL
RETURNING dead_id;

-- name: parked_head_next
-- Another message is the head of a parked key: it is tried at once.
UPDATE mqlayer.parked_key SET due_at = clock_timestamp(), attempts = 0, started = NULL, started_alone = false, released = false
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s;

-- name: parking_raise
-- Note that these parked keys of a group changed (LP -1: any), let its members know, and forget which ones did long ago.
WITH raised AS (
    UPDATE mqlayer.consumer_group SET parking = parking + 1 WHERE group_id = %(group_id)s RETURNING group_id, parking
), noted AS (
    INSERT INTO mqlayer.parking_change (group_id, number, lp, name)
    SELECT DISTINCT raised.group_id, raised.parking, given.lp, given.name
    FROM raised CROSS JOIN unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS given (lp, name)
), forgotten AS (
    DELETE FROM mqlayer.parking_change c USING raised
    WHERE c.group_id = raised.group_id AND c.number <= raised.parking - %(kept)s
)
SELECT pg_notify('mqlayer_group', group_id::text) FROM raised;

-- name: failure_counts
-- How often what happened to messages and keys of groups that fail, ever, and when it did last.
SELECT counted.group_id, counted.event, sum(counted.count)::bigint, max(counted.last_at)
FROM (
    SELECT c.group_id, c.event, c.count, c.last_at FROM mqlayer.failure_count c
    WHERE c.group_id = ANY(%(group_ids)s::bigint[])
    UNION ALL
    SELECT l.group_id, l.event, l.lost, l.lost_at FROM mqlayer.retention_loss l
    WHERE l.group_id = ANY(%(group_ids)s::bigint[]) AND l.lost > 0
) AS counted
GROUP BY counted.group_id, counted.event ORDER BY 1, 2;

-- name: failure_groups
-- Groups by their names: of all topics, of one, or one of one topic; with what of each is parked and how much may be, and
-- what is dead.
SELECT g.group_id, t.name, g.name, k.keys, k.waiting, k.full_keys, coalesce(n.messages, 0), coalesce(n.bytes, 0),
       extract(epoch FROM clock_timestamp() - k.since)::float8, extract(epoch FROM clock_timestamp() - k.due)::float8,
       (SELECT count(*) FROM mqlayer.dead_message d WHERE d.group_id = g.group_id AND d.redriven_at IS NULL),
       g.parked_messages_limit, g.parked_bytes_limit, g.key_messages_limit, g.key_bytes_limit
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
CROSS JOIN LATERAL (
    SELECT count(*) AS keys, count(*) FILTER (WHERE k.due_at IS NULL) AS waiting, min(k.parked_at) AS since,
           count(*) FILTER (WHERE k.messages >= g.key_messages_limit OR k.bytes >= g.key_bytes_limit) AS full_keys,
           min(k.due_at) FILTER (
               WHERE k.due_at < clock_timestamp() AND k.started IS NULL AND k.paused_at IS NULL) AS due
    FROM mqlayer.parked_key k WHERE k.group_id = g.group_id) AS k
CROSS JOIN LATERAL (
    SELECT sum(p.messages)::bigint AS messages, sum(p.bytes)::bigint AS bytes
    FROM mqlayer.parked_total p WHERE p.group_id = g.group_id) AS n
WHERE (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
ORDER BY t.name, g.name;

-- name: dead_keep
-- An operator's last word on dead messages: they are to stay so, and why. What was said of each before.
WITH ruled AS (
    UPDATE mqlayer.dead_message d SET cause = 'discarded', reason = %(reason)s, actor = %(actor)s
    FROM (SELECT dead_id, cause, reason FROM mqlayer.dead_message
          WHERE dead_id = ANY(%(dead_ids)s::bigint[]) AND redriven_at IS NULL ORDER BY dead_id FOR UPDATE) AS before
    WHERE d.dead_id = before.dead_id
    RETURNING before.cause, before.reason, d.group_id, d.partition_id, d.log_offset, d.attempts, d.dead_id
), told AS (
    INSERT INTO mqlayer_archive.outcome_queue (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor, reason)
    SELECT g.topic_id, r.group_id, r.partition_id, r.log_offset, 'discarded', r.attempts, %(actor)s, %(reason)s
    FROM ruled r JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id) WHERE t.archived
)
SELECT r.cause, r.reason, r.group_id, t.name, g.name, r.dead_id
FROM ruled r JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id);

-- name: head_skip_partitions
-- The partitions that a group has not drained and that hold an LP, parents before successors.
SELECT p.partition_id, p.node_id, coalesce(s.start_offset, 1), g.seek, g.replay
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
    AND p.lp_from <= %(lp)s AND p.lp_to > %(lp)s
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
WHERE g.group_id = %(group_id)s AND NOT EXISTS (
    SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
ORDER BY p.partition_id;

-- name: skip_epoch
-- A higher epoch for whoever owns a partition for a group; nothing where it never had an owner.
UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s RETURNING epoch;

-- name: epoch_next
-- An epoch that nobody has.
SELECT nextval('mqlayer.epoch');

-- name: group_seeks
-- How often a group was sent elsewhere.
SELECT seek FROM mqlayer.consumer_group WHERE group_id = %(group_id)s;

-- name: dead_in_stream
-- Whether the record of a message in the stream stands for nothing: it is dead, or was given back since the last seek.
SELECT EXISTS (
    SELECT FROM mqlayer.dead_message
    WHERE group_id = %(group_id)s AND lp = %(lp)s AND source = %(source)s AND seq = %(seq)s
      AND (redriven_at IS NULL OR redriven_seek = %(seek)s));

-- name: dead_kept_put
-- A message that an operator ruled dead; again, where it died before and was given back.
WITH put AS (
    INSERT INTO mqlayer.dead_message AS d
        (group_id, lp, source, seq, partition_id, log_offset, key, m, body, cause, reason, attempts, actor)
    VALUES (%(group_id)s, %(lp)s, %(source)s, %(seq)s, %(partition_id)s, %(log_offset)s, %(key)s, %(m)s, %(body)s,
            'discarded', %(reason)s, %(attempts)s, %(actor)s)
    ON CONFLICT (group_id, lp, source, seq) DO UPDATE
    SET partition_id = excluded.partition_id, log_offset = excluded.log_offset, body = excluded.body,
        cause = excluded.cause, reason = excluded.reason, attempts = excluded.attempts, actor = excluded.actor,
        died_at = clock_timestamp(), redriven_at = NULL, redriven_seek = NULL
    RETURNING d.*
), told AS (
    INSERT INTO mqlayer_archive.outcome_queue (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor, reason)
    SELECT g.topic_id, p.group_id, p.partition_id, p.log_offset, p.cause, p.attempts, p.actor, p.reason
    FROM put p JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id) WHERE t.archived
)
SELECT dead_id FROM put;

-- name: fence_state
-- The epoch that the fence of an LP is at, and whether it, or the inbox, has the effect of a message.
SELECT (SELECT f.epoch FROM mqlayer_app.fence_epoch f WHERE f.group_id = %(group_id)s AND f.lp = %(lp)s),
       EXISTS (SELECT FROM mqlayer_app.fence_applied a
               WHERE a.group_id = %(group_id)s AND a.lp = %(lp)s AND a.source_id = %(source)s AND a.key = %(key)s
                 AND a.replay >= %(replay)s AND a.seq >= %(seq)s)
       OR EXISTS (SELECT FROM mqlayer_app.inbox i
                  WHERE i.group_id = %(group_id)s AND i.id = concat_ws(':', abs(%(source)s::bigint), %(lp)s::int, %(seq)s::bigint)
                    AND i.replay >= %(replay)s);

-- name: bulk_insert
-- A bulk action on a group whose set is fixed next.
INSERT INTO mqlayer.redrive (group_id, kind, filter, per_s, actor, state, size, matched, planned_at, started_at)
VALUES (%(group_id)s, %(act)s, %(filter)s, 0, %(actor)s, 'planned', 0, 0, now(), now())
RETURNING redrive_id;

-- name: bulk_plan_dead
-- Fix the set of a bulk action on dead messages: key by key, each key's in the order of its log, but a source's by their
-- numbers, for a node that fell back was sent the later ones again at lower offsets. How many match, and how many are in
-- the set: none where too many match and not the first ones are wanted.
WITH found AS MATERIALIZED (
    SELECT d.dead_id, d.lp, d.key, d.source, d.seq, d.died_at, d.cause,
           row_number() OVER (ORDER BY d.lp, d.key, d.partition_id, d.log_offset, d.dead_id) AS place
    FROM mqlayer.dead_fact d
    WHERE d.group_id = %(group_id)s AND d.redriven_at IS NULL AND {dead_fits}
), ranked AS (
    SELECT f.*, max(f.place) OVER (PARTITION BY f.lp, f.key, f.source ORDER BY f.seq) AS rank FROM found f
), put AS (
    INSERT INTO mqlayer.bulk_item (redrive_id, number, group_id, dead_id, lp, name, source, seq, since, cause)
    SELECT %(redrive_id)s, row_number() OVER (ORDER BY r.lp, r.key, r.rank, r.seq), %(group_id)s, r.dead_id, r.lp, r.key,
           r.source, r.seq, r.died_at, r.cause
    FROM ranked r WHERE %(first)s::boolean OR (SELECT count(*) FROM found) <= %(limit)s
    ORDER BY r.lp, r.key, r.rank, r.seq LIMIT %(limit)s
    RETURNING 1
)
SELECT (SELECT count(*) FROM found), (SELECT count(*) FROM put);

-- name: bulk_plan_named
-- The same of messages that were named one by one, whether they are dead still or not.
WITH found AS MATERIALIZED (
    SELECT given.dead_id, d.lp, d.key, d.source, d.seq, d.died_at, d.cause,
           row_number() OVER (ORDER BY d.lp, d.key, d.partition_id, d.log_offset, given.dead_id) AS place
    FROM (SELECT DISTINCT unnest(%(dead_ids)s::bigint[])) AS given (dead_id)
    LEFT JOIN mqlayer.dead_fact d ON d.dead_id = given.dead_id AND d.group_id = %(group_id)s
), ranked AS (
    SELECT f.*, max(f.place) OVER (PARTITION BY f.lp, f.key, f.source ORDER BY f.seq, f.dead_id) AS rank FROM found f
), put AS (
    INSERT INTO mqlayer.bulk_item (redrive_id, number, group_id, dead_id, lp, name, source, seq, since, cause)
    SELECT %(redrive_id)s, row_number() OVER (ORDER BY r.lp, r.key, r.rank, r.seq), %(group_id)s, r.dead_id, r.lp, r.key,
           r.source, r.seq, r.died_at, r.cause
    FROM ranked r
    RETURNING 1
)
SELECT (SELECT count(*) FROM found), (SELECT count(*) FROM put);

-- name: bulk_plan_parked
-- Fix the set of a bulk action on parked keys, in the order of LP and name, each with its head and its last message's place.
WITH found AS MATERIALIZED (
    SELECT k.lp, k.name, k.parked_at, k.cause, k.messages FROM mqlayer.parked_key k
    WHERE k.group_id = %(group_id)s AND {parked_fits}
      AND (%(act)s::text <> 'release' OR k.paused_at IS NULL AND (k.due_at IS NULL OR k.due_at > clock_timestamp()))
), put AS (
    INSERT INTO mqlayer.bulk_item (redrive_id, number, group_id, lp, name, source, seq, since, cause, messages, upto)
    SELECT %(redrive_id)s, row_number() OVER (ORDER BY f.lp, f.name), %(group_id)s, f.lp, f.name, h.source, h.seq,
           f.parked_at, f.cause,
           CASE WHEN substr(f.name, 1, 1) = '\xff'::bytea THEN (h.seq IS NOT NULL)::int ELSE f.messages END, e.position
    FROM (SELECT * FROM found WHERE %(first)s::boolean OR (SELECT count(*) FROM found) <= %(limit)s
          ORDER BY lp, name LIMIT %(limit)s) AS f
    LEFT JOIN LATERAL (
        SELECT m.source, m.seq FROM mqlayer.parked_fact m
        WHERE m.group_id = %(group_id)s AND m.lp = f.lp AND m.name = f.name ORDER BY m.position, m.seq LIMIT 1) AS h ON true
    LEFT JOIN LATERAL (
        SELECT m.position FROM mqlayer.parked_fact m
        WHERE m.group_id = %(group_id)s AND m.lp = f.lp AND m.name = f.name
        ORDER BY m.position DESC, m.seq DESC LIMIT 1) AS e ON true
    RETURNING messages
)
SELECT (SELECT count(*) FROM found), (SELECT count(*) FROM put);

-- name: bulk_planned
-- Note how large the set of a bulk action is, and how many matched.
UPDATE mqlayer.redrive SET size = %(size)s, matched = %(matched)s WHERE redrive_id = %(redrive_id)s;

-- name: bulk_start
-- Start a planned bulk action; nothing where it is none, or too old.
UPDATE mqlayer.redrive
SET state = 'running', started_at = clock_timestamp(), next_at = clock_timestamp(), reason = %(reason)s, actor = %(actor)s,
    per_s = %(per_s)s, worker = %(worker)s::text,
    lease_until = CASE WHEN %(worker)s::text IS NOT NULL THEN clock_timestamp() + make_interval(secs => %(lease_s)s) END
WHERE redrive_id = %(redrive_id)s AND state = 'planned'
  AND planned_at >= clock_timestamp() - make_interval(secs => %(expires_s)s)
RETURNING size;

-- name: bulk_list
-- Bulk actions, newest first, from behind one of them on; or the one that is asked for.
SELECT r.redrive_id, t.name, g.name, r.kind, r.filter, r.state, r.size, r.matched, r.sent, r.not_sent - r.failed, r.failed,
       r.per_s, r.actor, r.reason, r.planned_at, CASE WHEN r.state <> 'planned' THEN r.started_at END, r.ended_at, r.worker,
       r.lease_until IS NOT NULL AND r.lease_until >= clock_timestamp() AS worked_on, r.blocked_by
FROM mqlayer.redrive r JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE r.size IS NOT NULL AND (%(redrive_id)s::bigint IS NULL OR r.redrive_id = %(redrive_id)s)
  AND (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
  AND (%(state)s::text IS NULL OR r.state = %(state)s)
  AND (%(after)s::bigint IS NULL OR r.redrive_id < %(after)s)
ORDER BY r.redrive_id DESC LIMIT %(limit)s;

-- name: bulk_items
-- Items of a bulk action in the order in which it takes them, from behind one of them on; or those with one result.
SELECT i.number, i.dead_id, i.lp, i.name, i.source, i.seq, i.messages, i.result, i.error, i.at FROM mqlayer.bulk_item i
WHERE i.redrive_id = %(redrive_id)s AND i.number > %(after)s
  AND (NOT %(failed)s::boolean OR i.result = 'failed')
ORDER BY i.number LIMIT %(limit)s;

-- part: next_items
-- The next items of a bulk action: their numbers have no holes.
i.redrive_id = %(redrive_id)s AND i.number > %(at_number)s::int AND i.number <= %(at_number)s::int + %(limit)s::int

-- name: bulk_hold
-- Lock a running bulk action for its next batch; nothing where it ended or somebody else works on it.
SELECT at_number, per_s, reason, actor FROM mqlayer.redrive
WHERE redrive_id = %(redrive_id)s AND state = 'running' AND worker = %(worker)s FOR UPDATE;

-- name: bulk_next_dead
-- The next dead messages of a bulk action, and why one is passed by: it changed since the set was fixed.
SELECT i.number, i.dead_id,
       CASE WHEN d.dead_id IS NULL THEN 'gone' WHEN d.redriven_at IS NOT NULL THEN 'already'
            WHEN d.body_size IS NULL AND %(act)s::text = 'redrive' THEN 'no_body'
            WHEN d.died_at <> i.since OR d.cause <> i.cause THEN 'changed' END
FROM mqlayer.bulk_item i
-- OFFSET keeps this a look-up per item, here and below: nothing is known of a set that was planned just now, and a join
-- would read all of the group for each batch.
LEFT JOIN LATERAL (SELECT * FROM mqlayer.dead_fact d
                   WHERE d.dead_id = i.dead_id AND d.group_id = i.group_id OFFSET 0) AS d ON true
WHERE {next_items} ORDER BY i.number;

-- name: bulk_hold_keys
-- Lock the next parked keys of a bulk action, in the order of their items, which is that of LP and name.
SELECT 1 FROM (SELECT i.group_id, i.lp, i.name FROM mqlayer.bulk_item i WHERE {next_items} ORDER BY i.number OFFSET 0) AS i
CROSS JOIN LATERAL (SELECT FROM mqlayer.parked_key k
                    WHERE k.group_id = i.group_id AND k.lp = i.lp AND k.name = i.name FOR UPDATE) AS k;

-- name: bulk_next_parked
-- The next parked keys of a bulk action, and why one is passed by.
SELECT i.number, i.lp, i.name, i.upto, i.gone,
       CASE WHEN k.lp IS NULL THEN 'gone' WHEN k.parked_at <> i.since THEN 'changed'
            WHEN i.gone = 0 AND (h.source, h.seq) IS DISTINCT FROM (i.source, i.seq) THEN 'changed'
            WHEN %(act)s::text <> 'release' THEN NULL
            WHEN k.paused_at IS NOT NULL THEN 'paused' WHEN k.due_at <= clock_timestamp() THEN 'due' END
FROM mqlayer.bulk_item i
LEFT JOIN LATERAL (SELECT * FROM mqlayer.parked_key k
                   WHERE k.group_id = i.group_id AND k.lp = i.lp AND k.name = i.name OFFSET 0) AS k ON true
LEFT JOIN LATERAL (
    SELECT m.source, m.seq FROM mqlayer.parked_message m
    WHERE m.group_id = i.group_id AND m.lp = i.lp AND m.name = i.name ORDER BY m.position, m.seq LIMIT 1) AS h ON true
WHERE {next_items} ORDER BY i.number;

-- name: bulk_part
-- Note that so many more messages of a key are discarded; the item is not done.
UPDATE mqlayer.bulk_item SET gone = gone + %(gone)s WHERE redrive_id = %(redrive_id)s AND number = %(number)s;

-- name: bulk_results
-- What was done with items.
-- As in parked_release: the bulk action's row is locked.
UPDATE mqlayer.bulk_item i SET result = found.result, error = %(error)s, at = clock_timestamp()
FROM (SELECT given.result, b.ctid FROM unnest(%(numbers)s::int[], %(results)s::text[]) AS given (number, result)
      CROSS JOIN LATERAL (SELECT b.ctid FROM mqlayer.bulk_item b
                          WHERE b.redrive_id = %(redrive_id)s AND b.number = given.number OFFSET 0) AS b) AS found
WHERE i.ctid = found.ctid;

-- name: bulk_advance
-- Up to which item a bulk action has come, and when it may go on.
UPDATE mqlayer.redrive
SET at_number = %(number)s, sent = sent + %(done)s, not_sent = not_sent + %(skipped)s + %(failed)s, failed = failed + %(failed)s,
    lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s), blocked_by = NULL,
    next_at = greatest(next_at, clock_timestamp()) + make_interval(secs => %(pause_s)s)
WHERE redrive_id = %(redrive_id)s;

-- name: bulk_end
-- A bulk action is over: done, or cancelled by an operator. Nothing where it was over before.
UPDATE mqlayer.redrive SET state = %(state)s, ended_at = clock_timestamp(), worker = NULL, lease_until = NULL, blocked_by = NULL
WHERE redrive_id = %(redrive_id)s AND size IS NOT NULL AND state IN ('planned', 'running')
RETURNING sent, not_sent - failed, failed, reason;

-- name: bulk_old_items
-- Delete some items of bulk actions that were never started, or ended long ago.
WITH gone AS (
    DELETE FROM mqlayer.bulk_item i
    USING (SELECT i.redrive_id, i.number FROM mqlayer.bulk_item i JOIN mqlayer.redrive r USING (redrive_id)
           WHERE r.state = 'planned' AND r.planned_at < clock_timestamp() - make_interval(secs => %(expires_s)s)
              OR r.ended_at < clock_timestamp() - make_interval(secs => %(kept_s)s)
           LIMIT %(limit)s) AS old
    WHERE i.redrive_id = old.redrive_id AND i.number = old.number RETURNING 1
)
SELECT count(*) FROM gone;

-- name: bulk_old
-- Delete some of these bulk actions, without items.
WITH gone AS (
    DELETE FROM mqlayer.redrive r
    USING (SELECT r.redrive_id FROM mqlayer.redrive r
           WHERE r.size IS NOT NULL
             AND (r.state = 'planned' AND r.planned_at < clock_timestamp() - make_interval(secs => %(expires_s)s)
                  OR r.ended_at < clock_timestamp() - make_interval(secs => %(kept_s)s))
             AND NOT EXISTS (SELECT FROM mqlayer.bulk_item i WHERE i.redrive_id = r.redrive_id)
           LIMIT %(limit)s) AS old
    WHERE r.redrive_id = old.redrive_id RETURNING 1
)
SELECT count(*) FROM gone;

-- name: redrive_take
-- Begin to work on a redrive that nobody works on; or in the place of whoever does.
UPDATE mqlayer.redrive
SET worker = %(worker)s, lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)
WHERE redrive_id = %(redrive_id)s AND state = 'running'
  AND (%(instead)s::boolean OR lease_until IS NULL OR lease_until < clock_timestamp())
RETURNING group_id;

-- name: redrive_keep
-- Go on with a redrive: how long nothing may be sent yet. Nothing where it ended or somebody else works on it.
UPDATE mqlayer.redrive SET lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)
WHERE redrive_id = %(redrive_id)s AND state = 'running' AND worker = %(worker)s
RETURNING greatest(0, extract(epoch FROM next_at - clock_timestamp()))::float8;

-- name: redrive_leave
-- Leave a redrive to whoever comes next.
UPDATE mqlayer.redrive SET worker = NULL, lease_until = NULL
WHERE redrive_id = %(redrive_id)s AND state = 'running' AND worker = %(worker)s;

-- name: redrive_mark
-- These live in the group again: which of them were dead until now.
WITH marked AS (
    UPDATE mqlayer.dead_message d SET redriven_at = clock_timestamp(), redriven_seek = g.seek
    FROM mqlayer.consumer_group g
    WHERE d.dead_id = ANY(%(dead_ids)s::bigint[]) AND d.redriven_at IS NULL AND d.body IS NOT NULL
      AND g.group_id = d.group_id
    RETURNING d.dead_id, d.lp, d.source, d.seq, d.group_id, d.partition_id, d.log_offset, d.attempts, g.topic_id
), told AS (
    INSERT INTO mqlayer_archive.outcome_queue (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor)
    SELECT m.topic_id, m.group_id, m.partition_id, m.log_offset, 'redriven', m.attempts, %(actor)s
    FROM marked m JOIN mqlayer.topic t USING (topic_id) WHERE t.archived
)
SELECT dead_id, lp, source, seq FROM marked;

-- name: redrive_keys_put
-- The keys of redriven messages are parked and due; those that are parked stay as they are, locked. A message that stands
-- alone is parked under its own name (mqlayer/parking, alone_name).
INSERT INTO mqlayer.parked_key AS k (group_id, lp, name, cause, due_at)
SELECT f.group_id, f.lp, f.name, 'redriven', clock_timestamp()
FROM (SELECT DISTINCT d.group_id, d.lp,
             CASE WHEN %(alone)s::boolean OR d.key = '\xff'::bytea
                  THEN '\xff'::bytea || convert_to(format('%%s:%%s:%%s', d.source, d.lp, d.seq), 'UTF8')
                  ELSE d.key END AS name
      FROM mqlayer.dead_message d WHERE d.dead_id = ANY(%(dead_ids)s::bigint[])) AS f
ORDER BY f.group_id, f.lp, f.name
ON CONFLICT (group_id, lp, name) DO UPDATE SET cause = k.cause;

-- name: redrive_messages_put
-- Redriven messages join their keys' lines, each before the later ones of its source, else at the end, in the order given.
INSERT INTO mqlayer.parked_message
    (group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body, redriven)
SELECT d.group_id, d.lp, d.name, d.source, d.seq,
       -- Places of a source's messages rise with their numbers, so that the next one has the least.
       coalesce((SELECT p.position FROM mqlayer.parked_message p
                 WHERE p.group_id = d.group_id AND p.lp = d.lp AND p.name = d.name AND p.source = d.source
                   AND p.seq > d.seq ORDER BY p.seq LIMIT 1), nextval('mqlayer.parked_position')),
       d.partition_id, d.log_offset, d.key, d.m, d.body, true
FROM (SELECT m.*, {parked_name} AS name
      FROM unnest(%(dead_ids)s::bigint[]) WITH ORDINALITY AS given(dead_id, number)
      JOIN mqlayer.dead_message m USING (dead_id) ORDER BY given.number) AS d
ON CONFLICT (group_id, lp, source, seq) DO NOTHING
RETURNING lp, name, source, seq;

-- name: redrive_room
-- For each of these dead messages, in their order: whether it is sent, how large it is, under which name; what its key and
-- its partition have parked.
SELECT d.body IS NOT NULL AND d.redriven_at IS NULL,
       coalesce(octet_length(d.body), 0) + octet_length(d.key) + octet_length(d.m), d.lp, d.name, k.lp IS NOT NULL,
       coalesce(k.messages, 0), coalesce(k.bytes, 0), p.partition_id
FROM (SELECT m.*, {parked_name} AS name, given.number
      FROM unnest(%(dead_ids)s::bigint[]) WITH ORDINALITY AS given(dead_id, number)
      JOIN mqlayer.dead_message m USING (dead_id)) AS d
JOIN mqlayer.consumer_group g USING (group_id)
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.route r ON r.topic_id = t.topic_id AND r.version = t.version AND r.lp_from <= d.lp AND r.lp_to > d.lp
JOIN mqlayer.partition p ON p.partition_id = r.partition_id
LEFT JOIN mqlayer.parked_key k ON k.group_id = d.group_id AND k.lp = d.lp AND k.name = d.name
ORDER BY d.number;

-- name: redrive_keys_parked
-- How many keys of a group are parked in the LPs of partitions.
SELECT p.partition_id, (SELECT count(*) FROM mqlayer.parked_key k
                        WHERE k.group_id = %(group_id)s AND k.lp >= p.lp_from AND k.lp < p.lp_to)
FROM mqlayer.partition p WHERE p.partition_id = ANY(%(partitions)s::int[]);

-- name: redrive_wait
-- A redrive waits for room: why, and until when it is not tried again. Whether that is news.
UPDATE mqlayer.redrive r
SET blocked_by = %(blocked_by)s, next_at = clock_timestamp() + make_interval(secs => %(pause_s)s),
    lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)
FROM (SELECT blocked_by FROM mqlayer.redrive WHERE redrive_id = %(redrive_id)s) AS before
WHERE r.redrive_id = %(redrive_id)s RETURNING before.blocked_by IS DISTINCT FROM %(blocked_by)s;

-- name: redrive_end
-- A redrive is over: done, or cancelled by an operator. Nothing where it was over before.
UPDATE mqlayer.redrive SET state = %(state)s, not_sent = not_sent + %(gone)s, ended_at = clock_timestamp(), worker = NULL, lease_until = NULL, blocked_by = NULL
WHERE redrive_id = %(redrive_id)s AND state = 'running'
RETURNING redrive_id, group_id, sent, not_sent;

-- name: redrives_left
-- Redrives, replays and backfills that nobody works on and that may go on.
SELECT redrive_id, kind FROM mqlayer.redrive
WHERE state = 'running' AND (lease_until IS NULL OR lease_until < clock_timestamp()) AND next_at <= clock_timestamp()
ORDER BY redrive_id;

-- name: parked_overdue
-- Groups with members in which keys have been due for a while that no owner has in hand.
SELECT g.group_id, t.name, g.name FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
WHERE g.state = 'live' AND g.paused_at IS NULL AND t.paused_at IS NULL
  AND EXISTS (SELECT FROM mqlayer.parked_key k
              WHERE k.group_id = g.group_id AND k.paused_at IS NULL AND {parked_reachable} AND k.due_at < clock_timestamp() - make_interval(secs => %(for_s)s)
                AND NOT EXISTS (SELECT FROM mqlayer.assignment a WHERE a.group_id = k.group_id AND a.epoch = k.started
                                AND a.member_id IS NOT NULL))
  AND EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until >= now())
ORDER BY g.group_id;

-- name: attempts_clean
-- Forget old failed attempts of messages that are neither parked nor dead, among the next ones in the order of time;
-- up to where that was, how many were looked at and how many went.
WITH old AS (
    SELECT f.ctid AS position, f.* FROM mqlayer.failed_attempt f
    WHERE f.failed_at < clock_timestamp() - make_interval(secs => %(horizon_s)s)
      AND f.failed_at >= %(from)s::timestamptz
    ORDER BY f.failed_at LIMIT %(limit)s
), gone AS (
    DELETE FROM mqlayer.failed_attempt f USING old o
    WHERE f.ctid = o.position AND f.failed_at = o.failed_at
      AND NOT EXISTS (SELECT FROM mqlayer.parked_message m
                      WHERE m.group_id = o.group_id AND m.lp = o.lp AND m.source = o.source AND m.seq = o.seq)
      AND NOT EXISTS (SELECT FROM mqlayer.dead_message d
                      WHERE d.group_id = o.group_id AND d.lp = o.lp AND d.source = o.source AND d.seq = o.seq
                        AND d.redriven_at IS NULL)
    RETURNING 1
)
SELECT (SELECT max(failed_at) FROM old), (SELECT count(*) FROM old), (SELECT count(*) FROM gone);
