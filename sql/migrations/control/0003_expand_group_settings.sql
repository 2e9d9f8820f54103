-- What belongs to a group, not to its members: settings with a version, and an operator's word that it shall rest.

ALTER TABLE mqlayer.consumer_group
    -- Grows with every change of a setting.
    ADD COLUMN settings_version int NOT NULL DEFAULT 1,
    -- One message of a key at a time, in order; else each message stands alone. Said once, like the start.
    ADD COLUMN ordered boolean NOT NULL DEFAULT true,
    -- What is spread evenly over members: the partitions by count, or what is published to them by the second.
    ADD COLUMN balance text NOT NULL DEFAULT 'count',
    ADD COLUMN paused_at timestamptz,
    ADD CONSTRAINT consumer_group_balance CHECK (balance IN ('count', 'rate'));

-- What is published to a partition by the second, measured for the groups that are balanced by it.
CREATE TABLE mqlayer.partition_rate (
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    next_offset  bigint NOT NULL,
    per_s        double precision NOT NULL,
    measured_at  timestamptz NOT NULL,
    CONSTRAINT partition_rate_key PRIMARY KEY (partition_id)
);

-- As before, and nothing while the group rests.
CREATE OR REPLACE VIEW mqlayer.readable AS
SELECT g.group_id, p.partition_id
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
WHERE g.paused_at IS NULL
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
  AND NOT EXISTS (
      SELECT FROM mqlayer.partition parent
      WHERE parent.ended_in = p.born_in AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
        AND parent.state <> 'deleted'
        AND NOT EXISTS (SELECT FROM mqlayer.drained d
                        WHERE d.group_id = g.group_id AND d.partition_id = parent.partition_id));
