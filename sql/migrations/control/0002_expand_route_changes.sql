-- Route changes: split, merge, move; how far each group is in the lineage of partitions. The protocol: ARCHITECTURE.md.

-- One change of a topic's route. It walks through its states, each step repeated by whoever finds it unfinished:
-- planned -> sealing -> sealed -> done, or planned -> dropped. Nothing is sealed before it is sealing, so until then it may
-- be dropped, whoever was stopped on its way; from there on it only goes forward.
CREATE TABLE mqlayer.route_change (
    change_id  int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id   int NOT NULL REFERENCES mqlayer.topic,
    -- The route version that it makes.
    version    int NOT NULL,
    kind       text NOT NULL,
    state      text NOT NULL DEFAULT 'planned',
    -- What a parent's node has to do with it: live, it seals the parent; away, its outbox proves the marks and the node
    -- seals when it is back; lost, it never comes back, and what the outbox still holds is sent again.
    mode       text NOT NULL DEFAULT 'live',
    actor      text NOT NULL,
    planned_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    sealed_at  timestamptz,
    opened_at  timestamptz,
    ended_at   timestamptz,
    CONSTRAINT route_change_kind CHECK (kind IN ('split', 'merge', 'move')),
    CONSTRAINT route_change_mode CHECK (mode IN ('live', 'away', 'lost')),
    CONSTRAINT route_change_state CHECK (state IN ('planned', 'sealing', 'sealed', 'done', 'dropped'))
);
CREATE UNIQUE INDEX route_change_one_at_a_time ON mqlayer.route_change (topic_id) 
    WHERE state IN ('planned', 'sealing', 'sealed');
CREATE UNIQUE INDEX route_change_version ON mqlayer.route_change (topic_id, version) WHERE state <> 'dropped';

-- The parents of a partition are those that the change which made it ended, and whose LPs it took over.
ALTER TABLE mqlayer.partition
    ADD COLUMN born_in int REFERENCES mqlayer.route_change,
    ADD COLUMN ended_in int REFERENCES mqlayer.route_change,
    -- Deleted partitions only: nothing but its tombstone is left in Redis.
    ADD COLUMN retired_at timestamptz;
CREATE INDEX partition_by_birth ON mqlayer.partition (born_in) WHERE born_in IS NOT NULL;
CREATE INDEX partition_by_end ON mqlayer.partition (ended_in) WHERE ended_in IS NOT NULL;

-- How a parent was sealed: the very command record, and the marks that are frozen with it. Made again when its node fell
-- back, under another seal id: whoever saw the lost one can't open the gate with it.
CREATE TABLE mqlayer.seal (
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    change_id    int NOT NULL REFERENCES mqlayer.route_change,
    seal_id      uuid NOT NULL,
    next_offset  bigint NOT NULL,
    run_id       text NOT NULL,
    -- "<source>:<lp>" -> highest seq.
    marks        jsonb NOT NULL,
    -- Sealed in Postgres only, while its node is away: nobody can drain it before the node is back.
    away         boolean NOT NULL DEFAULT false,
    -- The partition holds more than its recorded marks: its successors hold that too, so no group handles it here.
    cut          boolean NOT NULL DEFAULT false,
    sealed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT seal_key PRIMARY KEY (partition_id)
);

ALTER TABLE mqlayer.consumer_group
    -- The route version of which the group has drained all that came before it; moves one by one.
    ADD COLUMN version int NOT NULL DEFAULT 1,
    -- How often it was sent elsewhere. What it had committed before is void: where it starts counts again.
    ADD COLUMN seek int NOT NULL DEFAULT 0,
    -- The last seek, where fenced effects are applied again since, though they were before; else 0.
    ADD COLUMN replay int NOT NULL DEFAULT 0,
    ADD COLUMN start_at timestamptz,
    DROP CONSTRAINT consumer_group_start,
    ADD CONSTRAINT consumer_group_start CHECK (start IN ('earliest', 'latest', 'time')),
    ADD CONSTRAINT consumer_group_start_time CHECK ((start = 'time') = (start_at IS NOT NULL));

-- A group has settled everything before the recorded command of a sealed partition, or began behind it.
CREATE TABLE mqlayer.drained (
    group_id     int NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    drained_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT drained_key PRIMARY KEY (group_id, partition_id)
);

-- What a group may consume: a partition whose parents it has all drained, until it has drained that one too. A parent
-- that is deleted holds nobody: every group had drained it, or an operator gave it up.
CREATE VIEW mqlayer.readable AS
SELECT g.group_id, p.partition_id
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
WHERE NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
  AND NOT EXISTS (
      SELECT FROM mqlayer.partition parent
      WHERE parent.ended_in = p.born_in AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
        AND parent.state <> 'deleted'
        AND NOT EXISTS (SELECT FROM mqlayer.drained d
                        WHERE d.group_id = g.group_id AND d.partition_id = parent.partition_id));

-- What a rebalance and every heartbeat look through; tombstones are many in the long run.
CREATE INDEX partition_in_use ON mqlayer.partition (topic_id) WHERE state IN ('open', 'sealed');

-- When an operator gave a node up; null again once it is back.
ALTER TABLE mqlayer.node ADD COLUMN lost_at timestamptz;

-- Copies of partitions on nodes that were given up, and that were made anew elsewhere: if such a node comes back, they
-- become tombstones before it is served.
CREATE TABLE mqlayer.abandoned (
    node_id      int NOT NULL REFERENCES mqlayer.node,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    at           timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT abandoned_key PRIMARY KEY (node_id, partition_id)
);
