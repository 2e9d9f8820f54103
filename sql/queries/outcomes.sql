-- name: outcome_work
-- Where a topic's groups note on nodes what becomes of messages, and up to where that is in the archive.
SELECT p.partition_id, p.node_id, g.group_id, coalesce(o.epoch, 0), coalesce(o.position, 0)
FROM mqlayer.partition p JOIN mqlayer.consumer_group g USING (topic_id)
LEFT JOIN mqlayer_archive.outcome_progress o ON o.group_id = g.group_id AND o.partition_id = p.partition_id
WHERE p.topic_id = %(topic_id)s AND p.state IN ('open', 'sealed', 'deleted') AND p.retired_at IS NULL AND g.mode <> 'broadcast'
  AND (g.state <> 'retired' OR EXISTS (SELECT FROM mqlayer.assignment a
                                       WHERE a.group_id = g.group_id AND a.partition_id = p.partition_id))
ORDER BY p.partition_id, g.group_id;

-- name: outcome_progress
-- Up to where groups' entries of partitions are in the archive.
SELECT o.group_id, o.partition_id, o.epoch, o.position
FROM unnest(%(groups)s::bigint[], %(partitions)s::int[]) AS wanted(group_id, partition_id)
JOIN mqlayer_archive.outcome_progress o USING (group_id, partition_id);

-- name: outcome_progress_put
-- Groups' entries of partitions are in the archive up to a place.
INSERT INTO mqlayer_archive.outcome_progress AS o (group_id, partition_id, epoch, position, dropped, dropped_at)
SELECT group_id, partition_id, epoch, position, dropped, CASE WHEN dropped > 0 THEN now() END
FROM unnest(%(groups)s::bigint[], %(partitions)s::int[], %(epochs)s::bigint[], %(numbers)s::bigint[], %(dropped)s::bigint[])
     AS u(group_id, partition_id, epoch, position, dropped)
ON CONFLICT (group_id, partition_id) DO UPDATE
SET epoch = excluded.epoch, position = excluded.position, dropped = o.dropped + excluded.dropped,
    dropped_at = coalesce(excluded.dropped_at, o.dropped_at);

-- name: outcomes_put
-- What was settled on nodes.
INSERT INTO mqlayer_archive.outcome
    (topic_id, batch, group_id, partition_id, first_offset, last_offset, outcome, attempts, delivered_at, settled_at, actor,
     archived_at, epoch, position)
SELECT %(topic_id)s, %(batch)s, group_id, partition_id, first_offset, last_offset, outcome, attempts,
       to_timestamp(given_ms / 1000.0), to_timestamp(at_ms / 1000.0), actor, %(at)s, epoch, position
FROM unnest(%(groups)s::bigint[], %(partitions)s::int[], %(firsts)s::bigint[], %(lasts)s::bigint[], %(words)s::text[],
            %(attempts)s::int[], %(givens)s::bigint[], %(ats)s::bigint[], %(actors)s::text[], %(epochs)s::bigint[],
            %(numbers)s::bigint[])
     AS told(group_id, partition_id, first_offset, last_offset, outcome, attempts, given_ms, at_ms, actor, epoch, position);

-- name: outcome_queue_count
-- How much of what was done in Postgres to a topic's messages waits for the archiver.
SELECT count(*) FROM mqlayer_archive.outcome_queue WHERE topic_id = %(topic_id)s;

-- name: outcome_queue_move
-- Move what was done in Postgres into the archive, what has all in common as one stretch; how much that was, in how many.
WITH taken AS (
    DELETE FROM mqlayer_archive.outcome_queue q
    USING (SELECT position FROM mqlayer_archive.outcome_queue
           WHERE topic_id = %(topic_id)s ORDER BY position LIMIT %(limit)s) AS first
    WHERE q.position = first.position RETURNING q.*
), lined AS (
    SELECT *, log_offset - row_number() OVER (
        PARTITION BY group_id, partition_id, outcome, attempts, delivered_at, settled_at, actor, reason, epoch
        ORDER BY log_offset) AS line
    FROM taken
), put AS (
    INSERT INTO mqlayer_archive.outcome
        (topic_id, batch, group_id, partition_id, first_offset, last_offset, outcome, attempts, delivered_at, settled_at,
         actor, reason, archived_at, epoch, position)
    -- Behind every settlement of the same epoch.
    SELECT %(topic_id)s, %(batch)s, group_id, partition_id, min(log_offset), max(log_offset), outcome, attempts, delivered_at,
           settled_at, actor, reason, %(at)s, epoch, max(position) + (1::bigint << 62)
    FROM lined
    GROUP BY group_id, partition_id, outcome, attempts, delivered_at, settled_at, actor, reason, epoch, line
    RETURNING 1
)
SELECT (SELECT count(*) FROM taken), (SELECT count(*) FROM put);
