-- Epochs and counts of earlier installations that no process ever gave, such as 2^63 - 1: nothing could raise them any
-- more, and so no member could own the partition, and no node be armed. 0026 refuses new ones. What nodes hold of them
-- is replaced when they are armed (lock_raise).
DO $do$
DECLARE
    v_count bigint;
BEGIN
    -- In the order in which rebalancing takes them: it locks the group's row, then writes assignments.
    LOCK TABLE mqlayer.consumer_group, mqlayer.assignment, mqlayer.failure_count IN ACCESS EXCLUSIVE MODE;
    -- An epoch only grows, but for this once.
    ALTER TABLE mqlayer.assignment DISABLE TRIGGER assignment_epoch_grows;
    UPDATE mqlayer.assignment SET epoch = nextval('mqlayer.epoch'), changed_at = now()
    WHERE epoch > (SELECT last_value FROM mqlayer.epoch);
    GET DIAGNOSTICS v_count = ROW_COUNT;
    ALTER TABLE mqlayer.assignment ENABLE TRIGGER assignment_epoch_grows;
    IF v_count > 0 THEN
        -- The nodes may have them too: they are armed anew, with epochs of all groups.
        UPDATE mqlayer.node SET armed_run_id = NULL;
        RAISE WARNING '% assignments had epochs that were never given out: they have new ones, and nodes are armed anew', v_count;
    END IF;
    -- Above all that members saw, where they saw any that is possible: they ignore a lower one.
    UPDATE mqlayer.consumer_group SET allocation = 1099511627776 WHERE allocation NOT BETWEEN 0 AND 4503599627370496;
    UPDATE mqlayer.consumer_group SET parking = 1099511627776 WHERE parking NOT BETWEEN 0 AND 4503599627370496;
    DELETE FROM mqlayer.parking_change WHERE number NOT BETWEEN 0 AND 4503599627370496;
    UPDATE mqlayer.failure_count SET count = 0 WHERE count NOT BETWEEN 0 AND 4503599627370496;
END $do$;
-- The sum over a group's partitions stays a bigint, or lists of all groups would fail.
ALTER TABLE mqlayer.failure_count ADD CONSTRAINT failure_count_count CHECK (count BETWEEN 0 AND 9007199254740991);
-- Room for what is added where a server was replaced.
ALTER TABLE mqlayer.consumer_group
    ADD CONSTRAINT consumer_group_counts CHECK (
        allocation BETWEEN 0 AND 4611686018427387904 AND parking BETWEEN 0 AND 4611686018427387904);
