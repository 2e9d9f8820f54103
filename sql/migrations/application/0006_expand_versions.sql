-- Versions of entities: events that carry the number of what they change are applied as 1, 2, 3 …, in whatever order they
-- come. What comes before its turn is held here, so its message can be settled.

CREATE TABLE mqlayer_app.entity_version (
    -- What the numbers count, such as the state of orders in the ledger; several groups may feed one.
    name          text NOT NULL,
    entity        text NOT NULL,
    -- The last version that was applied.
    version       bigint NOT NULL,
    held_messages int NOT NULL DEFAULT 0,
    held_bytes    bigint NOT NULL DEFAULT 0,
    -- Since when the next version is known to be missing, and when the next alarm is due; null where nothing is held.
    missing_since timestamptz,
    alarm_at      timestamptz,
    -- How long a version may be missing, in seconds.
    gap_s         double precision NOT NULL,
    -- An operator said where it goes on: what is held is due by that, without a message that brings it.
    released      boolean NOT NULL DEFAULT false,
    CONSTRAINT entity_version_key PRIMARY KEY (name, entity),
    CONSTRAINT entity_version_held CHECK (held_messages >= 0 AND held_bytes >= 0),
    CONSTRAINT entity_version_missing CHECK ((held_messages > 0) OR (missing_since IS NULL AND alarm_at IS NULL))
) WITH (fillfactor = 70);
CREATE INDEX entity_version_alarm ON mqlayer_app.entity_version (alarm_at) WHERE alarm_at IS NOT NULL;
CREATE INDEX entity_version_released ON mqlayer_app.entity_version (name) WHERE released;

CREATE TABLE mqlayer_app.held_version (
    name    text NOT NULL,
    entity  text NOT NULL,
    version bigint NOT NULL,
    -- The message's topic, where that is known, and identity: for people.
    origin  text NOT NULL,
    headers text NOT NULL,
    body    bytea NOT NULL,
    held_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT held_version_key PRIMARY KEY (name, entity, version)
);

-- What is held under a name: the sum over its rows. A connection adds to the row of its own slot, so that those who hold
-- something of different entities do not wait for each other; a single one may be below 0.
CREATE TABLE mqlayer_app.held_total (
    name     text NOT NULL,
    slot     smallint NOT NULL,
    messages bigint NOT NULL,
    bytes    bigint NOT NULL,
    CONSTRAINT held_total_key PRIMARY KEY (name, slot)
);

-- Add to what is held. For the functions below only.
CREATE FUNCTION mqlayer_app.held_total_add_v1(p_name text, p_messages bigint, p_bytes bigint) RETURNS void LANGUAGE sql
    SET search_path = pg_catalog, mqlayer_app AS $$
    INSERT INTO mqlayer_app.held_total AS t (name, slot, messages, bytes)
        VALUES (p_name, pg_backend_pid() % 64, p_messages, p_bytes)
        ON CONFLICT (name, slot) DO UPDATE
            SET messages = t.messages + excluded.messages, bytes = t.bytes + excluded.bytes
$$;

-- Take an event in the effect's own transaction: the entity goes on from its version as far as this event and what is held
-- reach. Answers what becomes of the event: 'due' (apply it), 'held', 'duplicate', 'full' (nothing was changed: the
-- entity's limits) or 'all_full' (the name's); and what is to be applied besides, as arrays by rising version, all of it
-- in the order of the versions. `current`: the version then. `alarm`: the next version has been missing for too long, and
-- this call is the one to tell. A null version stands for no event: what is due by an operator's word only.
-- The entity's row is locked to commit: two events of one entity wait for each other.
CREATE FUNCTION mqlayer_app.version_take_v1(
    p_name text, p_entity text, p_version bigint, p_body bytea, p_headers text, p_origin text, p_first bigint,
    p_messages int, p_bytes bigint, p_all_messages bigint, p_all_bytes bigint, p_gap_s double precision,
    OUT answer text, OUT current bigint, OUT alarm boolean, OUT missing_s double precision, OUT held int,
    OUT versions bigint[], OUT bodies bytea[], OUT headers text[], OUT origins text[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_timeout interval := current_setting('idle_in_transaction_session_timeout')::interval;
    v_now timestamptz := clock_timestamp();
    v_row mqlayer_app.entity_version;
    v_size bigint := octet_length(p_body) + octet_length(p_headers);
    v_end bigint;
    v_held bigint;
    v_count int := 0;
    v_bytes bigint := 0;
    v_since timestamptz;
BEGIN
    IF p_entity = '' OR octet_length(p_entity) > 512 THEN
        RAISE EXCEPTION 'the name of an entity has 1 to 512 bytes' USING ERRCODE = 'MQ005', HINT = 'use an id';
    END IF;
    IF v_timeout = interval '0' OR v_timeout > interval '60 seconds' THEN
        PERFORM set_config('idle_in_transaction_session_timeout', '60s', true);
    END IF;
    LOOP
        SELECT * INTO v_row FROM mqlayer_app.entity_version e
            WHERE e.name = p_name AND e.entity = p_entity FOR NO KEY UPDATE;
        EXIT WHEN FOUND OR p_version IS NULL;
        INSERT INTO mqlayer_app.entity_version (name, entity, version, gap_s)
            VALUES (p_name, p_entity, p_first - 1, p_gap_s) ON CONFLICT DO NOTHING;
    END LOOP;
    current := v_row.version;
    alarm := false;
    held := v_row.held_messages;
    answer := 'duplicate';
    IF v_row.held_messages = 0 AND p_version = current + 1 THEN
        -- Nearly always so.
        UPDATE mqlayer_app.entity_version e SET version = p_version, released = false
            WHERE e.name = p_name AND e.entity = p_entity;
        answer := 'due';
        current := p_version;
        RETURN;
    ELSIF p_version <= current OR current IS NULL THEN
        RETURN;
    END IF;
    -- As far as it goes now, with the event in its place.
    v_end := current;
    FOR v_held IN
        SELECT h.version FROM mqlayer_app.held_version h
        WHERE h.name = p_name AND h.entity = p_entity UNION SELECT p_version ORDER BY 1 NULLS LAST
    LOOP
        EXIT WHEN v_held IS DISTINCT FROM v_end + 1;
        v_end := v_held;
    END LOOP;
    IF v_end > current THEN
        SELECT -count(*), -coalesce(sum(octet_length(h.body) + octet_length(h.headers)), 0),
               array_agg(h.version ORDER BY h.version) FILTER (WHERE h.version IS DISTINCT FROM p_version),
               array_agg(h.body ORDER BY h.version) FILTER (WHERE h.version IS DISTINCT FROM p_version),
               array_agg(h.headers ORDER BY h.version) FILTER (WHERE h.version IS DISTINCT FROM p_version),
               array_agg(h.origin ORDER BY h.version) FILTER (WHERE h.version IS DISTINCT FROM p_version)
        INTO v_count, v_bytes, versions, bodies, headers, origins
        FROM mqlayer_app.held_version h WHERE h.name = p_name AND h.entity = p_entity AND h.version <= v_end;
    END IF;
    IF p_version <= v_end THEN
        answer := 'due';
    ELSIF p_version IS NOT NULL AND NOT EXISTS (
            SELECT FROM mqlayer_app.held_version h
            WHERE h.name = p_name AND h.entity = p_entity AND h.version = p_version) THEN
        IF v_row.held_messages + v_count >= p_messages OR v_row.held_bytes + v_bytes + v_size > p_bytes THEN
            answer := 'full';
            RETURN;
        ELSIF (SELECT coalesce(sum(t.messages), 0) + v_count >= p_all_messages
                      OR coalesce(sum(t.bytes), 0) + v_bytes + v_size > p_all_bytes
               FROM mqlayer_app.held_total t WHERE t.name = p_name) THEN
            answer := 'all_full';
            RETURN;
        END IF;
        INSERT INTO mqlayer_app.held_version (name, entity, version, origin, headers, body)
            VALUES (p_name, p_entity, p_version, p_origin, p_headers, p_body);
        v_count := v_count + 1;
        v_bytes := v_bytes + v_size;
        answer := 'held';
    END IF;
    IF v_end > current THEN
        DELETE FROM mqlayer_app.held_version h WHERE h.name = p_name AND h.entity = p_entity AND h.version <= v_end;
    END IF;
    held := v_row.held_messages + v_count;
    -- What comes next is missing since the first event behind it came, however long what came before it was.
    IF held > 0 THEN
        SELECT min(h.held_at) INTO v_since FROM mqlayer_app.held_version h WHERE h.name = p_name AND h.entity = p_entity;
    END IF;
    IF v_end > current OR v_row.alarm_at IS NULL THEN
        v_row.alarm_at := v_since + make_interval(secs => p_gap_s);
    END IF;
    IF v_row.alarm_at <= v_now THEN
        alarm := true;
        v_row.alarm_at := v_now + make_interval(secs => greatest(p_gap_s, 3600));
    END IF;
    missing_s := greatest(0, date_part('epoch', v_now - v_since));
    current := v_end;
    UPDATE mqlayer_app.entity_version e
        SET version = v_end, held_messages = v_row.held_messages + v_count, held_bytes = v_row.held_bytes + v_bytes,
            missing_since = v_since, alarm_at = CASE WHEN v_since IS NOT NULL THEN v_row.alarm_at END, gap_s = p_gap_s,
            released = false
        WHERE e.name = p_name AND e.entity = p_entity;
    IF v_count <> 0 OR v_bytes <> 0 THEN
        PERFORM mqlayer_app.held_total_add_v1(p_name, v_count, v_bytes);
    END IF;
END $$;

-- Take what is due by an operator's word, of one entity; `entity` is null where there is none.
CREATE FUNCTION mqlayer_app.version_released_v1(
    p_name text, p_gap_s double precision, OUT entity text, OUT versions bigint[], OUT bodies bytea[], OUT headers text[],
    OUT origins text[])
    LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
BEGIN
    SELECT e.entity INTO version_released_v1.entity FROM mqlayer_app.entity_version e
        WHERE e.name = p_name AND e.released LIMIT 1 FOR NO KEY UPDATE SKIP LOCKED;
    IF FOUND THEN
        SELECT t.versions, t.bodies, t.headers, t.origins
        INTO version_released_v1.versions, version_released_v1.bodies, version_released_v1.headers,
             version_released_v1.origins
        FROM mqlayer_app.version_take_v1(p_name, version_released_v1.entity, NULL, NULL, NULL, NULL, 1, 0, 0, 0, 0, p_gap_s) t;
    END IF;
END $$;

-- Say at which version an entity is; null: forget it. What is held up to there goes, with p_drop all that is held; what is
-- held right behind it is due. Returns how many held events went.
CREATE FUNCTION mqlayer_app.version_set_v1(p_name text, p_entity text, p_version bigint, p_drop boolean DEFAULT false)
    RETURNS int LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_count int;
    v_bytes bigint;
    v_since timestamptz;
    v_next boolean;
BEGIN
    IF p_entity = '' OR octet_length(p_entity) > 512 THEN
        RAISE EXCEPTION 'the name of an entity has 1 to 512 bytes' USING ERRCODE = 'MQ005', HINT = 'use an id';
    ELSIF p_version < 0 THEN
        RAISE EXCEPTION 'a version is 0 or more' USING ERRCODE = 'MQ005', HINT = '0: nothing was applied';
    END IF;
    INSERT INTO mqlayer_app.entity_version (name, entity, version, gap_s)
        VALUES (p_name, p_entity, coalesce(p_version, 0), 60) ON CONFLICT DO NOTHING;
    PERFORM FROM mqlayer_app.entity_version e WHERE e.name = p_name AND e.entity = p_entity FOR UPDATE;
    WITH gone AS (
        DELETE FROM mqlayer_app.held_version h
        WHERE h.name = p_name AND h.entity = p_entity AND (p_drop OR p_version IS NULL OR h.version <= p_version)
        RETURNING octet_length(h.body) + octet_length(h.headers) AS bytes)
    SELECT count(*), coalesce(sum(bytes), 0) INTO v_count, v_bytes FROM gone;
    IF v_count > 0 THEN
        PERFORM mqlayer_app.held_total_add_v1(p_name, -v_count, -v_bytes);
    END IF;
    IF p_version IS NULL THEN
        DELETE FROM mqlayer_app.entity_version e WHERE e.name = p_name AND e.entity = p_entity;
        RETURN v_count;
    END IF;
    SELECT min(h.held_at), bool_or(h.version = p_version + 1) INTO v_since, v_next
        FROM mqlayer_app.held_version h WHERE h.name = p_name AND h.entity = p_entity;
    UPDATE mqlayer_app.entity_version e
        SET version = p_version, held_messages = e.held_messages - v_count, held_bytes = e.held_bytes - v_bytes,
            missing_since = v_since, alarm_at = v_since + make_interval(secs => e.gap_s), released = coalesce(v_next, false)
        WHERE e.name = p_name AND e.entity = p_entity;
    RETURN v_count;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer_app.held_total_add_v1(text, bigint, bigint) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.version_take_v1(
    text, text, bigint, bytea, text, text, bigint, int, bigint, bigint, bigint, double precision) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.version_released_v1(text, double precision) FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.version_set_v1(text, text, bigint, boolean) FROM PUBLIC;
