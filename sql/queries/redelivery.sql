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
  AND (%(error)s::text IS NULL OR strpos(lower(d.reason), lower(%(error)s)) > 0 OR EXISTS (
      SELECT FROM mqlayer.failed_attempt f
      WHERE f.group_id = d.group_id AND f.lp = d.lp AND f.source = d.source AND f.seq = d.seq
        AND strpos(lower(f.error), lower(%(error)s)) > 0));

-- name: parked_list
-- Parked keys with what waits in each, in the order of group, LP and name, behind a place in it.
WITH page AS (
    SELECT k.*, t.name AS topic, g.name AS group_name
    FROM mqlayer.parked_key k JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
    WHERE (k.group_id, k.lp, k.name) > (%(after_group)s::bigint, %(after_lp)s::smallint, %(after_name)s::bytea)
      AND (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
      AND (%(name)s::bytea IS NULL OR k.name = %(name)s) AND (%(cause)s::text IS NULL OR k.cause = %(cause)s)
      AND (%(since)s::timestamptz IS NULL OR k.parked_at >= %(since)s)
      AND (%(until)s::timestamptz IS NULL OR k.parked_at < %(until)s)
      AND (NOT %(waiting)s::boolean OR k.due_at IS NULL OR k.paused_at IS NOT NULL)
      AND (%(error)s::text IS NULL OR EXISTS (
          SELECT FROM mqlayer.parked_fact m JOIN mqlayer.failed_attempt f USING (group_id, lp, source, seq)
          WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name
            AND strpos(lower(f.error), lower(%(error)s)) > 0))
    ORDER BY k.group_id, k.lp, k.name LIMIT %(limit)s
)
SELECT p.group_id, p.topic, p.group_name, p.lp, p.name, p.cause, CASE WHEN p.paused_at IS NULL THEN p.due_at END AS due_at,
       CASE WHEN p.paused_at IS NULL THEN extract(epoch FROM p.due_at - clock_timestamp())::float8 END AS due_in_s, p.attempts, p.started IS NOT NULL AS started,
       p.parked_at, n.messages, n.bytes, h.source, h.seq, h.key
FROM page p
CROSS JOIN LATERAL (
    SELECT count(*) AS messages,
           coalesce(sum(m.body_size + octet_length(m.key) + m.m_size), 0)::bigint AS bytes
    FROM mqlayer.parked_fact m WHERE m.group_id = p.group_id AND m.lp = p.lp AND m.name = p.name) AS n
LEFT JOIN LATERAL (
    SELECT m.source, m.seq, m.key FROM mqlayer.parked_fact m
    WHERE m.group_id = p.group_id AND m.lp = p.lp AND m.name = p.name ORDER BY m.position, m.seq LIMIT 1) AS h ON true
ORDER BY p.group_id, p.lp, p.name;

-- name: parked_messages_list
-- A parked key's messages without their bodies, in the order in which they are handled, behind a place in it.
SELECT m.position, m.source, m.seq, m.partition_id, m.log_offset, m.key, m.m, m.body_size, m.redriven,
       (SELECT count(*) FROM mqlayer.failed_attempt f
        WHERE f.group_id = m.group_id AND f.lp = m.lp AND f.source = m.source AND f.seq = m.seq) AS attempts
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

-- name: dead_list
-- Dead messages without their bodies, those that died last first, from behind one of them on.
SELECT d.dead_id, t.name AS topic, g.name AS group_name, d.lp, d.source, d.seq, d.partition_id, d.log_offset, d.key,
       d.body_size AS bytes, d.cause, d.reason, d.attempts, d.actor, d.died_at, d.redriven_at
FROM mqlayer.dead_fact d JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
  AND (%(redriven)s::boolean OR d.redriven_at IS NULL)
  AND {dead_fits}
  AND (%(after)s::bigint IS NULL OR (d.died_at, d.dead_id) < (
      SELECT a.died_at, a.dead_id FROM mqlayer.dead_fact a WHERE a.dead_id = %(after)s))
ORDER BY d.died_at DESC, d.dead_id DESC LIMIT %(limit)s;

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

-- name: parked_hold
-- Lock a parked key; nothing where it is not parked.
SELECT cause, due_at, attempts, paused_at IS NOT NULL AS paused FROM mqlayer.parked_key
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s FOR UPDATE;

-- name: parked_end
-- Where a parked key's line ends now.
SELECT coalesce(max(position), 0) FROM mqlayer.parked_message
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s;

-- name: parked_release
-- Let a parked key be tried at once, with all of its attempts before it. Where an owner has it in hand, it finds that.
UPDATE mqlayer.parked_key SET due_at = clock_timestamp(), attempts = 0, released = started IS NOT NULL
WHERE group_id = %(group_id)s AND lp = %(lp)s AND name = %(name)s AND paused_at IS NULL RETURNING lp;

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

-- name: parked_heads_reset
-- What the heads of parked keys failed before they were parked counts no more.
UPDATE mqlayer.parked_message m SET attempts = 0
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS given (lp, name)
CROSS JOIN LATERAL (SELECT h.source, h.seq, h.attempts FROM mqlayer.parked_message h
                    WHERE h.group_id = %(group_id)s AND h.lp = given.lp AND h.name = given.name
                    ORDER BY h.position, h.seq LIMIT 1) AS head
WHERE m.group_id = %(group_id)s AND m.lp = given.lp AND m.source = head.source AND m.seq = head.seq AND head.attempts > 0;

-- name: parked_release_some
-- The same for the next keys of a group that are not due yet, behind a place in the order of LP and name.
UPDATE mqlayer.parked_key k SET due_at = clock_timestamp(), attempts = 0, released = k.started IS NOT NULL
FROM (SELECT lp, name FROM mqlayer.parked_key
      WHERE group_id = %(group_id)s AND (lp, name) > (%(after_lp)s::smallint, %(after_name)s::bytea)
        AND (due_at IS NULL OR due_at > clock_timestamp()) AND paused_at IS NULL
        AND (%(cause)s::text IS NULL OR cause = %(cause)s)
      ORDER BY lp, name LIMIT %(limit)s FOR UPDATE) AS waiting
WHERE k.group_id = %(group_id)s AND k.lp = waiting.lp AND k.name = waiting.name
RETURNING k.lp, k.name;

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
SELECT c.group_id, c.event, sum(c.count)::bigint, max(c.last_at)
FROM mqlayer.failure_count c WHERE c.group_id = ANY(%(group_ids)s::bigint[]) GROUP BY c.group_id, c.event ORDER BY 1, 2;

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
-- An operator's last word on a dead message: it is to stay so, and why. What was said of it before.
WITH ruled AS (
    UPDATE mqlayer.dead_message d SET cause = 'discarded', reason = %(reason)s, actor = %(actor)s
    FROM (SELECT dead_id, cause, reason FROM mqlayer.dead_message
          WHERE dead_id = %(dead_id)s AND redriven_at IS NULL FOR UPDATE) AS before
    WHERE d.dead_id = before.dead_id
    RETURNING before.cause, before.reason, d.group_id, d.partition_id, d.log_offset, d.attempts
), told AS (
    INSERT INTO mqlayer_archive.outcome_queue (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor, reason)
    SELECT g.topic_id, r.group_id, r.partition_id, r.log_offset, 'discarded', r.attempts, %(actor)s, %(reason)s
    FROM ruled r JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id) WHERE t.archived
)
SELECT r.cause, r.reason, r.group_id, t.name, g.name
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

-- name: redrive_insert
-- A redrive of the dead messages that a group has now.
INSERT INTO mqlayer.redrive (group_id, filter, upto_id, per_s, actor, worker, lease_until)
SELECT %(group_id)s, %(filter)s, (SELECT coalesce(max(dead_id), 0) FROM mqlayer.dead_message WHERE group_id = %(group_id)s),
       %(per_s)s, %(actor)s, %(worker)s::text,
       CASE WHEN %(worker)s::text IS NOT NULL THEN clock_timestamp() + make_interval(secs => %(lease_s)s) END
RETURNING redrive_id;

-- name: redrive_list
-- Redrives, newest first, from behind one of them on; or the one that is asked for.
SELECT r.redrive_id, t.name, g.name, r.filter, r.per_s, r.actor, r.state, r.sent, r.not_sent, r.started_at, r.ended_at,
       r.worker, r.lease_until IS NOT NULL AND r.lease_until >= clock_timestamp() AS worked_on, r.blocked_by
FROM mqlayer.redrive r JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE r.kind = 'dead' AND (%(redrive_id)s::bigint IS NULL OR r.redrive_id = %(redrive_id)s)
  AND (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
  AND (%(after)s::bigint IS NULL OR r.redrive_id < %(after)s)
ORDER BY r.redrive_id DESC LIMIT %(limit)s;

-- name: redrive_results
-- What a redrive did with messages, by their numbers, from behind one of them on.
SELECT r.dead_id, d.lp, d.source, d.seq, d.key, r.result, r.at
FROM mqlayer.redrive_result r LEFT JOIN mqlayer.dead_message d USING (dead_id)
WHERE r.redrive_id = %(redrive_id)s AND r.dead_id > %(after)s ORDER BY r.dead_id LIMIT %(limit)s;

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

-- name: redrive_hold
-- Lock a redrive for its next batch; nothing where it ended or somebody else works on it.
SELECT filter, upto_id, per_s, at_lp, at_key, at_partition, at_offset, at_dead_id
FROM mqlayer.redrive
WHERE redrive_id = %(redrive_id)s AND state = 'running' AND worker = %(worker)s FOR UPDATE;

-- name: redrive_pick
-- The next dead messages of a redrive, key by key, each key's as they lay in the partitions of their lineage.
SELECT d.dead_id, d.lp, d.key, d.partition_id, d.log_offset, d.source, d.seq, d.body IS NULL
FROM mqlayer.dead_message d
WHERE d.group_id = %(group_id)s AND d.redriven_at IS NULL AND d.dead_id <= %(upto)s
  AND (d.lp, d.key, d.partition_id, d.log_offset, d.dead_id)
    > (%(at_lp)s::smallint, %(at_key)s::bytea, %(at_partition)s::int, %(at_offset)s::bigint, %(at_dead_id)s::bigint)
  AND {dead_fits}
ORDER BY d.lp, d.key, d.partition_id, d.log_offset, d.dead_id LIMIT %(limit)s;

-- name: redrive_pick_named
-- The same of the messages that were named one by one, whether they are dead still or not.
SELECT d.dead_id, d.lp, d.key, d.partition_id, d.log_offset, d.source, d.seq, d.body IS NULL
FROM mqlayer.dead_message d
WHERE d.group_id = %(group_id)s AND d.dead_id = ANY(%(dead_ids)s::bigint[])
  AND (d.lp, d.key, d.partition_id, d.log_offset, d.dead_id)
    > (%(at_lp)s::smallint, %(at_key)s::bytea, %(at_partition)s::int, %(at_offset)s::bigint, %(at_dead_id)s::bigint)
ORDER BY d.lp, d.key, d.partition_id, d.log_offset, d.dead_id LIMIT %(limit)s;

-- name: redrive_known
-- Of these messages those that a redrive has a result of.
SELECT dead_id FROM mqlayer.redrive_result
WHERE redrive_id = %(redrive_id)s AND dead_id = ANY(%(dead_ids)s::bigint[]);

-- name: redrive_missing
-- Of messages that were named one by one, those that a redrive did not find.
SELECT named.dead_id FROM unnest(%(dead_ids)s::bigint[]) AS named(dead_id)
WHERE NOT EXISTS (SELECT FROM mqlayer.redrive_result r
                  WHERE r.redrive_id = %(redrive_id)s AND r.dead_id = named.dead_id)
ORDER BY 1;

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

-- name: redrive_results_put
-- What was done with messages.
INSERT INTO mqlayer.redrive_result (redrive_id, dead_id, result)
SELECT %(redrive_id)s, given.dead_id, given.result
FROM unnest(%(dead_ids)s::bigint[], %(results)s::text[]) AS given(dead_id, result);

-- name: redrive_advance
-- Up to where a redrive has come, and when it may go on.
UPDATE mqlayer.redrive
SET at_lp = %(at_lp)s, at_key = %(at_key)s, at_partition = %(at_partition)s, at_offset = %(at_offset)s,
    at_dead_id = %(at_dead_id)s, sent = sent + %(sent)s, not_sent = not_sent + %(not_sent)s,
    lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s), blocked_by = NULL,
    next_at = greatest(next_at, clock_timestamp()) + make_interval(secs => %(pause_s)s)
WHERE redrive_id = %(redrive_id)s;

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
