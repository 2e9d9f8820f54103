-- In which term of its Postgres an outbox is read: from a start of the server, or its recovery from a crash, to the end of
-- that. A crash empties the table, since it is unlogged, and may take commits back; a copy of the disk that is put back
-- may have kept the row, but not the time at which the server started.
CREATE UNLOGGED TABLE mqlayer_app.term (
    only_one  boolean NOT NULL DEFAULT true,
    term_uuid uuid NOT NULL DEFAULT gen_random_uuid(),
    CONSTRAINT term_key PRIMARY KEY (only_one),
    CONSTRAINT term_only_one CHECK (only_one)
);

-- The term now; the first call in it makes it.
CREATE FUNCTION mqlayer_app.term_v1() RETURNS text LANGUAGE plpgsql SECURITY DEFINER
    SET search_path = pg_catalog, pg_temp AS $$
DECLARE
    v_uuid uuid;
BEGIN
    SELECT t.term_uuid INTO v_uuid FROM mqlayer_app.term t;
    IF NOT FOUND THEN
        INSERT INTO mqlayer_app.term DEFAULT VALUES ON CONFLICT (only_one) DO NOTHING;
        SELECT t.term_uuid INTO STRICT v_uuid FROM mqlayer_app.term t;
    END IF;
    RETURN v_uuid::text || '/' || extract(epoch FROM pg_postmaster_start_time())::text;
END $$;
REVOKE ALL ON mqlayer_app.term FROM PUBLIC;
REVOKE EXECUTE ON FUNCTION mqlayer_app.term_v1() FROM PUBLIC;
