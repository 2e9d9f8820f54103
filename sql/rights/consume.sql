-- Consume: membership, assignments, parking and the fence. Policies limit it to the groups that were granted.
GRANT USAGE ON SCHEMA mqlayer TO {role};
GRANT USAGE ON SCHEMA mqlayer_app TO {role};
GRANT USAGE ON SCHEMA mqlayer_archive TO {role};
GRANT SELECT, INSERT (epoch, group_id, member_id, partition_id, target), UPDATE (changed_at, epoch, member_id, target)
    ON mqlayer.assignment TO {role};
GRANT INSERT (act, actor, facts, object) ON mqlayer.audit TO {role};
GRANT SELECT, INSERT (actor, cause, failing_keys, group_id, probe_at, state), UPDATE (actor, cause, changed_at,
    failing_keys, opened_at, probe_at, probe_session, probes, state) ON mqlayer.breaker TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.beginnings_forget_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.body_named_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.caller_v1 TO {role};
GRANT SELECT, INSERT (attempt_limit, breaker_share, breaker_keys, breaker_window_s, breaker_errors, key_class, class_concurrency, class_rate, absent_since,
    backoff_jitter, backoff_s, balance, broadcast_of, deployment, non_retryable_errors, from_archive, instance,
    visibility_timeout_s, instance_expiry_s, key_bytes_limit, key_messages_limit, mode, name, ordered,
    parked_bytes_limit, parked_keys_limit, parked_messages_limit, paused_at, paused_by, policy, rate_burst, rate_limit,
    retryable_errors, scope, settings_version, start, start_at, tag_filter, max_time_limit_s, time_limit_s, topic_id),
    UPDATE (allocation, attempt_limit, breaker_share, breaker_keys, breaker_window_s, breaker_errors, key_class, class_concurrency, class_rate, absent_since,
    backoff_jitter, backoff_s, balance, canary, canary_lps, deployment, fallback, previous_deployment, non_retryable_errors, key_bytes_limit, key_messages_limit, ordered,
    parked_bytes_limit, parked_keys_limit, parked_messages_limit, paused_at, paused_by, policy, rate_burst, rate_limit,
    replay, retired_at, retryable_errors, seek, settings_version, start, start_at, state, tag_filter, max_time_limit_s,
    time_limit_s, version) ON mqlayer.consumer_group TO {role};
GRANT SELECT, INSERT (actor, attempts, body, cause, group_id, key, log_offset, lp, m, partition_id, reason, seq,
    source), UPDATE (actor, attempts, body, cause, died_at, log_offset, partition_id, reason, redriven_at,
    redriven_seek) ON mqlayer.dead_message TO {role};
GRANT SELECT, INSERT (group_id, partition_id) ON mqlayer.drained TO {role};
GRANT USAGE ON SEQUENCE mqlayer.epoch TO {role};
GRANT INSERT (attempt, error, group_id, lp, member_id, seq, source) ON mqlayer.failed_attempt TO {role};
GRANT SELECT, INSERT (count, event, group_id, partition_id), UPDATE (count, last_at) ON mqlayer.failure_count TO {role};
GRANT SELECT, INSERT (group_id, partition_id, start_offset) ON mqlayer.group_start TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.groups_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.has_for_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.has_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.may_create_group_v1 TO {role};
GRANT SELECT, INSERT (acts_on, deployment, group_id, host, least, lease_until, member_id, most, pid, session, version,
    zone), UPDATE (acts_on, deployment, failing_keys, host, joined_at, least, lease_until, leaving, most, pid, reported_at,
    session, tried_keys, version, zone) ON mqlayer.member TO {role};
GRANT USAGE ON SEQUENCE mqlayer.member_session TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.members_forget_v1 TO {role};
GRANT SELECT ON mqlayer.migration TO {role};
GRANT SELECT, UPDATE (created_at) ON mqlayer.node TO {role};
GRANT SELECT, INSERT (attempts, cause, due_at, group_id, lp, name), UPDATE (attempts, cause, due_at, released, started,
    started_alone) ON mqlayer.parked_key TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.parked_key_end_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.parked_keys_forget_v1 TO {role};
GRANT SELECT, INSERT (attempts, body, group_id, key, log_offset, lp, m, name, partition_id, position, seq, source, tried),
    UPDATE (tried) ON mqlayer.parked_message TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.parked_messages_end_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.parked_messages_end_v2 TO {role};
GRANT USAGE ON SEQUENCE mqlayer.parked_position TO {role};
GRANT SELECT ON mqlayer.parked_total TO {role};
GRANT SELECT ON mqlayer.parking_change TO {role};
GRANT SELECT, UPDATE (created_at) ON mqlayer.partition TO {role};
GRANT SELECT ON mqlayer.partition_pause TO {role};
GRANT SELECT ON mqlayer.partition_rate TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.process_beat_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.process_beat_v2 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.process_end_v1 TO {role};
GRANT SELECT ON mqlayer.protocol TO {role};
GRANT SELECT ON mqlayer.readable TO {role};
GRANT SELECT, INSERT (actor, bounds, filter, group_id, kind, lease_until, name, newer, per_s, position, snapshot_id,
    upto_batch, worker), UPDATE (ended_at, lease_until, state, blocked_by, worker) ON mqlayer.redrive TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.retired_keys_drop_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.retired_messages_drop_v1 TO {role};
GRANT SELECT ON mqlayer.retention_loss TO {role};
GRANT SELECT ON mqlayer.route TO {role};
GRANT SELECT ON mqlayer.route_change TO {role};
GRANT SELECT ON mqlayer.seal TO {role};
GRANT SELECT ON mqlayer.server TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.server_seen_v1 TO {role};
GRANT SELECT ON mqlayer.topic TO {role};
GRANT SELECT ON mqlayer.topic_schema TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.topic_schema_put_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.caller_v1 TO {role};
GRANT USAGE ON SEQUENCE mqlayer_app.consume_any TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.fence_many_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.fence_many_v2 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.fence_raise_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.fence_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.has_for_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.has_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.inbox_put_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.large_body_read_v1 TO {role};
GRANT SELECT ON mqlayer_app.migration TO {role};
GRANT SELECT ON mqlayer_app.protocol TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.version_released_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.version_set_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.version_take_v1 TO {role};
GRANT INSERT (actor, attempts, delivered_at, group_id, log_offset, partition_id, reason, topic_id, outcome) ON
    mqlayer_archive.outcome_queue TO {role};
GRANT SELECT ON mqlayer_archive.progress TO {role};
GRANT SELECT, UPDATE (last_pass_at) ON mqlayer_archive.topic TO {role};
