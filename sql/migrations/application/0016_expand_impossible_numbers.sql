-- Epochs and seqs of earlier installations that no process ever gave, such as 2^63 - 1: each effect behind them counted as
-- stale, or as applied, and was skipped in silence. Since 0010 callers are bounded.
DO $do$
DECLARE
    v_epochs bigint;
    v_seqs bigint;
BEGIN
    -- The next owner's call raises it to its own.
    UPDATE mqlayer_app.fence_epoch f
    SET epoch = coalesce((SELECT max(o.epoch) FROM mqlayer_app.fence_epoch o
                          WHERE o.group_id = f.group_id AND o.epoch BETWEEN 0 AND 4503599627370496), 0)
    WHERE f.epoch > 4503599627370496;
    GET DIAGNOSTICS v_epochs = ROW_COUNT;
    DELETE FROM mqlayer_app.fence_applied WHERE seq > 4503599627370496;
    GET DIAGNOSTICS v_seqs = ROW_COUNT;
    IF v_epochs + v_seqs > 0 THEN
        RAISE WARNING '% epochs and % applied seqs of the fence were never given out and are forgotten: look for effects that '
            'are missing, and let their groups apply them again with mqlayer group seek --replay', v_epochs, v_seqs;
    END IF;
END $do$;
