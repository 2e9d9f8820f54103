-- name: outbox_here
-- Whether this database has an outbox, and whether the caller may read it.
SELECT o.outbox IS NOT NULL, has_table_privilege(o.outbox, 'SELECT') AND has_table_privilege(o.delayed, 'SELECT')
FROM (SELECT to_regclass('mqlayer_app.outbox')::oid, to_regclass('mqlayer_app.delayed')::oid) AS o(outbox, delayed);

-- name: outbox_uncommitted
-- What the open transaction has published and delayed, for its own tests. A row that is seen while its transaction is in
-- progress is of this one, or of a subtransaction of it. Row headers have 32 bits of a transaction's number; the whole one
-- is the nearest to the latest.
WITH latest AS (SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint AS xid),
written AS (
    SELECT o.topic_id, o.key, o.body, o.headers, NULL::timestamptz AS due_at, o.id AS n, o.xmin::text::bigint AS short
    FROM mqlayer_app.outbox o
    UNION ALL
    SELECT d.topic_id, d.key, d.body, d.headers, d.due_at, d.delayed_id, d.xmin::text::bigint
    FROM mqlayer_app.delayed d
),
numbered AS (
    SELECT w.*, l.xid + mod(w.short - (l.xid & 4294967295) + 6442450944, 4294967296) - 2147483648 AS xid
    FROM written w, latest l
)
SELECT array_agg(t.name ORDER BY n.due_at IS NOT NULL, n.n), array_agg(n.key ORDER BY n.due_at IS NOT NULL, n.n),
       array_agg(n.body ORDER BY n.due_at IS NOT NULL, n.n), array_agg(n.headers ORDER BY n.due_at IS NOT NULL, n.n),
       array_agg(n.due_at ORDER BY n.due_at IS NOT NULL, n.n)
FROM numbered n JOIN mqlayer_app.topic t USING (topic_id)
WHERE n.xid > 2 AND pg_xact_status(n.xid::text::xid8) = 'in progress';

-- name: outbox_ends
-- The last numbers of the outbox and of its delayed messages.
SELECT (SELECT coalesce(max(id), 0) FROM mqlayer_app.outbox), (SELECT coalesce(max(delayed_id), 0) FROM mqlayer_app.delayed);

-- name: outbox_after
-- The messages that were committed behind a number.
SELECT o.id, t.name, o.lp, o.seq, o.key, o.body, o.headers
FROM mqlayer_app.outbox o JOIN mqlayer_app.topic t USING (topic_id)
WHERE o.id > %(after)s AND NOT o.id = ANY(%(known)s::bigint[]) ORDER BY o.id;

-- name: delayed_after
-- The delayed messages behind a number, with the seconds until they are due.
SELECT d.delayed_id, t.name, d.key, d.body, d.headers, date_part('epoch', d.due_at - clock_timestamp())
FROM mqlayer_app.delayed d JOIN mqlayer_app.topic t USING (topic_id)
WHERE d.delayed_id > %(after)s ORDER BY d.delayed_id;

-- name: delayed_count_due
-- How many delayed messages are due within some seconds.
SELECT count(*) FROM mqlayer_app.delayed WHERE due_at <= clock_timestamp() + make_interval(secs => %(within_s)s);

-- name: outbox_numbered
-- How many messages the outbox has numbered.
SELECT coalesce(sum(seq), 0)::bigint FROM mqlayer_app.counter;

-- name: topic_number_for_tests
-- A number for a topic that only a database of tests knows: above those of real topics.
SELECT greatest(max(topic_id), 2000000000) + 1 FROM mqlayer_app.topic;

-- name: topics_of_tests_drop
-- Forget the topics that only tests knew, with their messages: real ones of these names are to come.
WITH messages AS (DELETE FROM mqlayer_app.outbox WHERE topic_id > 2000000000),
delayed AS (DELETE FROM mqlayer_app.delayed WHERE topic_id > 2000000000),
counters AS (DELETE FROM mqlayer_app.counter WHERE topic_id > 2000000000)
DELETE FROM mqlayer_app.topic WHERE topic_id > 2000000000;
