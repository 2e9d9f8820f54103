-- Ordered pop: groups that are consumed without members, by whoever asks. Said once, like the start.

ALTER TABLE mqlayer.consumer_group
    -- exclusive: partitions are assigned to members; pop: receivers ask for batches.
    ADD COLUMN mode text NOT NULL DEFAULT 'exclusive',
    -- Pop only: what is withheld while a message is out: all of its partition, or its key.
    ADD COLUMN scope text,
    ADD CONSTRAINT consumer_group_mode CHECK (mode IN ('exclusive', 'pop')),
    ADD CONSTRAINT consumer_group_scope CHECK (scope IN ('partition', 'key')),
    ADD CONSTRAINT consumer_group_scope_of_pop CHECK ((mode = 'pop') = (scope IS NOT NULL));
