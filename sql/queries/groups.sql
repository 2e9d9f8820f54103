-- name: group_insert
-- Create a group that is not live yet; nothing where the name is taken.
INSERT INTO mqlayer.consumer_group (topic_id, name, start, start_at, backoff_s)
SELECT topic_id, %(name)s, %(start)s, %(start_at)s, %(backoff_s)s FROM mqlayer.topic WHERE name = %(topic)s
ON CONFLICT (topic_id, name) DO NOTHING;

-- name: group_find
-- One group of a topic.
SELECT g.group_id, g.topic_id, g.state, g.start, g.backoff_s, g.start_at, g.version, g.seek
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
WHERE t.name = %(topic)s AND g.name = %(name)s;

-- name: group_start_insert
-- Where a group starts in a partition: said once.
INSERT INTO mqlayer.group_start (group_id, partition_id, start_offset)
VALUES (%(group_id)s, %(partition_id)s, %(start_offset)s)
ON CONFLICT (group_id, partition_id) DO NOTHING;

-- name: group_creating
-- Lock a group that is not live yet; nothing where somebody brought it to life.
SELECT group_id FROM mqlayer.consumer_group WHERE group_id = %(group_id)s AND state = 'creating' FOR NO KEY UPDATE;

-- name: group_live
-- All starting points of a group are stored: let members in.
UPDATE mqlayer.consumer_group SET state = 'live' WHERE group_id = %(group_id)s AND state = 'creating';

-- name: group_seek
-- Send a group elsewhere, unless it was since this was decided: what it had committed is void.
UPDATE mqlayer.consumer_group
SET seek = seek + 1, replay = CASE WHEN %(replay)s THEN seek + 1 ELSE replay END, version = 1
WHERE group_id = %(group_id)s AND seek = %(seek)s AND state = 'live' RETURNING seek;

-- name: group_starts_forget
-- Where a group started before.
DELETE FROM mqlayer.group_start WHERE group_id = %(group_id)s;

-- name: drained_forget
-- A group has drained nothing as yet.
DELETE FROM mqlayer.drained WHERE group_id = %(group_id)s;

-- name: transaction_patience
-- How long this transaction waits for a lock, and how long it may hold its own while its process does nothing.
SELECT set_config('lock_timeout', %(lock_wait)s, true),
       set_config('idle_in_transaction_session_timeout', %(idle)s, true);

-- name: group_lock
-- Lock a group for a change of its membership or assignments.
SELECT group_id, topic_id, backoff_s, allocation FROM mqlayer.consumer_group
WHERE group_id = %(group_id)s FOR NO KEY UPDATE;

-- name: member_join
-- A member (again): a new session, so that an earlier process of this id is refused.
INSERT INTO mqlayer.member (group_id, member_id, host, pid, lease_until)
VALUES (%(group_id)s, %(member_id)s, %(host)s, %(pid)s, now() + make_interval(secs => %(lease_s)s))
ON CONFLICT (group_id, member_id) DO UPDATE
SET session = nextval('mqlayer.member_session'), host = excluded.host, pid = excluded.pid, leaving = false,
    joined_at = now(), lease_until = excluded.lease_until
RETURNING session;

-- name: member_beat
-- Extend a member's lease by the database's clock, unless it ran out; and say whether the group needs a look: a lease ran
-- out, a partition has no owner, or partitions came or went.
WITH beat AS (
    UPDATE mqlayer.member SET lease_until = now() + make_interval(secs => %(lease_s)s)
    WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND session = %(session)s AND lease_until >= now()
    RETURNING member_id
)
SELECT (SELECT count(*) FROM beat) AS known,
       (SELECT m.session FROM mqlayer.member m
        WHERE m.group_id = %(group_id)s AND m.member_id = %(member_id)s) AS session,
       EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = %(group_id)s AND m.member_id <> %(member_id)s
               AND m.lease_until < now() AND m.lease_until > '-infinity')
       OR EXISTS (SELECT FROM mqlayer.readable r
                  LEFT JOIN mqlayer.assignment a ON a.group_id = r.group_id AND a.partition_id = r.partition_id
                  WHERE r.group_id = %(group_id)s AND a.member_id IS NULL) AS unbalanced;

-- name: groups_unbalanced
-- Live groups that need a rebalance and may have nobody to ask for it: a lease ran out, or what the group may consume
-- has an owner that is gone, or has none although a member could take it. The condition of member_beat, for all groups
-- at once; a group without members is left alone, or every scan would take its lock for nothing.
SELECT g.group_id FROM mqlayer.consumer_group g
WHERE g.state = 'live'
  AND (EXISTS (SELECT FROM mqlayer.member m
               WHERE m.group_id = g.group_id AND m.lease_until < now() AND m.lease_until > '-infinity')
       OR EXISTS (SELECT FROM mqlayer.readable r
                  LEFT JOIN mqlayer.assignment a ON a.group_id = r.group_id AND a.partition_id = r.partition_id
                  LEFT JOIN mqlayer.member m ON m.group_id = a.group_id AND m.member_id = a.member_id
                  WHERE r.group_id = g.group_id
                    AND (m.lease_until = '-infinity'
                         OR a.member_id IS NULL
                            AND EXISTS (SELECT FROM mqlayer.member s
                                        WHERE s.group_id = g.group_id AND s.lease_until >= now() AND NOT s.leaving))))
ORDER BY g.group_id;

-- name: member_assignments
-- What a member holds: partition, node, epoch, start, and whether it shall release it. Nothing for an earlier session:
-- an old process must not learn the epochs of the one that took its id.
SELECT p.partition_id, p.node_id, p.lp_from, p.lp_to, a.epoch, coalesce(s.start_offset, 1) AS start_offset,
       a.target IS DISTINCT FROM a.member_id AS release, coalesce(e.cut, false) AS cut, g.seek, g.replay,
       g.allocation, g.backoff_s
FROM mqlayer.consumer_group g
LEFT JOIN mqlayer.member m ON m.group_id = g.group_id AND m.member_id = %(member_id)s AND m.session = %(session)s
LEFT JOIN mqlayer.assignment a ON a.group_id = g.group_id AND a.member_id = m.member_id
LEFT JOIN mqlayer.partition p ON p.partition_id = a.partition_id AND p.state <> 'deleted'
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = a.partition_id
LEFT JOIN mqlayer.seal e ON e.partition_id = a.partition_id
WHERE g.group_id = %(group_id)s ORDER BY a.partition_id;

-- name: member_expire
-- Note for good that leases ran out, so that a heartbeat on its way can't bring one back.
UPDATE mqlayer.member SET lease_until = '-infinity'
WHERE group_id = %(group_id)s AND lease_until < now() AND lease_until > '-infinity';

-- name: member_live
-- Members whose lease was not noted as run out.
SELECT member_id, leaving FROM mqlayer.member
WHERE group_id = %(group_id)s AND lease_until > '-infinity' ORDER BY member_id;

-- name: member_leaving
-- A member wants to give its partitions away, and lives until it has.
UPDATE mqlayer.member SET leaving = true
WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND session = %(session)s;

-- name: member_forget
-- Forget members that are gone, joined long ago and own nothing.
DELETE FROM mqlayer.member m
WHERE m.group_id = %(group_id)s AND m.lease_until = '-infinity' AND m.joined_at < now() - interval '1 hour'
  AND NOT EXISTS (SELECT FROM mqlayer.assignment a WHERE a.group_id = m.group_id AND a.member_id = m.member_id);

-- name: member_leave
-- A member is gone by its own word.
UPDATE mqlayer.member SET leaving = true, lease_until = '-infinity'
WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND session = %(session)s;

-- name: assignment_free_deleted
-- Nobody consumes a partition that is gone.
UPDATE mqlayer.assignment a SET member_id = NULL, target = NULL, changed_at = now()
FROM mqlayer.partition p
WHERE p.partition_id = a.partition_id AND p.state = 'deleted' AND a.group_id = %(group_id)s AND a.member_id IS NOT NULL;

-- name: assignment_list
-- Who owns what of all that a group may consume, and who shall.
SELECT r.partition_id, a.member_id, a.epoch, a.target
FROM mqlayer.readable r
LEFT JOIN mqlayer.assignment a ON a.group_id = r.group_id AND a.partition_id = r.partition_id
WHERE r.group_id = %(group_id)s ORDER BY r.partition_id;

-- name: assignment_put
-- Give a partition to a member, under a new epoch.
INSERT INTO mqlayer.assignment AS a (group_id, partition_id, member_id, target, epoch)
VALUES (%(group_id)s, %(partition_id)s, %(member_id)s, %(member_id)s, nextval('mqlayer.epoch'))
ON CONFLICT (group_id, partition_id) DO UPDATE
SET member_id = excluded.member_id, target = excluded.target, changed_at = now(),
    -- Re-arming a node may have raised it while this statement waited for the row.
    epoch = CASE WHEN excluded.epoch > a.epoch THEN excluded.epoch ELSE nextval('mqlayer.epoch') END;

-- name: assignment_target
-- Ask the owner of a partition to release it for another.
UPDATE mqlayer.assignment SET target = %(target)s, changed_at = now()
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s;

-- name: assignment_free
-- Take a partition from a member that is gone; its epoch stays until the next owner's.
UPDATE mqlayer.assignment SET member_id = NULL, target = NULL, changed_at = now()
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s;

-- name: assignment_release
-- The owner gives a partition back; nothing where its epoch is not in force any more.
UPDATE mqlayer.assignment SET member_id = NULL, target = NULL, changed_at = now()
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s AND member_id = %(member_id)s AND epoch = %(epoch)s;

-- name: assignment_renew
-- A member joined again under its id: what it held goes on under new epochs.
UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE group_id = %(group_id)s AND member_id = %(member_id)s;

-- name: assignments_of_group_raise
-- No earlier owner of any partition of a group is served any more.
UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE group_id = %(group_id)s RETURNING partition_id, epoch;

-- name: assignment_free_unreadable
-- Nobody consumes a partition whose parents the group has not drained any more.
UPDATE mqlayer.assignment a SET member_id = NULL, target = NULL, changed_at = now()
WHERE a.group_id = %(group_id)s AND a.member_id IS NOT NULL
  AND NOT EXISTS (SELECT FROM mqlayer.readable r WHERE r.group_id = a.group_id AND r.partition_id = a.partition_id);

-- name: assignment_epoch_renew
-- The owner's present epoch is refused by the node: give it a higher one.
UPDATE mqlayer.assignment a SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE a.group_id = %(group_id)s AND a.partition_id = %(partition_id)s AND a.member_id = %(member_id)s
  AND a.epoch = %(epoch)s
  AND EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = a.group_id AND m.member_id = a.member_id
              AND m.session = %(session)s);

-- name: allocation_raise
-- Note that assignments of a group changed, and let its members know.
WITH raised AS (
    UPDATE mqlayer.consumer_group SET allocation = allocation + 1 WHERE group_id = %(group_id)s RETURNING group_id
)
SELECT pg_notify('mqlayer_group', group_id::text) FROM raised;
