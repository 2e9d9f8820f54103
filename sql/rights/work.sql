-- The periodic jobs of the worker.
GRANT USAGE ON SCHEMA mqlayer TO {role};
GRANT USAGE ON SCHEMA mqlayer_app TO {role};
GRANT USAGE ON SCHEMA mqlayer_archive TO {role};
GRANT SELECT ON mqlayer.abandoned TO {role};
GRANT SELECT, INSERT (lease_until, schedule, worker), UPDATE (ended_at, error, job, lease_until, results, snapshot, state),
    DELETE ON mqlayer.analytics_run TO {role};
GRANT SELECT, UPDATE (next_at) ON mqlayer.analytics_schedule TO {role};
GRANT SELECT, INSERT (epoch, group_id, member_id, partition_id, target), UPDATE (changed_at, epoch, member_id, target),
    DELETE ON mqlayer.assignment TO {role};
GRANT SELECT, INSERT (act, actor, facts, object) ON mqlayer.audit TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.beginnings_forget_v1 TO {role};
GRANT SELECT, DELETE ON mqlayer.breaker TO {role};
GRANT SELECT, UPDATE (at, error, gone, result), DELETE ON mqlayer.bulk_item TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.body_named_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.caller_v1 TO {role};
GRANT SELECT, UPDATE (allocation, absent_since, canary, canary_lps, deployment, fallback, parking, paused_at,
    previous_deployment, retired_at, state, version), DELETE ON mqlayer.consumer_group TO {role};
GRANT SELECT ON mqlayer.dead_fact TO {role};
GRANT SELECT, INSERT (actor, attempts, body, cause, group_id, key, log_offset, lp, m, partition_id, reason, seq,
    source), UPDATE (actor, attempts, body, cause, died_at, log_lost, log_offset, partition_id, reason, redriven_at,
    redriven_seek) ON mqlayer.dead_message TO {role};
GRANT SELECT, INSERT (group_id, partition_id), DELETE ON mqlayer.drained TO {role};
GRANT USAGE ON SEQUENCE mqlayer.epoch TO {role};
GRANT SELECT, DELETE ON mqlayer.failed_attempt TO {role};
GRANT SELECT, INSERT (count, event, group_id, partition_id), UPDATE (count, last_at), DELETE ON mqlayer.failure_count TO
    {role};
GRANT SELECT, UPDATE (start_offset), DELETE ON mqlayer.group_start TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.groups_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.has_for_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.has_v1 TO {role};
GRANT SELECT, INSERT (epoch, last_at, name, next_at), UPDATE (ended_at, epoch, error, last_at, next_at) ON mqlayer.job TO {role};
GRANT SELECT ON mqlayer.living TO {role};
GRANT SELECT, UPDATE (lease_until) ON mqlayer.member TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.members_forget_v1 TO {role};
GRANT SELECT ON mqlayer.migration TO {role};
GRANT SELECT, UPDATE (armed_at, armed_run_id, former_runs, last_run_id, lost_at) ON mqlayer.node TO {role};
GRANT SELECT, INSERT (cause, due_at, group_id, lp, name), UPDATE (attempts, cause, due_at, released, started,
    started_alone) ON mqlayer.parked_key TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.parked_key_end_v1 TO {role};
GRANT SELECT, INSERT (body, group_id, key, log_offset, lp, m, name, partition_id, position, redriven, replay, seq, source),
    UPDATE (attempts), DELETE ON mqlayer.parked_message TO {role};
GRANT USAGE ON SEQUENCE mqlayer.parked_position TO {role};
GRANT SELECT, DELETE ON mqlayer.parked_total TO {role};
GRANT SELECT, INSERT (group_id, lp, name, number), DELETE ON mqlayer.parking_change TO {role};
GRANT SELECT, INSERT (created_by_change, lp_from, lp_to, node_id, topic_id), UPDATE (ended_by_change, retired_at, state) ON
    mqlayer.partition TO {role};
GRANT SELECT, DELETE ON mqlayer.partition_pause TO {role};
GRANT SELECT, INSERT (measured_at, next_offset, partition_id, per_s), UPDATE (measured_at, next_offset, per_s), DELETE
    ON mqlayer.partition_rate TO {role};
GRANT SELECT, INSERT (alert, effect, first_seen_at, group_name, item, last_seen_at, node, part, severity, since, text,
    topic), UPDATE (effect, ended_at, last_seen_at, text), DELETE ON mqlayer.problem TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.process_beat_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.process_beat_v2 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.process_end_v1 TO {role};
GRANT SELECT ON mqlayer.protocol TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.protocol_finalize_v1 TO {role};
GRANT SELECT ON mqlayer.readable TO {role};
GRANT SELECT, UPDATE (at_batch, at_number, at_record, ended_at, failed, lease_until, next_at, not_sent, results, sent, state,
    blocked_by, worker), DELETE ON mqlayer.redrive TO {role};
GRANT INSERT (lp, redrive_id, result, seq, source) ON mqlayer.replay_result TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.retired_keys_drop_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.retired_messages_drop_v1 TO {role};
GRANT SELECT, INSERT (event, group_id, lost, partition_id, seen), UPDATE (lost, lost_at, seen), DELETE ON
    mqlayer.retention_loss TO {role};
GRANT SELECT, INSERT (lp_from, lp_to, partition_id, topic_id, version) ON mqlayer.route TO {role};
GRANT SELECT, INSERT (actor, kind, mode, topic_id, version), UPDATE (ended_at, mode, opened_at, sealed_at, state) ON
    mqlayer.route_change TO {role};
GRANT SELECT, INSERT (change_id, facts, key, kind, lp, partitions, reason, topic_id, verdict), UPDATE (facts, helped,
    judged_at), DELETE ON mqlayer.route_decision TO {role};
GRANT SELECT, INSERT (at_s, next_offset, partition_id, settled), UPDATE (at_s, next_offset, sampled_at, settled), DELETE ON
    mqlayer.route_load TO {role};
GRANT SELECT, UPDATE (failed, measured_per_s, stopped_at, stopped_because, unhelpful) ON mqlayer.route_policy TO {role};
GRANT SELECT, INSERT (at, busy, committed, cpu_s, dead, kind, lag, members, memory_bytes, memory_limit, object_id, oldest_s,
    ops_per_s, parked, relayed, stored),
    DELETE ON mqlayer.sample TO {role};
GRANT SELECT, INSERT (unreachable, change_id, cut, marks, next_offset, partition_id, run_id, seal_id), UPDATE (unreachable, cut,
    next_offset, run_id, seal_id) ON mqlayer.seal TO {role};
GRANT SELECT ON mqlayer.server TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.server_replaced_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.server_seen_v1 TO {role};
GRANT SELECT, INSERT (cluster, kind, name, outbox_uuid), UPDATE (closed_at, dropped_at, tried_at) ON mqlayer.source TO
    {role};
GRANT SELECT, UPDATE (version) ON mqlayer.topic TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.body_named_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.caller_v1 TO {role};
GRANT SELECT, INSERT (body_limit, lp, topic, topic_id), UPDATE (body_limit) ON mqlayer_app.counter TO {role};
GRANT SELECT, DELETE ON mqlayer_app.dedup TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.delayed_release_v1 TO {role};
GRANT SELECT, UPDATE (alarm_at) ON mqlayer_app.entity_version TO {role};
GRANT SELECT ON mqlayer_app.fence_applied TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.fence_clean_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.fence_clean_v2 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.has_for_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.has_v1 TO {role};
GRANT SELECT, INSERT (only_one), UPDATE (timeline) ON mqlayer_app.identity TO {role};
GRANT SELECT, UPDATE (kept_at), DELETE ON mqlayer_app.inbox TO {role};
GRANT SELECT, INSERT (group_id, scope), UPDATE (scope) ON mqlayer_app.known_group TO {role};
GRANT SELECT, UPDATE (free_since, looked_at, removing), DELETE ON mqlayer_app.large_body TO {role};
GRANT SELECT, UPDATE (ends, trimmed_at) ON mqlayer_app.large_body_cut TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.large_body_cut_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.large_body_sent_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.large_body_waits_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.bodies_named_v1 TO {role};
GRANT SELECT, UPDATE (epoch, lease_until, relay_id) ON mqlayer_app.lp_set TO {role};
GRANT SELECT ON mqlayer_app.migration TO {role};
GRANT SELECT ON mqlayer_app.outbox TO {role};
GRANT SELECT ON mqlayer_app.outbox_message TO {role};
GRANT SELECT ON SEQUENCE mqlayer_app.outbox_number TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.outbox_recover_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.outbox_rotate_v1 TO {role};
GRANT SELECT ON mqlayer_app.protocol TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.protocol_finalize_v1 TO {role};
GRANT SELECT, INSERT (acts_on, host, least, lease_until, most, pid, relay_id, sent_at, version), UPDATE (acts_on, lease_until,
    sent_at, version), DELETE ON mqlayer_app.relay TO {role};
GRANT USAGE ON SEQUENCE mqlayer_app.relay_epoch TO {role};
GRANT SELECT, INSERT (lp, seq, topic_id), UPDATE (seq) ON mqlayer_app.relayed TO {role};
GRANT SELECT, INSERT (lp, reason, seq, topic_id), UPDATE (reason, seq, quarantined_at), DELETE ON mqlayer_app.quarantined TO
    {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.term_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.timeline_holds_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.timeline_v1 TO {role};
GRANT SELECT, INSERT (body_limit, name, topic_id), UPDATE (body_limit) ON mqlayer_app.topic TO {role};
GRANT SELECT (ended, id, reason, seq, voided_at), INSERT (body, created_at, headers, id, key, lp, reason, seq,
    topic_id), UPDATE (seq) ON mqlayer_app.voided TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_archive.batches_v1 TO {role};
GRANT SELECT, INSERT (first_seq, last_seq, lp, snapshot_id, source, topic_id) ON mqlayer_archive.cut TO {role};
GRANT SELECT, INSERT (day, first_batch, last_batch, outcomes, records, topic_id), UPDATE (last_batch, outcomes,
    records), DELETE ON mqlayer_archive.day TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_archive.day_drop_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_archive.day_index_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_archive.day_made_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_archive.day_make_v1 TO {role};
GRANT SELECT, INSERT (accepted_at, after_seq, log_offset, lp, next_seq, partition_id, source, topic_id), UPDATE
    (accepted_at, actor, log_offset, next_seq, partition_id) ON mqlayer_archive.gap TO {role};
GRANT SELECT, INSERT (location), DELETE ON mqlayer_archive.lake TO {role};
GRANT SELECT, INSERT (bytes, digest, lake_id, path, rows, sha256, topic_id, "table"), DELETE ON mqlayer_archive.lake_file TO
    {role};
GRANT SELECT, INSERT (batch, first_batch, lake_id, topic_id), UPDATE (batch, exported_at, first_batch, outcome_digest, outcomes,
    record_digest, records, verified_at, verified_batch), DELETE ON mqlayer_archive.lake_topic TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_archive.lock_v1 TO {role};
GRANT SELECT, INSERT (first_seq, last_seq, lp, source, segment, topic_id), UPDATE (first_seq, last_seq, segment) ON
    mqlayer_archive.mark TO {role};
GRANT SELECT, INSERT (actor, archived_at, attempts, batch, delivered_at, epoch, first_offset, group_id, last_offset,
    partition_id, position, reason, settled_at, topic_id, outcome) ON mqlayer_archive.outcome TO {role};
GRANT SELECT, INSERT (dropped, dropped_at, epoch, group_id, partition_id, position), UPDATE (dropped, dropped_at, epoch,
    position) ON mqlayer_archive.outcome_progress TO {role};
GRANT SELECT, INSERT (actor, attempts, group_id, log_offset, partition_id, reason, topic_id, outcome), DELETE ON
    mqlayer_archive.outcome_queue TO {role};
GRANT SELECT, INSERT (complete, partition_id, topic_id, upto_offset), UPDATE (complete, upto_offset) ON
    mqlayer_archive.progress TO {role};
GRANT SELECT, INSERT (archived_at, batch, body, headers, key, log_offset, lp, partition_id, published_at, seq, source,
    tags, topic_id, version) ON mqlayer_archive.record TO {role};
GRANT SELECT, INSERT (name, upto_at), DELETE ON mqlayer_archive.snapshot TO {role};
GRANT SELECT, INSERT (batch, records, snapshot_id, topic_id, version, whole), UPDATE (exported_batch) ON
    mqlayer_archive.snapshot_topic TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_archive.snapshot_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_archive.snapshot_v2 TO {role};
GRANT SELECT, UPDATE (batch, dropped_batch, last_pass_at) ON mqlayer_archive.topic TO {role};
