-- name: check_patience
-- How long one question of the doctor may take.
SELECT set_config('statement_timeout', %(wait)s, false), set_config('lock_timeout', %(wait)s, false);

-- name: check_server
-- What a Postgres says of itself: version, whether it takes writes, durability, connections, and the time.
SELECT current_setting('server_version_num')::int, pg_is_in_recovery(), current_setting('fsync'),
       current_setting('full_page_writes'),
       -- As sessions begin: ours was set up.
       (SELECT reset_val FROM pg_settings WHERE name = 'synchronous_commit'),
       current_setting('synchronous_standby_names'), (SELECT count(*) FROM pg_stat_replication)::int,
       current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int,
       (SELECT coalesce(sum(numbackends), 0) FROM pg_stat_database)::int;

-- name: check_session_defaults
-- Settings that new sessions begin with, of roles, of the database, and of the server where these say nothing: whose, the
-- value, how long that is where it is a time, and how it is changed.
WITH said AS (
    SELECT s.setdatabase, r.rolname, split_part(one, '=', 1) AS name, substr(one, strpos(one, '=') + 1) AS value
    FROM pg_db_role_setting s CROSS JOIN LATERAL unnest(s.setconfig) AS one LEFT JOIN pg_roles r ON r.oid = s.setrole
    WHERE s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
      AND split_part(one, '=', 1) = ANY(%(names)s::text[])
), found AS (
    SELECT CASE WHEN rolname IS NULL THEN 'the database' ELSE format('role %%I', rolname) END AS who, name, value,
           CASE WHEN rolname IS NULL THEN format('ALTER DATABASE %%I RESET %%s', current_database(), name)
                WHEN setdatabase = 0 THEN format('ALTER ROLE %%I RESET %%s', rolname, name)
                ELSE format('ALTER ROLE %%I IN DATABASE %%I RESET %%s', rolname, current_database(), name) END AS fix
    FROM said
    UNION ALL
    SELECT 'the server', name, reset_val, format('ALTER SYSTEM RESET %%s, and what postgresql.conf says', name)
    FROM pg_settings s WHERE name = ANY(%(names)s::text[]) AND name <> 'client_encoding'
      AND NOT EXISTS (SELECT FROM said WHERE said.name = s.name)
)
SELECT who, name, value,
       CASE WHEN name LIKE '%%\_timeout'
            THEN extract(epoch FROM (value || CASE WHEN value ~ '^[0-9]+$' THEN 'ms' ELSE '' END)::interval)::float8 * 1000
       END, fix
FROM found ORDER BY who, name;

-- name: check_clock
-- The database's clock, in seconds.
SELECT extract(epoch FROM clock_timestamp())::float8;

-- name: check_statistics_allowed
-- Whether this role sees the transactions of others; and its name, quoted.
SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE'), quote_ident(current_user);

-- name: check_open_transactions
-- Transactions of this database that are open for long, whether they hold more than a reader's lock on our tables, the
-- sessions that each waits for, how many wait for it, its role, and where its client is.
SELECT a.pid, a.application_name, a.state, extract(epoch FROM clock_timestamp() - a.xact_start)::float8 AS age_s,
       EXISTS (SELECT FROM pg_locks l JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE l.pid = a.pid AND l.granted AND l.mode <> 'AccessShareLock'
                 AND n.nspname IN ('mqlayer', 'mqlayer_app')) AS ours,
       CASE WHEN a.wait_event_type = 'Lock' THEN pg_blocking_pids(a.pid) ELSE '{}' END AS waits_for,
       (SELECT count(*) FROM pg_stat_activity w
        WHERE w.wait_event_type = 'Lock' AND a.pid = ANY (pg_blocking_pids(w.pid)))::int AS waiting, a.usename,
       coalesce(host(a.client_addr), '') AS client
FROM pg_stat_activity a
WHERE a.datname = current_database() AND a.pid <> pg_backend_pid() AND a.backend_type = 'client backend'
  AND a.xact_start <= clock_timestamp() - make_interval(secs => %(age_s)s) ORDER BY a.xact_start;

-- name: check_prepared_transactions
-- Prepared transactions of this database that are old; they outlive their clients, and hold their locks.
SELECT p.gid, extract(epoch FROM clock_timestamp() - p.prepared)::float8 AS age_s,
       EXISTS (SELECT FROM pg_locks own
               JOIN pg_locks l ON l.virtualtransaction = own.virtualtransaction AND l.pid IS NULL
               JOIN pg_class c ON c.oid = l.relation JOIN pg_namespace n ON n.oid = c.relnamespace
               WHERE own.locktype = 'transactionid' AND own.transactionid = p.transaction AND own.pid IS NULL
                 AND l.mode <> 'AccessShareLock' AND n.nspname IN ('mqlayer', 'mqlayer_app')) AS ours
FROM pg_prepared_xacts p
WHERE p.database = current_database() AND p.prepared <= clock_timestamp() - make_interval(secs => %(age_s)s)
ORDER BY p.prepared;

-- name: check_synchronous
-- Synchronous standbys that are there, how many sessions wait for one at their COMMIT, and for how long the first has.
SELECT (SELECT count(*) FROM pg_stat_replication WHERE sync_state IN ('sync', 'quorum'))::int AS standbys,
       count(*)::int AS waiting, coalesce(extract(epoch FROM clock_timestamp() - min(query_start)), 0)::float8 AS waited_s
FROM pg_stat_activity WHERE wait_event = 'SyncRep';

-- name: check_slots
-- Whatever holds old rows or the log back for a replica: its name, its kind, whether it has a client, for how many
-- transactions rows of all tables, and of catalogs, have stayed, bytes of the log that are kept, and whether that was too much.
SELECT slot_name::text, slot_type || ' slot' AS kind, active, coalesce(age(xmin), 0) AS rows,
       coalesce(age(catalog_xmin), 0) AS catalog_rows,
       CASE WHEN NOT pg_is_in_recovery() THEN coalesce(pg_current_wal_lsn() - restart_lsn, 0) ELSE 0 END::bigint AS bytes,
       coalesce(wal_status, '') = 'lost' AS lost
FROM pg_replication_slots
UNION ALL
SELECT r.application_name, 'standby with hot_standby_feedback', true, age(r.backend_xmin), 0, 0, false
FROM pg_stat_replication r
WHERE r.backend_xmin IS NOT NULL AND NOT EXISTS (SELECT FROM pg_replication_slots s WHERE s.active_pid = r.pid)
ORDER BY 1;

-- name: check_publishers
-- Roles that may publish and whose idle transactions are never ended: not by the server's, the database's or their own
-- setting. Superusers may all; of them only the one that asks is named.
SELECT r.rolname FROM pg_roles r
WHERE r.rolcanlogin AND (NOT r.rolsuper OR r.rolname = current_user)
  AND has_function_privilege(r.oid, 'mqlayer_app.publish_v1(text, text, bytea, jsonb)', 'EXECUTE')
  AND NOT EXISTS (SELECT FROM pg_settings s
                  WHERE s.name = 'idle_in_transaction_session_timeout' AND s.setting <> '0'
                    AND s.source IN ('default', 'configuration file', 'command line'))
  AND NOT EXISTS (SELECT FROM pg_db_role_setting s CROSS JOIN LATERAL unnest(s.setconfig) AS one
                  WHERE s.setrole IN (0, r.oid)
                    AND s.setdatabase IN (0, (SELECT oid FROM pg_database WHERE datname = current_database()))
                    AND one LIKE 'idle_in_transaction_session_timeout=%%'
                    AND one NOT IN ('idle_in_transaction_session_timeout=0', 'idle_in_transaction_session_timeout=0s'))
ORDER BY r.rolname;

-- name: check_functions
-- How many of our functions look names up in pg_temp first, or where their caller says; one of them; and which of our
-- schemas a superuser owns, so that those who mislead a function have the whole server.
SELECT count(*) FILTER (WHERE open) AS open, min(name) FILTER (WHERE open) AS one,
       (SELECT string_agg(n.nspname, ', ' ORDER BY n.nspname) FROM pg_namespace n JOIN pg_roles r ON r.oid = n.nspowner
        WHERE n.nspname IN ('mqlayer', 'mqlayer_app', 'mqlayer_archive') AND r.rolsuper) AS of_superusers
FROM (
    SELECT n.nspname || '.' || p.proname AS name,
           NOT coalesce(array_to_string(p.proconfig, ' ') LIKE '%%pg_temp', false)
           AND (p.proconfig IS NOT NULL OR p.prosqlbody IS NULL) AS open
    FROM pg_proc p JOIN pg_namespace n ON n.oid = p.pronamespace
    WHERE n.nspname IN ('mqlayer', 'mqlayer_app', 'mqlayer_archive')
) AS functions;

-- name: check_nodes
-- All nodes, the given-up ones too, with their declared replicas, and topics there by durability class.
SELECT n.node_id, n.name, n.url, n.armed_run_id, n.lost_at, n.replicas,
       coalesce((SELECT jsonb_object_agg(d.durability, d.topic)
                 FROM (SELECT t.durability, min(t.name) AS topic FROM mqlayer.topic t JOIN mqlayer.partition p USING (topic_id)
                       WHERE p.node_id = n.node_id AND p.state <> 'deleted' AND t.durability <> 'node'
                       GROUP BY t.durability) d), '{}') AS classes
FROM mqlayer.node n WHERE n.removed_at IS NULL ORDER BY n.node_id;

-- name: check_replaced
-- Whether the server is another one than the schema knows, and how long ago the last one was noted that was: another
-- timeline begins with each promotion and recovery, and a commit or two may be missing on it.
SELECT s.timeline AS known, mqlayer.timeline_v1() AS now,
       s.system_id <> '' AND mqlayer.system_v1() NOT IN ('', s.system_id) AS another_system,
       (SELECT extract(epoch FROM clock_timestamp() - max(a.at))::float8 FROM mqlayer.audit a
        WHERE a.act = 'postgres replaced') AS noted_s
FROM mqlayer.server s;

-- name: check_numbers
-- The sequences that gave out most of their numbers.
SELECT n.sequence_name, n.used FROM mqlayer.numbers_used_v1() n WHERE n.used >= %(part)s ORDER BY 1;

-- name: check_unarmed
-- Nodes of which no run is armed at all, and for how long: since a Postgres was replaced, as a rule.
SELECT n.name, extract(epoch FROM clock_timestamp() - greatest(n.armed_at, s.since))::float8 AS age_s
FROM mqlayer.node n LEFT JOIN mqlayer.server s ON true
WHERE n.armed_run_id IS NULL AND n.lost_at IS NULL AND n.removed_at IS NULL ORDER BY n.node_id;

-- name: check_draining
-- Nodes that drain: for how long, partitions in force and sealed ones there, and how long ago one left it last.
SELECT n.name, extract(epoch FROM clock_timestamp() - n.draining_at)::float8 AS age_s,
       count(p.partition_id) FILTER (WHERE p.state IN ('open', 'importing'))::int AS open,
       count(p.partition_id) FILTER (WHERE p.state = 'sealed' OR p.state = 'deleted' AND p.retired_at IS NULL)::int AS sealed,
       extract(epoch FROM clock_timestamp() - greatest(n.draining_at, max(c.planned_at)))::float8 AS quiet_s
FROM mqlayer.node n LEFT JOIN mqlayer.partition p USING (node_id)
LEFT JOIN mqlayer.route_change c ON c.change_id = p.ended_by_change
WHERE n.draining_at IS NOT NULL AND n.removed_at IS NULL AND n.lost_at IS NULL
GROUP BY n.node_id ORDER BY n.node_id;

-- name: check_last_job
-- How long ago any periodic job ran; null where none ever did.
SELECT extract(epoch FROM now() - max(last_at))::float8 AS ago_s FROM mqlayer.job;

-- name: check_changes
-- Route changes that were begun a while ago and are not finished.
SELECT t.name, c.change_id, c.kind, c.state,
       extract(epoch FROM clock_timestamp() - coalesce(c.sealed_at, c.planned_at))::float8 AS age_s
FROM mqlayer.route_change c JOIN mqlayer.topic t USING (topic_id)
WHERE c.state IN ('planned', 'sealing', 'sealed')
  AND coalesce(c.sealed_at, c.planned_at) <= clock_timestamp() - make_interval(secs => %(age_s)s) ORDER BY c.change_id;

-- name: check_deletions
-- Topics whose deletion began a while ago and has not ended.
SELECT t.name, extract(epoch FROM clock_timestamp() - t.deleting_at)::float8 AS age_s FROM mqlayer.topic t
WHERE t.deleted_at IS NULL AND t.deleting_at <= clock_timestamp() - make_interval(secs => %(age_s)s) ORDER BY t.name;

-- name: check_groups
-- Groups that bound trimming, and how many members of each live. Nobody knows of receivers (ordered pop) where they are.
-- Of instances of broadcast groups: for how long they have been away, and for how long their positions are kept.
SELECT t.name, g.name, (SELECT count(*) FROM mqlayer.member m
                        WHERE m.group_id = g.group_id AND m.lease_until >= now())::int AS living,
       extract(epoch FROM clock_timestamp() - g.absent_since)::float8, b.instance_expiry_s
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id)
LEFT JOIN mqlayer.consumer_group b ON b.group_id = g.broadcast_of
WHERE g.state <> 'retired' AND g.mode IN ('exclusive', 'shared') AND (g.state = 'live' OR g.instance IS NOT NULL)
ORDER BY t.name, g.name;

-- name: check_parked
-- What groups have parked: keys, messages, keys that wait for an operator, whether one or the group is at a limit, since
-- when the oldest waits for an operator, and for how long the one that is due for longest has been so, of those that no
-- owner has in hand; none of a group that rests.
SELECT t.name, g.name, count(k.name)::int,
       (SELECT count(*) FROM mqlayer.parked_message m WHERE m.group_id = g.group_id)::int,
       count(k.name) FILTER (WHERE k.due_at IS NULL AND k.paused_at IS NULL)::int,
       bool_or(k.messages >= g.key_messages_limit OR k.bytes >= g.key_bytes_limit) OR EXISTS (
           SELECT FROM mqlayer.parked_total n WHERE n.group_id = g.group_id
           HAVING sum(n.messages) >= g.parked_messages_limit OR sum(n.bytes) >= g.parked_bytes_limit),
       extract(epoch FROM clock_timestamp() - min(k.parked_at) FILTER (WHERE k.due_at IS NULL AND k.paused_at IS NULL))::float8,
       extract(epoch FROM clock_timestamp() - min(k.due_at) FILTER (
           WHERE g.paused_at IS NULL AND t.paused_at IS NULL AND k.paused_at IS NULL AND NOT EXISTS (
               SELECT FROM mqlayer.partition_pause pp JOIN mqlayer.partition r USING (partition_id)
               WHERE pp.group_id = k.group_id AND k.lp >= r.lp_from AND k.lp < r.lp_to AND r.state <> 'deleted')
           AND NOT EXISTS (
           SELECT FROM mqlayer.assignment a
           WHERE a.group_id = k.group_id AND a.epoch = k.started AND a.member_id IS NOT NULL)))::float8
FROM mqlayer.parked_key k JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
GROUP BY t.name, g.name, g.group_id ORDER BY t.name, g.name;

-- name: check_pauses
-- What rests by an operator's word: what it is, the command that ends it, who said so, and for how long; keys as a count.
SELECT format('topic %%s', name), format('mqlayer topic resume %%s', name), paused_by,
       extract(epoch FROM clock_timestamp() - paused_at)::float8 AS age_s
FROM mqlayer.topic WHERE paused_at IS NOT NULL
UNION ALL
SELECT format('group %%s of topic %%s', g.name, t.name), format('mqlayer group resume %%s %%s', t.name, g.name), g.paused_by,
       extract(epoch FROM clock_timestamp() - g.paused_at)::float8
FROM mqlayer.consumer_group g JOIN mqlayer.topic t USING (topic_id) WHERE g.paused_at IS NOT NULL AND g.state <> 'retired'
UNION ALL
SELECT format('partition %%s for group %%s of topic %%s', p.partition_id, g.name, t.name),
       format('mqlayer group resume %%s %%s --partition %%s', t.name, g.name, p.partition_id), p.paused_by,
       extract(epoch FROM clock_timestamp() - p.paused_at)::float8
FROM mqlayer.partition_pause p JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.partition r USING (partition_id) WHERE g.state <> 'retired' AND r.state <> 'deleted'
UNION ALL
SELECT format('%%s keys of group %%s of topic %%s', count(*), g.name, t.name),
       format('mqlayer key resume %%s KEY --group %%s, for those of mqlayer parked list %%s %%s --waiting', t.name, g.name,
              t.name, g.name), min(k.paused_by), extract(epoch FROM clock_timestamp() - min(k.paused_at))::float8
FROM mqlayer.parked_key k JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE k.paused_at IS NOT NULL GROUP BY t.name, g.name
ORDER BY 1;

-- name: check_relays
-- How many relays live, and how many LP sets no living one holds.
SELECT (SELECT count(*) FROM mqlayer_app.relay WHERE lease_until >= now())::int,
       (SELECT count(*) FROM mqlayer_app.lp_set WHERE relay_id IS NULL OR lease_until < now())::int;

-- name: check_outbox
-- How many rows wait to be relayed, but for LPs that a row quarantined holds, and for how long the oldest.
SELECT coalesce(sum(c.seq - coalesce(r.seq, 0)), 0)::bigint AS waiting,
       coalesce(extract(epoch FROM clock_timestamp() - min(o.created_at)), 0)::float8 AS oldest_s
FROM mqlayer_app.counter c
LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
LEFT JOIN mqlayer_app.quarantined s ON s.topic_id = c.topic_id AND s.lp = c.lp
CROSS JOIN LATERAL (
    SELECT o.created_at FROM mqlayer_app.outbox o
    WHERE o.topic_id = c.topic_id AND o.lp = c.lp AND o.seq > coalesce(r.seq, 0) ORDER BY o.seq LIMIT 1
) AS o
WHERE c.seq > coalesce(r.seq, 0) AND s.lp IS NULL;

-- name: check_quarantine
-- How many LPs a row quarantined holds, and the reason of the oldest.
SELECT count(*)::int, min(reason) FILTER (WHERE first)
FROM (SELECT reason, row_number() OVER (ORDER BY quarantined_at, topic_id, lp) = 1 AS first FROM mqlayer_app.quarantined) AS s;

-- name: check_voided
-- How many rows of best_effort topics were passed over and wait for an operator, and the reason of the oldest.
SELECT count(*)::int, min(reason) FILTER (WHERE first)
FROM (SELECT reason, row_number() OVER (ORDER BY voided_at, id) = 1 AS first FROM mqlayer_app.voided
      WHERE ended IS NULL) AS v;

-- name: check_large_bodies
-- How many large bodies there are, their bytes, how many have been on their way out for an hour, and how many topics
-- have a cut whose rows the outbox has kept for a day.
SELECT count(*)::int, coalesce(sum(size), 0)::bigint,
       (count(*) FILTER (WHERE removing AND looked_at < now() - interval '1 hour'))::int,
       (SELECT count(DISTINCT c.topic_id) FROM mqlayer_app.large_body_cut c
        WHERE c.ends IS NULL AND c.made_at < now() - interval '1 day')::int
FROM mqlayer_app.large_body;

-- name: metrics_large_bodies
-- Bytes of large bodies by store: those that are kept, and those that are being removed.
SELECT s.store, coalesce(sum(b.size) FILTER (WHERE NOT b.removing), 0)::bigint,
       coalesce(sum(b.size) FILTER (WHERE b.removing), 0)::bigint
FROM (VALUES ('postgres', false), ('s3', true)) AS s (store, in_bucket)
LEFT JOIN mqlayer_app.large_body b ON (b.bucket IS NOT NULL) = s.in_bucket GROUP BY s.store ORDER BY s.store;

-- name: check_versions
-- Entities whose next version is overdue: how many, how many events are held behind it, for how long the first, and of which
-- name that is.
SELECT count(*)::int, coalesce(sum(held_messages), 0)::bigint,
       coalesce(extract(epoch FROM clock_timestamp() - min(missing_since)), 0)::float8,
       (array_agg(name ORDER BY missing_since))[1]
FROM mqlayer_app.entity_version
WHERE alarm_at IS NOT NULL AND missing_since + make_interval(secs => gap_s) <= clock_timestamp();

-- name: check_archive
-- Topics that are archived: gaps that partitions wait at, how long ago an archiver came to their end, and of how many
-- offsets nodes dropped what became of them, where that went on within a day.
SELECT t.name, (SELECT count(*) FROM mqlayer_archive.gap g WHERE g.topic_id = t.topic_id AND g.accepted_at IS NULL)::int,
       extract(epoch FROM clock_timestamp() - a.last_pass_at)::float8 AS passed_s,
       (SELECT coalesce(sum(o.dropped), 0) FROM mqlayer_archive.outcome_progress o
        JOIN mqlayer.consumer_group g USING (group_id)
        WHERE g.topic_id = t.topic_id AND o.dropped_at > now() - interval '1 day')::bigint AS dropped
FROM mqlayer_archive.topic a JOIN mqlayer.topic t USING (topic_id) WHERE t.archived AND t.deleted_at IS NULL ORDER BY t.name;

-- name: check_schedules
-- Schedules: the end of the last run with its error, or a job's, and age, the jobs that found faults, and how long it is overdue.
SELECT s.name, r.state,
       coalesce(r.error, (SELECT j.value ->> 'error' FROM jsonb_each(r.results) j WHERE j.value ? 'error'
                          ORDER BY j.key LIMIT 1)) AS error,
       extract(epoch FROM clock_timestamp() - r.ended_at)::float8 AS age_s,
       coalesce((SELECT array_agg(j.key ORDER BY j.key) FROM jsonb_each(r.results) j WHERE j.value ->> 'state' <> 'good'),
                '{}') AS jobs,
       CASE WHEN s.paused_at IS NULL AND o.run_id IS NULL THEN
           greatest(0, extract(epoch FROM clock_timestamp() - s.next_at))::float8 ELSE 0 END AS overdue_s
FROM mqlayer.analytics_schedule s
LEFT JOIN LATERAL (SELECT * FROM mqlayer.analytics_run e WHERE e.schedule = s.name AND e.state <> 'running'
                   ORDER BY e.run_id DESC LIMIT 1) r ON true
LEFT JOIN mqlayer.analytics_run o ON o.schedule = s.name AND o.state = 'running'
ORDER BY s.name;

-- name: outbox_waiting
-- What waits in the outbox by topic and node, given the LPs of each: messages, those behind a quarantined row, LPs, and when
-- the oldest was committed. No node: the LPs have none.
SELECT c.topic, w.node, sum(c.seq - coalesce(r.seq, 0))::bigint AS waiting,
       coalesce(sum(c.seq - coalesce(r.seq, 0)) FILTER (WHERE s.lp IS NOT NULL), 0)::bigint AS held, count(*)::int AS lps,
       min(o.created_at) AS oldest_at
FROM mqlayer_app.counter c
LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
LEFT JOIN mqlayer_app.quarantined s ON s.topic_id = c.topic_id AND s.lp = c.lp
LEFT JOIN (SELECT u.topic_id, u.node, u.lps::int4multirange AS lps
           FROM unnest(%(topic_ids)s::int[], %(nodes)s::text[], %(lps)s::text[]) AS u(topic_id, node, lps)) AS w
       ON w.topic_id = c.topic_id AND w.lps @> c.lp::int
CROSS JOIN LATERAL (
    SELECT o.created_at FROM mqlayer_app.outbox o
    WHERE o.topic_id = c.topic_id AND o.lp = c.lp AND o.seq > coalesce(r.seq, 0) ORDER BY o.seq LIMIT 1
) AS o
WHERE c.seq > coalesce(r.seq, 0)
GROUP BY c.topic, w.node ORDER BY waiting DESC, c.topic, w.node;
