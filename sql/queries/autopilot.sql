-- name: auto_topics
-- Topics with automatic routes, all or one; of all, those that the autopilot looks at.
SELECT t.topic_id, t.name, t.version, t.paused_at IS NOT NULL, p.mode, p.min_partitions, p.max_partitions, p.capacity_per_s,
       p.changes_per_hour, p.cool_down_s, p.rest_s, p.quiet_from, p.quiet_to, p.measured_per_s, p.failed, p.unhelpful,
       p.stopped_at, p.stopped_because, t.home_zone
FROM mqlayer.route_policy p JOIN mqlayer.topic t USING (topic_id)
WHERE t.deleting_at IS NULL AND t.deleted_at IS NULL AND t.version IS NOT NULL
  AND CASE WHEN %(topic)s::text IS NULL THEN p.mode <> 'off' ELSE t.name = %(topic)s END
ORDER BY t.topic_id;

-- name: auto_nodes
-- Nodes, whether each is armed and drains; the rates of topics without automatic routes there, partitions in force, and by
-- its last two samples the used part of a core and of its memory limit; and since when a partition was moved last by an
-- actor.
SELECT n.node_id, n.name, n.armed_run_id IS NOT NULL, n.draining_at IS NOT NULL, n.zone, coalesce(p.others_per_s, 0)::float8,
       coalesce(p.partitions, 0), s.cpu, s.memory,
       (SELECT extract(epoch FROM clock_timestamp() - max(c.planned_at))::float8 FROM mqlayer.route_change c
        WHERE c.kind = 'move' AND c.state <> 'dropped' AND c.actor = %(actor)s AND c.planned_at > clock_timestamp() - interval '1 hour')
FROM mqlayer.node n
LEFT JOIN (
    SELECT p.node_id, count(*)::int AS partitions,
           sum(r.per_s) FILTER (WHERE o.topic_id IS NULL AND r.measured_at > now() - interval '5 minutes') AS others_per_s
    FROM mqlayer.partition p LEFT JOIN mqlayer.partition_rate r USING (partition_id)
    LEFT JOIN mqlayer.route_policy o ON o.topic_id = p.topic_id AND o.mode <> 'off'
    WHERE p.state = 'open' GROUP BY p.node_id) AS p USING (node_id)
LEFT JOIN LATERAL (
    SELECT greatest(0, (m.cpu_s - lag(m.cpu_s) OVER w) / extract(epoch FROM m.at - lag(m.at) OVER w))::float8 AS cpu,
           m.memory_bytes / nullif(m.memory_limit, 0)::float8 AS memory
    FROM mqlayer.sample m WHERE m.kind = 'node' AND m.object_id = n.node_id AND m.at > now() - interval '5 minutes'
    WINDOW w AS (ORDER BY m.at) ORDER BY m.at DESC LIMIT 1) AS s ON true
WHERE n.lost_at IS NULL AND n.removed_at IS NULL ORDER BY n.node_id;

-- name: auto_clock
-- The time by this database's clock, and the minute of its day (UTC).
SELECT now_at, extract(epoch FROM now_at)::float8,
       (extract(hour FROM now_at AT TIME ZONE 'UTC') * 60 + extract(minute FROM now_at AT TIME ZONE 'UTC'))::int
FROM clock_timestamp() AS now_at;

-- part: undrained
(SELECT FROM mqlayer.partition parent
               JOIN mqlayer.consumer_group g ON g.topic_id = parent.topic_id AND g.state <> 'retired' AND g.mode <> 'broadcast'
               WHERE parent.ended_by_change = c.change_id AND parent.state = 'sealed' AND NOT EXISTS (
                   SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = parent.partition_id))

-- name: auto_partitions
-- Partitions in force of topics, in the order of their LPs, with their samples, and whether a group has to drain parents.
SELECT r.topic_id, p.partition_id, p.node_id, p.lp_from, p.lp_to,
       extract(epoch FROM clock_timestamp() - coalesce(c.opened_at, p.created_at))::float8,
       EXISTS {undrained},
       extract(epoch FROM clock_timestamp() - l.sampled_at)::float8, l.at_s, l.next_offset, l.settled
FROM mqlayer.topic t JOIN mqlayer.route r ON r.topic_id = t.topic_id AND r.version = t.version
JOIN mqlayer.partition p USING (partition_id)
LEFT JOIN mqlayer.route_change c ON c.change_id = p.created_by_change
LEFT JOIN mqlayer.route_load l USING (partition_id)
WHERE t.topic_id = ANY(%(topics)s::int[]) ORDER BY r.topic_id, r.lp_from;

-- name: auto_measured
-- Partitions in force of topics with automatic routes, each with the groups that consume it now, and where they started:
-- those with members, and of receivers.
SELECT p.node_id, p.partition_id, g.group_id, coalesce(s.start_offset, 1), g.seek
FROM mqlayer.route_policy o
JOIN mqlayer.topic t ON t.topic_id = o.topic_id AND t.deleting_at IS NULL AND t.deleted_at IS NULL
JOIN mqlayer.route r ON r.topic_id = t.topic_id AND r.version = t.version
JOIN mqlayer.partition p USING (partition_id)
LEFT JOIN (mqlayer.readable w JOIN mqlayer.consumer_group g ON g.group_id = w.group_id AND g.state = 'live'
           AND g.broadcast_of IS NULL AND (g.mode = 'pop' OR EXISTS (
               SELECT FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until >= now())))
       ON w.partition_id = p.partition_id
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
WHERE o.mode <> 'off' AND p.state = 'open' ORDER BY p.partition_id;

-- name: auto_changes
-- Changes of topics that count for budgets, cool-downs and rests, the newest first, and those that are open.
SELECT c.topic_id, c.change_id, c.kind, c.state, c.actor, extract(epoch FROM clock_timestamp() - c.planned_at)::float8,
       (SELECT coalesce(array_agg(p.partition_id ORDER BY p.lp_from), '{}')
        FROM mqlayer.partition p WHERE p.created_by_change = c.change_id)
FROM mqlayer.route_change c
WHERE c.topic_id = ANY(%(topics)s::int[])
  AND (c.planned_at > clock_timestamp() - interval '1 day' OR c.state IN ('planned', 'sealing', 'sealed'))
ORDER BY c.change_id DESC;

-- name: route_loads_put
-- Put a sample of each partition in front; not where another run has just done so.
INSERT INTO mqlayer.route_load AS l (partition_id, at_s, next_offset, settled)
SELECT partition_id, ARRAY[extract(epoch FROM clock_timestamp())::float8], ARRAY[next_offset], ARRAY[settled]
FROM unnest(%(partitions)s::int[], %(ends)s::bigint[], %(settled)s::bigint[]) AS measured(partition_id, next_offset, settled)
ORDER BY partition_id
ON CONFLICT (partition_id) DO UPDATE
SET at_s = (excluded.at_s || l.at_s)[1:64], next_offset = (excluded.next_offset || l.next_offset)[1:64],
    settled = (excluded.settled || l.settled)[1:64]
WHERE excluded.at_s[1] >= l.at_s[1] + %(gap_s)s;

-- name: route_loads_sampled
-- Note of which partitions the LPs are sampled now.
UPDATE mqlayer.route_load SET sampled_at = clock_timestamp() WHERE partition_id = ANY(%(partitions)s::int[]);

-- name: route_loads_clean
-- Forget samples of partitions that take nothing more, and of topics without automatic routes.
DELETE FROM mqlayer.route_load l USING mqlayer.partition p
WHERE p.partition_id = l.partition_id AND (p.state <> 'open' OR NOT EXISTS (
    SELECT FROM mqlayer.route_policy o WHERE o.topic_id = p.topic_id AND o.mode <> 'off'));

-- name: route_capacity_put
-- Note the capacity that was measured.
UPDATE mqlayer.route_policy SET measured_per_s = %(per_s)s WHERE topic_id = %(topic_id)s;

-- name: decision_insert
-- Note a decision.
INSERT INTO mqlayer.route_decision (topic_id, verdict, kind, partitions, reason, key, lp, change_id, facts)
VALUES (%(topic_id)s, %(verdict)s, %(kind)s, %(partitions)s, %(reason)s, %(key)s, %(lp)s, %(change_id)s, %(facts)s);

-- name: decision_insert_new
-- Note a decision, unless the same was noted of these partitions a short time ago.
INSERT INTO mqlayer.route_decision (topic_id, verdict, kind, partitions, reason, key, lp, facts)
SELECT %(topic_id)s, %(verdict)s, %(kind)s, %(partitions)s::int[], %(reason)s, %(key)s, %(lp)s, %(facts)s
WHERE NOT EXISTS (
    SELECT FROM mqlayer.route_decision d
    WHERE d.topic_id = %(topic_id)s AND d.verdict = %(verdict)s AND d.kind = %(kind)s AND d.partitions = %(partitions)s::int[]
      AND d.at > clock_timestamp() - make_interval(secs => %(again_s)s));

-- name: decisions_clean
-- Forget the decisions of a topic that are old, or too many; never one that waits for its judgement.
DELETE FROM mqlayer.route_decision d
WHERE d.topic_id = %(topic_id)s AND (d.verdict <> 'changed' OR d.judged_at IS NOT NULL)
  AND (d.at < clock_timestamp() - make_interval(secs => %(kept_s)s)
       OR d.decision_id <= (SELECT o.decision_id FROM mqlayer.route_decision o WHERE o.topic_id = %(topic_id)s
                            ORDER BY o.decision_id DESC OFFSET %(rows)s LIMIT 1));

-- name: decisions_unjudged
-- Changes of the autopilot that wait for their judgement, with their ends, and whether their parents are drained.
SELECT d.topic_id, d.decision_id, d.change_id, d.kind, d.facts, c.state,
       extract(epoch FROM clock_timestamp() - c.opened_at)::float8,
       NOT EXISTS {undrained},
       (SELECT coalesce(array_agg(p.partition_id ORDER BY p.lp_from), '{}')
        FROM mqlayer.partition p WHERE p.created_by_change = c.change_id)
FROM mqlayer.route_decision d JOIN mqlayer.route_change c USING (change_id)
WHERE d.topic_id = ANY(%(topics)s::int[]) AND d.judged_at IS NULL ORDER BY d.decision_id;

-- name: decision_judge
-- Note how a change ended, once.
UPDATE mqlayer.route_decision SET judged_at = clock_timestamp(), helped = %(helped)s, facts = facts || %(facts)s
WHERE decision_id = %(decision_id)s AND judged_at IS NULL;

-- name: decisions_of
-- The last decisions of a topic, the newest first.
SELECT d.decision_id, d.at, d.verdict, d.kind, d.partitions, d.reason, d.key, d.lp, d.change_id, d.facts, d.judged_at, d.helped,
       c.state, extract(epoch FROM c.ended_at - c.planned_at)::float8
FROM mqlayer.route_decision d JOIN mqlayer.topic t USING (topic_id) LEFT JOIN mqlayer.route_change c USING (change_id)
WHERE t.name = %(topic)s ORDER BY d.decision_id DESC LIMIT %(limit)s;

-- name: metrics_autopilot
-- Of topics with automatic routes: changes ever made so, whether they stopped, and LPs that no split helps.
SELECT t.name, (SELECT count(*) FROM mqlayer.route_change c
                WHERE c.topic_id = t.topic_id AND c.actor = 'autopilot' AND c.state = 'done')::int,
       (p.stopped_at IS NOT NULL)::int, (SELECT count(DISTINCT d.lp) FROM mqlayer.route_decision d
                                         WHERE d.topic_id = t.topic_id AND d.verdict = 'refused' AND d.lp IS NOT NULL
                                           AND d.at > now() - interval '15 minutes')::int
FROM mqlayer.route_policy p JOIN mqlayer.topic t USING (topic_id)
WHERE p.mode <> 'off' AND t.deleting_at IS NULL AND t.deleted_at IS NULL ORDER BY t.name;

-- name: check_autopilot
-- Topics whose automatic routes stopped themselves: why, and for how long.
SELECT t.name, p.stopped_because, extract(epoch FROM clock_timestamp() - p.stopped_at)::float8
FROM mqlayer.route_policy p JOIN mqlayer.topic t USING (topic_id)
WHERE p.stopped_at IS NOT NULL AND p.mode <> 'off' AND t.deleting_at IS NULL AND t.deleted_at IS NULL ORDER BY t.name;

-- name: check_hot_keys
-- LPs that are hotter than a partition can serve, where no split helps: partition, LP, the reason, and since when.
SELECT DISTINCT ON (t.name, d.lp) t.name, d.partitions[1], d.lp, d.reason,
       extract(epoch FROM clock_timestamp() - d.at)::float8
FROM mqlayer.route_decision d
JOIN mqlayer.route_policy p USING (topic_id)
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.partition q ON q.partition_id = d.partitions[1] AND q.state = 'open'
WHERE d.verdict = 'refused' AND d.lp IS NOT NULL AND d.at > now() - interval '15 minutes' AND p.mode <> 'off'
ORDER BY t.name, d.lp, d.decision_id DESC;

-- name: policy_counts_put
-- Count the changes in a row that failed, and those that did not help: add one, keep or reset.
UPDATE mqlayer.route_policy
SET failed = CASE %(failed)s::text WHEN 'add' THEN failed + 1 WHEN 'reset' THEN 0 ELSE failed END,
    unhelpful = CASE %(unhelpful)s::text WHEN 'add' THEN unhelpful + 1 WHEN 'reset' THEN 0 ELSE unhelpful END
WHERE topic_id = %(topic_id)s
RETURNING failed, unhelpful;

-- name: policy_stop
-- The autopilot stops itself for a topic.
UPDATE mqlayer.route_policy SET stopped_at = clock_timestamp(), stopped_because = %(reason)s
WHERE topic_id = %(topic_id)s AND stopped_at IS NULL;

-- name: policy_of
-- The policy of a topic.
SELECT mode, min_partitions, max_partitions, capacity_per_s, changes_per_hour, cool_down_s, rest_s, quiet_from, quiet_to
FROM mqlayer.route_policy WHERE topic_id = %(topic_id)s;

-- name: policy_put
-- Set the policy of a topic; where its mode is said, it begins anew, though it had stopped itself.
INSERT INTO mqlayer.route_policy AS p (topic_id, mode, min_partitions, max_partitions, capacity_per_s, changes_per_hour,
                                       cool_down_s, rest_s, quiet_from, quiet_to, set_by)
VALUES (%(topic_id)s, %(mode)s, %(min_partitions)s, %(max_partitions)s, %(capacity_per_s)s, %(changes_per_hour)s,
        %(cool_down_s)s, %(rest_s)s, %(quiet_from)s, %(quiet_to)s, %(actor)s)
ON CONFLICT (topic_id) DO UPDATE
SET mode = excluded.mode, min_partitions = excluded.min_partitions, max_partitions = excluded.max_partitions,
    capacity_per_s = excluded.capacity_per_s, changes_per_hour = excluded.changes_per_hour,
    cool_down_s = excluded.cool_down_s, rest_s = excluded.rest_s, quiet_from = excluded.quiet_from,
    quiet_to = excluded.quiet_to, set_by = excluded.set_by, set_at = now(),
    failed = CASE WHEN %(begin)s THEN 0 ELSE p.failed END, unhelpful = CASE WHEN %(begin)s THEN 0 ELSE p.unhelpful END,
    stopped_at = CASE WHEN %(begin)s THEN NULL ELSE p.stopped_at END,
    stopped_because = CASE WHEN %(begin)s THEN NULL ELSE p.stopped_because END;
