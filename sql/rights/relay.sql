-- Relay the outbox, and arm the nodes that a relay meets.
GRANT USAGE ON SCHEMA mqlayer TO {role};
GRANT USAGE ON SCHEMA mqlayer_app TO {role};
GRANT USAGE ON SCHEMA mqlayer_archive TO {role};
GRANT SELECT ON mqlayer.abandoned TO {role};
GRANT SELECT, UPDATE (changed_at, epoch) ON mqlayer.assignment TO {role};
GRANT SELECT, INSERT (act, actor, facts, object) ON mqlayer.audit TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.body_named_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.caller_v1 TO {role};
GRANT SELECT ON mqlayer.consumer_group TO {role};
GRANT SELECT (group_id, partition_id, log_offset, log_lost), UPDATE (log_lost) ON mqlayer.dead_message TO {role};
GRANT USAGE ON SEQUENCE mqlayer.epoch TO {role};
GRANT SELECT, UPDATE (start_offset) ON mqlayer.group_start TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.groups_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.has_for_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.has_v1 TO {role};
GRANT SELECT ON mqlayer.migration TO {role};
GRANT SELECT, UPDATE (armed_at, armed_run_id, former_runs, last_run_id, lost_at) ON mqlayer.node TO {role};
GRANT SELECT, UPDATE (state) ON mqlayer.partition TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.process_beat_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.process_end_v1 TO {role};
GRANT SELECT ON mqlayer.protocol TO {role};
GRANT SELECT ON mqlayer.route TO {role};
GRANT SELECT ON mqlayer.route_change TO {role};
GRANT SELECT, INSERT (unreachable, change_id, cut, marks, next_offset, partition_id, run_id, seal_id), UPDATE (unreachable, cut,
    next_offset, run_id, seal_id) ON mqlayer.seal TO {role};
GRANT SELECT ON mqlayer.server TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.server_replaced_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer.server_seen_v1 TO {role};
GRANT SELECT, INSERT (cluster, kind, name, outbox_uuid), UPDATE (closed_at) ON mqlayer.source TO {role};
GRANT SELECT ON mqlayer.topic TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.body_named_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.caller_v1 TO {role};
GRANT SELECT, INSERT (body_limit, lp, topic, topic_id), UPDATE (body_limit) ON mqlayer_app.counter TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.delayed_release_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.has_for_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.has_v1 TO {role};
GRANT SELECT, INSERT (only_one), UPDATE (timeline) ON mqlayer_app.identity TO {role};
GRANT SELECT, INSERT (group_id, scope), UPDATE (scope) ON mqlayer_app.known_group TO {role};
GRANT SELECT, UPDATE (epoch, lease_until, relay_id) ON mqlayer_app.lp_set TO {role};
GRANT SELECT ON mqlayer_app.migration TO {role};
GRANT SELECT ON mqlayer_app.outbox TO {role};
GRANT SELECT ON mqlayer_app.outbox_message TO {role};
GRANT SELECT ON SEQUENCE mqlayer_app.outbox_number TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.outbox_recover_v1 TO {role};
GRANT SELECT ON mqlayer_app.protocol TO {role};
GRANT SELECT, INSERT (acts_on, least, lease_until, most, relay_id, sent_at, version), UPDATE (acts_on, lease_until, sent_at,
    version), DELETE ON mqlayer_app.relay TO {role};
GRANT USAGE ON SEQUENCE mqlayer_app.relay_epoch TO {role};
GRANT SELECT, INSERT (lp, seq, topic_id), UPDATE (seq) ON mqlayer_app.relayed TO {role};
GRANT SELECT, INSERT (lp, reason, seq, topic_id), UPDATE (reason, seq, quarantined_at), DELETE ON mqlayer_app.quarantined TO
    {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.term_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.timeline_holds_v1 TO {role};
GRANT EXECUTE ON FUNCTION mqlayer_app.timeline_v1 TO {role};
GRANT SELECT, INSERT (body_limit, name, topic_id), UPDATE (body_limit) ON mqlayer_app.topic TO {role};
GRANT SELECT (id, seq), INSERT (body, created_at, headers, id, key, lp, reason, seq, topic_id), UPDATE (seq) ON
    mqlayer_app.voided TO {role};
GRANT SELECT, UPDATE (upto_offset) ON mqlayer_archive.progress TO {role};
