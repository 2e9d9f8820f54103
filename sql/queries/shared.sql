-- name: shared_places
-- Every partition that a shared group reads, or one group, under which epoch, and after how long its messages are
-- taken from members.
SELECT g.group_id, r.partition_id, p.node_id, a.epoch, g.visibility_timeout_s
FROM mqlayer.consumer_group g
JOIN mqlayer.readable r USING (group_id)
JOIN mqlayer.partition p USING (partition_id)
JOIN mqlayer.assignment a ON a.group_id = g.group_id AND a.partition_id = r.partition_id
WHERE g.mode = 'shared' AND g.state = 'live' AND (%(group_id)s::bigint IS NULL OR g.group_id = %(group_id)s)
ORDER BY p.node_id, g.group_id, r.partition_id;

-- name: shared_hold
-- Hold the epoch of a shared group at a partition to the end of the transaction; nothing where another one is in force.
SELECT epoch FROM mqlayer.assignment
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s AND epoch = %(epoch)s FOR KEY SHARE;

-- name: redriven_claim
-- Give a member of a shared group messages that were given back to it, are due, and whose LP its deployment has; nobody
-- else gets them for a while. What
-- was claimed before and not ended may have ended its process: one of these at a time, where the member wants any, and
-- its attempt is counted before. `started` names this very claim.
WITH due AS (
    SELECT group_id, lp, name, started IS NOT NULL AS care FROM mqlayer.parked_key k
    WHERE group_id = %(group_id)s AND due_at <= clock_timestamp()
      AND (SELECT CASE WHEN k.lp < g.canary_lps THEN g.canary ELSE g.deployment END
           FROM mqlayer.consumer_group g WHERE g.group_id = %(group_id)s) = %(deployment)s
    ORDER BY due_at LIMIT %(limit)s FOR UPDATE SKIP LOCKED
), chosen AS (
    SELECT *, row_number() OVER (PARTITION BY care) AS number FROM due
), claimed AS (
    UPDATE mqlayer.parked_key k
    SET due_at = clock_timestamp() + make_interval(secs => %(visibility_timeout_s)s), attempts = k.attempts + c.care::int,
        started = nextval('mqlayer.parked_position'), released = false
    FROM chosen c
    WHERE k.group_id = c.group_id AND k.lp = c.lp AND k.name = c.name AND (NOT c.care OR (%(careful)s AND c.number = 1))
    RETURNING k.group_id, k.lp, k.name, k.started, k.attempts - c.care::int AS before, c.care
)
SELECT c.lp, c.name, c.started, c.before, c.care, m.partition_id, m.log_offset, m.m, m.key, m.body
FROM claimed c JOIN mqlayer.parked_message m USING (group_id, lp, name);

-- name: redriven_extend
-- A member still has what it claimed; nothing of what others have since.
UPDATE mqlayer.parked_key k SET due_at = clock_timestamp() + make_interval(secs => %(visibility_timeout_s)s)
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[], %(tokens)s::bigint[]) AS given (lp, name, token)
WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name AND k.started = given.token
RETURNING k.started;

-- name: redriven_nack
-- What was claimed is tried again after a while, with so many failed attempts; nothing where others have it. Released
-- since, it is due with all its attempts.
UPDATE mqlayer.parked_key k
SET due_at = clock_timestamp() + make_interval(secs => CASE WHEN k.released THEN 0 ELSE given.wait_s END),
    attempts = CASE WHEN k.released THEN 0 ELSE given.failed END, cause = 'retry', started = NULL, released = false
FROM unnest(%(lps)s::smallint[], %(names)s::bytea[], %(tokens)s::bigint[], %(failed)s::int[],
            %(waits_s)s::double precision[]) AS given (lp, name, token, failed, wait_s)
WHERE k.group_id = %(group_id)s AND k.lp = given.lp AND k.name = given.name AND k.started = given.token;

-- name: redriven_hold
-- Lock what was claimed; nothing of what others have since.
SELECT k.lp, k.name
FROM mqlayer.parked_key k
JOIN unnest(%(lps)s::smallint[], %(names)s::bytea[], %(tokens)s::bigint[]) AS given (lp, name, token) USING (lp, name)
WHERE k.group_id = %(group_id)s AND k.started = given.token FOR UPDATE OF k;

-- name: redriven_forget
-- Keys that nothing is left of.
SELECT mqlayer.parked_keys_forget_v1(%(group_id)s, %(lps)s::smallint[], %(names)s::bytea[]);
