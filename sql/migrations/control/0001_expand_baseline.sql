-- The control schema `mqlayer` and the archive `mqlayer_archive`, in this order:
--
--   rights of roles · versions · nodes · topics · partitions and routes · sources · groups · members and assignments
--   parked messages · dead messages and failures · redrives and replays · jobs and audit · console · the server
--   deletions · archive · rows that a role may see · privileges
--
-- ARCHITECTURE.md says who writes each table. sql/schema.sql shows all of them at a glance.
--
-- Bounds. Each text, document and byte string that a right may write has a bound far above real values: keys have 512
-- bytes, headers 8 kB, bodies 1 MB, texts of errors some thousand bytes. Other processes read these columns as a whole,
-- and one value of many megabytes would fill the memory of each of them. Times and counts have bounds too, because
-- programs can hold no others and a list fails with one bad row.
--
-- Functions. Each one looks names up in pg_temp last (sql/owner/paths.sql). One whose body Postgres parses when it is
-- made, and that sets no path, needs none, and Postgres inlines it.

CREATE SCHEMA IF NOT EXISTS mqlayer;
REVOKE ALL ON SCHEMA mqlayer FROM PUBLIC;
CREATE SCHEMA IF NOT EXISTS mqlayer_archive;
REVOKE ALL ON SCHEMA mqlayer_archive FROM PUBLIC;


-- Rights of roles ----------------------------------------------------------------------------------------------------
-- A right comes with the privileges in sql/rights/<right>.sql, which `mqlayer grant` gives. The functions here say
-- which rows a role may see and change.

-- Rights that roles have. The owner of this schema and superusers need no row.
CREATE TABLE mqlayer.granted (
    role      regrole NOT NULL,
    privilege text NOT NULL,
    -- A topic, or TOPIC/GROUP. Empty: all.
    scope     text NOT NULL DEFAULT '',
    CONSTRAINT granted_key PRIMARY KEY (role, privilege, scope),
    CONSTRAINT granted_privilege CHECK (privilege IN ('publish', 'consume', 'relay', 'work', 'view', 'analyze', 'operate'))
);

-- The role that calls: the one that was set, else the one that logged in. Within functions that run as their owner, and
-- in policies, current_user is another role.
CREATE FUNCTION mqlayer.caller_v1() RETURNS name LANGUAGE sql STABLE
    RETURN coalesce(nullif(current_setting('role'), 'none'), session_user::text)::name;

-- Whether the caller has one of these rights without limits, by a grant to it or to a role that it is a member of.
CREATE FUNCTION mqlayer.has_v1(VARIADIC p_privileges text[]) RETURNS boolean
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := mqlayer.caller_v1();
BEGIN
    RETURN pg_has_role(v_caller, current_user, 'USAGE') OR EXISTS (
        SELECT FROM mqlayer.granted g
        WHERE g.privilege = ANY(p_privileges) AND g.scope = '' AND pg_has_role(v_caller, g.role, 'USAGE'));
END $$;

-- Whether the caller has a right for a topic, or for TOPIC/GROUP. For an empty scope: without limits.
CREATE FUNCTION mqlayer.has_for_v1(p_privilege text, p_scope text) RETURNS boolean
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := mqlayer.caller_v1();
BEGIN
    RETURN pg_has_role(v_caller, current_user, 'USAGE') OR EXISTS (
        SELECT FROM mqlayer.granted g
        WHERE g.privilege = p_privilege AND g.scope IN ('', p_scope) AND pg_has_role(v_caller, g.role, 'USAGE'));
END $$;

-- The groups that the caller may consume by name, with the instances of those that broadcast.
CREATE FUNCTION mqlayer.groups_v1() RETURNS bigint[]
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := mqlayer.caller_v1();
BEGIN
    RETURN (
        WITH named AS (
            SELECT g.group_id FROM mqlayer.granted r
            JOIN mqlayer.topic t ON t.name = split_part(r.scope, '/', 1)
            JOIN mqlayer.consumer_group g ON g.topic_id = t.topic_id AND g.name = split_part(r.scope, '/', 2)
            WHERE r.privilege = 'consume' AND r.scope <> '' AND pg_has_role(v_caller, r.role, 'USAGE'))
        SELECT coalesce(array_agg(group_id), '{}') FROM (
            SELECT group_id FROM named
            UNION ALL
            SELECT i.group_id FROM mqlayer.consumer_group i JOIN named n ON i.broadcast_of = n.group_id) AS theirs);
END $$;


-- Versions -----------------------------------------------------------------------------------------------------------
-- Which code may work on this schema, and what it writes: docs/design/upgrades.md. The processes are further down.

CREATE TABLE mqlayer.protocol (
    only_one     boolean NOT NULL DEFAULT true,
    -- Code that knows no version from here on is drained and refused: the version in force, or the next one while a
    -- finalization drains older processes.
    serves_from  int NOT NULL,
    -- The version in force: what processes write. 0 while the schema is being made.
    in_force     int NOT NULL,
    -- The highest version whose expand steps ran.
    serves_to    int NOT NULL,
    expanded_at  timestamptz NOT NULL DEFAULT now(),
    finalized_at timestamptz,
    CONSTRAINT protocol_key PRIMARY KEY (only_one),
    CONSTRAINT protocol_only_one CHECK (only_one),
    CONSTRAINT protocol_versions CHECK (in_force >= 0 AND serves_from BETWEEN in_force AND in_force + 1
                                        AND serves_to BETWEEN serves_from AND 1000000)
);
INSERT INTO mqlayer.protocol (serves_from, in_force, serves_to) VALUES (0, 0, 0);

-- Refuse code that this schema does not serve, and return the version in force. The lock has a finalization see the row
-- that the caller adds, or the caller see the finalization.
CREATE FUNCTION mqlayer.protocol_admit_v1(p_least int, p_most int) RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_protocol mqlayer.protocol;
BEGIN
    SELECT * INTO v_protocol FROM mqlayer.protocol FOR SHARE;
    IF p_most < v_protocol.serves_from OR p_least > v_protocol.in_force THEN
        RAISE EXCEPTION 'this code has protocol % to %, the control schema serves % to %', p_least, p_most,
                        v_protocol.serves_from, v_protocol.serves_to
            USING ERRCODE = 'MQ012', HINT = CASE WHEN p_most < v_protocol.serves_from
                THEN 'upgrade mqlayer on this machine'
                ELSE 'run `mqlayer upgrade finalize` of the release between' END;
    END IF;
    RETURN v_protocol.in_force;
END $$;


-- Nodes --------------------------------------------------------------------------------------------------------------

CREATE TABLE mqlayer.node (
    node_id      int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text NOT NULL,
    -- An address only. Each process has its users and passwords in its settings: every role that reads nodes would read
    -- the passwords of all.
    url          text NOT NULL,
    -- The run that processes may use. They refuse another run id at the same address until the node is armed again.
    armed_run_id text,
    armed_at     timestamptz,
    -- The run that was armed last, also while none is armed. A Postgres that was replaced arms none, and the primary of
    -- before must not count as unknown once its replica is armed.
    last_run_id  text,
    -- Runs that were armed and replaced since. A process that still meets an old primary must not arm it again.
    former_runs  text[] NOT NULL DEFAULT '{}',
    -- When an operator gave the node up. Null again once it is back.
    lost_at      timestamptz,
    -- Since when its partitions move away. It gets no new ones.
    draining_at  timestamptz,
    -- When it was removed, empty. Its row stays under the name NAME@ID, so that NAME is free.
    removed_at   timestamptz,
    -- Where it is: partitions of topics with this home, and members of this zone, prefer it. Empty: nowhere.
    zone         text NOT NULL DEFAULT '',
    created_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT node_name_unique UNIQUE (name),
    CONSTRAINT node_name_form CHECK (name ~ CASE WHEN removed_at IS NULL
        THEN '^[a-z][a-z0-9_.-]{0,62}$' ELSE '^[a-z][a-z0-9_.-]{0,62}@[0-9]+$' END),
    CONSTRAINT node_zone_form CHECK (zone ~ '^([a-z0-9][a-z0-9_.-]{0,62})?$'),
    CONSTRAINT node_drain_times CHECK (
        draining_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND removed_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT node_url_is_address CHECK (
        url !~ '^[^/]*//[^/?#]*@'
        AND url !~ '[?&](username|password|credential_provider|sentinel_username|sentinel_password|ssl_password)='),
    CONSTRAINT node_texts CHECK (
        octet_length(url) <= 4096 AND octet_length(armed_run_id) <= 1024 AND octet_length(last_run_id) <= 1024
        AND pg_column_size(former_runs) <= 1000000)
);


-- Topics -------------------------------------------------------------------------------------------------------------

CREATE TABLE mqlayer.topic (
    topic_id       int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name           text NOT NULL,
    strategy       text NOT NULL,
    body_limit     int NOT NULL,
    backlog_limit  bigint NOT NULL,
    -- Whether the archive keeps the topic's records. If it does, they are trimmed only once they are there.
    archived       boolean NOT NULL DEFAULT false,
    -- The archive drops older days, once that is so for every topic with something in them. Null: it drops none.
    retention_days int,
    -- For how long, up to how many bytes and records of a partition its streams keep settled records; 0: no limit.
    -- Without one, they go once they are settled.
    retain_s        bigint NOT NULL DEFAULT 0,
    retain_bytes    bigint NOT NULL DEFAULT 0,
    retain_messages bigint NOT NULL DEFAULT 0,
    -- drop: beyond the limits, unsettled records go too.
    retain_unsettled text NOT NULL DEFAULT 'keep',
    -- How long after its publishing a handler may be given a message; 0: for ever.
    message_ttl_s  bigint NOT NULL DEFAULT 0,
    -- What an older one becomes: settle: it is settled, and counted. dead: a dead message.
    expired        text NOT NULL DEFAULT 'settle',
    -- The route version in force. Null until the first one exists.
    version        int,
    -- Always 0: with it a foreign key demands the first range of the version.
    lp_zero        smallint NOT NULL DEFAULT 0,
    -- All groups of a paused topic rest. Published messages wait.
    paused_at      timestamptz,
    paused_by      text,
    -- Which readers the next schema of its bodies may not break.
    schema_mode    text NOT NULL DEFAULT 'backward',
    -- The zone whose nodes its partitions prefer. Empty: any.
    home_zone      text NOT NULL DEFAULT '',
    created_at     timestamptz NOT NULL DEFAULT now(),
    -- When its deletion began, and when the topic was deleted. Rows and archive stay under the name NAME@ID, which no
    -- topic can be created with, so that NAME is free.
    deleting_at    timestamptz,
    deleted_at     timestamptz,
    -- Sources of outboxes that no longer publish to it.
    detached       bigint[] NOT NULL DEFAULT '{}',
    CONSTRAINT topic_name_unique UNIQUE (name),
    CONSTRAINT topic_name_form CHECK (name ~ CASE WHEN deleted_at IS NULL
        THEN '^[a-z][a-z0-9_.-]{0,62}$' ELSE '^[a-z][a-z0-9_.-]{0,62}@[0-9]+$' END),
    CONSTRAINT topic_deleting_first CHECK (deleted_at IS NULL OR deleting_at IS NOT NULL),
    CONSTRAINT topic_deletion_times CHECK (
        deleting_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND deleted_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT topic_detached_size CHECK (pg_column_size(detached) <= 1000000),
    CONSTRAINT topic_strategy CHECK (strategy IN ('strict', 'best_effort')),
    CONSTRAINT topic_body_limit CHECK (body_limit BETWEEN 1 AND 1000000),
    CONSTRAINT topic_backlog_limit CHECK (backlog_limit >= 0),
    CONSTRAINT topic_retention CHECK (retention_days >= 1),
    CONSTRAINT topic_retain CHECK (retain_s BETWEEN 0 AND 3153600000 AND retain_bytes BETWEEN 0 AND 1000000000000000
                                   AND retain_messages BETWEEN 0 AND 1000000000000000),
    CONSTRAINT topic_retain_unsettled CHECK (retain_unsettled IN ('keep', 'drop')),
    CONSTRAINT topic_drop_needs_limit
        CHECK (retain_unsettled = 'keep' OR greatest(retain_s, retain_bytes, retain_messages) > 0),
    CONSTRAINT topic_message_ttl CHECK (message_ttl_s BETWEEN 0 AND 3153600000),
    CONSTRAINT topic_expired CHECK (expired IN ('settle', 'dead')),
    CONSTRAINT topic_version CHECK (version >= 1),
    CONSTRAINT topic_lp_zero CHECK (lp_zero = 0),
    CONSTRAINT topic_paused_by CHECK (octet_length(paused_by) <= 4096),
    CONSTRAINT topic_home_zone_form CHECK (home_zone ~ '^([a-z0-9][a-z0-9_.-]{0,62})?$'),
    CONSTRAINT topic_schema_mode CHECK (schema_mode IN ('backward', 'forward', 'full', 'none'))
);

-- The JSON Schemas of a topic's bodies, as one version after the other. Processes of publishers and consumers bring
-- them, each after it compared its own with those before.
CREATE TABLE mqlayer.topic_schema (
    topic_id  int NOT NULL REFERENCES mqlayer.topic ON DELETE CASCADE,
    version   int NOT NULL,
    -- The topic's mode by which it was accepted.
    mode      text NOT NULL,
    schema    text NOT NULL,
    actor     text NOT NULL,
    role      name NOT NULL DEFAULT mqlayer.caller_v1(),
    stored_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT topic_schema_key PRIMARY KEY (topic_id, version),
    CONSTRAINT topic_schema_version CHECK (version BETWEEN 1 AND 1000),
    CONSTRAINT topic_schema_mode CHECK (mode IN ('backward', 'forward', 'full', 'none')),
    CONSTRAINT topic_schema_texts CHECK (octet_length(schema) <= 262144 AND octet_length(actor) <= 4096)
);

-- Store the next version of a topic's schema, unless another process stored one meanwhile, or the mode changed: then
-- the caller has to compare again.
CREATE FUNCTION mqlayer.topic_schema_put_v1(p_topic text, p_version int, p_mode text, p_schema text, p_actor text)
    RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := mqlayer.caller_v1();
    v_topic_id int;
BEGIN
    IF NOT (mqlayer.has_v1('operate', 'publish', 'consume') OR EXISTS (
            SELECT FROM mqlayer.granted g WHERE g.privilege = 'consume' AND split_part(g.scope, '/', 1) = p_topic
                                            AND pg_has_role(v_caller, g.role, 'USAGE'))) THEN
        RAISE EXCEPTION 'role "%" lacks the right to consume topic %, or to publish', v_caller, coalesce(p_topic, 'null')
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant consume ' || v_caller || coalesce(' --group ' || p_topic || '/GROUP', '');
    END IF;
    IF (p_version BETWEEN 1 AND 1000) IS NOT TRUE THEN
        RAISE EXCEPTION 'p_version is %, its bounds are 1 and 1000', coalesce(p_version::text, 'null')
            USING ERRCODE = 'MQ009', HINT = 'a topic keeps 1000 versions of its schema: use a new topic';
    END IF;
    -- One at a time, and not while the mode changes.
    SELECT t.topic_id INTO v_topic_id FROM mqlayer.topic t
    WHERE t.name = p_topic AND t.schema_mode = p_mode FOR NO KEY UPDATE;
    IF v_topic_id IS NULL OR p_version <> 1 + (
        SELECT coalesce(max(s.version), 0) FROM mqlayer.topic_schema s WHERE s.topic_id = v_topic_id) THEN
        RETURN false;
    END IF;
    PERFORM p_schema::json;
    INSERT INTO mqlayer.topic_schema (topic_id, version, mode, schema, actor)
    VALUES (v_topic_id, p_version, p_mode, p_schema, p_actor) ON CONFLICT DO NOTHING;
    RETURN FOUND;
END $$;

-- A topic's route version only ever goes to the next one.
CREATE FUNCTION mqlayer.route_version_guard() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF NEW.version IS DISTINCT FROM OLD.version THEN
        IF NEW.version IS NULL OR NEW.version <> coalesce(OLD.version, 0) + 1 THEN
            RAISE EXCEPTION 'route version of topic % can only go from % to the next one',
                OLD.name, coalesce(OLD.version, 0)
                USING ERRCODE = 'check_violation', CONSTRAINT = 'topic_version_consecutive';
        END IF;
        PERFORM pg_notify('mqlayer_route', OLD.name);
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER topic_version_consecutive BEFORE UPDATE OF version ON mqlayer.topic
    FOR EACH ROW EXECUTE FUNCTION mqlayer.route_version_guard();


-- Partitions and routes ----------------------------------------------------------------------------------------------
-- Splits, merges and moves, and how far each group is in the lineage of partitions. The protocol: docs/design/route-changes.md.

-- One change of a topic's route. It walks through its states, and each process that finds it unfinished repeats the
-- step: planned -> sealing -> sealed -> done, or planned -> dropped. A partition is sealed only in `sealing`, so before
-- that the change may be dropped, wherever its planner was stopped. After that it only goes forward.
CREATE TABLE mqlayer.route_change (
    change_id  int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id   int NOT NULL REFERENCES mqlayer.topic,
    -- The route version that it makes.
    version    int NOT NULL,
    kind       text NOT NULL,
    state      text NOT NULL DEFAULT 'planned',
    -- The part of the parent's node. live: the node seals the parent. away: the outbox proves the marks, and the node
    -- seals when it is back. lost: the node never comes back, and the outbox sends again all that it still holds.
    mode       text NOT NULL DEFAULT 'live',
    actor      text NOT NULL,
    planned_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    sealed_at  timestamptz,
    opened_at  timestamptz,
    ended_at   timestamptz,
    CONSTRAINT route_change_kind CHECK (kind IN ('split', 'merge', 'move')),
    CONSTRAINT route_change_mode CHECK (mode IN ('live', 'unreachable', 'lost')),
    CONSTRAINT route_change_state CHECK (state IN ('planned', 'sealing', 'sealed', 'done', 'dropped')),
    CONSTRAINT route_change_actor CHECK (octet_length(actor) <= 4096)
);
CREATE UNIQUE INDEX route_change_one_at_a_time ON mqlayer.route_change (topic_id)
    WHERE state IN ('planned', 'sealing', 'sealed');
CREATE UNIQUE INDEX route_change_version ON mqlayer.route_change (topic_id, version) WHERE state <> 'dropped';

CREATE TABLE mqlayer.partition (
    -- Never used twice: the identity column only grows, and deleted partitions keep their row.
    partition_id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     int NOT NULL REFERENCES mqlayer.topic,
    node_id      int NOT NULL REFERENCES mqlayer.node,
    lp_from      smallint NOT NULL,
    lp_to        smallint NOT NULL,
    state        text NOT NULL DEFAULT 'importing',
    -- The parents of a partition are those that the change of its birth ended, and whose LPs it took over.
    created_by_change      int REFERENCES mqlayer.route_change,
    ended_by_change     int REFERENCES mqlayer.route_change,
    created_at   timestamptz NOT NULL DEFAULT now(),
    -- Deleted partitions only: Redis has only its tombstone.
    retired_at   timestamptz,
    CONSTRAINT partition_range CHECK (lp_from >= 0 AND lp_from < lp_to AND lp_to <= 1024),
    CONSTRAINT partition_state CHECK (state IN ('importing', 'open', 'sealed', 'deleted')),
    CONSTRAINT partition_of_topic UNIQUE (topic_id, partition_id),
    CONSTRAINT partition_range_known UNIQUE (partition_id, lp_from, lp_to)
);
CREATE INDEX partition_by_node ON mqlayer.partition (node_id);
CREATE INDEX partition_by_created_by_change ON mqlayer.partition (created_by_change) WHERE created_by_change IS NOT NULL;
CREATE INDEX partition_by_ended_by_change ON mqlayer.partition (ended_by_change) WHERE ended_by_change IS NOT NULL;
-- Rebalances and heartbeats look through these only: tombstones are many in the long run.
CREATE INDEX partition_in_use ON mqlayer.partition (topic_id) WHERE state IN ('open', 'sealed');

-- The ranges of every version tile [0, 1024): each range's end, taken round the ring, is the start of another range of
-- the same version, starts and ends are unique, and ranges only go forward. Following the ends from 0 therefore walks
-- every range exactly once and comes back through 1024. No version can commit with a gap or an overlap.
CREATE TABLE mqlayer.route (
    topic_id     int NOT NULL REFERENCES mqlayer.topic,
    version      int NOT NULL,
    lp_from      smallint NOT NULL,
    lp_to        smallint NOT NULL,
    next_from    smallint NOT NULL GENERATED ALWAYS AS ((lp_to % 1024)::smallint) STORED,
    partition_id int NOT NULL,
    CONSTRAINT route_key PRIMARY KEY (topic_id, version, lp_from),
    CONSTRAINT route_range CHECK (lp_from >= 0 AND lp_from < lp_to AND lp_to <= 1024),
    CONSTRAINT route_version CHECK (version >= 1),
    CONSTRAINT route_end_unique UNIQUE (topic_id, version, next_from),
    CONSTRAINT route_partition_once UNIQUE (topic_id, version, partition_id),
    CONSTRAINT route_partition_range FOREIGN KEY (partition_id, lp_from, lp_to)
        REFERENCES mqlayer.partition (partition_id, lp_from, lp_to),
    CONSTRAINT route_partition_topic FOREIGN KEY (topic_id, partition_id)
        REFERENCES mqlayer.partition (topic_id, partition_id),
    CONSTRAINT route_tiles FOREIGN KEY (topic_id, version, next_from)
        REFERENCES mqlayer.route (topic_id, version, lp_from) DEFERRABLE INITIALLY DEFERRED
);

-- Topics and routes refer to each other.
ALTER TABLE mqlayer.topic ADD CONSTRAINT topic_version_has_routes FOREIGN KEY (topic_id, version, lp_zero)
    REFERENCES mqlayer.route (topic_id, version, lp_from) DEFERRABLE INITIALLY DEFERRED;

-- The seal of a parent: the very command record, and the marks that are frozen with it. When its node fell back, the
-- seal is made again under another seal id, so that a process that saw the lost one can't open the gate with it.
CREATE TABLE mqlayer.seal (
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    change_id    int NOT NULL REFERENCES mqlayer.route_change,
    seal_id      uuid NOT NULL,
    next_offset  bigint NOT NULL,
    run_id       text NOT NULL,
    -- "<source>:<lp>" -> highest seq.
    marks        jsonb NOT NULL,
    -- Sealed in Postgres only, while its node is away: no group can drain it before the node is back.
    unreachable         boolean NOT NULL DEFAULT false,
    -- The partition holds more than its recorded marks. Its successors hold that too, so no group handles it here.
    cut          boolean NOT NULL DEFAULT false,
    sealed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT seal_key PRIMARY KEY (partition_id),
    CONSTRAINT seal_run_id CHECK (octet_length(run_id) <= 1024)
);

-- Copies of partitions on nodes that were given up, made anew elsewhere. If such a node comes back, they become
-- tombstones before it is used.
CREATE TABLE mqlayer.abandoned (
    node_id      int NOT NULL REFERENCES mqlayer.node,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    at           timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT abandoned_key PRIMARY KEY (node_id, partition_id)
);

-- Messages published to a partition by the second, measured for the groups that are balanced by it.
CREATE TABLE mqlayer.partition_rate (
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    next_offset  bigint NOT NULL,
    per_s        double precision NOT NULL,
    measured_at  timestamptz NOT NULL,
    CONSTRAINT partition_rate_key PRIMARY KEY (partition_id)
);

-- Automatic routes ---------------------------------------------------------------------------------------------------

-- How far the autopilot may go with the routes of a topic. No row: off.
CREATE TABLE mqlayer.route_policy (
    topic_id         int NOT NULL REFERENCES mqlayer.topic,
    -- report: the journal gets the changes that it would make.
    mode             text NOT NULL,
    min_partitions   int NOT NULL DEFAULT 1,
    max_partitions   int NOT NULL DEFAULT 64,
    -- Messages per second of one partition, as the operator says. Null: as measured.
    capacity_per_s   double precision,
    -- The most that the slowest group settled of one partition per second while it had a backlog.
    measured_per_s   double precision,
    changes_per_hour int NOT NULL DEFAULT 20,
    -- Seconds between two changes, and before a partition moves again.
    cool_down_s      double precision NOT NULL DEFAULT 60,
    rest_s           double precision NOT NULL DEFAULT 1800,
    -- Minutes of the day (UTC): no change from the first up to the second, also over midnight. Null: none.
    quiet_from       smallint,
    quiet_to         smallint,
    -- Changes in a row that failed, and those that did not help. A change that helped resets both.
    failed           int NOT NULL DEFAULT 0,
    unhelpful        int NOT NULL DEFAULT 0,
    -- It stopped itself, until an operator turns it on again.
    stopped_at       timestamptz,
    stopped_because  text,
    set_at           timestamptz NOT NULL DEFAULT now(),
    set_by           text NOT NULL,
    CONSTRAINT route_policy_key PRIMARY KEY (topic_id),
    CONSTRAINT route_policy_mode CHECK (mode IN ('off', 'report', 'on')),
    CONSTRAINT route_policy_partitions CHECK (
        min_partitions BETWEEN 1 AND 1024 AND max_partitions BETWEEN min_partitions AND 1024),
    CONSTRAINT route_policy_capacity CHECK (capacity_per_s BETWEEN 1 AND 1e9 AND measured_per_s BETWEEN 1 AND 1e9),
    CONSTRAINT route_policy_budget CHECK (changes_per_hour BETWEEN 1 AND 720),
    CONSTRAINT route_policy_waits CHECK (cool_down_s BETWEEN 5 AND 3600 AND rest_s BETWEEN 5 AND 86400),
    CONSTRAINT route_policy_quiet CHECK (
        (quiet_from IS NULL) = (quiet_to IS NULL) AND quiet_from <> quiet_to
        AND quiet_from BETWEEN 0 AND 1439 AND quiet_to BETWEEN 0 AND 1439),
    CONSTRAINT route_policy_counts CHECK (failed BETWEEN 0 AND 1000000 AND unhelpful BETWEEN 0 AND 1000000),
    CONSTRAINT route_policy_stopped CHECK ((stopped_at IS NULL) = (stopped_because IS NULL)),
    CONSTRAINT route_policy_times CHECK (
        stopped_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND set_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT route_policy_texts CHECK (octet_length(set_by) <= 4096 AND octet_length(stopped_because) <= 4096)
);

-- The last samples of open partitions of those topics, the newest first: when, where the partition ended, and up to
-- where the slowest group with members had settled it.
CREATE TABLE mqlayer.route_load (
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    at_s         double precision[] NOT NULL,
    next_offset  bigint[] NOT NULL,
    settled      bigint[] NOT NULL,
    -- When its LPs were sampled last.
    sampled_at   timestamptz,
    CONSTRAINT route_load_key PRIMARY KEY (partition_id),
    CONSTRAINT route_load_samples CHECK (
        cardinality(at_s) BETWEEN 1 AND 64 AND cardinality(next_offset) BETWEEN 1 AND 64
        AND cardinality(settled) BETWEEN 1 AND 64 AND cardinality(next_offset) = cardinality(at_s)
        AND cardinality(settled) = cardinality(at_s)),
    CONSTRAINT route_load_sampled_at CHECK (sampled_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00')
);

-- The autopilot's journal: changes that it made or would make, those that it refuses, and how they ended. Bounded by
-- rows per topic and by age.
CREATE TABLE mqlayer.route_decision (
    decision_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id    int NOT NULL REFERENCES mqlayer.topic,
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- changed: its change is planned, and route_change has its state.
    verdict     text NOT NULL,
    kind        text NOT NULL,
    partitions  int[] NOT NULL,
    reason      text NOT NULL,
    -- Of a refusal that names one: the key, and its LP.
    key         text,
    lp          smallint,
    change_id   int REFERENCES mqlayer.route_change,
    -- Load and lag before, the foretold share of the heaviest successor; and after.
    facts       jsonb NOT NULL DEFAULT '{}',
    judged_at   timestamptz,
    -- Null with judged_at: nobody can tell, as the load went away, or the route changed again.
    helped      boolean,
    CONSTRAINT route_decision_verdict CHECK (verdict IN ('changed', 'reported', 'refused', 'failed', 'stopped')),
    CONSTRAINT route_decision_kind CHECK (kind IN ('split', 'merge', 'move', 'none')),
    CONSTRAINT route_decision_change CHECK ((verdict = 'changed') = (change_id IS NOT NULL)),
    CONSTRAINT route_decision_lp CHECK (lp BETWEEN 0 AND 1023),
    CONSTRAINT route_decision_times CHECK (
        at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND judged_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT route_decision_texts CHECK (
        octet_length(reason) <= 4096 AND octet_length(key) <= 65536 AND pg_column_size(facts) <= 100000
        AND cardinality(partitions) <= 1024)
);
CREATE INDEX route_decision_of_topic ON mqlayer.route_decision (topic_id, decision_id);
CREATE UNIQUE INDEX route_decision_of_change ON mqlayer.route_decision (change_id) WHERE change_id IS NOT NULL;



-- Sources ------------------------------------------------------------------------------------------------------------

-- One incarnation of a publisher: a restarted producer and a restored outbox get another one.
CREATE TABLE mqlayer.source (
    source_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind        text NOT NULL,
    name        text NOT NULL,
    -- Outbox only: the database, and the cluster that it was seen in.
    outbox_uuid uuid,
    cluster     text,
    -- A direct producer ends its own sources: the marks of an ended one are removed.
    opened_by   name NOT NULL DEFAULT mqlayer.caller_v1(),
    opened_at   timestamptz NOT NULL DEFAULT now(),
    closed_at   timestamptz,
    -- Direct only: its marks are gone from every partition.
    dropped_at  timestamptz,
    -- Direct only: when the removal of its marks was last tried.
    tried_at    timestamptz,
    CONSTRAINT source_kind CHECK (kind IN ('outbox', 'direct')),
    CONSTRAINT source_outbox_identity CHECK ((kind = 'outbox') = (outbox_uuid IS NOT NULL AND cluster IS NOT NULL)),
    CONSTRAINT source_closed_at CHECK (closed_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT source_name_length CHECK (octet_length(name) <= 1024),
    CONSTRAINT source_cluster_length CHECK (octet_length(cluster) <= 1024)
);
CREATE INDEX source_closed ON mqlayer.source (closed_at) WHERE kind = 'direct' AND dropped_at IS NULL;
CREATE UNIQUE INDEX source_outbox_live ON mqlayer.source (outbox_uuid) WHERE kind = 'outbox' AND closed_at IS NULL;


-- Groups -------------------------------------------------------------------------------------------------------------

CREATE TABLE mqlayer.consumer_group (
    group_id         bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id         int NOT NULL REFERENCES mqlayer.topic,
    name             text NOT NULL,
    state            text NOT NULL DEFAULT 'creating',

    -- Said once, when the group is created.
    -- exclusive: partitions are assigned to members. pop: receivers ask for batches. shared: all members read all
    -- partitions, without order. broadcast: every instance gets every message.
    mode             text NOT NULL DEFAULT 'exclusive',
    -- One message of a key at a time, in order. Else each message stands alone.
    ordered          boolean NOT NULL DEFAULT true,
    -- Pop only: the part that is withheld while a message is out: all of its partition, or its key.
    scope            text,
    -- Where it starts.
    start            text NOT NULL,
    start_at         timestamptz,
    -- It begins with the archive, and goes on with the streams.
    from_archive     boolean NOT NULL DEFAULT false,

    -- Broadcast. The group has settings only. Each instance is a group of its own beneath it, with one member at a
    -- time: its group, and its name in there.
    broadcast_of     bigint REFERENCES mqlayer.consumer_group,
    instance         text,
    -- Of a broadcast group: for how long it keeps the position of an instance that is away.
    instance_expiry_s      double precision,
    -- Of an instance: since when it has no consumer. Null while it has one.
    absent_since       timestamptz,

    -- Made as a copy: the group whose positions it began at.
    copied_from      bigint REFERENCES mqlayer.consumer_group,

    -- The deployment whose members consume. LPs below canary_lps are the canary's. What `group deploy --back` goes back to.
    deployment          text NOT NULL DEFAULT 'main',
    canary              text,
    canary_lps          int,
    previous_deployment text,
    -- Without a living member of the newer deployment, partitions go back to the older one's.
    fallback            boolean NOT NULL DEFAULT false,

    -- Settings. The version grows with every change of one.
    settings_version int NOT NULL DEFAULT 1,
    -- The messages that it wants, by their tags: "none" (all messages), "any:eu,vip" or "all:eu,vip".
    tag_filter       text NOT NULL DEFAULT 'none',
    -- The measure that members share evenly: partitions by count, or messages published to them by the second.
    balance          text NOT NULL DEFAULT 'count',
    -- Failed attempts after which the policy decides.
    attempt_limit    int NOT NULL DEFAULT 17,
    policy           text NOT NULL DEFAULT 'park',
    backoff_s        double precision[] NOT NULL,
    -- Up to which part of a wait is left out by chance.
    backoff_jitter   double precision NOT NULL DEFAULT 0,
    -- Names of exceptions: final at their first attempt, and tried again. Without the latter: all that are not final.
    non_retryable_errors     text[] NOT NULL DEFAULT '{}',
    retryable_errors   text[] NOT NULL DEFAULT '{}',
    -- Seconds that a handler has for a message, and up to which it may extend that. Null: no limit.
    time_limit_s     double precision,
    max_time_limit_s       double precision,
    -- Shared only: a message is taken from a member that was silent for so many seconds.
    visibility_timeout_s      double precision,
    -- Messages that the whole group begins by the second, null for no limit. And how many at once after a rest, null
    -- for as many as the limit gives in a second.
    rate_limit       double precision,
    rate_burst       double precision,
    -- Parked keys of a partition at most. Messages and bytes (of bodies, keys and headers) that are parked of the whole
    -- group, and of one key. Beyond these, messages wait in the stream.
    parked_keys_limit     int NOT NULL DEFAULT 10000,
    parked_messages_limit bigint NOT NULL DEFAULT 10000000,
    parked_bytes_limit    bigint NOT NULL DEFAULT 10737418240,
    key_messages_limit    bigint NOT NULL DEFAULT 2000000,
    key_bytes_limit       bigint NOT NULL DEFAULT 2147483648,
    -- The circuit breaker opens where this share of distinct keys fails, null for never; of so many failing keys at
    -- least, within so many seconds, by these exceptions (without names: by all that are tried again).
    breaker_share         double precision,
    breaker_keys          int NOT NULL DEFAULT 10,
    breaker_window_s      double precision NOT NULL DEFAULT 10,
    breaker_errors        text[] NOT NULL DEFAULT '{}',
    -- What a key's class, which takes turns with the others, goes by: prefix:<separator> or header:<name>.
    key_class             text NOT NULL DEFAULT 'none',
    -- Keys of a class at once in a member, and messages of a class by the second in the whole group. Null for no limit.
    class_concurrency     int,
    class_rate            double precision,

    -- State.
    -- The route version of which the group has drained all that came before it. It moves one by one.
    version          int NOT NULL DEFAULT 1,
    -- How often the group was sent elsewhere. Its earlier commits are void then: its start counts again.
    seek             int NOT NULL DEFAULT 0,
    -- The last seek that has fenced effects applied again, though they were applied before. Else 0.
    replay           int NOT NULL DEFAULT 0,
    -- Grows with every change of assignments. A member ignores a lower one.
    allocation       bigint NOT NULL DEFAULT 0,
    -- Grows with each act of an operator or a scan on parked keys: members look at them again.
    parking          bigint NOT NULL DEFAULT 0,
    paused_at        timestamptz,
    paused_by        text,
    created_at       timestamptz NOT NULL DEFAULT now(),
    -- A retired group holds nothing up.
    retired_at       timestamptz,

    CONSTRAINT consumer_group_name_unique UNIQUE (topic_id, name),
    -- A group's name can't look like an instance's.
    CONSTRAINT consumer_group_name_form CHECK (name ~ CASE WHEN instance IS NULL
        THEN '^[a-z][a-z0-9_.-]{0,62}$' ELSE '^[a-z][a-z0-9_.-]{0,62}@[a-z0-9][a-z0-9_.-]{0,62}$' END),
    CONSTRAINT consumer_group_state CHECK (state IN ('creating', 'live', 'retired')),
    CONSTRAINT consumer_group_mode CHECK (mode IN ('exclusive', 'pop', 'shared', 'broadcast')),
    CONSTRAINT consumer_group_scope CHECK (scope IN ('partition', 'key')),
    CONSTRAINT consumer_group_scope_of_pop CHECK ((mode = 'pop') = (scope IS NOT NULL)),
    CONSTRAINT consumer_group_start CHECK (start IN ('earliest', 'latest', 'time')),
    CONSTRAINT consumer_group_start_time CHECK ((start = 'time') = (start_at IS NOT NULL)),
    CONSTRAINT consumer_group_from_archive CHECK (NOT from_archive OR (mode = 'exclusive' AND start <> 'latest')),
    CONSTRAINT consumer_group_instance CHECK ((broadcast_of IS NULL) = (instance IS NULL)),
    CONSTRAINT consumer_group_instance_mode CHECK (instance IS NULL OR mode = 'exclusive'),
    CONSTRAINT consumer_group_instance_length CHECK (octet_length(instance) <= 63),
    CONSTRAINT consumer_group_keep_away CHECK (
        (mode = 'broadcast') = (instance_expiry_s IS NOT NULL) AND instance_expiry_s > 0 AND instance_expiry_s <= 1e11),
    CONSTRAINT consumer_group_deployments CHECK (
        deployment ~ '^[a-z0-9][a-z0-9_.-]{0,62}$' AND canary ~ '^[a-z0-9][a-z0-9_.-]{0,62}$' AND canary <> deployment
        AND previous_deployment ~ '^[a-z0-9][a-z0-9_.-]{0,62}$' AND previous_deployment <> deployment),
    CONSTRAINT consumer_group_canary CHECK (canary_lps BETWEEN 1 AND 1023),
    CONSTRAINT consumer_group_tag_filter
        CHECK (tag_filter ~ '^(none|(any|all):[a-z0-9][a-z0-9_.-]*(,[a-z0-9][a-z0-9_.-]*)*)$'),
    CONSTRAINT consumer_group_balance CHECK (balance IN ('count', 'rate')),
    CONSTRAINT consumer_group_attempt_limit CHECK (attempt_limit BETWEEN 1 AND 2000000000),
    CONSTRAINT consumer_group_policy CHECK (policy IN ('park', 'block', 'dead_letter', 'skip')),
    CONSTRAINT consumer_group_backoff CHECK (cardinality(backoff_s) >= 1),
    CONSTRAINT consumer_group_backoff_jitter CHECK (backoff_jitter BETWEEN 0 AND 1),
    CONSTRAINT consumer_group_time_limit CHECK (time_limit_s > 0 AND time_limit_s <= 1e11),
    CONSTRAINT consumer_group_max_time_limit CHECK (max_time_limit_s > 0 AND max_time_limit_s <= 1e11),
    CONSTRAINT consumer_group_visibility_timeout CHECK (visibility_timeout_s > 0 AND visibility_timeout_s <= 1e11),
    CONSTRAINT consumer_group_visibility_timeout_of_shared CHECK (mode <> 'shared' OR visibility_timeout_s IS NOT NULL),
    CONSTRAINT consumer_group_shared CHECK (mode <> 'shared' OR NOT ordered AND policy IN ('dead_letter', 'skip')),
    CONSTRAINT consumer_group_rate_limit CHECK (rate_limit > 0 AND rate_limit <= 1e11),
    CONSTRAINT consumer_group_rate_burst CHECK (rate_burst >= 1 AND rate_burst <= 1e11),
    CONSTRAINT consumer_group_parking_limits CHECK (
        parked_keys_limit BETWEEN 1 AND 2000000000 AND parked_messages_limit BETWEEN 1 AND 9007199254740991
        AND parked_bytes_limit BETWEEN 1 AND 9007199254740991 AND key_messages_limit BETWEEN 1 AND 9007199254740991
        AND key_bytes_limit BETWEEN 1 AND 9007199254740991),
    CONSTRAINT consumer_group_breaker CHECK (
        breaker_share > 0 AND breaker_share <= 1 AND breaker_keys BETWEEN 1 AND 4096
        AND breaker_window_s >= 1 AND breaker_window_s <= 3600 AND (breaker_share IS NULL OR mode <> 'pop')),
    CONSTRAINT consumer_group_key_class CHECK (
        key_class ~ '^(none|prefix:[ -~]+|header:[ -~]+)$' AND octet_length(key_class) <= 64
        AND (key_class = 'none' OR mode <> 'pop')
        AND class_concurrency BETWEEN 1 AND 2000000000 AND class_rate > 0 AND class_rate <= 1e11),
    -- With room for the next one, and for the leap of a server that was replaced: statements add to those of all groups.
    CONSTRAINT consumer_group_counts CHECK (
        version BETWEEN 1 AND 1000000000 AND seek BETWEEN 0 AND 1000000000 AND replay BETWEEN 0 AND 1000000000
        AND settings_version BETWEEN 1 AND 1000000000 AND allocation BETWEEN 0 AND 4611686018427387904
        AND parking BETWEEN 0 AND 4611686018427387904),
    CONSTRAINT consumer_group_times CHECK (
        absent_since BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND paused_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND retired_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND start_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT consumer_group_texts_length CHECK (
        octet_length(coalesce(paused_by, '')) <= 1024 AND octet_length(coalesce(tag_filter, '')) <= 65536
        AND cardinality(backoff_s) <= 1000 AND pg_column_size(non_retryable_errors) <= 1000000
        AND pg_column_size(retryable_errors) <= 1000000 AND pg_column_size(breaker_errors) <= 1000000)
);
CREATE UNIQUE INDEX consumer_group_instances ON mqlayer.consumer_group (broadcast_of, instance)
    WHERE broadcast_of IS NOT NULL;

-- An instance is of a group that broadcasts, in its own topic, and has its name from both. Whoever may consume the group
-- may consume the instance.
CREATE FUNCTION mqlayer.group_instance_guard() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM mqlayer.consumer_group b
                   WHERE b.group_id = NEW.broadcast_of AND b.topic_id = NEW.topic_id AND b.mode = 'broadcast'
                     AND NEW.name = b.name || '@' || NEW.instance) THEN
        RAISE EXCEPTION 'group "%" is no instance of group %', NEW.name, NEW.broadcast_of
            USING ERRCODE = 'check_violation', CONSTRAINT = 'consumer_group_instance_of_broadcast';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER consumer_group_instance_of_broadcast BEFORE INSERT OR UPDATE OF broadcast_of, instance, name, topic_id
    ON mqlayer.consumer_group FOR EACH ROW WHEN (NEW.broadcast_of IS NOT NULL)
    EXECUTE FUNCTION mqlayer.group_instance_guard();

-- Where the outbox is in this database too, its functions know each group from the moment it is there.
CREATE FUNCTION mqlayer.group_known_v1() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF to_regclass('mqlayer_app.known_group') IS NOT NULL AND has_schema_privilege('mqlayer_app', 'USAGE') THEN
        INSERT INTO mqlayer_app.known_group (group_id, scope)
        SELECT NEW.group_id, t.name || '/' || coalesce(b.name, NEW.name) FROM mqlayer.topic t
        LEFT JOIN mqlayer.consumer_group b ON b.group_id = NEW.broadcast_of
        WHERE t.topic_id = NEW.topic_id
        ON CONFLICT (group_id) DO UPDATE SET scope = excluded.scope;
    END IF;
    RETURN NULL;
EXCEPTION WHEN insufficient_privilege THEN
    -- Another role owns that schema: a relay brings it.
    RETURN NULL;
END $$;

CREATE TRIGGER group_known AFTER INSERT ON mqlayer.consumer_group
    FOR EACH ROW EXECUTE FUNCTION mqlayer.group_known_v1();

-- Whether the caller may create this group, or this instance of one.
CREATE FUNCTION mqlayer.may_create_group_v1(p_topic_id int, p_name text, p_broadcast_of bigint) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp
    RETURN mqlayer.has_for_v1('consume', (
        SELECT t.name || '/' || coalesce((SELECT b.name FROM mqlayer.consumer_group b WHERE b.group_id = p_broadcast_of), p_name)
        FROM mqlayer.topic t WHERE t.topic_id = p_topic_id));

CREATE TABLE mqlayer.group_start (
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    start_offset bigint NOT NULL,
    CONSTRAINT group_start_key PRIMARY KEY (group_id, partition_id),
    CONSTRAINT group_start_offset CHECK (start_offset BETWEEN 1 AND 9007199254740991)
);

-- A group has settled everything before the recorded command of a sealed partition, or began behind it.
CREATE TABLE mqlayer.drained (
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    drained_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT drained_key PRIMARY KEY (group_id, partition_id)
);

-- Messages that groups never handled. dropped: by their topic's limits. expired: by its time to live. `seen`: the node's
-- total when it was read last; it falls with the node.
CREATE TABLE mqlayer.retention_loss (
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    event        text NOT NULL,
    lost         bigint NOT NULL,
    seen         bigint NOT NULL,
    lost_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT retention_loss_key PRIMARY KEY (group_id, partition_id, event),
    CONSTRAINT retention_loss_event CHECK (event IN ('dropped', 'expired')),
    CONSTRAINT retention_loss_numbers CHECK (lost BETWEEN 0 AND 9007199254740991 AND seen BETWEEN 0 AND 9007199254740991),
    CONSTRAINT retention_loss_lost_at CHECK (lost_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00')
);

-- Partitions that rest for one group.
CREATE TABLE mqlayer.partition_pause (
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    paused_at    timestamptz NOT NULL DEFAULT now(),
    paused_by    text NOT NULL,
    CONSTRAINT partition_pause_key PRIMARY KEY (group_id, partition_id),
    CONSTRAINT partition_pause_by CHECK (octet_length(paused_by) <= 4096)
);

-- The partitions that a group may consume: those whose parents it has all drained, until it has drained them too. A
-- deleted parent holds no group up: every group had drained it, or an operator gave it up. Paused topics, groups and
-- partitions are left out, as are retired groups and broadcast groups, which have settings only. A shared group has no
-- order to keep between a parent and its successors, so a message that waits for its next attempt holds none of them
-- up.
-- With the deployment whose members may have the partition; null for instances, which are one member each.
CREATE VIEW mqlayer.readable AS
SELECT g.group_id, p.partition_id,
       CASE WHEN g.instance IS NOT NULL THEN NULL WHEN p.lp_from < g.canary_lps THEN g.canary ELSE g.deployment END
           AS deployment
FROM mqlayer.consumer_group g
JOIN mqlayer.topic t USING (topic_id)
JOIN mqlayer.partition p ON p.topic_id = g.topic_id AND p.state IN ('open', 'sealed')
WHERE g.paused_at IS NULL AND t.paused_at IS NULL AND g.state <> 'retired' AND g.mode <> 'broadcast'
  AND NOT EXISTS (SELECT FROM mqlayer.partition_pause pp
                  WHERE pp.group_id = g.group_id AND pp.partition_id = p.partition_id)
  AND NOT EXISTS (SELECT FROM mqlayer.drained d WHERE d.group_id = g.group_id AND d.partition_id = p.partition_id)
  AND NOT EXISTS (
      SELECT FROM mqlayer.partition parent
      WHERE parent.ended_by_change = p.created_by_change AND parent.lp_from < p.lp_to AND p.lp_from < parent.lp_to
        AND parent.state <> 'deleted' AND g.mode <> 'shared'
        AND NOT EXISTS (SELECT FROM mqlayer.drained d
                        WHERE d.group_id = g.group_id AND d.partition_id = parent.partition_id));


-- Members and assignments --------------------------------------------------------------------------------------------

CREATE SEQUENCE mqlayer.member_session;

CREATE TABLE mqlayer.member (
    group_id    bigint NOT NULL REFERENCES mqlayer.consumer_group,
    member_id   text NOT NULL,
    -- A member id that joins again gets a new session, and the old process is refused.
    session     bigint NOT NULL DEFAULT nextval('mqlayer.member_session'),
    host        text NOT NULL,
    pid         int NOT NULL,
    leaving     boolean NOT NULL DEFAULT false,
    -- The version of its program, as its process was started with.
    deployment  text NOT NULL DEFAULT 'main',
    -- It prefers partitions on nodes of this zone. Empty: none.
    zone        text NOT NULL DEFAULT '',
    joined_at   timestamptz NOT NULL DEFAULT now(),
    -- By this database's clock only. -infinity: the member is gone.
    lease_until timestamptz NOT NULL,
    -- Of its code: the release, and the protocol versions that it knows. acts_on: the one that it last read as in force.
    version     text NOT NULL DEFAULT '',
    least       int NOT NULL DEFAULT 1,
    most        int NOT NULL DEFAULT 1,
    acts_on     int NOT NULL DEFAULT 1,
    -- Of a group with a circuit breaker: distinct keys that failed, and that were tried, in its window before a report.
    failing_keys int NOT NULL DEFAULT 0,
    tried_keys   int NOT NULL DEFAULT 0,
    reported_at  timestamptz NOT NULL DEFAULT '1970-01-01 00:00+00',
    CONSTRAINT member_key PRIMARY KEY (group_id, member_id),
    CONSTRAINT member_version CHECK (octet_length(version) <= 64 AND least BETWEEN 1 AND 1000000 AND most BETWEEN 1 AND 1000000
                                     AND acts_on BETWEEN 0 AND 1000000),
    CONSTRAINT member_id_form CHECK (member_id ~ '^[a-z][a-z0-9_.-]{0,62}$'),
    CONSTRAINT member_deployment CHECK (deployment ~ '^[a-z0-9][a-z0-9_.-]{0,62}$'),
    CONSTRAINT member_host_length CHECK (octet_length(host) <= 1024),
    CONSTRAINT member_zone_form CHECK (zone ~ '^([a-z0-9][a-z0-9_.-]{0,62})?$'),
    CONSTRAINT member_numbers CHECK (session BETWEEN 0 AND 4611686018427387904 AND pid BETWEEN 0 AND 2000000000),
    CONSTRAINT member_reported CHECK (
        failing_keys BETWEEN 0 AND 1000000000 AND tried_keys BETWEEN 0 AND 1000000000
        AND reported_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT member_joined_at CHECK (joined_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT member_lease_until
        CHECK (lease_until = '-infinity' OR lease_until BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00')
);

-- A member that joins is refused if its code is too old, and acts on what is in force.
CREATE FUNCTION mqlayer.member_admit_v1() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    NEW.acts_on := mqlayer.protocol_admit_v1(NEW.least, NEW.most);
    RETURN NEW;
END $$;

CREATE TRIGGER member_admitted BEFORE INSERT ON mqlayer.member FOR EACH ROW EXECUTE FUNCTION mqlayer.member_admit_v1();

-- Processes without another row that lives: relays, workers, direct producers, receivers. By process_beat_v1 only.
CREATE TABLE mqlayer.process (
    process_id  text NOT NULL,
    kind        text NOT NULL,
    -- For people.
    name        text NOT NULL,
    host        text NOT NULL,
    pid         int NOT NULL,
    opened_by   name NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    lease_until timestamptz NOT NULL,
    -- As of mqlayer.member.
    version     text NOT NULL,
    least       int NOT NULL,
    most        int NOT NULL,
    acts_on     int NOT NULL,
    CONSTRAINT process_key PRIMARY KEY (process_id),
    CONSTRAINT process_kind CHECK (kind IN ('relay', 'worker', 'producer', 'receiver')),
    CONSTRAINT process_texts CHECK (octet_length(process_id) <= 128 AND octet_length(name) <= 1024
                                    AND octet_length(host) <= 1024 AND octet_length(version) <= 64),
    CONSTRAINT process_numbers CHECK (pid BETWEEN 0 AND 2000000000 AND least BETWEEN 1 AND 1000000 AND most BETWEEN 1 AND 1000000
                                      AND acts_on BETWEEN 0 AND 1000000)
);

-- A process lives: extend its lease, and say what this schema serves. A new one, and one whose lease ran out, is refused
-- if its code is too old.
CREATE FUNCTION mqlayer.process_beat_v1(p_facts jsonb, p_lease_s double precision, OUT serves_from int, OUT in_force int,
                                        OUT serves_to int)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_id CONSTANT text := p_facts->>'process_id';
    v_acts_on int := (p_facts->>'acts_on')::int;
    v_least CONSTANT int := (p_facts->>'least')::int;
    v_most CONSTANT int := (p_facts->>'most')::int;
BEGIN
    IF (p_lease_s BETWEEN 0 AND 3600) IS NOT TRUE THEN
        RAISE EXCEPTION 'a lease of % s, its bounds are 0 and 3600', p_lease_s USING ERRCODE = 'MQ009';
    END IF;
    IF NOT EXISTS (SELECT FROM mqlayer.process p WHERE p.process_id = v_id AND p.lease_until >= now()) THEN
        v_acts_on := mqlayer.protocol_admit_v1(v_least, v_most);
        DELETE FROM mqlayer.process p WHERE p.lease_until < now() - interval '1 hour';
    END IF;
    INSERT INTO mqlayer.process AS p (process_id, kind, name, host, pid, opened_by, lease_until, version, least, most, acts_on)
    VALUES (v_id, p_facts->>'kind', p_facts->>'name', p_facts->>'host', (p_facts->>'pid')::int, mqlayer.caller_v1(),
            now() + make_interval(secs => p_lease_s), p_facts->>'version', v_least, v_most, v_acts_on)
    ON CONFLICT (process_id) DO UPDATE SET lease_until = excluded.lease_until, acts_on = excluded.acts_on
    WHERE p.opened_by = excluded.opened_by;
    SELECT t.serves_from, t.in_force, t.serves_to INTO serves_from, in_force, serves_to FROM mqlayer.protocol t;
END $$;

-- A process ends by its own word.
CREATE FUNCTION mqlayer.process_end_v1(p_id text) RETURNS void
    LANGUAGE sql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
    DELETE FROM mqlayer.process WHERE process_id = p_id AND opened_by = mqlayer.caller_v1();
$$;

-- Processes that count as living. A member counts until its group noted that its lease ran out, so that none comes back.
CREATE VIEW mqlayer.living AS
SELECT 'member' AS kind, t.name || '/' || g.name || '/' || m.member_id AS name, m.host, m.pid, m.joined_at AS since, m.version,
       m.least, m.most, m.acts_on, m.lease_until >= now() AS beats, m.group_id
FROM mqlayer.member m JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
WHERE m.lease_until > '-infinity'
UNION ALL
SELECT p.kind, p.name, p.host, p.pid, p.started_at, p.version, p.least, p.most, p.acts_on, true, NULL
FROM mqlayer.process p WHERE p.lease_until >= now();

-- Put the next version in force, unless a process lives that does not know it: blocked. With p_drain such processes are
-- refused from now on, and end by themselves: draining. The lock on the row has every process that joins meanwhile wait.
CREATE FUNCTION mqlayer.protocol_finalize_v1(p_version int, p_drain boolean) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_protocol mqlayer.protocol;
BEGIN
    IF NOT mqlayer.has_v1('work', 'operate') THEN
        RAISE EXCEPTION 'role "%" lacks the right to finalize', mqlayer.caller_v1()
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant operate ' || mqlayer.caller_v1();
    END IF;
    SELECT * INTO v_protocol FROM mqlayer.protocol FOR UPDATE;
    IF v_protocol.in_force >= p_version THEN
        RETURN 'finalized';
    END IF;
    IF p_version <> v_protocol.in_force + 1 OR p_version > v_protocol.serves_to THEN
        RAISE EXCEPTION 'protocol % can''t follow %, the schema serves up to %', p_version, v_protocol.in_force,
                        v_protocol.serves_to USING ERRCODE = 'MQ009', HINT = 'run `mqlayer migrate` first';
    END IF;
    DELETE FROM mqlayer.process WHERE lease_until < now();
    IF EXISTS (SELECT FROM mqlayer.living WHERE most < p_version) THEN
        IF NOT p_drain THEN
            RETURN 'blocked';
        END IF;
        UPDATE mqlayer.protocol SET serves_from = p_version;
        RETURN 'draining';
    END IF;
    UPDATE mqlayer.protocol SET serves_from = p_version, in_force = p_version, finalized_at = now();
    RETURN 'finalized';
END $$;

-- Serve older code again, while the version that it knows is in force.
CREATE FUNCTION mqlayer.protocol_reopen_v1() RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF NOT mqlayer.has_v1('operate') THEN
        RAISE EXCEPTION 'role "%" lacks the right to operate', mqlayer.caller_v1()
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant operate ' || mqlayer.caller_v1();
    END IF;
    UPDATE mqlayer.protocol SET serves_from = in_force WHERE serves_from > in_force;
    RETURN FOUND;
END $$;

-- Circuit breakers of groups that opened once. Open: nothing is begun until probe_at. Probing: one member tries one message
-- at a time. Ramping: one handler at once per member, then twice as many each second.
CREATE TABLE mqlayer.breaker (
    group_id      bigint NOT NULL REFERENCES mqlayer.consumer_group,
    state         text NOT NULL,
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    opened_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The class of an error, or that an operator tripped it; the member or operator.
    cause         text NOT NULL,
    actor         text NOT NULL,
    failing_keys  int NOT NULL DEFAULT 0,
    -- Failed probes since it opened: each doubles the wait for the next.
    probes        int NOT NULL DEFAULT 0,
    probe_at      timestamptz NOT NULL,
    -- The session that probes.
    probe_session bigint,
    CONSTRAINT breaker_key PRIMARY KEY (group_id),
    CONSTRAINT breaker_state CHECK (state IN ('closed', 'open', 'probing', 'ramping')),
    CONSTRAINT breaker_prober CHECK (state <> 'probing' OR probe_session IS NOT NULL),
    CONSTRAINT breaker_counts CHECK (failing_keys BETWEEN 0 AND 1000000000 AND probes BETWEEN 0 AND 1000000000
        AND probe_session BETWEEN 0 AND 4611686018427387904),
    CONSTRAINT breaker_texts CHECK (octet_length(cause) <= 1024 AND octet_length(actor) <= 4096),
    CONSTRAINT breaker_times CHECK (
        changed_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND opened_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND probe_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00')
);

-- One sequence for all groups and partitions: an epoch given out later is higher, over restarts and route changes.
CREATE SEQUENCE mqlayer.epoch;

CREATE TABLE mqlayer.assignment (
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    -- The member that may consume. Null while none does.
    member_id    text,
    epoch        bigint NOT NULL,
    -- The member that shall consume. It differs from member_id until the owner has released the partition.
    target       text,
    changed_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT assignment_key PRIMARY KEY (group_id, partition_id),
    CONSTRAINT assignment_member FOREIGN KEY (group_id, member_id) REFERENCES mqlayer.member (group_id, member_id),
    CONSTRAINT assignment_epoch CHECK (epoch BETWEEN 0 AND 9007199254740991),
    CONSTRAINT assignment_changed_at CHECK (changed_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT assignment_texts CHECK (octet_length(member_id) <= 1024 AND octet_length(target) <= 1024)
);
CREATE INDEX assignment_by_member ON mqlayer.assignment (group_id, member_id);

-- An epoch only grows, and a new owner has a new one.
CREATE FUNCTION mqlayer.assignment_epoch_guard() RETURNS trigger
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF NEW.epoch < OLD.epoch OR (NEW.member_id IS NOT NULL AND NEW.member_id IS DISTINCT FROM OLD.member_id
                                 AND NEW.epoch = OLD.epoch) THEN
        RAISE EXCEPTION 'an epoch only grows, and a new owner needs a new one'
            USING ERRCODE = 'check_violation', CONSTRAINT = 'assignment_epoch_grows';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER assignment_epoch_grows BEFORE UPDATE ON mqlayer.assignment
    FOR EACH ROW EXECUTE FUNCTION mqlayer.assignment_epoch_guard();

-- Arming a node, a fail-over and a redrive raise epochs of all groups in one statement. One epoch that was never given
-- out, in a row of one group, would fail the statement for all.
CREATE FUNCTION mqlayer.assignment_epoch_given_v1() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF NEW.epoch > coalesce(pg_sequence_last_value('mqlayer.epoch'), 0)
       AND NOT mqlayer.has_v1('relay', 'work', 'operate') THEN
        RAISE EXCEPTION 'epoch % was never given out', NEW.epoch
            USING ERRCODE = 'check_violation', CONSTRAINT = 'assignment_epoch_given',
                  HINT = 'take it from nextval(''mqlayer.epoch'')';
    END IF;
    RETURN NULL;
END $$;

CREATE TRIGGER assignment_epoch_given AFTER INSERT OR UPDATE OF epoch ON mqlayer.assignment
    FOR EACH ROW EXECUTE FUNCTION mqlayer.assignment_epoch_given_v1();


-- Parked messages ----------------------------------------------------------------------------------------------------
-- Keys that wait in Postgres: the failed message with all that follows it. Every write of an owner is under the epoch
-- in force. See docs/how-to/handle-failures.md.

-- A key of a group that waits here: its messages are handled from here, in order, before anything newer.
CREATE TABLE mqlayer.parked_key (
    group_id      bigint NOT NULL REFERENCES mqlayer.consumer_group,
    lp            smallint NOT NULL,
    -- The key's UTF-8. Of a message that stands alone: \xff and its identity.
    name          bytea NOT NULL,
    -- Why it was parked last.
    cause         text NOT NULL,
    -- When its head is tried next, by this database's clock. Null: when an operator says so.
    due_at        timestamptz,
    -- Failed attempts of its head.
    attempts      int NOT NULL DEFAULT 0,
    -- The epoch under which its head was started, until its end is told.
    started       bigint,
    -- Whether it was started alone, so that it is to blame if its end is never told.
    started_alone boolean NOT NULL DEFAULT false,
    -- Released while its owner had it in hand: the owner's word on its failed head counts for nothing.
    released      boolean NOT NULL DEFAULT false,
    -- Messages and bytes that wait in it. 0 for a message that stands alone.
    messages      bigint NOT NULL DEFAULT 0,
    bytes         bigint NOT NULL DEFAULT 0,
    -- A key that an operator paused is parked, and not due whatever due_at says.
    paused_at     timestamptz,
    paused_by     text,
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT parked_key_key PRIMARY KEY (group_id, lp, name),
    CONSTRAINT parked_key_cause CHECK (cause IN ('retry', 'exhausted', 'rejected', 'paused', 'redriven', 'replayed')),
    CONSTRAINT parked_key_due_at CHECK (due_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT parked_key_numbers CHECK (
        lp BETWEEN 0 AND 1023 AND attempts BETWEEN 0 AND 2000000000 AND started BETWEEN 0 AND 9007199254740991),
    CONSTRAINT parked_key_texts CHECK (octet_length(name) <= 65536 AND octet_length(paused_by) <= 4096)
);
CREATE INDEX parked_key_due ON mqlayer.parked_key (due_at) WHERE due_at IS NOT NULL;

-- Grows in the order in which messages are parked. Places have room between them, and before the first one, for
-- messages that come again or are replayed in front of parked ones.
CREATE SEQUENCE mqlayer.parked_position INCREMENT BY 16777216 START WITH 16777216;

CREATE TABLE mqlayer.parked_message (
    group_id     bigint NOT NULL,
    lp           smallint NOT NULL,
    name         bytea NOT NULL,
    source       bigint NOT NULL,
    seq          bigint NOT NULL,
    -- A key's messages are handled by (place, seq). One that comes again goes in front of its source's next one.
    position        bigint NOT NULL,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    log_offset   bigint NOT NULL,
    -- As in a record: key, identity with time and headers, body.
    key          bytea NOT NULL,
    m            bytea NOT NULL,
    body         bytea NOT NULL,
    -- Sent again by an operator: later ones of its key may have had their effects, so the fence takes it by itself.
    redriven     boolean NOT NULL DEFAULT false,
    -- The replay or backfill that gave it.
    replay       bigint,
    -- Failed attempts from before it was parked, where that was behind others.
    attempts     int NOT NULL DEFAULT 0,
    -- All its failed attempts: those of its key begin anew when an operator releases it.
    tried        int NOT NULL DEFAULT 0,
    CONSTRAINT parked_message_key PRIMARY KEY (group_id, lp, source, seq),
    CONSTRAINT parked_message_of_key FOREIGN KEY (group_id, lp, name) REFERENCES mqlayer.parked_key,
    CONSTRAINT parked_message_numbers CHECK (
        source BETWEEN 1 AND 9007199254740991 AND seq BETWEEN 1 AND 9007199254740991 AND log_offset BETWEEN 0 AND 9007199254740991
        AND position BETWEEN -4611686018427387904 AND 4611686018427387904 AND attempts BETWEEN 0 AND 2000000000
        AND tried BETWEEN 0 AND 2000000000),
    CONSTRAINT parked_message_sizes CHECK (
        octet_length(name) <= 65536 AND octet_length(key) <= 65536 AND octet_length(m) <= 1000000
        AND octet_length(body) <= 16777216)
);
CREATE INDEX parked_message_queue ON mqlayer.parked_message (group_id, lp, name, position, seq);
CREATE INDEX parked_message_log ON mqlayer.parked_message (group_id, partition_id, log_offset);
-- The next message of its source, in front of which one that comes again goes.
CREATE INDEX parked_message_numbers ON mqlayer.parked_message (group_id, lp, name, source, seq);
-- By key, the message's position in its log: one that comes again of a parked key goes in front of all that lies behind
-- it there, also of other sources.
CREATE INDEX parked_message_position ON mqlayer.parked_message (group_id, lp, name, partition_id, log_offset);
CREATE INDEX parked_message_replay ON mqlayer.parked_message (replay) WHERE replay IS NOT NULL;
-- The planner takes a group that is younger than the table's statistics for one without rows. Every index that begins
-- with the group looks equally good then, and it took the smallest, which goes through all that the group has there for
-- each message. Without statistics of the column it takes every group for a two-hundredth of the table.
ALTER TABLE mqlayer.parked_message ALTER COLUMN group_id SET STATISTICS 0;

-- What people may see of messages: all but bodies and headers.
CREATE VIEW mqlayer.parked_fact AS
SELECT group_id, lp, name, source, seq, position, partition_id, log_offset, key, redriven, replay, attempts, tried,
       convert_to(concat_ws(':', source, lp, seq, split_part(encode(m, 'escape'), ':', 4)), 'UTF8') AS m,
       octet_length(m) AS m_size, octet_length(body) AS body_size,
       -- Of a body outside of the message, as the reference says.
       CASE WHEN position(decode('226d712d626f6479223a', 'hex') IN m) > 0
            THEN substring(encode(m, 'escape'), '"mq-body": ?"[0-9a-f-]{36}:([0-9]{1,10}):')::bigint END AS large_size
FROM mqlayer.parked_message;

-- The amount that is parked of a group: the sum over its rows. A connection adds to the row of its own slot, so that
-- members do not wait for each other. A single row may be below 0.
CREATE TABLE mqlayer.parked_total (
    group_id bigint NOT NULL REFERENCES mqlayer.consumer_group,
    slot     smallint NOT NULL,
    messages bigint NOT NULL,
    bytes    bigint NOT NULL,
    CONSTRAINT parked_total_key PRIMARY KEY (group_id, slot)
);

-- Count parked messages. It runs as its owner: a role's own right is to park. Statements on messages of several keys
-- hold the rows of these keys, in order; the slot comes last.
CREATE FUNCTION mqlayer.parked_count_v1() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    sign CONSTANT int := CASE TG_OP WHEN 'INSERT' THEN 1 ELSE -1 END;
BEGIN
    UPDATE mqlayer.parked_key k SET messages = k.messages + sign * c.messages, bytes = k.bytes + sign * c.bytes
    FROM (SELECT group_id, lp, name, count(*) AS messages,
                 sum(octet_length(body) + octet_length(key) + octet_length(m)) AS bytes
          FROM changed WHERE substr(name, 1, 1) <> decode('ff', 'hex') GROUP BY group_id, lp, name) AS c
    WHERE k.group_id = c.group_id AND k.lp = c.lp AND k.name = c.name;
    INSERT INTO mqlayer.parked_total AS t (group_id, slot, messages, bytes)
    SELECT group_id, pg_backend_pid() % 256, sign * count(*),
           sign * sum(octet_length(body) + octet_length(key) + octet_length(m))
    FROM changed GROUP BY group_id
    ON CONFLICT (group_id, slot) DO UPDATE
    SET messages = t.messages + excluded.messages, bytes = t.bytes + excluded.bytes;
    RETURN NULL;
END $$;

CREATE TRIGGER parked_message_in AFTER INSERT ON mqlayer.parked_message REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION mqlayer.parked_count_v1();
CREATE TRIGGER parked_message_out AFTER DELETE ON mqlayer.parked_message REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION mqlayer.parked_count_v1();

-- The parked keys that the last acts of operators and scans changed, by the number that consumer_group.parking had
-- then. Members look at these, and at all where a number is missing here.
CREATE TABLE mqlayer.parking_change (
    group_id bigint NOT NULL REFERENCES mqlayer.consumer_group,
    number   bigint NOT NULL,
    -- -1: any.
    lp       smallint NOT NULL,
    name     bytea NOT NULL,
    CONSTRAINT parking_change_key PRIMARY KEY (group_id, number, lp, name),
    CONSTRAINT parking_change_name CHECK (octet_length(name) <= 65536)
);


-- Large bodies -------------------------------------------------------------------------------------------------------

-- The id of the stored body that headers, or a record's facts, name. Null: none.
CREATE FUNCTION mqlayer.body_named_v1(p_headers text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN substring(p_headers, '"mq-body": ?"([0-9a-f-]{36}):');

CREATE INDEX parked_message_body ON mqlayer.parked_message (mqlayer.body_named_v1(encode(m, 'escape')))
    WHERE position(decode('226d712d626f6479223a', 'hex') IN m) > 0;


-- Dead messages and failures -----------------------------------------------------------------------------------------

-- A message that left a group without its effect, and why: dead letters, and messages that were passed over.
CREATE TABLE mqlayer.dead_message (
    dead_id       bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id      bigint NOT NULL REFERENCES mqlayer.consumer_group,
    lp            smallint NOT NULL,
    source        bigint NOT NULL,
    seq           bigint NOT NULL,
    partition_id  int NOT NULL REFERENCES mqlayer.partition,
    log_offset    bigint NOT NULL,
    key           bytea NOT NULL,
    m             bytea NOT NULL,
    -- Null where it was passed over on purpose and can't be sent again.
    body          bytea,
    -- exhausted: its attempts. rejected: by the handler, or for a final error. skipped: by the handler or the group's
    -- policy. discarded: by an operator. expired: its time to live ended.
    cause         text NOT NULL,
    -- The words of the handler or the operator, or the last error: its type, text and place.
    reason        text NOT NULL,
    attempts      int NOT NULL,
    -- A member or an operator.
    actor         text NOT NULL,
    died_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Given back to the group: it lives there again.
    redriven_at   timestamptz,
    -- How often the group had been sent elsewhere when the message was given back. Until the next time its record in
    -- the stream stands for nothing, for every reader: the message is in the group's parked lines, or was handled
    -- there.
    redriven_seek int,
    -- Its node lost its record, or it is given to a successor without it. Such messages come again at other offsets
    -- than they had, if at all.
    log_lost        boolean NOT NULL DEFAULT false,
    CONSTRAINT dead_message_once UNIQUE (group_id, lp, source, seq),
    CONSTRAINT dead_message_cause CHECK (cause IN ('exhausted', 'rejected', 'skipped', 'discarded', 'expired')),
    CONSTRAINT dead_message_numbers CHECK (
        lp BETWEEN 0 AND 1023 AND source BETWEEN 1 AND 9007199254740991 AND seq BETWEEN 1 AND 9007199254740991
        AND log_offset BETWEEN 0 AND 9007199254740991 AND attempts BETWEEN 0 AND 2000000000
        AND redriven_seek BETWEEN 0 AND 1000000000),
    CONSTRAINT dead_message_times CHECK (
        died_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND redriven_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT dead_message_sizes CHECK (
        octet_length(key) <= 65536 AND octet_length(m) <= 1000000 AND octet_length(body) <= 16777216),
    CONSTRAINT dead_message_texts CHECK (octet_length(reason) <= 65536 AND octet_length(actor) <= 4096)
);
-- Pages, latest first: of a group, and of all.
CREATE INDEX dead_message_listed ON mqlayer.dead_message (group_id, died_at, dead_id) WHERE redriven_at IS NULL;
CREATE INDEX dead_message_latest ON mqlayer.dead_message (died_at, dead_id) WHERE redriven_at IS NULL;
-- The same of those given back; only a redrive writes these.
CREATE INDEX dead_message_redriven ON mqlayer.dead_message (group_id, died_at, dead_id) WHERE redriven_at IS NOT NULL;
CREATE INDEX dead_message_redriven_latest ON mqlayer.dead_message (died_at, dead_id) WHERE redriven_at IS NOT NULL;
CREATE INDEX dead_message_stream ON mqlayer.dead_message (group_id, partition_id, log_offset);
-- Key by key, as its messages were published: the order of a redrive.
CREATE INDEX dead_message_queue ON mqlayer.dead_message (group_id, lp, key, partition_id, log_offset, dead_id)
    WHERE redriven_at IS NULL;
CREATE INDEX dead_message_log_lost ON mqlayer.dead_message (group_id, lp) WHERE log_lost;
-- Its large body; one without a body can't be sent again.
CREATE INDEX dead_message_body ON mqlayer.dead_message (mqlayer.body_named_v1(encode(m, 'escape')))
    WHERE body IS NOT NULL AND position(decode('226d712d626f6479223a', 'hex') IN m) > 0;
-- As of parked_message.
ALTER TABLE mqlayer.dead_message ALTER COLUMN group_id SET STATISTICS 0;

-- What people may see of messages: all but bodies and headers.
CREATE VIEW mqlayer.dead_fact AS
SELECT dead_id, group_id, lp, source, seq, partition_id, log_offset, key, octet_length(body) AS body_size, cause, reason,
       attempts, actor, died_at, redriven_at, redriven_seek, log_lost,
       -- As in parked_fact; none where the message has no body any more.
       CASE WHEN body IS NOT NULL AND position(decode('226d712d626f6479223a', 'hex') IN m) > 0
            THEN substring(encode(m, 'escape'), '"mq-body": ?"[0-9a-f-]{36}:([0-9]{1,10}):')::bigint END AS large_size
FROM mqlayer.dead_message;

-- Failed attempts, for people: kept while the message waits or is dead, else for a week.
CREATE TABLE mqlayer.failed_attempt (
    group_id  bigint NOT NULL REFERENCES mqlayer.consumer_group,
    lp        smallint NOT NULL,
    source    bigint NOT NULL,
    seq       bigint NOT NULL,
    attempt   int NOT NULL,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    member_id text NOT NULL,
    -- An error's type, text and place, or that no answer came.
    error     text NOT NULL,
    CONSTRAINT failed_attempt_key PRIMARY KEY (group_id, lp, source, seq, attempt, failed_at),
    CONSTRAINT failed_attempt_numbers CHECK (
        lp BETWEEN 0 AND 1023 AND source BETWEEN 1 AND 9007199254740991 AND seq BETWEEN 1 AND 9007199254740991
        AND attempt BETWEEN 0 AND 2000000000),
    CONSTRAINT failed_attempt_texts CHECK (octet_length(error) <= 65536 AND octet_length(member_id) <= 1024)
);
CREATE INDEX failed_attempt_old ON mqlayer.failed_attempt (failed_at);
-- As of parked_message.
ALTER TABLE mqlayer.failed_attempt ALTER COLUMN group_id SET STATISTICS 0;

-- How often each event of failing messages and keys happened, ever: see mqlayer/events.py.
CREATE TABLE mqlayer.failure_count (
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group,
    -- Its owner alone counts here, so that members do not wait for each other. 0: operators and jobs, under the group's
    -- lock.
    partition_id int NOT NULL,
    event        text NOT NULL,
    count        bigint NOT NULL,
    last_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT failure_count_key PRIMARY KEY (group_id, partition_id, event),
    CONSTRAINT failure_count_partition CHECK (partition_id BETWEEN 0 AND 2147483646),
    CONSTRAINT failure_count_last_at CHECK (last_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT failure_count_event_length CHECK (octet_length(event) <= 63),
    -- The sum over a group's partitions stays a bigint.
    CONSTRAINT failure_count_count CHECK (count BETWEEN 0 AND 9007199254740991)
);


-- Redrives and replays -----------------------------------------------------------------------------------------------

-- Work on a group's messages by a job that may be stopped, killed and gone on with. Bulk actions have a fixed set in
-- bulk_item: redrive gives dead messages back, keep rules that they stay dead, release tries parked keys, discard lets
-- parked messages die. replay: of the archive, messages that the group has come past. backfill: of the archive, messages
-- from before the group's start, ahead of its streams.
CREATE TABLE mqlayer.redrive (
    redrive_id   bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group,
    kind         text NOT NULL,
    -- The messages that it is for: see mqlayer/redelivery/filters.py.
    filter       jsonb NOT NULL,
    -- Messages per second, at most. 0: no limit.
    per_s        double precision NOT NULL,
    actor        text NOT NULL,
    state        text NOT NULL DEFAULT 'running',

    -- Of a bulk action: why it was started, how many items it has and how many matched, the last item that is done, and
    -- how many items no transaction could take.
    reason       text,
    size         int,
    matched      bigint,
    at_number    int NOT NULL DEFAULT 0,
    failed       int NOT NULL DEFAULT 0,
    -- When its set was fixed. Until it is started, started_at is this time.
    planned_at   timestamptz,

    -- Of the archive: later batches are not of it.
    upto_batch   bigint,
    snapshot_id  int,
    -- Per partition the first offset that the group comes to by itself. Of other partitions it has come past all.
    bounds       jsonb NOT NULL DEFAULT '{}',
    -- Its messages have places before this one. Messages that are parked meanwhile have places behind it.
    position        bigint,
    -- Whether newer messages wait until it is over, or may come between.
    newer        text,
    -- The only key that it is for. Null: any.
    name         bytea,
    -- The last record that was looked at, in the order of batches.
    at_batch     bigint NOT NULL DEFAULT 0,
    at_record    bigint NOT NULL DEFAULT 0,

    sent         bigint NOT NULL DEFAULT 0,
    not_sent     bigint NOT NULL DEFAULT 0,
    -- How many messages had which result.
    results      jsonb NOT NULL DEFAULT '{}',
    -- The process that works on it, and until when no other one begins to by itself. By this database's clock, as all
    -- times here.
    worker       text,
    lease_until  timestamptz,
    -- Nothing is sent before.
    next_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- Why it waits, where that is not for its rate.
    blocked_by        text,
    started_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    ended_at     timestamptz,
    CONSTRAINT redrive_kind CHECK (kind IN ('redrive', 'keep', 'release', 'discard', 'replay', 'backfill')),
    CONSTRAINT redrive_state CHECK (state IN ('planned', 'running', 'done', 'cancelled')),
    CONSTRAINT redrive_rate CHECK (per_s >= 0 AND per_s <= 1e11),
    CONSTRAINT redrive_ended CHECK ((state IN ('planned', 'running')) = (ended_at IS NULL)),
    CONSTRAINT redrive_numbers CHECK (
        size BETWEEN 0 AND 1000000 AND matched BETWEEN 0 AND 4611686018427387904 AND at_number BETWEEN 0 AND size
        AND failed BETWEEN 0 AND size AND upto_batch BETWEEN 0 AND 4611686018427387904
        AND position BETWEEN -4611686018427387904 AND 4611686018427387904 AND snapshot_id BETWEEN 0 AND 2000000000),
    CONSTRAINT redrive_times CHECK (
        lease_until BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND planned_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND ended_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT redrive_newer CHECK (newer IN ('wait', 'between')),
    CONSTRAINT redrive_of_archive CHECK (
        (kind IN ('replay', 'backfill')) = (upto_batch IS NOT NULL)
        AND (upto_batch IS NULL) = (position IS NULL) AND (upto_batch IS NULL) = (newer IS NULL)),
    CONSTRAINT redrive_of_bulk CHECK (
        (upto_batch IS NULL) = (size IS NOT NULL) AND (size IS NULL) = (matched IS NULL)
        AND (size IS NULL) = (planned_at IS NULL) AND (state <> 'planned' OR size IS NOT NULL)),
    -- Consumers and workers may write the state of jobs, and not this time: only an operator starts a bulk action.
    CONSTRAINT redrive_started CHECK (planned_at IS NULL OR state IN ('planned', 'cancelled') OR started_at > planned_at),
    -- One filter that can't be read would end the list of all groups' redrives.
    CONSTRAINT redrive_filter_names CHECK (
        jsonb_typeof(filter) = 'object'
        AND filter - ARRAY['key', 'since', 'until']
                   - CASE WHEN kind IN ('redrive', 'keep') THEN ARRAY['cause', 'error', 'min_attempts', 'dead_ids']
                          WHEN kind IN ('release', 'discard') THEN ARRAY['cause', 'error', 'min_attempts', 'waiting']
                          ELSE ARRAY['tag', 'snapshot'] END = '{}'
    ),
    CONSTRAINT redrive_filter_values CHECK (
        coalesce(jsonb_typeof(filter -> 'key'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'cause'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'error'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'tag'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'snapshot'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'since'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'until'), 'string') = 'string'
        AND coalesce(jsonb_typeof(filter -> 'dead_ids'), 'array') = 'array'
        AND coalesce(jsonb_typeof(filter -> 'waiting'), 'boolean') = 'boolean'
        AND coalesce(jsonb_typeof(filter -> 'min_attempts'), 'number') = 'number'
        AND octet_length(filter::text) <= 1000000
    ),
    -- In the form of ISO 8601, and a time that is one: else the conversion refuses it.
    CONSTRAINT redrive_filter_times CHECK (
        CASE WHEN NOT filter ? 'since' AND NOT filter ? 'until' THEN true
             WHEN coalesce(filter ->> 'since', filter ->> 'until')
                      ~ '^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d([.]\d{6})?([+-]\d\d:\d\d(:\d\d)?)$'
                  AND coalesce(filter ->> 'until', filter ->> 'since')
                      ~ '^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d([.]\d{6})?([+-]\d\d:\d\d(:\d\d)?)$'
             THEN (coalesce(filter ->> 'since', filter ->> 'until'))::timestamptz IS NOT NULL
                  AND (coalesce(filter ->> 'until', filter ->> 'since'))::timestamptz IS NOT NULL
             ELSE false END
    ),
    CONSTRAINT redrive_texts CHECK (
        octet_length(actor) <= 4096 AND octet_length(worker) <= 1024 AND octet_length(blocked_by) <= 65536
        AND octet_length(name) <= 65536 AND octet_length(reason) <= 65536),
    CONSTRAINT redrive_documents CHECK (
        octet_length(bounds::text) <= 1000000 AND octet_length(results::text) <= 1000000)
);
CREATE INDEX redrive_running ON mqlayer.redrive (redrive_id) WHERE state = 'running';
-- One at a time: two would give a key's messages to a group across each other.
CREATE UNIQUE INDEX redrive_one_replay ON mqlayer.redrive (group_id) WHERE state = 'running' AND kind IN ('replay', 'backfill');

-- The set of a bulk action, fixed in one statement, in the order in which it is done: dead messages or parked keys.
CREATE TABLE mqlayer.bulk_item (
    redrive_id bigint NOT NULL REFERENCES mqlayer.redrive,
    number     int NOT NULL,
    group_id   bigint NOT NULL REFERENCES mqlayer.consumer_group,
    -- Of a dead message. One that was named and has no row has nothing else.
    dead_id    bigint,
    -- A dead message's key, or the name of a parked key; the identity of the message or of the key's head.
    lp         smallint,
    name       bytea,
    source     bigint,
    seq        bigint,
    -- When it died or was parked, and the cause of a death: another one means that it changed.
    since      timestamptz,
    cause      text,
    -- Of a parked key: its messages then, and the last one's place. Later ones are not of the set.
    messages   bigint,
    upto       bigint,
    -- Messages of a key that are discarded so far.
    gone       bigint NOT NULL DEFAULT 0,
    -- Null: not done yet. already: a dead message lives in its group. no_body: it was passed over without its body.
    -- gone: there is no such row any more. changed: it died again, has another cause or another head. paused: an operator
    -- paused the key. due: the key is tried now anyway. failed: see error.
    result     text,
    error      text,
    at         timestamptz,
    CONSTRAINT bulk_item_key PRIMARY KEY (redrive_id, number),
    CONSTRAINT bulk_item_word CHECK (
        result IN ('done', 'already', 'no_body', 'gone', 'changed', 'paused', 'due', 'failed')),
    CONSTRAINT bulk_item_numbers CHECK (
        number BETWEEN 1 AND 1000000 AND lp BETWEEN 0 AND 1023 AND messages BETWEEN 0 AND 9007199254740991
        AND source BETWEEN 1 AND 9007199254740991 AND seq BETWEEN 1 AND 9007199254740991
        AND gone BETWEEN 0 AND 9007199254740991),
    CONSTRAINT bulk_item_times CHECK (
        since BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'
        AND at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00'),
    CONSTRAINT bulk_item_texts CHECK (
        octet_length(name) <= 65536 AND octet_length(cause) <= 63 AND octet_length(error) <= 65536)
);
CREATE INDEX bulk_item_failed ON mqlayer.bulk_item (redrive_id, number) WHERE result = 'failed';
-- The life of a message asks which bulk actions gave it back.
CREATE INDEX bulk_item_dead ON mqlayer.bulk_item (dead_id) WHERE dead_id IS NOT NULL;
-- And the history of a key, which bulk actions took it.
CREATE INDEX bulk_item_of_key ON mqlayer.bulk_item (group_id, lp, name, redrive_id);

-- Messages that a replay did not send, but for those that its filter or the group's leaves out.
CREATE TABLE mqlayer.replay_result (
    redrive_id bigint NOT NULL REFERENCES mqlayer.redrive,
    lp         smallint NOT NULL,
    source     bigint NOT NULL,
    seq        bigint NOT NULL,
    -- already: it waits in the group. dead: it is dead there. ahead: the group has yet to come to it by itself.
    result     text NOT NULL,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT replay_result_key PRIMARY KEY (redrive_id, lp, source, seq),
    CONSTRAINT replay_result_word CHECK (result IN ('already', 'dead', 'ahead'))
);


-- Jobs and audit -----------------------------------------------------------------------------------------------------

-- One row per periodic job: the process that raises the epoch runs it, so that two schedulers do no harm.
CREATE TABLE mqlayer.job (
    name    text NOT NULL,
    epoch   bigint NOT NULL DEFAULT 0,
    next_at timestamptz NOT NULL DEFAULT now(),
    last_at timestamptz,
    -- Of the last run: its end, and its error where it failed.
    ended_at timestamptz,
    error   text,
    CONSTRAINT job_key PRIMARY KEY (name),
    CONSTRAINT job_name CHECK (octet_length(name) <= 63),
    CONSTRAINT job_error CHECK (octet_length(error) <= 4096)
);

-- Curves without a metrics server: a row per minute and thing, kept for a week by the job that writes them. Its rows are
-- bounded: at most 10,080 minutes times the things of one run, which are bounded too.
CREATE TABLE mqlayer.sample (
    kind      text NOT NULL,
    -- The number of the group, topic or node.
    object_id bigint NOT NULL,
    at        timestamptz NOT NULL,
    -- Of groups: unsettled messages, age of the oldest, messages that are parked, and dead.
    lag       bigint,
    oldest_s  double precision,
    parked    bigint,
    dead      bigint,
    -- And living members, and partitions with unsettled messages.
    members   int,
    busy      int,
    -- Of topics, since ever: messages committed to the outbox, relayed from it, and stored in partitions that are kept.
    committed bigint,
    relayed   bigint,
    stored    bigint,
    -- Of nodes. A limit of 0: none. Seconds of a processor since its start.
    memory_bytes bigint,
    memory_limit bigint,
    cpu_s        double precision,
    ops_per_s    double precision,
    CONSTRAINT sample_key PRIMARY KEY (kind, object_id, at),
    CONSTRAINT sample_kind CHECK (kind IN ('group', 'topic', 'node')),
    CONSTRAINT sample_minute CHECK (at = date_trunc('minute', at, 'UTC'))
);

-- How many members a group needs, by the samples of six hours: for the rate that comes in, and to work its lag off within
-- the target. Null where there are no samples, and for groups without members of their own. It falls only to the highest
-- need of the last ten minutes. See docs/how-to/autoscale.md.
CREATE FUNCTION mqlayer.members_wanted_v1(
    p_topic text, p_group text, p_least int DEFAULT 1, p_lag_target_s double precision DEFAULT 60
) RETURNS double precision LANGUAGE sql STABLE
    RETURN (
        WITH g AS (
            SELECT c.group_id, c.topic_id, c.mode = 'shared' AS shared,
                   (SELECT count(*) FROM mqlayer.readable r WHERE r.group_id = c.group_id) AS readable
            FROM mqlayer.consumer_group c JOIN mqlayer.topic t USING (topic_id)
            WHERE t.name = p_topic AND c.name = p_group AND c.state = 'live' AND c.mode IN ('exclusive', 'shared')
        ), looks AS (
            SELECT m.at, m.lag, m.oldest_s, m.members, CASE WHEN g.shared THEN m.lag ELSE m.busy END AS busy, o.stored
            FROM g JOIN mqlayer.sample m ON m.kind = 'group' AND m.object_id = g.group_id
            JOIN mqlayer.sample o ON o.kind = 'topic' AND o.object_id = g.topic_id AND o.at = m.at
            WHERE m.at > now() - interval '6 hours' AND m.lag IS NOT NULL AND o.stored IS NOT NULL AND m.members IS NOT NULL
        ), spans AS (
            SELECT l.*, lag(l.members) OVER w AS members_before, least(l.busy, lag(l.busy) OVER w) AS least_busy,
                   least(l.oldest_s, lag(l.oldest_s) OVER w) AS least_old_s,
                   greatest(0, l.stored - lag(l.stored) OVER w) / extract(epoch FROM l.at - lag(l.at) OVER w)::float8 AS in_per_s,
                   greatest(0, l.stored - lag(l.stored) OVER w - (l.lag - lag(l.lag) OVER w))
                       / extract(epoch FROM l.at - lag(l.at) OVER w)::float8 AS handled_per_s
            FROM looks l WINDOW w AS (ORDER BY l.at)
        ), capacity AS (
            -- What a member handles while each has a partition that waits: else it would handle more if more came.
            SELECT avg(one.per_s) AS per_s
            FROM (SELECT s.handled_per_s / s.members AS per_s FROM spans s
                  WHERE s.members > 0 AND s.members = s.members_before AND s.handled_per_s > 0
                    AND s.least_busy >= s.members AND s.least_old_s > 2
                  ORDER BY s.at DESC LIMIT 5) AS one
        ), needs AS (
            SELECT s.at, s.oldest_s, s.busy, s.members, s.lag, coalesce(s.in_per_s, 0) AS in_per_s,
                   CASE WHEN c.per_s > 0 THEN
                            -- A fifth in reserve.
                            ceil(coalesce(s.in_per_s, 0) / (0.8 * c.per_s) + s.lag / (c.per_s * greatest(p_lag_target_s, 1)))
                        WHEN s.lag > 0 AND s.oldest_s > p_lag_target_s THEN ceil(1.5 * s.members) + (s.members = 0)::int
                        -- What a member could do is not known: try with fewer.
                        WHEN s.lag > 0 OR s.in_per_s > 0 THEN greatest(1, floor(0.9 * s.members))
                        ELSE 0 END AS members_needed
            FROM spans s CROSS JOIN capacity c WHERE s.at > now() - interval '11 minutes'
        )
        SELECT greatest(p_least, least(
                   CASE WHEN g.shared THEN max(n.lag + ceil(n.in_per_s)) ELSE g.readable END,
                   -- Where old messages wait in few partitions, more members than these would find no work.
                   max(CASE WHEN NOT g.shared AND n.oldest_s > p_lag_target_s / 4
                            THEN least(n.members_needed, greatest(n.busy, n.members)) ELSE n.members_needed END)))::float8
        FROM g CROSS JOIN needs n GROUP BY g.group_id, g.shared, g.readable);
CREATE INDEX sample_old ON mqlayer.sample (at);

-- Problems of the system, from the first look that found each to the first that did not. A job looks each minute, writes
-- them, and keeps them for a week, at most 10,000 of them.
CREATE TABLE mqlayer.problem (
    problem_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    alert      text NOT NULL,
    severity   text NOT NULL,
    -- The part of the system that the look found it in: a look that could not read the part ends none of its problems.
    part       text NOT NULL,
    -- Its place, empty where it has none; `item`: of several at one place.
    topic      text NOT NULL,
    group_name text NOT NULL,
    node       text NOT NULL,
    item       text NOT NULL,
    text       text NOT NULL,
    effect     text NOT NULL,
    -- When it began, where something tells that.
    since         timestamptz,
    first_seen_at timestamptz NOT NULL,
    last_seen_at  timestamptz NOT NULL,
    ended_at      timestamptz,
    CONSTRAINT problem_lengths CHECK (
        octet_length(alert) <= 63 AND octet_length(severity) <= 63 AND octet_length(part) <= 63
        AND octet_length(topic) <= 80 AND octet_length(group_name) <= 255 AND octet_length(node) <= 255
        AND octet_length(item) <= 255 AND octet_length(text) <= 4096 AND octet_length(effect) <= 4096)
);
CREATE UNIQUE INDEX problem_open ON mqlayer.problem (alert, topic, group_name, node, item) WHERE ended_at IS NULL;
CREATE INDEX problem_ended ON mqlayer.problem (ended_at, problem_id) WHERE ended_at IS NOT NULL;

CREATE TABLE mqlayer.audit (
    audit_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT now(),
    -- The actor by its own word, and the role that it was for Postgres.
    actor    text NOT NULL,
    role     name NOT NULL DEFAULT mqlayer.caller_v1(),
    act      text NOT NULL,
    object   text NOT NULL,
    facts    jsonb NOT NULL DEFAULT '{}',
    CONSTRAINT audit_texts CHECK (
        octet_length(actor) <= 4096 AND octet_length(act) <= 1024 AND octet_length(object) <= 4096),
    CONSTRAINT audit_facts CHECK (octet_length(facts::text) <= 1000000)
);
-- The acts on one group.
CREATE INDEX audit_by_object ON mqlayer.audit (object, at);
CREATE INDEX audit_by_time ON mqlayer.audit (at, audit_id);
CREATE INDEX audit_by_act ON mqlayer.audit (act, at, audit_id);
-- An index takes no text of 4,096 bytes.
CREATE INDEX audit_by_actor ON mqlayer.audit (left(actor, 200), at, audit_id);
-- People's acts by their names, as in mqlayer/inspect/audit_trail.py: few among those of machines.
CREATE INDEX audit_of_people ON mqlayer.audit (at, audit_id) WHERE strpos(actor, '@') > 0;


-- Console ------------------------------------------------------------------------------------------------------------

-- Sessions of people at consoles. A session is only for consoles that log in as the role that began it: every role that
-- may look could make one otherwise, of any level. No role reads or writes the table itself.
CREATE TABLE mqlayer.console_session (
    -- SHA-256 of the token in the browser's cookie.
    token_hash bytea NOT NULL,
    login      name NOT NULL,
    name       text NOT NULL,
    level      text NOT NULL,
    bodies     boolean NOT NULL,
    -- What it was begun with: where that changes, the console ends the session.
    proof      text NOT NULL,
    began_at   timestamptz NOT NULL DEFAULT now(),
    -- To the minute, so that not each request writes.
    seen_at    timestamptz NOT NULL DEFAULT now(),
    idle_s     int NOT NULL,
    ends_at    timestamptz NOT NULL,
    CONSTRAINT console_session_key PRIMARY KEY (token_hash),
    CONSTRAINT console_session_hash CHECK (octet_length(token_hash) = 32),
    CONSTRAINT console_session_texts CHECK (octet_length(name) BETWEEN 1 AND 256 AND octet_length(proof) <= 256),
    CONSTRAINT console_session_level CHECK (level IN ('viewer', 'operator'))
);
CREATE INDEX console_session_by_name ON mqlayer.console_session (login, name, began_at);

-- Refuse a caller whose rights no console has.
CREATE FUNCTION mqlayer.check_console_v1() RETURNS void
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF NOT mqlayer.has_v1('view', 'operate') THEN
        RAISE EXCEPTION 'role "%" lacks the right to view', mqlayer.caller_v1()
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant view ' || mqlayer.caller_v1();
    END IF;
END $$;

-- Begin a session, and forget those of this login that are over. A name keeps its ten newest, a login 10,000.
CREATE FUNCTION mqlayer.console_session_begin_v1(p_token_hash bytea, p_name text, p_level text, p_bodies boolean,
                                                 p_proof text, p_idle_s int, p_longest_s int) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_console_v1();
    IF (p_idle_s BETWEEN 1 AND 31536000 AND p_longest_s BETWEEN 1 AND 31536000) IS NOT TRUE THEN
        RAISE EXCEPTION 'p_idle_s and p_longest_s have the bounds 1 and 31536000'
            USING ERRCODE = 'MQ009', HINT = 'let a session last for a year at most';
    END IF;
    DELETE FROM mqlayer.console_session s WHERE s.login = session_user
        AND (s.ends_at <= now() OR s.seen_at + make_interval(secs => s.idle_s) <= now()
             OR s.token_hash IN (SELECT o.token_hash FROM mqlayer.console_session o
                                 WHERE o.login = session_user AND o.name = p_name
                                 ORDER BY o.began_at DESC, o.token_hash OFFSET 9)
             OR s.token_hash IN (SELECT o.token_hash FROM mqlayer.console_session o WHERE o.login = session_user
                                 ORDER BY o.began_at DESC, o.token_hash OFFSET 9999));
    INSERT INTO mqlayer.console_session (token_hash, login, name, level, bodies, proof, idle_s, ends_at)
    VALUES (p_token_hash, session_user, p_name, p_level, p_bodies, p_proof, p_idle_s,
            now() + make_interval(secs => p_longest_s));
END $$;

-- The session of a token, if it is not over. With p_use, its idle time begins anew.
CREATE FUNCTION mqlayer.console_session_v1(p_token_hash bytea, p_use boolean, OUT name text, OUT level text,
                                           OUT bodies boolean, OUT proof text) RETURNS SETOF record
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_console_v1();
    RETURN QUERY SELECT s.name, s.level, s.bodies, s.proof FROM mqlayer.console_session s
                 WHERE s.token_hash = p_token_hash AND s.login = session_user AND s.ends_at > now()
                   AND s.seen_at + make_interval(secs => s.idle_s) > now();
    IF FOUND AND p_use THEN
        UPDATE mqlayer.console_session s SET seen_at = now()
        WHERE s.token_hash = p_token_hash AND s.seen_at < now() - make_interval(secs => least(60, s.idle_s / 10));
    END IF;
END $$;

-- End a session, for all consoles; whether it was there.
CREATE FUNCTION mqlayer.console_session_end_v1(p_token_hash bytea) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_console_v1();
    DELETE FROM mqlayer.console_session s WHERE s.token_hash = p_token_hash AND s.login = session_user;
    RETURN FOUND;
END $$;


-- The server ---------------------------------------------------------------------------------------------------------
-- A standby that was promoted, and a backup, may lack the last commits.

-- The server that this schema's commits were made on. The first connection notes it, and each one compares.
CREATE TABLE mqlayer.server (
    only_one  boolean NOT NULL DEFAULT true,
    -- Empty, and timeline 0, where the server does not tell it.
    system_id text NOT NULL,
    timeline  int NOT NULL,
    since     timestamptz NOT NULL DEFAULT now(),
    -- How often it was replaced by one that may lack commits. Seeks of a group are counted in its row, not by a
    -- sequence: their numbers leap with this.
    replaced  int NOT NULL DEFAULT 0,
    CONSTRAINT server_key PRIMARY KEY (only_one),
    CONSTRAINT server_only_one CHECK (only_one)
);

-- The timeline of this server: another one begins with each promotion and with each recovery to a point in time. 0
-- where a managed Postgres does not tell it.
CREATE FUNCTION mqlayer.timeline_v1() RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    RETURN ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int;
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN 0;
END $$;

-- The system identifier of this server. Empty where a managed Postgres does not tell it.
CREATE FUNCTION mqlayer.system_v1() RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    RETURN (SELECT system_identifier::text FROM pg_control_system());
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN '';
END $$;

-- Repair what a server that took another one's place may lack. Numbers that were given out in lost commits would be
-- given out again, while Redis holds the work that was done under them: each sequence leaps over more than can have
-- been lost, and never beyond its end. So do allocations, which are counted in rows, as seeks are: a member that saw
-- the lost ones would take those of now for older ones, hold nothing, and give nothing away. And no node is armed any
-- more, so that each owner there gets a new epoch, above all that the lost commits gave out, before a node is used.
CREATE FUNCTION mqlayer.server_repair_v1(p_facts jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_one record;
BEGIN
    FOR v_one IN
        SELECT format('%I.%I', schemaname, sequencename)::regclass AS number, coalesce(last_value, 0) AS last,
               max_value AS most,
               CASE WHEN sequencename LIKE 'source%' THEN 1000000 WHEN sequencename LIKE 'consumer_group%' THEN 1000
                    WHEN max_value > 2147483647 THEN 1000000000
                    ELSE 1000 END AS leap
        FROM pg_sequences WHERE schemaname IN ('mqlayer', 'mqlayer_archive') AND sequencename <> 'repaired_at'
    LOOP
        PERFORM setval(v_one.number, least(v_one.last, v_one.most - v_one.leap) + v_one.leap);
    END LOOP;
    UPDATE mqlayer.consumer_group SET allocation = least(allocation, 9007199254740991) + 1000000;
    UPDATE mqlayer.node SET armed_run_id = NULL;
    UPDATE mqlayer.server SET replaced = replaced + 1;
    INSERT INTO mqlayer.audit (actor, act, object, facts) VALUES ('database', 'postgres replaced', 'control', p_facts);
END $$;

-- When the numbers last leapt at a role's word, in seconds since 1970. A sequence, since no rollback takes it back, as
-- none takes back a leap.
CREATE SEQUENCE mqlayer.repaired_at;

-- The same at the word of a role, where only Redis tells that commits are missing. Every 5 seconds at most, so that no
-- relay can use numbers up, but for roles that may operate.
CREATE FUNCTION mqlayer.server_replaced_v1(p_facts jsonb) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_now bigint;
BEGIN
    -- One after the other: the second one sees when the first one did it.
    PERFORM FROM mqlayer.server FOR UPDATE;
    v_now := extract(epoch FROM clock_timestamp());
    IF v_now - coalesce(pg_sequence_last_value('mqlayer.repaired_at'), 0) BETWEEN 0 AND 4
       AND NOT mqlayer.has_v1('operate') THEN
        RAISE EXCEPTION 'the numbers leapt less than 5 seconds ago'
            USING ERRCODE = 'lock_not_available', HINT = 'try again in 5 seconds';
    END IF;
    PERFORM setval('mqlayer.repaired_at', v_now), mqlayer.server_repair_v1(p_facts);
END $$;

-- The numbers that sequences gave out, as a part of all that they have. Few roles may read the sequences themselves.
CREATE FUNCTION mqlayer.numbers_used_v1(OUT sequence_name text, OUT used double precision) RETURNS SETOF record
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    RETURN QUERY SELECT s.schemaname || '.' || s.sequencename, s.last_value::float8 / s.max_value::float8
                 FROM pg_sequences s WHERE s.schemaname IN ('mqlayer', 'mqlayer_archive') AND s.last_value IS NOT NULL;
END $$;

-- Say whether this server is another one than the schema knows, and if so repair what it may lack.
CREATE FUNCTION mqlayer.server_seen_v1() RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_system text;
    v_timeline int;
    v_known mqlayer.server;
BEGIN
    IF pg_is_in_recovery() THEN
        RAISE EXCEPTION 'it is a standby' USING ERRCODE = 'read_only_sql_transaction',
            HINT = 'add target_session_attrs=read-write to the DSN';
    END IF;
    v_system := mqlayer.system_v1();
    v_timeline := mqlayer.timeline_v1();
    SELECT * INTO v_known FROM mqlayer.server;
    IF v_known.system_id = v_system AND v_timeline IN (v_known.timeline, 0) THEN
        RETURN false;
    END IF;
    INSERT INTO mqlayer.server (system_id, timeline) VALUES (v_system, v_timeline) ON CONFLICT DO NOTHING;
    IF FOUND THEN
        RETURN false;
    END IF;
    -- One of all connections that see it does what follows; the others wait, and find it done.
    SELECT * INTO v_known FROM mqlayer.server FOR UPDATE;
    IF v_known.system_id = v_system AND v_timeline IN (v_known.timeline, 0) THEN
        RETURN false;
    END IF;
    IF v_known.system_id = v_system AND v_known.timeline = 0 THEN
        UPDATE mqlayer.server SET timeline = v_timeline;
        RETURN false;
    END IF;
    UPDATE mqlayer.server SET system_id = v_system, timeline = v_timeline, since = now();
    PERFORM mqlayer.server_repair_v1(jsonb_build_object(
        'timeline', v_timeline, 'before', v_known.timeline, 'another_system', v_known.system_id <> v_system));
    RETURN true;
END $$;


-- Deletions ----------------------------------------------------------------------------------------------------------
-- A role that may delete from a table may lock it against all others: LOCK TABLE asks for DELETE, TRUNCATE or UPDATE of
-- all columns. So consumers delete by these functions, and have no such privilege.

-- Refuse a caller who may not change the rows of a group.
CREATE FUNCTION mqlayer.check_group_v1(p_group_id bigint) RETURNS void
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_caller name := mqlayer.caller_v1();
    v_scope text;
BEGIN
    IF mqlayer.has_v1('work', 'operate', 'consume') OR p_group_id = ANY(mqlayer.groups_v1()) THEN
        RETURN;
    END IF;
    v_scope := (SELECT t.name || '/' || coalesce(b.name, g.name) FROM mqlayer.consumer_group g
                JOIN mqlayer.topic t ON t.topic_id = g.topic_id
                LEFT JOIN mqlayer.consumer_group b ON b.group_id = g.broadcast_of WHERE g.group_id = p_group_id);
    RAISE EXCEPTION 'role "%" lacks the right to consume %', v_caller, coalesce(v_scope, 'group ' || p_group_id)
        USING ERRCODE = 'insufficient_privilege',
              HINT = 'mqlayer grant consume ' || v_caller || coalesce(' --group ' || v_scope, '');
END $$;

-- Refuse a number of rows that no call needs.
CREATE FUNCTION mqlayer.check_count_v1(p_name text, p_count bigint) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF (p_count BETWEEN 0 AND 10000) IS NOT TRUE THEN
        RAISE EXCEPTION '% is %, its bounds are 0 and 10000', p_name, coalesce(p_count::text, 'null')
            USING ERRCODE = 'MQ009', HINT = 'make several calls';
    END IF;
END $$;

-- Forget members that are gone, joined long ago and own nothing. Of a group that is retired: all.
CREATE FUNCTION mqlayer.members_forget_v1(p_group_id bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id);
    DELETE FROM mqlayer.member m
    WHERE m.group_id = p_group_id
      AND (EXISTS (SELECT FROM mqlayer.consumer_group g WHERE g.group_id = p_group_id AND g.state = 'retired')
           OR m.lease_until = '-infinity' AND m.joined_at < now() - interval '1 hour'
              AND NOT EXISTS (SELECT FROM mqlayer.assignment a WHERE a.group_id = m.group_id AND a.member_id = m.member_id));
END $$;

-- Forget where a group started, and which partitions it has drained.
CREATE FUNCTION mqlayer.beginnings_forget_v1(p_group_id bigint) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id);
    DELETE FROM mqlayer.group_start WHERE group_id = p_group_id;
    DELETE FROM mqlayer.drained WHERE group_id = p_group_id;
END $$;

-- End messages of parked keys that are handled, or dead. Note the handled ones for the archive.
CREATE FUNCTION mqlayer.parked_messages_end_v1(p_group_id bigint, p_lps smallint[], p_sources bigint[], p_seqs bigint[],
                                               p_handled boolean[], p_given_s double precision, p_actor text)
    RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_seqs', cardinality(p_seqs));
    WITH gone AS (
        DELETE FROM mqlayer.parked_message m
        USING unnest(p_lps, p_sources, p_seqs, p_handled) AS given (lp, source, seq, handled)
        WHERE m.group_id = p_group_id AND m.lp = given.lp AND m.source = given.source AND m.seq = given.seq
        RETURNING m.group_id, m.partition_id, m.log_offset, m.tried, given.handled
    )
    INSERT INTO mqlayer_archive.outcome_queue
        (topic_id, group_id, partition_id, log_offset, outcome, attempts, delivered_at, actor)
    SELECT g.topic_id, e.group_id, e.partition_id, e.log_offset, 'handled', e.tried + 1,
           statement_timestamp() - make_interval(secs => p_given_s), p_actor
    FROM gone e JOIN mqlayer.consumer_group g USING (group_id) JOIN mqlayer.topic t USING (topic_id)
    WHERE e.handled AND t.archived;
END $$;

-- End a parked key if it has no message, no operator paused it, and no replay is for it alone. Returns its LP if it
-- did.
CREATE FUNCTION mqlayer.parked_key_end_v1(p_group_id bigint, p_lp smallint, p_name bytea) RETURNS SETOF smallint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id);
    RETURN QUERY
        DELETE FROM mqlayer.parked_key k
        WHERE k.group_id = p_group_id AND k.lp = p_lp AND k.name = p_name AND k.paused_at IS NULL
          AND NOT EXISTS (SELECT FROM mqlayer.parked_message m
                          WHERE m.group_id = k.group_id AND m.lp = k.lp AND m.name = k.name)
          AND NOT EXISTS (SELECT FROM mqlayer.redrive r
                          WHERE r.group_id = k.group_id AND r.name = k.name AND r.state = 'running')
        RETURNING k.lp;
END $$;

-- Forget parked keys without messages.
CREATE FUNCTION mqlayer.parked_keys_forget_v1(p_group_id bigint, p_lps smallint[], p_names bytea[]) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_names', cardinality(p_names));
    DELETE FROM mqlayer.parked_key k USING unnest(p_lps, p_names) AS given (lp, name)
    WHERE k.group_id = p_group_id AND k.lp = given.lp AND k.name = given.name;
END $$;

-- Drop some of the parked rows of a retired group, messages before keys. Each returns how many it dropped.
CREATE FUNCTION mqlayer.retired_messages_drop_v1(p_group_id bigint, p_limit int) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_gone bigint;
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_limit', p_limit);
    DELETE FROM mqlayer.parked_message WHERE ctid = ANY(ARRAY(
        SELECT m.ctid FROM mqlayer.parked_message m JOIN mqlayer.consumer_group g USING (group_id)
        WHERE m.group_id = p_group_id AND g.state = 'retired' LIMIT p_limit));
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;

CREATE FUNCTION mqlayer.retired_keys_drop_v1(p_group_id bigint, p_limit int) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_gone bigint;
BEGIN
    PERFORM mqlayer.check_group_v1(p_group_id), mqlayer.check_count_v1('p_limit', p_limit);
    DELETE FROM mqlayer.parked_key WHERE ctid = ANY(ARRAY(
        SELECT k.ctid FROM mqlayer.parked_key k JOIN mqlayer.consumer_group g USING (group_id)
        WHERE k.group_id = p_group_id AND g.state = 'retired' LIMIT p_limit));
    GET DIAGNOSTICS v_gone = ROW_COUNT;
    RETURN v_gone;
END $$;


-- Archive ------------------------------------------------------------------------------------------------------------
-- Published messages and their outcomes, kept for as long as an operator wants, and snapshots of them. See
-- docs/reference/archive.md. Only archivers write it, one at a time per topic: each of their transactions holds the topic's row
-- to its commit and writes the next batch number beside every row, so the part up to a batch never changes once it is
-- visible.

CREATE TABLE mqlayer_archive.topic (
    topic_id      int NOT NULL REFERENCES mqlayer.topic,
    -- The last batch. Counts transactions, not rows.
    batch         bigint NOT NULL DEFAULT 0,
    -- Grows whenever archiving is switched on: messages that were published while it was off are a gap that needs no
    -- acceptance.
    segment       int NOT NULL DEFAULT 1,
    -- When an archiver last came to the end of every partition that it could read.
    last_pass_at     timestamptz,
    -- The last batch of a day that was dropped. Earlier ones may be kept, where a snapshot needs them.
    dropped_batch bigint NOT NULL DEFAULT 0,
    CONSTRAINT topic_key PRIMARY KEY (topic_id)
);

-- How far each partition is in the archive.
CREATE TABLE mqlayer_archive.progress (
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    topic_id     int NOT NULL REFERENCES mqlayer.topic,
    -- The first offset that is not in the archive.
    upto_offset  bigint NOT NULL,
    -- The partition is sealed and all that came before its command record is in the archive.
    complete     boolean NOT NULL DEFAULT false,
    CONSTRAINT progress_key PRIMARY KEY (partition_id)
);
CREATE INDEX progress_by_topic ON mqlayer_archive.progress (topic_id);

-- The contiguous stretch of seqs that the archive holds per source and LP: first to last, both included. The first
-- grows when retention drops records. Identity makes records unique: a seq up to the last is never archived again.
CREATE TABLE mqlayer_archive.mark (
    topic_id  int NOT NULL REFERENCES mqlayer.topic,
    source    bigint NOT NULL,
    lp        smallint NOT NULL,
    first_seq bigint NOT NULL,
    last_seq  bigint NOT NULL,
    -- The topic's stretch in which a record of the source and LP was last archived.
    segment   int NOT NULL DEFAULT 1,
    CONSTRAINT mark_key PRIMARY KEY (topic_id, source, lp)
) WITH (fillfactor = 50);

-- Seqs that the archive does not have between two that exist: after_seq and next_seq are there, or will be. A partition
-- is archived no further than a gap without acceptance. The mark begins anew behind a gap.
CREATE TABLE mqlayer_archive.gap (
    topic_id     int NOT NULL REFERENCES mqlayer.topic,
    source       bigint NOT NULL,
    lp           smallint NOT NULL,
    after_seq    bigint NOT NULL,
    next_seq     bigint NOT NULL,
    -- The position of the record behind it.
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    log_offset   bigint NOT NULL,
    found_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When it was accepted, null while the archiver waits for that. And by which actor, null where archiving was
    -- switched off meanwhile.
    accepted_at  timestamptz,
    actor        text,
    CONSTRAINT gap_key PRIMARY KEY (topic_id, source, lp, after_seq),
    CONSTRAINT gap_range CHECK (next_seq > after_seq + 1),
    CONSTRAINT gap_actor CHECK (octet_length(actor) <= 4096)
);

-- Every record of archived topics, once. Append-only. Table partitions by the day of archiving are made ahead and
-- dropped as a whole.
CREATE TABLE mqlayer_archive.record (
    topic_id     int NOT NULL,
    batch        bigint NOT NULL,
    -- The route version that brought its partition into force.
    version      int NOT NULL,
    partition_id int NOT NULL,
    log_offset   bigint NOT NULL,
    source       bigint NOT NULL,
    lp           smallint NOT NULL,
    seq          bigint NOT NULL,
    -- By the publisher's clock.
    published_at timestamptz NOT NULL,
    archived_at  timestamptz NOT NULL,
    -- The key's UTF-8. Null: none.
    key          bytea,
    tags         text[],
    -- A JSON object of strings, without the tags. Null: none.
    headers      text,
    body         bytea NOT NULL
) PARTITION BY RANGE (archived_at);
-- Reads go along it: batches are in the order of every key. One batch is of one partition, so its entries are one.
CREATE INDEX record_read ON mqlayer_archive.record (topic_id, batch, partition_id);
-- A time and a position: both rise with the rows, so this costs the archiver nothing. The messages of a key and one
-- identity have an index per day, by day_index_v1.
CREATE INDEX record_ranges ON mqlayer_archive.record USING brin (published_at, log_offset)
    WITH (pages_per_range = 32, autosummarize = on);
-- Large bodies of records.
CREATE INDEX record_body ON mqlayer_archive.record (mqlayer.body_named_v1(headers)) WHERE headers LIKE '%"mq-body":%';

-- Which of these large bodies a parked, dead or archived message names. In one statement: a message that moves between
-- the three is seen in one of them.
CREATE FUNCTION mqlayer.bodies_named_v1(p_ids text[]) RETURNS SETOF text
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF (coalesce(cardinality(p_ids), -1) BETWEEN 0 AND 10000) IS NOT TRUE THEN
        RAISE EXCEPTION 'too many ids, or none' USING ERRCODE = 'MQ009', HINT = 'give an array of at most 10,000';
    END IF;
    RETURN QUERY SELECT n.id FROM unnest(p_ids) AS n (id)
    WHERE EXISTS (SELECT FROM mqlayer.parked_message p WHERE position(decode('226d712d626f6479223a', 'hex') IN p.m) > 0
                  AND mqlayer.body_named_v1(encode(p.m, 'escape')) = n.id)
       OR EXISTS (SELECT FROM mqlayer.dead_message d WHERE d.body IS NOT NULL
                  AND position(decode('226d712d626f6479223a', 'hex') IN d.m) > 0
                  AND mqlayer.body_named_v1(encode(d.m, 'escape')) = n.id)
       OR EXISTS (SELECT FROM mqlayer_archive.record r
                  WHERE r.headers LIKE '%"mq-body":%' AND mqlayer.body_named_v1(r.headers) = n.id);
END $$;

-- Outcomes of records, per group: one row for a stretch of offsets of a partition that has all of it in common. A
-- record that a group handled again after a seek has a row for each time.
CREATE TABLE mqlayer_archive.outcome (
    topic_id     int NOT NULL,
    batch        bigint NOT NULL,
    group_id     bigint NOT NULL,
    partition_id int NOT NULL,
    first_offset bigint NOT NULL,
    last_offset  bigint NOT NULL,
    -- handled. unmatched: not wanted by the group's tag filter. parked: waits in Postgres since. redriven: given back
    -- to the group. replayed: given to it by a replay or backfill of the archive. Or how it died: exhausted, rejected,
    -- skipped, discarded. dropped, expired: see retention_loss.
    outcome         text NOT NULL,
    -- Begun attempts, the last one included.
    attempts     int NOT NULL,
    -- When the member that settled it was first given it. Null: never handled.
    delivered_at timestamptz,
    settled_at   timestamptz NOT NULL,
    -- A member, a receiver or an operator.
    actor        text NOT NULL,
    -- Of dead messages: the words of the handler or the operator, or the last error.
    reason       text,
    archived_at  timestamptz NOT NULL,
    -- The order of outcomes of one offset. An act in Postgres has the last epoch that was given out by then, a
    -- settlement on a node the epoch in force there. A message that comes again on a node after an act has a higher
    -- epoch: of the seek, or of the arming, that brought it back. Clocks do not tell this: a node's and the database's
    -- are two.
    epoch        bigint NOT NULL,
    -- Within an epoch. Acts come after settlements.
    position        bigint NOT NULL,
    CONSTRAINT outcome_range CHECK (first_offset <= last_offset),
    CONSTRAINT outcome_known CHECK (outcome IN
        ('handled', 'unmatched', 'parked', 'exhausted', 'rejected', 'skipped', 'discarded', 'redriven', 'replayed',
         'dropped', 'expired'))
) PARTITION BY RANGE (archived_at);
CREATE INDEX outcome_by_offset ON mqlayer_archive.outcome (group_id, partition_id, first_offset);
-- What a stream of the archive reads next, as record_read for records: one topic among many.
CREATE INDEX outcome_by_batch ON mqlayer_archive.outcome (topic_id, batch);

-- Acts of owners and operators on messages that wait in Postgres, or left their group, in the transaction of the act,
-- until an archiver fetches them.
CREATE TABLE mqlayer_archive.outcome_queue (
    -- Rises with the acts on one message: each act holds a lock that the one before held to its commit.
    position        bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     int NOT NULL,
    group_id     bigint NOT NULL,
    partition_id int NOT NULL,
    log_offset   bigint NOT NULL,
    outcome         text NOT NULL,
    attempts     int NOT NULL,
    delivered_at timestamptz,
    settled_at   timestamptz NOT NULL DEFAULT statement_timestamp(),
    actor        text NOT NULL,
    reason       text,
    epoch        bigint NOT NULL DEFAULT coalesce(pg_sequence_last_value('mqlayer.epoch'), 0),
    -- One row that the archive refuses would keep all outcomes behind it out, and the topic from being trimmed.
    CONSTRAINT outcome_queue_known CHECK (outcome IN
        ('handled', 'unmatched', 'parked', 'exhausted', 'rejected', 'skipped', 'discarded', 'redriven', 'replayed',
         'dropped', 'expired')),
    CONSTRAINT outcome_queue_offset CHECK (log_offset BETWEEN 0 AND 9007199254740991),
    CONSTRAINT outcome_queue_attempts CHECK (attempts BETWEEN 0 AND 2000000000),
    CONSTRAINT outcome_queue_texts CHECK (octet_length(actor) <= 4096 AND octet_length(reason) <= 65536),
    CONSTRAINT outcome_queue_delivered_at
        CHECK (delivered_at BETWEEN '1970-01-01 00:00+00' AND '9000-01-01 00:00+00')
);
CREATE INDEX outcome_queue_by_topic ON mqlayer_archive.outcome_queue (topic_id, position);

-- Up to where the entries of a partition and group on its node are in the archive. An entry's place is never given
-- again, so one that is not above it was fetched before, also on a node that fell back.
CREATE TABLE mqlayer_archive.outcome_progress (
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    epoch        bigint NOT NULL,
    position        bigint NOT NULL,
    -- Offsets that the node dropped for lack of an archiver: their outcomes are in no row. And when the last one was
    -- noticed.
    dropped      bigint NOT NULL DEFAULT 0,
    dropped_at   timestamptz,
    CONSTRAINT outcome_progress_key PRIMARY KEY (group_id, partition_id)
) WITH (fillfactor = 50);

-- The contents of each day's table partitions (UTC, of archiving), per topic.
CREATE TABLE mqlayer_archive.day (
    day         date NOT NULL,
    topic_id    int NOT NULL REFERENCES mqlayer.topic,
    first_batch bigint NOT NULL,
    last_batch  bigint NOT NULL,
    records     bigint NOT NULL,
    outcomes    bigint NOT NULL,
    CONSTRAINT day_key PRIMARY KEY (day, topic_id)
);

-- Whether the table partitions of a day are there.
CREATE FUNCTION mqlayer_archive.day_made_v1(p_day date) RETURNS boolean LANGUAGE sql STABLE
    RETURN to_regclass('mqlayer_archive.record_' || to_char(p_day, 'YYYYMMDD')) IS NOT NULL;

-- Make a day's table partitions of records and outcomes, once. They are made apart and attached, not made as
-- partitions: that would wait for all readers of the archive.
CREATE FUNCTION mqlayer_archive.day_make_v1(p_day date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
DECLARE
    v_name text;
    v_from timestamptz := p_day::timestamp AT TIME ZONE 'UTC';
    v_to   timestamptz := (p_day + 1)::timestamp AT TIME ZONE 'UTC';
BEGIN
    IF (p_day BETWEEN date '2000-01-01' AND date '2199-12-31') IS NOT TRUE THEN
        RAISE EXCEPTION 'p_day is %, its bounds are 2000-01-01 and 2199-12-31', coalesce(to_char(p_day, 'YYYY-MM-DD'), 'null')
            USING ERRCODE = 'MQ009', HINT = 'correct the call: nothing makes this value valid';
    END IF;
    IF mqlayer_archive.day_made_v1(p_day) THEN
        RETURN false;
    END IF;
    -- One at a time: two that make the same table would make one of them fail.
    PERFORM pg_advisory_xact_lock(hashtext('mqlayer_archive.day_make_v1'));
    -- Not by name once more: this session knows names as they were before it waited.
    IF EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = 'mqlayer_archive'::regnamespace
                                        AND c.relname = 'record' || to_char(p_day, '_YYYYMMDD')) THEN
        RETURN false;
    END IF;
    FOREACH v_name IN ARRAY ARRAY['record', 'outcome'] LOOP
        EXECUTE format('CREATE TABLE mqlayer_archive.%I (LIKE mqlayer_archive.%I INCLUDING ALL)',
                       v_name || to_char(p_day, '_YYYYMMDD'), v_name);
        EXECUTE format('ALTER TABLE mqlayer_archive.%I ATTACH PARTITION mqlayer_archive.%I FOR VALUES FROM (%L) TO (%L)',
                       v_name, v_name || to_char(p_day, '_YYYYMMDD'), v_from, v_to);
    END LOOP;
    RETURN true;
END $$;

-- Index the records of a day that is over by LP, for those of a key and for one identity: false where that is done, or
-- too early. Kept up while records come, the index would cost the archiver a seventh of its rate.
CREATE FUNCTION mqlayer_archive.day_index_v1(p_day date) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
DECLARE
    v_table text := 'record' || to_char(p_day, '_YYYYMMDD');
BEGIN
    IF (p_day BETWEEN date '2000-01-01' AND date '2199-12-31') IS NOT TRUE THEN
        RAISE EXCEPTION 'p_day is %, its bounds are 2000-01-01 and 2199-12-31', coalesce(to_char(p_day, 'YYYY-MM-DD'), 'null')
            USING ERRCODE = 'MQ009', HINT = 'correct the call: nothing makes this value valid';
    END IF;
    IF p_day >= (now() AT TIME ZONE 'UTC')::date OR NOT mqlayer_archive.day_made_v1(p_day) THEN
        RETURN false;
    END IF;
    -- One at a time, as in day_make_v1.
    PERFORM pg_advisory_xact_lock(hashtext('mqlayer_archive.day_index_v1'));
    IF EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = 'mqlayer_archive'::regnamespace
                                        AND c.relname = v_table || '_of_lp') THEN
        RETURN false;
    END IF;
    EXECUTE format('CREATE INDEX %I ON mqlayer_archive.%I (topic_id, lp, batch, seq)',
                   v_table || '_of_lp', v_table);
    RETURN true;
END $$;

-- Drop a day's table partitions.
CREATE FUNCTION mqlayer_archive.day_drop_v1(p_day date) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
BEGIN
    IF (p_day BETWEEN date '2000-01-01' AND date '2199-12-31') IS NOT TRUE THEN
        RAISE EXCEPTION 'p_day is %, its bounds are 2000-01-01 and 2199-12-31', coalesce(to_char(p_day, 'YYYY-MM-DD'), 'null')
            USING ERRCODE = 'MQ009', HINT = 'correct the call: nothing makes this value valid';
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS mqlayer_archive.%I, mqlayer_archive.%I',
                   'record' || to_char(p_day, '_YYYYMMDD'), 'outcome' || to_char(p_day, '_YYYYMMDD'));
END $$;

-- Keep all others away from the archive's rows until the transaction ends.
CREATE FUNCTION mqlayer_archive.lock_v1() RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
BEGIN
    LOCK TABLE mqlayer_archive.record, mqlayer_archive.outcome IN ACCESS EXCLUSIVE MODE;
END $$;

-- A cut through the archive: per topic the last batch and the route version, per source and LP a stretch of seqs. All
-- of it is committed and never changes. Retention spares it.
CREATE TABLE mqlayer_archive.snapshot (
    snapshot_id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL,
    -- Records published later are left out. Null: all that the archive held.
    upto_at     timestamptz,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT snapshot_name_unique UNIQUE (name),
    CONSTRAINT snapshot_name_form CHECK (name ~ '^[a-z][a-z0-9_.-]{0,62}$')
);

CREATE TABLE mqlayer_archive.snapshot_topic (
    snapshot_id int NOT NULL REFERENCES mqlayer_archive.snapshot ON DELETE CASCADE,
    topic_id    int NOT NULL REFERENCES mqlayer.topic,
    -- Rows of later batches are not of it.
    batch       bigint NOT NULL,
    -- The route version in force. The lineage up to it is in mqlayer.route and mqlayer.partition, which only grow.
    version     int NOT NULL,
    records     bigint NOT NULL,
    -- The cut has all that was archived of the topic up to the batch, in the days that were kept then: a reader need
    -- not look it up for each record. Null: not known.
    whole       boolean,
    CONSTRAINT snapshot_topic_key PRIMARY KEY (snapshot_id, topic_id)
);

CREATE TABLE mqlayer_archive.cut (
    snapshot_id int NOT NULL REFERENCES mqlayer_archive.snapshot ON DELETE CASCADE,
    topic_id    int NOT NULL,
    source      bigint NOT NULL,
    lp          smallint NOT NULL,
    first_seq   bigint NOT NULL,
    last_seq    bigint NOT NULL,
    CONSTRAINT cut_key PRIMARY KEY (snapshot_id, topic_id, source, lp)
);

-- Readers of a snapshot call this first, in the transaction that reads: a dropped snapshot must not look like one
-- without records. From here on no day can be dropped under them. Of days that were dropped since the transaction first
-- looked, it still sees the rows elsewhere, but not the tables.
CREATE FUNCTION mqlayer_archive.snapshot_v1(p_snapshot int) RETURNS int
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
BEGIN
    LOCK TABLE record, outcome IN ACCESS SHARE MODE;
    IF NOT EXISTS (SELECT FROM snapshot s WHERE s.snapshot_id = p_snapshot)
       OR EXISTS (SELECT FROM snapshot_topic p JOIN day d USING (topic_id)
                  WHERE p.snapshot_id = p_snapshot AND d.first_batch <= p.batch
                    AND to_regclass('mqlayer_archive.record_' || to_char(d.day, 'YYYYMMDD')) IS NULL) THEN
        RAISE EXCEPTION 'snapshot % was dropped', p_snapshot
            USING ERRCODE = 'MQ007', HINT = 'create one: mqlayer snapshot create NAME';
    END IF;
    RETURN p_snapshot;
END $$;

-- Readers of a stream ask that no batch they did not read was dropped, nor will be under them, and learn the topic's
-- last batch. Days go one by one, and not always the oldest first: one that a snapshot needs stays before others that
-- are gone. Of days that were dropped since the transaction first looked, it misses only the tables.
CREATE FUNCTION mqlayer_archive.batches_v1(p_topic int, p_after bigint) RETURNS bigint
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
DECLARE
    v_last    bigint;
    v_dropped bigint;
    v_kept    bigint;
BEGIN
    LOCK TABLE record, outcome IN ACCESS SHARE MODE;
    SELECT t.batch, greatest(t.dropped_batch, (
               SELECT max(d.last_batch) FROM day d WHERE d.topic_id = p_topic
               AND to_regclass('mqlayer_archive.record_' || to_char(d.day, 'YYYYMMDD')) IS NULL))
        INTO v_last, v_dropped FROM topic t WHERE t.topic_id = p_topic;
    v_kept := (SELECT min(d.first_batch) FROM day d WHERE d.topic_id = p_topic AND d.last_batch > v_dropped);
    IF p_after < v_last AND (p_after < v_dropped OR p_after + 1 < coalesce(v_kept, v_last + 1)) THEN
        RAISE EXCEPTION 'batches up to % of topic % were dropped from the archive, after % some that were not read',
            greatest(v_dropped, coalesce(v_kept, v_last + 1) - 1), p_topic, p_after
            USING ERRCODE = 'MQ008', HINT = 'begin a new stream, with a new checkpoint';
    END IF;
    RETURN v_last;
END $$;

-- The final outcome of each offset, per group: of a topic, in the batches up to one, or in all.
CREATE FUNCTION mqlayer_archive.final_outcomes_v1(topic text, upto_batch bigint DEFAULT NULL)
RETURNS TABLE (group_name text, partition_id int, log_offset bigint, outcome text, attempts int, delivered_at timestamptz,
               settled_at timestamptz, actor text, reason text)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT DISTINCT ON (g.name, o.partition_id, at.log_offset)
           g.name, o.partition_id, at.log_offset, o.outcome, o.attempts, o.delivered_at, o.settled_at, o.actor, o.reason
    FROM mqlayer.topic t
    JOIN mqlayer_archive.outcome o ON o.topic_id = t.topic_id
    JOIN mqlayer.consumer_group g ON g.group_id = o.group_id
    CROSS JOIN LATERAL generate_series(o.first_offset, o.last_offset) AS at (log_offset)
    WHERE t.name = final_outcomes_v1.topic AND (upto_batch IS NULL OR o.batch <= upto_batch)
    ORDER BY g.name, o.partition_id, at.log_offset, o.epoch DESC, o.position DESC;
END;


-- Rows that a role may see -------------------------------------------------------------------------------------------
-- Rows of a group are for roles that may consume it, and for the processes and people that see to all groups. Each
-- policy calls its functions once per statement. A role that only looks changes nothing, whatever else it was granted.
DO $do$
DECLARE
    v_table text;
    v_reads CONSTANT text := $$(SELECT mqlayer.has_v1('relay', 'work', 'operate', 'consume', 'view', 'analyze'))$$;
    v_writes CONSTANT text := $$(SELECT mqlayer.has_v1('relay', 'work', 'operate', 'consume'))$$;
    v_operates CONSTANT text := $$(SELECT mqlayer.has_v1('operate'))$$;
    v_own CONSTANT text := 'group_id = ANY((SELECT mqlayer.groups_v1())::bigint[])';
    v_fits text;
BEGIN
    FOREACH v_table IN ARRAY ARRAY[
        'mqlayer.member', 'mqlayer.assignment', 'mqlayer.group_start', 'mqlayer.drained', 'mqlayer.parked_key',
        'mqlayer.parked_message', 'mqlayer.parked_total', 'mqlayer.parking_change', 'mqlayer.dead_message',
        'mqlayer.failed_attempt', 'mqlayer.failure_count', 'mqlayer.retention_loss', 'mqlayer.partition_pause',
        'mqlayer.redrive', 'mqlayer.bulk_item', 'mqlayer.breaker',
        'mqlayer_archive.outcome_queue', 'mqlayer_archive.outcome_progress']
    LOOP
        EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', v_table);
        EXECUTE format('CREATE POLICY read ON %s FOR SELECT USING (%s OR %s)', v_table, v_reads, v_own);
        -- Where that is no hot write, a partition is of the group's own topic, and so is the topic of a queued outcome.
        -- The subquery of the right runs once, the one of the topic for each row of a role without it.
        v_fits := v_own || CASE
            WHEN v_table IN ('mqlayer.assignment', 'mqlayer.group_start', 'mqlayer.drained', 'mqlayer.dead_message',
                             'mqlayer.partition_pause', 'mqlayer_archive.outcome_queue') THEN format(
                ' AND EXISTS (SELECT FROM mqlayer.consumer_group g JOIN mqlayer.partition p USING (topic_id)'
                ' WHERE g.group_id = %1$s.group_id AND p.partition_id = %1$s.partition_id%2$s)',
                split_part(v_table, '.', 2),
                CASE v_table WHEN 'mqlayer_archive.outcome_queue' THEN ' AND g.topic_id = outcome_queue.topic_id'
                ELSE '' END)
            ELSE '' END;
        EXECUTE format('CREATE POLICY change ON %s FOR UPDATE USING (%s OR %s) WITH CHECK (%2$s OR %4$s)',
                       v_table, v_writes, v_own, CASE v_table WHEN 'mqlayer.dead_message' THEN v_fits ELSE v_own END);
        EXECUTE format('CREATE POLICY remove ON %s FOR DELETE USING (%s OR %s)', v_table, v_writes, v_own);
        EXECUTE format('CREATE POLICY add ON %s FOR INSERT WITH CHECK (%s OR %s)', v_table, v_writes, v_fits);
    END LOOP;
    -- Each role that may see groups at all knows the settings of each.
    ALTER TABLE mqlayer.consumer_group ENABLE ROW LEVEL SECURITY;
    CREATE POLICY read ON mqlayer.consumer_group FOR SELECT USING (true);
    EXECUTE format('CREATE POLICY add ON mqlayer.consumer_group FOR INSERT WITH CHECK '
                   '(%s OR mqlayer.may_create_group_v1(topic_id, name, broadcast_of))', v_writes);
    EXECUTE format('CREATE POLICY change ON mqlayer.consumer_group FOR UPDATE USING (%s OR %s)', v_writes, v_own);
    CREATE POLICY remove ON mqlayer.consumer_group FOR DELETE USING ((SELECT mqlayer.has_v1('work', 'operate')));
    -- Consumers lock these rows, for which Postgres wants the right to change them; they change none.
    FOREACH v_table IN ARRAY ARRAY['mqlayer.node', 'mqlayer.partition', 'mqlayer_archive.topic'] LOOP
        EXECUTE format('ALTER TABLE %s ENABLE ROW LEVEL SECURITY', v_table);
        EXECUTE format('CREATE POLICY read ON %s FOR SELECT USING (true)', v_table);
        EXECUTE format('CREATE POLICY hold ON %s FOR UPDATE USING (true) WITH CHECK (%s)', v_table,
                       $$(SELECT mqlayer.has_v1('relay', 'work', 'operate'))$$);
        -- The job auto_routes plans changes, which make partitions.
        EXECUTE format('CREATE POLICY add ON %s FOR INSERT WITH CHECK (%s)', v_table,
                       CASE v_table WHEN 'mqlayer.partition' THEN $$(SELECT mqlayer.has_v1('work', 'operate'))$$ ELSE v_operates END);
        EXECUTE format('CREATE POLICY remove ON %s FOR DELETE USING (%s)', v_table, v_operates);
    END LOOP;
END $do$;

ALTER TABLE mqlayer.source ENABLE ROW LEVEL SECURITY;
CREATE POLICY read ON mqlayer.source FOR SELECT USING (true);
CREATE POLICY add ON mqlayer.source FOR INSERT
    WITH CHECK ((SELECT mqlayer.has_v1('relay', 'work', 'operate')) OR kind = 'direct' AND opened_by = (SELECT mqlayer.caller_v1()));
CREATE POLICY change ON mqlayer.source FOR UPDATE
    USING ((SELECT mqlayer.has_v1('relay', 'work', 'operate')) OR kind = 'direct' AND opened_by = (SELECT mqlayer.caller_v1()));


-- Privileges ---------------------------------------------------------------------------------------------------------
-- Every role may execute a new function until this is said; default privileges of a schema can't take it away. Each
-- later migration that makes a function says it again.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer, mqlayer_archive FROM PUBLIC;
