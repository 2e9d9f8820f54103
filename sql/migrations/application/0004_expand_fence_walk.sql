-- protocol 2
-- The fence's cleanup walks its table by blocks: with a limit of rows, each call read it from its start.

-- Forget applied seqs that no redelivery can reach any more, in p_blocks blocks of the table from p_block on. Returns how
-- many, and how many blocks the table has. An index by age would cost each effect its update within the page.
CREATE FUNCTION mqlayer_app.fence_clean_v2(p_horizon interval, p_block bigint, p_blocks int,
                                           OUT forgotten int, OUT blocks bigint)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app, pg_temp AS $$
BEGIN
    IF (p_block BETWEEN 0 AND 4294900000 AND p_blocks BETWEEN 0 AND 10000
       AND date_part('epoch', p_horizon) BETWEEN 0 AND 3162240000) IS NOT TRUE THEN
        PERFORM mqlayer_app.within_v1('p_block', p_block, 0, 4294900000),
                mqlayer_app.within_v1('p_blocks', p_blocks, 0, 10000),
                mqlayer_app.within_v1('seconds of p_horizon', date_part('epoch', p_horizon)::numeric, 0, 3162240000);
    END IF;
    -- A row that moves to another block meanwhile was applied just now.
    DELETE FROM mqlayer_app.fence_applied f
    WHERE f.ctid >= format('(%s,0)', p_block)::tid AND f.ctid < format('(%s,0)', p_block + p_blocks)::tid
      AND f.applied_at < now() - p_horizon;
    GET DIAGNOSTICS forgotten = ROW_COUNT;
    blocks := pg_relation_size('mqlayer_app.fence_applied') / current_setting('block_size')::int;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer_app.fence_clean_v2 FROM PUBLIC;
