-- protocol 2
-- A topic's durability class: what must have a message before it counts as stored. Relays and producers of older code
-- know none, and confirm earlier.

-- node: the node's Redis. disk: its append-only file, synced. replica: a replica too. quorum: most of the node's servers.
ALTER TABLE mqlayer.topic ADD COLUMN durability text NOT NULL DEFAULT 'node';
ALTER TABLE mqlayer.topic ADD CONSTRAINT topic_durability CHECK (durability IN ('node', 'disk', 'replica', 'quorum'));

-- How many replicas an operator says that the node's Redis has.
ALTER TABLE mqlayer.node ADD COLUMN replicas smallint NOT NULL DEFAULT 0;
ALTER TABLE mqlayer.node ADD CONSTRAINT node_replicas CHECK (replicas BETWEEN 0 AND 100);
