-- protocol 2
-- A direct producer says to which topics it publishes, so that a deletion of a topic sees those that live.

-- Topics that it has published to, or is about to: ids. 0: more than a row has room for. NULL: its code has protocol 1,
-- and says nothing.
ALTER TABLE mqlayer.process ADD COLUMN topics int[];
ALTER TABLE mqlayer.process ADD CONSTRAINT process_topics CHECK (cardinality(topics) <= 1001);

-- As process_beat_v1, with topics.
CREATE FUNCTION mqlayer.process_beat_v2(p_facts jsonb, p_lease_s double precision, OUT serves_from int, OUT in_force int,
                                        OUT serves_to int)
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer, pg_temp AS $$
DECLARE
    v_id CONSTANT text := p_facts->>'process_id';
    v_acts_on int := (p_facts->>'acts_on')::int;
    v_least CONSTANT int := (p_facts->>'least')::int;
    v_most CONSTANT int := (p_facts->>'most')::int;
    v_topics CONSTANT int[] := ARRAY(SELECT t::int FROM jsonb_array_elements_text(p_facts->'topics') t);
BEGIN
    IF (p_lease_s BETWEEN 0 AND 3600) IS NOT TRUE THEN
        RAISE EXCEPTION 'a lease of % s, its bounds are 0 and 3600', p_lease_s USING ERRCODE = 'MQ009';
    END IF;
    IF NOT EXISTS (SELECT FROM mqlayer.process p WHERE p.process_id = v_id AND p.lease_until >= now()) THEN
        v_acts_on := mqlayer.protocol_admit_v1(v_least, v_most);
        DELETE FROM mqlayer.process p WHERE p.lease_until < now() - interval '1 hour';
    END IF;
    INSERT INTO mqlayer.process AS p (process_id, kind, name, host, pid, opened_by, lease_until, version, least, most, acts_on,
                                      topics)
    VALUES (v_id, p_facts->>'kind', p_facts->>'name', p_facts->>'host', (p_facts->>'pid')::int, mqlayer.caller_v1(),
            now() + make_interval(secs => p_lease_s), p_facts->>'version', v_least, v_most, v_acts_on, v_topics)
    ON CONFLICT (process_id) DO UPDATE
    -- A process only adds topics, so of two beats that cross, the later one has more.
    SET lease_until = excluded.lease_until, acts_on = excluded.acts_on,
        topics = CASE WHEN cardinality(p.topics) > cardinality(excluded.topics) THEN p.topics ELSE excluded.topics END
    WHERE p.opened_by = excluded.opened_by;
    SELECT t.serves_from, t.in_force, t.serves_to INTO serves_from, in_force, serves_to FROM mqlayer.protocol t;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer.process_beat_v2 FROM PUBLIC;
