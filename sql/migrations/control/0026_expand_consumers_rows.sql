-- Rows of a consumer's own group that stopped others: epochs and counts that nothing can raise any more, and outcomes that
-- the archive refuses.

-- Arming a node, a fail-over and a redrive raise epochs of all groups in one statement: one that was never given out, in a
-- row of one group, would fail it for all.
CREATE FUNCTION mqlayer.assignment_epoch_given_v1() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
BEGIN
    IF NEW.epoch > coalesce(pg_sequence_last_value('mqlayer.epoch'), 0)
       AND NOT mqlayer.has_v1('relay', 'work', 'operate') THEN
        RAISE EXCEPTION 'epoch % was never given out', NEW.epoch
            USING ERRCODE = 'check_violation', CONSTRAINT = 'assignment_epoch_given',
                  HINT = 'take it from nextval(''mqlayer.epoch'')';
    END IF;
    RETURN NULL;
END $$;
REVOKE EXECUTE ON FUNCTION mqlayer.assignment_epoch_given_v1() FROM PUBLIC;
CREATE TRIGGER assignment_epoch_given AFTER INSERT OR UPDATE OF epoch ON mqlayer.assignment
    FOR EACH ROW EXECUTE FUNCTION mqlayer.assignment_epoch_given_v1();

-- As of 0022, with a number of a group's assignments that stays below what the column holds.
CREATE OR REPLACE FUNCTION mqlayer.server_replaced_v1(p_facts jsonb) RETURNS void LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_one record;
BEGIN
    FOR v_one IN
        SELECT format('%I.%I', schemaname, sequencename)::regclass AS number, coalesce(last_value, 0) AS last,
               CASE WHEN max_value > 2147483647 THEN 1000000000 WHEN sequencename LIKE 'source%' THEN 1000000
                    ELSE 1000 END AS leap
        FROM pg_sequences WHERE schemaname IN ('mqlayer', 'mqlayer_archive')
    LOOP
        PERFORM setval(v_one.number, v_one.last + v_one.leap);
    END LOOP;
    UPDATE mqlayer.consumer_group SET allocation = least(allocation, 9007199254740991) + 1000000;
    UPDATE mqlayer.node SET armed_run_id = NULL;
    UPDATE mqlayer.server SET replaced = replaced + 1;
    INSERT INTO mqlayer.audit (actor, act, object, facts) VALUES ('database', 'postgres replaced', 'control', p_facts);
END $$;

-- One row that the archive refuses would keep all outcomes behind it out, and the topic from being trimmed.
DELETE FROM mqlayer_archive.outcome_queue
WHERE word <> ALL (ARRAY['handled', 'unmatched', 'parked', 'exhausted', 'rejected', 'skipped', 'discarded', 'redriven', 'replayed'])
   OR log_offset NOT BETWEEN 0 AND 9007199254740991;
ALTER TABLE mqlayer_archive.outcome_queue
    ADD CONSTRAINT outcome_queue_word CHECK (word IN (
        'handled', 'unmatched', 'parked', 'exhausted', 'rejected', 'skipped', 'discarded', 'redriven', 'replayed')),
    ADD CONSTRAINT outcome_queue_offset CHECK (log_offset BETWEEN 0 AND 9007199254740991);
-- Of the group's own topic. The subquery of the right runs once, the one of the topic for each row of who lacks it.
ALTER POLICY add ON mqlayer_archive.outcome_queue WITH CHECK (
    (SELECT mqlayer.has_v1('relay', 'work', 'operate', 'consume'))
    OR group_id = ANY((SELECT mqlayer.groups_v1())::int[])
       AND topic_id = (SELECT g.topic_id FROM mqlayer.consumer_group g WHERE g.group_id = outcome_queue.group_id));
