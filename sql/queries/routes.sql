-- name: change_insert
-- Plan a change; the unique indexes refuse a second one of the topic, and a second one for the version.
INSERT INTO mqlayer.route_change (topic_id, version, kind, mode, actor)
VALUES (%(topic_id)s, %(version)s, %(kind)s, %(mode)s, %(actor)s) RETURNING change_id;

-- name: change_successor
-- Allocate a successor that waits to be made in Redis; nothing where its node gets none.
INSERT INTO mqlayer.partition (topic_id, node_id, lp_from, lp_to, created_by_change)
SELECT %(topic_id)s, n.node_id, %(lp_from)s, %(lp_to)s, %(change_id)s FROM mqlayer.node n
WHERE n.node_id = %(node_id)s AND n.draining_at IS NULL AND n.removed_at IS NULL FOR SHARE OF n RETURNING partition_id;

-- name: change_parents_put
-- Say which partitions a change ends.
UPDATE mqlayer.partition SET ended_by_change = %(change_id)s
WHERE partition_id = ANY(%(partitions)s::int[]) AND state = 'open' AND ended_by_change IS NULL;

-- name: change_unfinished
-- Changes that somebody has to bring to their end, oldest first; of one topic, or of all.
SELECT c.change_id, t.name FROM mqlayer.route_change c JOIN mqlayer.topic t USING (topic_id)
WHERE c.state IN ('planned', 'sealing', 'sealed') AND (%(topic)s::text IS NULL OR t.name = %(topic)s) ORDER BY c.change_id;

-- name: change_lock
-- Lock one change for its next step.
SELECT c.change_id, c.topic_id, t.name, c.version, c.kind, c.state, c.mode, t.durability
FROM mqlayer.route_change c JOIN mqlayer.topic t USING (topic_id)
WHERE c.change_id = %(change_id)s FOR UPDATE OF c;

-- name: change_partitions
-- What a change ends and what it makes, in the order of their LPs.
SELECT partition_id, node_id, lp_from, lp_to, ended_by_change IS NOT DISTINCT FROM %(change_id)s AS parent
FROM mqlayer.partition WHERE %(change_id)s IN (created_by_change, ended_by_change) ORDER BY lp_from, partition_id;

-- name: node_armed_runs
-- The runs that some nodes are armed for, and whether operators gave them up; nobody arms another one before this
-- transaction ends.
SELECT node_id, armed_run_id, lost_at IS NOT NULL AS given_up
FROM mqlayer.node WHERE node_id = ANY(%(node_ids)s::int[]) ORDER BY node_id FOR SHARE;

-- name: seal_put
-- Record how a partition was sealed; again, where its node fell back and it was sealed anew.
INSERT INTO mqlayer.seal (partition_id, change_id, seal_id, next_offset, run_id, marks, unreachable, cut)
VALUES (%(partition_id)s, %(change_id)s, %(seal_id)s, %(next_offset)s, %(run_id)s, %(marks)s, %(unreachable)s, %(cut)s)
ON CONFLICT (partition_id) DO UPDATE
SET seal_id = excluded.seal_id, next_offset = excluded.next_offset, run_id = excluded.run_id, unreachable = excluded.unreachable,
    cut = excluded.cut;

-- name: seal_marks_of
-- The recorded marks of all parents of a change.
SELECT s.marks FROM mqlayer.seal s WHERE s.change_id = %(change_id)s ORDER BY s.partition_id;

-- name: change_sealing
-- Parents may be sealed from here on: it can't be dropped any more.
UPDATE mqlayer.route_change SET state = 'sealing' WHERE change_id = %(change_id)s AND state = 'planned';

-- name: change_sealed
-- Every parent of a change is sealed, and that is recorded: it goes forward from here.
UPDATE mqlayer.route_change SET state = 'sealed', sealed_at = clock_timestamp()
WHERE change_id = %(change_id)s AND state = 'sealing';

-- name: route_insert_next
-- The routes of the version that a change makes: those in force, with the successors in place of the parents.
INSERT INTO mqlayer.route (topic_id, version, lp_from, lp_to, partition_id)
SELECT r.topic_id, %(version)s, r.lp_from, r.lp_to, r.partition_id
FROM mqlayer.route r JOIN mqlayer.partition p USING (partition_id)
WHERE r.topic_id = %(topic_id)s AND r.version = %(version)s - 1 AND p.ended_by_change IS DISTINCT FROM %(change_id)s
UNION ALL
SELECT topic_id, %(version)s, lp_from, lp_to, partition_id FROM mqlayer.partition WHERE created_by_change = %(change_id)s;

-- name: change_partitions_settle
-- Successors are open, parents sealed; parents that were lost with their nodes are gone.
UPDATE mqlayer.partition p
SET state = CASE WHEN p.created_by_change = %(change_id)s THEN 'open'
                 WHEN %(mode)s = 'lost' AND EXISTS (SELECT FROM mqlayer.seal s
                                                    WHERE s.partition_id = p.partition_id AND s.unreachable) THEN 'deleted'
                 ELSE 'sealed' END
WHERE %(change_id)s IN (p.created_by_change, p.ended_by_change);

-- name: change_done
-- A change is in force.
UPDATE mqlayer.route_change SET state = 'done', opened_at = %(opened_at)s, ended_at = clock_timestamp()
WHERE change_id = %(change_id)s AND state = 'sealed';

-- name: change_notify
-- Let the members of a topic's groups look at their assignments when the change is in force: who drained a parent before
-- that found no successor to give out.
SELECT pg_notify('mqlayer_group', group_id::text) FROM mqlayer.consumer_group
WHERE topic_id = %(topic_id)s AND state = 'live';

-- name: clock
-- The database's clock, now.
SELECT clock_timestamp();

-- name: change_drop
-- A change that sealed nothing is given up.
UPDATE mqlayer.route_change SET state = 'dropped', ended_at = clock_timestamp()
WHERE change_id = %(change_id)s AND state = 'planned';

-- name: change_parents_free
-- The parents of a dropped change go on.
UPDATE mqlayer.partition SET ended_by_change = NULL WHERE ended_by_change = %(change_id)s;

-- name: change_successors_delete
-- The successors of a dropped change were never anything.
UPDATE mqlayer.partition SET state = 'deleted' WHERE created_by_change = %(change_id)s;

-- part: change_columns
c.change_id, c.version, c.kind, c.state, c.mode, c.actor, c.planned_at, c.sealed_at, c.opened_at, c.ended_at,
       (SELECT coalesce(array_agg(p.partition_id ORDER BY p.lp_from), '{}')
        FROM mqlayer.partition p WHERE p.ended_by_change = c.change_id) AS parents,
       (SELECT coalesce(array_agg(p.partition_id ORDER BY p.lp_from), '{}')
        FROM mqlayer.partition p WHERE p.created_by_change = c.change_id) AS successors

-- name: change_history
-- A topic's changes, oldest first, with what they ended and made.
SELECT {change_columns}
FROM mqlayer.route_change c JOIN mqlayer.topic t USING (topic_id)
WHERE t.name = %(topic)s ORDER BY c.change_id;

-- name: route_changes_page
-- Changes of a topic up to a version, the newest first, with the mode, the partitions, and the reason that its actor gave.
SELECT {change_columns},
       (SELECT a.facts ->> 'reason' FROM mqlayer.audit a
        WHERE a.object = t.name AND a.act = 'route ' || c.kind AND (a.facts ->> 'change')::int = c.change_id
          AND a.at BETWEEN c.planned_at - interval '5 minutes' AND c.planned_at + interval '5 minutes'
        ORDER BY a.at DESC LIMIT 1) AS reason
FROM mqlayer.route_change c JOIN mqlayer.topic t USING (topic_id)
WHERE t.name = %(topic)s AND c.version <= %(upto)s ORDER BY c.version DESC, c.change_id DESC LIMIT %(limit)s;

-- name: route_of_version
-- The ranges of one route version of a topic with their partitions' places and parents; the one in force where none is
-- named.
SELECT r.version, r.lp_from, r.lp_to, r.partition_id, p.node_id, p.state,
       (SELECT coalesce(array_agg(q.partition_id ORDER BY q.lp_from), '{}') FROM mqlayer.partition q
        WHERE q.ended_by_change = p.created_by_change AND q.lp_from < p.lp_to AND p.lp_from < q.lp_to) AS parents
FROM mqlayer.topic t
JOIN mqlayer.route r ON r.topic_id = t.topic_id AND r.version = coalesce(%(version)s::int, t.version)
JOIN mqlayer.partition p ON p.partition_id = r.partition_id
WHERE t.name = %(topic)s ORDER BY r.lp_from;

-- name: drain_progress
-- The sealed partitions of a topic, all or these, that some group has not drained, per group: where it must come to.
SELECT g.group_id, g.name, g.version, p.partition_id, p.node_id, s.next_offset, coalesce(gs.start_offset, 1) AS start_offset,
       g.seek
FROM mqlayer.topic t
JOIN mqlayer.consumer_group g ON g.topic_id = t.topic_id AND g.state <> 'retired' AND g.mode <> 'broadcast'
JOIN mqlayer.partition p ON p.topic_id = t.topic_id AND p.state = 'sealed'
JOIN mqlayer.seal s ON s.partition_id = p.partition_id
LEFT JOIN mqlayer.group_start gs ON gs.group_id = g.group_id AND gs.partition_id = p.partition_id
WHERE t.name = %(topic)s AND (%(partitions)s::int[] IS NULL OR p.partition_id = ANY(%(partitions)s::int[]))
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
ORDER BY g.name, p.partition_id;

-- name: drained_put
-- A group drained a partition: said by its owner, under the epoch in force, of the very command that is recorded.
INSERT INTO mqlayer.drained (group_id, partition_id)
SELECT a.group_id, a.partition_id
FROM mqlayer.assignment a
JOIN mqlayer.member m ON m.group_id = a.group_id AND m.member_id = a.member_id AND m.session = %(session)s
JOIN mqlayer.seal s ON s.partition_id = a.partition_id AND s.seal_id = %(seal_id)s
WHERE a.group_id = %(group_id)s AND a.partition_id = %(partition_id)s AND a.member_id = %(member_id)s
  AND a.epoch = %(epoch)s
ON CONFLICT DO NOTHING
RETURNING partition_id;

-- name: drained_put_dropped
-- A group whose members are all away drained a partition: its topic's limits moved its position to the recorded command.
INSERT INTO mqlayer.drained (group_id, partition_id)
SELECT g.group_id, s.partition_id
FROM mqlayer.consumer_group g JOIN mqlayer.seal s ON s.partition_id = %(partition_id)s AND s.next_offset = %(next_offset)s
WHERE g.group_id = %(group_id)s AND g.seek = %(seek)s AND g.state = 'live'
  AND NOT EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until > clock_timestamp())
ON CONFLICT DO NOTHING
RETURNING partition_id;

-- name: drained_dropped_due
-- Which sealed partitions groups without living members have yet to drain.
SELECT g.group_id, told.partition_id
FROM unnest(%(groups)s::bigint[], %(partitions)s::int[], %(seeks)s::bigint[]) AS told (group_id, partition_id, seek)
JOIN mqlayer.consumer_group g ON g.group_id = told.group_id AND g.seek = told.seek AND g.state = 'live'
WHERE NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = told.partition_id)
  AND NOT EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until > clock_timestamp())
ORDER BY 1, 2;

-- name: drained_put_popped
-- A group with ordered pop, or a shared one, drained a partition: said by a receiver or member, under the epoch in force, of the very command that is
-- recorded.
INSERT INTO mqlayer.drained (group_id, partition_id)
SELECT a.group_id, a.partition_id
FROM mqlayer.assignment a
JOIN mqlayer.consumer_group g ON g.group_id = a.group_id AND g.mode IN ('pop', 'shared')
JOIN mqlayer.seal s ON s.partition_id = a.partition_id AND s.seal_id = %(seal_id)s
WHERE a.group_id = %(group_id)s AND a.partition_id = %(partition_id)s AND a.epoch = %(epoch)s
ON CONFLICT DO NOTHING
RETURNING partition_id;

-- name: drained_from_start
-- A group begins behind a partition.
INSERT INTO mqlayer.drained (group_id, partition_id) VALUES (%(group_id)s, %(partition_id)s) ON CONFLICT DO NOTHING;

-- name: group_version_raise
-- Let a group's route version move to the next one, if it still is this one and all that came before is drained.
UPDATE mqlayer.consumer_group g SET version = g.version + 1
WHERE g.group_id = %(group_id)s AND g.version = %(version)s
  AND EXISTS (SELECT FROM mqlayer.route_change c
              WHERE c.topic_id = g.topic_id AND c.version - 1 = g.version AND c.state = 'done'
                AND NOT EXISTS (
                    SELECT FROM mqlayer.partition p
                    WHERE p.ended_by_change = c.change_id AND p.state <> 'deleted'
                      AND NOT EXISTS (SELECT FROM mqlayer.drained d
                                      WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)))
RETURNING g.version;

-- name: group_version
-- The route version of a group, locked: a change that comes into force and a parent that is drained at the same time must
-- not both miss the other's half.
SELECT version FROM mqlayer.consumer_group WHERE group_id = %(group_id)s FOR NO KEY UPDATE;

-- name: groups_behind
-- Groups that have drained all that came before their next route version, and are not there yet.
SELECT g.group_id FROM mqlayer.consumer_group g
JOIN mqlayer.route_change c ON c.topic_id = g.topic_id AND c.version - 1 = g.version AND c.state = 'done'
WHERE g.state = 'live' AND g.mode <> 'broadcast'
  AND NOT EXISTS (SELECT FROM mqlayer.partition p
                  WHERE p.ended_by_change = c.change_id AND p.state <> 'deleted'
                    AND NOT EXISTS (SELECT FROM mqlayer.drained d
                                    WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id))
ORDER BY g.group_id;

-- name: partition_retire
-- Sealed partitions that every group has drained, and the archive has, where it is to; a topic without any group keeps everything. Its rows of the route in
-- force are others by then. The groups are locked, so that none is sent back to a partition that this takes away; one that
-- was sent elsewhere since this statement began to look, or that is being changed now, keeps all until the next pass.
WITH looked_at AS MATERIALIZED (
    SELECT g.group_id, g.seek FROM mqlayer.consumer_group g
    WHERE g.state <> 'retired' AND g.mode <> 'broadcast'
      AND EXISTS (SELECT FROM mqlayer.partition p WHERE p.topic_id = g.topic_id AND p.state = 'sealed')
    ORDER BY g.group_id FOR SHARE SKIP LOCKED
)
UPDATE mqlayer.partition p SET state = 'deleted'
FROM mqlayer.route_change c
WHERE c.change_id = p.ended_by_change AND c.state = 'done' AND p.state = 'sealed'
  AND EXISTS (SELECT FROM mqlayer.consumer_group g
              WHERE g.topic_id = p.topic_id AND g.state <> 'retired' AND g.mode <> 'broadcast')
  AND NOT EXISTS (SELECT FROM mqlayer.consumer_group g
                  WHERE g.topic_id = p.topic_id AND g.state <> 'retired' AND g.mode <> 'broadcast'
                    AND NOT EXISTS (SELECT FROM mqlayer.drained d JOIN looked_at l USING (group_id)
                                    WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id
                                      AND l.seek = g.seek))
  AND NOT EXISTS (SELECT FROM mqlayer.topic t
                  LEFT JOIN mqlayer_archive.progress a ON a.partition_id = p.partition_id
                  WHERE t.topic_id = p.topic_id AND t.archived AND a.complete IS NOT TRUE)
RETURNING p.partition_id;

-- name: partitions_to_delete
-- Deleted partitions of which more than a tombstone may be left in Redis, with the groups that have keys there, and whether
-- the archive wants what became of messages; but for those on some nodes.
SELECT p.partition_id, p.node_id,
       (SELECT coalesce(array_agg(g.group_id ORDER BY g.group_id), '{}')
        FROM mqlayer.consumer_group g WHERE g.topic_id = p.topic_id) AS group_ids, t.archived
FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id)
WHERE p.state = 'deleted' AND p.retired_at IS NULL AND p.node_id <> ALL(%(skipped_nodes)s::int[])
ORDER BY p.partition_id LIMIT %(limit)s;

-- name: partition_deleted
-- Nothing but tombstones is left of these; nor need anybody know where groups were in them.
WITH deleted AS (
    UPDATE mqlayer.partition SET retired_at = now()
    WHERE partition_id = ANY(%(partitions)s::int[]) AND retired_at IS NULL RETURNING partition_id
), forgotten AS (
    DELETE FROM mqlayer.assignment a USING deleted b WHERE a.partition_id = b.partition_id
), passed AS (
    DELETE FROM mqlayer.drained d USING deleted b WHERE d.partition_id = b.partition_id
), measured AS (
    DELETE FROM mqlayer.partition_rate r USING deleted b WHERE r.partition_id = b.partition_id
)
DELETE FROM mqlayer.group_start s USING deleted b WHERE s.partition_id = b.partition_id;

-- name: seal_marks
-- The recorded marks of one sealed partition.
SELECT marks FROM mqlayer.seal WHERE partition_id = %(partition_id)s;

-- name: lost_audited
-- How many messages of a partition are written down as lost by its nodes' armings so far, at whatever address.
SELECT coalesce(sum((facts -> 'lost' ->> %(partition)s::text)::bigint), 0)::bigint AS lost
FROM mqlayer.audit WHERE act IN ('node rearm', 'node set');

-- name: seals_unreachable
-- Nodes that have to seal a partition when they are back.
SELECT DISTINCT n.name FROM mqlayer.seal s
JOIN mqlayer.partition p USING (partition_id) JOIN mqlayer.node n USING (node_id)
WHERE s.unreachable AND p.state = 'sealed' ORDER BY n.name;

-- name: nodes_given_up
-- Nodes that an operator said are lost, and that are not back.
SELECT name FROM mqlayer.node WHERE lost_at IS NOT NULL AND removed_at IS NULL;

-- name: outbox_sources
-- The outboxes that may publish.
SELECT source_id, outbox_uuid FROM mqlayer.source WHERE kind = 'outbox' AND closed_at IS NULL ORDER BY source_id;

-- name: direct_sources_live
-- Whether any direct producer may have marks in partitions.
SELECT EXISTS (SELECT FROM mqlayer.source WHERE kind = 'direct' AND dropped_at IS NULL);

-- name: node_disarm
-- No connection is served any more until the node is armed again; who goes by when it was armed hears of it too.
UPDATE mqlayer.node SET armed_run_id = NULL, armed_at = clock_timestamp() WHERE node_id = %(node_id)s;

-- name: changes_without_nodes
-- These changes go on where a parent's node is away.
UPDATE mqlayer.route_change SET mode = 'unreachable' WHERE change_id = ANY(%(change_ids)s::int[]) AND mode = 'live';

-- name: changes_of_lost_node
-- Open changes that a lost node holds up go on without it.
UPDATE mqlayer.route_change c SET mode = 'lost'
WHERE c.state IN ('planned', 'sealing') AND EXISTS (SELECT FROM mqlayer.partition p
                                      WHERE p.ended_by_change = c.change_id AND p.node_id = %(node_id)s);

-- name: node_lost
-- A node is out of service for good; since when, if it was said before.
UPDATE mqlayer.node SET armed_run_id = NULL, lost_at = coalesce(lost_at, clock_timestamp()) WHERE node_id = %(node_id)s
RETURNING lost_at;

-- name: partitions_of_lost_node
-- What is on a lost node; those that publishers use last.
SELECT p.partition_id, t.topic_id, t.name, p.state FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id)
WHERE p.node_id = %(node_id)s AND p.state <> 'deleted'
ORDER BY p.state = 'open', t.name, p.lp_from, p.partition_id;

-- name: given_up
-- What was given up with a node since it was said to be lost.
SELECT facts FROM mqlayer.audit WHERE act = 'partition given up' AND facts ->> 'node' = %(node_id)s::text AND at >= %(since)s
ORDER BY audit_id;

-- name: abandoned_put
-- A copy of a partition that stays behind on a lost node.
INSERT INTO mqlayer.abandoned (node_id, partition_id)
SELECT node_id, partition_id FROM mqlayer.partition WHERE partition_id = %(partition_id)s
ON CONFLICT DO NOTHING;

-- name: abandoned_remove
-- The node gets this very partition again.
DELETE FROM mqlayer.abandoned WHERE node_id = %(to_node_id)s AND partition_id = %(partition_id)s;

-- name: nodes_of_partitions
-- The nodes that partitions are on.
SELECT DISTINCT n.name FROM mqlayer.partition p JOIN mqlayer.node n USING (node_id)
WHERE p.partition_id = ANY(%(partitions)s::int[]) ORDER BY n.name;

-- name: abandoned_of_node
-- Partitions that were made anew elsewhere since the node was given up.
SELECT partition_id FROM mqlayer.abandoned WHERE node_id = %(node_id)s AND at >= %(since)s ORDER BY partition_id;

-- name: partition_relocate
-- A partition that nobody publishes to is made anew on another node, from its outbox.
UPDATE mqlayer.partition p SET node_id = n.node_id
FROM (SELECT node_id FROM mqlayer.node
      WHERE node_id = %(to_node_id)s AND draining_at IS NULL AND removed_at IS NULL FOR SHARE) AS n
WHERE p.partition_id = %(partition_id)s RETURNING p.partition_id;

-- name: group_starts_lower
-- Where partitions fell back behind the offset at which a group starts, it starts with what they get next.
UPDATE mqlayer.group_start s SET start_offset = fallen.next
FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[]) AS fallen(partition_id, next)
WHERE s.partition_id = fallen.partition_id AND s.start_offset > fallen.next;

-- name: dead_log_lost
-- Partitions fell back behind the offsets at which messages died: where these come again, nobody knows.
UPDATE mqlayer.dead_message d SET log_lost = true
FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[]) AS fallen(partition_id, next)
JOIN mqlayer.partition p USING (partition_id) JOIN mqlayer.consumer_group g USING (topic_id)
WHERE d.group_id = g.group_id AND d.partition_id = fallen.partition_id AND d.log_offset >= fallen.next AND NOT d.log_lost;

-- name: group_starts_reset
-- Its offsets begin anew there, for every group.
UPDATE mqlayer.group_start SET start_offset = 1 WHERE partition_id = %(partition_id)s;

-- name: assignments_of_partition_raise
-- No earlier owner of a partition is served any more.
UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE partition_id = %(partition_id)s;

-- name: forgotten_limits
-- The highest numbers that this database gave out of changes and partitions, or leaped over when it was replaced.
SELECT coalesce(max(last_value) FILTER (WHERE sequencename = 'route_change_change_id_seq'), 0)::int AS change_id,
       coalesce(max(last_value) FILTER (WHERE sequencename = 'partition_partition_id_seq'), 0)::int AS partition_id
FROM pg_sequences WHERE schemaname = 'mqlayer';

-- name: forgotten_known
-- Which of these changes and partitions are known; a change that was dropped never sealed anything.
SELECT (SELECT coalesce(array_agg(change_id), '{}') FROM mqlayer.route_change
        WHERE change_id = ANY(%(changes)s::int[]) AND state <> 'dropped') AS changes,
       (SELECT coalesce(array_agg(partition_id), '{}') FROM mqlayer.partition
        WHERE partition_id = ANY(%(partitions)s::int[])) AS partitions;

-- name: forgotten_homes
-- Partitions of a topic that are open, with their nodes.
SELECT p.partition_id, p.node_id FROM mqlayer.partition p
WHERE p.topic_id = %(topic_id)s AND p.state = 'open' ORDER BY p.partition_id;

-- name: forgotten_groups
-- All groups of a topic that may have keys on nodes.
SELECT group_id FROM mqlayer.consumer_group WHERE topic_id = %(topic_id)s ORDER BY group_id;

-- name: forgotten_epochs
-- Give the assignments of partitions that are opened again a new epoch: their owners have read the command.
UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE partition_id = ANY(%(partitions)s::int[]) RETURNING group_id, partition_id, epoch;

-- name: change_list
-- Route changes of all topics, or of one, the newest first, from before one on: open ones, those whose parents are not
-- drained, or all.
SELECT {change_columns}, t.name,
       (SELECT count(*) FROM mqlayer.partition p WHERE p.ended_by_change = c.change_id AND p.state = 'sealed')::int AS kept
FROM mqlayer.route_change c JOIN mqlayer.topic t USING (topic_id)
WHERE (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (%(change_id)s::int IS NULL OR c.change_id = %(change_id)s)
  AND (%(before)s::int IS NULL OR c.change_id < %(before)s)
  AND (NOT %(open)s::boolean OR c.state IN ('planned', 'sealing', 'sealed'))
  AND (NOT %(draining)s::boolean OR c.state = 'done' AND c.change_id IN (
      SELECT p.ended_by_change FROM mqlayer.partition p WHERE p.state = 'sealed'))
ORDER BY c.change_id DESC LIMIT %(limit)s;

-- name: change_states
-- The states of route changes.
SELECT change_id, state FROM mqlayer.route_change WHERE change_id = ANY(%(change_ids)s::int[]);

-- name: change_waits
-- Groups that have not drained the sealed parents of changes, and how many parents of each.
SELECT p.ended_by_change, g.name, count(*)::int
FROM mqlayer.partition p JOIN mqlayer.consumer_group g ON g.topic_id = p.topic_id AND g.state <> 'retired' AND g.mode <> 'broadcast'
WHERE p.ended_by_change = ANY(%(change_ids)s::int[]) AND p.state = 'sealed'
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
GROUP BY p.ended_by_change, g.name ORDER BY p.ended_by_change, g.name;

-- name: change_parts
-- The partitions that a change ends and makes, with their nodes.
SELECT p.partition_id, n.name, p.lp_from, p.lp_to, p.state,
       coalesce(p.ended_by_change = %(change_id)s, false) AS parent
FROM mqlayer.partition p JOIN mqlayer.node n USING (node_id)
WHERE p.ended_by_change = %(change_id)s OR p.created_by_change = %(change_id)s
ORDER BY parent DESC, p.lp_from, p.partition_id;

-- name: change_durations
-- How long publishers waited for the last live changes, in seconds: half of them at most, and the longest.
SELECT percentile_cont(0.5) WITHIN GROUP (ORDER BY one.took_s), max(one.took_s), count(*)::int
FROM (SELECT extract(epoch FROM c.ended_at - c.planned_at)::float8 AS took_s FROM mqlayer.route_change c
      WHERE c.state = 'done' AND c.mode = 'live' ORDER BY c.change_id DESC LIMIT %(limit)s) AS one;

-- name: placed_partitions
-- All partitions that are not deleted, with topic, home and rate; of sealed ones, whether a group holds them, and of which
-- topics no change may be planned.
SELECT p.partition_id, p.node_id, p.state, t.topic_id, t.name, t.home_zone, p.lp_to - p.lp_from, coalesce(r.per_s, 0)::float8,
       t.archived, t.deleting_at IS NOT NULL, t.version IS NULL,
       EXISTS (SELECT FROM mqlayer.consumer_group g
               WHERE g.topic_id = t.topic_id AND g.state <> 'retired' AND g.mode <> 'broadcast')
FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer.partition_rate r ON r.partition_id = p.partition_id AND r.measured_at > now() - interval '5 minutes'
WHERE p.state <> 'deleted' ORDER BY p.partition_id;

-- name: draining_groups
-- Groups that read partitions, where each starts there, and how many messages of its topic it handled by the second, by
-- the samples of ten minutes; null where there are not two.
SELECT p.partition_id, p.node_id, g.group_id, t.name, g.name, coalesce(s.start_offset, 1), g.seek,
       coalesce(g.paused_at, t.paused_at) IS NOT NULL, h.per_s
FROM mqlayer.partition p JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.consumer_group g ON g.topic_id = p.topic_id AND g.state = 'live' AND g.mode <> 'broadcast'
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
LEFT JOIN LATERAL (
    SELECT ((array_agg(b.stored - b.lag ORDER BY b.at DESC))[1] - (array_agg(b.stored - b.lag ORDER BY b.at))[1])
           / nullif(extract(epoch FROM max(b.at) - min(b.at)), 0)::float8 AS per_s
    FROM (SELECT o.at, o.stored, m.lag FROM mqlayer.sample o JOIN mqlayer.sample m USING (at)
          WHERE o.kind = 'topic' AND o.object_id = g.topic_id AND m.kind = 'group' AND m.object_id = g.group_id
            AND o.at > now() - interval '10 minutes' AND o.stored IS NOT NULL AND m.lag IS NOT NULL) AS b) AS h ON true
WHERE p.partition_id = ANY(%(partitions)s::int[])
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
ORDER BY t.name, g.name, p.partition_id;
