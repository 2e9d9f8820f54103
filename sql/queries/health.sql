-- name: health_nodes
-- All nodes with when each began to drain, was armed, lost, registered and sampled last, and its partitions that are not deleted.
SELECT n.node_id, n.name, n.url, n.armed_run_id, n.draining_at, n.zone, n.armed_at, n.lost_at, n.created_at, s.at, p.open,
       p.sealed
FROM mqlayer.node n
CROSS JOIN LATERAL (SELECT max(s.at) AS at FROM mqlayer.sample s WHERE s.kind = 'node' AND s.object_id = n.node_id) AS s
LEFT JOIN (
    SELECT p.node_id, count(*) FILTER (WHERE p.state = 'open')::int AS open, count(*) FILTER (WHERE p.state = 'sealed')::int AS sealed
    FROM mqlayer.partition p WHERE p.state <> 'deleted' GROUP BY p.node_id) AS p USING (node_id)
WHERE n.removed_at IS NULL ORDER BY n.node_id;

-- name: health_groups
-- Live groups with a position: how many partitions each has to read, how many members live, who paused it or its topic
-- and when, and its lag by a sample of the last three minutes; null where there is no such sample.
SELECT t.name, g.name, g.mode,
       (SELECT count(*) FROM mqlayer.partition p WHERE p.topic_id = g.topic_id AND p.state IN ('open', 'sealed'))::int,
       (SELECT count(*) FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until >= now())::int,
       coalesce(g.paused_at, t.paused_at), CASE WHEN g.paused_at IS NULL THEN t.paused_by ELSE g.paused_by END,
       s.at IS NOT NULL, s.lag, s.oldest_s
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN LATERAL (
    SELECT s.at, s.lag, s.oldest_s FROM mqlayer.sample s
    WHERE s.kind = 'group' AND s.object_id = g.group_id AND s.at > now() - interval '3 minutes'
    ORDER BY s.at DESC LIMIT 1) AS s ON true
WHERE g.state = 'live' AND g.mode <> 'broadcast' ORDER BY t.name, g.name;

-- name: health_lag
-- Groups whose oldest message was older than so many seconds in each sample of the last ten minutes, and got older: since
-- when the samples say so, of those of a day.
SELECT t.name, g.name, w.last_s, w.lag
FROM (
    SELECT s.object_id, min(s.oldest_s) AS least_s, (array_agg(s.oldest_s ORDER BY s.at))[1] AS first_s,
           (array_agg(s.oldest_s ORDER BY s.at DESC))[1] AS last_s, (array_agg(s.lag ORDER BY s.at DESC))[1] AS lag,
           count(*) AS samples
    FROM mqlayer.sample s
    WHERE s.kind = 'group' AND s.at > now() - interval '10 minutes' AND s.oldest_s IS NOT NULL GROUP BY s.object_id) AS w
JOIN mqlayer.consumer_group g ON g.group_id = w.object_id JOIN mqlayer.topic t USING (topic_id)
WHERE g.state = 'live' AND w.samples >= 3 AND w.least_s > %(above_s)s AND w.last_s > w.first_s
ORDER BY t.name, g.name;

-- name: health_breakers
-- Circuit breakers of live groups that are not closed, and why.
SELECT t.name, g.name, b.state, b.changed_at, b.opened_at, b.cause, b.actor, b.failing_keys, b.probes, b.probe_at
FROM mqlayer.breaker b JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE b.state <> 'closed' AND g.state = 'live' AND g.breaker_share IS NOT NULL ORDER BY t.name, g.name;

-- name: health_dead
-- Messages of live groups that died within an hour, up to a bound, and when the last and the first of a group died.
SELECT t.name, g.name, d.dead, d.last_at, d.first_at
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
CROSS JOIN LATERAL (
    SELECT count(*)::int AS dead, max(those.died_at) AS last_at, min(those.died_at) AS first_at
    FROM (SELECT f.died_at FROM mqlayer.dead_fact f
          WHERE f.group_id = g.group_id AND f.redriven_at IS NULL AND f.died_at > now() - interval '1 hour'
          ORDER BY f.died_at DESC LIMIT %(limit)s) AS those) AS d
WHERE g.state = 'live' AND d.dead > 0 ORDER BY t.name, g.name;

-- name: health_members
-- Members of live groups whose lease ran out although they did not leave: how many of a group, one of them, and since when
-- where that is known.
SELECT t.name, g.name, count(*)::int, min(m.member_id), min(nullif(m.lease_until, '-infinity'))
FROM mqlayer.member m JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE NOT m.leaving AND m.lease_until < now() AND g.state = 'live' AND m.joined_at > now() - interval '1 day'
GROUP BY t.name, g.name ORDER BY t.name, g.name;

-- name: health_sources
-- Names of direct producers with several open sources: how many, and when the first was opened.
SELECT s.name, count(*)::int, min(s.opened_at), max(s.opened_at) FROM mqlayer.source s
WHERE s.kind = 'direct' AND s.closed_at IS NULL AND s.dropped_at IS NULL
GROUP BY s.name HAVING count(*) > 1 ORDER BY min(s.opened_at) LIMIT %(limit)s;

-- name: health_totals
-- How many topics, live groups and living members there are, when the last sample was taken and schemas were made, and
-- what topics took in per second by their last two samples: committed to the outbox, relayed, stored.
SELECT (SELECT count(*) FROM mqlayer.topic WHERE deleted_at IS NULL)::int,
       (SELECT count(*) FROM mqlayer.consumer_group WHERE state = 'live' AND mode <> 'broadcast')::int,
       (SELECT count(*) FROM mqlayer.member WHERE lease_until >= now())::int,
       (SELECT max(at) FROM mqlayer.sample), (SELECT min(at) FROM mqlayer.migration),
       sum(r.committed)::float8, sum(r.relayed)::float8,
       CASE WHEN NOT bool_or(r.is_unknown) THEN sum(r.stored)::float8 END
FROM (
    SELECT CASE WHEN s.committed < lag(s.committed) OVER w THEN 0 ELSE s.committed - lag(s.committed) OVER w END
               / extract(epoch FROM s.at - lag(s.at) OVER w) AS committed,
           CASE WHEN s.relayed < lag(s.relayed) OVER w THEN 0 ELSE s.relayed - lag(s.relayed) OVER w END
               / extract(epoch FROM s.at - lag(s.at) OVER w) AS relayed,
           CASE WHEN s.stored < lag(s.stored) OVER w THEN 0 ELSE s.stored - lag(s.stored) OVER w END
               / extract(epoch FROM s.at - lag(s.at) OVER w) AS stored,
           s.stored IS NULL AS is_unknown, row_number() OVER (PARTITION BY s.object_id ORDER BY s.at DESC) AS place
    FROM mqlayer.sample s WHERE s.kind = 'topic' AND s.at > now() - interval '5 minutes'
    WINDOW w AS (PARTITION BY s.object_id ORDER BY s.at)) AS r
WHERE r.place = 1;

-- name: health_jobs
-- Periodic jobs that ran: when the last run began and ended, how long it took, and its error. Of several application
-- databases, one whose run failed, of those whose job ran within a day.
SELECT DISTINCT ON (split_part(name, '@', 1)) split_part(name, '@', 1) AS name, last_at, ended_at,
       extract(epoch FROM ended_at - last_at)::float8, error
FROM mqlayer.job WHERE split_part(name, '@', 1) = ANY(%(names)s::text[])
ORDER BY split_part(name, '@', 1), last_at > now() - interval '1 day' DESC NULLS LAST, error IS NOT NULL DESC, last_at DESC;

-- name: relay_list
-- Relays with the end of their leases, the LP sets that each holds, and when each sent messages last.
SELECT r.relay_id, r.lease_until, r.lease_until >= now(),
       (SELECT count(*) FROM mqlayer_app.lp_set s WHERE s.relay_id = r.relay_id AND s.lease_until >= now())::int, r.sent_at,
       r.version, r.most
FROM mqlayer_app.relay r ORDER BY r.lease_until DESC, r.relay_id LIMIT %(limit)s;

-- name: member_list
-- Members of all groups by their ids, from behind one on; those whose leases ran out, too.
SELECT t.name, g.name, m.group_id, m.member_id, m.host, m.pid, m.joined_at, m.leaving, nullif(m.lease_until, '-infinity'),
       m.lease_until >= now(), m.version, m.most
FROM mqlayer.member m JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE (m.group_id, m.member_id) > (%(after_group)s::bigint, %(after_member)s::text)
ORDER BY m.group_id, m.member_id LIMIT %(limit)s;

-- name: source_list
-- Outboxes and direct producers that are open, the newest first, from before one on.
SELECT s.source_id, s.kind, s.name, s.opened_by, s.opened_at FROM mqlayer.source s
WHERE s.closed_at IS NULL AND s.dropped_at IS NULL AND (%(before)s::bigint IS NULL OR s.source_id < %(before)s)
ORDER BY s.source_id DESC LIMIT %(limit)s;

-- name: health_node_partitions
-- Partitions on a node that are not deleted, from behind one on.
SELECT p.partition_id, t.name, p.lp_from, p.lp_to, p.state, p.created_at, p.ended_by_change
FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id)
WHERE p.node_id = %(node_id)s AND p.state <> 'deleted' AND p.partition_id > %(after)s
ORDER BY p.partition_id LIMIT %(limit)s;

-- name: problems_open
-- Problems that have not ended: number, place, when each began as far as that is known, when it was seen first and last, and
-- by which part of a look.
SELECT problem_id, alert, topic, group_name, node, item, since, first_seen_at, last_seen_at, part FROM mqlayer.problem
WHERE ended_at IS NULL ORDER BY problem_id LIMIT %(limit)s;

-- name: problems_put
-- Note the problems of a look: new ones, and when known ones were seen last. Nothing of a look that began before another
-- one that is noted.
INSERT INTO mqlayer.problem AS p (alert, severity, part, topic, group_name, node, item, text, effect, since, first_seen_at,
                                  last_seen_at)
SELECT n.alert, n.severity, n.part, n.topic, n.group_name, n.node, n.item, n.text, n.effect, n.since,
       to_timestamp(%(at)s), to_timestamp(%(at)s)
FROM unnest(%(alert)s::text[], %(severity)s::text[], %(part)s::text[], %(topic)s::text[], %(group)s::text[],
            %(node)s::text[], %(item)s::text[], %(text)s::text[], %(effect)s::text[], %(since)s::timestamptz[])
     AS n (alert, severity, part, topic, group_name, node, item, text, effect, since)
WHERE NOT EXISTS (SELECT FROM mqlayer.problem later WHERE greatest(later.last_seen_at, later.ended_at) > to_timestamp(%(at)s))
ON CONFLICT (alert, topic, group_name, node, item) WHERE ended_at IS NULL
DO UPDATE SET text = excluded.text, effect = excluded.effect, last_seen_at = excluded.last_seen_at;

-- name: problems_end
-- End problems that a look did not find any more, in the parts that it could read; how many.
WITH ended AS (
    UPDATE mqlayer.problem SET ended_at = to_timestamp(%(at)s)
    WHERE ended_at IS NULL AND last_seen_at < to_timestamp(%(at)s) AND part <> ALL (%(unread)s::text[]) RETURNING 1
)
SELECT count(*) FROM ended;

-- name: problems_clean
-- Forget problems that were seen last a while ago, and of the rest the first ones beyond so many; how many.
WITH gone AS (
    DELETE FROM mqlayer.problem WHERE ctid = ANY(ARRAY(
        SELECT ctid FROM mqlayer.problem
        WHERE last_seen_at <= now() - make_interval(secs => %(kept_s)s)
           OR problem_id <= (SELECT n.problem_id FROM mqlayer.problem n ORDER BY n.problem_id DESC OFFSET %(rows)s LIMIT 1)
        LIMIT %(limit)s))
    RETURNING 1
)
SELECT count(*) FROM gone;

-- name: problem_list
-- Problems that ended, the last one first, from before one on.
SELECT p.problem_id, p.alert, p.severity, p.topic, p.group_name, p.node, p.item, p.text, p.effect, p.since, p.first_seen_at,
       p.last_seen_at, p.ended_at
FROM mqlayer.problem p
WHERE p.ended_at > now() - make_interval(secs => %(last_s)s) AND p.severity = ANY (%(severities)s::text[])
  AND (%(before)s::bigint IS NULL OR (p.ended_at, p.problem_id) < (
      SELECT b.ended_at, b.problem_id FROM mqlayer.problem b WHERE b.problem_id = %(before)s))
ORDER BY p.ended_at DESC, p.problem_id DESC LIMIT %(limit)s;

-- name: problem_one
-- One problem.
SELECT p.problem_id, p.alert, p.severity, p.topic, p.group_name, p.node, p.item, p.text, p.effect, p.since, p.first_seen_at,
       p.last_seen_at, p.ended_at
FROM mqlayer.problem p WHERE p.problem_id = %(problem_id)s;

-- name: health_standstill
-- The last samples of so many seconds by which messages were committed, and relayed, since the sample before; null where
-- none was. And the oldest sample.
SELECT max(s.at) FILTER (WHERE s.committed > 0), max(s.at) FILTER (WHERE s.relayed > 0), min(s.at)
FROM (
    SELECT at, committed - lag(committed) OVER w AS committed, relayed - lag(relayed) OVER w AS relayed
    FROM mqlayer.sample WHERE kind = 'topic' AND at > now() - make_interval(secs => %(last_s)s)
    WINDOW w AS (PARTITION BY object_id ORDER BY at)) AS s;

-- name: health_failing
-- Groups with failed attempts of the last ten minutes: how many, up to a bound over all groups, and how many messages each
-- handled meanwhile, by the first and the last sample of that time; null where there are not two.
SELECT t.name, g.name, f.failed, f.first_at,
       (l.stored - b.stored) - (l.lag - b.lag) AS handled
FROM (SELECT a.group_id, count(*) AS failed, min(a.failed_at) AS first_at
      FROM (SELECT a.group_id, a.failed_at FROM mqlayer.failed_attempt a
            WHERE a.failed_at > now() - interval '10 minutes' ORDER BY a.failed_at DESC LIMIT %(limit)s) AS a
      GROUP BY a.group_id) AS f
JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN LATERAL (
    SELECT o.at, o.stored, s.lag FROM mqlayer.sample o JOIN mqlayer.sample s USING (at)
    WHERE o.kind = 'topic' AND o.object_id = g.topic_id AND s.kind = 'group' AND s.object_id = g.group_id
      AND o.at > now() - interval '11 minutes' ORDER BY o.at LIMIT 1) AS b ON true
LEFT JOIN LATERAL (
    SELECT o.at, o.stored, s.lag FROM mqlayer.sample o JOIN mqlayer.sample s USING (at)
    WHERE o.kind = 'topic' AND o.object_id = g.topic_id AND s.kind = 'group' AND s.object_id = g.group_id
      AND o.at > now() - interval '11 minutes' AND o.at > b.at ORDER BY o.at DESC LIMIT 1) AS l ON true
WHERE g.state = 'live' ORDER BY t.name, g.name;

-- name: health_hot
-- Of each topic with several partitions, the one that takes in more than twice its fair share, or half of what that leaves
-- besides, by the rates of the last minutes: its rate per second, the topic's, and the fair share, which is that of its LPs,
-- or an equal one if that is more.
SELECT DISTINCT ON (r.topic_id) t.name, r.partition_id, r.per_s, r.all_per_s, r.fair
FROM (
    SELECT p.topic_id, p.partition_id, m.per_s, sum(m.per_s) OVER of_topic AS all_per_s,
           greatest((p.lp_to - p.lp_from) / 1024.0::float8, 1 / (count(*) OVER of_topic)::float8) AS fair,
           count(*) OVER of_topic AS partitions
    FROM mqlayer.partition p JOIN mqlayer.partition_rate m USING (partition_id)
    WHERE p.state = 'open' AND m.measured_at > now() - interval '5 minutes'
    WINDOW of_topic AS (PARTITION BY p.topic_id)) AS r
JOIN mqlayer.topic t USING (topic_id)
WHERE r.partitions > 1 AND r.per_s >= %(least_per_s)s AND r.per_s > r.all_per_s * least(2 * r.fair, (1 + r.fair) / 2)
ORDER BY r.topic_id, r.per_s DESC;

-- name: outbox_places
-- Topics, and the LPs that each node has of them now, as ranges.
SELECT t.topic_id, t.name, n.name, range_agg(int4range(r.lp_from, r.lp_to))::text
FROM mqlayer.topic t JOIN mqlayer.route r ON r.topic_id = t.topic_id AND r.version = t.version
JOIN mqlayer.partition p USING (partition_id) JOIN mqlayer.node n USING (node_id)
WHERE t.deleted_at IS NULL GROUP BY t.topic_id, t.name, n.name;

-- name: health_dropped
-- Live groups that lost unsettled messages by their topics' limits within the last hour.
SELECT t.name, g.name, sum(l.lost)::bigint, max(l.lost_at)
FROM mqlayer.retention_loss l JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE g.state = 'live' AND t.deleted_at IS NULL AND l.event = 'dropped'
GROUP BY t.name, g.name HAVING max(l.lost_at) > clock_timestamp() - interval '1 hour' AND sum(l.lost) > 0
ORDER BY 1, 2;
