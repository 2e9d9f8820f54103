-- part: topic_name
-- The name under which a topic was archived.
split_part(t.name, '@', 1);

-- part: lake_digest
-- A number per record that adds up over rows, and is the same in every file.
(sum(('x' || left(md5(int8send(r.batch) || int4send(r.partition_id) || int8send(r.log_offset) || int8send(r.seq)
                     || coalesce(r.key, '') || r.body), 15))::bit(60)::bigint) %% 1152921504606846976)::bigint;

-- part: lake_outcome_digest
-- The same per outcome.
(sum(('x' || left(md5(int8send(o.batch) || int4send(o.partition_id) || int8send(o.first_offset) || int8send(o.last_offset)
                     || int8send(o.epoch) || int8send(o.position) || convert_to(o.outcome, 'UTF8')), 15))::bit(60)::bigint) %% 1152921504606846976)::bigint;

-- name: lake_find
-- A lake by its location.
SELECT lake_id, lake_uuid::text FROM mqlayer_archive.lake WHERE location = %(location)s;

-- name: lake_lock
-- Be the only exporter to a lake as long as this session lives, or not.
SELECT pg_try_advisory_lock(hashtext('mqlayer.lake'), %(lake_id)s::int);

-- name: lake_insert
-- Register a lake; nothing where it is known.
INSERT INTO mqlayer_archive.lake (location) VALUES (%(location)s) ON CONFLICT (location) DO NOTHING
RETURNING lake_id, lake_uuid::text;

-- name: lake_delete
-- Forget a lake; its files stay.
DELETE FROM mqlayer_archive.lake WHERE location = %(location)s RETURNING lake_id;

-- name: lake_by_uuid
-- A lake by what its tables say.
SELECT lake_id FROM mqlayer_archive.lake WHERE lake_uuid = %(uuid)s::uuid;

-- name: lake_snapshot
-- The topics of a snapshot, from which batch on a lake has each (null: it has none), up to which one rows may be in lakes
-- alone, and whether another lake began before.
SELECT p.topic_id, {topic_name}, p.batch, l.first_batch, p.exported_batch,
       EXISTS (SELECT FROM mqlayer_archive.lake_topic o
               WHERE o.topic_id = p.topic_id AND o.lake_id <> l.lake_id AND o.first_batch < l.first_batch
                 AND o.verified_batch > 0) AS elsewhere
FROM mqlayer_archive.snapshot_topic p JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer_archive.lake_topic l ON l.topic_id = p.topic_id
    AND l.lake_id = (SELECT k.lake_id FROM mqlayer_archive.lake k WHERE k.lake_uuid = %(uuid)s::uuid)
WHERE p.snapshot_id = %(snapshot_id)s ORDER BY p.topic_id;

-- name: lake_of_topic
-- What a lake has of a topic: its tables' uuid, the topic's archived name, from which batch on (null: nothing), up to which
-- one some were dropped, also by hand, up to which one rows of a snapshot may be in lakes alone, and whether another lake began before.
SELECT k.lake_uuid::text, {topic_name}, l.first_batch,
       greatest(a.dropped_batch, (
           SELECT max(d.last_batch) FROM mqlayer_archive.day d WHERE d.topic_id = a.topic_id
           AND to_regclass('mqlayer_archive.record_' || to_char(d.day, 'YYYYMMDD')) IS NULL)), coalesce(p.exported_batch, 0),
       EXISTS (SELECT FROM mqlayer_archive.lake_topic o
               WHERE o.topic_id = a.topic_id AND o.lake_id <> k.lake_id AND o.first_batch < l.first_batch
                 AND o.verified_batch > 0) AS elsewhere
FROM mqlayer_archive.lake k
JOIN mqlayer_archive.topic a ON a.topic_id = %(topic_id)s
JOIN mqlayer.topic t ON t.topic_id = a.topic_id
LEFT JOIN mqlayer_archive.lake_topic l ON l.lake_id = k.lake_id AND l.topic_id = a.topic_id
LEFT JOIN mqlayer_archive.snapshot_topic p ON p.topic_id = a.topic_id AND p.snapshot_id = %(snapshot_id)s::int
WHERE k.location = %(location)s;

-- name: lake_needed
-- Snapshots with days that only lakes have.
SELECT DISTINCT s.name FROM mqlayer_archive.snapshot s
JOIN mqlayer_archive.snapshot_topic p USING (snapshot_id)
JOIN mqlayer_archive.lake_topic l USING (topic_id) JOIN mqlayer_archive.lake k USING (lake_id)
WHERE k.location = %(location)s AND p.exported_batch > 0
  AND NOT EXISTS (SELECT FROM mqlayer_archive.lake_topic o WHERE o.topic_id = p.topic_id AND o.lake_id <> l.lake_id
                  AND o.verified_batch >= p.exported_batch)
ORDER BY s.name;

-- name: lake_work
-- Topics of the archive: the last batch, and the first one from which on all are kept (null: none is).
SELECT a.topic_id, {topic_name}, a.batch,
       (SELECT greatest(min(d.first_batch), a.dropped_batch + 1) FROM mqlayer_archive.day d
        WHERE d.topic_id = a.topic_id AND d.last_batch > a.dropped_batch) AS kept_from
FROM mqlayer_archive.topic a JOIN mqlayer.topic t USING (topic_id)
WHERE t.version IS NOT NULL AND (%(topics)s::text[] IS NULL OR t.name = ANY (%(topics)s::text[])) ORDER BY a.topic_id;

-- name: lake_chunk
-- The batch with the record so many further on.
SELECT r.batch FROM mqlayer_archive.record r
WHERE r.topic_id = %(topic_id)s AND r.batch > %(after)s AND r.batch <= %(upto)s
ORDER BY r.batch OFFSET %(rows)s LIMIT 1;

-- name: lake_width
-- How long a topic's records are, in bytes, going by the next of them.
SELECT coalesce(avg(i.size), 0)::int
FROM (SELECT octet_length(r.body) + coalesce(octet_length(r.headers), 0) AS size FROM mqlayer_archive.record r
      WHERE r.topic_id = %(topic_id)s AND r.batch > %(after)s ORDER BY r.batch LIMIT 1000) AS i;

-- name: lake_topic_put
-- Note what a lake has of a topic.
INSERT INTO mqlayer_archive.lake_topic AS l (lake_id, topic_id, first_batch, batch)
VALUES (%(lake_id)s, %(topic_id)s, %(first_batch)s, %(batch)s)
ON CONFLICT (lake_id, topic_id) DO UPDATE
SET batch = greatest(l.batch, excluded.batch), exported_at = clock_timestamp();

-- name: lake_topic_begin
-- Note where a lake begins with a topic of which it has nothing yet.
INSERT INTO mqlayer_archive.lake_topic AS l (lake_id, topic_id, first_batch, batch)
VALUES (%(lake_id)s, %(topic_id)s, %(first_batch)s, %(batch)s)
ON CONFLICT (lake_id, topic_id) DO UPDATE SET first_batch = excluded.first_batch, batch = excluded.batch
WHERE l.verified_batch = 0;

-- name: lake_topics
-- What a lake has of topics, and what of it was verified.
SELECT l.topic_id, {topic_name}, l.first_batch, l.batch, l.verified_batch, l.records, l.record_digest, l.outcomes, l.outcome_digest
FROM mqlayer_archive.lake_topic l JOIN mqlayer.topic t USING (topic_id)
WHERE l.lake_id = %(lake_id)s ORDER BY l.topic_id;

-- name: lake_verify_records
-- The archive's records of some batches, per source and LP: how many, the first and the last seq, and their digest.
SELECT r.source, r.lp::int, count(*), min(r.seq), max(r.seq), {lake_digest}
FROM mqlayer_archive.record r
WHERE r.topic_id = %(topic_id)s AND r.batch > %(after)s AND r.batch <= %(upto)s GROUP BY r.source, r.lp;

-- name: lake_verify_outcomes
-- The archive's outcomes of some batches: how many, and their digest.
SELECT count(*), coalesce({lake_outcome_digest}, 0)
FROM mqlayer_archive.outcome o
WHERE o.topic_id = %(topic_id)s AND o.batch > %(after)s AND o.batch <= %(upto)s;

-- name: lake_files
-- Verified files of a topic in a lake.
SELECT path, "table", rows, digest, bytes, sha256 FROM mqlayer_archive.lake_file
WHERE lake_id = %(lake_id)s AND topic_id = %(topic_id)s;

-- name: lake_files_put
-- Note verified files.
INSERT INTO mqlayer_archive.lake_file (lake_id, topic_id, path, "table", rows, digest, bytes, sha256)
SELECT %(lake_id)s, %(topic_id)s, f.path, f.kind, f.rows, f.digest, f.bytes, f.sha256
FROM unnest(%(paths)s::text[], %(tables)s::text[], %(rows)s::bigint[], %(digests)s::bigint[], %(sizes)s::bigint[],
            %(shas)s::text[]) AS f(path, kind, rows, digest, bytes, sha256)
ON CONFLICT (lake_id, path) DO NOTHING;

-- name: lake_files_forget
-- Forget files that a topic no longer has in a lake: their rows are in others.
DELETE FROM mqlayer_archive.lake_file
WHERE lake_id = %(lake_id)s AND topic_id = %(topic_id)s AND path = ANY (%(paths)s::text[]);

-- name: lake_topic_verified
-- A lake has a topic's batches up to one as the archive had them; nothing where another process verified it meanwhile.
UPDATE mqlayer_archive.lake_topic
SET verified_batch = %(upto)s, verified_at = clock_timestamp(), records = %(records)s, record_digest = %(record_digest)s,
    outcomes = %(outcomes)s, outcome_digest = %(outcome_digest)s
WHERE lake_id = %(lake_id)s AND topic_id = %(topic_id)s AND verified_batch = %(before)s
RETURNING topic_id;

-- name: lake_statuses
-- What each lake has of each topic, how far it is behind the archive, and since when.
SELECT k.location, {topic_name}, l.batch, l.verified_batch, l.exported_at, l.verified_at,
       a.batch - l.batch AS batches_behind,
       CASE WHEN a.batch > l.batch THEN extract(epoch FROM clock_timestamp() - l.exported_at)::float8 ELSE 0 END AS behind_s
FROM mqlayer_archive.lake k
JOIN mqlayer_archive.lake_topic l USING (lake_id)
JOIN mqlayer.topic t USING (topic_id) JOIN mqlayer_archive.topic a USING (topic_id)
ORDER BY k.location, t.name;
