-- name: node_insert
-- Register a node; nothing where the name is taken.
INSERT INTO mqlayer.node (name, url, zone, armed_run_id, last_run_id, armed_at)
VALUES (%(name)s, %(url)s, %(zone)s, %(run_id)s, %(run_id)s, now())
ON CONFLICT (name) DO NOTHING
RETURNING node_id;

-- name: nodes_lock
-- One at a time, to the end of this transaction: which Redis is which node, and which node begins to drain. Behind the lock
-- on a node's row.
SELECT pg_advisory_xact_lock(hashtext('mqlayer.nodes'));

-- name: nodes_of_process
-- Other nodes whose Redis is this process of a server, by the run that was armed last, and whether it is armed. Of a cluster
-- one shard's process is enough; its run has the first 16 letters of each.
SELECT name, armed_run_id IS NOT NULL FROM mqlayer.node
WHERE removed_at IS NULL AND name <> %(name)s AND EXISTS (
    SELECT FROM unnest(string_to_array(coalesce(armed_run_id, last_run_id), ' ')) AS theirs(run)
    JOIN unnest(string_to_array(%(run_id)s, ' ')) AS ours(run)
    ON left(split_part(theirs.run, '/', 1), 16) = left(split_part(ours.run, '/', 1), 16))
ORDER BY node_id;

-- name: partitions_placed
-- Partitions that are not deleted, behind one, each with its node.
SELECT p.partition_id, n.name FROM mqlayer.partition p JOIN mqlayer.node n USING (node_id)
WHERE p.state <> 'deleted' AND p.partition_id > %(after)s ORDER BY p.partition_id LIMIT %(limit)s;

-- name: node_list
-- All nodes that were not removed, oldest first, and when each was armed for the last time.
SELECT node_id, name, url, armed_run_id, draining_at, zone, replicas, armed_at FROM mqlayer.node WHERE removed_at IS NULL
ORDER BY node_id;

-- name: node_names
-- The names of all nodes, of removed ones too: old routes name them.
SELECT node_id, name FROM mqlayer.node;

-- name: node_drain
-- Let a node get no new partitions; nothing where it gets none, was given up or is gone.
UPDATE mqlayer.node SET draining_at = clock_timestamp()
WHERE node_id = %(node_id)s AND draining_at IS NULL AND lost_at IS NULL AND removed_at IS NULL RETURNING node_id;

-- name: node_drain_stop
-- Let a node get partitions again; nothing where it does.
UPDATE mqlayer.node SET draining_at = NULL WHERE node_id = %(node_id)s AND draining_at IS NOT NULL RETURNING node_id;

-- name: node_zone_put
-- Say in which zone a node is.
UPDATE mqlayer.node SET zone = %(zone)s WHERE node_id = %(node_id)s;

-- name: node_replicas_put
-- Say how many replicas a node has.
UPDATE mqlayer.node SET replicas = %(replicas)s WHERE node_id = %(node_id)s;

-- name: node_remove_lock
-- Lock a node, also against partitions that come to it.
SELECT node_id, lost_at IS NOT NULL FROM mqlayer.node WHERE node_id = %(node_id)s AND removed_at IS NULL FOR UPDATE;

-- name: node_left
-- Partitions that a node still holds by their states; of a given-up one, those that were not made anew elsewhere.
SELECT p.state, count(*)::int FROM mqlayer.partition p
WHERE p.node_id = %(node_id)s AND (p.state <> 'deleted' OR p.retired_at IS NULL AND NOT %(lost)s) GROUP BY p.state ORDER BY p.state;

-- name: node_deleted_partitions
-- Deleted partitions of a node that never comes back; nothing of them has to be taken away there.
SELECT partition_id FROM mqlayer.partition WHERE node_id = %(node_id)s AND state = 'deleted' AND retired_at IS NULL;

-- name: node_remove
-- A node is gone, and its name free.
UPDATE mqlayer.node SET name = name || '@' || node_id, removed_at = clock_timestamp() WHERE node_id = %(node_id)s;

-- name: node_lock
-- Lock one node for re-arming.
SELECT node_id, name, url, armed_run_id, former_runs FROM mqlayer.node WHERE name = %(name)s FOR UPDATE;

-- name: node_arm
-- Record the run that may be served, and the one before it as one that may not any more, also where none was armed
-- meanwhile: the last 32 of these. Of a cluster each shard's run is one.
UPDATE mqlayer.node n SET armed_run_id = %(run_id)s, last_run_id = %(run_id)s, armed_at = clock_timestamp(), lost_at = NULL, former_runs = (
    SELECT coalesce(array_agg(run ORDER BY position) FILTER (WHERE position > last - 32), '{}')
    FROM (SELECT run, position, max(position) OVER () AS last
          FROM unnest(n.former_runs || string_to_array(coalesce(n.armed_run_id, n.last_run_id), ' '))
              WITH ORDINALITY AS former(run, position)
          WHERE split_part(run, '/', 1) NOT IN (
              SELECT split_part(shard, '/', 1) FROM unnest(string_to_array(%(run_id)s, ' ')) AS shard)) AS others)
WHERE node_id = %(node_id)s;

-- name: node_address_put
-- The node is at another address.
UPDATE mqlayer.node SET url = %(url)s WHERE node_id = %(node_id)s;

-- name: node_partitions
-- What the partitions of a node have to be: open, or sealed as is recorded. Successors count as open from the moment that
-- their parents are recorded as sealed: they may have been opened, and whoever opened them won't look again.
SELECT p.partition_id, t.topic_id, t.name, p.lp_from, p.lp_to, p.created_by_change, s.change_id, coalesce(s.seal_id::text, ''),
       coalesce(s.marks, '{}')
FROM mqlayer.partition p
JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer.seal s ON s.partition_id = p.partition_id
LEFT JOIN mqlayer.route_change c ON c.change_id = p.created_by_change
WHERE p.node_id = %(node_id)s AND (p.state IN ('open', 'sealed') OR (p.state = 'importing' AND c.state = 'sealed'))
ORDER BY p.partition_id;

-- name: partition_retired_before
-- A sealed partition of which its node has the tombstone was retired, in a commit that this database lost: a tombstone is
-- written behind that commit only. Not so the tombstone of a copy that was made anew elsewhere.
UPDATE mqlayer.partition p SET state = 'deleted'
WHERE p.partition_id = %(partition_id)s AND p.state = 'sealed' AND NOT EXISTS (
    SELECT FROM mqlayer.abandoned a WHERE a.partition_id = p.partition_id AND a.node_id = p.node_id);

-- name: node_tombstones
-- The partitions of which a node must hold nothing but a tombstone, with the groups that may have keys there: deleted
-- ones, and copies of those that were made anew elsewhere while the node was given up. And whether it may hold what became
-- of messages, which the archive has yet to fetch.
SELECT p.partition_id,
       (SELECT coalesce(array_agg(g.group_id ORDER BY g.group_id), '{}')
        FROM mqlayer.consumer_group g WHERE g.topic_id = p.topic_id) AS group_ids,
       t.archived AND p.node_id = %(node_id)s AND p.retired_at IS NULL AS archived
FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id)
WHERE (p.node_id = %(node_id)s AND p.state = 'deleted')
   OR EXISTS (SELECT FROM mqlayer.abandoned a WHERE a.partition_id = p.partition_id AND a.node_id = %(node_id)s)
ORDER BY p.partition_id;

-- name: server_of_schema
-- Whose commits this schema is made of, and in which database it is.
SELECT system_id, timeline, current_database() FROM mqlayer.server;

-- name: source_outbox
-- Which outbox a source is; null for a direct producer, and for an outbox that goes on under another source.
SELECT CASE WHEN closed_at IS NULL THEN outbox_uuid END FROM mqlayer.source WHERE source_id = %(source_id)s;

-- name: node_epochs_raise
-- Give every assignment on a node, or on these partitions of it, a new epoch and say which, so that Redis can refuse all
-- earlier ones. Of deleted partitions nothing is left that an epoch could guard.
UPDATE mqlayer.assignment a SET epoch = nextval('mqlayer.epoch'), changed_at = now()
FROM mqlayer.partition p
WHERE p.partition_id = a.partition_id AND p.node_id = %(node_id)s AND p.state <> 'deleted'
  AND (%(partitions)s::int[] IS NULL OR p.partition_id = ANY(%(partitions)s))
RETURNING a.group_id, a.partition_id, a.epoch;

-- name: topic_insert
-- Create a topic without a route; nothing where the name is taken.
INSERT INTO mqlayer.topic (name, strategy, body_limit, backlog_limit, archived, home_zone)
VALUES (%(name)s, %(strategy)s, %(body_limit)s, %(backlog_limit)s, %(archived)s, %(home_zone)s)
ON CONFLICT (name) DO NOTHING;

-- name: topic_lock
-- Lock one topic.
SELECT topic_id, strategy, body_limit, backlog_limit, version, archived, deleting_at IS NOT NULL, home_zone
FROM mqlayer.topic WHERE name = %(name)s FOR UPDATE;

-- name: topic_created_partitions
-- With how many partitions a topic was created; 0 before there are any. Route changes since don't count.
SELECT count(*) FROM mqlayer.partition WHERE topic_id = %(topic_id)s AND created_by_change IS NULL;

-- name: topic_list
-- All topics that are not deleted, with their limits and the number of partitions in force.
SELECT t.topic_id, t.name, t.strategy, t.body_limit, t.backlog_limit, t.version,
       (SELECT count(*) FROM mqlayer.route r WHERE r.topic_id = t.topic_id AND r.version = t.version) AS partitions,
       t.archived, t.retention_days, t.keep_until_exported, t.deleting_at IS NOT NULL, t.durability, t.retain_s, t.retain_bytes, t.retain_messages,
       t.retain_unsettled, t.message_ttl_s, t.expired
FROM mqlayer.topic t WHERE t.deleted_at IS NULL ORDER BY t.name;

-- name: topic_home_zone
-- The zone whose nodes a topic's partitions prefer.
SELECT topic_id, home_zone FROM mqlayer.topic WHERE name = %(name)s AND deleting_at IS NULL;

-- name: topic_home_zone_put
-- Say which zone's nodes a topic's partitions prefer.
UPDATE mqlayer.topic SET home_zone = %(home_zone)s WHERE topic_id = %(topic_id)s;

-- name: topic_durability_lock
-- Lock a topic and its durability class.
SELECT topic_id, durability, deleting_at IS NOT NULL FROM mqlayer.topic WHERE name = %(name)s FOR UPDATE;

-- name: topic_durability_put
-- Change a topic's durability class, and let relays know.
WITH put AS (
    UPDATE mqlayer.topic SET durability = %(durability)s WHERE topic_id = %(topic_id)s RETURNING name
)
SELECT pg_notify('mqlayer_route', name) FROM put;

-- name: topic_nodes
-- The nodes that hold partitions of a topic, or are about to.
SELECT DISTINCT node_id FROM mqlayer.partition WHERE topic_id = %(topic_id)s AND state <> 'deleted';

-- name: durable_topics
-- Topics with a durability class beyond the node's own, and the nodes of their partitions.
SELECT t.name, t.durability, array_agg(DISTINCT p.node_id ORDER BY p.node_id)
FROM mqlayer.topic t JOIN mqlayer.partition p USING (topic_id)
WHERE t.durability <> 'node' AND t.deleted_at IS NULL AND p.state <> 'deleted'
GROUP BY t.topic_id ORDER BY t.name;

-- name: topic_archived
-- Whether a topic is archived.
SELECT topic_id, archived FROM mqlayer.topic WHERE name = %(name)s;

-- name: topic_limits_put
-- Change the limits of a topic, what is not named stays; and let relays know.
WITH put AS (
    UPDATE mqlayer.topic SET body_limit = coalesce(%(body_limit)s::int, body_limit),
        backlog_limit = coalesce(%(backlog_limit)s::bigint, backlog_limit)
    WHERE topic_id = %(topic_id)s RETURNING name, body_limit, backlog_limit
)
SELECT body_limit, backlog_limit, pg_notify('mqlayer_route', name) FROM put;

-- name: topic_archived_set
-- Switch a topic's archiving.
UPDATE mqlayer.topic SET archived = %(archived)s WHERE topic_id = %(topic_id)s;

-- name: topic_to_delete
-- A topic by its name; without one, the last one deleted under that name. And its name since then, null before.
SELECT topic_id, split_part(name, '@', 1), CASE WHEN deleted_at IS NOT NULL THEN name END FROM mqlayer.topic
WHERE name = %(name)s OR deleted_at IS NOT NULL AND split_part(name, '@', 1) = %(name)s
ORDER BY name = %(name)s DESC, topic_id DESC LIMIT 1;

-- name: topic_deletion_lock
-- Lock a topic for a step of its deletion; its name once it is deleted.
SELECT CASE WHEN deleted_at IS NOT NULL THEN name END FROM mqlayer.topic WHERE topic_id = %(topic_id)s FOR UPDATE;

-- name: topic_deletion_begin
-- The deletion of a topic begins: relays attach it no more.
UPDATE mqlayer.topic SET deleting_at = now() WHERE topic_id = %(topic_id)s AND deleting_at IS NULL RETURNING topic_id;

-- name: topic_detach
-- An outbox no longer publishes to a topic.
UPDATE mqlayer.topic SET detached = detached || %(source_id)s::bigint
WHERE topic_id = %(topic_id)s AND %(source_id)s::bigint <> ALL (detached);

-- name: topic_outboxes
-- Live outboxes that may publish to a topic: sources and databases.
SELECT s.source_id, s.name FROM mqlayer.source s JOIN mqlayer.topic t ON t.topic_id = %(topic_id)s
WHERE s.kind = 'outbox' AND s.closed_at IS NULL AND s.source_id <> ALL (t.detached) ORDER BY s.source_id;

-- name: topic_producers
-- Living direct producers that publish to a topic, or did; not those that say it by the version's rule yet.
SELECT p.name, p.host, p.pid, p.acts_on >= %(since)s AND p.topics IS NOT NULL AS says FROM mqlayer.process p
WHERE p.kind = 'producer' AND p.lease_until >= now()
  AND (p.acts_on < %(since)s OR p.topics IS NULL OR p.topics && ARRAY[0, %(topic_id)s::int])
ORDER BY p.name, p.host, p.pid;

-- name: topic_changes_lock
-- Lock the open route changes of a topic.
SELECT change_id FROM mqlayer.route_change WHERE topic_id = %(topic_id)s AND state IN ('planned', 'sealing', 'sealed')
ORDER BY change_id FOR UPDATE;

-- name: topic_changes_drop
-- The open route changes of a topic lead nowhere: all its partitions go.
UPDATE mqlayer.route_change SET state = 'dropped', ended_at = clock_timestamp()
WHERE topic_id = %(topic_id)s AND state IN ('planned', 'sealing', 'sealed');

-- name: topic_groups_lock
-- Lock the groups of a topic that are not retired, in the order of their ids; and how many members of each live.
SELECT g.group_id, g.name, (SELECT count(*) FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until >= now())
FROM mqlayer.consumer_group g WHERE g.topic_id = %(topic_id)s AND g.state <> 'retired'
ORDER BY g.group_id FOR NO KEY UPDATE OF g;

-- name: topic_open_work
-- How many open route changes and groups a topic has, whose lock is held: nobody adds any.
SELECT (SELECT count(*) FROM mqlayer.route_change c WHERE c.topic_id = %(topic_id)s AND c.state IN ('planned', 'sealing', 'sealed')),
       (SELECT count(*) FROM mqlayer.consumer_group g WHERE g.topic_id = %(topic_id)s AND g.state <> 'retired');

-- name: topic_partitions_delete
-- Of the partitions of a topic nothing but tombstones is to be left.
UPDATE mqlayer.partition SET state = 'deleted' WHERE topic_id = %(topic_id)s AND state <> 'deleted' RETURNING partition_id;

-- name: topic_deletion_end
-- A topic is deleted and its name free; let caches know.
WITH done AS (
    UPDATE mqlayer.topic SET name = name || '@' || topic_id, deleted_at = now(), paused_at = NULL, paused_by = NULL
    WHERE topic_id = %(topic_id)s RETURNING name
)
SELECT name, pg_notify('mqlayer_route', split_part(name, '@', 1)) FROM done;

-- name: topic_partitions_left
-- Nodes on which more than tombstones may be left of a deleted topic, and of how many partitions.
SELECT n.name, count(*)::int FROM mqlayer.partition p JOIN mqlayer.node n USING (node_id)
WHERE p.topic_id = %(topic_id)s AND p.state = 'deleted' AND p.retired_at IS NULL GROUP BY n.name ORDER BY n.name;

-- name: topic_schema_mode
-- The compatibility mode of a topic.
SELECT topic_id, schema_mode FROM mqlayer.topic WHERE name = %(name)s;

-- name: topic_schema_mode_set
-- Change a topic's compatibility mode.
UPDATE mqlayer.topic SET schema_mode = %(mode)s WHERE topic_id = %(topic_id)s;

-- name: topic_schemas
-- A topic's mode, and the versions of its schema, oldest first; one row without a version where there is none.
SELECT t.schema_mode, s.version, s.mode, s.schema, s.actor, s.role, s.stored_at
FROM mqlayer.topic t LEFT JOIN mqlayer.topic_schema s USING (topic_id)
WHERE t.name = %(name)s ORDER BY s.version;

-- name: topic_schema_put
-- Store the next version of a topic's schema; false where another process was before, or the mode changed.
SELECT mqlayer.topic_schema_put_v1(%(topic)s, %(version)s, %(mode)s, %(schema)s, %(actor)s);

-- name: partition_insert
-- Allocate a partition that waits to be made in Redis.
-- Nothing where its node gets none.
INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to)
SELECT %(topic_id)s, n.node_id, %(lp_from)s, %(lp_to)s FROM mqlayer.node n
WHERE n.node_id = %(node_id)s AND n.draining_at IS NULL AND n.removed_at IS NULL FOR SHARE OF n RETURNING partition_id;

-- name: partition_list
-- A topic's partitions that are not deleted, parents before successors.
SELECT partition_id, node_id, lp_from, lp_to, state, created_by_change, ended_by_change FROM mqlayer.partition
WHERE topic_id = %(topic_id)s AND state <> 'deleted' ORDER BY partition_id;

-- name: partition_open
-- Say that partitions exist in Redis and are open.
UPDATE mqlayer.partition SET state = 'open' WHERE topic_id = %(topic_id)s AND state = 'importing' AND created_by_change IS NULL;

-- name: route_insert_first
-- The first route version: one range per partition.
INSERT INTO mqlayer.route (topic_id, version, lp_from, lp_to, partition_id)
SELECT topic_id, 1, lp_from, lp_to, partition_id FROM mqlayer.partition WHERE topic_id = %(topic_id)s;

-- name: topic_version_raise
-- Put the next route version in force, if this one still is.
UPDATE mqlayer.topic SET version = coalesce(version, 0) + 1
WHERE topic_id = %(topic_id)s AND version IS NOT DISTINCT FROM %(version)s;

-- name: route_in_force
-- The route version in force of one topic, and since when this server is known: a line per range.
SELECT t.topic_id, t.version, t.body_limit, t.backlog_limit, t.strategy, t.durability,
       (SELECT coalesce(extract(epoch FROM max(since)), 0)::float8 FROM mqlayer.server) AS since, r.lp_from, r.lp_to, r.partition_id, p.node_id
FROM mqlayer.topic t
LEFT JOIN mqlayer.route r ON r.topic_id = t.topic_id AND r.version = t.version
LEFT JOIN mqlayer.partition p ON p.partition_id = r.partition_id
WHERE t.name = %(name)s ORDER BY r.lp_from;

-- name: source_open_direct
-- A new incarnation of a direct producer.
INSERT INTO mqlayer.source (kind, name) VALUES ('direct', %(name)s) RETURNING source_id;

-- name: source_close
-- A direct producer ended; the worker may remove its marks.
UPDATE mqlayer.source SET closed_at = now() WHERE source_id = %(source_id)s AND closed_at IS NULL;

-- name: source_try_closed
-- Direct sources that were closed long enough ago and whose marks are still there, and that this is another try. Those
-- come first that were tried never or longest ago: what can't be finished now must not keep the others waiting.
WITH due AS MATERIALIZED (
    SELECT source_id FROM mqlayer.source
    WHERE kind = 'direct' AND dropped_at IS NULL AND closed_at < now() - make_interval(secs => %(closed_for_s)s)
    ORDER BY tried_at NULLS FIRST, closed_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
)
UPDATE mqlayer.source s SET tried_at = now() FROM due WHERE s.source_id = due.source_id
RETURNING s.source_id;

-- name: source_marks_dropped
-- The marks of these sources are gone.
UPDATE mqlayer.source SET dropped_at = now() WHERE source_id = ANY(%(source_ids)s::bigint[]) AND dropped_at IS NULL;

-- name: partition_nodes
-- Nodes that have partitions, or are to have some.
SELECT DISTINCT node_id FROM mqlayer.partition WHERE state <> 'deleted' ORDER BY node_id;

-- name: cluster_partitions
-- Partitions of a cluster that are not deleted: each has a part of what another node keeps once.
SELECT partition_id FROM mqlayer.partition WHERE node_id = %(node_id)s AND state <> 'deleted' ORDER BY partition_id;

-- name: partitions_of_node
-- Partitions of a node that have marks, with their topics.
SELECT partition_id, topic_id FROM mqlayer.partition
WHERE node_id = %(node_id)s AND state IN ('open', 'sealed') ORDER BY partition_id;

-- name: partition_places
-- Every partition that has marks, and where it is.
SELECT partition_id, node_id, lp_from, lp_to FROM mqlayer.partition WHERE state IN ('open', 'sealed')
ORDER BY partition_id;

-- name: source_open_outbox
-- The incarnation of an outbox: made once, and none for one that went on under another identity. One that goes on in
-- the place of others ends all of its cluster and database with that: a database has one outbox. A copy that was renewed
-- goes on in nobody's place.
WITH opened AS (
    INSERT INTO mqlayer.source (kind, name, outbox_uuid, cluster)
    SELECT 'outbox', %(name)s, %(outbox_uuid)s, %(cluster)s
    WHERE NOT EXISTS (SELECT FROM mqlayer.source WHERE outbox_uuid = %(outbox_uuid)s AND closed_at IS NOT NULL)
    ON CONFLICT (outbox_uuid) WHERE kind = 'outbox' AND closed_at IS NULL DO NOTHING
    RETURNING source_id, cluster)
UPDATE mqlayer.source s SET closed_at = now() FROM opened
WHERE %(goes_on)s AND s.kind = 'outbox' AND s.closed_at IS NULL AND s.cluster = opened.cluster
  AND s.source_id <> opened.source_id;

-- name: source_of_outbox
-- The live incarnation of an outbox.
SELECT source_id, cluster FROM mqlayer.source
WHERE outbox_uuid = %(outbox_uuid)s AND kind = 'outbox' AND closed_at IS NULL;

-- name: sources_of_outboxes
-- The sources that outboxes had, live or not.
SELECT source_id FROM mqlayer.source WHERE outbox_uuid = ANY(%(outboxes)s::uuid[]) ORDER BY source_id;

-- name: sources_ended
-- Sources of outboxes that go on under others.
SELECT source_id FROM mqlayer.source WHERE kind = 'outbox' AND closed_at IS NOT NULL ORDER BY source_id;

-- name: sources_close_former
-- An outbox goes on under another source: what it was before is live no more.
UPDATE mqlayer.source SET closed_at = now()
WHERE outbox_uuid = ANY(%(outboxes)s::uuid[]) AND kind = 'outbox' AND closed_at IS NULL;

-- name: trim_work
-- Every live partition of a topic with the groups whose settling bounds its trimming, and where they start. Not before all
-- its parents are retired: what is kept must have no hole between a parent and its successors, for a group that begins
-- with the first record kept or is sent back to it would be given the parent's records and those behind the hole.
SELECT p.partition_id, p.node_id,
       coalesce(array_agg(g.group_id ORDER BY g.group_id) FILTER (WHERE g.group_id IS NOT NULL), '{}') AS group_ids,
       coalesce(array_agg(g.seek ORDER BY g.group_id) FILTER (WHERE g.group_id IS NOT NULL), '{}') AS seeks,
       coalesce(array_agg(coalesce(s.start_offset, 1) ORDER BY g.group_id)
                FILTER (WHERE g.group_id IS NOT NULL), '{}') AS starts,
       CASE WHEN t.archived AND bool_and(a.complete) IS NOT TRUE THEN coalesce(min(a.upto_offset), 1) END AS archive_floor,
       t.archived, t.retain_s, t.retain_bytes, t.retain_messages, t.retain_unsettled
FROM mqlayer.topic t
JOIN mqlayer.partition p ON p.topic_id = t.topic_id AND p.state IN ('open', 'sealed')
LEFT JOIN mqlayer.consumer_group g ON g.topic_id = t.topic_id AND g.state <> 'retired' AND g.mode <> 'broadcast'
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
LEFT JOIN mqlayer_archive.progress a ON a.partition_id = p.partition_id
WHERE t.name = %(topic)s
  AND NOT EXISTS (SELECT FROM mqlayer.partition parent
                  WHERE parent.ended_by_change = p.created_by_change AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
                    AND parent.state <> 'deleted')
GROUP BY p.partition_id, p.node_id, t.topic_id ORDER BY p.partition_id;

-- name: trim_clock
-- The database's time in ms.
SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint;

-- name: retention_loss_quiet
-- Which of the groups lost nothing within an hour.
SELECT DISTINCT group_id FROM unnest(%(groups)s::bigint[]) AS told (group_id)
WHERE NOT EXISTS (SELECT FROM mqlayer.retention_loss l
                  WHERE l.group_id = told.group_id AND l.event = 'dropped'
                    AND l.lost_at > clock_timestamp() - interval '1 hour')
ORDER BY group_id;

-- name: retention_loss_put
-- Add what groups lost by their topics' limits and times to live: nodes tell totals. Lock rows in one order.
INSERT INTO mqlayer.retention_loss AS l (group_id, partition_id, event, lost, seen)
SELECT group_id, partition_id, event, total, total
FROM unnest(%(groups)s::bigint[], %(partitions)s::int[], %(events)s::text[], %(totals)s::bigint[])
     AS told (group_id, partition_id, event, total)
ORDER BY group_id, partition_id, event
ON CONFLICT (group_id, partition_id, event) DO UPDATE
SET lost = least(l.lost + greatest(excluded.seen - l.seen, 0), 9007199254740991), seen = excluded.seen,
    lost_at = CASE WHEN excluded.seen > l.seen THEN clock_timestamp() ELSE l.lost_at END
WHERE l.seen <> excluded.seen;

-- name: retention_loss_groups
-- The topics and names of groups.
SELECT g.group_id, t.name, g.name FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
WHERE g.group_id = ANY(%(groups)s::bigint[]);

-- name: topic_retain_lock
-- Lock one topic's limits of retention.
SELECT topic_id, deleting_at IS NOT NULL, retain_s, retain_bytes, retain_messages, retain_unsettled, message_ttl_s, expired
FROM mqlayer.topic WHERE name = %(name)s FOR UPDATE;

-- name: topic_retain_set
-- Change a topic's limits of retention.
UPDATE mqlayer.topic SET retain_s = %(retain_s)s, retain_bytes = %(retain_bytes)s, retain_messages = %(retain_messages)s,
    retain_unsettled = %(retain_unsettled)s, message_ttl_s = %(message_ttl_s)s, expired = %(expired)s
WHERE topic_id = %(topic_id)s;

-- name: trim_enter
-- Trim to the end of this transaction: nobody switches a topic's archiving meanwhile.
SELECT pg_advisory_xact_lock_shared(hashtext('mqlayer.trim'));

-- name: trim_keep_out
-- Wait until no pass of trimming is on its way, and let none begin before the end of this transaction.
SELECT pg_advisory_xact_lock(hashtext('mqlayer.trim'));

-- name: job_claim
-- Claim a periodic job that is due; whoever gets a row runs it.
INSERT INTO mqlayer.job AS j (name, epoch, next_at, last_at)
VALUES (%(name)s, 1, now() + make_interval(secs => %(every_s)s), now())
ON CONFLICT (name) DO UPDATE
SET epoch = j.epoch + 1, last_at = now(), next_at = now() + make_interval(secs => %(every_s)s)
WHERE j.next_at <= now()
RETURNING epoch;

-- name: job_ended
-- Note the end of a periodic job's run, and its error where it failed; of no earlier run than the last one.
UPDATE mqlayer.job SET ended_at = clock_timestamp(), error = %(error)s WHERE name = %(name)s AND epoch = %(epoch)s;

-- name: jobs_late
-- Jobs that did not run for longer than each may go without; one that never ran counts from the first migration. Of several
-- application databases, the one that waits for longest, of those whose job ran within a day.
SELECT w.name, w.every_s, j.last_at, date_part('epoch', now() - j.last_at) - w.every_s
FROM unnest(%(names)s::text[], %(every_s)s::double precision[], %(late_after_s)s::double precision[])
     AS w (name, every_s, late_after_s)
LEFT JOIN (SELECT split_part(name, '@', 1) AS name,
                  coalesce(min(last_at) FILTER (WHERE last_at > now() - interval '1 day'), max(last_at)) AS last_at
           FROM mqlayer.job GROUP BY 1) AS j USING (name)
WHERE coalesce(j.last_at, (SELECT min(at) FROM mqlayer.migration)) < now() - make_interval(secs => w.late_after_s)
ORDER BY w.name;

-- name: audit_insert
-- Note an operator's act.
INSERT INTO mqlayer.audit (actor, act, object, facts) VALUES (%(actor)s, %(act)s, %(object)s, %(facts)s);

-- name: server_known
-- Whether there is a control schema here that can tell this server from others, and that this user has a business with:
-- not on connections that only read, unless the server is a standby. By names, without a scan: each connection asks.
SELECT CASE WHEN has_schema_privilege(to_regnamespace('mqlayer'), 'USAGE')
    THEN has_function_privilege(to_regprocedure('mqlayer.server_seen_v1()'), 'EXECUTE')
     AND (pg_is_in_recovery() OR NOT current_setting('transaction_read_only')::boolean)
    ELSE false END;

-- name: server_seen
-- Whether this server is another one than before; if so, that is seen to.
SELECT mqlayer.server_seen_v1();

-- name: server_replaced
-- Commits of this server are known to be missing, though its timeline does not say so: that is seen to in the same way.
SELECT mqlayer.server_replaced_v1(%(facts)s);

-- name: session_found
-- In which process a session is, and which settings are in force there.
SELECT pg_catalog.pg_backend_pid(), pg_catalog.array_agg(pg_catalog.current_setting(s.name, true) ORDER BY s.position)
FROM unnest(%(names)s::pg_catalog.text[]) WITH ORDINALITY AS s (name, position);

-- name: right_held
-- Who calls, and whether it has a right for a scope, or this or one of the others without limits.
SELECT mqlayer.caller_v1(), mqlayer.has_for_v1(%(right)s, %(scope)s) OR mqlayer.has_v1(VARIADIC %(others)s::text[]);

-- name: change_allowed
-- Who calls, and whether it has one of these rights without limits, or consumes a group; the empty group: any.
SELECT mqlayer.caller_v1(), mqlayer.has_v1(VARIADIC %(rights)s::text[]) OR %(group)s::text IS NOT NULL
    AND (mqlayer.has_for_v1('consume', %(group)s) OR %(group)s = '' AND cardinality(mqlayer.groups_v1()) > 0);

-- name: groups_named
-- Every group as TOPIC/GROUP; an instance of a broadcast group as that group.
SELECT g.group_id, t.name || '/' || coalesce(b.name, g.name)
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer.consumer_group b ON b.group_id = g.broadcast_of;

-- name: process_beat
-- A relay, worker, producer or receiver lives, and learns which protocol versions the schema serves.
SELECT serves_from, in_force, serves_to FROM mqlayer.process_beat_v2(%(facts)s::jsonb, %(lease_s)s);

-- name: process_end
-- A process ends by its own word.
SELECT mqlayer.process_end_v1(%(process_id)s);

-- name: protocol_control
-- The protocol versions that the control schema serves, and since when.
SELECT serves_from, in_force, serves_to, expanded_at, finalized_at, extract(epoch FROM now() - expanded_at)::float8
FROM mqlayer.protocol;

-- name: protocol_application
-- The same of the application schema.
SELECT serves_from, in_force, serves_to, expanded_at, finalized_at, extract(epoch FROM now() - expanded_at)::float8
FROM mqlayer_app.protocol;

-- name: protocol_finalize_lock
-- One finalization after the other, to the end of the transaction.
SELECT pg_advisory_xact_lock(hashtext('mqlayer.finalize'));

-- name: protocol_finalize_control
-- Put a version in force: finalized, blocked or draining.
SELECT mqlayer.protocol_finalize_v1(%(version)s, %(drain)s);

-- name: protocol_finalize_application
-- The same in the application schema.
SELECT mqlayer_app.protocol_finalize_v1(%(version)s, %(drain)s);

-- name: protocol_reopen_control
-- Serve older code again; whether it was refused.
SELECT mqlayer.protocol_reopen_v1();

-- name: protocol_reopen_application
-- The same in the application schema.
SELECT mqlayer_app.protocol_reopen_v1();

-- name: protocol_overdue_groups
-- Groups whose members of earlier versions have leases that ran out, which no process noted yet.
SELECT DISTINCT group_id FROM mqlayer.living
WHERE kind = 'member' AND NOT beats AND (most < %(version)s OR acts_on < %(version)s);

-- name: living_processes
-- All living processes with their releases and protocol versions; the oldest code first.
SELECT kind, name, host, pid, since, version, least, most, acts_on, beats FROM mqlayer.living
ORDER BY most, acts_on, kind, name, since LIMIT %(limit)s;

-- name: living_relays
-- The same of relays in the application schema.
SELECT 'relay', relay_id, host, pid, NULL::timestamptz, version, least, most, acts_on, true FROM mqlayer_app.relay
WHERE lease_until >= now() ORDER BY most, relay_id LIMIT %(limit)s;

-- name: living_counts
-- Living processes per kind, release and highest protocol version.
SELECT kind, version, most, count(*)::int FROM mqlayer.living WHERE beats GROUP BY kind, version, most ORDER BY 1, 2, 3;

-- name: acting_before_control
-- A living process that may still write the form of an earlier version.
SELECT name FROM mqlayer.living WHERE acts_on < %(version)s LIMIT 1;

-- name: acting_before_application
-- The same of a relay.
SELECT relay_id FROM mqlayer_app.relay WHERE acts_on < %(version)s AND lease_until >= now() LIMIT 1;
