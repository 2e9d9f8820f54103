-- name: inspected_groups
-- Groups with their settings and how many members live: of all topics, of one, or one of one topic.
SELECT g.group_id, t.name, g.name, g.state, g.version, t.version AS topic_version, g.start, g.start_at, g.seek,
       g.created_at, g.ordered, g.balance, g.settings_version, g.paused_at, g.mode, g.scope,
       (SELECT count(*) FROM mqlayer.member m
        WHERE m.lease_until >= now() AND (m.group_id = g.group_id OR g.mode = 'broadcast' AND m.group_id IN (
            SELECT i.group_id FROM mqlayer.consumer_group i WHERE i.broadcast_of = g.group_id))) AS alive,
       g.tag_filter, g.instance, coalesce(g.instance_expiry_s, b.instance_expiry_s),
       extract(epoch FROM clock_timestamp() - g.absent_since)::float8, g.backoff_s, g.backoff_jitter, g.attempt_limit, g.policy, g.non_retryable_errors, g.retryable_errors, g.time_limit_s,
       g.max_time_limit_s, g.parked_keys_limit, g.parked_messages_limit, g.parked_bytes_limit, g.key_messages_limit,
       g.key_bytes_limit, g.breaker_share, g.breaker_keys, g.breaker_window_s, g.breaker_errors, g.key_class, g.class_concurrency,
       g.class_rate, g.paused_by, t.paused_at AS topic_paused_at, t.paused_by AS topic_paused_by, g.rate_limit,
       g.rate_burst, s.state, s.changed_at, s.opened_at, s.cause, s.actor, s.failing_keys, s.probes, s.probe_at,
       coalesce((
           SELECT jsonb_object_agg(l.deployment, l.members)
           FROM (SELECT m.deployment, count(*) AS members FROM mqlayer.member m
                 WHERE m.group_id = g.group_id AND m.lease_until >= now() GROUP BY m.deployment) AS l), '{}') AS living,
       (SELECT c.name FROM mqlayer.consumer_group c WHERE c.group_id = g.copied_from) AS copied_from,
       g.deployment, g.canary, g.canary_lps, g.previous_deployment, g.fallback
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer.breaker s ON s.group_id = g.group_id AND s.state <> 'closed' AND g.breaker_share IS NOT NULL
LEFT JOIN mqlayer.consumer_group b ON b.group_id = g.broadcast_of
WHERE (%(topic)s::text IS NULL AND t.deleted_at IS NULL OR t.name = %(topic)s)
  AND (%(name)s::text IS NULL OR g.name = %(name)s)
ORDER BY t.name, coalesce(b.name, g.name), g.instance NULLS FIRST;

-- name: inspected_partitions
-- How groups stand with every partition of their topic: the version that made it, which parents hide it, who owns it.
SELECT g.group_id, p.partition_id, p.node_id, p.lp_from, p.lp_to, coalesce(c.version, 1) AS made_in, p.created_at,
       d.group_id IS NOT NULL AS drained,
       ARRAY(SELECT parent.partition_id FROM mqlayer.partition parent
             WHERE parent.ended_by_change = p.created_by_change AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
               AND parent.state <> 'deleted'
               AND NOT EXISTS (SELECT FROM mqlayer.drained pd
                               WHERE pd.group_id = g.group_id AND pd.partition_id = parent.partition_id)
             ORDER BY parent.lp_from) AS behind,
       coalesce(s.start_offset, 1) AS start_offset, g.seek, a.member_id, a.epoch,
       CASE WHEN a.member_id IS NOT NULL AND a.target IS DISTINCT FROM a.member_id THEN coalesce(a.target, '') END AS target,
       a.changed_at, m.lease_until >= now() AS alive,
       CASE WHEN m.lease_until < now() THEN nullif(m.lease_until, '-infinity') END AS lease_over_at,
       pp.paused_at, pp.paused_by
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
LEFT JOIN mqlayer.route_change c ON c.change_id = p.created_by_change
LEFT JOIN mqlayer.drained d ON d.group_id = g.group_id AND d.partition_id = p.partition_id
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
LEFT JOIN mqlayer.assignment a ON a.group_id = g.group_id AND a.partition_id = p.partition_id
LEFT JOIN mqlayer.member m ON m.group_id = a.group_id AND m.member_id = a.member_id
LEFT JOIN mqlayer.partition_pause pp ON pp.group_id = g.group_id AND pp.partition_id = p.partition_id
WHERE g.group_id = ANY(%(group_ids)s::bigint[])
ORDER BY g.group_id, p.partition_id;

-- name: inspected_members
-- The members of a group that are not forgotten, with what is left of their leases by this clock.
SELECT m.member_id, m.host, m.pid, m.joined_at, m.leaving,
       extract(epoch FROM nullif(m.lease_until, '-infinity') - now())::float8 AS lease_left_s,
       (SELECT count(*) FROM mqlayer.assignment a
        WHERE a.group_id = m.group_id AND a.member_id = m.member_id) AS partitions, m.deployment,
       m.version, m.most
FROM mqlayer.member m WHERE m.group_id = %(group_id)s ORDER BY m.member_id;

-- name: inspected_lineage
-- The partitions that an LP of a topic was ever in, oldest first, and in which route versions; the last of them is in force.
SELECT p.partition_id, p.node_id, p.lp_from, p.lp_to, p.state, coalesce(b.version, 1) AS first_version,
       CASE WHEN e.state = 'done' THEN e.version - 1 END AS last_version
FROM mqlayer.topic t
JOIN mqlayer.partition p ON p.topic_id = t.topic_id AND p.lp_from <= %(lp)s AND p.lp_to > %(lp)s
LEFT JOIN mqlayer.route_change b ON b.change_id = p.created_by_change
LEFT JOIN mqlayer.route_change e ON e.change_id = p.ended_by_change
WHERE t.name = %(topic)s AND p.state <> 'importing' AND (b.change_id IS NULL OR b.state = 'done')
ORDER BY p.partition_id;

-- name: inspected_parked
-- What groups have parked: keys, messages, keys that wait for an operator, since when the oldest is parked, and bytes.
SELECT k.group_id, count(*), coalesce(n.messages, 0), count(*) FILTER (WHERE k.due_at IS NULL), min(k.parked_at),
       coalesce(n.bytes, 0)
FROM mqlayer.parked_key k
LEFT JOIN (SELECT group_id, sum(messages)::bigint AS messages, sum(bytes)::bigint AS bytes
      FROM mqlayer.parked_total GROUP BY group_id) AS n USING (group_id)
WHERE k.group_id = ANY(%(group_ids)s::bigint[]) GROUP BY k.group_id, n.messages, n.bytes;

-- name: inspected_parked_heads
-- What is parked of these keys of groups: messages and bytes.
SELECT k.group_id, k.lp, k.name, k.messages, k.bytes
FROM unnest(%(group_ids)s::bigint[], %(lps)s::smallint[], %(names)s::bytea[]) AS given (group_id, lp, name)
JOIN mqlayer.parked_key k USING (group_id, lp, name);

-- name: inspected_parked_key
-- How a key of a group is parked, and what is at its head.
SELECT k.cause, k.parked_at, CASE WHEN k.paused_at IS NULL THEN k.due_at END AS due_at,
       CASE WHEN k.paused_at IS NULL THEN extract(epoch FROM k.due_at - clock_timestamp())::float8 END AS due_in_s, k.attempts,
       (SELECT count(*) FROM mqlayer.parked_message m
        WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name), k.bytes, h.source, h.seq,
       k.paused_at, k.paused_by
FROM mqlayer.parked_key k
LEFT JOIN LATERAL (
    SELECT m.source, m.seq FROM mqlayer.parked_message m
    WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name ORDER BY m.position, m.seq LIMIT 1) AS h ON true
WHERE k.group_id = %(group_id)s AND k.lp = %(lp)s AND k.name = %(name)s;

-- name: inspected_replays
-- What groups are being given of the archive.
SELECT r.group_id, r.redrive_id, r.kind, r.newer = 'wait' AND r.name IS NULL AS rests, r.sent, r.at_batch, r.upto_batch,
       (SELECT count(*) FROM mqlayer.parked_message m WHERE m.replay = r.redrive_id), r.started_at
FROM mqlayer.redrive r WHERE r.group_id = ANY(%(group_ids)s::bigint[]) AND r.state = 'running' AND r.kind IN ('replay', 'backfill');

-- name: topic_names
-- Names of topics that begin so, for a shell to complete.
SELECT name FROM mqlayer.topic WHERE starts_with(name, %(begins)s) AND deleted_at IS NULL ORDER BY name;

-- name: group_names
-- Names of groups that begin so, of one topic or of all, for a shell to complete.
SELECT DISTINCT g.name FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
WHERE starts_with(g.name, %(begins)s) AND (%(topic)s::text IS NULL OR t.name = %(topic)s::text) ORDER BY g.name;

-- name: bodies_allowed
-- Who calls, and whether it may see bodies and headers of messages.
SELECT mqlayer.caller_v1(), mqlayer.has_v1('operate', 'analyze');

-- name: statement_time
-- Bound the statements of this transaction.
SELECT set_config('statement_timeout', %(wait)s, true);

-- name: message_place
-- The topic and the node of a partition.
SELECT t.topic_id, t.name, p.node_id FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id)
WHERE p.partition_id = %(partition)s;

-- name: message_topics
-- Topics by name, of deleted ones those whose archive has it, or one: whether Postgres knows a message of this identity
-- there, and whether its archive has it.
SELECT t.topic_id, t.name,
       EXISTS (SELECT FROM mqlayer.consumer_group g JOIN mqlayer.dead_fact d USING (group_id)
               WHERE g.topic_id = t.topic_id AND d.lp = %(lp)s AND d.source = %(source)s AND d.seq = %(seq)s)
       OR EXISTS (SELECT FROM mqlayer.consumer_group g JOIN mqlayer.parked_fact m USING (group_id)
                  WHERE g.topic_id = t.topic_id AND m.lp = %(lp)s AND m.source = %(source)s AND m.seq = %(seq)s)
       OR a.archived AS known,
       a.archived
FROM mqlayer.topic t, LATERAL (SELECT EXISTS (
    SELECT FROM mqlayer_archive.mark m
    WHERE m.topic_id = t.topic_id AND m.source = %(source)s AND m.lp = %(lp)s
      AND %(seq)s BETWEEN m.first_seq AND m.last_seq) AS archived) a
WHERE %(topic)s::text IS NULL AND (t.deleted_at IS NULL OR a.archived) OR t.name = %(topic)s
ORDER BY t.name;

-- name: message_groups
-- Each group of a topic, and what Postgres knows of a message there.
SELECT g.group_id, g.name, g.state, p.partition_id AS parked_partition, p.log_offset AS parked_offset, k.cause, k.parked_at,
       d.partition_id AS dead_partition, d.log_offset AS dead_offset, d.dead_id, d.cause, d.died_at, d.reason, d.actor,
       d.redriven_at
FROM mqlayer.consumer_group g
LEFT JOIN mqlayer.parked_fact p ON p.group_id = g.group_id AND p.lp = %(lp)s AND p.source = %(source)s AND p.seq = %(seq)s
LEFT JOIN mqlayer.parked_key k ON k.group_id = p.group_id AND k.lp = p.lp AND k.name = p.name
LEFT JOIN mqlayer.dead_fact d ON d.group_id = g.group_id AND d.lp = %(lp)s AND d.source = %(source)s AND d.seq = %(seq)s
WHERE g.topic_id = %(topic_id)s AND g.mode <> 'broadcast' ORDER BY g.name;

-- name: message_outcomes
-- What groups did with the message at a place, the latest last. Among the last thousand ranges that begin before it.
SELECT o.group_id, o.outcome, o.attempts, o.delivered_at, o.settled_at, o.actor, o.reason
FROM unnest(%(group_ids)s::bigint[]) AS g (group_id), LATERAL (
    SELECT * FROM (
        SELECT * FROM mqlayer_archive.outcome o
        WHERE o.group_id = g.group_id AND o.partition_id = %(partition)s AND o.first_offset <= %(offset)s
        ORDER BY o.first_offset DESC LIMIT 1000) last
    WHERE last.last_offset >= %(offset)s) o
UNION ALL
SELECT q.group_id, q.outcome, q.attempts, q.delivered_at, q.settled_at, q.actor, q.reason
FROM mqlayer_archive.outcome_queue q
WHERE q.topic_id = %(topic_id)s AND q.partition_id = %(partition)s AND q.log_offset = %(offset)s
  AND q.group_id = ANY(%(group_ids)s::bigint[])
ORDER BY settled_at;

-- name: states_of_messages
-- Messages of a topic by their number in the lists, and in each group: parked, dead, or the group's own state.
SELECT u.number::int, g.group_id, g.name,
       CASE WHEN p.group_id IS NOT NULL THEN 'parked' WHEN d.group_id IS NOT NULL THEN 'dead' ELSE g.state END
FROM unnest(%(lps)s::smallint[], %(sources)s::bigint[], %(seqs)s::bigint[])
     WITH ORDINALITY AS u (lp, source, seq, number)
CROSS JOIN mqlayer.topic t JOIN mqlayer.consumer_group g USING (topic_id)
LEFT JOIN mqlayer.parked_fact p ON p.group_id = g.group_id AND p.lp = u.lp AND p.source = u.source AND p.seq = u.seq
LEFT JOIN mqlayer.dead_fact d ON d.group_id = g.group_id AND d.lp = u.lp AND d.source = u.source AND d.seq = u.seq
     AND d.redriven_at IS NULL
WHERE t.name = %(topic)s AND g.mode <> 'broadcast' ORDER BY u.number, g.name;

-- name: outcomes_of_messages
-- What groups of a topic did with messages at places, the latest last. Among the last thousand ranges that begin before.
SELECT u.number::int, o.group_id, o.outcome
FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[]) WITH ORDINALITY AS u (partition_id, log_offset, number)
CROSS JOIN mqlayer.topic t JOIN mqlayer.consumer_group g USING (topic_id)
CROSS JOIN LATERAL (
    SELECT last.group_id, last.outcome, last.settled_at FROM (
        SELECT * FROM mqlayer_archive.outcome o
        WHERE o.group_id = g.group_id AND o.partition_id = u.partition_id AND o.first_offset <= u.log_offset
        ORDER BY o.first_offset DESC LIMIT 1000) last
    WHERE last.last_offset >= u.log_offset
    UNION ALL
    SELECT q.group_id, q.outcome, q.settled_at FROM mqlayer_archive.outcome_queue q
    WHERE q.topic_id = t.topic_id AND q.partition_id = u.partition_id AND q.log_offset = u.log_offset
      AND q.group_id = g.group_id) o
WHERE t.name = %(topic)s AND g.mode <> 'broadcast' ORDER BY o.settled_at;

-- name: states_positions
-- The living groups of a topic at some of its partitions: node, start and seek of each.
SELECT g.group_id, p.partition_id, p.node_id, coalesce(s.start_offset, 1), g.seek
FROM mqlayer.topic t JOIN mqlayer.partition p USING (topic_id) JOIN mqlayer.consumer_group g USING (topic_id)
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
WHERE t.name = %(topic)s AND p.partition_id = ANY(%(partitions)s::int[]) AND p.state IN ('open', 'sealed')
  AND g.state = 'live' AND g.mode <> 'broadcast';

-- name: message_archived_at
-- The archived record of a place.
SELECT topic_id, batch, partition_id, log_offset, source, lp, seq, published_at, key, tags, archived_at, version
FROM mqlayer_archive.record
WHERE topic_id = %(topic_id)s AND partition_id = %(partition)s AND log_offset = %(offset)s
  AND published_at >= %(since)s AND published_at <= %(until)s LIMIT 1;

-- name: message_archived
-- The archived record of an identity.
SELECT topic_id, batch, partition_id, log_offset, source, lp, seq, published_at, key, tags, archived_at, version
FROM mqlayer_archive.record
WHERE topic_id = %(topic_id)s AND source = %(source)s AND lp = %(lp)s AND seq = %(seq)s
  AND published_at >= %(since)s AND published_at <= %(until)s LIMIT 1;

-- name: message_archived_body
-- Headers and body of an archived record.
SELECT headers, body FROM mqlayer_archive.record
WHERE topic_id = %(topic_id)s AND batch = %(batch)s AND partition_id = %(partition)s AND log_offset = %(offset)s LIMIT 1;

-- name: searched_archive_of_key
-- Archived messages of a key before a place, the latest first; without headers and bodies.
SELECT batch, partition_id, log_offset, source, lp, seq, published_at, key, tags FROM mqlayer_archive.record
WHERE topic_id = %(topic_id)s AND lp = %(lp)s AND key = %(key)s
  AND batch >= %(from_batch)s AND (batch < %(batch)s OR batch = %(batch)s AND log_offset < %(offset)s)
  AND published_at >= %(since)s AND published_at <= %(until)s
ORDER BY batch DESC, log_offset DESC LIMIT %(limit)s;

-- name: searched_archive_of_time
-- Archived messages that were published from a time on, in the order of that.
SELECT batch, partition_id, log_offset, source, lp, seq, published_at, key, tags FROM mqlayer_archive.record
WHERE topic_id = %(topic_id)s AND published_at >= %(since)s AND published_at <= %(until)s
ORDER BY published_at, batch, log_offset LIMIT %(limit)s;

-- name: searched_archive_of_header
-- Archived messages of a time before a place whose headers have a text, the latest first.
SELECT batch, partition_id, log_offset, source, lp, seq, published_at, key, tags, headers FROM mqlayer_archive.record
WHERE topic_id = %(topic_id)s AND published_at >= %(since)s AND published_at <= %(until)s
  AND (%(key)s::bytea IS NULL OR key = %(key)s) AND strpos(headers, %(contains)s) > 0
  AND (published_at, batch, log_offset) < (%(at)s, %(batch)s, %(offset)s)
ORDER BY published_at DESC, batch DESC, log_offset DESC LIMIT %(limit)s;

-- name: searched_archive
-- How far the archive of a topic has its partitions: the first offset that it lacks.
SELECT partition_id, upto_offset FROM mqlayer_archive.progress WHERE topic_id = %(topic_id)s;

-- name: searched_archive_days
-- The last batch of a topic's archive, and the first one of those days that have no index by LP.
SELECT a.batch, (SELECT min(d.first_batch) FROM mqlayer_archive.day d
                 WHERE d.topic_id = a.topic_id
                   AND to_regclass('mqlayer_archive.record_' || to_char(d.day, 'YYYYMMDD') || '_of_lp') IS NULL)
FROM mqlayer_archive.topic a WHERE a.topic_id = %(topic_id)s;

-- name: searched_topic
-- The number of a topic, how its archive is kept, and how large its bodies may be.
SELECT topic_id, archived, retention_days, body_limit FROM mqlayer.topic WHERE name = %(topic)s;

-- name: life_source
-- Who numbered a message: an outbox, or a direct producer by its name.
SELECT kind, name FROM mqlayer.source WHERE source_id = %(source)s;

-- name: life_route_changes
-- The changes that ended partitions: what came of each.
SELECT p.partition_id, c.kind, c.version, c.state, c.sealed_at, c.ended_at, c.actor,
       ARRAY(SELECT s.partition_id FROM mqlayer.partition s
             WHERE s.created_by_change = c.change_id AND s.lp_from <= %(lp)s AND s.lp_to > %(lp)s) AS successors
FROM mqlayer.partition p JOIN mqlayer.route_change c ON c.change_id = p.ended_by_change
WHERE p.partition_id = ANY(%(partitions)s::int[]) AND c.state <> 'dropped' ORDER BY c.change_id;

-- name: life_partitions
-- Partitions, the route version that made them, and where they are.
SELECT p.partition_id, coalesce(c.version, 1), n.name, p.state
FROM mqlayer.partition p JOIN mqlayer.node n USING (node_id)
LEFT JOIN mqlayer.route_change c ON c.change_id = p.created_by_change
WHERE p.partition_id = ANY(%(partitions)s::int[]);

-- name: life_acts
-- The acts on groups of a topic, or on all of it, that may be about a message of a key. Those of whole groups name no key.
SELECT a.at, a.actor, a.act, a.object, a.facts FROM mqlayer.audit a
WHERE (a.object = ANY(%(objects)s::text[]) OR a.act = 'dead discard' AND a.object = ANY(%(dead_ids)s::text[]))
  AND a.at >= %(since)s
  AND (a.act = 'dead discard' OR a.facts ->> 'key' = ANY(%(keys)s::text[])
       AND (%(message)s::text IS NULL OR coalesce(a.facts ->> 'message', %(message)s) = %(message)s)
       OR NOT a.facts ? 'key' AND a.act = ANY(%(acts)s::text[]))
  -- Not those on a deleted topic that had the name before.
  AND NOT EXISTS (SELECT FROM mqlayer.topic d WHERE d.deleted_at >= a.at
                                                AND split_part(d.name, '@', 1) = split_part(a.object, '/', 1))
ORDER BY a.at DESC LIMIT %(limit)s;

-- name: life_bulk_items
-- What bulk actions did with a key's parked row or dead messages, or with messages that are parked by themselves.
SELECT i.group_id, r.redrive_id, r.kind, r.actor, r.reason, i.dead_id, i.result, i.error, i.at, i.since, i.cause, i.source, i.seq
FROM unnest(%(group_ids)s::bigint[]) AS g (group_id) CROSS JOIN unnest(%(names)s::bytea[]) AS n (name)
CROSS JOIN LATERAL (
    SELECT i.* FROM mqlayer.bulk_item i
    WHERE i.group_id = g.group_id AND i.lp = %(lp)s AND i.name = n.name AND i.result IS NOT NULL
    ORDER BY i.redrive_id DESC LIMIT %(limit)s) AS i
JOIN mqlayer.redrive r USING (redrive_id)
ORDER BY i.at DESC LIMIT %(limit)s;

-- name: life_key_dead
-- Dead messages of a key: those that are dead now, and of given messages all.
SELECT d.group_id, d.dead_id, d.cause, d.reason, d.attempts, d.actor, d.died_at, d.redriven_at, d.source, d.seq
FROM unnest(%(group_ids)s::bigint[]) AS g (group_id)
CROSS JOIN LATERAL (
    (SELECT d.* FROM mqlayer.dead_fact d
     WHERE d.group_id = g.group_id AND d.lp = %(lp)s AND d.key = %(name)s AND d.redriven_at IS NULL
     ORDER BY d.partition_id DESC, d.log_offset DESC, d.dead_id DESC LIMIT %(limit)s)
    UNION
    SELECT d.* FROM unnest(%(sources)s::bigint[], %(seqs)s::bigint[]) AS m (source, seq)
    JOIN mqlayer.dead_fact d ON d.group_id = g.group_id AND d.lp = %(lp)s AND d.source = m.source AND d.seq = m.seq) AS d
ORDER BY d.died_at DESC LIMIT %(limit)s;

-- name: life_key_attempts
-- Failed attempts at messages of a key, the latest.
SELECT a.group_id, a.source, a.seq, a.attempt, a.failed_at, a.member_id, a.error
FROM unnest(%(sources)s::bigint[], %(seqs)s::bigint[]) AS m (source, seq)
JOIN mqlayer.failed_attempt a ON a.group_id = ANY(%(group_ids)s::bigint[]) AND a.lp = %(lp)s
                              AND a.source = m.source AND a.seq = m.seq
ORDER BY a.failed_at DESC LIMIT %(limit)s;

-- name: life_dead
-- A message that died in groups, and the bulk actions that had it.
SELECT d.group_id, d.dead_id, d.cause, d.reason, d.attempts, d.actor, d.died_at, d.redriven_at, r.redrive_id, r.actor,
       w.result, w.at, r.kind
FROM mqlayer.dead_fact d
LEFT JOIN (mqlayer.bulk_item w JOIN mqlayer.redrive r USING (redrive_id))
  ON w.dead_id = d.dead_id AND r.group_id = d.group_id AND w.result IS NOT NULL
WHERE d.group_id = ANY(%(group_ids)s::bigint[]) AND d.lp = %(lp)s AND d.source = %(source)s AND d.seq = %(seq)s
ORDER BY w.at;

-- name: life_parked
-- A message that is parked in groups, with its key.
SELECT m.group_id, k.parked_at, k.cause, k.due_at, m.attempts, m.redriven, m.replay, k.paused_at, k.paused_by
FROM mqlayer.parked_fact m JOIN mqlayer.parked_key k USING (group_id, lp, name)
WHERE m.group_id = ANY(%(group_ids)s::bigint[]) AND m.lp = %(lp)s AND m.source = %(source)s AND m.seq = %(seq)s;

-- name: life_replays
-- The replays that had a message for groups, and said something about it.
SELECT r.group_id, w.redrive_id, r.actor, w.result, w.at
FROM mqlayer.redrive r JOIN mqlayer.replay_result w USING (redrive_id)
WHERE r.group_id = ANY(%(group_ids)s::bigint[]) AND w.lp = %(lp)s AND w.source = %(source)s AND w.seq = %(seq)s
ORDER BY w.at;

-- name: message_source
-- The source of an outbox, if a relay has opened one.
SELECT source_id FROM mqlayer.source WHERE outbox_uuid = %(outbox_uuid)s AND closed_at IS NULL;

-- name: inspected_topic
-- A topic with its limits.
SELECT topic_id, name, strategy, version, body_limit, backlog_limit, archived, retention_days, paused_at, paused_by, created_at,
       durability, retain_s, retain_bytes, retain_messages, retain_unsettled, message_ttl_s, expired
FROM mqlayer.topic WHERE name = %(topic)s;

-- name: inspected_topic_partitions
-- The partitions of a topic that are not deleted, with the rate that was measured last.
SELECT p.partition_id, p.lp_from, p.lp_to, p.node_id, p.state, r.per_s FROM mqlayer.partition p
LEFT JOIN mqlayer.partition_rate r ON r.partition_id = p.partition_id AND r.measured_at > now() - interval '5 minutes'
WHERE p.topic_id = %(topic_id)s AND p.state <> 'deleted' ORDER BY p.lp_from, p.partition_id;

-- name: members_wanted
-- How many members a group needs, by the samples.
SELECT mqlayer.members_wanted_v1(%(topic)s, %(group)s, 1, %(lag_target_s)s);
