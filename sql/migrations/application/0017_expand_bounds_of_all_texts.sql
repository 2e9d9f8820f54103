-- Every text and row of bytes that a right may write to a table has a bound, far above all that is ever written. What is
-- there stays.
ALTER TABLE mqlayer_app.topic ADD CONSTRAINT topic_name_length CHECK (octet_length(name) <= 63) NOT VALID;
ALTER TABLE mqlayer_app.counter ADD CONSTRAINT counter_topic_length CHECK (octet_length(topic) <= 63) NOT VALID;
ALTER TABLE mqlayer_app.known_group ADD CONSTRAINT known_group_scope_length CHECK (octet_length(scope) <= 1024) NOT VALID;
ALTER TABLE mqlayer_app.relay ADD CONSTRAINT relay_id_length CHECK (octet_length(relay_id) <= 1024) NOT VALID;
ALTER TABLE mqlayer_app.lp_set ADD CONSTRAINT lp_set_relay_id_length CHECK (octet_length(relay_id) <= 1024) NOT VALID;
ALTER TABLE mqlayer_app.set_aside ADD CONSTRAINT set_aside_reason_length CHECK (octet_length(reason) <= 65536) NOT VALID;
ALTER TABLE mqlayer_app.voided
    ADD CONSTRAINT voided_sizes CHECK (
        octet_length(key) <= 65536 AND octet_length(headers) <= 1000000 AND octet_length(body) <= 16777216
        AND octet_length(reason) <= 65536) NOT VALID;
