-- part: groups_known
-- The groups in the inbox, each by one probe of its index.
(SELECT group_id FROM mqlayer_app.inbox ORDER BY group_id LIMIT 1)
UNION ALL
SELECT (SELECT i.group_id FROM mqlayer_app.inbox i WHERE i.group_id > k.group_id ORDER BY i.group_id LIMIT 1)
FROM known k WHERE k.group_id IS NOT NULL;

-- name: inbox_put
-- Note in the effect's own transaction that a message has its effect.
SELECT mqlayer_app.inbox_put_v1(%(group_id)s, %(source)s, %(lp)s::smallint, %(seq)s, %(name)s, %(seek)s, %(replay)s);

-- name: inbox_stats
-- What the inbox remembers of each group.
WITH RECURSIVE known AS ({groups_known})
SELECT k.group_id,
       (SELECT count(*) FROM (SELECT FROM mqlayer_app.inbox i WHERE i.group_id = k.group_id LIMIT %(limit)s) AS counted),
       (SELECT min(i.kept_at) FROM mqlayer_app.inbox i WHERE i.group_id = k.group_id),
       (SELECT max(i.kept_at) FROM mqlayer_app.inbox i WHERE i.group_id = k.group_id)
FROM known k WHERE k.group_id IS NOT NULL ORDER BY k.group_id;

-- name: inbox_find
-- When what is noted under an id was applied.
SELECT group_id, id, source_id, lp, seq, applied_at FROM mqlayer_app.inbox
WHERE group_id = %(group_id)s AND id = %(id)s;

-- name: inbox_groups
-- Groups of which the inbox has something older than the horizon.
WITH RECURSIVE known AS ({groups_known})
SELECT k.group_id FROM known k
WHERE EXISTS (SELECT FROM mqlayer_app.inbox i WHERE i.group_id = k.group_id
                AND i.kept_at < now() - make_interval(secs => %(horizon_s)s));

-- name: inbox_positions
-- Where groups have something to settle, as far as Postgres knows: partitions that they have not drained.
SELECT p.node_id, p.partition_id, g.group_id, coalesce(s.start_offset, 1) AS start_offset, g.seek
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
LEFT JOIN mqlayer.drained d ON d.group_id = g.group_id AND d.partition_id = p.partition_id
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
WHERE g.group_id = ANY(%(group_ids)s::bigint[]) AND g.state <> 'retired' AND d.group_id IS NULL;

-- name: inbox_old
-- What the inbox has of a group from before the horizon, and from before its oldest unsettled message came.
SELECT id, source_id, lp, seq FROM mqlayer_app.inbox
WHERE group_id = %(group_id)s AND kept_at < now() - make_interval(secs => %(horizon_s)s)
  AND kept_at < coalesce(to_timestamp(%(floor_s)s::float8), 'infinity')
ORDER BY kept_at LIMIT %(limit)s;

-- name: inbox_wanted
-- Which of these messages wait in Postgres, or are dead and can be sent again.
SELECT w.source, w.lp, w.seq
FROM unnest(%(sources)s::bigint[], %(lps)s::smallint[], %(seqs)s::bigint[]) AS w(source, lp, seq)
WHERE EXISTS (SELECT FROM mqlayer.parked_message m
              WHERE m.group_id = %(group_id)s AND m.lp = w.lp AND m.source = w.source AND m.seq = w.seq)
   OR EXISTS (SELECT FROM mqlayer.dead_message d
              WHERE d.group_id = %(group_id)s AND d.lp = w.lp AND d.source = w.source AND d.seq = w.seq
                AND d.body IS NOT NULL AND d.redriven_at IS NULL);

-- name: inbox_keep
-- Keep these for another horizon.
UPDATE mqlayer_app.inbox SET kept_at = now() WHERE group_id = %(group_id)s AND id = ANY(%(ids)s::text[]);

-- name: inbox_forget
-- Forget these, but for what was noted again since it was looked at.
DELETE FROM mqlayer_app.inbox
WHERE group_id = %(group_id)s AND id = ANY(%(ids)s::text[]) AND kept_at < now() - make_interval(secs => %(horizon_s)s);

-- name: version_take
-- Take an event of an entity in the effect's own transaction.
SELECT answer, current, alarm, missing_s, held, versions, bodies, headers, origins
FROM mqlayer_app.version_take_v1(
    %(name)s, %(entity)s, %(version)s, %(body)s::bytea, %(headers)s, %(origin)s, %(first)s, %(messages)s, %(bytes)s,
    %(all_messages)s, %(all_bytes)s, %(gap_s)s);

-- name: version_released
-- Take what an operator released of one entity.
SELECT entity, versions, bodies, headers, origins FROM mqlayer_app.version_released_v1(%(name)s, %(gap_s)s);

-- name: version_set
-- Say at which version an entity is.
SELECT mqlayer_app.version_set_v1(%(name)s, %(entity)s, %(version)s::bigint, %(drop)s);

-- name: version_alarms
-- Versions that have been missing for too long; the next alarm for each is due in an hour at the earliest.
WITH due AS MATERIALIZED (
    SELECT name, entity FROM mqlayer_app.entity_version WHERE alarm_at <= clock_timestamp()
    ORDER BY alarm_at LIMIT %(limit)s FOR NO KEY UPDATE SKIP LOCKED
)
UPDATE mqlayer_app.entity_version e
SET alarm_at = clock_timestamp() + make_interval(secs => greatest(e.gap_s, 3600))
FROM due
WHERE e.name = due.name AND e.entity = due.entity
RETURNING e.name, e.entity, e.version + 1, e.held_messages, date_part('epoch', clock_timestamp() - e.missing_since);

-- name: version_gaps
-- Entities of which something is held, the one that waits longest first.
SELECT e.name, e.entity, e.version + 1 AS missing, h.first_held, e.held_messages, e.held_bytes, e.missing_since,
       date_part('epoch', clock_timestamp() - e.missing_since) AS missing_s,
       e.missing_since + make_interval(secs => e.gap_s) <= clock_timestamp() AS overdue, e.released
FROM mqlayer_app.entity_version e
CROSS JOIN LATERAL (SELECT min(v.version) AS first_held FROM mqlayer_app.held_version_fact v
                    WHERE v.name = e.name AND v.entity = e.entity) AS h
WHERE e.alarm_at IS NOT NULL AND (%(name)s::text IS NULL OR e.name = %(name)s)
ORDER BY e.missing_since LIMIT %(limit)s;

-- name: held_versions
-- What is held of an entity.
SELECT version, origin, size, held_at FROM mqlayer_app.held_version_fact
WHERE name = %(name)s AND entity = %(entity)s ORDER BY version;

-- name: effects_fence
-- What the fence remembers in a range of LPs: the last applied seq of each key, and messages that were applied alone.
SELECT f.group_id,
       CASE WHEN f.source_id > 0 THEN 'key' WHEN f.key = f.seq::text THEN 'message' ELSE 'replay' END AS kind,
       abs(f.source_id) AS source, f.lp::int AS lp, CASE WHEN f.source_id > 0 THEN f.key END AS key, f.seq,
       f.replay AS seek, now() AS read_at
FROM mqlayer_app.fence_applied f WHERE f.lp >= %(lp_from)s::smallint AND f.lp < %(lp_to)s::smallint;

-- name: effects_inbox
-- What the inbox remembers in a range of LPs. A name stands for every message that has it.
SELECT i.group_id,
       CASE WHEN i.id ~ '^@' THEN 'replay' WHEN i.id ~ '^=' THEN 'name' ELSE 'inbox' END AS kind,
       i.source_id AS source, i.lp::int AS lp, NULL::text AS key, i.seq, i.replay AS seek, now() AS read_at
FROM mqlayer_app.inbox i WHERE i.lp >= %(lp_from)s::smallint AND i.lp < %(lp_to)s::smallint;
