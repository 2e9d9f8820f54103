-- protocol 2
-- publish_v2 is publish_v1 at a price that does not grow with the messages of a transaction. Each of them leaves a version
-- of its LP's counter that nothing removes before COMMIT, and a search by index passes them all: 40,000 messages of one
-- key cost 1.3 ms each. A transaction of so many remembers in settings of its own where the newest version is.

-- Refuse a message of an unknown topic, which has no limit, or one whose body is missing or over the limit.
CREATE FUNCTION mqlayer_app.check_body_v1(p_topic text, p_body bytea, p_limit int) RETURNS void
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF p_limit IS NULL THEN
        RAISE EXCEPTION 'unknown topic "%"', left(p_topic, 63)
            USING ERRCODE = 'MQ001', HINT = 'create it: mqlayer topic create NAME';
    ELSIF p_body IS NULL THEN
        RAISE EXCEPTION 'a message needs a body' USING ERRCODE = 'MQ005', HINT = 'it may be empty, not null';
    ELSIF octet_length(p_body) > p_limit THEN
        RAISE EXCEPTION 'body of % bytes, topic "%" takes %', octet_length(p_body), p_topic, p_limit
            USING ERRCODE = 'MQ003', HINT = 'switch on large bodies, or store it elsewhere and send a reference';
    END IF;
END $$;

-- A further message of a transaction of many: publish_v2 has checked right and key.
-- The remembered place is a hint. An UPDATE that names topic and LP besides can find the counter's one visible version
-- there or nothing, whatever the setting holds: other functions may have moved the counter on, and a caller may set it.
-- A setting for the transaction goes back with a savepoint, and ends with the transaction.
CREATE FUNCTION mqlayer_app.publish_further_v1(p_topic text, p_key text, p_body bytea, p_headers jsonb) RETURNS bigint
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_lp smallint := coalesce(mqlayer_app.lp_v1(p_key), floor(random() * 1024)::smallint);
    v_setting text := 'mqlayer_app.counter_' || v_lp;
    -- Nothing else is a place: no setting makes the call fail.
    v_place text := substring(current_setting(v_setting, true) FROM '^[(][0-9]{1,9},[0-9]{1,4}[)]$');
    v_new_place tid;
    v_topic_id int;
    v_limit int;
    v_seq bigint;
    v_at timestamptz;
BEGIN
    IF v_place IS NOT NULL THEN
        UPDATE mqlayer_app.counter c SET seq = c.seq + 1
            WHERE c.ctid = v_place::tid AND c.topic = p_topic AND c.lp = v_lp
            RETURNING c.seq, c.topic_id, c.body_limit, clock_timestamp(), c.ctid
            INTO v_seq, v_topic_id, v_limit, v_at, v_new_place;
    END IF;
    IF v_seq IS NULL THEN
        UPDATE mqlayer_app.counter c SET seq = c.seq + 1 WHERE c.topic = p_topic AND c.lp = v_lp
            RETURNING c.seq, c.topic_id, c.body_limit, clock_timestamp(), c.ctid
            INTO v_seq, v_topic_id, v_limit, v_at, v_new_place;
    END IF;
    IF (octet_length(p_body) <= v_limit) IS NOT TRUE THEN
        PERFORM mqlayer_app.check_body_v1(p_topic, p_body, v_limit);
    END IF;
    -- An LP with few messages in the transaction is as quick by the index.
    IF v_place IS NOT NULL OR v_seq & 63 = 0 THEN
        PERFORM set_config(v_setting, v_new_place::text, true);
    END IF;
    INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
        VALUES (nextval('mqlayer_app.outbox_number'), v_topic_id, v_lp,
                floor(date_part('epoch', v_at) / 900)::bigint & 3, v_seq, v_at, p_key, p_headers, p_body);
    RETURN v_seq;
END $$;

-- Publish one message in the caller's transaction. Returns its seq. See publish_many_v1 for several.
-- All in one function, and the LP computed in place, as in publish_v1, which says why. From a message on whose seq can be
-- divided by 256, the transaction counts as one of many: the condition costs nothing, and a chain of so many versions
-- little.
CREATE FUNCTION mqlayer_app.publish_v2(p_topic text, p_key text, p_body bytea, p_headers jsonb DEFAULT NULL)
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
       OR octet_length(p_key) > 512 OR p_headers IS NOT NULL OR current_setting('mqlayer_app.counters', true) > '' THEN
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
        IF current_setting('mqlayer_app.counters', true) > '' THEN
            RETURN mqlayer_app.publish_further_v1(p_topic, p_key, p_body, p_headers);
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
    IF (octet_length(p_body) <= v_limit AND v_seq & 255 > 0) IS NOT TRUE THEN
        PERFORM mqlayer_app.check_body_v1(p_topic, p_body, v_limit), set_config('mqlayer_app.counters', 'many', true);
    END IF;
    INSERT INTO mqlayer_app.outbox (id, topic_id, lp, slot, seq, created_at, key, headers, body)
        VALUES (nextval('mqlayer_app.outbox_number'), v_topic_id, v_lp,
                floor(date_part('epoch', v_at) / 900)::bigint & 3, v_seq, v_at, p_key, p_headers, p_body);
    RETURN v_seq;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer_app.check_body_v1, mqlayer_app.publish_further_v1, mqlayer_app.publish_v2 FROM PUBLIC;
