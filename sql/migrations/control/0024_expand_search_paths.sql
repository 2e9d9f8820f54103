-- What a caller can do to the functions of these schemas: names are looked up in pg_temp last, see sql/owner/paths.sql.

-- As of 0010, without a text that means something else where standard_conforming_strings is off.
CREATE OR REPLACE FUNCTION mqlayer.parked_count_v1() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    sign CONSTANT int := CASE TG_OP WHEN 'INSERT' THEN 1 ELSE -1 END;
BEGIN
    UPDATE mqlayer.parked_key k SET messages = k.messages + sign * c.messages, bytes = k.bytes + sign * c.bytes
    FROM (SELECT group_id, lp, name, count(*) AS messages,
                 sum(octet_length(body) + octet_length(key) + octet_length(m)) AS bytes
          FROM changed WHERE substr(name, 1, 1) <> decode('ff', 'hex') GROUP BY group_id, lp, name) AS c
    WHERE k.group_id = c.group_id AND k.lp = c.lp AND k.name = c.name;
    INSERT INTO mqlayer.parked_total AS t (group_id, slot, messages, bytes)
    SELECT group_id, pg_backend_pid() % 256, sign * count(*),
           sign * sum(octet_length(body) + octet_length(key) + octet_length(m))
    FROM changed GROUP BY group_id
    ON CONFLICT (group_id, slot) DO UPDATE
    SET messages = t.messages + excluded.messages, bytes = t.bytes + excluded.bytes;
    RETURN NULL;
END $$;

-- As of 0012, parsed once: no name in it is looked up again, and it is inlined as before.
CREATE OR REPLACE FUNCTION mqlayer_archive.final_outcomes_v1(topic text, upto_batch bigint DEFAULT NULL)
RETURNS TABLE (group_name text, partition_id int, log_offset bigint, word text, attempts int, delivered_at timestamptz,
               settled_at timestamptz, actor text, reason text)
LANGUAGE sql STABLE
BEGIN ATOMIC
    SELECT DISTINCT ON (g.name, o.partition_id, at.log_offset)
           g.name, o.partition_id, at.log_offset, o.word, o.attempts, o.delivered_at, o.settled_at, o.actor, o.reason
    FROM mqlayer.topic t
    JOIN mqlayer_archive.outcome o ON o.topic_id = t.topic_id
    JOIN mqlayer.consumer_group g ON g.group_id = o.group_id
    CROSS JOIN LATERAL generate_series(o.first_offset, o.last_offset) AS at (log_offset)
    WHERE t.name = final_outcomes_v1.topic AND (upto_batch IS NULL OR o.batch <= upto_batch)
    ORDER BY g.name, o.partition_id, at.log_offset, o.epoch DESC, o.place DESC;
END;

-- Make a day's table partitions of records and outcomes, once. Made apart and attached, not made as partitions: that would
-- wait for everybody who reads the archive.
CREATE OR REPLACE FUNCTION mqlayer_archive.day_make_v1(p_day date) RETURNS boolean LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
DECLARE
    v_name text;
    v_from timestamptz := p_day::timestamp AT TIME ZONE 'UTC';
    v_to   timestamptz := (p_day + 1)::timestamp AT TIME ZONE 'UTC';
BEGIN
    IF (p_day BETWEEN date '2000-01-01' AND date '2199-12-31') IS NOT TRUE THEN
        RAISE EXCEPTION 'p_day is %, its bounds are 2000-01-01 and 2199-12-31', coalesce(to_char(p_day, 'YYYY-MM-DD'), 'null')
            USING ERRCODE = 'MQ009', HINT = 'correct the call: nothing makes this value valid';
    END IF;
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

-- Drop a day's table partitions.
CREATE OR REPLACE FUNCTION mqlayer_archive.day_drop_v1(p_day date) RETURNS void LANGUAGE plpgsql
    SECURITY DEFINER SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
BEGIN
    IF (p_day BETWEEN date '2000-01-01' AND date '2199-12-31') IS NOT TRUE THEN
        RAISE EXCEPTION 'p_day is %, its bounds are 2000-01-01 and 2199-12-31', coalesce(to_char(p_day, 'YYYY-MM-DD'), 'null')
            USING ERRCODE = 'MQ009', HINT = 'correct the call: nothing makes this value valid';
    END IF;
    EXECUTE format('DROP TABLE IF EXISTS mqlayer_archive.%I, mqlayer_archive.%I',
                   'record' || to_char(p_day, '_YYYYMMDD'), 'outcome' || to_char(p_day, '_YYYYMMDD'));
END $$;

-- Who may look at this schema may not have its numbers leap.
REVOKE EXECUTE ON ALL FUNCTIONS IN SCHEMA mqlayer FROM PUBLIC;
