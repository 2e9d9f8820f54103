-- protocol 2
-- Ordered pop has key classes, too, where it withholds keys. Receivers of older code give messages out without them.
ALTER TABLE mqlayer.consumer_group DROP CONSTRAINT consumer_group_key_class;
ALTER TABLE mqlayer.consumer_group ADD CONSTRAINT consumer_group_key_class CHECK (
    key_class ~ '^(none|prefix:[ -~]+|header:[ -~]+)$' AND octet_length(key_class) <= 64
    AND (key_class = 'none' OR mode <> 'pop' OR scope = 'key')
    AND class_concurrency BETWEEN 1 AND 2000000000 AND class_rate > 0 AND class_rate <= 1e11);
