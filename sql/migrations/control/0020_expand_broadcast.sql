-- Broadcast: every instance of a group gets every message. Its group is settings only; each instance is a group of its own
-- beneath it, with one member at a time. And groups that are retired: they hold nothing up.

ALTER TABLE mqlayer.consumer_group
    -- Of an instance: the group that it belongs to, and its name in there.
    ADD COLUMN broadcast_of int REFERENCES mqlayer.consumer_group,
    ADD COLUMN instance text,
    -- Of a broadcast group: for how long the position of an instance that is away is kept.
    ADD COLUMN keep_away_s double precision,
    -- Of an instance: since when nobody consumes for it; null while somebody does.
    ADD COLUMN away_since timestamptz,
    ADD COLUMN retired_at timestamptz,
    DROP CONSTRAINT consumer_group_mode,
    ADD CONSTRAINT consumer_group_mode CHECK (mode IN ('exclusive', 'pop', 'shared', 'broadcast')),
    DROP CONSTRAINT consumer_group_name_form,
    -- Nobody can name a group as an instance is named.
    ADD CONSTRAINT consumer_group_name_form CHECK (name ~ CASE WHEN instance IS NULL
        THEN '^[a-z][a-z0-9_.-]{0,62}$' ELSE '^[a-z][a-z0-9_.-]{0,62}@[a-z0-9][a-z0-9_.-]{0,62}$' END),
    ADD CONSTRAINT consumer_group_instance CHECK ((broadcast_of IS NULL) = (instance IS NULL)),
    ADD CONSTRAINT consumer_group_instance_mode CHECK (instance IS NULL OR mode = 'exclusive'),
    ADD CONSTRAINT consumer_group_keep_away CHECK (
        (mode = 'broadcast') = (keep_away_s IS NOT NULL) AND keep_away_s > 0 AND keep_away_s < 'Infinity');
CREATE UNIQUE INDEX consumer_group_instances ON mqlayer.consumer_group (broadcast_of, instance)
    WHERE broadcast_of IS NOT NULL;

-- As before, and nothing of a retired group, nor of one that is settings only.
CREATE OR REPLACE VIEW mqlayer.readable AS
SELECT g.group_id, p.partition_id
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
WHERE g.paused_at IS NULL AND g.state <> 'retired' AND g.mode <> 'broadcast'
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
  AND NOT EXISTS (
      SELECT FROM mqlayer.partition parent
      WHERE parent.ended_in = p.born_in AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
        AND parent.state <> 'deleted' AND g.mode <> 'shared'
        AND NOT EXISTS (SELECT FROM mqlayer.drained d
                        WHERE d.group_id = g.group_id AND d.partition_id = parent.partition_id));
