-- name: topic_overviews
-- A page of topics by name: what each has, and its figures by the samples of the last ten minutes. Rates per minute.
SELECT t.name, t.strategy, t.version, t.archived, t.schema_mode,
       (SELECT max(s.version) FROM mqlayer.topic_schema s WHERE s.topic_id = t.topic_id) AS schema_version,
       t.paused_at, t.paused_by, t.deleting_at,
       (SELECT count(*) FROM mqlayer.partition p
        WHERE p.topic_id = t.topic_id AND p.state = 'open') AS partitions,
       (SELECT count(*) FROM mqlayer.partition p WHERE p.topic_id = t.topic_id AND p.state = 'sealed') AS sealed,
       g.groups, g.lag, g.oldest_s,
       s.committed_grown / s.minutes AS committed_per_min, s.stored_grown / s.minutes AS stored_per_min,
       CASE WHEN s.stored_grown IS NOT NULL AND g.lag_growth IS NOT NULL
           THEN greatest(0, s.stored_grown / s.minutes - g.lag_growth) END AS settled_per_min,
       s.unrelayed, s.sampled_at
FROM (SELECT * FROM mqlayer.topic
      WHERE deleted_at IS NULL AND name > %(after)s AND strpos(name, %(contains)s) > 0
      ORDER BY name LIMIT %(limit)s) AS t
LEFT JOIN LATERAL (
    SELECT CASE WHEN a.committed IS NOT NULL THEN greatest(0, a.committed - a.committed_first) END AS committed_grown,
           CASE WHEN a.stored IS NOT NULL THEN greatest(0, a.stored - a.stored_first) END AS stored_grown,
           CASE WHEN a.committed IS NOT NULL THEN greatest(0, a.committed - a.relayed) END AS unrelayed,
           a.minutes, a.sampled_at
    FROM (SELECT (array_agg(committed ORDER BY at DESC))[1] AS committed,
                 (array_agg(committed ORDER BY at))[1] AS committed_first,
                 (array_agg(stored ORDER BY at DESC))[1] AS stored, (array_agg(stored ORDER BY at))[1] AS stored_first,
                 (array_agg(relayed ORDER BY at DESC))[1] AS relayed, max(at) AS sampled_at,
                 nullif(extract(epoch FROM max(at) - min(at)) / 60, 0)::float8 AS minutes
          FROM mqlayer.sample
          WHERE kind = 'topic' AND object_id = t.topic_id AND at > now() - interval '10 minutes') AS a) AS s ON true
LEFT JOIN LATERAL (
    SELECT count(*) AS groups, max(l.lag) AS lag, max(l.oldest_s) AS oldest_s, max(l.growth) AS lag_growth
    FROM mqlayer.consumer_group c
    LEFT JOIN LATERAL (
        SELECT (array_agg(lag ORDER BY at DESC))[1] AS lag, (array_agg(oldest_s ORDER BY at DESC))[1] AS oldest_s,
               ((array_agg(lag ORDER BY at DESC))[1] - (array_agg(lag ORDER BY at))[1])
                   / nullif(extract(epoch FROM max(at) - min(at)) / 60, 0)::float8 AS growth
        FROM mqlayer.sample
        WHERE kind = 'group' AND object_id = c.group_id AND at > now() - interval '10 minutes') AS l ON true
    WHERE c.topic_id = t.topic_id AND c.state = 'live' AND c.mode <> 'broadcast') AS g ON true
ORDER BY t.name;

-- part: overview_of_group
c.topic, c.name, c.mode, c.state, c.paused_at, c.paused_by, c.topic_paused_at, c.topic_paused_by,
       (SELECT count(*) FROM mqlayer.member m
        WHERE m.lease_until >= now() AND (m.group_id = c.group_id OR c.mode = 'broadcast' AND m.group_id IN (
            SELECT i.group_id FROM mqlayer.consumer_group i WHERE i.broadcast_of = c.group_id))) AS members,
       (SELECT count(*) FROM mqlayer.member m JOIN mqlayer.assignment a USING (group_id, member_id)
        WHERE m.group_id = c.group_id AND m.lease_until >= now()) AS owned,
       p.partitions,
       (SELECT count(*) FROM mqlayer.partition_pause pp WHERE pp.group_id = c.group_id) AS paused_partitions,
       s.lag[1], s.oldest_s, s.parked, s.dead,
       CASE WHEN d.grown IS NOT NULL AND s.lag[1] IS NOT NULL
           THEN greatest(0, d.grown - s.lag[1] + s.lag[array_upper(s.lag, 1)]) / d.minutes END AS settled_per_min,
       s.sampled_at,
       CASE WHEN cardinality(%(silent)s::int[]) = 0 THEN 0
           ELSE (SELECT count(*) FROM mqlayer.partition q
                 WHERE q.topic_id = c.topic_id AND q.state = 'open' AND q.node_id = ANY(%(silent)s::int[])) END AS silent
FROM chosen c
LEFT JOIN LATERAL (SELECT count(*) AS partitions FROM mqlayer.partition p
                   WHERE p.topic_id = c.topic_id AND p.state = 'open') AS p ON true
LEFT JOIN LATERAL (
    SELECT array_agg(lag ORDER BY at DESC) AS lag, (array_agg(oldest_s ORDER BY at DESC))[1] AS oldest_s,
           (array_agg(parked ORDER BY at DESC))[1] AS parked, (array_agg(dead ORDER BY at DESC))[1] AS dead,
           max(at) AS sampled_at, min(at) AS since
    FROM mqlayer.sample WHERE kind = 'group' AND object_id = c.group_id AND at > now() - interval '10 minutes') AS s ON true
LEFT JOIN LATERAL (
    SELECT (array_agg(stored ORDER BY at DESC))[1] - (array_agg(stored ORDER BY at))[1] AS grown,
           nullif(extract(epoch FROM max(at) - min(at)) / 60, 0)::float8 AS minutes
    FROM mqlayer.sample
    WHERE kind = 'topic' AND object_id = c.topic_id AND at BETWEEN s.since AND s.sampled_at) AS d ON true

-- name: group_overviews
-- A page of groups by topic and name: members, owned partitions, and figures of the last ten minutes' samples.
WITH chosen AS (
    SELECT t.name AS topic, t.paused_at AS topic_paused_at, t.paused_by AS topic_paused_by, g.*
    FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
    WHERE t.deleted_at IS NULL AND g.state <> 'retired' AND (t.name, g.name) > (%(after_topic)s, %(after)s)
      AND (%(topic)s::text IS NULL OR t.name = %(topic)s) AND strpos(g.name, %(contains)s) > 0
    ORDER BY t.name, g.name LIMIT %(limit)s)
SELECT {overview_of_group}
ORDER BY c.topic, c.name;

-- name: groups_in_trouble
-- Groups that an operator should look at, the oldest waiting message first: paused, without a member, a message that waits
-- for longer than a time, or a lag that a silent node hides: when it was sampled, or now by those given as `silent`. With how
-- many there are in all.
WITH live AS (
    SELECT t.name AS topic, t.paused_at AS topic_paused_at, t.paused_by AS topic_paused_by, g.*, l.oldest_s, l.lag, l.at AS sampled_at,
           EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until >= now()) AS alive
    FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
    LEFT JOIN LATERAL (SELECT at, oldest_s, lag FROM mqlayer.sample
                       WHERE kind = 'group' AND object_id = g.group_id AND at > now() - interval '10 minutes'
                       ORDER BY at DESC LIMIT 1) AS l ON true
    WHERE g.state = 'live' AND g.mode <> 'broadcast' AND t.deleted_at IS NULL
), wrong AS (
    SELECT * FROM live
    WHERE paused_at IS NOT NULL OR topic_paused_at IS NOT NULL OR oldest_s > %(late_s)s
       OR (mode <> 'pop' AND NOT alive AND lag > 0) OR (sampled_at IS NOT NULL AND lag IS NULL)
       OR EXISTS (SELECT FROM mqlayer.partition_pause pp WHERE pp.group_id = live.group_id)
       OR topic_id IN (SELECT q.topic_id FROM mqlayer.partition q
                       WHERE q.state = 'open' AND q.node_id = ANY(%(silent)s::int[]))
), chosen AS (
    SELECT * FROM wrong ORDER BY oldest_s DESC NULLS LAST, topic, name LIMIT %(limit)s)
SELECT (SELECT count(*) FROM wrong), {overview_of_group}
ORDER BY s.oldest_s DESC NULLS LAST, c.topic, c.name;

-- name: route_newest
-- The newest version of a topic that a change made or plans.
SELECT greatest(t.version, (SELECT max(c.version) FROM mqlayer.route_change c
                            WHERE c.topic_id = t.topic_id AND c.state <> 'dropped'))
FROM mqlayer.topic t WHERE t.name = %(topic)s;

-- name: route_partitions_between
-- The partitions that were in force in some version of a span, with their first version and the one that ended each.
SELECT p.partition_id, p.node_id, p.lp_from, p.lp_to, p.state, coalesce(b.version, 1) AS first_version,
       CASE WHEN e.state = 'done' THEN e.version END AS ended_version
FROM mqlayer.topic t
JOIN mqlayer.partition p ON p.topic_id = t.topic_id
LEFT JOIN mqlayer.route_change b ON b.change_id = p.created_by_change
LEFT JOIN mqlayer.route_change e ON e.change_id = p.ended_by_change
WHERE t.name = %(topic)s AND (b.change_id IS NULL OR b.state = 'done') AND p.state <> 'importing'
  AND coalesce(b.version, 1) <= %(upto)s AND (e.state IS DISTINCT FROM 'done' OR e.version > %(since)s)
ORDER BY p.lp_from, p.partition_id;

-- name: inspected_seal
-- How a partition ended, or is about to: the change, its seal if any, and the successors.
SELECT c.change_id, c.version, c.kind, c.state, c.actor, c.planned_at, s.sealed_at, s.next_offset, s.unreachable, s.cut,
       (SELECT coalesce(array_agg(q.partition_id ORDER BY q.lp_from), '{}') FROM mqlayer.partition q
        WHERE q.created_by_change = c.change_id AND q.lp_from < p.lp_to AND p.lp_from < q.lp_to) AS successors
FROM mqlayer.partition p JOIN mqlayer.route_change c ON c.change_id = p.ended_by_change
LEFT JOIN mqlayer.seal s ON s.partition_id = p.partition_id
WHERE p.partition_id = %(partition)s;

-- name: topic_settings
-- A topic with its limits and schema.
SELECT t.topic_id, t.name, t.strategy, t.version, t.body_limit, t.backlog_limit, t.archived, t.retention_days, t.schema_mode,
       (SELECT max(s.version) FROM mqlayer.topic_schema s WHERE s.topic_id = t.topic_id) AS schema_version,
       t.paused_at, t.paused_by, t.deleting_at, t.created_at, t.message_ttl_s, t.expired, t.durability
FROM mqlayer.topic t WHERE t.name = %(topic)s;

-- name: inspected_parked_totals
-- Messages and bytes that groups have parked.
SELECT group_id, coalesce(sum(messages), 0)::bigint, coalesce(sum(bytes), 0)::bigint FROM mqlayer.parked_total
WHERE group_id = ANY(%(group_ids)s::bigint[]) GROUP BY group_id;
