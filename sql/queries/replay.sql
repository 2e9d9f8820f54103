-- part: replay_wanted
-- The record is one of the replay by partition, key, tag, time and snapshot.
(%(partitions)s::int[] IS NULL OR r.partition_id = ANY(%(partitions)s::int[]))
AND (%(key)s::bytea IS NULL OR r.lp = %(lp)s::smallint AND r.key = %(key)s)
AND (%(tag)s::text IS NULL OR r.tags @> ARRAY[%(tag)s::text])
AND (%(since)s::timestamptz IS NULL OR r.published_at >= %(since)s)
AND (%(until)s::timestamptz IS NULL OR r.published_at < %(until)s)
AND (%(snapshot_id)s::int IS NULL OR EXISTS (
    SELECT FROM mqlayer_archive.cut c
    WHERE c.snapshot_id = %(snapshot_id)s AND c.topic_id = r.topic_id AND c.source = r.source AND c.lp = r.lp
      AND r.seq BETWEEN c.first_seq AND c.last_seq));

-- name: replay_topic_seen
-- What the archive holds of a group's topic: its last batch; nothing where it was never archived.
SELECT a.batch FROM mqlayer.consumer_group g JOIN mqlayer_archive.topic a USING (topic_id)
WHERE g.group_id = %(group_id)s;

-- name: replay_topic
-- What the archive holds of a group's topic: its last batch; nothing where it was never archived. Held, so that nothing is
-- dropped before a replay of it is there.
SELECT a.batch FROM mqlayer.consumer_group g JOIN mqlayer_archive.topic a USING (topic_id)
WHERE g.group_id = %(group_id)s FOR SHARE OF a;

-- name: replay_snapshot
-- A snapshot by name, its last batch of a group's topic, and up to which one its rows may be in exports alone.
SELECT s.snapshot_id, p.batch, p.exported_batch
FROM mqlayer_archive.snapshot s
LEFT JOIN mqlayer_archive.snapshot_topic p ON p.snapshot_id = s.snapshot_id
    AND p.topic_id = (SELECT g.topic_id FROM mqlayer.consumer_group g WHERE g.group_id = %(group_id)s)
WHERE s.name = %(snapshot)s;

-- name: replay_snapshot_there
-- Whether a snapshot was not dropped.
SELECT EXISTS (SELECT FROM mqlayer_archive.snapshot WHERE snapshot_id = %(snapshot_id)s);

-- name: replay_positions
-- The partitions of a group's topic that it is not through with: where they are, and where it starts in each.
SELECT p.partition_id, p.node_id, coalesce(s.start_offset, 1), g.seek
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
WHERE g.group_id = %(group_id)s
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
ORDER BY p.partition_id;

-- name: replay_running
-- The replay or backfill that gives messages to a group.
SELECT redrive_id, kind FROM mqlayer.redrive WHERE group_id = %(group_id)s AND state = 'running' AND kind IN ('replay', 'backfill');

-- name: replay_insert
-- A replay or backfill, of what the archive holds now or held when a snapshot was made.
INSERT INTO mqlayer.redrive
    (group_id, filter, per_s, actor, worker, lease_until, kind, upto_batch, snapshot_id, bounds, position, newer, name)
VALUES (%(group_id)s, %(filter)s, %(per_s)s, %(actor)s, %(worker)s::text,
        CASE WHEN %(worker)s::text IS NOT NULL THEN clock_timestamp() + make_interval(secs => %(lease_s)s) END,
        %(kind)s, %(upto_batch)s, %(snapshot_id)s, %(bounds)s, nextval('mqlayer.parked_position'), %(newer)s, %(name)s)
RETURNING redrive_id;

-- name: replay_key_put
-- A key that is replayed is parked at once: what is published of it waits behind.
INSERT INTO mqlayer.parked_key (group_id, lp, name, cause, due_at)
VALUES (%(group_id)s, %(lp)s, %(name)s, 'replayed', clock_timestamp()) ON CONFLICT (group_id, lp, name) DO NOTHING;

-- name: replay_list
-- Replays and backfills, newest first, from behind one of them on; or the one that is asked for; or those that run.
SELECT r.redrive_id, r.kind, t.name, g.name, r.filter, r.per_s, r.newer, r.actor, r.state, r.results, r.started_at, r.ended_at,
       r.worker, r.lease_until IS NOT NULL AND r.lease_until >= clock_timestamp() AS worked_on, r.at_batch, r.upto_batch,
       (SELECT count(*) FROM mqlayer.parked_message m WHERE m.replay = r.redrive_id) AS waiting, r.blocked_by
FROM mqlayer.redrive r JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE r.kind IN ('replay', 'backfill') AND (%(redrive_id)s::bigint IS NULL OR r.redrive_id = %(redrive_id)s)
  AND (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(group)s::text IS NULL OR g.name = %(group)s)
  AND (%(after)s::bigint IS NULL OR r.redrive_id < %(after)s)
ORDER BY r.redrive_id DESC LIMIT %(limit)s;

-- name: replay_results
-- What a replay did not send, by LP, source and seq, from behind one of them on.
SELECT lp, source, seq, result, at FROM mqlayer.replay_result
WHERE redrive_id = %(redrive_id)s
  AND (lp, source, seq) > (%(after_lp)s::smallint, %(after_source)s::bigint, %(after_seq)s::bigint)
ORDER BY lp, source, seq LIMIT %(limit)s;

-- name: replay_state
-- How far a replay is, what it is for, and how much of it waits in its group.
SELECT r.at_batch, r.at_record, r.upto_batch, r.snapshot_id, r.filter, r.bounds, r.per_s, r.position, r.kind, g.topic_id,
       g.tag_filter,
       (SELECT count(*) FROM mqlayer.parked_message m WHERE m.replay = r.redrive_id),
       (SELECT coalesce(sum(octet_length(m.body)), 0)::bigint FROM mqlayer.parked_message m WHERE m.replay = r.redrive_id),
       r.name
FROM mqlayer.redrive r JOIN mqlayer.consumer_group g USING (group_id) WHERE r.redrive_id = %(redrive_id)s;

-- name: replay_partitions
-- The partitions that ever held an LP of a topic.
SELECT coalesce(array_agg(partition_id), '{}') FROM mqlayer.partition
WHERE topic_id = %(topic_id)s AND lp_from <= %(lp)s AND lp_to > %(lp)s;

-- name: replay_window
-- The first batch of a topic from one on, and the one that so many records further on are of.
SELECT (SELECT min(r.batch) FROM mqlayer_archive.record r
        WHERE r.topic_id = %(topic_id)s AND r.batch >= %(batch)s AND r.batch <= %(upto)s
          AND (%(partitions)s::int[] IS NULL OR r.partition_id = ANY(%(partitions)s::int[]))),
       (SELECT r.batch FROM mqlayer_archive.record r
        WHERE r.topic_id = %(topic_id)s AND r.batch >= %(batch)s AND r.batch <= %(upto)s
          AND (%(partitions)s::int[] IS NULL OR r.partition_id = ANY(%(partitions)s::int[]))
        ORDER BY r.batch OFFSET %(rows)s LIMIT 1);

-- name: replay_read
-- The next records of a replay within some batches, up to so many and so many bytes of bodies, one at the least; and how
-- many there are there. A key's are in the order of batches, and within one in that of the log.
SELECT partition_id, log_offset, batch, source, lp, seq, extract(epoch FROM published_at)::numeric, key, tags, headers, body,
       found
FROM (SELECT r.*, count(*) OVER () AS found, row_number() OVER line AS number,
             sum(octet_length(r.body)) OVER line - octet_length(r.body) AS before
      FROM mqlayer_archive.record r
      WHERE r.topic_id = %(topic_id)s AND r.batch >= %(first)s AND r.batch <= %(last)s
        AND (r.batch, r.log_offset) > (%(at_batch)s::bigint, %(at_record)s::bigint)
        AND {replay_wanted}
      WINDOW line AS (ORDER BY r.batch, r.log_offset)) AS next
WHERE number <= %(limit)s AND (before < %(bytes)s OR number = 1)
ORDER BY batch, log_offset;

-- name: replay_count
-- How many records of the archive a replay would look at and not leave out by its filter, without an export's batches.
SELECT count(*) FROM mqlayer_archive.record r
WHERE r.topic_id = %(topic_id)s AND r.batch <= %(upto)s
  AND r.batch NOT BETWEEN %(exported_first)s::bigint AND %(exported_upto)s::bigint
  AND {replay_wanted};

-- name: replay_hold
-- Lock a replay for its next batch, if it still is where its worker thinks; nothing where it is not, or is over, or
-- somebody else works on it.
SELECT redrive_id FROM mqlayer.redrive
WHERE redrive_id = %(redrive_id)s AND state = 'running' AND worker = %(worker)s
  AND at_batch = %(at_batch)s AND at_record = %(at_record)s FOR UPDATE;

-- name: replay_dead
-- Which of these messages are dead in a group.
SELECT d.source, d.lp, d.seq FROM mqlayer.dead_message d
JOIN unnest(%(lps)s::smallint[], %(sources)s::bigint[], %(seqs)s::bigint[]) AS given (lp, source, seq) USING (lp, source, seq)
WHERE d.group_id = %(group_id)s AND d.redriven_at IS NULL;

-- name: replay_keys_put
-- The keys of replayed messages are parked and due; those that are parked stay as they are, locked.
INSERT INTO mqlayer.parked_key AS k (group_id, lp, name, cause, due_at)
SELECT %(group_id)s, f.lp, f.name, 'replayed', clock_timestamp()
FROM (SELECT DISTINCT lp, name FROM unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS each(lp, name)) AS f
ORDER BY f.lp, f.name
ON CONFLICT (group_id, lp, name) DO UPDATE SET cause = k.cause;

-- name: replay_messages_put
-- Replayed messages join their keys' lines in the order given: before what is later of their source, or of other sources
-- further on in the log, and before all that was parked since the replay began; behind what was replayed before them.
WITH put AS (
INSERT INTO mqlayer.parked_message
    (group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body, redriven, replay)
SELECT %(group_id)s, g.lp, g.name, g.source, g.seq,
       greatest(least(greatest(floor.position, ceiling.position - 16777216)
                      + row_number() OVER (PARTITION BY g.lp, g.name, ceiling.position ORDER BY g.number), ceiling.position - 1),
                -- Redriven, the one before of its source may have the place of the next one.
                (SELECT p.position FROM mqlayer.parked_message p
                 WHERE p.group_id = %(group_id)s AND p.lp = g.lp AND p.name = g.name AND p.source = g.source
                   AND p.seq < g.seq ORDER BY p.seq DESC LIMIT 1)),
       g.partition_id, g.log_offset, g.key, g.m, g.body, %(again)s, %(redrive_id)s
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[], %(sources)s::bigint[], %(seqs)s::bigint[], %(partitions)s::int[],
            %(offsets)s::bigint[], %(keys)s::bytea[], %(ms)s::bytea[], %(bodies)s::bytea[])
     WITH ORDINALITY AS g (lp, name, source, seq, partition_id, log_offset, key, m, body, number)
CROSS JOIN LATERAL (
    SELECT least(%(position)s::bigint,
                 -- Places of a source's messages rise with their numbers, so that the next one has the least.
                 (SELECT p.position FROM mqlayer.parked_message p
                  WHERE p.group_id = %(group_id)s AND p.lp = g.lp AND p.name = g.name AND p.source = g.source
                    AND p.seq > g.seq ORDER BY p.seq LIMIT 1),
                 (SELECT p.position FROM mqlayer.parked_message p
                  WHERE p.group_id = %(group_id)s AND p.lp = g.lp AND p.name = g.name AND p.source <> g.source
                    AND (p.partition_id, p.log_offset) > (g.partition_id, g.log_offset)
                  ORDER BY p.position, p.seq LIMIT 1)) AS position) AS ceiling
CROSS JOIN LATERAL (
    SELECT coalesce((SELECT p.position FROM mqlayer.parked_message p
                     WHERE p.group_id = %(group_id)s AND p.lp = g.lp AND p.name = g.name AND p.position < ceiling.position
                     ORDER BY p.position DESC, p.seq DESC LIMIT 1), 0) AS position) AS floor
ON CONFLICT (group_id, lp, source, seq) DO NOTHING
RETURNING lp, name, source, seq, partition_id, log_offset
), told AS (
    INSERT INTO mqlayer_archive.outcome_queue (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor, reason)
    SELECT g.topic_id, g.group_id, p.partition_id, p.log_offset, 'replayed', 0, r.actor, format('%%s %%s', r.kind, r.redrive_id)
    FROM put p CROSS JOIN mqlayer.redrive r JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
    WHERE r.redrive_id = %(redrive_id)s AND t.archived
)
SELECT lp, name, source, seq FROM put;

-- name: replay_unmatched_put
-- What the tag filter of a group that is backfilled leaves out: it will never come to it by itself.
INSERT INTO mqlayer_archive.outcome_queue (topic_id, group_id, partition_id, log_offset, outcome, attempts, actor, reason)
SELECT g.topic_id, g.group_id, u.partition_id, u.log_offset, 'unmatched', 0, r.actor, format('%%s %%s', r.kind, r.redrive_id)
FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[]) AS u(partition_id, log_offset)
CROSS JOIN mqlayer.redrive r JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE r.redrive_id = %(redrive_id)s AND t.archived;

-- name: replay_results_put
-- What was not sent of messages, and why.
INSERT INTO mqlayer.replay_result (redrive_id, lp, source, seq, result)
SELECT %(redrive_id)s, lp, source, seq, result
FROM unnest(%(lps)s::smallint[], %(sources)s::bigint[], %(seqs)s::bigint[], %(results)s::text[]) AS given(lp, source, seq, result)
ON CONFLICT DO NOTHING;

-- name: replay_blocked
-- Why a replay's worker stopped.
UPDATE mqlayer.redrive SET blocked_by = %(why)s
WHERE redrive_id = %(redrive_id)s AND state = 'running' AND worker = %(worker)s;

-- name: replay_advance
-- Up to where a replay has come, what became of how many messages, and when it may go on.
UPDATE mqlayer.redrive
SET at_batch = %(at_batch)s, at_record = %(at_record)s, sent = sent + %(sent)s, not_sent = not_sent + %(not_sent)s,
    results = %(results)s::jsonb || (
        SELECT coalesce(jsonb_object_agg(each.key, each.value::bigint + coalesce((%(results)s::jsonb ->> each.key)::bigint, 0)), '{}')
        FROM jsonb_each_text(results) AS each),
    lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s), blocked_by = NULL,
    next_at = greatest(next_at, clock_timestamp()) + make_interval(secs => %(pause_s)s)
WHERE redrive_id = %(redrive_id)s;

-- name: backfill_topic_hold
-- Hold a topic's archive to the end of this transaction: nothing is added to it, and nothing trimmed that it lacks now.
SELECT a.batch FROM mqlayer_archive.topic a JOIN mqlayer.topic t USING (topic_id)
WHERE a.topic_id = %(topic_id)s AND t.archived FOR UPDATE OF a;

-- name: backfill_progress
-- How far the partitions of a topic are in the archive.
SELECT partition_id, upto_offset, complete FROM mqlayer_archive.progress WHERE topic_id = %(topic_id)s;
