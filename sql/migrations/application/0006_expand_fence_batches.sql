-- protocol 2
-- fence_many_v2 is fence_many_v1 with three statements for a batch in place of four for each of its messages.

-- The fence for the messages of a batch: answers in the order of the messages, 'current', 'applied' or 'stale'. With one
-- that is stale the others may have none (null): roll the transaction back.
-- All epochs are locked first, in the order of LP, then all keys, in the order of LP and key: two owners whose batches
-- have keys in common do not deadlock. A key's several messages, and whatever is to be refused, are left to
-- fence_many_v1, which goes through the messages one by one.
-- Each row is found by a subquery of its own, by the whole of its key: joins, and arrays as conditions, got plans that
-- read a group's rows, or all.
CREATE FUNCTION mqlayer_app.fence_many_v2(p_group_id bigint, p_lps smallint[], p_source_ids bigint[], p_keys text[],
                                          p_seqs bigint[], p_epochs bigint[], p_replays int[],
                                          OUT answers text[], OUT epochs bigint[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
    v_count int := cardinality(p_seqs);
    v record;
    v_stale boolean;
    v_noted record;
BEGIN
    IF NOT mqlayer_app.may_consume_all_v1() THEN
        PERFORM mqlayer_app.check_group_v1(p_group_id);
    END IF;
    -- A commit that is lost after its effect was settled is lost for good.
    IF current_setting('synchronous_commit') = 'off' THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
    IF v_timeout = interval '0' OR v_timeout > interval '60 seconds' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '60s', true);
    END IF;
    IF (p_group_id BETWEEN 1 AND 9007199254740991 AND v_count BETWEEN 1 AND 10000
       AND cardinality(p_lps) = v_count AND cardinality(p_source_ids) = v_count AND cardinality(p_epochs) = v_count
       AND cardinality(p_replays) = v_count AND (p_keys IS NULL OR cardinality(p_keys) = v_count)
       AND (SELECT bool_and(u.lp BETWEEN 0 AND 1023
                            AND u.source_id BETWEEN -9007199254740991 AND 9007199254740991
                            AND (u.key IS NULL OR octet_length(u.key) BETWEEN 0 AND 512)
                            AND u.seq BETWEEN 1 AND 9007199254740991
                            AND u.epoch BETWEEN 1 AND 9007199254740991
                            AND u.replay BETWEEN 0 AND 2147483647)
            FROM unnest(p_lps, p_source_ids, p_keys, p_seqs, p_epochs, p_replays)
                AS u(lp, source_id, key, seq, epoch, replay))
       AND v_count = (SELECT count(*) FROM (
            SELECT DISTINCT u.lp, CASE WHEN u.key IS NULL THEN -u.source_id ELSE u.source_id END,
                            coalesce(u.key, u.seq::text)
            FROM unnest(p_lps, p_source_ids, p_keys, p_seqs) AS u(lp, source_id, key, seq)) AS one)) IS NOT TRUE THEN
        SELECT f.answers, f.epochs INTO answers, epochs
            FROM mqlayer_app.fence_many_v1(p_group_id, p_lps, p_source_ids, p_keys, p_seqs, p_epochs, p_replays) AS f;
        RETURN;
    END IF;
    IF EXISTS (SELECT FROM unnest(p_lps, p_epochs) AS u(lp, epoch)
               WHERE ((SELECT f.epoch FROM mqlayer_app.fence_epoch f
                       WHERE f.group_id = p_group_id AND f.lp = u.lp) >= u.epoch) IS NOT TRUE) THEN
        -- Raised before it is locked for sharing: two effects that both held the shared lock could not both raise it.
        FOR v IN SELECT u.lp, max(u.epoch) AS epoch FROM unnest(p_lps, p_epochs) AS u(lp, epoch) GROUP BY u.lp ORDER BY u.lp LOOP
            IF NOT EXISTS (SELECT FROM mqlayer_app.fence_epoch f
                           WHERE f.group_id = p_group_id AND f.lp = v.lp AND f.epoch >= v.epoch) THEN
                INSERT INTO mqlayer_app.fence_epoch AS f (group_id, lp, epoch) VALUES (p_group_id, v.lp, v.epoch)
                    ON CONFLICT (group_id, lp) DO UPDATE SET epoch = greatest(f.epoch, excluded.epoch);
            END IF;
            PERFORM FROM mqlayer_app.fence_epoch f WHERE f.group_id = p_group_id AND f.lp = v.lp FOR SHARE;
        END LOOP;
    END IF;
    SELECT bool_or(f.epoch > u.epoch) INTO v_stale
        FROM (SELECT DISTINCT o.lp, o.epoch FROM unnest(p_lps, p_epochs) AS o(lp, epoch) ORDER BY o.lp) AS u
        CROSS JOIN LATERAL (SELECT f.epoch FROM mqlayer_app.fence_epoch f
                            WHERE f.group_id = p_group_id AND f.lp = u.lp FOR SHARE) AS f;
    IF v_stale THEN
        SELECT f.answers, f.epochs INTO answers, epochs
            FROM mqlayer_app.fence_many_v1(p_group_id, p_lps, p_source_ids, p_keys, p_seqs, p_epochs, p_replays) AS f;
        RETURN;
    END IF;
    WITH noted AS (
        INSERT INTO mqlayer_app.fence_applied AS a (group_id, lp, source_id, key, replay, seq)
        SELECT p_group_id, u.lp, CASE WHEN u.key IS NULL THEN -u.source_id ELSE u.source_id END,
               coalesce(u.key, u.seq::text), u.replay, u.seq
        FROM unnest(p_lps, p_source_ids, p_keys, p_seqs, p_replays) AS u(lp, source_id, key, seq, replay)
        ORDER BY u.lp, u.key COLLATE "C", u.source_id, u.seq
        ON CONFLICT (group_id, lp, key, source_id) DO UPDATE
            SET replay = greatest(a.replay, excluded.replay), seq = excluded.seq, applied_at = now()
            WHERE a.replay < excluded.replay OR a.seq < excluded.seq
        RETURNING a.lp, a.source_id, a.key)
    SELECT count(*) AS messages, array_agg(n.lp) AS lps, array_agg(n.source_id) AS source_ids, array_agg(n.key) AS keys
        INTO v_noted FROM noted n;
    epochs := p_epochs;
    IF v_noted.messages = v_count THEN
        answers := array_fill('current'::text, ARRAY[v_count]);
        RETURN;
    END IF;
    SELECT array_agg(CASE WHEN n.lp IS NULL THEN 'applied' ELSE 'current' END ORDER BY u.n) INTO answers
        FROM unnest(p_lps, p_source_ids, p_keys, p_seqs) WITH ORDINALITY AS u(lp, source_id, key, seq, n)
        LEFT JOIN unnest(v_noted.lps, v_noted.source_ids, v_noted.keys) AS n(lp, source_id, key)
            ON n.lp = u.lp AND n.source_id = CASE WHEN u.key IS NULL THEN -u.source_id ELSE u.source_id END
           AND n.key = coalesce(u.key, u.seq::text);
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer_app.fence_many_v2 FROM PUBLIC;
