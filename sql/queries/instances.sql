-- part: inherited
start, start_at, ordered, balance, tag_filter, rate_limit, rate_burst, settings_version, backoff_s, backoff_jitter,
attempt_limit, policy, non_retryable_errors, retryable_errors, time_limit_s, max_time_limit_s, parked_keys_limit, parked_messages_limit,
parked_bytes_limit, key_messages_limit, key_bytes_limit, breaker_share, breaker_keys, breaker_window_s, breaker_errors,
key_class, class_concurrency, class_rate;

-- part: absent_s
-- For how long nobody has consumed for an instance c; a lease that ran out and was not noted counts from its end. Null where
-- a worker of the time before instances noted the lease alone: the next rebalance notes the absence.
extract(epoch FROM clock_timestamp() - coalesce(c.absent_since, (
    SELECT max(m.lease_until) FROM mqlayer.member m
    WHERE m.group_id = c.group_id AND m.lease_until > '-infinity')))::float8;

-- name: instance_insert
-- An instance of a broadcast group, with the settings of then: nobody changes or retires the group meanwhile. It counts as
-- away until it joins. Nothing where it is there, or its group is retired.
INSERT INTO mqlayer.consumer_group (topic_id, name, broadcast_of, instance, absent_since, paused_at, paused_by, {inherited})
SELECT topic_id, name || '@' || %(instance)s::text, group_id, %(instance)s::text, now(), paused_at, paused_by, {inherited}
FROM mqlayer.consumer_group WHERE group_id = %(group_id)s AND mode = 'broadcast' AND state = 'live' FOR SHARE
ON CONFLICT DO NOTHING RETURNING group_id;

-- name: instance_revive
-- An instance whose position was dropped begins anew by the rules of its group: what it had committed is void. Not before
-- all that was parked for it is dropped. Seeks are numbered as in group_seek.
WITH parent AS (
    SELECT group_id, paused_at, paused_by, {inherited} FROM mqlayer.consumer_group
    WHERE group_id = %(group_id)s AND mode = 'broadcast' AND state = 'live' FOR SHARE
)
UPDATE mqlayer.consumer_group c
SET state = 'creating', replay = 0, version = 1, retired_at = NULL, absent_since = now(),
    seek = greatest(c.seek + 1, (SELECT coalesce(max(replaced), 0) * 1000 FROM mqlayer.server)),
    paused_at = p.paused_at, paused_by = p.paused_by, ({inherited}) = (SELECT {inherited} FROM parent)
FROM parent p
WHERE c.broadcast_of = p.group_id AND c.instance = %(instance)s AND c.state = 'retired'
  AND NOT EXISTS (SELECT FROM mqlayer.parked_key k WHERE k.group_id = c.group_id) RETURNING c.group_id;

-- name: instances_of
-- The instances of a broadcast group that are not retired.
SELECT group_id FROM mqlayer.consumer_group WHERE broadcast_of = %(group_id)s AND state <> 'retired' ORDER BY group_id;

-- name: instances_follow
-- Let the instances of a group have its settings.
UPDATE mqlayer.consumer_group c
SET ({inherited}) = (SELECT {inherited} FROM mqlayer.consumer_group p WHERE p.group_id = %(group_id)s)
WHERE c.broadcast_of = %(group_id)s AND c.state <> 'retired';

-- name: instances_pause
-- Let the instances of a group rest, or go on, with it.
UPDATE mqlayer.consumer_group c SET paused_at = p.paused_at, paused_by = p.paused_by FROM mqlayer.consumer_group p
WHERE p.group_id = %(group_id)s AND c.broadcast_of = p.group_id AND c.state <> 'retired';

-- name: instance_presence
-- Note whether anybody consumes for an instance, and since when nobody does.
UPDATE mqlayer.consumer_group SET absent_since = CASE WHEN NOT %(here)s::boolean THEN now() END
WHERE group_id = %(group_id)s AND (absent_since IS NULL) <> %(here)s::boolean;

-- name: instances_absent
-- Instances that have been away for longer than their groups keep their positions.
SELECT c.group_id, t.name, c.name FROM mqlayer.consumer_group c
JOIN mqlayer.consumer_group p ON p.group_id = c.broadcast_of JOIN mqlayer.topic t ON t.topic_id = c.topic_id
WHERE c.state <> 'retired' AND {absent_s} > p.instance_expiry_s
  AND NOT EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = c.group_id AND m.lease_until >= now())
ORDER BY c.group_id;

-- name: instance_absent
-- For how long an instance has been away, where that is longer than its group keeps its position; nothing where somebody
-- consumes for it. Call with its lock held.
SELECT {absent_s} FROM mqlayer.consumer_group c JOIN mqlayer.consumer_group p ON p.group_id = c.broadcast_of
WHERE c.group_id = %(group_id)s AND c.state <> 'retired' AND {absent_s} > p.instance_expiry_s
  AND NOT EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = c.group_id AND m.lease_until >= now());

-- name: instances_forget
-- Forget instances that were retired long ago and have left nothing for people, nor anything on nodes or in the archive.
WITH old AS MATERIALIZED (
    SELECT c.group_id FROM mqlayer.consumer_group c
    WHERE c.instance IS NOT NULL AND c.state = 'retired'
      AND c.retired_at < clock_timestamp() - make_interval(secs => %(horizon_s)s)
      AND NOT EXISTS (SELECT FROM mqlayer.assignment a WHERE a.group_id = c.group_id)
      AND NOT EXISTS (SELECT FROM mqlayer.parked_key k WHERE k.group_id = c.group_id)
      AND NOT EXISTS (SELECT FROM mqlayer.dead_message d WHERE d.group_id = c.group_id)
      AND NOT EXISTS (SELECT FROM mqlayer.redrive r WHERE r.group_id = c.group_id)
      AND NOT EXISTS (SELECT FROM mqlayer_archive.outcome_progress o WHERE o.group_id = c.group_id)
    ORDER BY c.group_id LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), counted AS (
    DELETE FROM mqlayer.failure_count f USING old WHERE f.group_id = old.group_id
), changed AS (
    DELETE FROM mqlayer.parking_change p USING old WHERE p.group_id = old.group_id
), summed AS (
    DELETE FROM mqlayer.parked_total n USING old WHERE n.group_id = old.group_id
), lost AS (
    DELETE FROM mqlayer.retention_loss l USING old WHERE l.group_id = old.group_id
), resting AS (
    DELETE FROM mqlayer.partition_pause r USING old WHERE r.group_id = old.group_id
), tried AS (
    DELETE FROM mqlayer.failed_attempt t USING old WHERE t.group_id = old.group_id
), braked AS (
    DELETE FROM mqlayer.breaker b USING old WHERE b.group_id = old.group_id
), gone AS (
    DELETE FROM mqlayer.consumer_group c USING old WHERE c.group_id = old.group_id RETURNING 1
)
SELECT count(*) FROM gone;
