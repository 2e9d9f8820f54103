-- Texts that publishers and consumers write here and that others read as a whole: a name of many megabytes would fill the
-- memory of each process that lists sources or groups. What is there stays.
ALTER TABLE mqlayer.source ADD CONSTRAINT source_name_length CHECK (octet_length(name) <= 1024) NOT VALID;
ALTER TABLE mqlayer.member ADD CONSTRAINT member_host_length CHECK (octet_length(host) <= 1024) NOT VALID;
ALTER TABLE mqlayer.failure_count ADD CONSTRAINT failure_count_event_length CHECK (octet_length(event) <= 63) NOT VALID;
ALTER TABLE mqlayer.consumer_group
    ADD CONSTRAINT consumer_group_texts_length CHECK (
        octet_length(coalesce(paused_by, '')) <= 1024 AND octet_length(coalesce(tag_filter, '')) <= 65536
        AND cardinality(backoff_s) <= 1000 AND pg_column_size(final_errors) <= 1000000
        AND pg_column_size(retried_errors) <= 1000000) NOT VALID;
