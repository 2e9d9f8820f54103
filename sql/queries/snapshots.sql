-- part: record_columns
-- As they are stored: readers bring key, headers and numbers into the declared form.
r.version, r.partition_id AS partition, r.log_offset AS "offset", r.source, r.lp, r.seq, r.published_at, r.archived_at,
r.key, r.tags, r.headers, r.body, r.batch;

-- part: outcome_columns
g.name AS "group", o.partition_id AS partition, o.first_offset, o.last_offset, o.outcome, o.attempts, o.delivered_at,
o.settled_at, o.actor, o.reason, o.epoch, o.position;

-- part: topic_name
-- The name under which a topic was archived: a deleted one is called NAME@ID since, and what is read of it stays as it was.
split_part(t.name, '@', 1);

-- part: snapshot_end
-- The end of the last day that began before the snapshot.
(SELECT coalesce((max(d.day) + 1)::timestamp AT TIME ZONE 'UTC', 'infinity')
 FROM mqlayer_archive.snapshot_topic p JOIN mqlayer_archive.day d USING (topic_id)
 WHERE p.snapshot_id = %(snapshot_id)s::int AND d.first_batch <= p.batch);


-- name: snapshot_topics_lock
-- Hold topics as they are in the archive, in the order in which everybody locks them: no batch is added and nothing is
-- dropped meanwhile. What they hold is read afterwards, or it would be of the time before the wait.
SELECT a.topic_id FROM mqlayer_archive.topic a JOIN mqlayer.topic t USING (topic_id)
WHERE t.version IS NOT NULL AND (%(topics)s::text[] IS NULL AND t.deleted_at IS NULL OR t.name = ANY (%(topics)s::text[]))
ORDER BY a.topic_id FOR SHARE OF a;

-- name: snapshot_topics
-- Topics by name, and whether the archive has them.
SELECT t.topic_id, t.name, a.topic_id IS NOT NULL, t.version IS NOT NULL
FROM mqlayer.topic t LEFT JOIN mqlayer_archive.topic a USING (topic_id)
WHERE %(topics)s::text[] IS NULL AND t.deleted_at IS NULL OR t.name = ANY (%(topics)s::text[])
ORDER BY t.topic_id;

-- name: snapshot_insert
-- Make a snapshot; nothing where the name is taken.
INSERT INTO mqlayer_archive.snapshot (name, upto_at) VALUES (%(name)s, %(upto_at)s)
ON CONFLICT (name) DO NOTHING
RETURNING snapshot_id;

-- name: snapshot_cut_all
-- Cut held topics at their marks.
INSERT INTO mqlayer_archive.cut (snapshot_id, topic_id, source, lp, first_seq, last_seq)
SELECT %(snapshot_id)s, m.topic_id, m.source, m.lp, m.first_seq, m.last_seq
FROM mqlayer_archive.mark m
WHERE m.topic_id = ANY (%(topic_ids)s) AND m.first_seq <= m.last_seq;

-- name: snapshot_cut_until
-- Cut held topics before the first record of each (source, LP) that was published after a time.
INSERT INTO mqlayer_archive.cut (snapshot_id, topic_id, source, lp, first_seq, last_seq)
SELECT %(snapshot_id)s, m.topic_id, m.source, m.lp, m.first_seq, least(m.last_seq, late.seq - 1)
FROM mqlayer_archive.mark m
LEFT JOIN (SELECT r.topic_id, r.source, r.lp, min(r.seq) AS seq
           FROM mqlayer_archive.record r
           WHERE r.topic_id = ANY (%(topic_ids)s) AND r.published_at > %(upto_at)s
           GROUP BY r.topic_id, r.source, r.lp) late USING (topic_id, source, lp)
WHERE m.topic_id = ANY (%(topic_ids)s) AND m.first_seq <= least(m.last_seq, late.seq - 1);

-- name: snapshot_topic_insert
-- Note the batch, the route version and the number of records of each held topic, once it is cut; and whether that is every
-- record that was archived of it in the days that are kept.
INSERT INTO mqlayer_archive.snapshot_topic (snapshot_id, topic_id, batch, version, records, whole)
SELECT %(snapshot_id)s, a.topic_id, a.batch, t.version, c.records,
       c.records = (SELECT sum(d.records) FROM mqlayer_archive.day d WHERE d.topic_id = a.topic_id)
FROM mqlayer_archive.topic a JOIN mqlayer.topic t USING (topic_id)
CROSS JOIN LATERAL (SELECT coalesce(sum(i.last_seq - i.first_seq + 1), 0) AS records FROM mqlayer_archive.cut i
                    WHERE i.snapshot_id = %(snapshot_id)s AND i.topic_id = a.topic_id) c
WHERE a.topic_id = ANY (%(topic_ids)s);

-- name: snapshot_find
-- One snapshot.
SELECT s.snapshot_id, s.name, s.created_at, s.upto_at FROM mqlayer_archive.snapshot s WHERE s.name = %(name)s;

-- name: snapshot_list
-- All snapshots, oldest first.
SELECT s.snapshot_id, s.name, s.created_at, s.upto_at FROM mqlayer_archive.snapshot s ORDER BY s.snapshot_id;

-- name: snapshot_topic_list
-- What snapshots hold of each topic.
SELECT p.snapshot_id, {topic_name}, p.batch, p.version, p.records, count(c.lp)::int
FROM mqlayer_archive.snapshot_topic p
JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer_archive.cut c USING (snapshot_id, topic_id)
WHERE p.snapshot_id = ANY (%(snapshot_ids)s)
GROUP BY p.snapshot_id, p.topic_id, t.name ORDER BY p.snapshot_id, t.name;

-- name: snapshot_cut
-- The cut of a snapshot.
SELECT {topic_name}, c.source, c.lp::int, c.first_seq, c.last_seq
FROM mqlayer_archive.cut c JOIN mqlayer.topic t USING (topic_id)
WHERE c.snapshot_id = %(snapshot_id)s ORDER BY t.name, c.source, c.lp;

-- name: snapshot_ranges
-- The cut of a snapshot, by topic id.
SELECT c.topic_id, c.source, c.lp::int, c.first_seq, c.last_seq FROM mqlayer_archive.cut c WHERE c.snapshot_id = %(snapshot_id)s;

-- name: snapshot_schemas
-- The versions of the schemas of a snapshot's topics, each topic's oldest first.
SELECT {topic_name}, s.version, s.mode, s.schema
FROM mqlayer_archive.snapshot_topic p JOIN mqlayer.topic t USING (topic_id) JOIN mqlayer.topic_schema s USING (topic_id)
WHERE p.snapshot_id = %(snapshot_id)s ORDER BY t.name, s.version;

-- name: snapshot_groups
-- The groups of a snapshot's topics.
SELECT g.group_id, {topic_name}, g.name
FROM mqlayer_archive.snapshot_topic p JOIN mqlayer.topic t USING (topic_id) JOIN mqlayer.consumer_group g USING (topic_id)
WHERE p.snapshot_id = %(snapshot_id)s ORDER BY g.group_id;

-- name: snapshot_weights
-- How many records a snapshot holds of each LP.
SELECT c.lp::int, sum(c.last_seq - c.first_seq + 1)::bigint
FROM mqlayer_archive.cut c WHERE c.snapshot_id = %(snapshot_id)s GROUP BY c.lp ORDER BY c.lp;

-- name: snapshot_width
-- How long the records of a snapshot are, in bytes, going by a few of each topic.
SELECT coalesce(avg(r.size), 0)::int
FROM mqlayer_archive.snapshot_topic p
CROSS JOIN LATERAL (SELECT octet_length(i.body) + coalesce(octet_length(i.headers), 0) AS size
                    FROM mqlayer_archive.record i WHERE i.topic_id = p.topic_id LIMIT 1000) r
WHERE p.snapshot_id = %(snapshot_id)s;

-- name: snapshot_spread
-- How the records of a snapshot are spread over its batches, going by some of the archive's pages; all topics, and the last
-- batch of each, are there whatever was seen of them.
SELECT p.topic_id, p.batch AS last, r.batch, r.seen
FROM mqlayer_archive.snapshot_topic p
LEFT JOIN (SELECT i.topic_id, i.batch, count(*) AS seen
           FROM mqlayer_archive.record i TABLESAMPLE SYSTEM (%(percent)s)
           GROUP BY i.topic_id, i.batch) r ON r.topic_id = p.topic_id AND r.batch <= p.batch
WHERE p.snapshot_id = %(snapshot_id)s ORDER BY p.topic_id, r.batch;

-- name: archive_size
-- How many records the archive holds, of all topics.
SELECT coalesce(sum(records), 0)::bigint FROM mqlayer_archive.day;

-- name: snapshot_delete
-- Drop a snapshot; the archive keeps what it covered until retention comes by.
DELETE FROM mqlayer_archive.snapshot WHERE name = %(name)s;

-- name: snapshot_plan
-- Look a cut up in a table made of it, for the rest of the transaction: what statistics know of it is old.
SELECT set_config('enable_nestloop', 'off', true);

-- name: snapshot_verify
-- Where the archive does not hold a stretch of the cut as it was: each seq once.
WITH segment AS MATERIALIZED (
    SELECT {topic_name} AS name, c.topic_id, c.source, c.lp, c.first_seq, c.last_seq, p.batch
    FROM mqlayer_archive.snapshot_topic p
    JOIN mqlayer.topic t USING (topic_id)
    JOIN mqlayer_archive.cut c USING (snapshot_id, topic_id)
    WHERE p.snapshot_id = %(snapshot_id)s)
SELECT c.name, c.source, c.lp::int, c.last_seq - c.first_seq + 1 AS wanted, coalesce(f.rows, 0), coalesce(f.seqs, 0)
FROM segment c
LEFT JOIN (SELECT r.topic_id, r.source, r.lp, count(*) AS rows, count(DISTINCT r.seq) AS seqs
           FROM mqlayer_archive.record r
           JOIN segment i ON r.topic_id = i.topic_id AND r.source = i.source AND r.lp = i.lp
               AND r.seq BETWEEN i.first_seq AND i.last_seq AND r.batch <= i.batch
           GROUP BY r.topic_id, r.source, r.lp) f USING (topic_id, source, lp)
WHERE c.last_seq - c.first_seq + 1 IS DISTINCT FROM f.rows OR f.rows IS DISTINCT FROM f.seqs
ORDER BY c.name, c.source, c.lp;

-- name: snapshot_there
-- An error where a snapshot was dropped, or days of it were after their export. Asked in the transaction that reads it.
SELECT mqlayer_archive.snapshot_v2(%(snapshot_id)s::int, '{}'::jsonb);

-- name: snapshot_records
-- The records of a snapshot in a range of LPs. The cut is small and put together first, so that each record is looked up
-- once. Days that began after it are left out.
WITH segment AS MATERIALIZED (
    SELECT {topic_name} AS name, c.topic_id, c.source, c.lp, c.first_seq, c.last_seq, p.batch
    FROM mqlayer_archive.snapshot_topic p
    JOIN mqlayer.topic t USING (topic_id)
    JOIN mqlayer_archive.cut c USING (snapshot_id, topic_id)
    WHERE p.snapshot_id = %(snapshot_id)s::int)
SELECT c.name AS topic, {record_columns}, r.topic_id
FROM mqlayer_archive.record r
JOIN segment c ON r.topic_id = c.topic_id AND r.source = c.source AND r.lp = c.lp
    AND r.seq BETWEEN c.first_seq AND c.last_seq AND r.batch <= c.batch
WHERE r.lp >= %(lp_from)s::smallint AND r.lp < %(lp_to)s::smallint
  AND r.archived_at < {snapshot_end};

-- name: snapshot_records_whole
-- The same of a snapshot that is all that the archive held of its topics: its cut is what its batches hold, so nothing is
-- looked up for each record.
SELECT {topic_name} AS topic, {record_columns}, r.topic_id
FROM mqlayer_archive.snapshot_topic p
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer_archive.record r ON r.topic_id = p.topic_id AND r.batch <= p.batch
WHERE p.snapshot_id = %(snapshot_id)s::int
  AND r.archived_at < {snapshot_end};

-- name: snapshot_whole
-- Whether a snapshot is all that the archive held of its topics.
SELECT coalesce(bool_and(p.whole), false) FROM mqlayer_archive.snapshot_topic p WHERE p.snapshot_id = %(snapshot_id)s;

-- name: snapshot_outcomes
-- The outcomes of a snapshot, of partitions whose LPs begin in a range.
SELECT {topic_name} AS topic, {outcome_columns}, o.topic_id, o.batch
FROM mqlayer_archive.snapshot_topic p
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer_archive.outcome o ON o.topic_id = p.topic_id AND o.batch <= p.batch
JOIN mqlayer.consumer_group g ON g.group_id = o.group_id
JOIN mqlayer.partition n ON n.partition_id = o.partition_id
WHERE p.snapshot_id = %(snapshot_id)s::int AND n.lp_from >= %(lp_from)s::smallint AND n.lp_from < %(lp_to)s::smallint;

-- name: snapshot_lineage
-- The partitions of a snapshot's topics up to its route version, each with its parents.
SELECT {topic_name} AS topic, n.partition_id AS partition, n.lp_from, n.lp_to, f.first_version,
       nullif(f.last_version, p.version) AS last_version,
       ARRAY(SELECT o.partition_id FROM mqlayer.partition o
             WHERE o.ended_by_change = n.created_by_change AND o.lp_from < n.lp_to AND n.lp_from < o.lp_to
             ORDER BY o.partition_id) AS parents
FROM mqlayer_archive.snapshot_topic p
JOIN mqlayer.topic t USING (topic_id)
JOIN (SELECT r.topic_id, r.partition_id, s.snapshot_id, min(r.version) AS first_version, max(r.version) AS last_version
      FROM mqlayer.route r JOIN mqlayer_archive.snapshot_topic s ON s.topic_id = r.topic_id AND r.version <= s.version
      GROUP BY r.topic_id, r.partition_id, s.snapshot_id) f
    ON f.topic_id = p.topic_id AND f.snapshot_id = p.snapshot_id
JOIN mqlayer.partition n ON n.partition_id = f.partition_id
WHERE p.snapshot_id = %(snapshot_id)s::int AND n.lp_from >= %(lp_from)s::smallint AND n.lp_from < %(lp_to)s::smallint;

-- name: stream_topics
-- The last batch of topics in the archive, and the first one from which on all are kept (null: none is): of some names, or
-- all.
SELECT t.name, t.topic_id, a.batch,
       (SELECT greatest(min(d.first_batch), a.dropped_batch + 1) FROM mqlayer_archive.day d
        WHERE d.topic_id = a.topic_id AND d.last_batch > a.dropped_batch) AS kept_from
FROM mqlayer_archive.topic a JOIN mqlayer.topic t USING (topic_id)
WHERE %(topics)s::text[] IS NULL AND t.deleted_at IS NULL OR t.name = ANY (%(topics)s::text[]) ORDER BY t.name;

-- name: stream_there
-- An error where batches after one were dropped from the archive. Asked in the transaction that reads them.
SELECT mqlayer_archive.batches_v1(%(topic_id)s::int, %(after)s::bigint);

-- name: stream_records
-- The records of a topic's batches in a range of LPs, as they are stored.
SELECT {topic_name} AS topic, {record_columns}
FROM mqlayer_archive.record r
JOIN mqlayer.topic t USING (topic_id)
WHERE r.topic_id = %(topic_id)s::int AND r.batch > %(after)s::bigint AND r.batch <= %(upto)s::bigint
  AND r.lp >= %(lp_from)s::smallint AND r.lp < %(lp_to)s::smallint;

-- name: stream_outcomes
-- The outcomes of a topic's batches, of partitions whose LPs begin in a range.
SELECT {topic_name} AS topic, {outcome_columns}
FROM mqlayer_archive.outcome o
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.consumer_group g ON g.group_id = o.group_id
JOIN mqlayer.partition n ON n.partition_id = o.partition_id
WHERE o.topic_id = %(topic_id)s::int AND o.batch > %(after)s::bigint AND o.batch <= %(upto)s::bigint
  AND n.lp_from >= %(lp_from)s::smallint AND n.lp_from < %(lp_to)s::smallint;

-- name: lake_records
-- The records of a topic's batches, as they are stored, in the order of batches and the log.
SELECT {topic_name} AS topic, {record_columns}, r.topic_id
FROM mqlayer_archive.record r
JOIN mqlayer.topic t USING (topic_id)
WHERE r.topic_id = %(topic_id)s::int AND r.batch > %(after)s::bigint AND r.batch <= %(upto)s::bigint
ORDER BY r.batch, r.log_offset;

-- name: lake_outcomes
-- The outcomes of a topic's batches.
SELECT {topic_name} AS topic, {outcome_columns}, o.topic_id, o.batch, o.archived_at
FROM mqlayer_archive.outcome o
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.consumer_group g ON g.group_id = o.group_id
WHERE o.topic_id = %(topic_id)s::int AND o.batch > %(after)s::bigint AND o.batch <= %(upto)s::bigint
ORDER BY o.batch;

-- name: lake_lineage
-- The partitions of a topic up to its route version, each with its parents.
SELECT {topic_name} AS topic, n.partition_id AS partition, n.lp_from::int, n.lp_to::int, f.first_version, f.last_version,
       ARRAY(SELECT o.partition_id FROM mqlayer.partition o
             WHERE o.ended_by_change = n.created_by_change AND o.lp_from < n.lp_to AND n.lp_from < o.lp_to
             ORDER BY o.partition_id) AS parents, f.topic_id
FROM (SELECT r.topic_id, r.partition_id, min(r.version) AS first_version, max(r.version) AS last_version
      FROM mqlayer.route r WHERE r.topic_id = %(topic_id)s::int GROUP BY r.topic_id, r.partition_id) f
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.partition n ON n.partition_id = f.partition_id
ORDER BY n.partition_id;
