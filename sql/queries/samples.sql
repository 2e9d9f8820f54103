-- name: sampled_groups
-- Live groups with a position, and what of them waits in Postgres: parked messages, dead ones up to a bound; and living members.
SELECT g.group_id,
       (SELECT coalesce(sum(p.messages), 0)::bigint FROM mqlayer.parked_total p WHERE p.group_id = g.group_id) AS parked,
       (SELECT count(*) FROM (SELECT FROM mqlayer.dead_fact d
                              WHERE d.group_id = g.group_id AND d.redriven_at IS NULL LIMIT %(dead_limit)s) AS those) AS dead,
       (SELECT count(*) FROM mqlayer.member m
        WHERE m.group_id = g.group_id AND m.lease_until >= now() AND NOT m.leaving)::int AS members
FROM mqlayer.consumer_group g WHERE g.group_id = ANY(%(group_ids)s::bigint[]);

-- name: sampled_topics
-- Topics that are not deleted with the messages of their deleted partitions, and the others with nodes; where sealed ones end.
SELECT t.topic_id, coalesce(d.stored, 0)::bigint, p.partition_id, p.node_id, s.next_offset
FROM mqlayer.topic t
LEFT JOIN (SELECT p.topic_id, sum(greatest(0, s.next_offset - 1)) AS stored
           FROM mqlayer.partition p JOIN mqlayer.seal s USING (partition_id)
           WHERE p.state = 'deleted' GROUP BY p.topic_id) AS d USING (topic_id)
LEFT JOIN mqlayer.partition p ON p.topic_id = t.topic_id AND p.state IN ('open', 'sealed')
LEFT JOIN mqlayer.seal s ON s.partition_id = p.partition_id AND p.state = 'sealed'
WHERE t.deleted_at IS NULL
ORDER BY t.topic_id, p.partition_id;

-- name: sampled_outbox
-- Messages of topics that were committed to this outbox, and relayed from it, since ever.
SELECT c.topic_id, sum(c.seq)::bigint AS committed, coalesce(sum(r.seq), 0)::bigint AS relayed
FROM mqlayer_app.counter c LEFT JOIN mqlayer_app.relayed r USING (topic_id, lp) GROUP BY c.topic_id;

-- name: samples_put
-- Samples of this minute; those that another run took of it stay.
INSERT INTO mqlayer.sample (kind, object_id, at, lag, oldest_s, parked, dead, members, busy, committed, relayed, stored,
                            memory_bytes, memory_limit, cpu_s, ops_per_s)
SELECT s.kind, s.object_id, date_trunc('minute', now(), 'UTC'), s.lag, s.oldest_s, s.parked, s.dead, s.members, s.busy,
       s.committed, s.relayed, s.stored, s.memory_bytes, s.memory_limit, s.cpu_s, s.ops_per_s
FROM unnest(%(kind)s::text[], %(object_id)s::bigint[], %(lag)s::bigint[], %(oldest_s)s::float8[], %(parked)s::bigint[],
            %(dead)s::bigint[], %(members)s::int[], %(busy)s::int[], %(committed)s::bigint[], %(relayed)s::bigint[], %(stored)s::bigint[],
            %(memory_bytes)s::bigint[], %(memory_limit)s::bigint[], %(cpu_s)s::float8[], %(ops_per_s)s::float8[])
     AS s (kind, object_id, lag, oldest_s, parked, dead, members, busy, committed, relayed, stored, memory_bytes, memory_limit, cpu_s,
           ops_per_s)
ON CONFLICT (kind, object_id, at) DO NOTHING;

-- name: sampled_rates_put
-- Note where partitions end now, as rate_put does, but of those that the balance by rate measures more often. The first
-- rate of a partition is that since its beginning, so that those of a split have one at once.
INSERT INTO mqlayer.partition_rate AS r (partition_id, next_offset, per_s, measured_at)
SELECT partition_id, next_offset,
       (next_offset - 1) / greatest(1, extract(epoch FROM clock_timestamp() - p.created_at)), clock_timestamp()
FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[]) AS measured(partition_id, next_offset)
JOIN mqlayer.partition p USING (partition_id)
ON CONFLICT (partition_id) DO UPDATE
SET next_offset = excluded.next_offset, measured_at = excluded.measured_at,
    per_s = r.per_s / 2 + greatest(0, excluded.next_offset - r.next_offset) / 2.0
            / greatest(0.001, extract(epoch FROM excluded.measured_at - r.measured_at))
WHERE r.measured_at < excluded.measured_at - interval '30 seconds';

-- name: samples_clean
-- Forget samples of minutes that are over for longer than they are kept; how many.
WITH gone AS (
    DELETE FROM mqlayer.sample WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM mqlayer.sample
        WHERE at <= date_trunc('minute', now(), 'UTC') - make_interval(secs => %(kept_s)s) LIMIT %(limit)s))
    RETURNING 1
)
SELECT count(*) FROM gone;

-- name: sampled_object
-- The number of a group, a topic or a node by its name.
SELECT g.group_id FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
WHERE %(kind)s = 'group' AND t.name = %(topic)s AND g.name = %(name)s
UNION ALL
SELECT topic_id FROM mqlayer.topic WHERE %(kind)s = 'topic' AND name = %(name)s
UNION ALL
SELECT node_id FROM mqlayer.node WHERE %(kind)s = 'node' AND name = %(name)s;

-- name: sampled_curve
-- The samples of a thing since a time, in steps: mean and highest value of each; of counts, how many came per second. A
-- count that fell, since a partition was deleted, counts as none.
WITH span AS (
    SELECT now() - make_interval(secs => %(last_s)s) AS since
), told AS (
    SELECT at, lag, oldest_s, parked, dead, memory_bytes, ops_per_s,
           CASE WHEN committed < lag(committed) OVER earlier THEN 0 ELSE committed - lag(committed) OVER earlier END
               / extract(epoch FROM at - lag(at) OVER earlier) AS committed,
           CASE WHEN relayed < lag(relayed) OVER earlier THEN 0 ELSE relayed - lag(relayed) OVER earlier END
               / extract(epoch FROM at - lag(at) OVER earlier) AS relayed,
           CASE WHEN stored < lag(stored) OVER earlier THEN 0 ELSE stored - lag(stored) OVER earlier END
               / extract(epoch FROM at - lag(at) OVER earlier) AS stored
    FROM mqlayer.sample
    WHERE kind = %(kind)s AND object_id = %(object_id)s AND at > (SELECT since FROM span)
    WINDOW earlier AS (ORDER BY at)
)
-- A step has its end, not its beginning: else the last minute would make one more.
SELECT date_bin(make_interval(secs => %(step_s)s), at - interval '1 microsecond', (SELECT since FROM span)) AS step_at, count(*),
       avg(lag)::float8, max(lag)::float8, avg(oldest_s), max(oldest_s), avg(parked)::float8, max(parked)::float8,
       avg(dead)::float8, max(dead)::float8, avg(committed)::float8, max(committed)::float8, avg(relayed)::float8,
       max(relayed)::float8, avg(stored)::float8, max(stored)::float8, avg(memory_bytes)::float8,
       max(memory_bytes)::float8, avg(ops_per_s), max(ops_per_s)
FROM told GROUP BY step_at ORDER BY step_at;
