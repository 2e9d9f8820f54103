-- The application schema `mqlayer_app`, in this order:
--
--   rights of roles · bounds of arguments · identity of the outbox · topics and the outbox · relaying · publishing
--   dedup ids · delayed messages · large bodies · changes of the outbox · fence · inbox · versions · privileges
--
-- ARCHITECTURE.md says who writes each table. sql/schema.sql shows all of them at a glance. Applications get EXECUTE on
-- functions, and no privilege on a table. What these functions promise, whatever the caller and the session do:
--
-- 1. They look names up in pg_temp last (sql/owner/paths.sql). One whose body Postgres parses when it is made, and that
--    sets no path, needs none, and Postgres inlines it.
-- 2. Every argument has bounds. One out of them is refused as MQ009.
-- 3. Those that publish, release or fence commit synchronously, whatever the session, its role or the database says: a
--    commit that is lost after it was relayed, or after its effect was settled, is lost for good. They set it within,
--    for the transaction: a SET clause of a function ends with the function, before the commit. "local", "remote_write"
--    and the like stay: the commit is on this server's disk then.
-- 4. Those for effects end the transaction of a stopped process after 60 idle seconds at the latest: it must not keep
--    others waiting for ever.
-- 5. Each one that a role may call with a limited right begins with its check.
--
-- Texts and byte strings that a right may write to a table have bounds, far above real values.

CREATE SCHEMA IF NOT EXISTS mqlayer_app;
REVOKE ALL ON SCHEMA mqlayer_app FROM PUBLIC;


-- Rights of roles ----------------------------------------------------------------------------------------------------
-- As in the control schema, which may be in another database.

-- Rights that roles have. The owner of this schema and superusers need no row.
CREATE TABLE mqlayer_app.granted (
    role      regrole NOT NULL,
    privilege text NOT NULL,
    -- A topic, or TOPIC/GROUP. Empty: all.
    scope     text NOT NULL DEFAULT '',
    CONSTRAINT granted_key PRIMARY KEY (role, privilege, scope),
    CONSTRAINT granted_privilege CHECK (privilege IN ('publish', 'consume', 'relay', 'work', 'view', 'analyze', 'operate'))
);

-- The role that calls: the one that was set, else the one that logged in. Within functions that run as their owner
-- current_user is another role.
CREATE FUNCTION mqlayer_app.caller_v1() RETURNS name LANGUAGE sql STABLE
    RETURN coalesce(nullif(current_setting('role')::name, 'none'), session_user);

-- Whether the caller has one of these rights without limits, by a grant to it or to a role that it is a member of.
CREATE FUNCTION mqlayer_app.has_v1(VARIADIC p_privileges text[]) RETURNS boolean
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := mqlayer_app.caller_v1();
BEGIN
    RETURN pg_has_role(v_caller, current_user, 'USAGE') OR EXISTS (
        SELECT FROM mqlayer_app.granted g
        WHERE g.privilege = ANY(p_privileges) AND g.scope = '' AND pg_has_role(v_caller, g.role, 'USAGE'));
END $$;

-- Whether the caller has a right for a topic, or for TOPIC/GROUP. For an empty scope: without limits.
CREATE FUNCTION mqlayer_app.has_for_v1(p_privilege text, p_scope text) RETURNS boolean
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := mqlayer_app.caller_v1();
BEGIN
    RETURN pg_has_role(v_caller, current_user, 'USAGE') OR EXISTS (
        SELECT FROM mqlayer_app.granted g
        WHERE g.privilege = p_privilege AND g.scope IN ('', p_scope) AND pg_has_role(v_caller, g.role, 'USAGE'));
END $$;

-- A role with USAGE of these sequences may publish to all topics, and consume for all groups. No number is ever drawn:
-- Postgres answers for a privilege on an object of its own within an expression and from its cache, without a look into
-- a table. USAGE, not SELECT: the latter comes with pg_read_all_data, and with grants to backups and monitoring.
CREATE SEQUENCE mqlayer_app.publish_any;
CREATE SEQUENCE mqlayer_app.consume_any;

CREATE FUNCTION mqlayer_app.may_publish_all_v1() RETURNS boolean LANGUAGE sql STABLE
    RETURN has_sequence_privilege(mqlayer_app.caller_v1(), 'mqlayer_app.publish_any'::regclass, 'USAGE');

CREATE FUNCTION mqlayer_app.may_consume_all_v1() RETURNS boolean LANGUAGE sql STABLE
    RETURN has_sequence_privilege(mqlayer_app.caller_v1(), 'mqlayer_app.consume_any'::regclass, 'USAGE');

-- Refuse a caller who may not publish to a topic.
CREATE FUNCTION mqlayer_app.check_topic_v1(p_topic text) RETURNS void
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := mqlayer_app.caller_v1();
BEGIN
    IF NOT mqlayer_app.has_for_v1('publish', p_topic) THEN
        RAISE EXCEPTION 'role "%" lacks the right to publish %', v_caller, left(p_topic, 63)
            USING ERRCODE = 'insufficient_privilege',
                  HINT = format('mqlayer grant publish %s --topic %s', v_caller, left(p_topic, 63));
    END IF;
END $$;

-- Groups by id, as TOPIC/GROUP. An instance of a broadcast group counts as its group. Relays bring them from the
-- control schema, whose trigger does so at once where both are in one database.
CREATE TABLE mqlayer_app.known_group (
    group_id bigint NOT NULL,
    scope    text NOT NULL,
    CONSTRAINT known_group_key PRIMARY KEY (group_id),
    CONSTRAINT known_group_scope_length CHECK (octet_length(scope) <= 1024)
);

-- Groups that were there before this schema came to the same database.
DO $do$
BEGIN
    IF to_regclass('mqlayer.consumer_group') IS NOT NULL THEN
        INSERT INTO mqlayer_app.known_group (group_id, scope)
        SELECT g.group_id, t.name || '/' || coalesce(b.name, g.name) FROM mqlayer.consumer_group g
        JOIN mqlayer.topic t ON t.topic_id = g.topic_id
        LEFT JOIN mqlayer.consumer_group b ON b.group_id = g.broadcast_of;
    END IF;
END $do$;

-- Refuse a caller who may not consume for a group.
CREATE FUNCTION mqlayer_app.check_group_v1(p_group_id bigint) RETURNS void
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := mqlayer_app.caller_v1();
    v_scope text := (SELECT k.scope FROM mqlayer_app.known_group k WHERE k.group_id = p_group_id);
BEGIN
    IF v_scope IS NULL OR NOT mqlayer_app.has_for_v1('consume', v_scope) THEN
        RAISE EXCEPTION 'role "%" lacks the right to consume %', v_caller, coalesce(v_scope, 'group ' || p_group_id)
            USING ERRCODE = 'insufficient_privilege', HINT = CASE WHEN v_scope IS NULL
                THEN 'a relay has to bring this group''s name here from the control database: start one, and try again'
                ELSE format('mqlayer grant consume %s --group %s', v_caller, v_scope) END;
    END IF;
END $$;

-- The user of each name of versions, of the roles that may consume some groups only: the first one, until the row is
-- deleted.
CREATE TABLE mqlayer_app.version_user (
    name text NOT NULL,
    role regrole NOT NULL,
    CONSTRAINT version_user_key PRIMARY KEY (name)
);

-- Refuse a caller whose groups have nothing to do with a name of versions. A name in use without a row here belongs to
-- roles that may consume all groups, which make no row: a role with single groups can't take it from them.
CREATE FUNCTION mqlayer_app.check_versions_v1(p_name text) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := mqlayer_app.caller_v1();
BEGIN
    INSERT INTO mqlayer_app.version_user AS u (name, role)
        SELECT p_name, g.role FROM mqlayer_app.granted g
        WHERE g.privilege = 'consume' AND pg_has_role(v_caller, g.role, 'USAGE')
          AND NOT EXISTS (SELECT FROM mqlayer_app.version_user v WHERE v.name = p_name)
          AND NOT EXISTS (SELECT FROM mqlayer_app.entity_version e WHERE e.name = p_name)
        ORDER BY g.role LIMIT 1
        ON CONFLICT (name) DO NOTHING;
    IF NOT coalesce((SELECT pg_has_role(v_caller, u.role, 'USAGE') FROM mqlayer_app.version_user u WHERE u.name = p_name), false)
    THEN
        RAISE EXCEPTION 'role "%" lacks the right to the versions %, which another role uses', v_caller, p_name
            USING ERRCODE = 'insufficient_privilege', HINT = format('mqlayer grant consume %s', v_caller);
    END IF;
END $$;


-- Bounds of arguments ------------------------------------------------------------------------------------------------

-- Raise MQ009 for a value outside of its bounds. Null is outside. Functions call it only once they found such a value.
CREATE FUNCTION mqlayer_app.within_v1(p_name text, p_value numeric, p_low numeric, p_high numeric) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF (p_value BETWEEN p_low AND p_high) IS NOT TRUE THEN
        RAISE EXCEPTION '% is %, its bounds are % and %', p_name, left(coalesce(p_value::text, 'null'), 40), p_low, p_high
            USING ERRCODE = 'MQ009', HINT = 'correct the call: nothing makes this value valid';
    END IF;
END $$;


-- Identity of the outbox ---------------------------------------------------------------------------------------------

-- The timeline of this server: another one begins with each promotion and with each recovery to a point in time. 0
-- where a managed Postgres does not tell it.
CREATE FUNCTION mqlayer_app.timeline_v1() RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    RETURN ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int;
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN 0;
END $$;

-- The identity of this outbox. The first relay makes it at its start, so that a database cloned before has its own.
CREATE TABLE mqlayer_app.identity (
    only_one    boolean NOT NULL DEFAULT true,
    outbox_uuid uuid NOT NULL DEFAULT gen_random_uuid(),
    -- The timeline of its Postgres on which relays work on the outbox. Null before a relay noted it, -1 where commits
    -- are known to be missing.
    timeline    int DEFAULT mqlayer_app.timeline_v1(),
    -- The outboxes that this one goes on in place of: all that it ever was, so that each source of theirs that is still
    -- live is ended. A copy that got an identity of its own ends none: they are its original's.
    replaces    uuid[],
    CONSTRAINT identity_key PRIMARY KEY (only_one),
    CONSTRAINT identity_only_one CHECK (only_one)
);

-- Whether an outbox with this timeline in its identity may be worked on: no commits are known to be missing, and the
-- server is on that timeline, as far as both are known.
CREATE FUNCTION mqlayer_app.timeline_holds_v1(p_timeline int) RETURNS boolean LANGUAGE sql
    RETURN p_timeline IS NULL OR p_timeline = 0 OR p_timeline <> -1 AND mqlayer_app.timeline_v1() IN (p_timeline, 0);

-- The term of this Postgres in which relays read the outbox: from a start of the server, or its recovery from a crash,
-- to the end of that. A crash empties the table, since it is unlogged, and may take commits back. A copy of the disk
-- that is put back may have kept the row, but not the time at which the server started.
CREATE UNLOGGED TABLE mqlayer_app.term (
    only_one  boolean NOT NULL DEFAULT true,
    term_uuid uuid NOT NULL DEFAULT gen_random_uuid(),
    CONSTRAINT term_key PRIMARY KEY (only_one),
    CONSTRAINT term_only_one CHECK (only_one)
);

-- The term now. The first call in it makes it.
CREATE FUNCTION mqlayer_app.term_v1() RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_uuid uuid;
BEGIN
    SELECT t.term_uuid INTO v_uuid FROM mqlayer_app.term t;
    IF NOT FOUND THEN
        INSERT INTO mqlayer_app.term DEFAULT VALUES ON CONFLICT (only_one) DO NOTHING;
        SELECT t.term_uuid INTO STRICT v_uuid FROM mqlayer_app.term t;
    END IF;
    RETURN v_uuid::text || '/' || extract(epoch FROM pg_postmaster_start_time())::text;
END $$;


-- Topics and the outbox ----------------------------------------------------------------------------------------------

-- The row of a deleted topic stays, under the name NAME@ID: a relay that still takes the topic for a living one can't
-- attach it again, with counters that begin at 0. What writes for a topic without its counters locks this row.
CREATE TABLE mqlayer_app.topic (
    topic_id   int NOT NULL,
    name       text NOT NULL,
    body_limit int NOT NULL,
    deleted_at timestamptz,
    CONSTRAINT topic_key PRIMARY KEY (topic_id),
    CONSTRAINT topic_name_unique UNIQUE (name),
    CONSTRAINT topic_name_length CHECK (octet_length(name) <= CASE WHEN deleted_at IS NULL THEN 63 ELSE 80 END)
);

-- The last seq given out per LP. The row lock is held to commit and released after the commit is visible, so seq order
-- is commit order and a visible seq implies all lower ones. Only publishing updates it. Name and limit are the topic's,
-- repeated so that publishing finds all it needs by one index. It has no foreign key and no CHECK: every UPDATE would pay
-- for them again, also for those of columns that it leaves alone. So the bound of the name is in its type.
CREATE TABLE mqlayer_app.counter (
    topic_id   int NOT NULL,
    lp         smallint NOT NULL,
    topic      varchar(63) NOT NULL,
    body_limit int NOT NULL,
    seq        bigint NOT NULL DEFAULT 0,
    CONSTRAINT counter_key PRIMARY KEY (topic_id, lp),
    CONSTRAINT counter_topic_unique UNIQUE (topic, lp)
) WITH (fillfactor = 20);

CREATE SEQUENCE mqlayer_app.outbox_number;

-- Append-only. Four slots of time in a ring. A slot is emptied as a whole once all of it is relayed.
-- id is a hint for scanning. The order is (topic_id, lp, seq).
CREATE TABLE mqlayer_app.outbox (
    id         bigint NOT NULL,
    topic_id   int NOT NULL,
    lp         smallint NOT NULL,
    slot       smallint NOT NULL,
    seq        bigint NOT NULL,
    created_at timestamptz NOT NULL,
    key        text,
    headers    text,
    body       bytea NOT NULL
) PARTITION BY LIST (slot);
CREATE TABLE mqlayer_app.outbox_0 PARTITION OF mqlayer_app.outbox FOR VALUES IN (0);
CREATE TABLE mqlayer_app.outbox_1 PARTITION OF mqlayer_app.outbox FOR VALUES IN (1);
CREATE TABLE mqlayer_app.outbox_2 PARTITION OF mqlayer_app.outbox FOR VALUES IN (2);
CREATE TABLE mqlayer_app.outbox_3 PARTITION OF mqlayer_app.outbox FOR VALUES IN (3);
CREATE UNIQUE INDEX outbox_0_key ON mqlayer_app.outbox_0 (topic_id, lp, seq);
CREATE UNIQUE INDEX outbox_1_key ON mqlayer_app.outbox_1 (topic_id, lp, seq);
CREATE UNIQUE INDEX outbox_2_key ON mqlayer_app.outbox_2 (topic_id, lp, seq);
CREATE UNIQUE INDEX outbox_3_key ON mqlayer_app.outbox_3 (topic_id, lp, seq);
CREATE INDEX outbox_id ON mqlayer_app.outbox (id);

-- Rows as relays want them: facts as they stand in a record, and no body over the hard limit, so that no reader needs
-- memory for it.
CREATE VIEW mqlayer_app.outbox_message AS
SELECT id, topic_id, lp, seq, key, octet_length(body) AS size,
       CASE WHEN headers IS NULL THEN (date_part('epoch', created_at) * 1000)::bigint::text
            ELSE (date_part('epoch', created_at) * 1000)::bigint::text || ':' || headers END AS facts,
       CASE WHEN octet_length(body) <= 1000000 THEN body END AS body
FROM mqlayer_app.outbox;


-- Relaying -----------------------------------------------------------------------------------------------------------

-- How far each LP is in Redis, durably. A hint for relays (the truth is the mark), the proof for rotation.
CREATE TABLE mqlayer_app.relayed (
    topic_id int NOT NULL,
    lp       smallint NOT NULL,
    seq      bigint NOT NULL,
    CONSTRAINT relayed_key PRIMARY KEY (topic_id, lp)
) WITH (fillfactor = 50);

-- Rows that can never be sent. Each holds its LP, visibly, until an operator retries it.
CREATE TABLE mqlayer_app.quarantined (
    topic_id     int NOT NULL,
    lp           smallint NOT NULL,
    seq          bigint NOT NULL,
    reason       text NOT NULL,
    quarantined_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT quarantined_key PRIMARY KEY (topic_id, lp),
    CONSTRAINT quarantined_reason_length CHECK (octet_length(reason) <= 65536)
);

-- Rows of best_effort topics that can never be sent. A void record has taken the place of each in its partition, so
-- that its LP goes on. The row itself is kept here for an operator, who has it published anew, at the end, or discards
-- it. Its name is its number in the outbox, which an adopted outbox keeps. The operator's decision stays, without the
-- message: a node that falls back has relays come to the row again.
CREATE TABLE mqlayer_app.voided (
    id         bigint NOT NULL,
    topic_id   int NOT NULL,
    lp         smallint NOT NULL,
    seq        bigint NOT NULL,
    reason     text NOT NULL,
    created_at timestamptz NOT NULL,
    key        text,
    headers    text,
    body       bytea,
    voided_at  timestamptz NOT NULL DEFAULT now(),
    ended      text,
    ended_at   timestamptz,
    CONSTRAINT voided_key PRIMARY KEY (id),
    CONSTRAINT voided_ended CHECK (ended IN ('published', 'discarded')),
    CONSTRAINT voided_keeps_its_message CHECK ((ended IS NULL) = (body IS NOT NULL) AND (ended IS NULL) = (ended_at IS NULL)),
    CONSTRAINT voided_sizes CHECK (
        octet_length(key) <= 65536 AND octet_length(headers) <= 1000000 AND octet_length(body) <= 16777216
        AND octet_length(reason) <= 65536)
);

CREATE SEQUENCE mqlayer_app.relay_epoch;

CREATE TABLE mqlayer_app.relay (
    relay_id    text NOT NULL,
    lease_until timestamptz NOT NULL,
    -- When it last noted messages of its own in Redis.
    sent_at     timestamptz,
    -- Of its code: the release, and the protocol versions that it knows. acts_on: the one that it last read as in force.
    version     text NOT NULL DEFAULT '',
    least       int NOT NULL DEFAULT 1,
    most        int NOT NULL DEFAULT 1,
    acts_on     int NOT NULL DEFAULT 1,
    CONSTRAINT relay_key PRIMARY KEY (relay_id),
    CONSTRAINT relay_id_length CHECK (octet_length(relay_id) <= 1024),
    CONSTRAINT relay_version CHECK (octet_length(version) <= 64 AND least BETWEEN 1 AND 1000000 AND most BETWEEN 1 AND 1000000
                                    AND acts_on BETWEEN 0 AND 1000000)
);

-- Which code may work on this schema: as mqlayer.protocol, for relays; the other processes are in the control schema,
-- which is finalized first. docs/design/upgrades.md.
CREATE TABLE mqlayer_app.protocol (
    only_one     boolean NOT NULL DEFAULT true,
    serves_from  int NOT NULL,
    in_force     int NOT NULL,
    serves_to    int NOT NULL,
    expanded_at  timestamptz NOT NULL DEFAULT now(),
    finalized_at timestamptz,
    CONSTRAINT protocol_key PRIMARY KEY (only_one),
    CONSTRAINT protocol_only_one CHECK (only_one),
    CONSTRAINT protocol_versions CHECK (in_force >= 0 AND serves_from BETWEEN in_force AND in_force + 1
                                        AND serves_to BETWEEN serves_from AND 1000000)
);
INSERT INTO mqlayer_app.protocol (serves_from, in_force, serves_to) VALUES (0, 0, 0);

-- A relay that comes, or comes back after its lease ran out, is refused if its code is too old. A living one learns it
-- from the answer to its beat, and drains.
CREATE FUNCTION mqlayer_app.relay_admit_v1() RETURNS trigger
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_protocol mqlayer_app.protocol;
BEGIN
    IF EXISTS (SELECT FROM mqlayer_app.relay r WHERE r.relay_id = NEW.relay_id AND r.lease_until >= now()) THEN
        RETURN NEW;
    END IF;
    SELECT * INTO v_protocol FROM mqlayer_app.protocol FOR SHARE;
    IF NEW.most < v_protocol.serves_from OR NEW.least > v_protocol.in_force THEN
        RAISE EXCEPTION 'this code has protocol % to %, the application schema serves % to %', NEW.least, NEW.most,
                        v_protocol.serves_from, v_protocol.serves_to
            USING ERRCODE = 'MQ012', HINT = CASE WHEN NEW.most < v_protocol.serves_from
                THEN 'upgrade mqlayer on this machine'
                ELSE 'run `mqlayer upgrade finalize` of the release between' END;
    END IF;
    NEW.acts_on := v_protocol.in_force;
    RETURN NEW;
END $$;

CREATE TRIGGER relay_admitted BEFORE INSERT ON mqlayer_app.relay FOR EACH ROW EXECUTE FUNCTION mqlayer_app.relay_admit_v1();

-- As mqlayer.protocol_finalize_v1, and after it.
CREATE FUNCTION mqlayer_app.protocol_finalize_v1(p_version int, p_drain boolean) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_protocol mqlayer_app.protocol;
BEGIN
    IF NOT mqlayer_app.has_v1('work', 'operate') THEN
        RAISE EXCEPTION 'role "%" lacks the right to finalize', mqlayer_app.caller_v1()
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant operate ' || mqlayer_app.caller_v1();
    END IF;
    SELECT * INTO v_protocol FROM mqlayer_app.protocol FOR UPDATE;
    IF v_protocol.in_force >= p_version THEN
        RETURN 'finalized';
    END IF;
    IF p_version <> v_protocol.in_force + 1 OR p_version > v_protocol.serves_to THEN
        RAISE EXCEPTION 'protocol % can''t follow %, the schema serves up to %', p_version, v_protocol.in_force,
                        v_protocol.serves_to USING ERRCODE = 'MQ009', HINT = 'run `mqlayer migrate` first';
    END IF;
    DELETE FROM mqlayer_app.relay WHERE lease_until < now();
    IF EXISTS (SELECT FROM mqlayer_app.relay WHERE most < p_version) THEN
        IF NOT p_drain THEN
            RETURN 'blocked';
        END IF;
        UPDATE mqlayer_app.protocol SET serves_from = p_version;
        RETURN 'draining';
    END IF;
    UPDATE mqlayer_app.protocol SET serves_from = p_version, in_force = p_version, finalized_at = now();
    RETURN 'finalized';
END $$;

CREATE FUNCTION mqlayer_app.protocol_reopen_v1() RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF NOT mqlayer_app.has_v1('operate') THEN
        RAISE EXCEPTION 'role "%" lacks the right to operate', mqlayer_app.caller_v1()
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant operate ' || mqlayer_app.caller_v1();
    END IF;
    UPDATE mqlayer_app.protocol SET serves_from = in_force WHERE serves_from > in_force;
    RETURN FOUND;
END $$;

-- Sixteen sets of 64 LPs, each with the relay that works on it. For sharing the work only: the chain keeps the order.
CREATE TABLE mqlayer_app.lp_set (
    lp_set      smallint NOT NULL,
    relay_id    text,
    epoch       bigint NOT NULL DEFAULT 0,
    lease_until timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT lp_set_key PRIMARY KEY (lp_set),
    CONSTRAINT lp_set_range CHECK (lp_set BETWEEN 0 AND 15),
    CONSTRAINT lp_set_relay_id_length CHECK (octet_length(relay_id) <= 1024)
);
INSERT INTO mqlayer_app.lp_set (lp_set) SELECT generate_series(0, 15);

-- Empty one slot of the outbox if every row in it is relayed. The lock proves that no open transaction wrote to the
-- slot: such a one would hold it. So NOWAIT answers 'busy' and nothing waits behind us. The slot before the current one
-- is left alone too: its rows are so young that a Redis with a lazier fsync than "always" may lose them. Nothing is
-- emptied before an outbox that may lack commits is recovered: until then no relay notes the losses of nodes.
CREATE FUNCTION mqlayer_app.outbox_rotate_v1(p_slot smallint) RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_table text := format('mqlayer_app.outbox_%s', p_slot);
    v_slots bigint := floor(date_part('epoch', clock_timestamp()) / 900);
    v_waits boolean;
    v_holds boolean;
BEGIN
    IF (p_slot BETWEEN 0 AND 3) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_slot', p_slot, 0, 3);
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- A snapshot from before the lock would miss rows that were committed in between, and they would be lost.
        RAISE EXCEPTION 'rotation needs READ COMMITTED, not %', current_setting('transaction_isolation')
            USING ERRCODE = 'MQ005', HINT = 'SET TRANSACTION ISOLATION LEVEL READ COMMITTED first';
    ELSIF p_slot IN (v_slots % 4, (v_slots - 1) % 4) THEN
        RETURN 'current';
    END IF;
    BEGIN
        EXECUTE format('LOCK TABLE %s IN ACCESS EXCLUSIVE MODE NOWAIT', v_table);
    EXCEPTION WHEN lock_not_available THEN
        RETURN 'busy';
    END;
    IF EXISTS (SELECT FROM mqlayer_app.identity i WHERE NOT mqlayer_app.timeline_holds_v1(i.timeline)) THEN
        RETURN 'waiting';
    END IF;
    EXECUTE format(
        'SELECT EXISTS (SELECT FROM mqlayer_app.counter c
            LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
            CROSS JOIN LATERAL (SELECT o.seq FROM %s o WHERE o.topic_id = c.topic_id AND o.lp = c.lp
                                ORDER BY o.topic_id DESC, o.lp DESC, o.seq DESC LIMIT 1) AS last
            WHERE last.seq > coalesce(r.seq, 0))', v_table) INTO v_waits;
    IF v_waits THEN
        RETURN 'waiting';
    END IF;
    EXECUTE format('SELECT EXISTS (SELECT FROM %s)', v_table) INTO v_holds;
    IF NOT v_holds THEN
        RETURN 'empty';
    END IF;
    EXECUTE format('TRUNCATE %s', v_table);
    RETURN 'emptied';
END $$;


-- Publishing ---------------------------------------------------------------------------------------------------------

-- LP of a key: the first two bytes, big-endian, of the SHA-256 of its UTF-8, mod 1024: the last ten bits of the second
-- to fourth hex digits. STABLE, as convert_to is: declared IMMUTABLE it would not be inlined, and every call would pay.
CREATE FUNCTION mqlayer_app.lp_v1(p_key text) RETURNS smallint LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (('x' || substr(encode(sha256(convert_to(p_key, 'UTF8')), 'hex'), 2, 3))::bit(12)::int & 1023)::smallint;

-- The header for some tags: publish_v1(…, headers || tags_v1('eu', 'vip')). "<hashes>:<names>", both in the order of
-- the names, which are there once each. A hash is the first 8 hex digits of the SHA-256. Tags are one header of a
-- reserved name, so that they go where headers go, and code that knows nothing of them passes them on.
CREATE FUNCTION mqlayer_app.tags_v1(VARIADIC p_tags text[]) RETURNS jsonb
    LANGUAGE plpgsql STABLE SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_text text;
    v_count int;
BEGIN
    IF (cardinality(p_tags) BETWEEN 0 AND 100) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('length of p_tags', cardinality(p_tags), 0, 100);
    END IF;
    IF EXISTS (SELECT FROM unnest(p_tags) AS tag WHERE (tag ~ '^[a-z0-9][a-z0-9_.-]{0,62}$') IS NOT TRUE) THEN
        RAISE EXCEPTION 'bad tag' USING ERRCODE = 'MQ004',
            HINT = 'use a-z or 0-9 first, then a-z 0-9 _ . - up to 63 characters';
    END IF;
    SELECT string_agg(encode(substr(sha256(convert_to(tag, 'UTF8')), 1, 4), 'hex'), '' ORDER BY tag) || ':'
           || string_agg(tag, ',' ORDER BY tag), count(*) INTO v_text, v_count
    FROM (SELECT DISTINCT tag COLLATE "C" AS tag FROM unnest(p_tags) AS tag) AS once;
    IF v_count > 8 THEN
        RAISE EXCEPTION '% tags, at most 8', v_count USING ERRCODE = 'MQ004', HINT = 'filter by fewer names';
    END IF;
    RETURN CASE WHEN v_count = 0 THEN '{}' ELSE jsonb_build_object('mq-tags', v_text) END;
END $$;

-- Refuse headers that a message may not have.
CREATE FUNCTION mqlayer_app.headers_check_v1(p_headers jsonb) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_tags text;
BEGIN
    IF jsonb_typeof(p_headers) <> 'object' THEN
        RAISE EXCEPTION 'headers must be a JSON object of strings' USING ERRCODE = 'MQ004', HINT = '{"name": "value"}';
    ELSIF EXISTS (SELECT FROM jsonb_each(p_headers) WHERE jsonb_typeof(value) <> 'string') THEN
        RAISE EXCEPTION 'header values must be strings' USING ERRCODE = 'MQ004', HINT = '{"name": "value"}';
    END IF;
    IF p_headers ? 'mq-tags' THEN
        v_tags := p_headers ->> 'mq-tags';
        IF v_tags IS DISTINCT FROM mqlayer_app.tags_v1(VARIADIC string_to_array(split_part(v_tags, ':', 2), ',')) ->> 'mq-tags' THEN
            RAISE EXCEPTION 'the header mq-tags is not what tags_v1 makes'
                USING ERRCODE = 'MQ004', HINT = 'headers || mqlayer_app.tags_v1(''eu'', ''vip'')';
        END IF;
        p_headers := p_headers - 'mq-tags';
    END IF;
    IF p_headers ? 'mq-ttl' THEN
        IF p_headers ->> 'mq-ttl' !~ '^[1-9][0-9]{0,12}$' THEN
            RAISE EXCEPTION 'the header mq-ttl is no number of milliseconds'
                USING ERRCODE = 'MQ004', HINT = '{"mq-ttl": "90000"}';
        END IF;
        p_headers := p_headers - 'mq-ttl';
    END IF;
    IF p_headers ? 'mq-body' THEN
        PERFORM mqlayer_app.large_body_use_v1(p_headers ->> 'mq-body');
        p_headers := p_headers - 'mq-body';
    END IF;
    IF (SELECT count(*) > 32 OR sum(octet_length(key) + octet_length(value)) > 8192 FROM jsonb_each_text(p_headers)) THEN
        RAISE EXCEPTION 'at most 32 headers and 8192 bytes of them'
            USING ERRCODE = 'MQ004', HINT = 'put the rest into the body';
    ELSIF EXISTS (SELECT FROM jsonb_object_keys(p_headers) AS name WHERE name LIKE 'mq-%') THEN
        RAISE EXCEPTION 'header names that begin with mq- are reserved' USING ERRCODE = 'MQ004', HINT = 'rename the header';
    END IF;
END $$;

-- Publish one message in the caller's transaction. Returns its seq. See publish_many_v1 for several.
-- All in one function, and the LP computed in place: a nested call, above all of a SQL function that is not inlined,
-- costs as much as the row itself. The counter is locked before the id is drawn, so that within an LP ids and seqs have
-- one order.
CREATE FUNCTION mqlayer_app.publish_v1(p_topic text, p_key text, p_body bytea, p_headers jsonb DEFAULT NULL)
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_hash bytea;
    v_lp smallint;
    v_topic_id int;
    v_limit int;
    v_seq bigint;
    v_at timestamptz;
BEGIN
    -- Rare cases in one condition, and in its branch: each expression is prepared anew in each transaction.
    IF NOT mqlayer_app.may_publish_all_v1() OR current_setting('synchronous_commit') = 'off'
       OR octet_length(p_key) > 512 OR p_headers IS NOT NULL THEN
        IF NOT mqlayer_app.may_publish_all_v1() THEN
            PERFORM mqlayer_app.check_topic_v1(p_topic);
        END IF;
        -- A commit that is lost after it was relayed, or after its effect was settled, is lost for good.
        IF current_setting('synchronous_commit') = 'off' THEN
            PERFORM set_config('synchronous_commit', 'on', true);
        END IF;
        IF octet_length(p_key) > 512 THEN
            RAISE EXCEPTION 'message key of % bytes, the limit is 512', octet_length(p_key)
                USING ERRCODE = 'MQ002', HINT = 'use an id as the key';
        END IF;
        IF p_headers IS NOT NULL THEN
            PERFORM mqlayer_app.headers_check_v1(p_headers);
        END IF;
    END IF;
    IF p_key IS NULL THEN
        v_lp := floor(random() * 1024);
    ELSE
        v_hash := sha256(convert_to(p_key, 'UTF8'));
        v_lp := ((get_byte(v_hash, 0) & 3) << 8 | get_byte(v_hash, 1))::smallint;
    END IF;
    UPDATE mqlayer_app.counter c SET seq = c.seq + 1 WHERE c.topic = p_topic AND c.lp = v_lp
        RETURNING c.seq, c.topic_id, c.body_limit, clock_timestamp() INTO v_seq, v_topic_id, v_limit, v_at;
    IF (octet_length(p_body) <= v_limit) IS NOT TRUE THEN
        IF v_seq IS NULL THEN
            RAISE EXCEPTION 'unknown topic "%"', left(p_topic, 63)
                USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
        ELSIF p_body IS NULL THEN
            RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
        END IF;
        RAISE EXCEPTION 'body of % bytes, topic "%" takes %', octet_length(p_body), p_topic, v_limit
            USING ERRCODE = 'MQ003', HINT = 'switch on large bodies, or store it elsewhere and send a reference';
    END IF;
    INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
        VALUES (nextval('mqlayer_app.outbox_number'), v_topic_id, v_lp,
                floor(date_part('epoch', v_at) / 900)::bigint & 3, v_seq, v_at, p_key, p_headers, p_body);
    RETURN v_seq;
END $$;

-- Publish several messages in the caller's transaction. Returns how many. Messages of one key keep their order in the
-- arrays. LPs are taken in one order, the same in every session, so that two callers can't deadlock. p_headers may be
-- null or hold nulls.
CREATE FUNCTION mqlayer_app.publish_many_v1(p_topics text[], p_keys text[], p_bodies bytea[], p_headers jsonb[] DEFAULT NULL)
    RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    -- Assigned arrays are kept expanded: each access to an element would walk the argument from its start.
    v_keys text[] := p_keys;
    v_bodies bytea[] := p_bodies;
    v_headers jsonb[] := p_headers;
    v_group record;
    v_topic_id int;
    v_limit int;
    v_seq bigint;
    v_at timestamptz;
BEGIN
    IF NOT mqlayer_app.may_publish_all_v1() THEN
        PERFORM mqlayer_app.check_topic_v1(t.name)
        FROM (SELECT DISTINCT u.name FROM unnest(p_topics) AS u(name)) AS t;
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (cardinality(p_topics) BETWEEN 0 AND 10000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('length of p_topics', cardinality(p_topics), 0, 10000);
    END IF;
    IF cardinality(p_keys) <> cardinality(p_topics) OR cardinality(p_bodies) <> cardinality(p_topics)
       OR cardinality(p_headers) <> cardinality(p_topics) THEN
        RAISE EXCEPTION 'arrays of different lengths' USING ERRCODE = 'MQ005', HINT = 'give one element for each message';
    ELSIF array_ndims(p_topics) > 1 OR array_ndims(v_keys) > 1 OR array_ndims(v_bodies) > 1 OR array_ndims(v_headers) > 1
       OR array_lower(p_topics, 1) <> 1 OR array_lower(v_keys, 1) <> 1 OR array_lower(v_bodies, 1) <> 1
       OR array_lower(v_headers, 1) <> 1 THEN
        -- Their elements are counted by unnest and taken by number: the two would speak of different ones.
        RAISE EXCEPTION 'arrays must have one dimension that begins at 1'
            USING ERRCODE = 'MQ005', HINT = 'ARRAY[...] and array_agg make such arrays';
    END IF;
    PERFORM mqlayer_app.headers_check_v1(h) FROM unnest(p_headers) AS h WHERE h IS NOT NULL;
    FOR v_group IN
        SELECT topic, lp, array_agg(n ORDER BY n) AS numbers,
               max(octet_length(key)) AS key_size, max(octet_length(body)) AS body_size, bool_or(body IS NULL) AS no_body
        FROM (SELECT topic, key, body, n, coalesce(mqlayer_app.lp_v1(key), floor(random() * 1024)::smallint) AS lp
              FROM unnest(p_topics, p_keys, p_bodies) WITH ORDINALITY AS u(topic, key, body, n)) AS message
        GROUP BY topic, lp ORDER BY topic COLLATE "C", lp
    LOOP
        IF v_group.key_size > 512 THEN
            RAISE EXCEPTION 'message key of % bytes, the limit is 512', v_group.key_size
                USING ERRCODE = 'MQ002', HINT = 'use an id as the key';
        END IF;
        UPDATE mqlayer_app.counter c SET seq = c.seq + cardinality(v_group.numbers)
            WHERE c.topic = v_group.topic AND c.lp = v_group.lp
            RETURNING c.seq - cardinality(v_group.numbers), c.topic_id, c.body_limit INTO v_seq, v_topic_id, v_limit;
        IF v_seq IS NULL THEN
            RAISE EXCEPTION 'unknown topic "%"', left(v_group.topic, 63)
                USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
        END IF;
        IF v_group.no_body THEN
            RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
        ELSIF v_group.body_size > v_limit THEN
            RAISE EXCEPTION 'body of % bytes, topic "%" takes %', v_group.body_size, v_group.topic, v_limit
                USING ERRCODE = 'MQ003', HINT = 'switch on large bodies, or store it elsewhere and send a reference';
        END IF;
        v_at := clock_timestamp();
        INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
            SELECT nextval('mqlayer_app.outbox_number'), v_topic_id, v_group.lp,
                   floor(date_part('epoch', v_at) / 900)::bigint & 3, v_seq + m.position, v_at, v_keys[m.n], v_headers[m.n], v_bodies[m.n]
            FROM (SELECT n, position FROM unnest(v_group.numbers) WITH ORDINALITY AS u(n, position) ORDER BY position) AS m;
    END LOOP;
    RETURN cardinality(p_topics);
END $$;


-- Dedup ids ----------------------------------------------------------------------------------------------------------
-- A repetition within the window is not published again.

-- Its readers hold the counter row of the LP, so they see the row of every committed publisher, and none is added
-- meanwhile.
CREATE TABLE mqlayer_app.dedup (
    topic_id     int NOT NULL,
    lp           smallint NOT NULL,
    token        bytea NOT NULL,
    seq          bigint NOT NULL,
    published_at timestamptz NOT NULL,
    CONSTRAINT dedup_key PRIMARY KEY (topic_id, lp, token)
);
CREATE INDEX dedup_published_at ON mqlayer_app.dedup (published_at);

-- The token by which ids are compared: it stands for the key too (without one, for the topic), and is as short whatever
-- they are.
CREATE FUNCTION mqlayer_app.dedup_token_v1(p_key text, p_dedup_id text) RETURNS bytea
    LANGUAGE sql STABLE SET search_path = pg_catalog, mqlayer_app, pg_temp
    RETURN substr(sha256(coalesce(convert_to(p_key, 'UTF8'), '\xff'::bytea) || '\xff'::bytea || convert_to(p_dedup_id, 'UTF8')), 1, 16);

-- Write one message of a given LP. Of an id that is known: nothing, and the first one's seq. For the functions below
-- only.
CREATE FUNCTION mqlayer_app.outbox_put_v1(p_topic text, p_lp smallint, p_key text, p_body bytea, p_headers jsonb,
                                          p_dedup_id text, OUT seq bigint, OUT duplicate boolean)
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_topic_id int;
    v_limit int;
    v_token bytea;
    v_at timestamptz;
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_lp BETWEEN 0 AND 1023) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_lp', p_lp, 0, 1023);
    END IF;
    IF octet_length(p_key) > 512 THEN
        RAISE EXCEPTION 'message key of % bytes, the limit is 512', octet_length(p_key)
            USING ERRCODE = 'MQ002', HINT = 'use an id as the key';
    ELSIF p_dedup_id = '' OR octet_length(p_dedup_id) > 128 THEN
        RAISE EXCEPTION 'a dedup id has 1 to 128 bytes' USING ERRCODE = 'MQ005', HINT = 'use a hash of it';
    ELSIF p_body IS NULL THEN
        RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
    END IF;
    IF p_headers IS NOT NULL THEN
        PERFORM mqlayer_app.headers_check_v1(p_headers);
    END IF;
    -- Locked before the id is looked for: the row of a publisher before us is committed by then, and seen.
    SELECT c.topic_id, c.body_limit INTO v_topic_id, v_limit FROM mqlayer_app.counter c
        WHERE c.topic = p_topic AND c.lp = p_lp FOR NO KEY UPDATE;
    IF v_topic_id IS NULL THEN
        RAISE EXCEPTION 'unknown topic "%"', left(p_topic, 63)
            USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
    ELSIF octet_length(p_body) > v_limit THEN
        RAISE EXCEPTION 'body of % bytes, topic "%" takes %', octet_length(p_body), p_topic, v_limit
            USING ERRCODE = 'MQ003', HINT = 'switch on large bodies, or store it elsewhere and send a reference';
    END IF;
    duplicate := false;
    IF p_dedup_id IS NOT NULL THEN
        v_token := mqlayer_app.dedup_token_v1(p_key, p_dedup_id);
        SELECT d.seq INTO seq FROM mqlayer_app.dedup d
            WHERE d.topic_id = v_topic_id AND d.lp = p_lp AND d.token = v_token;
        IF FOUND THEN
            duplicate := true;
            RETURN;
        END IF;
    END IF;
    UPDATE mqlayer_app.counter c SET seq = c.seq + 1 WHERE c.topic_id = v_topic_id AND c.lp = p_lp
        RETURNING c.seq INTO outbox_put_v1.seq;
    v_at := clock_timestamp();
    INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
        VALUES (nextval('mqlayer_app.outbox_number'), v_topic_id, p_lp,
                floor(date_part('epoch', v_at) / 900)::bigint & 3, outbox_put_v1.seq, v_at, p_key, p_headers, p_body);
    IF v_token IS NOT NULL THEN
        INSERT INTO mqlayer_app.dedup (topic_id, lp, token, seq, published_at)
            VALUES (v_topic_id, p_lp, v_token, outbox_put_v1.seq, v_at);
    END IF;
END $$;

-- Publish one message with a dedup id in the caller's transaction. Where its key had one with the id, and that is not
-- forgotten yet, nothing is published, and seq is the first one's. Without a key the id is the topic's, and names the
-- LP.
CREATE FUNCTION mqlayer_app.publish_once_v1(p_topic text, p_key text, p_body bytea, p_dedup_id text,
                                            p_headers jsonb DEFAULT NULL, OUT seq bigint, OUT duplicate boolean)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF NOT mqlayer_app.may_publish_all_v1() THEN
        PERFORM mqlayer_app.check_topic_v1(p_topic);
    END IF;
    IF p_dedup_id IS NULL THEN
        RAISE EXCEPTION 'publish_once_v1 needs a dedup id' USING ERRCODE = 'MQ005', HINT = 'without one: publish_v1';
    END IF;
    SELECT o.seq, o.duplicate INTO publish_once_v1.seq, publish_once_v1.duplicate
    FROM mqlayer_app.outbox_put_v1(p_topic, mqlayer_app.lp_v1(coalesce(p_key, p_dedup_id)), p_key, p_body, p_headers, p_dedup_id) o;
END $$;

-- Publish several messages, those with a dedup id as publish_once_v1 does, in the order and with the locks of
-- publish_many_v1. Returns how many were published.
CREATE FUNCTION mqlayer_app.publish_many_once_v1(p_topics text[], p_keys text[], p_bodies bytea[], p_dedup_ids text[],
                                                 p_headers jsonb[] DEFAULT NULL) RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_one record;
    v_duplicate boolean;
    v_count int := 0;
BEGIN
    IF NOT mqlayer_app.may_publish_all_v1() THEN
        PERFORM mqlayer_app.check_topic_v1(t.name)
        FROM (SELECT DISTINCT u.name FROM unnest(p_topics) AS u(name)) AS t;
    END IF;
    IF (cardinality(p_topics) BETWEEN 0 AND 10000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('length of p_topics', cardinality(p_topics), 0, 10000);
    END IF;
    IF cardinality(p_keys) <> cardinality(p_topics) OR cardinality(p_bodies) <> cardinality(p_topics)
       OR cardinality(p_dedup_ids) <> cardinality(p_topics) OR cardinality(p_headers) <> cardinality(p_topics) THEN
        RAISE EXCEPTION 'arrays of different lengths' USING ERRCODE = 'MQ005', HINT = 'give one element for each message';
    END IF;
    FOR v_one IN
        WITH message AS MATERIALIZED (
            SELECT u.*, coalesce(mqlayer_app.lp_v1(coalesce(key, dedup_id)), floor(random() * 1024)::smallint) AS lp
            FROM unnest(p_topics, p_keys, p_bodies, p_dedup_ids, p_headers)
                 WITH ORDINALITY AS u(topic, key, body, dedup_id, headers, n)
        )
        SELECT * FROM message ORDER BY topic COLLATE "C", lp, n
    LOOP
        SELECT o.duplicate INTO v_duplicate
        FROM mqlayer_app.outbox_put_v1(v_one.topic, v_one.lp, v_one.key, v_one.body, v_one.headers, v_one.dedup_id) o;
        v_count := v_count + (NOT v_duplicate)::int;
    END LOOP;
    RETURN v_count;
END $$;


-- Delayed messages ---------------------------------------------------------------------------------------------------
-- Rows that wait for their time, and then take their place in the outbox.

CREATE TABLE mqlayer_app.delayed (
    delayed_id bigint GENERATED ALWAYS AS IDENTITY,
    topic_id   int NOT NULL,
    lp         smallint NOT NULL,
    due_at     timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    key        text,
    headers    text,
    body       bytea NOT NULL,
    CONSTRAINT delayed_key PRIMARY KEY (delayed_id)
);
CREATE INDEX delayed_topic_due_at ON mqlayer_app.delayed (topic_id, due_at);
-- The order in which an LP's rows are released.
CREATE INDEX delayed_order ON mqlayer_app.delayed (topic_id, lp, due_at, delayed_id);

-- What people may see of messages: all but bodies and headers.
CREATE VIEW mqlayer_app.delayed_fact AS
SELECT delayed_id, topic_id, lp, due_at, created_at, key, octet_length(body) AS body_size FROM mqlayer_app.delayed;

-- When the next message of each topic is due, by one look into the index for each.
CREATE VIEW mqlayer_app.delayed_next AS
WITH RECURSIVE line AS (
    (SELECT d.topic_id, d.due_at FROM mqlayer_app.delayed d ORDER BY d.topic_id, d.due_at LIMIT 1)
    UNION ALL
    SELECT n.topic_id, n.due_at
    FROM line l CROSS JOIN LATERAL (
        SELECT d.topic_id, d.due_at FROM mqlayer_app.delayed d WHERE d.topic_id > l.topic_id
        ORDER BY d.topic_id, d.due_at LIMIT 1) AS n
)
SELECT topic_id, due_at FROM line;

-- Publish a message at a time, by this database's clock, in the caller's transaction. Returns the number by which it
-- can be cancelled. No LP is locked: it takes its place in its key's order when it is released, not now. The topic's row
-- is, so that nothing comes behind the topic's deletion.
CREATE FUNCTION mqlayer_app.publish_at_v1(p_topic text, p_key text, p_body bytea, p_at timestamptz, p_headers jsonb DEFAULT NULL)
    RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_topic_id int;
    v_limit int;
    v_id bigint;
BEGIN
    IF NOT mqlayer_app.may_publish_all_v1() THEN
        PERFORM mqlayer_app.check_topic_v1(p_topic);
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF octet_length(p_key) > 512 THEN
        RAISE EXCEPTION 'message key of % bytes, the limit is 512', octet_length(p_key)
            USING ERRCODE = 'MQ002', HINT = 'use an id as the key';
    ELSIF p_at IS NULL OR NOT isfinite(p_at) THEN
        RAISE EXCEPTION 'a delayed message needs a time' USING ERRCODE = 'MQ005', HINT = 'now() + interval ''1 hour''';
    ELSIF p_at NOT BETWEEN now() - interval '3661 days' AND now() + interval '3661 days' THEN
        RAISE EXCEPTION 'a delayed message is due within ten years'
            USING ERRCODE = 'MQ009', HINT = 'give a time between ten years ago and in ten years';
    ELSIF p_body IS NULL THEN
        RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
    END IF;
    IF p_headers IS NOT NULL THEN
        PERFORM mqlayer_app.headers_check_v1(p_headers);
    END IF;
    SELECT t.topic_id, t.body_limit INTO v_topic_id, v_limit FROM mqlayer_app.topic t WHERE t.name = p_topic FOR KEY SHARE;
    IF v_topic_id IS NULL THEN
        RAISE EXCEPTION 'unknown topic "%"', left(p_topic, 63)
            USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
    ELSIF octet_length(p_body) > v_limit THEN
        RAISE EXCEPTION 'body of % bytes, topic "%" takes %', octet_length(p_body), p_topic, v_limit
            USING ERRCODE = 'MQ003', HINT = 'switch on large bodies, or store it elsewhere and send a reference';
    END IF;
    INSERT INTO mqlayer_app.delayed (topic_id, lp, due_at, key, headers, body)
        VALUES (v_topic_id, coalesce(mqlayer_app.lp_v1(p_key), floor(random() * 1024)::smallint), p_at, p_key, p_headers, p_body)
        RETURNING delayed_id INTO v_id;
    RETURN v_id;
END $$;

-- Cancel a delayed message in the caller's transaction. False where it was released or cancelled before. The right is
-- asked of the very row that is deleted: one that was committed since an earlier look at it would be deleted unasked.
CREATE FUNCTION mqlayer_app.cancel_delayed_v1(p_delayed_id bigint) RETURNS boolean
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_topic_id int;
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_delayed_id BETWEEN 1 AND 9007199254740991) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_delayed_id', p_delayed_id, 1, 9007199254740991);
    END IF;
    DELETE FROM mqlayer_app.delayed WHERE delayed_id = p_delayed_id RETURNING topic_id INTO v_topic_id;
    IF v_topic_id IS NULL THEN
        RETURN false;
    END IF;
    IF NOT mqlayer_app.may_publish_all_v1() THEN
        PERFORM mqlayer_app.check_topic_v1(t.name) FROM mqlayer_app.topic t WHERE t.topic_id = v_topic_id;
    END IF;
    RETURN true;
END $$;

-- Move messages that are due to the outbox, per LP in the order of their times, then of their numbers: one transaction,
-- so each moves once. Under the LP's counter, so that two calls can't part an LP between them. Each topic has its share
-- of a call, and the rest of a share goes to the others: else a transaction that holds counters of its topic, or that
-- has cancelled its first messages, would keep those of all others. An LP whose counter another transaction holds is
-- passed by, since waiting could deadlock; a topic whose first messages wait behind such counters has those of its
-- other LPs moved. Of topics with a message that is overdue by a second in such an LP, each call waits for one, for
-- p_wait_ms at most; chance chooses it, since the one with the oldest message might be busy for ever. Returns how many
-- moved, and in how many seconds the next one is due.
CREATE FUNCTION mqlayer_app.delayed_release_v1(p_limit int, p_wait_ms int, OUT released int, OUT next_s double precision)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_next timestamptz;
    v_topics int[];
    v_topic_id int;
    v_wait_for int;
    v_lps smallint[];
    v_times timestamptz[];
    v_due bigint;
    v_share int;
    v_left int;
    v_all boolean;
    v_row record;
    v_seq bigint;
    v_moved int;
    v_at timestamptz;
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_limit BETWEEN 1 AND 100000
       AND p_wait_ms BETWEEN 0 AND 60000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_limit', p_limit, 1, 100000),
                mqlayer_app.within_v1('p_wait_ms', p_wait_ms, 0, 60000);
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- A snapshot from before the counter was locked would miss releases and cancellations in between.
        RAISE EXCEPTION 'releasing needs READ COMMITTED, not %', current_setting('transaction_isolation')
            USING ERRCODE = 'MQ005', HINT = 'SET TRANSACTION ISOLATION LEVEL READ COMMITTED first';
    END IF;
    released := 0;
    SELECT array_agg(n.topic_id) FILTER (WHERE n.due_at <= v_now), min(n.due_at),
           (array_agg(n.topic_id ORDER BY random()) FILTER (WHERE n.due_at < v_now - interval '1 second' AND p_wait_ms > 0))[1]
    INTO v_topics, v_next, v_wait_for
    FROM mqlayer_app.delayed_next n;
    IF v_topics IS NULL THEN
        next_s := date_part('epoch', v_next - clock_timestamp());
        RETURN;
    END IF;
    IF cardinality(v_topics) > 1 THEN
        -- Those with the least first: the rest of their shares is for those behind.
        v_topics := ARRAY(
            SELECT t.topic_id FROM unnest(v_topics) AS t (topic_id)
            CROSS JOIN LATERAL (
                SELECT count(*) AS messages, min(f.due_at) AS due_at
                FROM (SELECT d.due_at FROM mqlayer_app.delayed d WHERE d.topic_id = t.topic_id AND d.due_at <= v_now
                      ORDER BY d.due_at LIMIT 1 + p_limit / cardinality(v_topics)) AS f) AS found
            ORDER BY found.messages, found.due_at);
    END IF;
    FOR v_place IN 1 .. cardinality(v_topics) LOOP
        EXIT WHEN released >= p_limit;
        v_topic_id := v_topics[v_place];
        v_share := ceil((p_limit - released)::numeric / (cardinality(v_topics) - v_place + 1));
        v_left := v_share;
        SELECT array_agg(g.lp ORDER BY g.due_at), array_agg(g.due_at ORDER BY g.due_at), sum(g.messages)
        INTO v_lps, v_times, v_due
        FROM (SELECT f.lp, min(f.due_at) AS due_at, count(*) AS messages
              FROM (SELECT d.lp, d.due_at FROM mqlayer_app.delayed d
                    WHERE d.topic_id = v_topic_id AND d.due_at <= v_now ORDER BY d.due_at LIMIT v_share) AS f
              GROUP BY f.lp) AS g;
        v_all := coalesce(v_due < v_share, true);
        LOOP
            FOR v_one IN 1 .. coalesce(cardinality(v_lps), 0) LOOP
                EXIT WHEN v_left <= 0;
                SELECT c.seq INTO v_seq FROM mqlayer_app.counter c
                    WHERE c.topic_id = v_topic_id AND c.lp = v_lps[v_one] FOR NO KEY UPDATE SKIP LOCKED;
                IF NOT FOUND AND v_topic_id = v_wait_for AND v_times[v_one] < v_now - interval '1 second' THEN
                    v_wait_for := NULL;
                    PERFORM set_config('lock_timeout', p_wait_ms::text, true);
                    BEGIN
                        SELECT c.seq INTO v_seq FROM mqlayer_app.counter c
                            WHERE c.topic_id = v_topic_id AND c.lp = v_lps[v_one] FOR NO KEY UPDATE;
                    EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                        v_seq := NULL;
                    END;
                END IF;
                CONTINUE WHEN v_seq IS NULL;
                v_at := clock_timestamp();
                v_moved := 0;
                FOR v_row IN
                    SELECT * FROM mqlayer_app.delayed d
                    WHERE d.topic_id = v_topic_id AND d.lp = v_lps[v_one] AND d.due_at <= v_now
                    ORDER BY d.due_at, d.delayed_id LIMIT v_left
                LOOP
                    PERFORM FROM mqlayer_app.delayed d WHERE d.delayed_id = v_row.delayed_id FOR UPDATE SKIP LOCKED;
                    -- Another transaction cancels it and has not committed: those behind wait, in case it rolls back.
                    EXIT WHEN NOT FOUND;
                    DELETE FROM mqlayer_app.delayed d WHERE d.delayed_id = v_row.delayed_id;
                    v_seq := v_seq + 1;
                    INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
                        VALUES (nextval('mqlayer_app.outbox_number'), v_row.topic_id, v_row.lp,
                                floor(date_part('epoch', v_at) / 900)::bigint & 3, v_seq, v_at, v_row.key, v_row.headers, v_row.body);
                    v_moved := v_moved + 1;
                END LOOP;
                CONTINUE WHEN v_moved = 0;
                UPDATE mqlayer_app.counter c SET seq = v_seq WHERE c.topic_id = v_topic_id AND c.lp = v_lps[v_one];
                released := released + v_moved;
                v_left := v_left - v_moved;
            END LOOP;
            EXIT WHEN v_all OR v_left <= 0;
            -- All that was looked at is moved or busy, and there may be more: the LPs behind, by one look for each.
            v_all := true;
            WITH RECURSIVE line AS (
                (SELECT d.lp, d.due_at FROM mqlayer_app.delayed d WHERE d.topic_id = v_topic_id
                 ORDER BY d.lp, d.due_at, d.delayed_id LIMIT 1)
                UNION ALL
                SELECT n.lp, n.due_at
                FROM line l CROSS JOIN LATERAL (
                    SELECT d.lp, d.due_at FROM mqlayer_app.delayed d WHERE d.topic_id = v_topic_id AND d.lp > l.lp
                    ORDER BY d.lp, d.due_at, d.delayed_id LIMIT 1) AS n
            )
            SELECT array_agg(l.lp ORDER BY l.due_at), array_agg(l.due_at ORDER BY l.due_at) INTO v_lps, v_times
            FROM line l WHERE l.due_at <= v_now AND l.lp <> ALL(v_lps);
        END LOOP;
    END LOOP;
    SELECT date_part('epoch', min(n.due_at) - clock_timestamp()) INTO next_s FROM mqlayer_app.delayed_next n;
END $$;


-- Large bodies -------------------------------------------------------------------------------------------------------
-- Bodies over the threshold, outside of messages. A message has the header mq-body: "<body_id>:<size>:<SHA-256>", and
-- an empty body. docs/design/large-bodies.md has the states of a row.

CREATE TABLE mqlayer_app.large_body (
    body_id     uuid NOT NULL,
    topic_id    int NOT NULL,
    -- The bucket of an object in S3, whose key is its location. Null: the chunks are here.
    bucket      text,
    location    text,
    size        bigint NOT NULL,
    sha256      bytea NOT NULL,
    -- Published past the outbox, so that only time tells when nobody will send it any more.
    direct      boolean NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- The last transaction that published it.
    publish_xid xid8 NOT NULL DEFAULT pg_current_xact_id(),
    -- The cut that covers all its messages. Null: not yet.
    cut_id      bigint,
    -- Since when no look found a reference.
    free_since  timestamptz,
    looked_at   timestamptz,
    -- Being removed: no message may name it any more.
    removing    boolean NOT NULL DEFAULT false,
    CONSTRAINT large_body_key PRIMARY KEY (body_id),
    CONSTRAINT large_body_place CHECK ((bucket IS NULL) = (location IS NULL)),
    CONSTRAINT large_body_numbers CHECK (size BETWEEN 0 AND 1000000000 AND octet_length(sha256) = 32),
    CONSTRAINT large_body_texts CHECK (octet_length(bucket) <= 255 AND octet_length(location) <= 1024)
);
-- What a pass of the job asks: bodies without a cut, those of a cut, those that are being removed.
CREATE INDEX large_body_of_cut ON mqlayer_app.large_body (cut_id, looked_at);
CREATE INDEX large_body_removing ON mqlayer_app.large_body (body_id) WHERE removing;

CREATE TABLE mqlayer_app.large_body_chunk (
    body_id uuid NOT NULL REFERENCES mqlayer_app.large_body ON DELETE CASCADE,
    number  int NOT NULL,
    data    bytea NOT NULL,
    CONSTRAINT large_body_chunk_key PRIMARY KEY (body_id, number),
    CONSTRAINT large_body_chunk_size CHECK (octet_length(data) <= 1000000)
);
-- Bodies are compressed already, as a rule: to try again costs more than the write.
ALTER TABLE mqlayer_app.large_body_chunk ALTER COLUMN data SET STORAGE EXTERNAL;

-- A cut through a topic: all messages with these bodies are at or below these seqs (by LP), and, once the outbox has
-- emptied those rows, below these ends of partitions.
CREATE TABLE mqlayer_app.large_body_cut (
    cut_id      bigint GENERATED ALWAYS AS IDENTITY,
    topic_id    int NOT NULL,
    -- Seqs are of this outbox only.
    outbox_uuid uuid,
    seqs        bigint[] NOT NULL,
    made_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- {"<partition>": <next offset>}. Null: rows may still be in the outbox.
    ends        jsonb,
    -- When the last partition had trimmed all below its end.
    trimmed_at  timestamptz,
    CONSTRAINT large_body_cut_key PRIMARY KEY (cut_id),
    CONSTRAINT large_body_cut_size CHECK (octet_length(ends::text) <= 262144)
);

-- The id of the body that headers, or a record's facts, name. Null: none.
CREATE FUNCTION mqlayer_app.body_named_v1(p_headers text) RETURNS text LANGUAGE sql IMMUTABLE PARALLEL SAFE
    RETURN substring(p_headers, '"mq-body": ?"([0-9a-f-]{36}):');

CREATE INDEX delayed_body ON mqlayer_app.delayed (mqlayer_app.body_named_v1(headers)) WHERE headers LIKE '%"mq-body":%';
CREATE INDEX voided_body ON mqlayer_app.voided (mqlayer_app.body_named_v1(headers))
    WHERE ended IS NULL AND headers LIKE '%"mq-body":%';

-- Refuse a header mq-body that names no stored body, and note this transaction as one that publishes it.
CREATE FUNCTION mqlayer_app.large_body_use_v1(p_reference text) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF p_reference ~ '^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}:[0-9]{1,10}:[0-9a-f]{64}$' THEN
        UPDATE mqlayer_app.large_body b SET publish_xid = pg_current_xact_id(), cut_id = NULL, free_since = NULL
            WHERE b.body_id = split_part(p_reference, ':', 1)::uuid AND NOT b.removing
              AND b.size = split_part(p_reference, ':', 2)::bigint
              AND b.sha256 = decode(split_part(p_reference, ':', 3), 'hex')
              AND b.sha256 <> decode(repeat('00', 32), 'hex');
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    RAISE EXCEPTION 'the header mq-body names no stored body'
        USING ERRCODE = 'MQ004', HINT = 'headers || mqlayer_app.large_body_v1(topic, body)';
END $$;

-- Store a body of a topic in the caller's transaction: note it, with its chunk 0 or its place in S3, then add its other
-- chunks in order. Where size and checksum are known at the end only, they are 0 and zeros, which no message may name, up to
-- the last chunk.
CREATE FUNCTION mqlayer_app.large_body_put_v1(
    p_topic text, p_body_id uuid, p_size bigint, p_sha256 bytea, p_bucket text, p_location text, p_direct boolean,
    p_number int, p_data bytea) RETURNS void
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_topic_id int;
BEGIN
    IF NOT mqlayer_app.may_publish_all_v1() THEN
        PERFORM mqlayer_app.check_topic_v1(p_topic);
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_size BETWEEN 0 AND 1000000000 AND octet_length(p_sha256) = 32 AND p_body_id IS NOT NULL AND p_direct IS NOT NULL
        AND (p_bucket IS NULL) = (p_location IS NULL) AND coalesce(octet_length(p_bucket), 0) <= 255
        AND coalesce(octet_length(p_location), 0) <= 1024 AND p_number BETWEEN 0 AND 1000000
        AND coalesce(octet_length(p_data), 0) <= 1000000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_size', p_size, 0, 1000000000),
                mqlayer_app.within_v1('bytes of p_sha256', octet_length(p_sha256), 32, 32),
                mqlayer_app.within_v1('number of p_body_id, p_direct', num_nonnulls(p_body_id, p_direct), 2, 2),
                mqlayer_app.within_v1('number of p_bucket, p_location', num_nonnulls(p_bucket, p_location) % 2, 0, 0),
                mqlayer_app.within_v1('bytes of p_bucket', coalesce(octet_length(p_bucket), 0), 0, 255),
                mqlayer_app.within_v1('bytes of p_location', coalesce(octet_length(p_location), 0), 0, 1024),
                mqlayer_app.within_v1('p_number', p_number, 0, 1000000),
                mqlayer_app.within_v1('bytes of p_data', coalesce(octet_length(p_data), 0), 0, 1000000);
    END IF;
    SELECT t.topic_id INTO v_topic_id FROM mqlayer_app.topic t WHERE t.name = p_topic FOR KEY SHARE;
    IF v_topic_id IS NULL THEN
        RAISE EXCEPTION 'unknown topic "%"', left(p_topic, 63)
            USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
    END IF;
    IF p_number = 0 THEN
        INSERT INTO mqlayer_app.large_body (body_id, topic_id, bucket, location, size, sha256, direct)
            VALUES (p_body_id, v_topic_id, p_bucket, p_location, p_size, p_sha256, p_direct);
    ELSIF p_bucket IS NULL AND p_size > 0 THEN
        UPDATE mqlayer_app.large_body b SET size = p_size, sha256 = p_sha256
            WHERE b.body_id = p_body_id AND b.publish_xid = pg_current_xact_id() AND b.size = 0
              AND b.sha256 = decode(repeat('00', 32), 'hex');
    END IF;
    IF p_bucket IS NULL THEN
        INSERT INTO mqlayer_app.large_body_chunk (body_id, number, data)
            SELECT b.body_id, p_number, coalesce(p_data, '') FROM mqlayer_app.large_body b
            WHERE b.body_id = p_body_id AND b.topic_id = v_topic_id AND b.publish_xid = pg_current_xact_id()
              AND b.bucket IS NULL;
        IF NOT FOUND THEN
            RAISE EXCEPTION 'no body % is open in this transaction', p_body_id
                USING ERRCODE = 'MQ005', HINT = 'store all its chunks in one transaction';
        END IF;
    END IF;
END $$;

-- Store a body of a topic in the caller's transaction; return the header that names it:
-- publish_v1(topic, key, '', headers || large_body_v1(topic, body)).
CREATE FUNCTION mqlayer_app.large_body_v1(p_topic text, p_body bytea) RETURNS jsonb
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_id uuid := gen_random_uuid();
    v_size int := octet_length(p_body);
    v_sha256 bytea := sha256(p_body);
BEGIN
    IF v_size IS NULL THEN
        RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
    END IF;
    FOR v_number IN 0 .. greatest(0, v_size - 1) / 262144 LOOP
        PERFORM mqlayer_app.large_body_put_v1(p_topic, v_id, v_size, v_sha256, NULL, NULL, false, v_number,
                                              substr(p_body, v_number * 262144 + 1, 262144));
    END LOOP;
    RETURN jsonb_build_object('mq-body', format('%s:%s:%s', v_id, v_size, encode(v_sha256, 'hex')));
END $$;

-- The identity of this outbox, which objects in S3 carry in their keys: a copy of this database removes none of them.
-- Null before the first relay.
CREATE FUNCTION mqlayer_app.large_body_scope_v1() RETURNS uuid
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp
    RETURN (SELECT i.outbox_uuid FROM mqlayer_app.identity i);

-- Where a body is, and one chunk of it. No row: no such body. Who may consume for a group of its topic may read it, and who
-- may see all bodies.
CREATE FUNCTION mqlayer_app.large_body_read_v1(
    p_body_id uuid, p_number int, OUT topic text, OUT bucket text, OUT location text, OUT data bytea) RETURNS SETOF record
    LANGUAGE plpgsql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_caller name := mqlayer_app.caller_v1();
BEGIN
    IF (p_number BETWEEN 0 AND 1000000 AND p_body_id IS NOT NULL) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_number', p_number, 0, 1000000),
                mqlayer_app.within_v1('number of p_body_id', num_nonnulls(p_body_id), 1, 1);
    END IF;
    SELECT t.name, b.bucket, b.location, c.data
        INTO large_body_read_v1.topic, large_body_read_v1.bucket, large_body_read_v1.location, large_body_read_v1.data
        FROM mqlayer_app.large_body b JOIN mqlayer_app.topic t USING (topic_id)
        LEFT JOIN mqlayer_app.large_body_chunk c ON c.body_id = b.body_id AND c.number = p_number
        WHERE b.body_id = p_body_id AND NOT b.removing;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    IF NOT mqlayer_app.may_consume_all_v1() AND NOT mqlayer_app.has_v1('operate', 'analyze') AND NOT EXISTS (
        SELECT FROM mqlayer_app.granted g WHERE g.privilege = 'consume' AND pg_has_role(v_caller, g.role, 'USAGE')
          AND split_part(g.scope, '/', 1) IN ('', split_part(topic, '@', 1))) THEN
        RAISE EXCEPTION 'role "%" lacks the right to consume %', v_caller, topic
            USING ERRCODE = 'insufficient_privilege', HINT = format('mqlayer grant consume %s', v_caller);
    END IF;
    RETURN NEXT;
END $$;

-- Take cuts for bodies whose messages are all in the outbox, or gone through it: one statement, so one snapshot. A body
-- that another transaction publishes meanwhile is passed by: its publish_xid is not visible in the snapshot. One that
-- waits elsewhere has no cut yet. Direct ones have waited for p_hold_s first. Returns how many bodies.
CREATE FUNCTION mqlayer_app.large_body_cut_v1(p_limit int, p_hold_s double precision) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    IF NOT mqlayer_app.has_v1('work') THEN
        RAISE EXCEPTION 'role "%" lacks the right to work', mqlayer_app.caller_v1()
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant work ' || mqlayer_app.caller_v1();
    END IF;
    IF (p_limit BETWEEN 1 AND 100000 AND p_hold_s BETWEEN 0 AND 31536000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_limit', p_limit, 1, 100000),
                mqlayer_app.within_v1('p_hold_s', p_hold_s::numeric, 0, 31536000);
    END IF;
    -- Seqs of a former identity say nothing of this outbox.
    UPDATE mqlayer_app.large_body b SET cut_id = NULL, free_since = NULL FROM mqlayer_app.large_body_cut c
        WHERE b.cut_id = c.cut_id AND c.outbox_uuid IS DISTINCT FROM (SELECT i.outbox_uuid FROM mqlayer_app.identity i)
          AND NOT b.removing;
    DELETE FROM mqlayer_app.large_body_cut c
        WHERE NOT EXISTS (SELECT FROM mqlayer_app.large_body b WHERE b.cut_id = c.cut_id);
    WITH fresh AS MATERIALIZED (
        SELECT b.body_id, b.topic_id FROM mqlayer_app.large_body b
        WHERE b.cut_id IS NULL AND NOT b.removing
          AND NOT (b.direct AND b.created_at > clock_timestamp() - make_interval(secs => p_hold_s))
          -- In this statement's own snapshot, as a function's look would not be.
          AND NOT EXISTS (SELECT FROM mqlayer_app.delayed d WHERE d.headers LIKE '%"mq-body":%'
                          AND mqlayer_app.body_named_v1(d.headers) = b.body_id::text)
          AND NOT EXISTS (SELECT FROM mqlayer_app.voided v WHERE v.ended IS NULL AND v.headers LIKE '%"mq-body":%'
                          AND mqlayer_app.body_named_v1(v.headers) = b.body_id::text)
        LIMIT p_limit
    ), made AS (
        INSERT INTO mqlayer_app.large_body_cut (topic_id, outbox_uuid, seqs)
            SELECT t.topic_id, (SELECT i.outbox_uuid FROM mqlayer_app.identity i),
                   ARRAY(SELECT c.seq FROM mqlayer_app.counter c WHERE c.topic_id = t.topic_id ORDER BY c.lp)
            FROM (SELECT DISTINCT f.topic_id FROM fresh f) AS t
            RETURNING large_body_cut.cut_id, large_body_cut.topic_id
    )
    UPDATE mqlayer_app.large_body b SET cut_id = m.cut_id FROM fresh f JOIN made m ON m.topic_id = f.topic_id
        WHERE b.body_id = f.body_id AND b.cut_id IS NULL AND NOT b.removing
          AND pg_visible_in_snapshot(b.publish_xid, pg_current_snapshot());
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Whether a body's message waits for its time, or for an operator.
CREATE FUNCTION mqlayer_app.large_body_waits_v1(p_body_id uuid) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp
    RETURN EXISTS (
        SELECT FROM mqlayer_app.delayed d
        WHERE d.headers LIKE '%"mq-body":%' AND mqlayer_app.body_named_v1(d.headers) = p_body_id::text
        UNION ALL
        SELECT FROM mqlayer_app.voided v WHERE v.ended IS NULL
          AND v.headers LIKE '%"mq-body":%' AND mqlayer_app.body_named_v1(v.headers) = p_body_id::text);

-- Whether the outbox has emptied all rows at or below a cut's seqs.
CREATE FUNCTION mqlayer_app.large_body_sent_v1(p_cut_id bigint) RETURNS boolean
    LANGUAGE sql STABLE SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp
    RETURN NOT EXISTS (
        SELECT FROM mqlayer_app.large_body_cut c
        CROSS JOIN LATERAL unnest(c.seqs) WITH ORDINALITY AS u(seq, place)
        CROSS JOIN LATERAL (SELECT FROM mqlayer_app.outbox o
                            WHERE o.topic_id = c.topic_id AND o.lp = (u.place - 1)::smallint AND o.seq <= u.seq LIMIT 1) AS waits
        WHERE c.cut_id = p_cut_id AND u.seq > 0);


-- Changes of the outbox ----------------------------------------------------------------------------------------------

-- Give an outbox that was copied an identity of its own, so that its relay opens a new source whose numbers begin at 1.
-- With p_keep it takes its original's place: the original's source ends, and all that is not recorded as relayed is
-- numbered anew and sent again. Without, the outbox is emptied. All tables that relays write to are locked first, the
-- identity last: a relay has locked the one it writes to when it locks the identity that it goes by.
CREATE FUNCTION mqlayer_app.outbox_renew_v1(p_keep boolean) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    IF EXISTS (SELECT FROM mqlayer_app.lp_set WHERE lease_until >= now()) THEN
        RAISE EXCEPTION 'a relay works on this outbox' USING ERRCODE = 'MQ005', HINT = 'stop its relays first';
    END IF;
    LOCK TABLE mqlayer_app.counter, mqlayer_app.outbox, mqlayer_app.relayed, mqlayer_app.quarantined
        IN ACCESS EXCLUSIVE MODE;
    IF p_keep THEN
        DELETE FROM mqlayer_app.outbox o USING mqlayer_app.relayed r
            WHERE r.topic_id = o.topic_id AND r.lp = o.lp AND o.seq <= r.seq;
        -- By way of negative numbers: a row's new number may still be another row's old one.
        UPDATE mqlayer_app.outbox o SET seq = r.seq - o.seq FROM mqlayer_app.relayed r
            WHERE r.topic_id = o.topic_id AND r.lp = o.lp;
        UPDATE mqlayer_app.outbox SET seq = -seq WHERE seq < 0;
        UPDATE mqlayer_app.counter c SET seq = c.seq - r.seq FROM mqlayer_app.relayed r
            WHERE r.topic_id = c.topic_id AND r.lp = c.lp;
    ELSE
        TRUNCATE mqlayer_app.outbox;
        UPDATE mqlayer_app.counter SET seq = 0 WHERE seq <> 0;
    END IF;
    TRUNCATE mqlayer_app.relayed, mqlayer_app.quarantined;
    UPDATE mqlayer_app.identity i SET outbox_uuid = gen_random_uuid(), timeline = DEFAULT,
        replaces = CASE WHEN p_keep THEN array_append(i.replaces, i.outbox_uuid) END;
    SELECT count(*) INTO v_count FROM mqlayer_app.outbox;
    RETURN v_count;
END $$;

-- Let an outbox go on under a new source after its Postgres lost commits: their seqs are given out again, while
-- partitions hold other messages under them. Messages that are proven to be in Redis are recorded as relayed first, and
-- those that Redis lost and no relay could send again (p_fallen) as not. All behind is numbered anew, from 1. Unlike in
-- outbox_renew_v1 relays may hold leases: each process that meets the server asks for its timeline before anything
-- else. The outboxes that it went on in place of stay known. Locks are taken in the order of outbox_renew_v1. Null
-- where another process did all that meanwhile, else how many messages wait.
CREATE FUNCTION mqlayer_app.outbox_recover_v1(
    p_outbox uuid, p_topic_ids int[], p_lps smallint[], p_seqs bigint[], p_fallen boolean[]) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_now int := mqlayer_app.timeline_v1();
    v_count bigint;
BEGIN
    LOCK TABLE mqlayer_app.counter, mqlayer_app.outbox, mqlayer_app.relayed, mqlayer_app.quarantined
        IN ACCESS EXCLUSIVE MODE;
    PERFORM FROM mqlayer_app.identity i
        WHERE i.outbox_uuid = p_outbox AND i.timeline IS DISTINCT FROM v_now FOR UPDATE;
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    INSERT INTO mqlayer_app.relayed AS r (topic_id, lp, seq)
        SELECT k.topic_id, k.lp, k.seq FROM unnest(p_topic_ids, p_lps, p_seqs, p_fallen) AS k (topic_id, lp, seq, fallen)
        WHERE NOT k.fallen
        ON CONFLICT (topic_id, lp) DO UPDATE SET seq = excluded.seq WHERE r.seq < excluded.seq;
    UPDATE mqlayer_app.relayed r SET seq = least(r.seq, k.seq)
        FROM unnest(p_topic_ids, p_lps, p_seqs, p_fallen) AS k (topic_id, lp, seq, fallen)
        WHERE k.fallen AND r.topic_id = k.topic_id AND r.lp = k.lp;
    DELETE FROM mqlayer_app.outbox o USING mqlayer_app.relayed r
        WHERE r.topic_id = o.topic_id AND r.lp = o.lp AND o.seq <= r.seq;
    -- By way of negative numbers: a row's new number may still be another row's old one.
    UPDATE mqlayer_app.outbox o SET seq = r.seq - o.seq FROM mqlayer_app.relayed r
        WHERE r.topic_id = o.topic_id AND r.lp = o.lp;
    UPDATE mqlayer_app.outbox SET seq = -seq WHERE seq < 0;
    UPDATE mqlayer_app.counter c SET seq = greatest(0, c.seq - r.seq) FROM mqlayer_app.relayed r
        WHERE r.topic_id = c.topic_id AND r.lp = c.lp;
    TRUNCATE mqlayer_app.relayed, mqlayer_app.quarantined;
    UPDATE mqlayer_app.identity i SET outbox_uuid = gen_random_uuid(), timeline = v_now,
        replaces = array_append(i.replaces, p_outbox);
    SELECT count(*) INTO v_count FROM mqlayer_app.outbox;
    RETURN v_count;
END $$;


-- Let an outbox publish to a topic no more, unless p_force is false and messages of it wait: rows that no relay sent,
-- delayed ones, voided ones that wait for an operator. Then nothing is changed. Waits for publishers that are under way,
-- and later ones find no topic. An outbox that never knew the topic gets the row too, which keeps it from being attached.
CREATE FUNCTION mqlayer_app.topic_drop_v1(
    p_topic_id int, p_name text, p_force boolean, OUT dropped boolean, OUT unsent bigint, OUT delayed bigint,
    OUT voided bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_deleted_at timestamptz;
    v_name text;
BEGIN
    IF NOT mqlayer_app.has_v1('operate') THEN
        RAISE EXCEPTION 'role "%" lacks the right to operate', mqlayer_app.caller_v1()
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant operate ' || mqlayer_app.caller_v1();
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_topic_id BETWEEN 1 AND 2147483647
       AND octet_length(p_name) BETWEEN 1 AND 63
       AND p_force IS NOT NULL) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_topic_id', p_topic_id, 1, 2147483647),
                mqlayer_app.within_v1('bytes of p_name', octet_length(p_name), 1, 63),
                mqlayer_app.within_v1('p_force', p_force::int, 0, 1);
    END IF;
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- A snapshot from before the counters were locked would miss what was published in between.
        RAISE EXCEPTION 'dropping a topic needs READ COMMITTED, not %', current_setting('transaction_isolation')
            USING ERRCODE = 'MQ005', HINT = 'SET TRANSACTION ISOLATION LEVEL READ COMMITTED first';
    END IF;
    dropped := true;
    unsent := 0;
    delayed := 0;
    voided := 0;
    INSERT INTO mqlayer_app.topic (topic_id, name, body_limit, deleted_at)
        VALUES (p_topic_id, p_name || '@' || p_topic_id, 1, now()) ON CONFLICT DO NOTHING;
    SELECT t.deleted_at, t.name INTO v_deleted_at, v_name
        FROM mqlayer_app.topic t WHERE t.topic_id = p_topic_id FOR UPDATE;
    IF NOT FOUND THEN
        RAISE EXCEPTION 'another topic of this outbox is named "%"', p_name || '@' || p_topic_id
            USING ERRCODE = 'unique_violation', HINT = 'drop that topic first';
    END IF;
    -- A control database that lost topics may give an id out again: here it is another topic's, which stays as it is.
    IF v_deleted_at IS NOT NULL OR v_name <> p_name THEN
        RETURN;
    END IF;
    -- In the order in which publishing locks them.
    PERFORM FROM mqlayer_app.counter c WHERE c.topic_id = p_topic_id ORDER BY c.lp FOR UPDATE;
    IF NOT p_force THEN
        unsent := (SELECT coalesce(sum(c.seq - coalesce(r.seq, 0)), 0) FROM mqlayer_app.counter c
                   LEFT JOIN mqlayer_app.relayed r ON r.topic_id = c.topic_id AND r.lp = c.lp
                   WHERE c.topic_id = p_topic_id);
        delayed := (SELECT count(*) FROM mqlayer_app.delayed d WHERE d.topic_id = p_topic_id);
        voided := (SELECT count(*) FROM mqlayer_app.voided v WHERE v.topic_id = p_topic_id AND v.ended IS NULL);
        IF unsent + delayed + voided > 0 THEN
            dropped := false;
            RETURN;
        END IF;
    END IF;
    DELETE FROM mqlayer_app.counter c WHERE c.topic_id = p_topic_id;
    UPDATE mqlayer_app.topic t SET name = t.name || '@' || t.topic_id, deleted_at = now() WHERE t.topic_id = p_topic_id;
END $$;

-- Delete rows of a topic that was dropped, so many of each table at most. Returns how many: 0 once none is left.
CREATE FUNCTION mqlayer_app.topic_rows_drop_v1(p_topic_id int, p_limit int) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_table text;
    v_count bigint;
    v_all bigint := 0;
BEGIN
    IF NOT mqlayer_app.has_v1('operate') THEN
        RAISE EXCEPTION 'role "%" lacks the right to operate', mqlayer_app.caller_v1()
            USING ERRCODE = 'insufficient_privilege', HINT = 'mqlayer grant operate ' || mqlayer_app.caller_v1();
    END IF;
    IF (p_topic_id BETWEEN 1 AND 2147483647
       AND p_limit BETWEEN 1 AND 100000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_topic_id', p_topic_id, 1, 2147483647),
                mqlayer_app.within_v1('p_limit', p_limit, 1, 100000);
    END IF;
    IF NOT EXISTS (SELECT FROM mqlayer_app.topic t WHERE t.topic_id = p_topic_id AND t.deleted_at IS NOT NULL) THEN
        RETURN 0;
    END IF;
    FOREACH v_table IN ARRAY ARRAY['outbox_0', 'outbox_1', 'outbox_2', 'outbox_3', 'delayed', 'dedup', 'voided',
                                   'quarantined', 'relayed'] LOOP
        EXECUTE format('DELETE FROM mqlayer_app.%1$I WHERE ctid = ANY(ARRAY(
                            SELECT d.ctid FROM mqlayer_app.%1$I d WHERE d.topic_id = $1 LIMIT $2))', v_table)
            USING p_topic_id, p_limit;
        GET DIAGNOSTICS v_count = ROW_COUNT;
        v_all := v_all + v_count;
    END LOOP;
    RETURN v_all;
END $$;


-- Fence --------------------------------------------------------------------------------------------------------------
-- The highest epoch seen per group and LP, and the last applied seq per key.

CREATE TABLE mqlayer_app.fence_epoch (
    group_id bigint NOT NULL,
    lp       smallint NOT NULL,
    epoch    bigint NOT NULL,
    CONSTRAINT fence_epoch_key PRIMARY KEY (group_id, lp)
) WITH (fillfactor = 50);

CREATE TABLE mqlayer_app.fence_applied (
    group_id   bigint NOT NULL,
    lp         smallint NOT NULL,
    -- Negative for messages without a key: each stands alone, under its seq as key.
    source_id  bigint NOT NULL,
    key        text NOT NULL,
    -- The newest seek under which the group applies again, and came to this key.
    replay     int NOT NULL DEFAULT 0,
    seq        bigint NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT fence_applied_key PRIMARY KEY (group_id, lp, key, source_id)
) WITH (fillfactor = 70);

-- Check in the effect's own transaction that the epoch is current for the LP and that the message was not applied.
-- Answers 'current' (go on; noted as applied when the transaction commits), 'applied' or 'stale' (roll back).
CREATE FUNCTION mqlayer_app.fence_v1(p_group_id bigint, p_lp smallint, p_source_id bigint, p_key text, p_seq bigint,
                                     p_epoch bigint, p_replay int DEFAULT 0, OUT answer text, OUT epoch bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
BEGIN
    IF NOT mqlayer_app.may_consume_all_v1() THEN
        PERFORM mqlayer_app.check_group_v1(p_group_id);
    END IF;
    -- A commit that is lost after it was relayed, or after its effect was settled, is lost for good.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- A source below 0 stands for messages of a replay of the archive, whose effects are noted apart.
    IF (p_group_id BETWEEN 1 AND 9007199254740991
       AND p_lp BETWEEN 0 AND 1023
       AND p_source_id BETWEEN -9007199254740991 AND 9007199254740991
       AND (p_key IS NULL OR octet_length(p_key) BETWEEN 0 AND 512)
       AND p_seq BETWEEN 1 AND 9007199254740991
       AND p_epoch BETWEEN 1 AND 9007199254740991
       AND p_replay BETWEEN 0 AND 2147483647) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_group_id', p_group_id, 1, 9007199254740991),
                mqlayer_app.within_v1('p_lp', p_lp, 0, 1023),
                mqlayer_app.within_v1('p_source_id', p_source_id, -9007199254740991, 9007199254740991),
                mqlayer_app.within_v1('bytes of p_key', coalesce(octet_length(p_key), 0), 0, 512),
                mqlayer_app.within_v1('p_seq', p_seq, 1, 9007199254740991),
                mqlayer_app.within_v1('p_epoch', p_epoch, 1, 9007199254740991),
                mqlayer_app.within_v1('p_replay', p_replay, 0, 2147483647);
    END IF;
    IF v_timeout = interval '0' OR v_timeout > interval '60 seconds' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '60s', true);
    END IF;
    -- Raised before it is locked for sharing: two effects that both held the shared lock could not both raise it.
    SELECT f.epoch INTO epoch FROM mqlayer_app.fence_epoch f WHERE f.group_id = p_group_id AND f.lp = p_lp;
    IF epoch IS NULL OR epoch < p_epoch THEN
        INSERT INTO mqlayer_app.fence_epoch AS f (group_id, lp, epoch) VALUES (p_group_id, p_lp, p_epoch)
            ON CONFLICT (group_id, lp) DO UPDATE SET epoch = greatest(f.epoch, excluded.epoch);
    END IF;
    SELECT f.epoch INTO epoch FROM mqlayer_app.fence_epoch f WHERE f.group_id = p_group_id AND f.lp = p_lp FOR SHARE;
    IF epoch > p_epoch THEN
        answer := 'stale';
        RETURN;
    END IF;
    INSERT INTO mqlayer_app.fence_applied AS a (group_id, lp, source_id, key, replay, seq)
        VALUES (p_group_id, p_lp, CASE WHEN p_key IS NULL THEN -p_source_id ELSE p_source_id END,
                coalesce(p_key, p_seq::text), p_replay, p_seq)
        ON CONFLICT (group_id, lp, key, source_id) DO UPDATE
            SET replay = greatest(a.replay, excluded.replay), seq = excluded.seq, applied_at = now()
            WHERE a.replay < excluded.replay OR a.seq < excluded.seq;
    IF FOUND THEN
        answer := 'current';
    ELSE
        answer := 'applied';
    END IF;
END $$;

-- The fence for the messages of a batch: as fence_v1 for each of them, in one call. Answers in the order of the
-- messages: 'current', 'applied' or 'stale'. With one that is stale the others may have none (null): roll the
-- transaction back. Rows are locked in the order of LP and key, whatever the order of the messages: two owners whose
-- batches have keys in common must not deadlock. Of one key's messages the first ones that are applied are asked for
-- one by one, of the others only the last is noted: it stands for all before it, and no other transaction comes between
-- once the row is ours.
CREATE FUNCTION mqlayer_app.fence_many_v1(p_group_id bigint, p_lps smallint[], p_source_ids bigint[], p_keys text[],
                                          p_seqs bigint[], p_epochs bigint[], p_replays int[],
                                          OUT answers text[], OUT epochs bigint[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v record;
    v_answer record;
    -- The key that is open: its row is ours. Its last seq that may go on, and the one that is noted.
    v_open boolean := false;
    v_lp smallint;
    v_source_id bigint;
    v_key text;
    v_epoch bigint;
    v_replay int;
    v_seq bigint;
    v_noted bigint;
    v_count int := cardinality(p_seqs);
BEGIN
    IF NOT mqlayer_app.may_consume_all_v1() THEN
        PERFORM mqlayer_app.check_group_v1(p_group_id);
    END IF;
    IF (cardinality(p_seqs) BETWEEN 0 AND 10000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('length of p_seqs', cardinality(p_seqs), 0, 10000);
    END IF;
    IF cardinality(p_lps) <> v_count OR cardinality(p_source_ids) <> v_count OR cardinality(p_keys) <> v_count
       OR cardinality(p_epochs) <> v_count OR cardinality(p_replays) <> v_count THEN
        RAISE EXCEPTION 'arrays of different lengths' USING ERRCODE = 'MQ005', HINT = 'give one element for each message';
    END IF;
    answers := array_fill(NULL::text, ARRAY[v_count]);
    epochs := array_fill(NULL::bigint, ARRAY[v_count]);
    FOR v IN
        SELECT * FROM unnest(p_lps, p_source_ids, p_keys, p_seqs, p_epochs, p_replays)
            WITH ORDINALITY AS u(lp, source_id, key, seq, epoch, replay, n)
        ORDER BY lp, key COLLATE "C", source_id, replay, n
    LOOP
        IF v_open AND v.key = v_key AND (v.lp, v.source_id, v.epoch, v.replay) = (v_lp, v_source_id, v_epoch, v_replay) THEN
            answers[v.n] := CASE WHEN v.seq > v_seq THEN 'current' ELSE 'applied' END;
            epochs[v.n] := v.epoch;
            v_seq := greatest(v_seq, v.seq);
            CONTINUE;
        END IF;
        IF v_open AND v_seq > v_noted THEN
            PERFORM mqlayer_app.fence_v1(p_group_id, v_lp, v_source_id, v_key, v_seq, v_epoch, v_replay);
        END IF;
        SELECT f.answer, f.epoch INTO v_answer
            FROM mqlayer_app.fence_v1(p_group_id, v.lp, v.source_id, v.key, v.seq, v.epoch, v.replay) AS f;
        answers[v.n] := v_answer.answer;
        epochs[v.n] := v_answer.epoch;
        IF v_answer.answer = 'stale' THEN
            RETURN;
        END IF;
        v_open := v_answer.answer = 'current' AND v.key IS NOT NULL;
        v_lp := v.lp;
        v_source_id := v.source_id;
        v_key := v.key;
        v_epoch := v.epoch;
        v_replay := v.replay;
        v_seq := v.seq;
        v_noted := v.seq;
    END LOOP;
    IF v_open AND v_seq > v_noted THEN
        PERFORM mqlayer_app.fence_v1(p_group_id, v_lp, v_source_id, v_key, v_seq, v_epoch, v_replay);
    END IF;
END $$;

-- Raise the epoch of a range of LPs when a new owner takes them, so that an earlier owner's effects are refused even
-- where the new owner has not handled anything yet. Rows that an open effect holds are left to their next fence call.
CREATE FUNCTION mqlayer_app.fence_raise_v1(p_group_id bigint, p_lp_from smallint, p_lp_to smallint, p_epoch bigint)
    RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_count int;
BEGIN
    IF NOT mqlayer_app.may_consume_all_v1() THEN
        PERFORM mqlayer_app.check_group_v1(p_group_id);
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_group_id BETWEEN 1 AND 9007199254740991
       AND p_lp_from BETWEEN 0 AND 1023
       AND p_lp_to BETWEEN p_lp_from + 1 AND 1024
       AND p_epoch BETWEEN 1 AND 9007199254740991) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_group_id', p_group_id, 1, 9007199254740991),
                mqlayer_app.within_v1('p_lp_from', p_lp_from, 0, 1023),
                mqlayer_app.within_v1('p_lp_to', p_lp_to, p_lp_from + 1, 1024),
                mqlayer_app.within_v1('p_epoch', p_epoch, 1, 9007199254740991);
    END IF;
    INSERT INTO mqlayer_app.fence_epoch (group_id, lp, epoch)
        SELECT p_group_id, lp, p_epoch FROM generate_series(p_lp_from, p_lp_to - 1) AS lp
        ON CONFLICT DO NOTHING;
    UPDATE mqlayer_app.fence_epoch f SET epoch = p_epoch
        FROM (SELECT group_id, lp FROM mqlayer_app.fence_epoch
              WHERE group_id = p_group_id AND lp >= p_lp_from AND lp < p_lp_to AND epoch < p_epoch
              ORDER BY lp FOR UPDATE SKIP LOCKED) AS free
        WHERE f.group_id = free.group_id AND f.lp = free.lp;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- Forget applied seqs that no redelivery can reach any more, at most p_limit rows a call.
CREATE FUNCTION mqlayer_app.fence_clean_v1(p_horizon interval, p_limit int) RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_count int;
BEGIN
    IF (p_limit BETWEEN 1 AND 100000
       AND date_part('epoch', p_horizon) BETWEEN 0 AND 3162240000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_limit', p_limit, 1, 100000),
                mqlayer_app.within_v1('seconds of p_horizon', date_part('epoch', p_horizon)::numeric, 0, 3162240000);
    END IF;
    DELETE FROM mqlayer_app.fence_applied WHERE ctid IN (
        SELECT ctid FROM mqlayer_app.fence_applied WHERE applied_at < now() - p_horizon LIMIT p_limit);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- The effects of a group count as applied in its copy, of some LPs; those do not that the group's replay repeats.
CREATE FUNCTION mqlayer_app.fence_copy_v1(p_group_id bigint, p_new_id bigint, p_replay int, p_lp_from smallint,
                                          p_lp_to smallint) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_count bigint;
BEGIN
    PERFORM mqlayer_app.within_v1('p_group_id', p_group_id, 1, 9007199254740991),
            mqlayer_app.within_v1('p_new_id', p_new_id, 1, 9007199254740991),
            mqlayer_app.within_v1('p_replay', p_replay, 0, 2147483647),
            mqlayer_app.within_v1('p_lp_from', p_lp_from, 0, 1023),
            mqlayer_app.within_v1('p_lp_to', p_lp_to, 1, 1024);
    INSERT INTO mqlayer_app.fence_applied AS a (group_id, lp, source_id, key, seq, applied_at)
    SELECT p_new_id, f.lp, f.source_id, f.key, f.seq, f.applied_at FROM mqlayer_app.fence_applied f
    WHERE f.group_id = p_group_id AND f.lp >= p_lp_from AND f.lp < p_lp_to AND f.replay >= p_replay
    ON CONFLICT (group_id, lp, key, source_id) DO UPDATE SET seq = excluded.seq, applied_at = excluded.applied_at
        WHERE a.seq < excluded.seq;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;


-- Inbox --------------------------------------------------------------------------------------------------------------
-- The messages that have their effect, one row for each, for handlers to which order says nothing.

CREATE TABLE mqlayer_app.inbox (
    group_id   bigint NOT NULL,
    -- <source>:<lp>:<seq>, or '=' and a name that the handler gave. For messages of a replay of the archive,
    -- '@<replay>/' in front of that: each replay has its effects once.
    id         text COLLATE "C" NOT NULL,
    -- The message that it was noted with: while this one may come again, the row stays.
    source_id  bigint NOT NULL,
    lp         smallint NOT NULL,
    seq        bigint NOT NULL,
    -- The newest seek under which the group applies again, and came to this message.
    replay     int NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    -- From when its time counts: since it was applied, or since its message was last found waiting somewhere.
    kept_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT inbox_key PRIMARY KEY (group_id, id)
);
CREATE INDEX inbox_kept_at ON mqlayer_app.inbox (group_id, kept_at);

-- Note in the effect's own transaction that a message has its effect. Answers 'current' (go on; noted when the
-- transaction commits) or 'applied' (roll back). Of two that note it at once the second waits, and its answer is by the
-- end of the first.
CREATE FUNCTION mqlayer_app.inbox_put_v1(p_group_id bigint, p_source_id bigint, p_lp smallint, p_seq bigint,
                                         p_name text DEFAULT NULL, p_seek int DEFAULT 0, p_replay bigint DEFAULT NULL)
    RETURNS text
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
BEGIN
    IF NOT mqlayer_app.may_consume_all_v1() THEN
        PERFORM mqlayer_app.check_group_v1(p_group_id);
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_group_id BETWEEN 1 AND 9007199254740991
       AND p_source_id BETWEEN 1 AND 9007199254740991
       AND p_lp BETWEEN 0 AND 1023
       AND p_seq BETWEEN 1 AND 9007199254740991
       AND p_seek BETWEEN 0 AND 2147483647
       AND (p_replay IS NULL OR p_replay BETWEEN 1 AND 9007199254740991)) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_group_id', p_group_id, 1, 9007199254740991),
                mqlayer_app.within_v1('p_source_id', p_source_id, 1, 9007199254740991),
                mqlayer_app.within_v1('p_lp', p_lp, 0, 1023),
                mqlayer_app.within_v1('p_seq', p_seq, 1, 9007199254740991),
                mqlayer_app.within_v1('p_seek', p_seek, 0, 2147483647),
                mqlayer_app.within_v1('p_replay', coalesce(p_replay, 1), 1, 9007199254740991);
    END IF;
    IF p_name = '' OR octet_length(p_name) > 512 THEN
        RAISE EXCEPTION 'a name in the inbox has 1 to 512 bytes' USING ERRCODE = 'MQ005', HINT = 'use an id';
    END IF;
    IF v_timeout = interval '0' OR v_timeout > interval '60 seconds' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '60s', true);
    END IF;
    INSERT INTO mqlayer_app.inbox AS i (group_id, id, source_id, lp, seq, replay)
        VALUES (p_group_id,
                coalesce('@' || p_replay || '/', '') || coalesce('=' || p_name, concat_ws(':', p_source_id, p_lp, p_seq)),
                p_source_id, p_lp, p_seq, p_seek)
        ON CONFLICT (group_id, id) DO UPDATE
            SET source_id = excluded.source_id, lp = excluded.lp, seq = excluded.seq, replay = excluded.replay,
                applied_at = excluded.applied_at, kept_at = excluded.kept_at
            WHERE i.replay < excluded.replay;
    RETURN CASE WHEN FOUND THEN 'current' ELSE 'applied' END;
END $$;

-- Rows of a group count in its copy, from an id on, at most p_limit a call; the last id, null at the end.
CREATE FUNCTION mqlayer_app.inbox_copy_v1(p_group_id bigint, p_new_id bigint, p_replay int, p_after text, p_limit int,
                                          OUT last_id text, OUT copied bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    PERFORM mqlayer_app.within_v1('p_group_id', p_group_id, 1, 9007199254740991),
            mqlayer_app.within_v1('p_new_id', p_new_id, 1, 9007199254740991),
            mqlayer_app.within_v1('p_replay', p_replay, 0, 2147483647),
            mqlayer_app.within_v1('p_limit', p_limit, 1, 100000);
    WITH given AS (
        SELECT id, source_id, lp, seq, applied_at, kept_at FROM mqlayer_app.inbox i
        WHERE i.group_id = p_group_id AND i.id > p_after AND i.replay >= p_replay ORDER BY i.id LIMIT p_limit
    ), put AS (
        INSERT INTO mqlayer_app.inbox (group_id, id, source_id, lp, seq, replay, applied_at, kept_at)
        SELECT p_new_id, id, source_id, lp, seq, 0, applied_at, kept_at FROM given
        ON CONFLICT DO NOTHING
    )
    SELECT max(id), count(*) INTO last_id, copied FROM given;
END $$;


-- Versions -----------------------------------------------------------------------------------------------------------
-- Events that carry the number of the change they make to an entity are applied as 1, 2, 3 …, in whatever order they
-- come. An event that comes before its turn is held here, so its message can be settled.

CREATE TABLE mqlayer_app.entity_version (
    -- The thing that the numbers count, such as the state of orders in the ledger. Several groups may feed one.
    name          text NOT NULL,
    entity        text NOT NULL,
    -- The last version that was applied.
    version       bigint NOT NULL,
    held_messages int NOT NULL DEFAULT 0,
    held_bytes    bigint NOT NULL DEFAULT 0,
    -- Since when the next version is known to be missing, and when the next alarm is due. Null where nothing is held.
    missing_since timestamptz,
    alarm_at      timestamptz,
    -- How long a version may be missing, in seconds.
    gap_s         double precision NOT NULL,
    -- An operator said where it goes on: held events are due by that, without a message that brings them.
    released      boolean NOT NULL DEFAULT false,
    CONSTRAINT entity_version_key PRIMARY KEY (name, entity),
    CONSTRAINT entity_version_held CHECK (held_messages >= 0 AND held_bytes >= 0),
    CONSTRAINT entity_version_missing CHECK ((held_messages > 0) OR (missing_since IS NULL AND alarm_at IS NULL))
) WITH (fillfactor = 70);
CREATE INDEX entity_version_alarm ON mqlayer_app.entity_version (alarm_at) WHERE alarm_at IS NOT NULL;
CREATE INDEX entity_version_released ON mqlayer_app.entity_version (name) WHERE released;

CREATE TABLE mqlayer_app.held_version (
    name    text NOT NULL,
    entity  text NOT NULL,
    version bigint NOT NULL,
    -- The message's topic, where that is known, and identity: for people.
    origin  text NOT NULL,
    headers text NOT NULL,
    body    bytea NOT NULL,
    held_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT held_version_key PRIMARY KEY (name, entity, version)
);

-- What people may see of messages: all but bodies and headers.
CREATE VIEW mqlayer_app.held_version_fact AS
SELECT name, entity, version, origin, octet_length(body) + octet_length(headers) AS size, held_at
FROM mqlayer_app.held_version;

-- The amount that is held under a name: the sum over its rows. A connection adds to the row of its own slot, so that
-- callers with different entities do not wait for each other. A single row may be below 0.
CREATE TABLE mqlayer_app.held_total (
    name     text NOT NULL,
    slot     smallint NOT NULL,
    messages bigint NOT NULL,
    bytes    bigint NOT NULL,
    CONSTRAINT held_total_key PRIMARY KEY (name, slot)
);

-- Add to the amount that is held. For the functions below only.
CREATE FUNCTION mqlayer_app.held_total_add_v1(p_name text, p_messages bigint, p_bytes bigint) RETURNS void
    LANGUAGE sql SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
    INSERT INTO mqlayer_app.held_total AS t (name, slot, messages, bytes)
        VALUES (p_name, pg_backend_pid() % 64, p_messages, p_bytes)
        ON CONFLICT (name, slot) DO UPDATE
            SET messages = t.messages + excluded.messages, bytes = t.bytes + excluded.bytes
$$;

-- Take an event in the effect's own transaction: the entity goes on from its version as far as this event and the held
-- ones reach. Answers the fate of the event: 'due' (apply it), 'held', 'duplicate', 'full' (nothing was changed: the
-- entity's limits) or 'all_full' (the name's). And the other events to apply, as arrays by rising version: apply all of
-- them in the order of the versions. `current`: the version then. `alarm`: the next version has been missing for too
-- long, and this call is the one to tell. A null version stands for no event: only events that an operator released.
-- The entity's row is locked to commit: two events of one entity wait for each other.
CREATE FUNCTION mqlayer_app.version_take_v1(
    p_name text, p_entity text, p_version bigint, p_body bytea, p_headers text, p_origin text, p_first bigint,
    p_messages int, p_bytes bigint, p_all_messages bigint, p_all_bytes bigint, p_gap_s double precision,
    OUT answer text, OUT current bigint, OUT alarm boolean, OUT missing_s double precision, OUT held int,
    OUT versions bigint[], OUT bodies bytea[], OUT headers text[], OUT origins text[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
    v_now timestamptz := clock_timestamp();
    v_row mqlayer_app.entity_version;
    v_size bigint := octet_length(p_body) + octet_length(p_headers);
    v_end bigint;
    v_held bigint;
    v_count int := 0;
    v_bytes bigint := 0;
    v_since timestamptz;
BEGIN
    IF NOT mqlayer_app.may_consume_all_v1() THEN
        PERFORM mqlayer_app.check_versions_v1(p_name);
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (octet_length(p_name) BETWEEN 1 AND 63
       AND octet_length(p_entity) BETWEEN 1 AND 512
       AND (p_version IS NULL OR p_version BETWEEN 0 AND 9007199254740991)
       AND (p_body IS NULL OR octet_length(p_body) BETWEEN 0 AND 1000000)
       AND (p_headers IS NULL OR octet_length(p_headers) BETWEEN 0 AND 65536)
       AND (p_origin IS NULL OR octet_length(p_origin) BETWEEN 0 AND 512)
       AND p_first BETWEEN 0 AND 9007199254740991
       AND p_messages BETWEEN 1 AND 10000
       AND p_bytes BETWEEN 1 AND 9007199254740991
       AND p_all_messages BETWEEN 1 AND 9007199254740991
       AND p_all_bytes BETWEEN 1 AND 9007199254740991
       AND p_gap_s BETWEEN 0.000001 AND 316224000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('bytes of p_name', octet_length(p_name), 1, 63),
                mqlayer_app.within_v1('bytes of p_entity', octet_length(p_entity), 1, 512),
                mqlayer_app.within_v1('p_version', coalesce(p_version, 0), 0, 9007199254740991),
                mqlayer_app.within_v1('bytes of p_body', coalesce(octet_length(p_body), 0), 0, 1000000),
                mqlayer_app.within_v1('bytes of p_headers', coalesce(octet_length(p_headers), 0), 0, 65536),
                mqlayer_app.within_v1('bytes of p_origin', coalesce(octet_length(p_origin), 0), 0, 512),
                mqlayer_app.within_v1('p_first', p_first, 0, 9007199254740991),
                mqlayer_app.within_v1('p_messages', p_messages, 1, 10000),
                mqlayer_app.within_v1('p_bytes', p_bytes, 1, 9007199254740991),
                mqlayer_app.within_v1('p_all_messages', p_all_messages, 1, 9007199254740991),
                mqlayer_app.within_v1('p_all_bytes', p_all_bytes, 1, 9007199254740991),
                mqlayer_app.within_v1('p_gap_s', p_gap_s::numeric, 0.000001, 316224000);
    END IF;
    IF v_timeout = interval '0' OR v_timeout > interval '60 seconds' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '60s', true);
    END IF;
    LOOP
        SELECT * INTO v_row FROM mqlayer_app.entity_version e
            WHERE e.name = p_name AND e.entity = p_entity FOR NO KEY UPDATE;
        EXIT WHEN FOUND OR p_version IS NULL;
        INSERT INTO mqlayer_app.entity_version (name, entity, version, gap_s)
            VALUES (p_name, p_entity, p_first - 1, p_gap_s) ON CONFLICT DO NOTHING;
    END LOOP;
    current := v_row.version;
    alarm := false;
    held := v_row.held_messages;
    answer := 'duplicate';
    IF v_row.held_messages = 0 AND p_version = current + 1 THEN
        -- Nearly always so.
        UPDATE mqlayer_app.entity_version e SET version = p_version, released = false
            WHERE e.name = p_name AND e.entity = p_entity;
        answer := 'due';
        current := p_version;
        RETURN;
    ELSIF p_version <= current OR current IS NULL THEN
        RETURN;
    END IF;
    -- As far as it goes now, with the event in its place.
    v_end := current;
    FOR v_held IN
        SELECT h.version FROM mqlayer_app.held_version h
        WHERE h.name = p_name AND h.entity = p_entity UNION SELECT p_version ORDER BY 1 NULLS LAST
    LOOP
        EXIT WHEN v_held IS DISTINCT FROM v_end + 1;
        v_end := v_held;
    END LOOP;
    IF v_end > current THEN
        SELECT -count(*), -coalesce(sum(octet_length(h.body) + octet_length(h.headers)), 0),
               array_agg(h.version ORDER BY h.version) FILTER (WHERE h.version IS DISTINCT FROM p_version),
               array_agg(h.body ORDER BY h.version) FILTER (WHERE h.version IS DISTINCT FROM p_version),
               array_agg(h.headers ORDER BY h.version) FILTER (WHERE h.version IS DISTINCT FROM p_version),
               array_agg(h.origin ORDER BY h.version) FILTER (WHERE h.version IS DISTINCT FROM p_version)
        INTO v_count, v_bytes, versions, bodies, headers, origins
        FROM mqlayer_app.held_version h WHERE h.name = p_name AND h.entity = p_entity AND h.version <= v_end;
    END IF;
    IF p_version <= v_end THEN
        answer := 'due';
    ELSIF p_version IS NOT NULL AND NOT EXISTS (
            SELECT FROM mqlayer_app.held_version h
            WHERE h.name = p_name AND h.entity = p_entity AND h.version = p_version) THEN
        IF v_row.held_messages + v_count >= p_messages OR v_row.held_bytes + v_bytes + v_size > p_bytes THEN
            answer := 'full';
            RETURN;
        ELSIF (SELECT coalesce(sum(t.messages), 0) + v_count >= p_all_messages
                      OR coalesce(sum(t.bytes), 0) + v_bytes + v_size > p_all_bytes
               FROM mqlayer_app.held_total t WHERE t.name = p_name) THEN
            answer := 'all_full';
            RETURN;
        END IF;
        INSERT INTO mqlayer_app.held_version (name, entity, version, origin, headers, body)
            VALUES (p_name, p_entity, p_version, p_origin, p_headers, p_body);
        v_count := v_count + 1;
        v_bytes := v_bytes + v_size;
        answer := 'held';
    END IF;
    IF v_end > current THEN
        DELETE FROM mqlayer_app.held_version h WHERE h.name = p_name AND h.entity = p_entity AND h.version <= v_end;
    END IF;
    held := v_row.held_messages + v_count;
    -- The next version is missing since the first event behind it came, however long the ones before it were.
    IF held > 0 THEN
        SELECT min(h.held_at) INTO v_since FROM mqlayer_app.held_version h WHERE h.name = p_name AND h.entity = p_entity;
    END IF;
    IF v_end > current OR v_row.alarm_at IS NULL THEN
        v_row.alarm_at := v_since + make_interval(secs => p_gap_s);
    END IF;
    IF v_row.alarm_at <= v_now THEN
        alarm := true;
        v_row.alarm_at := v_now + make_interval(secs => greatest(p_gap_s, 3600));
    END IF;
    missing_s := greatest(0, date_part('epoch', v_now - v_since));
    current := v_end;
    UPDATE mqlayer_app.entity_version e
        SET version = v_end, held_messages = v_row.held_messages + v_count, held_bytes = v_row.held_bytes + v_bytes,
            missing_since = v_since, alarm_at = CASE WHEN v_since IS NOT NULL THEN v_row.alarm_at END, gap_s = p_gap_s,
            released = false
        WHERE e.name = p_name AND e.entity = p_entity;
    IF v_count <> 0 OR v_bytes <> 0 THEN
        PERFORM mqlayer_app.held_total_add_v1(p_name, v_count, v_bytes);
    END IF;
END $$;

-- Take the events of one entity that an operator released. `entity` is null where there are none.
CREATE FUNCTION mqlayer_app.version_released_v1(
    p_name text, p_gap_s double precision, OUT entity text, OUT versions bigint[], OUT bodies bytea[], OUT headers text[],
    OUT origins text[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF NOT mqlayer_app.may_consume_all_v1() THEN
        PERFORM mqlayer_app.check_versions_v1(p_name);
    END IF;
    IF (octet_length(p_name) BETWEEN 1 AND 63
       AND p_gap_s BETWEEN 0.000001 AND 316224000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('bytes of p_name', octet_length(p_name), 1, 63),
                mqlayer_app.within_v1('p_gap_s', p_gap_s::numeric, 0.000001, 316224000);
    END IF;
    SELECT e.entity INTO version_released_v1.entity FROM mqlayer_app.entity_version e
        WHERE e.name = p_name AND e.released LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        SELECT t.versions, t.bodies, t.headers, t.origins
        INTO version_released_v1.versions, version_released_v1.bodies, version_released_v1.headers,
             version_released_v1.origins
        FROM mqlayer_app.version_take_v1(p_name, version_released_v1.entity, NULL, NULL, NULL, NULL, 1, 1, 1, 1, 1, p_gap_s) t;
    END IF;
END $$;

-- Say at which version an entity is. Null: forget it. Held events up to there go, with p_drop all of them. Events held
-- right behind it are due. Returns how many held events went.
CREATE FUNCTION mqlayer_app.version_set_v1(p_name text, p_entity text, p_version bigint, p_drop boolean DEFAULT false)
    RETURNS int
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_count int;
    v_bytes bigint;
    v_since timestamptz;
    v_next boolean;
BEGIN
    IF NOT mqlayer_app.may_consume_all_v1() THEN
        PERFORM mqlayer_app.check_versions_v1(p_name);
    END IF;
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (octet_length(p_name) BETWEEN 1 AND 63
       AND octet_length(p_entity) BETWEEN 1 AND 512
       AND (p_version IS NULL OR p_version BETWEEN 0 AND 9007199254740991)) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('bytes of p_name', octet_length(p_name), 1, 63),
                mqlayer_app.within_v1('bytes of p_entity', octet_length(p_entity), 1, 512),
                mqlayer_app.within_v1('p_version', coalesce(p_version, 0), 0, 9007199254740991);
    END IF;
    INSERT INTO mqlayer_app.entity_version (name, entity, version, gap_s)
        VALUES (p_name, p_entity, coalesce(p_version, 0), 60) ON CONFLICT DO NOTHING;
    PERFORM FROM mqlayer_app.entity_version e WHERE e.name = p_name AND e.entity = p_entity FOR UPDATE;
    WITH gone AS (
        DELETE FROM mqlayer_app.held_version h
        WHERE h.name = p_name AND h.entity = p_entity AND (p_drop OR p_version IS NULL OR h.version <= p_version)
        RETURNING octet_length(h.body) + octet_length(h.headers) AS bytes)
    SELECT count(*), coalesce(sum(bytes), 0) INTO v_count, v_bytes FROM gone;
    IF v_count > 0 THEN
        PERFORM mqlayer_app.held_total_add_v1(p_name, -v_count, -v_bytes);
    END IF;
    IF p_version IS NULL THEN
        DELETE FROM mqlayer_app.entity_version e WHERE e.name = p_name AND e.entity = p_entity;
        RETURN v_count;
    END IF;
    SELECT min(h.held_at), bool_or(h.version = p_version + 1) INTO v_since, v_next
        FROM mqlayer_app.held_version h WHERE h.name = p_name AND h.entity = p_entity;
    UPDATE mqlayer_app.entity_version e
        SET version = p_version, held_messages = e.held_messages - v_count, held_bytes = e.held_bytes - v_bytes,
            missing_since = v_since, alarm_at = v_since + make_interval(secs => e.gap_s), released = coalesce(v_next, false)
        WHERE e.name = p_name AND e.entity = p_entity;
    RETURN v_count;
END $$;


-- Privileges ---------------------------------------------------------------------------------------------------------
-- Every role may execute a new function until this is said; default privileges of a schema can't take it away. Each
-- later migration that makes a function says it again.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer_app FROM PUBLIC;
