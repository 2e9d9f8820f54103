-- Which run of a node was armed last, also while none is: a Postgres that was replaced arms none, and the primary of
-- before must not count as unknown once its replica is armed instead.
ALTER TABLE mqlayer.node ADD COLUMN last_run_id text;
UPDATE mqlayer.node SET last_run_id = armed_run_id;
