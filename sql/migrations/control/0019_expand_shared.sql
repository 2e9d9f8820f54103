-- Shared consumption: groups whose members all read all partitions, without order. Said once, like the start.

ALTER TABLE mqlayer.consumer_group
    DROP CONSTRAINT consumer_group_mode,
    ADD CONSTRAINT consumer_group_mode CHECK (mode IN ('exclusive', 'pop', 'shared')),
    -- Shared only: after how many seconds a message is taken from a member that was not heard of.
    ADD COLUMN invisible_s double precision,
    ADD CONSTRAINT consumer_group_invisible CHECK (invisible_s > 0 AND invisible_s < 'Infinity'),
    ADD CONSTRAINT consumer_group_invisible_of_shared CHECK (mode <> 'shared' OR invisible_s IS NOT NULL),
    ADD CONSTRAINT consumer_group_shared CHECK (mode <> 'shared' OR NOT ordered AND policy IN ('dead_letter', 'skip'));

-- What a group may consume. A shared group has no order to keep between a parent and its successors, so a message that
-- waits for its next attempt holds up none of them.
CREATE OR REPLACE VIEW mqlayer.readable AS
SELECT g.group_id, p.partition_id
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
WHERE g.paused_at IS NULL
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
  AND NOT EXISTS (
      SELECT FROM mqlayer.partition parent
      WHERE parent.ended_in = p.born_in AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
        AND parent.state <> 'deleted' AND g.mode <> 'shared'
        AND NOT EXISTS (SELECT FROM mqlayer.drained d
                        WHERE d.group_id = g.group_id AND d.partition_id = parent.partition_id));
