-- Releasing delayed messages: topics take turns. It looked at the first ones of all, so a transaction that held counters of
-- its topic, with more due messages than a call moves, or that had cancelled the first ones, kept those of all others.

-- In place of the one by time alone.
CREATE INDEX delayed_topic_due_at ON mqlayer_app.delayed (topic_id, due_at);
DROP INDEX mqlayer_app.delayed_due_at;

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

-- As of 0011, but each topic has its share of a call, and what one leaves of it goes to the others. A topic whose first
-- messages wait behind busy counters has those of its other LPs moved. Of topics with overdue messages in a busy LP one is
-- waited for by chance: the one with the oldest might be busy for ever.
CREATE OR REPLACE FUNCTION mqlayer_app.delayed_release_v1(p_limit int, p_wait_ms int, OUT released int, OUT next_s double precision)
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
        -- A snapshot from before the counter was locked would not show what was released or cancelled in between.
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
        -- Those with the least first: what they don't need of their shares is for those behind.
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
                    -- Somebody cancels it and has not committed: what is behind it waits, in case that is taken back.
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
