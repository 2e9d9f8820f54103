-- What the archiver needs besides 0009: stretches, gaps, days.

ALTER TABLE mqlayer_archive.topic
    -- Grows whenever archiving is switched on: what was published while it was off is a gap that nobody has to accept.
    ADD COLUMN stretch   int NOT NULL DEFAULT 1,
    -- When an archiver last came to the end of every partition that it could read.
    ADD COLUMN passed_at timestamptz;

ALTER TABLE mqlayer_archive.mark
    -- The topic's stretch in which a record of the source and LP was last archived.
    ADD COLUMN stretch int NOT NULL DEFAULT 1;

-- Seqs that the archive does not have between two that exist: after_seq and next_seq are there, or will be. A partition is
-- archived no further than a gap that nobody has accepted. The mark begins anew behind a gap.
CREATE TABLE mqlayer_archive.gap (
    topic_id     int NOT NULL REFERENCES mqlayer.topic,
    source       int NOT NULL,
    lp           smallint NOT NULL,
    after_seq    bigint NOT NULL,
    next_seq     bigint NOT NULL,
    -- Where the record behind it was found.
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    log_offset   bigint NOT NULL,
    found_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    -- When and by whom it was accepted; null: the archiver waits for that. Nobody: archiving was switched off meanwhile.
    accepted_at  timestamptz,
    actor        text,
    CONSTRAINT gap_key PRIMARY KEY (topic_id, source, lp, after_seq),
    CONSTRAINT gap_range CHECK (next_seq > after_seq + 1)
);

-- What the table partitions of each day (UTC, of archiving) hold of each topic.
CREATE TABLE mqlayer_archive.day (
    day         date NOT NULL,
    topic_id    int NOT NULL REFERENCES mqlayer.topic,
    first_batch bigint NOT NULL,
    last_batch  bigint NOT NULL,
    records     bigint NOT NULL,
    outcomes    bigint NOT NULL,
    CONSTRAINT day_key PRIMARY KEY (day, topic_id)
);

-- Whether the table partitions of a day are there.
CREATE FUNCTION mqlayer_archive.day_made_v1(p_day date) RETURNS boolean LANGUAGE sql STABLE
    RETURN to_regclass('mqlayer_archive.record_' || to_char(p_day, 'YYYYMMDD')) IS NOT NULL;

-- Make a day's table partitions of records and outcomes, once. Made apart and attached, not made as partitions: that would
-- wait for everybody who reads the archive.
CREATE FUNCTION mqlayer_archive.day_make_v1(p_day date) RETURNS boolean LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive AS $$
DECLARE
    v_name text;
    v_from timestamptz := p_day::timestamp AT TIME ZONE 'UTC';
    v_to   timestamptz := (p_day + 1)::timestamp AT TIME ZONE 'UTC';
BEGIN
    IF mqlayer_archive.day_made_v1(p_day) THEN
        RETURN false;
    END IF;
    -- One at a time: two that make the same table would make one of them fail.
    PERFORM pg_advisory_xact_lock(hashtext('mqlayer_archive.day_make_v1'));
    -- Not by name once more: what this session knows of names is from before it waited.
    IF EXISTS (SELECT FROM pg_class c WHERE c.relnamespace = 'mqlayer_archive'::regnamespace
                                        AND c.relname = 'record' || to_char(p_day, '_YYYYMMDD')) THEN
        RETURN false;
    END IF;
    FOREACH v_name IN ARRAY ARRAY['record', 'outcome'] LOOP
        EXECUTE format('CREATE TABLE mqlayer_archive.%I (LIKE mqlayer_archive.%I INCLUDING ALL)',
                       v_name || to_char(p_day, '_YYYYMMDD'), v_name);
        EXECUTE format('ALTER TABLE mqlayer_archive.%I ATTACH PARTITION mqlayer_archive.%I FOR VALUES FROM (%L) TO (%L)',
                       v_name, v_name || to_char(p_day, '_YYYYMMDD'), v_from, v_to);
    END LOOP;
    RETURN true;
END $$;

-- Keep everybody away from the archive's rows until the transaction ends.
CREATE FUNCTION mqlayer_archive.lock_v1() RETURNS void LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive AS $$
BEGIN
    LOCK TABLE mqlayer_archive.record, mqlayer_archive.outcome IN ACCESS EXCLUSIVE MODE;
END $$;

-- Drop a day's table partitions.
CREATE FUNCTION mqlayer_archive.day_drop_v1(p_day date) RETURNS void LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive AS $$
BEGIN
    EXECUTE format('DROP TABLE IF EXISTS mqlayer_archive.%I, mqlayer_archive.%I',
                   'record' || to_char(p_day, '_YYYYMMDD'), 'outcome' || to_char(p_day, '_YYYYMMDD'));
END $$;

REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer_archive FROM PUBLIC;
