-- What a caller can do to the functions of this schema, and what his session can: nothing beyond what they promise.
--
-- 1. Names are looked up in pg_temp last, see sql/owner/paths.sql.
-- 2. Every argument has bounds. One that is out of them is refused as MQ009.
-- 3. What publishes, releases or fences commits synchronously, whatever the session, its role or the database says. Set
--    within the functions, for the transaction: a SET clause of a function ends with the function, before the commit.
--    "local", "remote_write" and the like stay: the commit is on this server's disk then.

-- Raise MQ009 for a value outside of its bounds; null is outside. Called only where a function found that one is.
CREATE FUNCTION mqlayer_app.within_v1(p_name text, p_value numeric, p_low numeric, p_high numeric) RETURNS void
    LANGUAGE plpgsql IMMUTABLE SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF (p_value BETWEEN p_low AND p_high) IS NOT TRUE THEN
        RAISE EXCEPTION '% is %, its bounds are % and %', p_name, left(coalesce(p_value::text, 'null'), 40), p_low, p_high
            USING ERRCODE = 'MQ009', HINT = 'correct the call: nothing makes this value valid';
    END IF;
END $$;

-- The header for some tags: publish_v1(…, headers || tags_v1('eu', 'vip')). "<hashes>:<names>", both in the order of the
-- names, which are there once each; a hash is the first 8 hex digits of the SHA-256.
CREATE OR REPLACE FUNCTION mqlayer_app.tags_v1(VARIADIC p_tags text[]) RETURNS jsonb LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
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

-- In place of the first one, not beside it: what publish_v1 and publish_many_v1 refuse grows less by one name, and
-- callers and grants stay as they are.
CREATE OR REPLACE FUNCTION mqlayer_app.headers_check_v1(p_headers jsonb) RETURNS void LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
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
    IF (SELECT count(*) > 32 OR sum(octet_length(key) + octet_length(value)) > 8192 FROM jsonb_each_text(p_headers)) THEN
        RAISE EXCEPTION 'at most 32 headers and 8192 bytes of them'
            USING ERRCODE = 'MQ004', HINT = 'put the rest into the body';
    ELSIF EXISTS (SELECT FROM jsonb_object_keys(p_headers) AS name WHERE name LIKE 'mq-%') THEN
        RAISE EXCEPTION 'header names that begin with mq- are reserved' USING ERRCODE = 'MQ004', HINT = 'rename the header';
    END IF;
END $$;

-- Publish one message in the caller's transaction; returns its seq. See publish_many_v1 for several.
-- All in one function, and the LP computed in place: a nested call, above all of a SQL function, costs as much as the
-- row itself. The counter is locked before the id is drawn, so that within an LP ids and seqs have one order.
CREATE OR REPLACE FUNCTION mqlayer_app.publish_v1(p_topic text, p_key text, p_body bytea, p_headers jsonb DEFAULT NULL)
    RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_hash bytea;
    v_lp smallint;
    v_topic_id int;
    v_limit int;
    v_seq bigint;
    v_at timestamptz;
BEGIN
    -- A commit that is lost after it was relayed, or after its effect was settled, is lost for good.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
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
        RAISE EXCEPTION 'unknown topic "%"', left(p_topic, 63)
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
CREATE OR REPLACE FUNCTION mqlayer_app.publish_many_v1(p_topics text[], p_keys text[], p_bodies bytea[], p_headers jsonb[] DEFAULT NULL)
    RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
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

-- Write one message of a given LP; of an id that is known nothing but the first one's seq. For the functions below only.
CREATE OR REPLACE FUNCTION mqlayer_app.outbox_put_v1(p_topic text, p_lp smallint, p_key text, p_body bytea, p_headers jsonb,
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
    -- Locked before the id is looked for: what a publisher before us wrote is committed by then, and seen.
    SELECT c.topic_id, c.body_limit INTO v_topic_id, v_limit FROM mqlayer_app.counter c
        WHERE c.topic = p_topic AND c.lp = p_lp FOR NO KEY UPDATE;
    IF v_topic_id IS NULL THEN
        RAISE EXCEPTION 'unknown topic "%"', left(p_topic, 63)
            USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
    ELSIF octet_length(p_body) > v_limit THEN
        RAISE EXCEPTION 'body of % bytes, topic "%" takes %', octet_length(p_body), p_topic, v_limit
            USING ERRCODE = 'MQ003', HINT = 'store it elsewhere and send a reference';
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
-- forgotten yet, nothing is published, and seq is the first one's. Without a key the id is the topic's, and names the LP.
CREATE OR REPLACE FUNCTION mqlayer_app.publish_once_v1(p_topic text, p_key text, p_body bytea, p_dedup_id text,
                                            p_headers jsonb DEFAULT NULL, OUT seq bigint, OUT duplicate boolean)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF p_dedup_id IS NULL THEN
        RAISE EXCEPTION 'publish_once_v1 needs a dedup id' USING ERRCODE = 'MQ005', HINT = 'without one: publish_v1';
    END IF;
    SELECT o.seq, o.duplicate INTO publish_once_v1.seq, publish_once_v1.duplicate
    FROM mqlayer_app.outbox_put_v1(p_topic, mqlayer_app.lp_v1(coalesce(p_key, p_dedup_id)), p_key, p_body, p_headers, p_dedup_id) o;
END $$;

-- Publish several messages, those with a dedup id as publish_once_v1 does, in the order and with the locks of
-- publish_many_v1; returns how many were published.
CREATE OR REPLACE FUNCTION mqlayer_app.publish_many_once_v1(p_topics text[], p_keys text[], p_bodies bytea[], p_dedup_ids text[],
                                                 p_headers jsonb[] DEFAULT NULL)
    RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_one record;
    v_duplicate boolean;
    v_count int := 0;
BEGIN
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

-- Publish a message at a time, by this database's clock, in the caller's transaction; returns the number by which it can
-- be cancelled. No LP is locked: it takes its place in its key's order when it is released, not now.
CREATE OR REPLACE FUNCTION mqlayer_app.publish_at_v1(p_topic text, p_key text, p_body bytea, p_at timestamptz, p_headers jsonb DEFAULT NULL)
    RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_topic_id int;
    v_limit int;
    v_id bigint;
BEGIN
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
    SELECT t.topic_id, t.body_limit INTO v_topic_id, v_limit FROM mqlayer_app.topic t WHERE t.name = p_topic;
    IF v_topic_id IS NULL THEN
        RAISE EXCEPTION 'unknown topic "%"', left(p_topic, 63)
            USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
    ELSIF octet_length(p_body) > v_limit THEN
        RAISE EXCEPTION 'body of % bytes, topic "%" takes %', octet_length(p_body), p_topic, v_limit
            USING ERRCODE = 'MQ003', HINT = 'store it elsewhere and send a reference';
    END IF;
    INSERT INTO mqlayer_app.delayed (topic_id, lp, due_at, key, headers, body)
        VALUES (v_topic_id, coalesce(mqlayer_app.lp_v1(p_key), floor(random() * 1024)::smallint), p_at, p_key, p_headers, p_body)
        RETURNING delayed_id INTO v_id;
    RETURN v_id;
END $$;

-- Cancel a delayed message in the caller's transaction; false where it was released or cancelled before.
CREATE OR REPLACE FUNCTION mqlayer_app.cancel_delayed_v1(p_delayed_id bigint) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_delayed_id BETWEEN 1 AND 9007199254740991) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_delayed_id', p_delayed_id, 1, 9007199254740991);
    END IF;
    DELETE FROM mqlayer_app.delayed WHERE delayed_id = p_delayed_id;
    RETURN FOUND;
END $$;

-- Move messages that are due to the outbox, per LP in the order of their times, then of their numbers: one transaction,
-- so each moves once. Under the LP's counter, so that two calls can't part an LP between them. An LP whose counter
-- somebody holds is passed by, since waiting could deadlock; one in which a message is overdue by a second is waited for,
-- one such a call, for p_wait_ms at most. Returns how many moved, and in how many seconds the next one is due.
CREATE OR REPLACE FUNCTION mqlayer_app.delayed_release_v1(p_limit int, p_wait_ms int, OUT released int, OUT next_s double precision)
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lp record;
    v_row record;
    v_seq bigint;
    v_at timestamptz;
    v_waited boolean := p_wait_ms = 0;
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
        -- A snapshot from before the counter was locked would not show what was released or cancelled in between.
        RAISE EXCEPTION 'releasing needs READ COMMITTED, not %', current_setting('transaction_isolation')
            USING ERRCODE = 'MQ005', HINT = 'SET TRANSACTION ISOLATION LEVEL READ COMMITTED first';
    END IF;
    released := 0;
    FOR v_lp IN
        SELECT topic_id, lp, min(due_at) AS due_at
        FROM (SELECT d.topic_id, d.lp, d.due_at FROM mqlayer_app.delayed d WHERE d.due_at <= v_now ORDER BY d.due_at LIMIT p_limit) AS due
        GROUP BY topic_id, lp ORDER BY min(due_at)
    LOOP
        SELECT c.seq INTO v_seq FROM mqlayer_app.counter c
            WHERE c.topic_id = v_lp.topic_id AND c.lp = v_lp.lp FOR NO KEY UPDATE SKIP LOCKED;
        IF NOT FOUND AND NOT v_waited AND v_lp.due_at < v_now - interval '1 second' THEN
            v_waited := true;
            PERFORM set_config('lock_timeout', p_wait_ms::text, true);
            BEGIN
                SELECT c.seq INTO v_seq FROM mqlayer_app.counter c
                    WHERE c.topic_id = v_lp.topic_id AND c.lp = v_lp.lp FOR NO KEY UPDATE;
            EXCEPTION WHEN lock_not_available OR deadlock_detected THEN
                v_seq := NULL;
            END;
        END IF;
        CONTINUE WHEN v_seq IS NULL;
        EXIT WHEN released >= p_limit;
        v_at := clock_timestamp();
        FOR v_row IN
            SELECT * FROM mqlayer_app.delayed d
            WHERE d.topic_id = v_lp.topic_id AND d.lp = v_lp.lp AND d.due_at <= v_now ORDER BY d.due_at, d.delayed_id LIMIT p_limit
        LOOP
            PERFORM FROM mqlayer_app.delayed d WHERE d.delayed_id = v_row.delayed_id FOR UPDATE SKIP LOCKED;
            -- Somebody cancels it and has not committed: what is behind it waits, in case that is taken back.
            EXIT WHEN NOT FOUND;
            DELETE FROM mqlayer_app.delayed d WHERE d.delayed_id = v_row.delayed_id;
            v_seq := v_seq + 1;
            INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
                VALUES (nextval('mqlayer_app.outbox_number'), v_row.topic_id, v_row.lp,
                        floor(date_part('epoch', v_at) / 900)::bigint & 3, v_seq, v_at, v_row.key, v_row.headers, v_row.body);
            released := released + 1;
        END LOOP;
        UPDATE mqlayer_app.counter c SET seq = v_seq WHERE c.topic_id = v_lp.topic_id AND c.lp = v_lp.lp AND c.seq <> v_seq;
    END LOOP;
    SELECT date_part('epoch', min(due_at) - clock_timestamp()) INTO next_s FROM mqlayer_app.delayed;
END $$;

-- Check in the effect's own transaction that the epoch is current for the LP and that the message was not applied.
-- Answers 'current' (go on; noted as applied when the transaction commits), 'applied' or 'stale' (roll back).
-- A stopped process must not hold its LP for ever: its open transaction ends after 60 idle seconds at the latest.
CREATE OR REPLACE FUNCTION mqlayer_app.fence_v1(p_group_id int, p_lp smallint, p_source_id int, p_key text, p_seq bigint,
                                     p_epoch bigint, p_replay int DEFAULT 0, OUT answer text, OUT epoch bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
BEGIN
    -- A commit that is lost after it was relayed, or after its effect was settled, is lost for good.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    -- A source below 0: what a replay of the archive gave, whose effects are noted apart.
    IF (p_group_id BETWEEN 1 AND 2147483647
       AND p_lp BETWEEN 0 AND 1023
       AND p_source_id BETWEEN -2147483647 AND 2147483647
       AND (p_key IS NULL OR octet_length(p_key) BETWEEN 0 AND 512)
       AND p_seq BETWEEN 1 AND 9007199254740991
       AND p_epoch BETWEEN 1 AND 9007199254740991
       AND p_replay BETWEEN 0 AND 2147483647) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_group_id', p_group_id, 1, 2147483647),
                mqlayer_app.within_v1('p_lp', p_lp, 0, 1023),
                mqlayer_app.within_v1('p_source_id', p_source_id, -2147483647, 2147483647),
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

-- The fence for the messages of a batch: as fence_v1 for each of them, in one call.
-- Answers in the order of the messages: 'current', 'applied' or 'stale'; with one that is stale the others may have
-- none (null): the transaction is to be rolled back.
-- Rows are locked in the order of LP and key, whatever the order of the messages: two owners whose batches have keys in
-- common must not deadlock. Of one key's messages the first ones that are applied are asked for one by one, of the others
-- only the last is noted: it stands for all before it, and no other transaction comes between once the row is ours.
CREATE OR REPLACE FUNCTION mqlayer_app.fence_many_v1(p_group_id int, p_lps smallint[], p_source_ids int[], p_keys text[],
                                          p_seqs bigint[], p_epochs bigint[], p_replays int[],
                                          OUT answers text[], OUT epochs bigint[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v record;
    v_answer record;
    -- The key that is open: its row is ours. Its last seq that may go on, and the one that is noted.
    v_open boolean := false;
    v_lp smallint;
    v_source_id int;
    v_key text;
    v_epoch bigint;
    v_replay int;
    v_seq bigint;
    v_noted bigint;
    v_count int := cardinality(p_seqs);
BEGIN
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
CREATE OR REPLACE FUNCTION mqlayer_app.fence_raise_v1(p_group_id int, p_lp_from smallint, p_lp_to smallint, p_epoch bigint)
    RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_count int;
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_group_id BETWEEN 1 AND 2147483647
       AND p_lp_from BETWEEN 0 AND 1023
       AND p_lp_to BETWEEN p_lp_from + 1 AND 1024
       AND p_epoch BETWEEN 1 AND 9007199254740991) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_group_id', p_group_id, 1, 2147483647),
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

-- Forget applied seqs that no redelivery can reach any more; at most p_limit rows a call.
CREATE OR REPLACE FUNCTION mqlayer_app.fence_clean_v1(p_horizon interval, p_limit int) RETURNS int LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
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

-- Note in the effect's own transaction that a message has its effect. Answers 'current' (go on; noted when the transaction
-- commits) or 'applied' (roll back). Of two that note it at once the second waits, and is answered by what became of the
-- first: so the transaction of a stopped process ends after 60 idle seconds at the latest.
CREATE OR REPLACE FUNCTION mqlayer_app.inbox_put_v1(p_group_id int, p_source_id int, p_lp smallint, p_seq bigint,
                                         p_name text DEFAULT NULL, p_seek int DEFAULT 0, p_replay bigint DEFAULT NULL)
    RETURNS text LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
BEGIN
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF (p_group_id BETWEEN 1 AND 2147483647
       AND p_source_id BETWEEN 1 AND 2147483647
       AND p_lp BETWEEN 0 AND 1023
       AND p_seq BETWEEN 1 AND 9007199254740991
       AND p_seek BETWEEN 0 AND 2147483647
       AND (p_replay IS NULL OR p_replay BETWEEN 1 AND 9007199254740991)) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_group_id', p_group_id, 1, 2147483647),
                mqlayer_app.within_v1('p_source_id', p_source_id, 1, 2147483647),
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

-- Take an event in the effect's own transaction: the entity goes on from its version as far as this event and what is held
-- reach. Answers what becomes of the event: 'due' (apply it), 'held', 'duplicate', 'full' (nothing was changed: the
-- entity's limits) or 'all_full' (the name's); and what is to be applied besides, as arrays by rising version, all of it
-- in the order of the versions. `current`: the version then. `alarm`: the next version has been missing for too long, and
-- this call is the one to tell. A null version stands for no event: what is due by an operator's word only.
-- The entity's row is locked to commit: two events of one entity wait for each other.
CREATE OR REPLACE FUNCTION mqlayer_app.version_take_v1(
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
    -- What comes next is missing since the first event behind it came, however long what came before it was.
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

-- Take what is due by an operator's word, of one entity; `entity` is null where there is none.
CREATE OR REPLACE FUNCTION mqlayer_app.version_released_v1(
    p_name text, p_gap_s double precision, OUT entity text, OUT versions bigint[], OUT bodies bytea[], OUT headers text[],
    OUT origins text[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
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

-- Say at which version an entity is; null: forget it. What is held up to there goes, with p_drop all that is held; what is
-- held right behind it is due. Returns how many held events went.
CREATE OR REPLACE FUNCTION mqlayer_app.version_set_v1(p_name text, p_entity text, p_version bigint, p_drop boolean DEFAULT false)
    RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_count int;
    v_bytes bigint;
    v_since timestamptz;
    v_next boolean;
BEGIN
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

-- Empty one slot of the outbox if every row in it is relayed. The lock proves that no open transaction wrote to the slot:
-- such a one would hold it; so NOWAIT answers 'busy' and nothing waits behind us. The slot before the current one is
-- left alone too: its rows are younger than what a Redis with a lazier fsync than "always" may lose. Nothing is emptied
-- before an outbox that may lack commits is recovered: until then nobody notes what nodes have lost.
CREATE OR REPLACE FUNCTION mqlayer_app.outbox_rotate_v1(p_slot smallint) RETURNS text LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
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

-- Everybody could call fence_many_v1, who may use the schema: what 0008 made was said of none.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer_app FROM PUBLIC;
