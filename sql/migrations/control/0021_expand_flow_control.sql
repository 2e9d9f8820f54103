-- Flow control: how fast a group may begin messages, and who let a topic, a group, a partition or a key rest, since when.

ALTER TABLE mqlayer.consumer_group
    -- Messages that the whole group begins by the second, null for no limit; and how many at once after a rest, null for
    -- what the limit gives in a second.
    ADD COLUMN rate_limit double precision,
    ADD COLUMN rate_burst double precision,
    ADD COLUMN paused_by text,
    ADD CONSTRAINT consumer_group_rate_limit CHECK (rate_limit > 0 AND rate_limit < 'Infinity'),
    ADD CONSTRAINT consumer_group_rate_burst CHECK (rate_burst >= 1 AND rate_burst < 'Infinity');

-- All groups of a paused topic rest; what is published to it waits.
ALTER TABLE mqlayer.topic ADD COLUMN paused_at timestamptz, ADD COLUMN paused_by text;

-- Partitions that rest for one group.
CREATE TABLE mqlayer.partition_pause (
    group_id     int NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    paused_at    timestamptz NOT NULL DEFAULT now(),
    paused_by    text NOT NULL,
    CONSTRAINT partition_pause_key PRIMARY KEY (group_id, partition_id)
);

-- A key that an operator lets rest is parked, and not due whatever due_at says.
ALTER TABLE mqlayer.parked_key ADD COLUMN paused_at timestamptz, ADD COLUMN paused_by text;

-- As before, and nothing of a topic or of partitions that rest.
CREATE OR REPLACE VIEW mqlayer.readable AS
SELECT g.group_id, p.partition_id
FROM mqlayer.consumer_group g
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
WHERE g.paused_at IS NULL AND t.paused_at IS NULL AND g.state <> 'retired' AND g.mode <> 'broadcast'
  AND NOT EXISTS (SELECT FROM mqlayer.partition_pause pp
                  WHERE pp.group_id = g.group_id AND pp.partition_id = p.partition_id)
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
  AND NOT EXISTS (
      SELECT FROM mqlayer.partition parent
      WHERE parent.ended_in = p.born_in AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
        AND parent.state <> 'deleted' AND g.mode <> 'shared'
        AND NOT EXISTS (SELECT FROM mqlayer.drained d
                        WHERE d.group_id = g.group_id AND d.partition_id = parent.partition_id));
