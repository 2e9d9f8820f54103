-- name: group_retire
-- A group holds nothing up any more. Nothing where it did not.
UPDATE mqlayer.consumer_group SET state = 'retired', retired_at = now(), paused_at = NULL
WHERE group_id = %(group_id)s AND state <> 'retired' RETURNING group_id;

-- name: group_members_living
-- The members of a group, and of its instances, whose leases last.
SELECT m.member_id, m.host, m.pid FROM mqlayer.member m JOIN mqlayer.consumer_group g USING (group_id)
WHERE (g.group_id = %(group_id)s OR g.broadcast_of = %(group_id)s) AND m.lease_until >= now() ORDER BY m.member_id;

-- name: parked_of_groups
-- How many messages are parked of these groups.
SELECT count(*) FROM mqlayer.parked_message WHERE group_id = ANY(%(group_ids)s::bigint[]);

-- name: retired_parked
-- Retired groups of which something is parked yet.
SELECT g.group_id FROM mqlayer.consumer_group g
WHERE g.state = 'retired' AND EXISTS (SELECT FROM mqlayer.parked_key k WHERE k.group_id = g.group_id) ORDER BY g.group_id;

-- name: retired_messages_drop
-- Drop some of what is parked of a retired group; how many messages that were.
SELECT mqlayer.retired_messages_drop_v1(%(group_id)s, %(limit)s);

-- name: retired_keys_drop
-- Drop some of the parked keys of a retired group that have no messages; how many that were.
SELECT mqlayer.retired_keys_drop_v1(%(group_id)s, %(limit)s);

-- name: redrives_of_group_cancel
-- End what is being given back to a group.
UPDATE mqlayer.redrive SET state = 'cancelled', ended_at = clock_timestamp(), worker = NULL, lease_until = NULL, blocked_by = NULL
WHERE group_id = %(group_id)s AND state IN ('planned', 'running');

-- name: assignments_of_group_free
-- Nobody owns a partition of a group; no earlier owner is served any more. The rows stay while Redis may hold keys.
UPDATE mqlayer.assignment SET member_id = NULL, target = NULL, epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE group_id = %(group_id)s;

-- name: retired_keys
-- Where retired groups may have keys, in the order of group and partition behind a place in it: below which epoch nobody is
-- served there, whether the archive wants what became of messages, whether the group is retired for long, and whether it
-- had receivers.
SELECT a.group_id, a.partition_id, p.node_id, a.epoch, t.archived,
       g.retired_at <= clock_timestamp() - make_interval(secs => %(after_s)s) AS for_long, g.mode = 'pop' AS popped
FROM mqlayer.assignment a
JOIN mqlayer.consumer_group g ON g.group_id = a.group_id AND g.state = 'retired'
JOIN mqlayer.partition p ON p.partition_id = a.partition_id
JOIN mqlayer.topic t ON t.topic_id = g.topic_id
WHERE (a.group_id, a.partition_id) > (%(after_group)s::bigint, %(after_partition)s::int)
ORDER BY a.group_id, a.partition_id LIMIT %(limit)s;

-- name: retired_keys_gone
-- Redis holds nothing of these groups in these partitions. Not of a group that came back meanwhile.
DELETE FROM mqlayer.assignment a
USING unnest(%(groups)s::bigint[], %(partitions)s::int[], %(epochs)s::bigint[]) AS gone (group_id, partition_id, epoch),
      mqlayer.consumer_group g
WHERE a.group_id = gone.group_id AND a.partition_id = gone.partition_id AND a.epoch = gone.epoch
  AND g.group_id = a.group_id AND g.state = 'retired';

-- name: retired_keys_raise
-- Give retired groups epochs above those that nodes have seen. Not a group that came back meanwhile.
UPDATE mqlayer.assignment a SET epoch = nextval('mqlayer.epoch'), changed_at = now()
FROM unnest(%(groups)s::bigint[], %(partitions)s::int[], %(epochs)s::bigint[]) AS held (group_id, partition_id, epoch),
     mqlayer.consumer_group g
WHERE a.group_id = held.group_id AND a.partition_id = held.partition_id AND a.epoch = held.epoch
  AND g.group_id = a.group_id AND g.state = 'retired';
