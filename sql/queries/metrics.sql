-- name: metrics_nodes
-- How many nodes are armed, unarmed, lost; and of all these, draining.
SELECT count(*) FILTER (WHERE lost_at IS NULL AND armed_run_id IS NOT NULL)::int,
       count(*) FILTER (WHERE lost_at IS NULL AND armed_run_id IS NULL)::int,
       count(*) FILTER (WHERE lost_at IS NOT NULL)::int,
       count(*) FILTER (WHERE draining_at IS NOT NULL)::int
FROM mqlayer.node WHERE removed_at IS NULL;

-- name: metrics_route_changes
-- How many route changes are done, dropped, unfinished; since when the oldest of the last is; and the longest time between
-- seal and opening, of those that ended within an hour.
SELECT count(*) FILTER (WHERE state = 'done')::int, count(*) FILTER (WHERE state = 'dropped')::int,
       count(*) FILTER (WHERE ended_at IS NULL)::int,
       coalesce(extract(epoch FROM clock_timestamp() - min(planned_at) FILTER (WHERE ended_at IS NULL)), 0)::float8,
       coalesce(extract(epoch FROM max(opened_at - sealed_at) FILTER (
           WHERE ended_at > now() - interval '1 hour')), 0)::float8
FROM mqlayer.route_change;

-- name: metrics_jobs
-- For how long each of these periodic jobs has not run; see jobs_late.
SELECT split_part(name, '@', 1), greatest(extract(epoch FROM now() - coalesce(
           min(last_at) FILTER (WHERE last_at > now() - interval '1 day'), max(last_at))), 0)::float8
FROM mqlayer.job WHERE last_at IS NOT NULL AND split_part(name, '@', 1) = ANY(%(names)s::text[]) GROUP BY 1 ORDER BY 1;

-- name: metrics_members_wanted
-- How many members groups need, by the samples; 0 where nothing waits and nothing comes.
SELECT t.name, g.name, mqlayer.members_wanted_v1(t.name, g.name, 0, %(lag_target_s)s)
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
WHERE g.state = 'live' AND g.mode IN ('exclusive', 'shared') AND g.instance IS NULL ORDER BY t.name, g.name;
