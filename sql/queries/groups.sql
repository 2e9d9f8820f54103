-- name: group_insert
-- Create a group that is not live yet; nothing where the name is taken.
INSERT INTO mqlayer.consumer_group (topic_id, name, start, start_at, from_archive, ordered, balance, mode, scope, tag_filter,
       visibility_timeout_s, instance_expiry_s, rate_limit, rate_burst, backoff_s, backoff_jitter, attempt_limit, policy, non_retryable_errors,
       retryable_errors, time_limit_s, max_time_limit_s, parked_keys_limit, parked_messages_limit, parked_bytes_limit,
       key_messages_limit, key_bytes_limit, breaker_share, breaker_keys, breaker_window_s, breaker_errors, key_class,
       class_concurrency, class_rate, deployment)
SELECT topic_id, %(name)s, %(start)s, %(start_at)s, %(from_archive)s, %(ordered)s, %(balance)s, %(mode)s, %(scope)s,
       %(tag_filter)s, %(visibility_timeout_s)s, %(instance_expiry_s)s, %(rate_limit)s, %(rate_burst)s, %(backoff_s)s, %(jitter)s,
       %(attempt_limit)s, %(policy)s, %(non_retryable_errors)s, %(retryable_errors)s,
       %(time_limit_s)s, %(max_time_limit_s)s, %(parked_keys_limit)s, %(parked_messages_limit)s, %(parked_bytes_limit)s,
       %(key_messages_limit)s, %(key_bytes_limit)s, %(breaker_share)s, %(breaker_keys)s, %(breaker_window_s)s,
       %(breaker_errors)s, %(key_class)s, %(class_concurrency)s, %(class_rate)s, %(deployment)s
FROM mqlayer.topic WHERE name = %(topic)s
ON CONFLICT DO NOTHING;

-- name: group_find
-- One group of a topic.
SELECT g.group_id, g.topic_id, g.state, g.start, g.start_at, t.strategy, g.version, g.seek, g.ordered, g.balance,
       g.settings_version, g.paused_at, g.mode, g.scope, g.tag_filter, g.from_archive, g.visibility_timeout_s, g.instance,
       g.instance_expiry_s, g.rate_limit, g.rate_burst, g.copied_from, g.deployment, g.canary,
       g.canary_lps, g.previous_deployment, g.fallback, g.backoff_s, g.backoff_jitter,
       g.attempt_limit, g.policy, g.non_retryable_errors, g.retryable_errors, g.time_limit_s, g.max_time_limit_s, g.parked_keys_limit,
       g.parked_messages_limit, g.parked_bytes_limit, g.key_messages_limit, g.key_bytes_limit,
       g.breaker_share, g.breaker_keys, g.breaker_window_s, g.breaker_errors, g.key_class,
       g.class_concurrency, g.class_rate
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
WHERE t.name = %(topic)s AND g.name = %(name)s;

-- name: group_start_insert
-- Where a group starts in a partition: said once.
INSERT INTO mqlayer.group_start (group_id, partition_id, start_offset)
VALUES (%(group_id)s, %(partition_id)s, %(start_offset)s)
ON CONFLICT (group_id, partition_id) DO NOTHING;

-- name: partitions_kept
-- The partitions that a group can begin in, parents before successors, and since when their nodes are armed.
SELECT p.partition_id, p.node_id, n.armed_at, p.lp_from, p.lp_to, p.state = 'sealed', p.created_by_change, p.ended_by_change
FROM mqlayer.partition p JOIN mqlayer.node n USING (node_id)
WHERE p.topic_id = %(topic_id)s AND p.state IN ('open', 'sealed') ORDER BY p.partition_id;

-- name: partitions_hold
-- Where partitions are and since when their nodes are armed: nobody arms or moves them until this transaction ends. One
-- that is being moved at this moment is missing.
SELECT p.partition_id, p.node_id, n.armed_at, p.state = 'deleted'
FROM mqlayer.partition p JOIN mqlayer.node n USING (node_id)
WHERE p.partition_id = ANY(%(partitions)s::int[]) ORDER BY n.node_id, p.partition_id FOR SHARE;

-- name: group_creating
-- Lock a group that is not live yet; nothing where somebody brought it to life.
SELECT group_id FROM mqlayer.consumer_group WHERE group_id = %(group_id)s AND state = 'creating' FOR NO KEY UPDATE;

-- name: group_live
-- All starting points of a group are stored: let members in.
UPDATE mqlayer.consumer_group SET state = 'live' WHERE group_id = %(group_id)s AND state = 'creating';

-- name: group_seek
-- Send a group elsewhere, unless it was since this was decided: what it had committed is void. An earlier replay is over:
-- it may have begun behind what this one gives. No number of a seek that a replaced server forgot is given again.
WITH leapt AS (SELECT coalesce(max(replaced), 0) * 1000 AS floor FROM mqlayer.server)
UPDATE mqlayer.consumer_group
SET seek = greatest(seek + 1, leapt.floor), replay = CASE WHEN %(replay)s THEN greatest(seek + 1, leapt.floor) ELSE 0 END,
    version = 1
FROM leapt
WHERE group_id = %(group_id)s AND seek = %(seek)s AND state = 'live' RETURNING seek;

-- name: group_settings_put
-- Change settings of a group, unless somebody did since this was decided; what is not named stays. Without end is no
-- limit.
UPDATE mqlayer.consumer_group
SET settings_version = settings_version + 1, backoff_s = coalesce(%(backoff_s)s::double precision[], backoff_s),
    backoff_jitter = coalesce(%(jitter)s::double precision, backoff_jitter),
    attempt_limit = coalesce(%(attempt_limit)s::int, attempt_limit), policy = coalesce(%(policy)s::text, policy),
    non_retryable_errors = coalesce(%(non_retryable_errors)s::text[], non_retryable_errors),
    retryable_errors = coalesce(%(retryable_errors)s::text[], retryable_errors),
    time_limit_s = nullif(coalesce(%(time_limit_s)s::double precision, time_limit_s), 'Infinity'),
    max_time_limit_s = nullif(coalesce(%(max_time_limit_s)s::double precision, max_time_limit_s), 'Infinity'),
    parked_keys_limit = coalesce(%(parked_keys_limit)s::int, parked_keys_limit),
    parked_messages_limit = coalesce(%(parked_messages_limit)s::bigint, parked_messages_limit),
    parked_bytes_limit = coalesce(%(parked_bytes_limit)s::bigint, parked_bytes_limit),
    key_messages_limit = coalesce(%(key_messages_limit)s::bigint, key_messages_limit),
    key_bytes_limit = coalesce(%(key_bytes_limit)s::bigint, key_bytes_limit),
    breaker_share = nullif(coalesce(%(breaker_share)s::double precision, breaker_share), 'Infinity'),
    breaker_keys = coalesce(%(breaker_keys)s::int, breaker_keys),
    breaker_window_s = coalesce(%(breaker_window_s)s::double precision, breaker_window_s),
    breaker_errors = coalesce(%(breaker_errors)s::text[], breaker_errors),
    key_class = coalesce(%(key_class)s, key_class),
    class_concurrency = nullif(coalesce(%(class_concurrency)s::double precision, class_concurrency), 'Infinity')::int,
    class_rate = nullif(coalesce(%(class_rate)s::double precision, class_rate), 'Infinity'),
    balance = coalesce(%(balance)s::text, balance), instance_expiry_s = coalesce(%(instance_expiry_s)s::double precision, instance_expiry_s),
    tag_filter = coalesce(%(tag_filter)s::text, tag_filter),
    rate_limit = nullif(coalesce(%(rate_limit)s::double precision, rate_limit), 'Infinity'),
    rate_burst = nullif(coalesce(%(rate_burst)s::double precision, rate_burst), 'Infinity')
WHERE group_id = %(group_id)s AND settings_version = coalesce(%(if_version)s::int, settings_version)
  AND state <> 'retired' RETURNING time_limit_s, max_time_limit_s;

-- name: group_pause
-- Let a group rest; nothing where it does.
UPDATE mqlayer.consumer_group SET paused_at = now(), paused_by = %(actor)s
WHERE group_id = %(group_id)s AND paused_at IS NULL AND state <> 'retired' RETURNING group_id;

-- name: group_resume
-- Let a group go on; nothing where it does.
UPDATE mqlayer.consumer_group SET paused_at = NULL, paused_by = NULL
WHERE group_id = %(group_id)s AND paused_at IS NOT NULL RETURNING group_id;

-- name: topic_pause
-- Let all groups of a topic rest; nothing where they do.
UPDATE mqlayer.topic SET paused_at = now(), paused_by = %(actor)s WHERE name = %(topic)s AND paused_at IS NULL
RETURNING topic_id;

-- name: topic_resume
-- Let the groups of a topic go on; nothing where they do.
UPDATE mqlayer.topic SET paused_at = NULL, paused_by = NULL WHERE name = %(topic)s AND paused_at IS NOT NULL
RETURNING topic_id;

-- name: topic_known
-- The id of a topic.
SELECT topic_id FROM mqlayer.topic WHERE name = %(topic)s;

-- name: topic_groups_notify
-- Have the members and receivers of a topic's groups look what they may consume.
SELECT pg_notify('mqlayer_group', group_id::text) FROM mqlayer.consumer_group
WHERE topic_id = %(topic_id)s AND state <> 'retired';

-- name: partition_pause_put
-- Let partitions rest for a group; which of them did not. Only such as are of its topic and not deleted.
INSERT INTO mqlayer.partition_pause (group_id, partition_id, paused_by)
SELECT %(group_id)s, p.partition_id, %(actor)s FROM mqlayer.partition p
WHERE p.partition_id = ANY(%(partitions)s::int[]) AND p.topic_id = %(topic_id)s AND p.state IN ('open', 'sealed')
ON CONFLICT DO NOTHING RETURNING partition_id;

-- name: partition_pause_end
-- Let partitions go on for a group; which of them rested.
DELETE FROM mqlayer.partition_pause
WHERE group_id = %(group_id)s AND partition_id = ANY(%(partitions)s::int[]) RETURNING partition_id;

-- name: partitions_of_topic
-- Which of these partitions are of a topic; not those that are deleted and do not rest for a group.
SELECT p.partition_id FROM mqlayer.partition p
WHERE p.topic_id = %(topic_id)s AND p.partition_id = ANY(%(partitions)s::int[])
  AND (p.state IN ('open', 'sealed') OR EXISTS (
      SELECT FROM mqlayer.partition_pause pp WHERE pp.group_id = %(group_id)s AND pp.partition_id = p.partition_id));

-- name: pause_under_way
-- In how many partitions of a topic, of one of its groups with its instances, or of some partitions of that, owners still
-- finish what they have in hand.
SELECT count(*) FROM mqlayer.assignment a JOIN mqlayer.consumer_group g USING (group_id)
WHERE g.topic_id = %(topic_id)s AND a.member_id IS NOT NULL
  AND (%(group_id)s::bigint IS NULL OR g.group_id = %(group_id)s OR g.broadcast_of = %(group_id)s)
  AND (%(partitions)s::int[] IS NULL OR a.partition_id = ANY(%(partitions)s::int[]));

-- name: assignments_of_group_release
-- Ask every owner to release what it has, for nobody.
UPDATE mqlayer.assignment SET target = NULL, changed_at = now()
WHERE group_id = %(group_id)s AND member_id IS NOT NULL;

-- name: beginnings_forget
-- Where a group started before, and what it drained.
SELECT mqlayer.beginnings_forget_v1(%(group_id)s);

-- name: transaction_patience
-- How long this transaction waits for a lock, and how long it may hold its own while its process does nothing.
SELECT set_config('lock_timeout', %(lock_wait)s, true),
       set_config('idle_in_transaction_session_timeout', %(idle)s, true);

-- name: group_lock
-- Lock a group for a change of its membership or assignments.
SELECT group_id, topic_id, allocation, balance, mode, state, instance IS NOT NULL, deployment, canary, canary_lps,
       previous_deployment, fallback FROM mqlayer.consumer_group
WHERE group_id = %(group_id)s FOR NO KEY UPDATE;

-- name: group_admits
-- What decides whether a member may join a group, whose lock is held.
SELECT t.name, g.name, g.state, g.instance IS NOT NULL
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id) WHERE g.group_id = %(group_id)s;

-- name: member_join
-- A member (again): a new session, so that an earlier process of this id is refused. Nothing where a process that goes
-- on after its own sessions finds another's: somebody took its id, or evicted it. A lower one is of before them: their
-- commits are lost.
INSERT INTO mqlayer.member AS m (group_id, member_id, session, host, pid, deployment, zone, lease_until, version, least, most)
VALUES (%(group_id)s, %(member_id)s, %(session)s, %(host)s, %(pid)s, %(deployment)s, %(zone)s,
        now() + make_interval(secs => %(lease_s)s), %(version)s, %(least)s, %(most)s)
ON CONFLICT (group_id, member_id) DO UPDATE
SET session = excluded.session, host = excluded.host, pid = excluded.pid, deployment = excluded.deployment,
    zone = excluded.zone, leaving = false, joined_at = now(), lease_until = excluded.lease_until,
    version = excluded.version, least = excluded.least, most = excluded.most, acts_on = excluded.acts_on
WHERE %(own)s::bigint[] IS NULL OR m.session = ANY(%(own)s::bigint[]) OR m.session < ALL(%(own)s::bigint[])
RETURNING session, acts_on;

-- name: member_placed
-- Whether a member owns a partition, or is to get one.
SELECT FROM mqlayer.assignment
WHERE group_id = %(group_id)s AND (member_id = %(member_id)s OR target = %(member_id)s) LIMIT 1;

-- name: members_spare
-- A member comes back whose lease ran out, with those of all its group and about when its own did, and nobody noted it:
-- the database was away, so they come back too, and keep what they have if they do so soon. Before member_join.
UPDATE mqlayer.member m SET lease_until = now() + make_interval(secs => %(lease_s)s / 2)
FROM mqlayer.member own
WHERE own.group_id = %(group_id)s AND own.member_id = %(member_id)s
  AND (own.session = ANY(%(own)s::bigint[]) OR own.session < ALL(%(own)s::bigint[]))
  AND own.lease_until > '-infinity' AND m.group_id = own.group_id AND m.member_id <> own.member_id AND NOT m.leaving
  AND m.lease_until > own.lease_until - make_interval(secs => %(lease_s)s)
  AND NOT EXISTS (SELECT FROM mqlayer.member l WHERE l.group_id = own.group_id AND l.lease_until >= now());

-- name: member_session_next
-- The number of a session that is to be: known before the joining, whose answer may be lost.
SELECT nextval('mqlayer.member_session');

-- part: state_of_beat
-- What a heartbeat answers: which protocol versions the schema serves, and what state the nodes are in, and all else that
-- the member may know of: where that is as it was, nothing else has to be read. A breaker that is not closed changes with
-- time. Rows by their transaction, where no version counts their changes. The nodes once for all heartbeats.
p.serves_from, p.in_force, p.serves_to, coalesce(g.allocation, 0) AS allocation,
       (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms,
       (SELECT concat_ws(' ', count(*), sum(hashtextextended(concat_ws(' ', n.armed_run_id, n.url), n.xmin::text::bigint)))
        FROM mqlayer.node n WHERE n.removed_at IS NULL) AS nodes,
       ROW(g.version, g.seek, g.replay, g.parking, g.settings_version, g.paused_at, t.xmin,
           EXISTS (SELECT FROM mqlayer.redrive d WHERE d.group_id = g.group_id AND d.state = 'running' AND d.newer = 'wait'
                   AND d.name IS NULL),
           CASE WHEN g.breaker_share IS NOT NULL THEN EXISTS (
               SELECT FROM mqlayer.member sm
               WHERE sm.group_id = g.group_id AND sm.failing_keys > 0 AND sm.member_id <> given.member_id
                 AND sm.reported_at > now() - make_interval(secs => g.breaker_window_s)) END,
           CASE WHEN b.group_id IS NOT NULL THEN clock_timestamp() END,
           own.partitions, own.changes, own.pauses)::text AS state
-- One row, which is too few for statistics: without the limit it counts as a thousand.
FROM given CROSS JOIN (SELECT * FROM mqlayer.protocol LIMIT 1) p
LEFT JOIN mqlayer.consumer_group g ON g.group_id = given.group_id
LEFT JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer.breaker b ON b.group_id = g.group_id
CROSS JOIN LATERAL (
    SELECT count(*) AS partitions, sum(a.xmin::text::bigint) AS changes, sum(pp.xmin::text::bigint) AS pauses
    FROM mqlayer.assignment a LEFT JOIN mqlayer.partition_pause pp USING (group_id, partition_id)
    WHERE a.group_id = given.group_id AND a.member_id = given.member_id) AS own;

-- name: member_beat
-- Extend a member's lease by the database's clock, unless it ran out; say what it may have to read.
WITH given AS MATERIALIZED (SELECT %(group_id)s::bigint AS group_id, %(member_id)s::text AS member_id), beat AS (
    UPDATE mqlayer.member SET lease_until = now() + make_interval(secs => %(lease_s)s), acts_on = %(acts_on)s
    WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND session = %(session)s AND lease_until >= now()
    RETURNING member_id
)
SELECT (SELECT count(*) FROM beat) AS known, {state_of_beat};

-- name: members_beat
-- The same for several members of a process, in their order. The planner does not see the arrays, or it would plan each
-- call anew, which costs more than the call.
WITH given AS MATERIALIZED (
    SELECT * FROM unnest((SELECT %(group_ids)s::bigint[]), (SELECT %(member_ids)s::text[]), (SELECT %(sessions)s::bigint[]),
                         (SELECT %(lease_s)s::float8[]), (SELECT %(acts_on)s::int[]))
        WITH ORDINALITY AS one (group_id, member_id, session, lease_s, acts_on, number)
), beat AS (
    UPDATE mqlayer.member m SET lease_until = now() + make_interval(secs => given.lease_s), acts_on = given.acts_on
    FROM given
    WHERE m.group_id = given.group_id AND m.member_id = given.member_id AND m.session = given.session
      AND m.lease_until >= now()
    RETURNING m.session
)
SELECT (SELECT count(*) FROM beat WHERE beat.session = given.session) AS known, {state_of_beat}
ORDER BY given.number;

-- name: group_unbalanced
-- Whether a group needs a rebalance: a lease ran out, a partition has no owner, or partitions came or went. Few partitions
-- have no owner, so whether the group may consume them is asked of these only.
WITH free AS MATERIALIZED (
    SELECT p.partition_id FROM mqlayer.consumer_group g
    JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
    LEFT JOIN mqlayer.assignment a ON a.group_id = %(group_id)s AND a.partition_id = p.partition_id
    WHERE g.group_id = %(group_id)s AND g.mode = 'exclusive' AND a.member_id IS NULL
)
SELECT EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = %(group_id)s AND m.member_id <> %(member_id)s
               AND m.lease_until < now() AND m.lease_until > '-infinity')
       OR EXISTS (SELECT FROM free JOIN mqlayer.readable r ON r.group_id = %(group_id)s AND r.partition_id = free.partition_id
                  WHERE EXISTS (
                      SELECT FROM mqlayer.member s
                      WHERE s.group_id = r.group_id AND s.lease_until >= now() AND NOT s.leaving
                        AND coalesce(s.deployment = r.deployment, true))) AS unbalanced;

-- name: members_counted
-- How many members of a group live, by a thousand at most.
SELECT count(*) FROM (
    SELECT FROM mqlayer.member m WHERE m.group_id = %(group_id)s AND m.lease_until > '-infinity' LIMIT 1000) AS living;

-- name: member_session
-- The newest session of a member id. Asked for by itself: the heartbeat's statement may have begun before that one joined.
SELECT session FROM mqlayer.member WHERE group_id = %(group_id)s AND member_id = %(member_id)s;

-- name: groups_unbalanced
-- Live groups that need a rebalance and may have nobody to ask for it: a lease ran out, or what the group may consume
-- has an owner that is gone, or has none although a member could take it. The condition of group_unbalanced, for all
-- groups at once; a group without members is left alone, or every scan would take its lock for nothing. Where all leases ran
-- out it may be the database that was away: for a while the members may come back, and nobody else would take over.
SELECT g.group_id FROM mqlayer.consumer_group g
WHERE g.state = 'live'
  AND (EXISTS (SELECT FROM mqlayer.member m
               WHERE m.group_id = g.group_id AND m.lease_until < now() AND m.lease_until > '-infinity'
                 AND (m.lease_until < now() - make_interval(secs => %(alone_s)s) OR EXISTS (
                     SELECT FROM mqlayer.member l WHERE l.group_id = g.group_id AND l.lease_until >= now())))
       -- An instance of which nobody noted since when it is away.
       OR g.instance IS NOT NULL AND g.absent_since IS NULL
          AND NOT EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until > '-infinity')
       OR EXISTS (SELECT FROM mqlayer.readable r
                  LEFT JOIN mqlayer.assignment a ON a.group_id = r.group_id AND a.partition_id = r.partition_id
                  LEFT JOIN mqlayer.member m ON m.group_id = a.group_id AND m.member_id = a.member_id
                  WHERE r.group_id = g.group_id AND g.mode = 'exclusive'
                    AND (m.lease_until = '-infinity'
                         OR a.member_id IS NULL
                            AND EXISTS (SELECT FROM mqlayer.member s
                                        WHERE s.group_id = g.group_id AND s.lease_until >= now() AND NOT s.leaving
                                          AND coalesce(s.deployment = r.deployment, true)))))
ORDER BY g.group_id;

-- name: member_assignments
-- What a member holds: partition, node, epoch, start, whether it shall release it, and whether its stream rests for a
-- replay. Nothing for an earlier session: an old process must not learn the epochs of the one that took its id.
SELECT p.partition_id, p.node_id, p.lp_from, p.lp_to, a.epoch, coalesce(s.start_offset, 1) AS start_offset,
       a.target IS DISTINCT FROM a.member_id OR t.paused_at IS NOT NULL OR EXISTS (
           SELECT FROM mqlayer.partition_pause pp
           WHERE pp.group_id = a.group_id AND pp.partition_id = a.partition_id) AS release, coalesce(e.cut, false) AS cut, g.seek, g.replay,
       EXISTS (SELECT FROM mqlayer.redrive d WHERE d.group_id = g.group_id AND d.state = 'running' AND d.newer = 'wait'
               AND d.name IS NULL) AS resting,
       t.archived, t.message_ttl_s, t.expired, (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms,
       g.rate_limit, g.rate_burst, CASE WHEN g.rate_limit IS NOT NULL OR g.class_rate IS NOT NULL THEN (
           SELECT count(*) FROM mqlayer.readable r WHERE r.group_id = %(group_id)s) END::int AS share_count,
       b.state, extract(epoch FROM clock_timestamp() - b.changed_at)::float8,
       extract(epoch FROM b.probe_at - clock_timestamp())::float8, b.state = 'probing' AND b.probe_session = %(session)s,
       CASE WHEN b.state = 'probing' THEN NOT EXISTS (
           SELECT FROM mqlayer.member pm
           WHERE pm.group_id = g.group_id AND pm.session = b.probe_session AND pm.lease_until >= now()) ELSE false END,
       b.cause, CASE WHEN g.breaker_share IS NOT NULL THEN EXISTS (
           SELECT FROM mqlayer.member sm
           WHERE sm.group_id = g.group_id AND sm.failing_keys > 0 AND sm.member_id <> %(member_id)s
             AND sm.reported_at > now() - make_interval(secs => g.breaker_window_s)) ELSE false END,
       g.tag_filter, g.parking, g.allocation, g.backoff_s, g.backoff_jitter, g.attempt_limit, g.policy,
       g.non_retryable_errors, g.retryable_errors, g.time_limit_s, g.max_time_limit_s, g.parked_keys_limit, g.parked_messages_limit,
       g.parked_bytes_limit, g.key_messages_limit, g.key_bytes_limit, g.breaker_share, g.breaker_keys, g.breaker_window_s, g.breaker_errors,
       g.key_class, g.class_concurrency, g.class_rate
FROM mqlayer.consumer_group g
JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer.breaker b USING (group_id)
LEFT JOIN mqlayer.member m ON m.group_id = g.group_id AND m.member_id = %(member_id)s AND m.session = %(session)s
LEFT JOIN mqlayer.assignment a ON a.group_id = g.group_id AND a.member_id = m.member_id
LEFT JOIN mqlayer.partition p ON p.partition_id = a.partition_id AND p.state <> 'deleted'
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = a.partition_id
LEFT JOIN mqlayer.seal e ON e.partition_id = a.partition_id
WHERE g.group_id = %(group_id)s ORDER BY a.partition_id;

-- name: member_expire
-- Note for good that leases ran out, so that a heartbeat on its way can't bring one back.
UPDATE mqlayer.member SET lease_until = '-infinity'
WHERE group_id = %(group_id)s AND lease_until < now() AND lease_until > '-infinity';

-- name: member_live
-- Members whose lease was not noted as run out.
SELECT member_id, leaving, deployment, zone FROM mqlayer.member
WHERE group_id = %(group_id)s AND lease_until > '-infinity' ORDER BY member_id;

-- name: member_evict
-- End a member's session by an operator's word: its process is refused, what it holds is free. The new session counts as
-- joined now: members_forget must not drop what tells the process so, or it would take itself for one that may join again.
UPDATE mqlayer.member
SET session = nextval('mqlayer.member_session'), joined_at = now(), leaving = true, lease_until = '-infinity'
WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND lease_until > '-infinity' RETURNING member_id;

-- name: member_leaving
-- A member wants to give its partitions away, and lives until it has. Nothing where its lease ran out already.
UPDATE mqlayer.member SET leaving = true
WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND session = %(session)s AND lease_until >= now();

-- name: member_dead
-- Who waited for a member's process saw it end: nothing where this session has ended, or another one has begun.
UPDATE mqlayer.member SET lease_until = '-infinity'
WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND session = %(session)s AND lease_until > '-infinity';

-- name: members_forget
-- Forget members that are gone, joined long ago and own nothing; all of a group that is retired.
SELECT mqlayer.members_forget_v1(%(group_id)s);

-- name: member_leave
-- A member is gone by its own word.
UPDATE mqlayer.member SET leaving = true, lease_until = '-infinity'
WHERE group_id = %(group_id)s AND member_id = %(member_id)s AND session = %(session)s;

-- name: assignment_free_unreadable_of_gone
-- Nobody consumes a partition that is deleted, nor one that the group must not consume now and whose owner is gone. The
-- group is named once more within, or what all groups of all topics may consume would be gone through.
UPDATE mqlayer.assignment a SET member_id = NULL, target = NULL, changed_at = now()
FROM mqlayer.partition p, mqlayer.member m
WHERE p.partition_id = a.partition_id AND m.group_id = a.group_id AND m.member_id = a.member_id
  AND a.group_id = %(group_id)s
  AND (p.state = 'deleted' OR m.lease_until = '-infinity' AND NOT EXISTS (
           SELECT FROM mqlayer.readable r WHERE r.group_id = %(group_id)s AND r.partition_id = a.partition_id));

-- name: assignment_list
-- Who owns what of all that a group may consume, and who shall; what is published there by the second; the deployment
-- whose members may have it; and its zone.
SELECT r.partition_id, a.member_id, a.epoch, a.target, coalesce(p.per_s, 0) AS per_s, r.deployment,
       n.zone
FROM mqlayer.readable r
LEFT JOIN mqlayer.assignment a ON a.group_id = r.group_id AND a.partition_id = r.partition_id
LEFT JOIN mqlayer.partition_rate p ON p.partition_id = r.partition_id
LEFT JOIN mqlayer.partition o ON o.partition_id = r.partition_id
LEFT JOIN mqlayer.node n ON n.node_id = o.node_id
WHERE r.group_id = %(group_id)s ORDER BY r.partition_id;

-- name: rates_wanted
-- Partitions of topics with a group that is balanced by rate; and what was measured there last.
SELECT p.partition_id, p.node_id FROM mqlayer.partition p
WHERE p.state IN ('open', 'sealed')
  AND EXISTS (SELECT FROM mqlayer.consumer_group g
              WHERE g.topic_id = p.topic_id AND g.state = 'live' AND g.balance = 'rate')
ORDER BY p.partition_id;

-- name: rate_put
-- Note where partitions end now; the rate is half of what it was and half of what it is since. By this database's clock.
INSERT INTO mqlayer.partition_rate AS r (partition_id, next_offset, per_s, measured_at)
SELECT partition_id, next_offset, 0, clock_timestamp()
FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[]) AS measured(partition_id, next_offset)
ON CONFLICT (partition_id) DO UPDATE
SET next_offset = excluded.next_offset, measured_at = excluded.measured_at,
    per_s = r.per_s / 2 + greatest(0, excluded.next_offset - r.next_offset) / 2.0
            / greatest(0.001, extract(epoch FROM excluded.measured_at - r.measured_at));

-- name: groups_by_rate
-- Living groups that are balanced by rate, and have members to balance.
SELECT g.group_id FROM mqlayer.consumer_group g
WHERE g.state = 'live' AND g.balance = 'rate' AND g.paused_at IS NULL
  AND EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = g.group_id AND m.lease_until >= now())
ORDER BY g.group_id;

-- name: assignments_put
-- Give partitions to members, each under a new epoch.
INSERT INTO mqlayer.assignment AS a (group_id, partition_id, member_id, target, epoch)
SELECT %(group_id)s, given.partition_id, given.member_id, given.member_id, nextval('mqlayer.epoch')
FROM unnest(%(partitions)s::int[], %(members)s::text[]) AS given (partition_id, member_id)
ON CONFLICT (group_id, partition_id) DO UPDATE
SET member_id = excluded.member_id, target = excluded.target, changed_at = now(),
    -- Re-arming a node may have raised it while this statement waited for the row.
    epoch = CASE WHEN excluded.epoch > a.epoch THEN excluded.epoch ELSE nextval('mqlayer.epoch') END;

-- name: assignments_target
-- Ask the owners of partitions to release them for others.
UPDATE mqlayer.assignment a SET target = given.target, changed_at = now()
FROM unnest(%(partitions)s::int[], %(members)s::text[]) AS given (partition_id, target)
WHERE a.group_id = %(group_id)s AND a.partition_id = given.partition_id;

-- name: assignments_free
-- Take partitions from members that are gone; their epochs stay until the next owners'.
UPDATE mqlayer.assignment SET member_id = NULL, target = NULL, changed_at = now()
WHERE group_id = %(group_id)s AND partition_id = ANY(%(partitions)s::int[]);

-- name: assignments_pass
-- The owner gives partitions back, and each passes to the living member that the last rebalance chose; nothing of those
-- whose epoch is not in force any more, or without such a member, or that the group must not consume now.
UPDATE mqlayer.assignment a SET member_id = a.target, epoch = nextval('mqlayer.epoch'), changed_at = now()
FROM unnest(%(partitions)s::int[], %(epochs)s::bigint[]) AS given (partition_id, epoch), mqlayer.member m
WHERE a.group_id = %(group_id)s AND a.member_id = %(member_id)s AND a.target <> a.member_id
  AND a.partition_id = given.partition_id AND a.epoch = given.epoch
  AND m.group_id = a.group_id AND m.member_id = a.target AND m.lease_until >= now() AND NOT m.leaving
  AND EXISTS (SELECT FROM mqlayer.readable r WHERE r.group_id = %(group_id)s AND r.partition_id = a.partition_id
              AND coalesce(r.deployment = m.deployment, true))
RETURNING a.member_id;

-- name: assignments_release
-- The owner gives partitions back; nothing of those whose epoch is not in force any more.
UPDATE mqlayer.assignment a SET member_id = NULL, target = NULL, changed_at = now()
FROM unnest(%(partitions)s::int[], %(epochs)s::bigint[]) AS given (partition_id, epoch)
WHERE a.group_id = %(group_id)s AND a.member_id = %(member_id)s
  AND a.partition_id = given.partition_id AND a.epoch = given.epoch;

-- name: assignment_renew
-- A member joined again under its id: what it held goes on under new epochs.
UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE group_id = %(group_id)s AND member_id = %(member_id)s;

-- name: assignments_of_group_raise
-- No earlier owner of any partition of a group is served any more.
UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE group_id = %(group_id)s RETURNING partition_id, epoch;

-- name: assignment_free_unreadable
-- Nobody consumes a partition whose parents the group has not drained any more.
UPDATE mqlayer.assignment a SET member_id = NULL, target = NULL, changed_at = now()
WHERE a.group_id = %(group_id)s AND a.member_id IS NOT NULL
  AND NOT EXISTS (SELECT FROM mqlayer.readable r WHERE r.group_id = %(group_id)s AND r.partition_id = a.partition_id);

-- name: assignment_epoch_renew
-- The owner's present epoch is refused by the node: give it a higher one.
UPDATE mqlayer.assignment a SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE a.group_id = %(group_id)s AND a.partition_id = %(partition_id)s AND a.member_id = %(member_id)s
  AND a.epoch = %(epoch)s
  AND EXISTS (SELECT FROM mqlayer.member m WHERE m.group_id = a.group_id AND m.member_id = a.member_id
              AND m.session = %(session)s);

-- name: allocation_raise
-- Note that assignments of a group changed, and let its members know.
WITH raised AS (
    UPDATE mqlayer.consumer_group SET allocation = allocation + 1 WHERE group_id = %(group_id)s RETURNING group_id
)
SELECT pg_notify('mqlayer_group', group_id::text) FROM raised;

-- name: allocation_raise_for
-- Note that assignments of a group changed, and let only the members know that these payloads name: who loses or gains.
WITH raised AS (
    UPDATE mqlayer.consumer_group SET allocation = allocation + 1 WHERE group_id = %(group_id)s RETURNING group_id
)
SELECT pg_notify('mqlayer_group', told.payload) FROM raised CROSS JOIN unnest(%(payloads)s::text[]) AS told (payload);

-- name: pop_partitions
-- The partitions of a group with ordered pop, or a shared one, under which epoch they are given out, and whether they are
-- now to a deployment.
SELECT p.partition_id, p.node_id, a.epoch, coalesce(s.start_offset, 1) AS start_offset, g.seek, g.replay,
       coalesce(e.cut, false) AS cut,
       r.partition_id IS NOT NULL AND coalesce(r.deployment = %(deployment)s, true) AS readable, t.archived, g.rate_limit, g.rate_burst,
       CASE WHEN g.rate_limit IS NOT NULL OR g.class_rate IS NOT NULL THEN (count(r.partition_id) OVER ())::int END AS share_count,
       g.policy, g.attempt_limit, g.tag_filter, g.key_class, g.class_concurrency, g.class_rate, p.lp_from, p.lp_to,
       EXISTS (SELECT FROM mqlayer.parked_key k
               WHERE k.group_id = g.group_id AND k.lp >= p.lp_from AND k.lp < p.lp_to) AS parked,
       date_part('epoch', parked.due_at - clock_timestamp()) AS parked_due_in_s,
       t.message_ttl_s, t.expired, (extract(epoch FROM clock_timestamp()) * 1000)::bigint AS now_ms
FROM mqlayer.consumer_group g
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
LEFT JOIN LATERAL (
    SELECT k.due_at FROM mqlayer.parked_key k
    WHERE k.group_id = g.group_id AND k.lp >= p.lp_from AND k.lp < p.lp_to AND k.due_at IS NOT NULL AND k.paused_at IS NULL
    ORDER BY k.due_at LIMIT 1) AS parked ON true
LEFT JOIN mqlayer.assignment a ON a.group_id = g.group_id AND a.partition_id = p.partition_id
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
LEFT JOIN mqlayer.seal e ON e.partition_id = p.partition_id
LEFT JOIN mqlayer.readable r ON r.group_id = g.group_id AND r.partition_id = p.partition_id
WHERE g.group_id = %(group_id)s ORDER BY p.partition_id;

-- name: pop_epochs_put
-- Give what a group with ordered pop may consume an epoch, where it has none yet: nobody owns it, but arming its node
-- and seeks raise it as any other.
INSERT INTO mqlayer.assignment (group_id, partition_id, epoch)
SELECT r.group_id, r.partition_id, nextval('mqlayer.epoch') FROM mqlayer.readable r
WHERE r.group_id = %(group_id)s ON CONFLICT DO NOTHING;

-- name: pop_epoch_renew
-- The node refuses the epoch in force: give out a higher one, unless somebody did.
UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
WHERE group_id = %(group_id)s AND partition_id = %(partition_id)s AND epoch = %(epoch)s AND member_id IS NULL;

-- name: group_deploy
-- Say which deployment consumes a group, and which one below an LP.
UPDATE mqlayer.consumer_group
SET deployment = %(deployment)s, canary = %(canary)s, canary_lps = %(canary_lps)s,
    previous_deployment = %(previous_deployment)s, fallback = %(fallback)s
WHERE group_id = %(group_id)s AND state = 'live' RETURNING group_id;

-- name: deployment_partitions
-- What a group may consume, by whose deployment, and which deployment owns it now.
SELECT r.partition_id, p.lp_from, p.lp_to, r.deployment, a.member_id, m.deployment
FROM mqlayer.readable r JOIN mqlayer.partition p USING (partition_id)
LEFT JOIN mqlayer.assignment a ON a.group_id = r.group_id AND a.partition_id = r.partition_id
LEFT JOIN mqlayer.member m ON m.group_id = a.group_id AND m.member_id = a.member_id
WHERE r.group_id = %(group_id)s ORDER BY p.lp_from, p.partition_id;
