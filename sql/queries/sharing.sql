-- name: shared_places
-- Every partition that a shared group reads, under which epoch, and after how long its messages are taken from members.
SELECT g.group_id, r.partition_id, p.node_id, a.epoch, g.invisible_s
FROM mqlayer.consumer_group g
JOIN mqlayer.readable r USING (group_id)
JOIN mqlayer.partition p USING (partition_id)
JOIN mqlayer.assignment a ON a.group_id = g.group_id AND a.partition_id = r.partition_id
WHERE g.mode = 'shared' AND g.state = 'live' ORDER BY p.node_id, g.group_id, r.partition_id;

-- name: shared_hold
-- Hold the epoch of a shared group at a partition to the end of the transaction; nothing where another one is in force.
SELECT epoch FROM mqlayer.assignment
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s AND epoch = %(epoch)s FOR KEY SHARE;

-- name: redriven_claim
-- Give a member of a shared group messages that were given back to it and are due; nobody else gets them for a while. Each
-- claim counts as an attempt, since it may end its process; the count also names this very claim.
WITH due AS (
    SELECT group_id, lp, name FROM mqlayer.parked_key
    WHERE group_id = %(group_id)s AND due_at <= clock_timestamp()
    ORDER BY due_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE mqlayer.parked_key k
    SET due_at = clock_timestamp() + make_interval(secs => %(invisible_s)s), attempts = k.attempts + 1
    FROM due WHERE k.group_id = due.group_id AND k.lp = due.lp AND k.name = due.name
    RETURNING k.group_id, k.lp, k.name, k.attempts
)
SELECT c.lp, c.name, c.attempts, m.partition_id, m.log_offset, m.m, m.key, m.body
FROM claimed c JOIN mqlayer.parked_message m USING (group_id, lp, name);

-- name: redriven_keep
-- A member still has what it claimed.
UPDATE mqlayer.parked_key k SET due_at = clock_timestamp() + make_interval(secs => %(invisible_s)s)
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[], %(attempts)s::int[]) AS given (lp, name, attempts)
WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name AND k.attempts = given.attempts;

-- name: redriven_back
-- What was claimed is tried again after a while, with so many failed attempts; nothing where others have it.
UPDATE mqlayer.parked_key k
SET due_at = clock_timestamp() + make_interval(secs => given.wait_s), attempts = given.failed, cause = 'retry'
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[], %(attempts)s::int[], %(failed)s::int[],
            %(waits_s)s::double precision[]) AS given (lp, name, attempts, failed, wait_s)
WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name AND k.attempts = given.attempts;

-- name: redriven_hold
-- Lock what was claimed; nothing of what others have since.
SELECT k.lp, k.name
FROM mqlayer.parked_key k
JOIN unnest(%(lps)s::smallint[], %(names)s::bytea[], %(attempts)s::int[]) AS given (lp, name, attempts)
    USING (lp, name, attempts)
WHERE k.group_id = %(group_id)s FOR UPDATE OF k;

-- name: redriven_forget
-- Keys that nothing is left of.
DELETE FROM mqlayer.parked_key k
USING unnest(%(lps)s::smallint[], %(names)s::bytea[]) AS given (lp, name)
WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name;
