-- name: schedule_insert
-- Make a schedule; nothing where the name is taken.
INSERT INTO mqlayer.analytics_schedule (name, topics, jobs, every_s, keep, actor, export_to, next_at)
VALUES (%(name)s, %(topics)s::text[], %(jobs)s::text[], %(every_s)s, %(keep)s, %(actor)s, %(export_to)s,
        coalesce(%(first_at)s::timestamptz, now()))
ON CONFLICT (name) DO NOTHING
RETURNING name;

-- name: schedule_count
SELECT count(*) FROM mqlayer.analytics_schedule;

-- name: schedule_delete
DELETE FROM mqlayer.analytics_schedule WHERE name = %(name)s;

-- name: schedule_pause
-- Pause a schedule, or resume it: its next run is the next one that is not over.
UPDATE mqlayer.analytics_schedule
SET paused_at = CASE WHEN %(pause)s THEN coalesce(paused_at, now()) END
WHERE name = %(name)s
RETURNING name;

-- name: schedule_list
-- All schedules, each with its last run that ended and how long ago, and the one that runs.
SELECT s.name, s.topics, s.jobs, s.every_s, s.keep, s.actor, s.created_at, s.next_at, s.paused_at, s.export_to,
       e.run_id, e.state, e.snapshot, e.job, e.results, e.error, e.worker, e.started_at, e.ended_at,
       r.run_id, r.state, r.snapshot, r.job, r.results, r.error, r.worker, r.started_at, r.ended_at
FROM mqlayer.analytics_schedule s
LEFT JOIN LATERAL (SELECT * FROM mqlayer.analytics_run o WHERE o.schedule = s.name AND o.state <> 'running'
                   ORDER BY o.run_id DESC LIMIT 1) e ON true
LEFT JOIN LATERAL (SELECT * FROM mqlayer.analytics_run o WHERE o.schedule = s.name AND o.state = 'running') r ON true
WHERE %(name)s::text IS NULL OR s.name = %(name)s
ORDER BY s.name;

-- name: schedule_runs
-- Runs of a schedule, newest first.
SELECT run_id, state, snapshot, job, results, error, worker, started_at, ended_at
FROM mqlayer.analytics_run
WHERE schedule = %(name)s AND (%(after)s::bigint IS NULL OR run_id < %(after)s)
ORDER BY run_id DESC LIMIT %(limit)s;

-- name: schedule_due
-- The schedule that is due for longest, unless a run goes on.
SELECT name FROM mqlayer.analytics_schedule
WHERE paused_at IS NULL AND next_at <= now()
  AND NOT EXISTS (SELECT FROM mqlayer.analytics_run WHERE state = 'running' AND lease_until > now())
ORDER BY next_at, name LIMIT 1;

-- name: schedule_runs_end_lost
-- End runs whose processes gave no sign of life, and have their schedules run again soon.
WITH lost AS (
    UPDATE mqlayer.analytics_run SET state = 'failed', ended_at = clock_timestamp(), error = %(error)s
    WHERE state = 'running' AND lease_until <= clock_timestamp()
    RETURNING schedule
)
UPDATE mqlayer.analytics_schedule s SET next_at = least(s.next_at, now() + make_interval(secs => %(again_s)s))
FROM lost WHERE s.name = lost.schedule;

-- name: schedule_run_claim
-- Begin a run; nothing where another one goes on, or where only a due one is wanted and it is not. A due schedule's next
-- run keeps the time of day: what was missed is left out.
WITH due AS (
    SELECT name, next_at <= now() AS is_due, next_at, every_s FROM mqlayer.analytics_schedule
    WHERE name = %(name)s AND (NOT %(only_due)s OR paused_at IS NULL AND next_at <= now())
    FOR UPDATE
), begun AS (
    INSERT INTO mqlayer.analytics_run (schedule, worker, lease_until)
    SELECT name, %(worker)s, clock_timestamp() + make_interval(secs => %(lease_s)s) FROM due
    ON CONFLICT (state) WHERE state = 'running' DO NOTHING
    RETURNING run_id, schedule
), moved AS (
    UPDATE mqlayer.analytics_schedule s SET next_at = d.next_at
        + make_interval(secs => d.every_s * (1 + floor(extract(epoch FROM now() - d.next_at) / d.every_s)))
    FROM due d, begun b WHERE s.name = b.schedule AND d.name = s.name AND d.is_due
)
SELECT run_id FROM begun;

-- name: schedule_run_renew
UPDATE mqlayer.analytics_run SET lease_until = clock_timestamp() + make_interval(secs => %(lease_s)s)
WHERE run_id = %(run_id)s AND state = 'running'
RETURNING run_id;

-- name: schedule_run_note
-- Note the job that a run is at, and what the one before gave.
UPDATE mqlayer.analytics_run
SET job = %(job)s, snapshot = coalesce(%(snapshot)s, snapshot), results = results || %(results)s::jsonb
WHERE run_id = %(run_id)s AND state = 'running'
RETURNING run_id;

-- name: schedule_run_end
UPDATE mqlayer.analytics_run SET state = %(state)s, error = %(error)s, ended_at = clock_timestamp(), job = NULL
WHERE run_id = %(run_id)s AND state = 'running'
RETURNING run_id;

-- name: schedule_runs_clean
-- Forget runs beyond the newest of a schedule.
DELETE FROM mqlayer.analytics_run
WHERE schedule = %(name)s AND state <> 'running' AND run_id < (
    SELECT min(run_id) FROM (SELECT run_id FROM mqlayer.analytics_run WHERE schedule = %(name)s
                             ORDER BY run_id DESC LIMIT %(keep)s) newest);

-- name: schedule_snapshots
-- Snapshots that a schedule's runs made, newest first.
SELECT s.name FROM mqlayer_archive.snapshot s JOIN mqlayer.analytics_run r ON r.snapshot = s.name
WHERE r.schedule = %(name)s
ORDER BY r.run_id DESC;
