-- part: still_this_outbox
-- The outbox is not numbered anew, and stays so until the transaction ends.
EXISTS (SELECT FROM mqlayer_app.identity i WHERE i.outbox_uuid = %(outbox_uuid)s FOR SHARE);

-- part: not_of_deleted_topic
-- The topic of a row was not deleted, and is not before the transaction ends.
NOT EXISTS (SELECT FROM (SELECT t.deleted_at FROM mqlayer_app.topic t WHERE t.topic_id = %(topic_id)s FOR KEY SHARE) AS held
            WHERE held.deleted_at IS NOT NULL);

-- part: known_numbers_and_term
-- What the statement sees is numbered as its relay knows, and was committed in the relay's term, on its timeline.
EXISTS (SELECT FROM mqlayer_app.identity i
        WHERE i.outbox_uuid = %(outbox_uuid)s AND mqlayer_app.timeline_holds_v1(i.timeline)
          AND mqlayer_app.term_v1() = %(term)s);

-- name: outbox_topic_put
-- Let an application database publish to a topic. No target after ON CONFLICT: two that attach a topic at once meet at its
-- name as well as at its number.
INSERT INTO mqlayer_app.topic (topic_id, name, body_limit)
VALUES (%(topic_id)s, %(name)s, %(body_limit)s)
ON CONFLICT DO NOTHING;

-- name: outbox_topic_limit
-- Set the limit of a topic; none if another topic has its name or its number.
UPDATE mqlayer_app.topic SET body_limit = %(body_limit)s
WHERE topic_id = %(topic_id)s AND name = %(name)s
RETURNING topic_id;

-- name: outbox_counters_put
-- The counters of a topic, once, with its name and limit of today. In the order in which publishing locks them; those that
-- are there are not locked, or all publishers would wait behind the slowest.
INSERT INTO mqlayer_app.counter (topic_id, lp, topic, body_limit)
SELECT t.topic_id, lp, t.name, t.body_limit FROM mqlayer_app.topic t, generate_series(0, 1023) AS new(lp)
WHERE t.topic_id = %(topic_id)s AND t.deleted_at IS NULL
  AND NOT EXISTS (SELECT FROM mqlayer_app.counter c WHERE c.topic_id = t.topic_id AND c.lp = new.lp)
ORDER BY lp
ON CONFLICT DO NOTHING;

-- name: outbox_counters_limit
-- Repeat a limit that changed in the topic's counters, in the order in which publishing locks them.
WITH old AS MATERIALIZED (
    SELECT c.lp, t.body_limit FROM mqlayer_app.counter c JOIN mqlayer_app.topic t USING (topic_id)
    WHERE c.topic_id = %(topic_id)s AND c.body_limit <> t.body_limit ORDER BY c.lp FOR NO KEY UPDATE OF c
)
UPDATE mqlayer_app.counter c SET body_limit = old.body_limit FROM old
WHERE c.topic_id = %(topic_id)s AND c.lp = old.lp;

-- name: outbox_topics
-- Topics that this database may publish to.
SELECT topic_id, name, body_limit FROM mqlayer_app.topic WHERE deleted_at IS NULL ORDER BY topic_id;

-- name: topic_waiting
-- Messages of a topic that wait here: rows that no relay sent, delayed ones, voided ones without a decision.
SELECT (SELECT coalesce(sum(c.seq - coalesce(r.seq, 0)), 0)::bigint FROM mqlayer_app.counter c
        LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
        WHERE c.topic_id = %(topic_id)s AND c.topic = %(name)s),
       (SELECT count(*) FROM mqlayer_app.delayed_fact d WHERE d.topic_id = %(topic_id)s),
       (SELECT count(*) FROM mqlayer_app.voided v WHERE v.topic_id = %(topic_id)s AND v.ended IS NULL);

-- name: topic_drop
-- Let this outbox publish to a topic no more, unless messages of it wait.
SELECT dropped, unsent, delayed, voided FROM mqlayer_app.topic_drop_v1(%(topic_id)s, %(name)s, %(force)s);

-- name: topic_rows_drop
-- Delete some rows of a topic that was dropped; how many.
SELECT mqlayer_app.topic_rows_drop_v1(%(topic_id)s, %(limit)s);

-- name: outbox_identity_put
-- Make this outbox's identity, once.
INSERT INTO mqlayer_app.identity DEFAULT VALUES ON CONFLICT (only_one) DO NOTHING;

-- name: outbox_identity
-- This outbox's identity, and the cluster and database it is in now.
SELECT i.outbox_uuid, current_database() AS name,
       (SELECT system_identifier FROM pg_control_system())::text || '/' || current_database() AS cluster
FROM mqlayer_app.identity i;

-- name: outbox_server
-- On which timeline this outbox was worked on, on which it is now, and in place of which outboxes it goes on.
SELECT i.outbox_uuid, i.timeline AS known, mqlayer_app.timeline_v1() AS now, i.replaces FROM mqlayer_app.identity i;

-- name: outbox_identity_now
-- Whether this is that outbox yet, on the timeline that its relays know.
SELECT 1 FROM mqlayer_app.identity i
WHERE i.outbox_uuid = %(outbox_uuid)s AND mqlayer_app.timeline_holds_v1(i.timeline);

-- name: outbox_term
-- In which term of its Postgres this outbox is read.
SELECT mqlayer_app.term_v1();

-- name: outbox_term_now
-- In which term this is that outbox yet, on the timeline that its relays know.
SELECT mqlayer_app.term_v1() FROM mqlayer_app.identity i
WHERE i.outbox_uuid = %(outbox_uuid)s AND mqlayer_app.timeline_holds_v1(i.timeline);

-- name: outbox_server_put
-- Note the timeline where there was none, or none was told.
UPDATE mqlayer_app.identity SET timeline = %(timeline)s WHERE timeline IS NULL OR timeline = 0;

-- name: outbox_suspect
-- Redis holds more than this outbox ever numbered: have it recovered before anything is relayed.
UPDATE mqlayer_app.identity SET timeline = -1 WHERE outbox_uuid = %(outbox_uuid)s;

-- name: outbox_recover
-- Have an outbox that lost commits go on under another source, behind what is proven; how many messages wait.
SELECT mqlayer_app.outbox_recover_v1(
    %(outbox_uuid)s, %(topic_ids)s::int[], %(lps)s::smallint[], %(seqs)s::bigint[], %(fallen)s::boolean[]);

-- name: relayed_all
-- How far LPs of a topic are recorded to be in Redis.
SELECT lp, seq FROM mqlayer_app.relayed WHERE topic_id = %(topic_id)s;

-- name: marks_ahead
-- Those of some seqs that are past what is recorded as relayed, with the LPs' counters.
SELECT c.topic_id, c.lp, c.seq
FROM unnest(%(topic_ids)s::int[], %(lps)s::smallint[], %(seqs)s::bigint[]) AS m(topic_id, lp, seq)
JOIN mqlayer_app.counter c ON c.topic_id = m.topic_id AND c.lp = m.lp
LEFT JOIN mqlayer_app.relayed r ON r.topic_id = m.topic_id AND r.lp = m.lp
WHERE m.seq > coalesce(r.seq, 0);

-- name: outbox_digests
-- Rows of a topic as records have them, bodies as their SHA-256.
SELECT m.lp, m.seq, m.facts, m.key, sha256(m.body) AS body
FROM unnest(%(lps)s::smallint[], %(seqs)s::bigint[]) AS wanted(lp, seq)
JOIN mqlayer_app.outbox_message m ON m.topic_id = %(topic_id)s AND m.lp = wanted.lp AND m.seq = wanted.seq;

-- name: relay_settings
-- Have a relay's connection read by indexes, in order: the statistics of a table that fills up fast are always late,
-- and a planner that believes them would read and sort the whole backlog for each chunk. What has to sort all the same
-- seems so dear then that it would be compiled anew for each run, which takes a hundred times as long.
SELECT set_config('enable_sort', 'off', false), set_config('jit', 'off', false);

-- name: outbox_scan
-- The next rows by id, up to so many bytes of bodies: a hint of what is new. Other relays' LPs come without content.
-- Nothing in another term, or once the outbox is numbered anew: this needs no question of its own behind the read.
SELECT id, CASE WHEN ours THEN topic_id * 1024::bigint + lp END AS chain, seq, facts, key, CASE WHEN ours THEN body END
FROM (
    SELECT m.*, (m.lp >> 6) = ANY(%(lp_sets)s::int[]) AS ours,
           sum(m.size) OVER (ORDER BY m.id ROWS UNBOUNDED PRECEDING) - m.size AS bytes_before
    FROM (SELECT * FROM mqlayer_app.outbox_message WHERE id > %(after)s ORDER BY id LIMIT %(limit)s) AS m
) AS bounded
WHERE bytes_before < %(bytes)s AND {known_numbers_and_term} ORDER BY id;

-- name: outbox_late
-- Rows of given ids that were not visible before; otherwise as outbox_scan.
SELECT id, CASE WHEN ours THEN topic_id * 1024::bigint + lp END AS chain, seq, facts, key, CASE WHEN ours THEN body END
FROM (
    SELECT m.*, (m.lp >> 6) = ANY(%(lp_sets)s::int[]) AS ours,
           sum(m.size) OVER (ORDER BY m.id ROWS UNBOUNDED PRECEDING) - m.size AS bytes_before
    FROM mqlayer_app.outbox_message AS m WHERE m.id = ANY(%(ids)s::bigint[])
) AS bounded
WHERE bytes_before < %(bytes)s AND {known_numbers_and_term} ORDER BY id;

-- name: outbox_of_lps
-- The next rows of some LPs, each after a seq: the order that counts.
SELECT id, topic_id * 1024::bigint + lp AS chain, seq, facts, key, body
FROM (
    SELECT m.*, wanted.n, sum(m.size) OVER (ORDER BY wanted.n, m.seq ROWS UNBOUNDED PRECEDING) - m.size AS bytes_before
    FROM unnest(%(topic_ids)s::int[], %(lps)s::smallint[], %(afters)s::bigint[])
         WITH ORDINALITY AS wanted(topic_id, lp, after, n)
    CROSS JOIN LATERAL (
        SELECT * FROM mqlayer_app.outbox_message AS o
        WHERE o.topic_id = wanted.topic_id AND o.lp = wanted.lp AND o.seq > wanted.after
        ORDER BY o.seq LIMIT %(each)s
    ) AS m
) AS bounded
WHERE bytes_before < %(bytes)s ORDER BY n, seq;

-- name: outbox_backlog
-- How many rows of the sets given wait to be relayed, and the lowest id among the first ones of their LPs.
SELECT coalesce(sum(c.seq - coalesce(r.seq, 0)), 0)::bigint AS waiting, min(o.id) AS first_id
FROM mqlayer_app.counter c
LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
LEFT JOIN mqlayer_app.quarantined s ON s.topic_id = c.topic_id AND s.lp = c.lp
CROSS JOIN LATERAL (
    SELECT o.id FROM mqlayer_app.outbox o
    WHERE o.topic_id = c.topic_id AND o.lp = c.lp AND o.seq > coalesce(r.seq, 0) ORDER BY o.seq LIMIT 1
) AS o
WHERE c.seq > coalesce(r.seq, 0) AND s.lp IS NULL AND (c.lp >> 6) = ANY(%(lp_sets)s::int[]);

-- name: outbox_last_id
-- The highest id given out.
SELECT CASE WHEN is_called THEN last_value ELSE 0 END AS id FROM mqlayer_app.outbox_number;

-- name: counter_news
-- LPs of the sets given whose counter is past what is recorded as relayed.
SELECT c.topic_id * 1024::bigint + c.lp AS chain, c.seq
FROM mqlayer_app.counter c
LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
WHERE c.seq > coalesce(r.seq, 0) AND (c.lp >> 6) = ANY(%(lp_sets)s::int[]);

-- name: relayed_put
-- Record how far LPs are in Redis; never backwards, and nothing once the outbox is numbered anew, or is to be: in another
-- term, and on another timeline, what is acknowledged may be in no commit. Nothing of topics that were deleted.
WITH held AS MATERIALIZED (
    SELECT t.topic_id, t.deleted_at FROM mqlayer_app.topic t WHERE t.topic_id = ANY (%(topic_ids)s::int[])
    ORDER BY t.topic_id FOR KEY SHARE
)
INSERT INTO mqlayer_app.relayed AS r (topic_id, lp, seq)
SELECT u.* FROM unnest(%(topic_ids)s::int[], %(lps)s::smallint[], %(seqs)s::bigint[]) AS u(topic_id, lp, seq)
WHERE u.topic_id NOT IN (SELECT h.topic_id FROM held h WHERE h.deleted_at IS NOT NULL) AND EXISTS (SELECT FROM mqlayer_app.identity i
              WHERE i.outbox_uuid = %(outbox_uuid)s AND mqlayer_app.timeline_holds_v1(i.timeline)
                AND mqlayer_app.term_v1() = %(term)s FOR SHARE)
ON CONFLICT (topic_id, lp) DO UPDATE SET seq = excluded.seq WHERE r.seq < excluded.seq;

-- name: relayed_lower
-- Redis fell back: what it no longer holds must not be rotated away. Nothing once the outbox is numbered anew.
UPDATE mqlayer_app.relayed r SET seq = least(r.seq, fallen.seq)
FROM unnest(%(topic_ids)s::int[], %(lps)s::smallint[], %(seqs)s::bigint[]) AS fallen(topic_id, lp, seq)
WHERE r.topic_id = fallen.topic_id AND r.lp = fallen.lp
  AND {still_this_outbox};

-- name: relayed_list
-- How far LPs of the sets given are recorded to be in Redis.
SELECT topic_id * 1024::bigint + lp AS chain, seq FROM mqlayer_app.relayed WHERE (lp >> 6) = ANY(%(lp_sets)s::int[]);

-- name: outbox_proof
-- Per LP of a range of a topic: how far it is recorded to be in Redis, below which seq the outbox holds nothing any more,
-- and how many of its rows up to what is recorded it still holds.
SELECT c.lp, coalesce(r.seq, 0) AS relayed, coalesce(o.seq - 1, c.seq) AS floor
FROM mqlayer_app.counter c
LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
LEFT JOIN LATERAL (
    SELECT o.seq FROM mqlayer_app.outbox o WHERE o.topic_id = c.topic_id AND o.lp = c.lp ORDER BY o.seq LIMIT 1
) AS o ON true
WHERE c.topic_id = %(topic_id)s AND c.lp >= %(lp_from)s AND c.lp < %(lp_to)s ORDER BY c.lp;

-- name: quarantined_put
-- Quarantine a row; its LP waits. Not once the outbox is numbered anew, nor of a deleted topic.
INSERT INTO mqlayer_app.quarantined (topic_id, lp, seq, reason)
SELECT %(topic_id)s::int, %(lp)s::smallint, %(seq)s::bigint, %(reason)s::text
WHERE {not_of_deleted_topic} AND {still_this_outbox}
ON CONFLICT (topic_id, lp) DO UPDATE SET seq = excluded.seq, reason = excluded.reason, quarantined_at = now();

-- name: quarantined_list
-- Rows quarantined, with their topic, for people and for relays.
SELECT s.topic_id, t.name AS topic, s.lp, s.seq, s.reason, s.quarantined_at
FROM mqlayer_app.quarantined s LEFT JOIN mqlayer_app.topic t USING (topic_id) ORDER BY s.topic_id, s.lp LIMIT %(limit)s;

-- name: quarantined_remove
-- Let relays try an LP again.
DELETE FROM mqlayer_app.quarantined WHERE topic_id = %(topic_id)s AND lp = %(lp)s RETURNING seq;

-- name: voided_put
-- Keep a row in whose place a void record is about to be appended; what an operator made of it stays said.
-- Not once the outbox is numbered anew: another row has its seq.
INSERT INTO mqlayer_app.voided AS v (id, topic_id, lp, seq, reason, created_at, key, headers, body)
SELECT o.id, o.topic_id, o.lp, o.seq, %(reason)s, o.created_at, o.key, o.headers, o.body
FROM mqlayer_app.outbox o WHERE o.topic_id = %(topic_id)s AND o.lp = %(lp)s AND o.seq = %(seq)s
  AND {not_of_deleted_topic} AND {still_this_outbox}
ON CONFLICT (id) DO UPDATE SET seq = excluded.seq;

-- name: voided_list
-- Rows passed over that wait for an operator, with their topic.
SELECT v.topic_id, t.name AS topic, v.lp, v.seq, v.reason, v.voided_at, v.id
FROM mqlayer_app.voided v LEFT JOIN mqlayer_app.topic t USING (topic_id)
WHERE v.ended IS NULL ORDER BY v.topic_id, v.lp, v.seq LIMIT %(limit)s;

-- name: voided_hold
-- One of them, for whoever decides on it: what it was published to, or nothing where that was decided.
SELECT t.name FROM mqlayer_app.voided v JOIN mqlayer_app.topic t USING (topic_id)
WHERE v.id = %(id)s AND v.ended IS NULL FOR UPDATE OF v;

-- name: voided_publish
-- Publish the message anew, at the end of its key's LP.
SELECT mqlayer_app.publish_v2(%(topic)s, v.key, v.body, v.headers::jsonb) FROM mqlayer_app.voided v WHERE v.id = %(id)s;

-- name: voided_end
-- Note what came of it, and let the message go.
UPDATE mqlayer_app.voided SET ended = %(ended)s, ended_at = now(), key = NULL, headers = NULL, body = NULL
WHERE id = %(id)s;

-- name: voided_drop
-- Remove what a copy of an outbox has of them: it is the original's.
DELETE FROM mqlayer_app.voided;

-- name: relay_beat
-- Extend a relay's lease, note whether it sent since, and say how many relays live, by the database's clock: who has not beaten for half of its
-- lease is not counted, so that others don't leave LP sets to one that died.
WITH beat AS (
    INSERT INTO mqlayer_app.relay AS r (relay_id, lease_until, sent_at, version, least, most, acts_on, host, pid)
    VALUES (%(relay_id)s, now() + make_interval(secs => %(lease_s)s), CASE WHEN %(has_sent)s THEN now() END,
            %(version)s, %(least)s, %(most)s, %(acts_on)s, %(host)s, %(pid)s)
    ON CONFLICT (relay_id)
    DO UPDATE SET lease_until = excluded.lease_until, sent_at = coalesce(excluded.sent_at, r.sent_at),
                  acts_on = excluded.acts_on
    RETURNING acts_on
), gone AS (
    DELETE FROM mqlayer_app.relay WHERE lease_until < now() - interval '1 hour'
)
SELECT (SELECT count(*) + 1 FROM mqlayer_app.relay
        WHERE lease_until >= now() + make_interval(secs => %(lease_s)s / 2) AND relay_id <> %(relay_id)s) AS live,
       -- A new relay waits for a finalization after this statement's snapshot, and acts on that one.
       p.serves_from, greatest(p.in_force, (SELECT acts_on FROM beat)) AS in_force, p.serves_to
FROM mqlayer_app.protocol p;

-- name: lp_set_keep
-- Extend the lease of the LP sets that a relay holds.
UPDATE mqlayer_app.lp_set SET lease_until = now() + make_interval(secs => %(lease_s)s)
WHERE relay_id = %(relay_id)s AND lease_until >= now() RETURNING lp_set;

-- name: lp_set_take
-- Take up to so many LP sets that nobody holds. In no fixed order: while leases are lost again and again, relays that
-- all took the first ones would leave the last ones to nobody.
WITH free AS MATERIALIZED (
    SELECT lp_set FROM mqlayer_app.lp_set WHERE relay_id IS NULL OR lease_until < now()
    ORDER BY random() LIMIT %(count)s FOR UPDATE SKIP LOCKED
)
UPDATE mqlayer_app.lp_set s SET relay_id = %(relay_id)s, epoch = nextval('mqlayer_app.relay_epoch'),
    lease_until = now() + make_interval(secs => %(lease_s)s)
FROM free
WHERE s.lp_set = free.lp_set RETURNING s.lp_set;

-- name: lp_set_release
-- Give LP sets back.
UPDATE mqlayer_app.lp_set SET relay_id = NULL, lease_until = '-infinity'
WHERE relay_id = %(relay_id)s AND lp_set = ANY(%(lp_sets)s::int[]);

-- name: relay_leave
-- A relay is gone by its own word.
DELETE FROM mqlayer_app.relay WHERE relay_id = %(relay_id)s;

-- name: relay_end_dead
-- Who waited for a relay's process saw it end: free its LP sets, and count it no more.
WITH gone AS (
    DELETE FROM mqlayer_app.relay WHERE relay_id = %(relay_id)s
), freed AS (
    UPDATE mqlayer_app.lp_set SET relay_id = NULL, lease_until = '-infinity' WHERE relay_id = %(relay_id)s RETURNING 1
)
SELECT count(*)::int FROM freed;

-- name: outbox_rotate
-- Empty one slot of the outbox where that is safe.
SELECT mqlayer_app.outbox_rotate_v1(%(slot)s::smallint) AS answer;

-- name: outbox_renew
-- Give a copied outbox an identity of its own; say how many rows wait in it then.
SELECT mqlayer_app.outbox_renew_v1(%(keep)s) AS waiting;

-- name: outbox_publish
-- Publish one message in the caller's transaction.
SELECT mqlayer_app.publish_v2(%(topic)s, %(key)s, %(body)s::bytea, %(headers)s::jsonb);

-- name: outbox_publish_many
-- Publish several messages in the caller's transaction. Arrays go in the binary format: in the text of one, where
-- array_nulls is off, null is the word; and Postgres casts an array of texts by way of its text.
SELECT mqlayer_app.publish_many_v1(
    %(topics)b::text[], %(keys)b::text[], %(bodies)b::bytea[],
    (SELECT array_agg(h::jsonb ORDER BY n) FROM unnest(%(headers)b::text[]) WITH ORDINALITY AS u(h, n)));

-- name: outbox_publish_once
-- Publish one message with a dedup id in the caller's transaction.
SELECT seq, duplicate
FROM mqlayer_app.publish_once_v1(%(topic)s, %(key)s, %(body)s::bytea, %(dedup_id)s, %(headers)s::jsonb);

-- name: outbox_publish_many_once
-- Publish several messages, some with dedup ids, in the caller's transaction. Of arrays: see outbox_publish_many.
SELECT mqlayer_app.publish_many_once_v1(%(topics)b::text[], %(keys)b::text[], %(bodies)b::bytea[],
                                        %(dedup_ids)b::text[],
    (SELECT array_agg(h::jsonb ORDER BY n) FROM unnest(%(headers)b::text[]) WITH ORDINALITY AS u(h, n)));

-- name: dedup_clean
-- Forget some dedup ids that are older than the window; say how many.
WITH gone AS (
    DELETE FROM mqlayer_app.dedup WHERE ctid IN (
        SELECT ctid FROM mqlayer_app.dedup
        WHERE published_at < clock_timestamp() - make_interval(secs => %(window_s)s) LIMIT %(limit)s)
    RETURNING 1)
SELECT count(*) FROM gone;

-- name: delayed_publish
-- Publish a message at a time, or after a delay by this database's clock, in the caller's transaction.
SELECT mqlayer_app.publish_at_v1(
    %(topic)s, %(key)s, %(body)s::bytea,
    coalesce(%(at)s::timestamptz, clock_timestamp() + make_interval(secs => %(delay_s)s::float8)), %(headers)s::jsonb);

-- name: delayed_cancel
-- Cancel a delayed message in the caller's transaction.
SELECT mqlayer_app.cancel_delayed_v1(%(delayed_id)s);

-- name: delayed_release
-- Move what is due to the outbox.
SELECT released, next_s FROM mqlayer_app.delayed_release_v1(%(limit)s, %(wait_ms)s);

-- name: delayed_list
-- Delayed messages, the next ones first, for people.
SELECT d.delayed_id, t.name AS topic, d.key, d.lp, d.due_at, d.created_at, d.body_size AS size
FROM mqlayer_app.delayed_fact d LEFT JOIN mqlayer_app.topic t USING (topic_id)
WHERE %(topic)s::text IS NULL OR t.name = %(topic)s ORDER BY d.due_at, d.delayed_id LIMIT %(limit)s;

-- name: delayed_drop
-- Drop all delayed messages: those of a copy are its original's to send.
DELETE FROM mqlayer_app.delayed;

-- name: outbox_trace
-- Leave a trace of a message that was collected in a savepoint; a rollback of the savepoint takes it back.
SELECT set_config('mqlayer.traces', concat_ws(',', nullif(current_setting('mqlayer.traces', true), ''),
                                              %(trace)s::text), true);

-- name: outbox_traces
-- The traces that are left of this transaction.
SELECT coalesce(current_setting('mqlayer.traces', true), '');

-- name: fence
-- Check and note a message in the effect's own transaction.
SELECT answer, epoch
FROM mqlayer_app.fence_v1(%(group_id)s, %(lp)s::smallint, %(source)s, %(key)s, %(seq)s, %(epoch)s, %(replay)s);

-- name: fence_many
-- Check and note the messages of a batch in the effect's own transaction; answers and epochs are in their order.
SELECT answers, epochs
FROM mqlayer_app.fence_many_v2(%(group_id)s, %(lps)s::smallint[], %(sources)s::bigint[], %(keys)b::text[],
                               %(seqs)s::bigint[], %(epochs)s::bigint[], %(replays)s::int[]);

-- name: fence_raise
-- Raise the epoch of a range of LPs for a new owner.
SELECT mqlayer_app.fence_raise_v1(%(group_id)s, %(lp_from)s::smallint, %(lp_to)s::smallint, %(epoch)s);

-- name: fences_raise
-- Raise the epochs of ranges of LPs, each for its new owner.
SELECT mqlayer_app.fence_raise_v1(%(group_id)s, lp_from, lp_to, epoch)
FROM unnest(%(lp_from)s::smallint[], %(lp_to)s::smallint[], %(epochs)s::bigint[]) AS owned (lp_from, lp_to, epoch)
ORDER BY lp_from;

-- name: fence_clean
-- Forget applied seqs beyond the redelivery horizon in some blocks of their table; how many, how many blocks it has, and
-- the time.
SELECT forgotten, blocks, date_part('epoch', now())
FROM mqlayer_app.fence_clean_v2(make_interval(secs => %(horizon_s)s), %(block)s, %(blocks)s);

-- name: application_right_held
-- Who calls, and whether it has a right for a scope, or this or one of the others without limits.
SELECT mqlayer_app.caller_v1(), mqlayer_app.has_for_v1(%(right)s, %(scope)s) OR mqlayer_app.has_v1(VARIADIC %(others)s::text[]);

-- name: application_change_allowed
-- Who calls, and whether it has one of these rights without limits.
SELECT mqlayer_app.caller_v1(), mqlayer_app.has_v1(VARIADIC %(rights)s::text[]);

-- name: known_groups
-- The groups whose names this database knows.
SELECT group_id, scope FROM mqlayer_app.known_group;

-- name: known_groups_put
-- Groups, each as TOPIC/GROUP.
INSERT INTO mqlayer_app.known_group (group_id, scope)
SELECT * FROM unnest(%(group_ids)s::bigint[], %(scopes)s::text[])
ON CONFLICT (group_id) DO UPDATE SET scope = excluded.scope;

-- name: outbox_uuid
-- The identity of this outbox.
SELECT outbox_uuid FROM mqlayer_app.identity;

-- name: message_in_outbox
-- A row of the outbox without its body, by its id or by its place in its LP.
SELECT o.id, o.topic_id, o.lp, o.seq, o.created_at, o.key, o.seq > coalesce(r.seq, 0) AS waits,
       CASE WHEN q.seq = o.seq THEN q.reason END AS quarantined
FROM mqlayer_app.outbox o
LEFT JOIN mqlayer_app.relayed r ON r.topic_id = o.topic_id AND r.lp = o.lp
LEFT JOIN mqlayer_app.quarantined q ON q.topic_id = o.topic_id AND q.lp = o.lp
WHERE CASE WHEN %(id)s::bigint IS NULL THEN o.topic_id = %(topic_id)s AND o.lp = %(lp)s AND o.seq = %(seq)s
           ELSE o.id = %(id)s END;

-- name: message_outbox_body
-- Headers and body of a row of the outbox.
SELECT headers, body FROM mqlayer_app.outbox WHERE topic_id = %(topic_id)s AND lp = %(lp)s AND seq = %(seq)s;

-- name: life_fence
-- What the fence and the inbox noted of a message and of its key in groups.
SELECT group_id, 'fence' AS kind, seq, applied_at FROM mqlayer_app.fence_applied
WHERE group_id = ANY(%(group_ids)s::bigint[]) AND lp = %(lp)s AND key = %(fence_key)s AND source_id = %(fence_source)s
UNION ALL
SELECT group_id, 'inbox', seq, applied_at FROM mqlayer_app.inbox
WHERE group_id = ANY(%(group_ids)s::bigint[]) AND id = %(message)s
ORDER BY applied_at;

-- name: searched_outbox_of_key
-- The messages of a key that wait for a relay, the latest first.
SELECT o.id, o.lp, o.seq, o.created_at FROM mqlayer_app.outbox o
WHERE o.topic_id = %(topic_id)s AND o.lp = %(lp)s AND o.key = %(key)s AND o.seq <= %(upto)s
  AND o.seq > coalesce((SELECT r.seq FROM mqlayer_app.relayed r
                        WHERE r.topic_id = o.topic_id AND r.lp = o.lp), 0)
ORDER BY o.seq DESC LIMIT %(limit)s;

-- name: searched_dedup
-- The message that a dedup id stands for, while it is remembered.
SELECT seq, published_at FROM mqlayer_app.dedup WHERE topic_id = %(topic_id)s AND lp = %(lp)s AND token = %(token)s;

-- name: life_fence_of_key
-- Up to which seq the fence noted the messages of a key in groups.
SELECT group_id, source_id, seq, applied_at FROM mqlayer_app.fence_applied
WHERE group_id = ANY(%(group_ids)s::bigint[]) AND lp = %(lp)s AND key = %(key)s ORDER BY applied_at;

-- name: large_body_put
-- Note a large body of a topic in the caller's transaction, or add a chunk to it.
SELECT mqlayer_app.large_body_put_v1(%(topic)s, %(body_id)s::uuid, %(size)s::bigint, %(sha256)s::bytea, %(bucket)s,
                                     %(location)s, %(direct)s::boolean, %(number)s::int, %(data)s::bytea);

-- name: large_body_scope
-- The identity of this outbox.
SELECT mqlayer_app.large_body_scope_v1()::text;

-- name: large_body_read
-- Where a body is, and some of its chunks; no row: no such body.
SELECT chunk.number, r.bucket, r.location, r.data
FROM generate_series(%(first)s::int, %(last)s::int) AS chunk(number)
CROSS JOIN LATERAL mqlayer_app.large_body_read_v1(%(body_id)s::uuid, chunk.number) AS r
ORDER BY chunk.number;

-- name: large_body_cut
-- Take cuts for bodies that have none.
SELECT mqlayer_app.large_body_cut_v1(%(limit)s, %(hold_s)s::double precision);

-- name: large_body_cuts_sent
-- Cuts without ends whose rows the outbox has emptied.
SELECT c.cut_id, c.topic_id FROM mqlayer_app.large_body_cut c
WHERE c.ends IS NULL AND mqlayer_app.large_body_sent_v1(c.cut_id) ORDER BY c.cut_id LIMIT 100;

-- name: large_body_cut_ends
-- Note the partitions' ends of a cut, once.
UPDATE mqlayer_app.large_body_cut SET ends = %(ends)s::jsonb WHERE cut_id = %(cut_id)s AND ends IS NULL;

-- name: large_body_cuts_logged
-- Cuts whose records may still be in partitions.
SELECT cut_id, topic_id, ends FROM mqlayer_app.large_body_cut WHERE ends IS NOT NULL AND trimmed_at IS NULL
ORDER BY cut_id LIMIT 1000;

-- name: large_body_cuts_trimmed
-- Note that partitions trimmed all records of cuts.
UPDATE mqlayer_app.large_body_cut SET trimmed_at = now() WHERE cut_id = ANY(%(cut_ids)s::bigint[]) AND trimmed_at IS NULL;

-- name: large_bodies_to_look_at
-- Bodies without records in partitions, those first that the last look was at longest ago.
SELECT b.body_id::text, mqlayer_app.large_body_waits_v1(b.body_id)
FROM mqlayer_app.large_body_cut c JOIN mqlayer_app.large_body b ON b.cut_id = c.cut_id
WHERE c.trimmed_at IS NOT NULL AND NOT b.removing ORDER BY b.looked_at NULLS FIRST LIMIT %(limit)s;

-- name: large_bodies_looked
-- Note what a look found, unless a message names the body anew.
UPDATE mqlayer_app.large_body b
SET looked_at = now(), free_since = CASE WHEN n.referenced THEN NULL ELSE coalesce(b.free_since, now()) END
FROM unnest(%(ids)s::uuid[], %(referenced)s::boolean[]) AS n (id, referenced)
WHERE b.body_id = n.id AND b.cut_id IS NOT NULL AND NOT b.removing;

-- name: large_bodies_remove
-- From here on no message may name them. Again without effect on those that one names since.
UPDATE mqlayer_app.large_body b SET removing = true
WHERE b.body_id = ANY(%(ids)s::uuid[]) AND b.cut_id IS NOT NULL
  AND b.free_since <= now() - make_interval(secs => %(hold_s)s) AND NOT b.removing;

-- name: large_bodies_removing
-- Bodies that are being removed.
SELECT b.body_id::text, b.bucket, b.location, b.size FROM mqlayer_app.large_body b WHERE b.removing
ORDER BY b.body_id LIMIT %(limit)s;

-- name: large_bodies_delete
-- Delete rows and chunks of bodies whose objects are gone.
DELETE FROM mqlayer_app.large_body WHERE body_id = ANY(%(ids)s::uuid[]) AND removing;

-- name: large_bodies_known
-- Which of these bodies have rows.
SELECT body_id::text FROM mqlayer_app.large_body WHERE body_id = ANY(%(ids)s::uuid[]);

-- name: large_bodies_scopes
-- The identities whose objects this outbox may remove: its own, and those that it goes on in place of.
SELECT array_append(coalesce(replaces, '{}'), outbox_uuid)::text[] FROM mqlayer_app.identity;
