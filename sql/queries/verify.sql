-- name: verify_topics
-- The topics to look at: one, or all.
SELECT topic_id, name FROM mqlayer.topic
WHERE deleted_at IS NULL AND (%(topic)s::text IS NULL OR name = %(topic)s) ORDER BY name;

-- name: verify_partitions
-- What a topic's partitions have to be: place, range, state, the recorded seal, and the marks that their LPs came with.
SELECT p.partition_id, p.node_id, n.armed_run_id, n.lost_at IS NOT NULL AS given_up, p.lp_from, p.lp_to, p.state,
       EXISTS (SELECT FROM mqlayer.route_change c
               WHERE c.change_id IN (p.created_by_change, p.ended_by_change) AND c.state IN ('planned', 'sealing', 'sealed')) AS changing,
       coalesce(s.seal_id::text, '') AS seal_id, coalesce(s.next_offset, 0) AS seal_next, coalesce(s.marks, '{}') AS seal_marks,
       coalesce(s.unreachable, false) AS seal_away, coalesce(s.cut, false) AS seal_cut,
       (SELECT coalesce(jsonb_object_agg(m.key, m.value), '{}')
        FROM mqlayer.partition q JOIN mqlayer.seal t ON t.partition_id = q.partition_id, jsonb_each(t.marks) AS m
        WHERE q.ended_by_change = p.created_by_change AND split_part(m.key, ':', 2)::int >= p.lp_from
          AND split_part(m.key, ':', 2)::int < p.lp_to) AS came_with
FROM mqlayer.partition p
JOIN mqlayer.node n USING (node_id)
LEFT JOIN mqlayer.seal s ON s.partition_id = p.partition_id
WHERE p.topic_id = %(topic_id)s AND p.state <> 'deleted' ORDER BY p.partition_id;

-- name: verify_groups
-- Where groups begin in each partition, whether they are through with it, and whether its node was armed again since. A
-- drain that commits beside an arming may be dated behind it, by less than a second.
SELECT p.partition_id, g.group_id, g.name, coalesce(gs.start_offset, 1) AS start_offset, g.seek, d.group_id IS NOT NULL AS drained,
       coalesce(d.drained_at < n.armed_at + interval '1 second', false) AS armed_since
FROM mqlayer.consumer_group g
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state <> 'deleted'
JOIN mqlayer.node n USING (node_id)
LEFT JOIN mqlayer.group_start gs ON gs.group_id = g.group_id AND gs.partition_id = p.partition_id
LEFT JOIN mqlayer.drained d ON d.group_id = g.group_id AND d.partition_id = p.partition_id
WHERE g.topic_id = %(topic_id)s AND g.state = 'live' AND g.mode <> 'broadcast' ORDER BY p.partition_id, g.group_id;

-- name: verify_epoch
-- The highest epoch that was ever given out.
SELECT last_value FROM mqlayer.epoch;

-- name: verify_relayed
-- How far LPs of a topic are recorded to be in Redis.
SELECT lp, seq FROM mqlayer_app.relayed WHERE topic_id = %(topic_id)s;

-- name: verify_counters
-- How far LPs of a topic are numbered, how far they are recorded to be in Redis, and how many rows the outbox has behind
-- that.
SELECT c.lp, c.seq, coalesce(r.seq, 0) AS relayed,
       (SELECT count(*) FROM mqlayer_app.outbox o
        WHERE o.topic_id = c.topic_id AND o.lp = c.lp AND o.seq > coalesce(r.seq, 0)) AS waiting
FROM mqlayer_app.counter c LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
WHERE c.topic_id = %(topic_id)s AND c.seq > 0 ORDER BY c.lp;

-- name: verify_kept
-- How many rows of an LP the outbox still has, behind one seq and up to another.
SELECT count(*) FROM mqlayer_app.outbox
WHERE topic_id = %(topic_id)s AND lp = %(lp)s AND seq > %(after)s AND seq <= %(upto)s;

-- name: verify_archive_marks
-- How far sources are in the archive, per LP.
SELECT source || ':' || lp AS name, last_seq FROM mqlayer_archive.mark WHERE topic_id = %(topic_id)s;

-- name: verify_archive_progress
-- The first offset of each partition that is not in the archive.
SELECT partition_id, upto_offset FROM mqlayer_archive.progress WHERE topic_id = %(topic_id)s;

-- name: verify_archive_floor
-- The first offset that is not archived of each partition that waits for the archive with being trimmed.
SELECT g.partition_id, g.upto_offset FROM mqlayer_archive.progress g JOIN mqlayer.topic t USING (topic_id)
WHERE g.topic_id = %(topic_id)s AND t.archived AND NOT g.complete;

-- name: verify_archive_chains
-- Stretches of the archive that do not have as many records as seqs.
SELECT m.source || ':' || m.lp AS name, m.first_seq, m.last_seq, count(r.seq) AS records
FROM mqlayer_archive.mark m
LEFT JOIN mqlayer_archive.record r ON r.topic_id = m.topic_id AND r.source = m.source AND r.lp = m.lp
    AND r.seq >= m.first_seq AND r.seq <= m.last_seq
WHERE m.topic_id = %(topic_id)s
GROUP BY m.source, m.lp, m.first_seq, m.last_seq
HAVING count(r.seq) <> m.last_seq - m.first_seq + 1
ORDER BY m.source, m.lp;
