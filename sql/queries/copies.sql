-- name: group_copy_insert
-- A live group with the settings of another one, which its positions come from; nothing where the name is taken.
INSERT INTO mqlayer.consumer_group (topic_id, name, state, copied_from, paused_at, paused_by, mode, ordered, start, start_at,
       from_archive, balance, tag_filter, rate_limit, rate_burst, backoff_s, backoff_jitter, attempt_limit, policy,
       non_retryable_errors, retryable_errors, time_limit_s, max_time_limit_s, parked_keys_limit, parked_messages_limit,
       parked_bytes_limit, key_messages_limit, key_bytes_limit, breaker_share, breaker_keys, breaker_window_s, breaker_errors,
       deployment)
SELECT topic_id, %(name)s, 'live', group_id, CASE WHEN %(paused_by)s::text IS NOT NULL THEN now() END, %(paused_by)s::text, mode,
       ordered, start, start_at, from_archive, balance, tag_filter, rate_limit, rate_burst, backoff_s, backoff_jitter,
       attempt_limit, policy, non_retryable_errors, retryable_errors, time_limit_s, max_time_limit_s, parked_keys_limit,
       parked_messages_limit, parked_bytes_limit, key_messages_limit, key_bytes_limit, breaker_share, breaker_keys,
       breaker_window_s, breaker_errors, deployment
FROM mqlayer.consumer_group WHERE group_id = %(group_id)s
ON CONFLICT DO NOTHING RETURNING group_id;

-- name: group_copy_unfinished
-- A copy of a group that waits for its source's effects.
SELECT c.group_id FROM mqlayer.consumer_group c JOIN mqlayer.consumer_group s ON s.group_id = c.copied_from
WHERE s.group_id = %(group_id)s AND c.topic_id = s.topic_id AND c.name = %(name)s AND c.paused_by = %(paused_by)s
  AND c.state = 'live';

-- name: group_copy_starts
-- Where a group starts in each partition of its topic, and whether it has drained it.
SELECT p.partition_id, coalesce(s.start_offset, 1), d.group_id IS NOT NULL
FROM mqlayer.partition p
LEFT JOIN mqlayer.group_start s ON s.group_id = %(group_id)s AND s.partition_id = p.partition_id
LEFT JOIN mqlayer.drained d ON d.group_id = %(group_id)s AND d.partition_id = p.partition_id
WHERE p.topic_id = %(topic_id)s AND p.state IN ('open', 'sealed');

-- name: group_copy_epochs
-- Give a copy an epoch at each partition that its source has not drained.
INSERT INTO mqlayer.assignment (group_id, partition_id, epoch)
SELECT %(new_id)s, p.partition_id, nextval('mqlayer.epoch') FROM mqlayer.partition p
WHERE p.topic_id = %(topic_id)s AND p.state IN ('open', 'sealed')
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = %(group_id)s AND d.partition_id = p.partition_id)
RETURNING partition_id, epoch;

-- name: parked_size
-- How much is parked of a group.
SELECT coalesce(sum(messages), 0)::bigint, coalesce(sum(bytes), 0)::bigint FROM mqlayer.parked_total
WHERE group_id = %(group_id)s;

-- name: parked_copy
-- Give a copy what is parked of its source, in one look: keys and their messages. Nothing of it is started yet.
WITH keys AS (
    INSERT INTO mqlayer.parked_key (group_id, lp, name, cause, due_at, attempts, released, paused_at, paused_by)
    SELECT %(new_id)s, lp, name, cause, due_at, attempts, released, paused_at, paused_by FROM mqlayer.parked_key
    WHERE group_id = %(group_id)s RETURNING lp
), messages AS (
    INSERT INTO mqlayer.parked_message (group_id, lp, name, source, seq, position, partition_id, log_offset, key, m, body,
           redriven, replay, attempts, tried)
    SELECT %(new_id)s, lp, name, source, seq, position, partition_id, log_offset, key, m, body, redriven, replay, attempts,
           tried
    FROM mqlayer.parked_message WHERE group_id = %(group_id)s RETURNING lp
)
SELECT (SELECT count(*) FROM keys), (SELECT count(*) FROM messages);

-- name: group_replay
-- The last seek of a group that has fenced effects applied again.
SELECT replay FROM mqlayer.consumer_group WHERE group_id = %(group_id)s;

-- name: fence_copy
-- Effects of a group count as applied in its copy, of some LPs; how many.
SELECT mqlayer_app.fence_copy_v1(%(group_id)s, %(new_id)s, %(replay)s, %(lp_from)s::smallint, %(lp_to)s::smallint);

-- name: inbox_copy
-- The same for rows of the inbox, from an id on: the last id, null at the end, and how many.
SELECT last_id, copied FROM mqlayer_app.inbox_copy_v1(%(group_id)s, %(new_id)s, %(replay)s, %(after)s, %(limit)s);
