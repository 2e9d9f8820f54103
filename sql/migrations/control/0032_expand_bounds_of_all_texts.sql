-- As 0028, for every other text, document and row of bytes that a right may write. Far above all that is ever written:
-- keys have 512 bytes, headers 8 kB, bodies 1 MB, texts of errors some thousand. What is there stays, but for reasons of
-- dead messages, which are changed when they are redriven.
UPDATE mqlayer.dead_message SET reason = left(reason, 8000) WHERE octet_length(reason) > 65536;
UPDATE mqlayer.dead_message SET actor = left(actor, 1000) WHERE octet_length(actor) > 4096;
ALTER TABLE mqlayer.dead_message
    ADD CONSTRAINT dead_message_sizes CHECK (
        octet_length(key) <= 65536 AND octet_length(m) <= 1000000 AND octet_length(body) <= 16777216) NOT VALID,
    ADD CONSTRAINT dead_message_texts CHECK (octet_length(reason) <= 65536 AND octet_length(actor) <= 4096) NOT VALID;
ALTER TABLE mqlayer.parked_message
    ADD CONSTRAINT parked_message_sizes CHECK (
        octet_length(name) <= 65536 AND octet_length(key) <= 65536 AND octet_length(m) <= 1000000
        AND octet_length(body) <= 16777216) NOT VALID;
ALTER TABLE mqlayer.parked_key
    ADD CONSTRAINT parked_key_texts CHECK (octet_length(name) <= 65536 AND octet_length(paused_by) <= 4096) NOT VALID;
ALTER TABLE mqlayer.parking_change ADD CONSTRAINT parking_change_name CHECK (octet_length(name) <= 65536) NOT VALID;
ALTER TABLE mqlayer.failed_attempt
    ADD CONSTRAINT failed_attempt_texts CHECK (octet_length(error) <= 65536 AND octet_length(member_id) <= 1024) NOT VALID;
ALTER TABLE mqlayer.assignment
    ADD CONSTRAINT assignment_texts CHECK (octet_length(member_id) <= 1024 AND octet_length(target) <= 1024) NOT VALID;
ALTER TABLE mqlayer.consumer_group ADD CONSTRAINT consumer_group_instance_length CHECK (octet_length(instance) <= 63) NOT VALID;
ALTER TABLE mqlayer.audit
    ADD CONSTRAINT audit_texts CHECK (
        octet_length(actor) <= 4096 AND octet_length(act) <= 1024 AND octet_length(object) <= 4096) NOT VALID,
    ADD CONSTRAINT audit_facts CHECK (octet_length(facts::text) <= 1000000) NOT VALID;
ALTER TABLE mqlayer.redrive
    ADD CONSTRAINT redrive_texts CHECK (
        octet_length(actor) <= 4096 AND octet_length(worker) <= 1024 AND octet_length(waits) <= 65536
        AND octet_length(name) <= 65536 AND octet_length(at_key) <= 65536) NOT VALID,
    ADD CONSTRAINT redrive_documents CHECK (
        octet_length(bounds::text) <= 1000000 AND octet_length(results::text) <= 1000000) NOT VALID;
ALTER TABLE mqlayer.job ADD CONSTRAINT job_name CHECK (octet_length(name) <= 63) NOT VALID;
ALTER TABLE mqlayer.node
    ADD CONSTRAINT node_texts CHECK (
        octet_length(url) <= 4096 AND octet_length(armed_run_id) <= 1024 AND octet_length(last_run_id) <= 1024
        AND pg_column_size(former_runs) <= 1000000) NOT VALID;
ALTER TABLE mqlayer.partition_pause ADD CONSTRAINT partition_pause_by CHECK (octet_length(paused_by) <= 4096) NOT VALID;
ALTER TABLE mqlayer.topic ADD CONSTRAINT topic_paused_by CHECK (octet_length(paused_by) <= 4096) NOT VALID;
ALTER TABLE mqlayer.route_change ADD CONSTRAINT route_change_actor CHECK (octet_length(actor) <= 4096) NOT VALID;
ALTER TABLE mqlayer.seal ADD CONSTRAINT seal_run_id CHECK (octet_length(run_id) <= 1024) NOT VALID;
ALTER TABLE mqlayer.source ADD CONSTRAINT source_cluster_length CHECK (octet_length(cluster) <= 1024) NOT VALID;
ALTER TABLE mqlayer_archive.gap ADD CONSTRAINT gap_actor CHECK (octet_length(actor) <= 4096) NOT VALID;
-- Times as well: programs can hold no others.
ALTER TABLE mqlayer_archive.outcome_queue
    ADD CONSTRAINT outcome_queue_texts CHECK (octet_length(actor) <= 4096 AND octet_length(reason) <= 65536) NOT VALID,
    ADD CONSTRAINT outcome_queue_delivered_at
        CHECK (delivered_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00') NOT VALID;
