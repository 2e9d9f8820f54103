-- Dedup ids of messages that go through an outbox: a repetition within the window is not published again.

-- Who reads it holds the counter row of the LP, so a row of a committed publisher is seen, and nobody adds one meanwhile.
CREATE TABLE mqlayer_app.dedup (
    topic_id     int NOT NULL,
    lp           smallint NOT NULL,
    token        bytea NOT NULL,
    seq          bigint NOT NULL,
    published_at timestamptz NOT NULL,
    CONSTRAINT dedup_key PRIMARY KEY (topic_id, lp, token)
);
CREATE INDEX dedup_published_at ON mqlayer_app.dedup (published_at);

-- What is compared of an id: it stands for the key too (without one, for the topic), and is as short whatever they are.
CREATE FUNCTION mqlayer_app.dedup_token_v1(p_key text, p_dedup_id text) RETURNS bytea LANGUAGE sql STABLE
    SET search_path = pg_catalog, mqlayer_app
    RETURN substr(sha256(coalesce(convert_to(p_key, 'UTF8'), '\xff'::bytea) || '\xff'::bytea || convert_to(p_dedup_id, 'UTF8')), 1, 16);

-- Write one message of a given LP; of an id that is known nothing but the first one's seq. For the functions below only.
CREATE FUNCTION mqlayer_app.outbox_put_v1(p_topic text, p_lp smallint, p_key text, p_body bytea, p_headers jsonb,
                                          p_dedup_id text, OUT seq bigint, OUT duplicate boolean)
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_topic_id int;
    v_limit int;
    v_token bytea;
    v_at timestamptz;
BEGIN
    IF octet_length(p_key) > 512 THEN
        RAISE EXCEPTION 'message key of % bytes, the limit is 512', octet_length(p_key)
            USING ERRCODE = 'MQ002', HINT = 'use an id as the key';
    ELSIF p_dedup_id = '' OR octet_length(p_dedup_id) > 128 THEN
        RAISE EXCEPTION 'a dedup id has 1 to 128 bytes' USING ERRCODE = 'MQ005';
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
        RAISE EXCEPTION 'unknown topic "%"', p_topic
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
CREATE FUNCTION mqlayer_app.publish_once_v1(p_topic text, p_key text, p_body bytea, p_dedup_id text,
                                            p_headers jsonb DEFAULT NULL, OUT seq bigint, OUT duplicate boolean)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
BEGIN
    IF p_dedup_id IS NULL THEN
        RAISE EXCEPTION 'publish_once_v1 needs a dedup id' USING ERRCODE = 'MQ005', HINT = 'without one: publish_v1';
    END IF;
    SELECT o.seq, o.duplicate INTO publish_once_v1.seq, publish_once_v1.duplicate
    FROM mqlayer_app.outbox_put_v1(p_topic, mqlayer_app.lp_v1(coalesce(p_key, p_dedup_id)), p_key, p_body, p_headers, p_dedup_id) o;
END $$;

-- Publish several messages, those with a dedup id as publish_once_v1 does, in the order and with the locks of
-- publish_many_v1; returns how many were published.
CREATE FUNCTION mqlayer_app.publish_many_once_v1(p_topics text[], p_keys text[], p_bodies bytea[], p_dedup_ids text[],
                                                 p_headers jsonb[] DEFAULT NULL)
    RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_one record;
    v_duplicate boolean;
    v_count int := 0;
BEGIN
    IF cardinality(p_keys) <> cardinality(p_topics) OR cardinality(p_bodies) <> cardinality(p_topics)
       OR cardinality(p_dedup_ids) <> cardinality(p_topics) OR cardinality(p_headers) <> cardinality(p_topics) THEN
        RAISE EXCEPTION 'arrays of different lengths' USING ERRCODE = 'MQ005';
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

REVOKE EXECUTE ON FUNCTION mqlayer_app.dedup_token_v1(text, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.outbox_put_v1(text, smallint, text, bytea, jsonb, text) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.publish_once_v1(text, text, bytea, text, jsonb) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.publish_many_once_v1(text[], text[], bytea[], text[], jsonb[]) FROM PUBLIC;
