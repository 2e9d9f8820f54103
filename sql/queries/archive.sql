-- name: archive_topics
-- Topics that are archived; of one name, or all. Of deleted topics those of which outcomes may be missing.
SELECT t.topic_id, t.name, t.body_limit FROM mqlayer.topic t
WHERE t.archived AND t.version IS NOT NULL AND (%(topic)s::text IS NULL OR t.name = %(topic)s)
  AND (t.deleted_at IS NULL
       OR EXISTS (SELECT FROM mqlayer.partition p WHERE p.topic_id = t.topic_id AND p.retired_at IS NULL)
       OR EXISTS (SELECT FROM mqlayer_archive.outcome_queue q WHERE q.topic_id = t.topic_id))
ORDER BY t.topic_id;

-- name: archive_work
-- Partitions of a topic that are not complete in the archive: where they are, the route version that brought them into
-- force, the first offset to archive, and how they were sealed. A successor comes when all its parents are complete, or
-- deleted: until then what is missing at its beginning is in them.
SELECT p.partition_id, p.node_id, coalesce(c.version, 1), p.lp_from, p.lp_to, coalesce(g.upto_offset, 1), s.seal_id::text,
       s.marks, coalesce(s.cut, false) AS cut, n.armed_at
FROM mqlayer.partition p
JOIN mqlayer.node n USING (node_id)
LEFT JOIN mqlayer.route_change c ON c.change_id = p.created_by_change
LEFT JOIN mqlayer_archive.progress g ON g.partition_id = p.partition_id
LEFT JOIN mqlayer.seal s ON s.partition_id = p.partition_id
WHERE p.topic_id = %(topic_id)s AND p.state IN ('open', 'sealed') AND g.complete IS NOT TRUE
  AND NOT EXISTS (SELECT FROM mqlayer.partition parent
                  LEFT JOIN mqlayer_archive.progress done ON done.partition_id = parent.partition_id
                  WHERE parent.ended_by_change = p.created_by_change AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
                    AND parent.state <> 'deleted' AND done.complete IS NOT TRUE)
ORDER BY p.partition_id;

-- name: archive_topic_put
-- Let a topic be locked by who writes to its archive. Switched on once more, it begins a new stretch. Its batches go on
-- behind those of deleted topics of its name: readers of a stream go by name and batch.
INSERT INTO mqlayer_archive.topic AS a (topic_id, batch)
SELECT t.topic_id, coalesce((SELECT max(f.batch) FROM mqlayer_archive.topic f JOIN mqlayer.topic d USING (topic_id)
                             WHERE d.deleted_at IS NOT NULL AND split_part(d.name, '@', 1) = t.name), 0)
FROM mqlayer.topic t WHERE t.topic_id = %(topic_id)s
ON CONFLICT (topic_id) DO UPDATE SET segment = a.segment + 1;

-- name: archive_topic_hold
-- Hold a topic's archive to the end of the transaction, and say where it is: nobody else writes a batch, drops a day or
-- makes a snapshot of it meanwhile. Nothing where it is not archived any more.
SELECT a.batch, a.segment, now() AS at, (now() AT TIME ZONE 'UTC')::date AS day,
       mqlayer_archive.day_made_v1((now() AT TIME ZONE 'UTC')::date) AS made
FROM mqlayer_archive.topic a JOIN mqlayer.topic t USING (topic_id)
WHERE a.topic_id = %(topic_id)s AND t.archived FOR UPDATE OF a;

-- name: archive_days_make
-- Make the table partitions of today and of tomorrow.
SELECT mqlayer_archive.day_make_v1((now() AT TIME ZONE 'UTC')::date + ahead) FROM generate_series(0, 1) AS ahead;

-- name: archive_batch_put
-- A batch is in the archive.
UPDATE mqlayer_archive.topic SET batch = %(batch)s WHERE topic_id = %(topic_id)s;

-- name: archive_day_put
-- What a batch adds to its day.
INSERT INTO mqlayer_archive.day AS d (day, topic_id, first_batch, last_batch, records, outcomes)
VALUES (%(day)s, %(topic_id)s, %(batch)s, %(batch)s, %(records)s, %(outcomes)s)
ON CONFLICT (day, topic_id) DO UPDATE
SET last_batch = excluded.last_batch, records = d.records + excluded.records, outcomes = d.outcomes + excluded.outcomes;

-- name: archive_progress
-- How far a partition is in the archive.
SELECT upto_offset, complete FROM mqlayer_archive.progress WHERE partition_id = %(partition_id)s;

-- name: archive_run
-- The run that a partition's node is armed for, wherever the partition is now, and since when; nobody arms it anew before
-- this transaction ends. Nothing while somebody does.
SELECT n.armed_run_id, n.armed_at FROM mqlayer.partition p JOIN mqlayer.node n USING (node_id)
WHERE p.partition_id = %(partition_id)s FOR SHARE OF n SKIP LOCKED;

-- name: archive_progress_put
-- A partition is archived up to an offset; nothing where it is not where the archiver thought it was.
INSERT INTO mqlayer_archive.progress AS g (partition_id, topic_id, upto_offset, complete)
VALUES (%(partition_id)s, %(topic_id)s, %(upto)s, %(complete)s)
ON CONFLICT (partition_id) DO UPDATE SET upto_offset = excluded.upto_offset, complete = excluded.complete
WHERE g.upto_offset = %(since)s AND NOT g.complete
RETURNING upto_offset;

-- name: archive_progress_lower
-- Partitions fell back: the offsets from there on are given out again, to what may not be in the archive.
UPDATE mqlayer_archive.progress g SET upto_offset = fallen.next
FROM unnest(%(partitions)s::int[], %(offsets)s::bigint[]) AS fallen(partition_id, next)
WHERE g.partition_id = fallen.partition_id AND g.upto_offset > fallen.next;

-- name: archive_progress_reset
-- A partition is made anew elsewhere: its offsets begin anew.
UPDATE mqlayer_archive.progress SET upto_offset = 1 WHERE partition_id = %(partition_id)s;

-- name: archive_marks
-- How far sources are in the archive, per LP of a range, and in which stretch.
SELECT source, lp, last_seq, segment FROM mqlayer_archive.mark
WHERE topic_id = %(topic_id)s AND source = ANY(%(sources)s::bigint[]) AND lp >= %(lp_from)s AND lp < %(lp_to)s;

-- name: archive_gap_accepted
-- Whether somebody accepted that nothing is archived between two seqs, or more than that.
SELECT 1 FROM mqlayer_archive.gap
WHERE topic_id = %(topic_id)s AND source = %(source)s AND lp = %(lp)s AND after_seq = %(after)s AND next_seq >= %(next)s
  AND accepted_at IS NOT NULL;

-- name: archive_marks_put
-- Raise marks. A first seq of 0 leaves the one that is there.
INSERT INTO mqlayer_archive.mark AS m (topic_id, source, lp, first_seq, last_seq, segment)
SELECT %(topic_id)s, source, lp, first_seq, last_seq, %(segment)s
FROM unnest(%(sources)s::bigint[], %(lps)s::smallint[], %(firsts)s::bigint[], %(lasts)s::bigint[])
     AS raised(source, lp, first_seq, last_seq)
ON CONFLICT (topic_id, source, lp) DO UPDATE
SET last_seq = excluded.last_seq, segment = excluded.segment,
    first_seq = CASE WHEN excluded.first_seq = 0 THEN m.first_seq ELSE excluded.first_seq END;

-- name: archive_gaps_put
-- Note gaps; those that a switch of the topic explains are accepted. One that grew needs another word.
INSERT INTO mqlayer_archive.gap AS g
    (topic_id, source, lp, after_seq, next_seq, partition_id, log_offset, accepted_at)
SELECT %(topic_id)s, source, lp, after_seq, next_seq, %(partition_id)s, log_offset,
       CASE WHEN accepted THEN clock_timestamp() END
FROM unnest(%(sources)s::bigint[], %(lps)s::smallint[], %(afters)s::bigint[], %(nexts)s::bigint[], %(offsets)s::bigint[],
            %(accepted)s::boolean[]) AS found(source, lp, after_seq, next_seq, log_offset, accepted)
ON CONFLICT (topic_id, source, lp, after_seq) DO UPDATE
SET next_seq = excluded.next_seq, partition_id = excluded.partition_id, log_offset = excluded.log_offset,
    accepted_at = excluded.accepted_at, actor = NULL
WHERE g.next_seq <> excluded.next_seq OR (g.accepted_at IS NULL AND excluded.accepted_at IS NOT NULL);

-- name: archive_passed
-- An archiver came to the end of what it could read of a topic.
UPDATE mqlayer_archive.topic SET last_pass_at = clock_timestamp() WHERE topic_id = %(topic_id)s;

-- name: archive_days_old
-- Days of the archive that ended longer ago than asked for, oldest first; also those that hold nothing. Without an age
-- those that ended longer ago than each topic that has something in them is to be kept, and one day at the least.
SELECT made.day
FROM (SELECT CASE WHEN c.relname ~ '^record_[0-9]{8}$' THEN to_date(right(c.relname, 8), 'YYYYMMDD') END AS day
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
      WHERE i.inhparent = 'mqlayer_archive.record'::regclass) AS made
WHERE (made.day + 1)::timestamp AT TIME ZONE 'UTC' <= now() - coalesce(%(older_than)s::interval, interval '1 day')
  AND (%(day)s::date IS NULL OR made.day = %(day)s::date)
  AND (%(older_than)s::interval IS NOT NULL OR NOT EXISTS (
      SELECT FROM mqlayer_archive.day d JOIN mqlayer.topic t USING (topic_id)
      WHERE d.day = made.day AND (t.retention_days IS NULL OR
            (d.day + 1)::timestamp AT TIME ZONE 'UTC' > now() - make_interval(days => t.retention_days))))
ORDER BY made.day;

-- name: topic_retention
-- For how many days a topic's archive is kept; null: for ever.
SELECT retention_days FROM mqlayer.topic WHERE name = %(topic)s FOR UPDATE;

-- name: topic_retention_set
-- Keep a topic's archive for so many days.
UPDATE mqlayer.topic SET retention_days = %(days)s WHERE name = %(topic)s;

-- name: topic_exported_kept
-- Whether a topic's archive is kept until it is exported.
SELECT keep_until_exported FROM mqlayer.topic WHERE name = %(topic)s FOR UPDATE;

-- name: topic_exported_set
-- Keep a topic's archive until it is exported, or not.
UPDATE mqlayer.topic SET keep_until_exported = %(keep)s WHERE name = %(topic)s;

-- name: archive_day
-- What a day of the archive holds, per topic.
SELECT topic_id, first_batch, last_batch, records, outcomes FROM mqlayer_archive.day WHERE day = %(day)s ORDER BY topic_id;

-- name: archive_day_ends
-- The last seq per source and LP that a day of the archive holds.
SELECT topic_id, source, lp, max(seq) FROM mqlayer_archive.record
WHERE archived_at >= %(day)s::timestamp AT TIME ZONE 'UTC' AND archived_at < (%(day)s::date + 1)::timestamp AT TIME ZONE 'UTC'
GROUP BY topic_id, source, lp;

-- name: archive_topics_hold
-- Hold the archives of topics to the end of the transaction, in the order of their ids.
SELECT topic_id FROM mqlayer_archive.topic WHERE topic_id = ANY(%(topic_ids)s::int[]) ORDER BY topic_id FOR UPDATE;

-- name: archive_day_needed
-- Whether a kept snapshot may cover a row of a day, or a replay or backfill that runs has yet to read one. Snapshots of
-- topics that are kept until they are exported need no day, as they are read from the export then.
SELECT 1 FROM mqlayer_archive.day d
WHERE d.day = %(day)s
  AND (EXISTS (SELECT FROM mqlayer_archive.snapshot_topic s JOIN mqlayer.topic t USING (topic_id)
               WHERE s.topic_id = d.topic_id AND s.batch >= d.first_batch AND NOT t.keep_until_exported)
       OR EXISTS (SELECT FROM mqlayer.redrive r JOIN mqlayer.consumer_group g USING (group_id)
                  WHERE g.topic_id = d.topic_id AND r.state = 'running' AND r.upto_batch >= d.first_batch
                    AND r.at_batch <= d.last_batch))
LIMIT 1;

-- name: archive_day_unexported
-- Whether a day has batches of a topic that is kept until it is exported, and no export of them is verified.
SELECT 1 FROM mqlayer_archive.day d JOIN mqlayer.topic t USING (topic_id)
WHERE d.day = %(day)s AND t.keep_until_exported
  AND NOT EXISTS (SELECT FROM mqlayer_archive.lake_topic l
                  WHERE l.topic_id = d.topic_id AND l.first_batch <= d.first_batch AND l.verified_batch >= d.last_batch)
LIMIT 1;

-- name: archive_day_lock
-- Keep readers and writers out of the archive's tables, which dropping a part of them needs.
SELECT mqlayer_archive.lock_v1();

-- name: archive_marks_begin
-- The archive's stretches begin behind what is dropped.
UPDATE mqlayer_archive.mark m SET first_seq = gone.last + 1
FROM unnest(%(topics)s::int[], %(sources)s::bigint[], %(lps)s::smallint[], %(lasts)s::bigint[]) AS gone(topic_id, source, lp, last)
WHERE m.topic_id = gone.topic_id AND m.source = gone.source AND m.lp = gone.lp AND m.first_seq <= gone.last;

-- name: archive_days_unindexed
-- Days of the archive that are over and have no index by LP, the latest first.
SELECT made.day
FROM (SELECT CASE WHEN c.relname ~ '^record_[0-9]{8}$' THEN to_date(right(c.relname, 8), 'YYYYMMDD') END AS day
      FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid
      WHERE i.inhparent = 'mqlayer_archive.record'::regclass) AS made
WHERE made.day < (now() AT TIME ZONE 'UTC')::date
  AND to_regclass('mqlayer_archive.record_' || to_char(made.day, 'YYYYMMDD') || '_of_lp') IS NULL
ORDER BY made.day DESC LIMIT %(limit)s;

-- name: archive_day_index
-- Index the records of a day by LP.
SELECT mqlayer_archive.day_index_v1(%(day)s);

-- name: archive_day_drop
-- Drop a day's table partitions, and what is noted of it but that its batches are gone.
WITH forgotten AS (
    DELETE FROM mqlayer_archive.day WHERE day = %(day)s RETURNING topic_id, first_batch, last_batch
), gone AS (
    UPDATE mqlayer_archive.topic a SET dropped_batch = greatest(a.dropped_batch, f.last_batch)
    FROM forgotten f WHERE f.topic_id = a.topic_id
), exported AS (
    -- Snapshots that cover it are read with an export from now on.
    UPDATE mqlayer_archive.snapshot_topic s SET exported_batch = greatest(s.exported_batch, least(f.last_batch, s.batch))
    FROM forgotten f WHERE f.topic_id = s.topic_id AND s.batch >= f.first_batch
)
SELECT mqlayer_archive.day_drop_v1(%(day)s);

-- name: archive_gaps
-- Gaps of the archive, oldest first; of one topic or all, those that wait or all.
SELECT t.name, g.source, g.lp, g.after_seq, g.next_seq, g.partition_id, g.log_offset, g.found_at, g.accepted_at, g.actor
FROM mqlayer_archive.gap g JOIN mqlayer.topic t USING (topic_id)
WHERE (%(topic)s::text IS NULL OR t.name = %(topic)s) AND (g.accepted_at IS NULL OR NOT %(waiting)s)
ORDER BY t.name, g.found_at, g.source, g.lp, g.after_seq;

-- name: archive_gaps_accept
-- Accept the gaps that a topic's archive waits at, or one partition; say how many seqs each is.
UPDATE mqlayer_archive.gap g SET accepted_at = clock_timestamp(), actor = %(actor)s
FROM mqlayer.topic t
WHERE t.topic_id = g.topic_id AND t.name = %(topic)s AND g.accepted_at IS NULL
  AND (%(partition)s::int IS NULL OR g.partition_id = %(partition)s)
RETURNING g.next_seq - g.after_seq - 1 AS missing;

-- name: archive_statuses
-- Topics that are archived, or were: how far, what the archive holds of them, and gaps that wait.
SELECT t.topic_id, t.name, t.archived, a.batch,
       coalesce((SELECT sum(d.records) FROM mqlayer_archive.day d WHERE d.topic_id = t.topic_id), 0)::bigint AS records,
       (SELECT count(*) FROM mqlayer_archive.gap g WHERE g.topic_id = t.topic_id AND g.accepted_at IS NULL)::int AS gaps,
       a.last_pass_at,
       (SELECT min(d.day)::text FROM mqlayer_archive.day d WHERE d.topic_id = t.topic_id) AS first_day,
       (SELECT max(d.day)::text FROM mqlayer_archive.day d WHERE d.topic_id = t.topic_id) AS last_day,
       (SELECT coalesce(sum(o.dropped), 0) FROM mqlayer_archive.outcome_progress o
        JOIN mqlayer.consumer_group g USING (group_id) WHERE g.topic_id = t.topic_id)::bigint AS outcomes_dropped
FROM mqlayer_archive.topic a JOIN mqlayer.topic t USING (topic_id)
WHERE %(topic)s::text IS NULL OR t.name = %(topic)s ORDER BY t.name;

-- name: archive_positions
-- The partitions of archived topics, the first offset of each that is not archived (null: it is complete), and where
-- groups start that bound its trimming.
SELECT p.topic_id, p.partition_id, p.node_id,
       CASE WHEN a.complete IS NOT TRUE THEN coalesce(a.upto_offset, 1) END AS upto,
       coalesce(array_agg(g.group_id ORDER BY g.group_id) FILTER (WHERE g.group_id IS NOT NULL), '{}') AS group_ids,
       coalesce(array_agg(g.seek ORDER BY g.group_id) FILTER (WHERE g.group_id IS NOT NULL), '{}') AS seeks,
       coalesce(array_agg(coalesce(s.start_offset, 1) ORDER BY g.group_id)
                FILTER (WHERE g.group_id IS NOT NULL), '{}') AS starts
FROM mqlayer.partition p
JOIN mqlayer.topic t ON t.topic_id = p.topic_id AND t.archived
LEFT JOIN mqlayer_archive.progress a ON a.partition_id = p.partition_id
LEFT JOIN mqlayer.consumer_group g ON g.topic_id = p.topic_id AND g.state <> 'retired' AND g.mode <> 'broadcast'
LEFT JOIN mqlayer.group_start s ON s.group_id = g.group_id AND s.partition_id = p.partition_id
WHERE p.topic_id = ANY(%(topic_ids)s::int[]) AND p.state IN ('open', 'sealed')
GROUP BY p.topic_id, p.partition_id, p.node_id, a.complete, a.upto_offset ORDER BY p.partition_id;

-- name: archive_end_stopped
-- End sessions that began to copy into the archive long ago and wait for their clients.
SELECT pg_terminate_backend(pid) FROM pg_stat_activity
WHERE datname = current_database() AND query LIKE 'COPY mqlayer_archive.%%' AND state = 'active'
  AND wait_event = 'ClientRead' AND query_start < clock_timestamp() - make_interval(secs => %(stopped_s)s);

-- name: archive_of_key
-- The last archived messages of a key, the latest first.
SELECT r.partition_id, r.log_offset, r.source, r.lp, r.seq, r.published_at, r.tags, r.headers, r.body
FROM mqlayer_archive.record r JOIN mqlayer.topic t USING (topic_id)
WHERE t.name = %(topic)s AND r.lp = %(lp)s AND r.key = %(key)s
ORDER BY r.batch DESC, r.log_offset DESC LIMIT %(limit)s;
