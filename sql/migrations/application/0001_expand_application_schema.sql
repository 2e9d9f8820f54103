-- The application schema: outbox, fence, and the functions on them. Applications get EXECUTE on functions, nothing else.
-- Who holds what: ARCHITECTURE.md, table catalogue.

CREATE SCHEMA IF NOT EXISTS mqlayer_app;
REVOKE ALL ON SCHEMA mqlayer_app FROM PUBLIC;

-- The timeline of this server: another one begins with each promotion and with each recovery to a point in time. 0
-- where a managed Postgres does not tell it.
CREATE FUNCTION mqlayer_app.timeline_v1() RETURNS int LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog AS $$
BEGIN
    RETURN ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int;
EXCEPTION WHEN insufficient_privilege OR feature_not_supported OR undefined_function THEN
    RETURN 0;
END $$;

-- Which outbox this is. Made at the first relay's start, so that a database cloned before has its own.
CREATE TABLE mqlayer_app.identity (
    only_one    boolean NOT NULL DEFAULT true,
    outbox_uuid uuid NOT NULL DEFAULT gen_random_uuid(),
    -- On which timeline of its Postgres the outbox is worked on; null before a relay noted it, -1 where commits are
    -- known to be missing.
    timeline    int DEFAULT mqlayer_app.timeline_v1(),
    -- Which outboxes this one goes on in place of: all that it ever was, so that whatever of their sources is live
    -- still is ended. A copy that got an identity of its own ends none: they are its original's.
    replaces    uuid[],
    CONSTRAINT identity_key PRIMARY KEY (only_one),
    CONSTRAINT identity_only_one CHECK (only_one)
);

CREATE TABLE mqlayer_app.topic (
    topic_id   int NOT NULL,
    name       text NOT NULL,
    body_limit int NOT NULL,
    CONSTRAINT topic_key PRIMARY KEY (topic_id),
    CONSTRAINT topic_name_unique UNIQUE (name)
);

-- The last seq given out per LP. The row lock is held to commit and released after the commit is visible, so seq order
-- is commit order and a visible seq implies all lower ones. Only publishing updates it. Name and limit are the topic's,
-- repeated so that publishing finds all it needs by one index; and no CHECK and no foreign key, which every UPDATE would
-- pay for again. The three together were an eighth of the rate of transactions that publish one message and no more.
CREATE TABLE mqlayer_app.counter (
    topic_id   int NOT NULL,
    lp         smallint NOT NULL,
    topic      text NOT NULL,
    body_limit int NOT NULL,
    seq        bigint NOT NULL DEFAULT 0,
    CONSTRAINT counter_key PRIMARY KEY (topic_id, lp),
    CONSTRAINT counter_topic_unique UNIQUE (topic, lp)
) WITH (fillfactor = 20);

CREATE SEQUENCE mqlayer_app.outbox_number;

-- Append-only. Four slots of time in a ring; a slot is emptied as a whole when all of it is relayed.
-- id is a hint for scanning; the order is (topic_id, lp, seq).
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

-- A row as relays want it: facts as they stand in a record; no body where it is over the hard limit, so that no reader
-- needs memory for it.
CREATE VIEW mqlayer_app.outbox_message AS
SELECT id, topic_id, lp, seq, key, octet_length(body) AS size,
       CASE WHEN headers IS NULL THEN (date_part('epoch', created_at) * 1000)::bigint::text
            ELSE (date_part('epoch', created_at) * 1000)::bigint::text || ':' || headers END AS facts,
       CASE WHEN octet_length(body) <= 1000000 THEN body END AS body
FROM mqlayer_app.outbox;

-- How far each LP is in Redis, durably. A hint for relays (the truth is the mark), the proof for rotation.
CREATE TABLE mqlayer_app.relayed (
    topic_id int NOT NULL,
    lp       smallint NOT NULL,
    seq      bigint NOT NULL,
    CONSTRAINT relayed_key PRIMARY KEY (topic_id, lp)
) WITH (fillfactor = 50);

-- Rows that can never be sent. Each holds its LP, visibly, until an operator retries it.
CREATE TABLE mqlayer_app.set_aside (
    topic_id     int NOT NULL,
    lp           smallint NOT NULL,
    seq          bigint NOT NULL,
    reason       text NOT NULL,
    set_aside_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT set_aside_key PRIMARY KEY (topic_id, lp)
);

CREATE SEQUENCE mqlayer_app.relay_epoch;

CREATE TABLE mqlayer_app.relay (
    relay_id    text NOT NULL,
    lease_until timestamptz NOT NULL,
    CONSTRAINT relay_key PRIMARY KEY (relay_id)
);

-- Sixteen sets of 64 LPs, each with the relay that works on it. For sharing the work only: the chain keeps the order.
CREATE TABLE mqlayer_app.lp_set (
    lp_set      smallint NOT NULL,
    relay_id    text,
    epoch       bigint NOT NULL DEFAULT 0,
    lease_until timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT lp_set_key PRIMARY KEY (lp_set),
    CONSTRAINT lp_set_range CHECK (lp_set BETWEEN 0 AND 15)
);
INSERT INTO mqlayer_app.lp_set (lp_set) SELECT generate_series(0, 15);

-- LP of a key: the first two bytes, big-endian, of the SHA-256 of its UTF-8, mod 1024: the last ten bits of the second
-- to fourth hex digits. STABLE, as convert_to is: declared IMMUTABLE it would not be inlined, and every call would pay.
CREATE FUNCTION mqlayer_app.lp_v1(p_key text) RETURNS smallint LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (('x' || substr(encode(sha256(convert_to(p_key, 'UTF8')), 'hex'), 2, 3))::bit(12)::int & 1023)::smallint;

CREATE FUNCTION mqlayer_app.headers_check_v1(p_headers jsonb) RETURNS void LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog, mqlayer_app AS $$
BEGIN
    IF jsonb_typeof(p_headers) <> 'object' THEN
        RAISE EXCEPTION 'headers must be a JSON object of strings' USING ERRCODE = 'MQ004';
    ELSIF (SELECT count(*) > 32 OR sum(octet_length(key) + octet_length(value)) > 8192 FROM jsonb_each_text(p_headers)) THEN
        RAISE EXCEPTION 'at most 32 headers and 8192 bytes of them' USING ERRCODE = 'MQ004';
    ELSIF EXISTS (SELECT FROM jsonb_each(p_headers) WHERE jsonb_typeof(value) <> 'string') THEN
        RAISE EXCEPTION 'header values must be strings' USING ERRCODE = 'MQ004';
    ELSIF EXISTS (SELECT FROM jsonb_object_keys(p_headers) AS name WHERE name LIKE 'mq-%') THEN
        RAISE EXCEPTION 'header names that begin with mq- are reserved' USING ERRCODE = 'MQ004';
    END IF;
END $$;

-- Publish one message in the caller's transaction; returns its seq. See publish_many_v1 for several.
-- All in one function, and the LP computed in place: a nested call, above all of a SQL function, costs as much as the
-- row itself. The counter is locked before the id is drawn, so that within an LP ids and seqs have one order.
CREATE FUNCTION mqlayer_app.publish_v1(p_topic text, p_key text, p_body bytea, p_headers jsonb DEFAULT NULL)
    RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_hash bytea;
    v_lp smallint;
    v_topic_id int;
    v_limit int;
    v_seq bigint;
    v_at timestamptz;
BEGIN
    IF p_key IS NULL THEN
        v_lp := floor(random() * 1024);
    ELSE
        IF octet_length(p_key) > 512 THEN
            RAISE EXCEPTION 'message key of % bytes, the limit is 512', octet_length(p_key)
                USING ERRCODE = 'MQ002', HINT = 'use an id as the key';
        END IF;
        v_hash := sha256(convert_to(p_key, 'UTF8'));
        v_lp := (get_byte(v_hash, 0) & 3) << 8 | get_byte(v_hash, 1);
    END IF;
    IF p_headers IS NOT NULL THEN
        PERFORM mqlayer_app.headers_check_v1(p_headers);
    END IF;
    UPDATE mqlayer_app.counter c SET seq = c.seq + 1 WHERE c.topic = p_topic AND c.lp = v_lp
        RETURNING c.seq, c.topic_id, c.body_limit INTO v_seq, v_topic_id, v_limit;
    IF v_seq IS NULL THEN
        RAISE EXCEPTION 'unknown topic "%"', p_topic
            USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
    END IF;
    IF p_body IS NULL THEN
        RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
    ELSIF octet_length(p_body) > v_limit THEN
        RAISE EXCEPTION 'body of % bytes, topic "%" takes %', octet_length(p_body), p_topic, v_limit
            USING ERRCODE = 'MQ003', HINT = 'store it elsewhere and send a reference';
    END IF;
    v_at := clock_timestamp();
    INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
        VALUES (nextval('mqlayer_app.outbox_number'), v_topic_id, v_lp,
                floor(date_part('epoch', v_at) / 900)::bigint & 3, v_seq, v_at, p_key, p_headers, p_body);
    RETURN v_seq;
END $$;

-- Publish several messages in the caller's transaction; returns how many. Messages of one key keep their order in the
-- arrays. LPs are taken in one order, the same in every session, so that two callers can't deadlock; p_headers may be
-- null or hold nulls.
CREATE FUNCTION mqlayer_app.publish_many_v1(p_topics text[], p_keys text[], p_bodies bytea[], p_headers jsonb[] DEFAULT NULL)
    RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
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
    IF cardinality(p_keys) <> cardinality(p_topics) OR cardinality(p_bodies) <> cardinality(p_topics)
       OR cardinality(p_headers) <> cardinality(p_topics) THEN
        RAISE EXCEPTION 'arrays of different lengths' USING ERRCODE = 'MQ005';
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
            RAISE EXCEPTION 'unknown topic "%"', v_group.topic
                USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
        END IF;
        IF v_group.no_body THEN
            RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
        ELSIF v_group.body_size > v_limit THEN
            RAISE EXCEPTION 'body of % bytes, topic "%" takes %', v_group.body_size, v_group.topic, v_limit
                USING ERRCODE = 'MQ003', HINT = 'store it elsewhere and send a reference';
        END IF;
        v_at := clock_timestamp();
        INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
            SELECT nextval('mqlayer_app.outbox_number'), v_topic_id, v_group.lp,
                   floor(date_part('epoch', v_at) / 900)::bigint & 3, v_seq + m.place, v_at, v_keys[m.n], v_headers[m.n], v_bodies[m.n]
            FROM (SELECT n, place FROM unnest(v_group.numbers) WITH ORDINALITY AS u(n, place) ORDER BY place) AS m;
    END LOOP;
    RETURN cardinality(p_topics);
END $$;

-- The fence: the highest epoch seen per group and LP, and the last applied seq per key.
CREATE TABLE mqlayer_app.fence_epoch (
    group_id int NOT NULL,
    lp       smallint NOT NULL,
    epoch    bigint NOT NULL,
    CONSTRAINT fence_epoch_key PRIMARY KEY (group_id, lp)
) WITH (fillfactor = 50);

CREATE TABLE mqlayer_app.fence_applied (
    group_id   int NOT NULL,
    lp         smallint NOT NULL,
    -- Negative for messages without a key: each stands alone, under its seq as key.
    source_id  int NOT NULL,
    key        text NOT NULL,
    -- The newest seek under which the group was to apply again what it had applied, and came to this key.
    replay     int NOT NULL DEFAULT 0,
    seq        bigint NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT fence_applied_key PRIMARY KEY (group_id, lp, key, source_id)
) WITH (fillfactor = 70);

-- Check in the effect's own transaction that the epoch is current for the LP and that the message was not applied.
-- Answers 'current' (go on; noted as applied when the transaction commits), 'applied' or 'stale' (roll back).
-- A stopped process must not hold its LP for ever: its open transaction ends after 60 idle seconds at the latest.
CREATE FUNCTION mqlayer_app.fence_v1(p_group_id int, p_lp smallint, p_source_id int, p_key text, p_seq bigint,
                                     p_epoch bigint, p_replay int DEFAULT 0, OUT answer text, OUT epoch bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
BEGIN
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

-- Raise the epoch of a range of LPs when a new owner takes them, so that an earlier owner's effects are refused even
-- where the new owner has not handled anything yet. Rows that an open effect holds are left to their next fence call.
CREATE FUNCTION mqlayer_app.fence_raise_v1(p_group_id int, p_lp_from smallint, p_lp_to smallint, p_epoch bigint)
    RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_count int;
BEGIN
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

-- Forget applied seqs that no redelivery can reach any more; at most p_limit rows a call.
CREATE FUNCTION mqlayer_app.fence_clean_v1(p_horizon interval, p_limit int) RETURNS int LANGUAGE sql
    SET search_path = pg_catalog, mqlayer_app AS $$
    WITH gone AS (
        DELETE FROM mqlayer_app.fence_applied WHERE ctid IN (
            SELECT ctid FROM mqlayer_app.fence_applied WHERE applied_at < now() - p_horizon LIMIT p_limit)
        RETURNING 1)
    SELECT count(*)::int FROM gone
$$;

-- Empty one slot of the outbox if every row in it is relayed. The lock proves that no open transaction wrote to the slot:
-- such a one would hold it; so NOWAIT answers 'busy' and nothing waits behind us. The slot before the current one is
-- left alone too: its rows are younger than what a Redis with a lazier fsync than "always" may lose. Nothing is emptied
-- before an outbox that may lack commits is recovered: until then nobody notes what nodes have lost.
CREATE FUNCTION mqlayer_app.outbox_rotate_v1(p_slot smallint) RETURNS text LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_table text := format('mqlayer_app.outbox_%s', p_slot);
    v_slots bigint := floor(date_part('epoch', clock_timestamp()) / 900);
    v_waits boolean;
    v_holds boolean;
BEGIN
    IF current_setting('transaction_isolation') <> 'read committed' THEN
        -- A snapshot from before the lock would not show what was committed in between, and that would be lost.
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
    IF EXISTS (SELECT FROM mqlayer_app.identity i
               WHERE i.timeline = -1 OR (i.timeline <> 0 AND mqlayer_app.timeline_v1() NOT IN (i.timeline, 0))) THEN
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

-- Give an outbox that was copied an identity of its own, so that its relay opens a new source whose numbers begin at 1.
-- With p_keep it takes its original's place: the original's source ends, and what is not recorded as relayed is
-- numbered anew and sent again; without, the outbox is emptied. All tables that relays write to are locked first, the
-- identity last: a relay has locked the one it writes to when it locks the identity that it goes by.
CREATE FUNCTION mqlayer_app.outbox_renew_v1(p_keep boolean) RETURNS bigint LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_count bigint;
BEGIN
    IF EXISTS (SELECT FROM mqlayer_app.lp_set WHERE lease_until >= now()) THEN
        RAISE EXCEPTION 'a relay works on this outbox' USING ERRCODE = 'MQ005', HINT = 'stop its relays first';
    END IF;
    LOCK TABLE mqlayer_app.counter, mqlayer_app.outbox, mqlayer_app.relayed, mqlayer_app.set_aside
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
    TRUNCATE mqlayer_app.relayed, mqlayer_app.set_aside;
    UPDATE mqlayer_app.identity i SET outbox_uuid = gen_random_uuid(), timeline = DEFAULT,
        replaces = CASE WHEN p_keep THEN array_append(i.replaces, i.outbox_uuid) END;
    SELECT count(*) INTO v_count FROM mqlayer_app.outbox;
    RETURN v_count;
END $$;

-- Everybody may execute a new function until this is said; default privileges of a schema can't take it away. Each later
-- migration that makes a function says it again.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer_app FROM PUBLIC;
