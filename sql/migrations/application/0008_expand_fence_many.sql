-- The fence for the messages of a batch: as fence_v1 for each of them, in one call.
-- Answers in the order of the messages: 'current', 'applied' or 'stale'; with one that is stale the others may have
-- none (null): the transaction is to be rolled back.
-- Rows are locked in the order of LP and key, whatever the order of the messages: two owners whose batches have keys in
-- common must not deadlock. Of one key's messages the first ones that are applied are asked for one by one, of the others
-- only the last is noted: it stands for all before it, and no other transaction comes between once the row is ours.
CREATE FUNCTION mqlayer_app.fence_many_v1(p_group_id int, p_lps smallint[], p_source_ids int[], p_keys text[],
                                          p_seqs bigint[], p_epochs bigint[], p_replays int[],
                                          OUT answers text[], OUT epochs bigint[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
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
    IF cardinality(p_lps) <> v_count OR cardinality(p_source_ids) <> v_count OR cardinality(p_keys) <> v_count
       OR cardinality(p_epochs) <> v_count OR cardinality(p_replays) <> v_count THEN
        RAISE EXCEPTION 'arrays of different lengths' USING ERRCODE = 'MQ005';
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
