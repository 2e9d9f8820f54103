-- Delayed messages: rows that wait for their time, and then take their place in the outbox.

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
CREATE INDEX delayed_due_at ON mqlayer_app.delayed (due_at);
-- The order in which an LP's rows are released.
CREATE INDEX delayed_order ON mqlayer_app.delayed (topic_id, lp, due_at, delayed_id);

-- Publish a message at a time, by this database's clock, in the caller's transaction; returns the number by which it can
-- be cancelled. No LP is locked: it takes its place in its key's order when it is released, not now.
CREATE FUNCTION mqlayer_app.publish_at_v1(p_topic text, p_key text, p_body bytea, p_at timestamptz, p_headers jsonb DEFAULT NULL)
    RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_topic_id int;
    v_limit int;
    v_id bigint;
BEGIN
    IF octet_length(p_key) > 512 THEN
        RAISE EXCEPTION 'message key of % bytes, the limit is 512', octet_length(p_key)
            USING ERRCODE = 'MQ002', HINT = 'use an id as the key';
    ELSIF p_at IS NULL OR NOT isfinite(p_at) THEN
        RAISE EXCEPTION 'a delayed message needs a time' USING ERRCODE = 'MQ005', HINT = 'now() + interval ''1 hour''';
    ELSIF p_body IS NULL THEN
        RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
    END IF;
    IF p_headers IS NOT NULL THEN
        PERFORM mqlayer_app.headers_check_v1(p_headers);
    END IF;
    SELECT t.topic_id, t.body_limit INTO v_topic_id, v_limit FROM mqlayer_app.topic t WHERE t.name = p_topic;
    IF v_topic_id IS NULL THEN
        RAISE EXCEPTION 'unknown topic "%"', p_topic
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
CREATE FUNCTION mqlayer_app.cancel_delayed_v1(p_delayed_id bigint) RETURNS boolean LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer_app AS $$
BEGIN
    DELETE FROM mqlayer_app.delayed WHERE delayed_id = p_delayed_id;
    RETURN FOUND;
END $$;

-- Move messages that are due to the outbox, per LP in the order of their times, then of their numbers: one transaction,
-- so each moves once. Under the LP's counter, so that two calls can't part an LP between them. An LP whose counter
-- somebody holds is passed by, since waiting could deadlock; one in which a message is overdue by a second is waited for,
-- one such a call, for p_wait_ms at most. Returns how many moved, and in how many seconds the next one is due.
CREATE FUNCTION mqlayer_app.delayed_release_v1(p_limit int, p_wait_ms int, OUT released int, OUT next_s double precision)
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_now timestamptz := clock_timestamp();
    v_lp record;
    v_row record;
    v_seq bigint;
    v_at timestamptz;
    v_waited boolean := p_wait_ms = 0;
BEGIN
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

REVOKE EXECUTE ON FUNCTION mqlayer_app.publish_at_v1(text, text, bytea, timestamptz, jsonb) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.cancel_delayed_v1(bigint) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.delayed_release_v1(int, int) FROM PUBLIC;
