-- part: breaker_wait
-- The wait before the next probe of breaker b, which doubles with each that failed.
make_interval(secs => least(%(longest_s)s::float8, %(first_s)s::float8 * power(2, least(b.probes, 30))));

-- name: breaker_report
-- A member says how many distinct keys failed, of how many that it tried.
UPDATE mqlayer.member SET failing_keys = %(failing)s, tried_keys = %(tried)s, reported_at = clock_timestamp()
WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND session = %(session)s;

-- name: breaker_open
-- Open a group's breaker if so large a share of keys fails over all living members that own a partition (of a shared
-- group: all); each must have
-- reported since the breaker changed, unless that was waited for. After a probe succeeded, two failing keys are enough.
INSERT INTO mqlayer.breaker AS b (group_id, state, cause, actor, failing_keys, probe_at)
SELECT g.group_id, 'open', %(cause)s, %(actor)s, s.failing, clock_timestamp() + make_interval(secs => %(first_s)s)
FROM mqlayer.consumer_group g
LEFT JOIN mqlayer.breaker o ON o.group_id = g.group_id
CROSS JOIN LATERAL (
    SELECT sum(CASE WHEN r.fresh THEN r.failing_keys ELSE 0 END)::int AS failing,
           sum(CASE WHEN r.fresh THEN r.tried_keys ELSE 0 END)::int AS tried, bool_and(r.fresh) AS heard
    FROM (SELECT m.failing_keys, m.tried_keys,
                 m.reported_at > greatest(o.changed_at, now() - make_interval(secs => g.breaker_window_s)) AS fresh
          FROM mqlayer.member m
          WHERE m.group_id = g.group_id AND m.lease_until >= now() AND (g.mode = 'shared' OR EXISTS (
              SELECT FROM mqlayer.assignment a WHERE a.group_id = m.group_id AND a.member_id = m.member_id))) AS r) AS s
WHERE g.group_id = %(group_id)s AND (s.heard OR %(waited)s::boolean) AND s.failing >= g.breaker_share * s.tried
  AND s.failing >= CASE WHEN o.state = 'ramping' THEN least(2, g.breaker_keys) ELSE g.breaker_keys END
ON CONFLICT (group_id) DO UPDATE
SET state = 'open', changed_at = clock_timestamp(), cause = excluded.cause, actor = excluded.actor,
    opened_at = CASE WHEN b.state = 'ramping' THEN b.opened_at ELSE clock_timestamp() END,
    failing_keys = excluded.failing_keys, probe_session = NULL,
    probes = CASE WHEN b.state = 'ramping' THEN least(b.probes + 1, 1000) ELSE 0 END,
    probe_at = CASE WHEN b.state = 'ramping' THEN clock_timestamp() + {breaker_wait} ELSE excluded.probe_at END
WHERE b.state IN ('closed', 'ramping')
RETURNING failing_keys, pg_notify('mqlayer_group', group_id::text);

-- name: breaker_probe
-- Take the probe that is due, or that of a member that is gone or silent about it for long.
UPDATE mqlayer.breaker b SET state = 'probing', changed_at = clock_timestamp(), probe_session = %(session)s
WHERE b.group_id = %(group_id)s
  AND (b.state = 'open' AND b.probe_at <= clock_timestamp()
       OR b.state = 'probing' AND (b.changed_at < clock_timestamp() - make_interval(secs => %(limit_s)s) OR NOT EXISTS (
           SELECT FROM mqlayer.member m
           WHERE m.group_id = b.group_id AND m.session = b.probe_session AND m.lease_until >= now())))
RETURNING probes;

-- name: breaker_probe_failed
-- The probe failed: wait again, for longer.
UPDATE mqlayer.breaker b
SET state = 'open', changed_at = clock_timestamp(), probe_session = NULL, cause = %(cause)s,
    probes = least(b.probes + 1, 1000),
    probe_at = clock_timestamp() + least(make_interval(secs => %(longest_s)s::float8), 2 * {breaker_wait})
WHERE b.group_id = %(group_id)s AND b.state = 'probing' AND b.probe_session = %(session)s RETURNING probes;

-- name: breaker_probe_succeeded
-- The probe succeeded: go on, with few handlers first.
UPDATE mqlayer.breaker SET state = 'ramping', changed_at = clock_timestamp(), probe_session = NULL
WHERE group_id = %(group_id)s AND state = 'probing' AND probe_session = %(session)s
RETURNING probes, pg_notify('mqlayer_group', group_id::text);

-- name: breaker_close
-- Close a breaker that has ramped for long enough; how long it was not closed.
UPDATE mqlayer.breaker SET state = 'closed', changed_at = clock_timestamp()
WHERE group_id = %(group_id)s AND state = 'ramping'
  AND changed_at <= clock_timestamp() - make_interval(secs => %(ramp_s)s)
RETURNING extract(epoch FROM changed_at - opened_at)::float8;

-- name: breaker_trip
-- An operator opens the breaker of a group, or of its instances; of which it was not open.
INSERT INTO mqlayer.breaker AS b (group_id, state, cause, actor, probe_at)
SELECT g.group_id, 'open', 'operator', %(actor)s, clock_timestamp() + make_interval(secs => %(first_s)s)
FROM mqlayer.consumer_group g
WHERE (g.group_id = %(group_id)s OR g.broadcast_of = %(group_id)s) AND g.mode IN ('exclusive', 'shared') AND g.state <> 'retired'
ON CONFLICT (group_id) DO UPDATE
SET state = 'open', changed_at = clock_timestamp(), opened_at = clock_timestamp(), cause = excluded.cause,
    actor = excluded.actor, failing_keys = 0, probes = 0, probe_at = excluded.probe_at, probe_session = NULL
WHERE b.state IN ('closed', 'ramping')
RETURNING group_id, pg_notify('mqlayer_group', group_id::text);

-- name: breaker_reset
-- An operator closes the breaker of a group, or of its instances; of which it was not closed.
UPDATE mqlayer.breaker b SET state = 'closed', changed_at = clock_timestamp(), actor = %(actor)s, probe_session = NULL
FROM mqlayer.consumer_group g
WHERE (g.group_id = %(group_id)s OR g.broadcast_of = %(group_id)s) AND g.group_id = b.group_id AND b.state <> 'closed'
RETURNING b.group_id, pg_notify('mqlayer_group', b.group_id::text);
