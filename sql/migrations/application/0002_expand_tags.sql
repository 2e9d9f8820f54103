-- Tags of messages: one header of a reserved name, so that they go where headers go, and what knows nothing of them
-- passes them on.

-- The header for some tags: publish_v1(…, headers || tags_v1('eu', 'vip')). "<hashes>:<names>", both in the order of the
-- names, which are there once each; a hash is the first 8 hex digits of the SHA-256.
CREATE FUNCTION mqlayer_app.tags_v1(VARIADIC p_tags text[]) RETURNS jsonb LANGUAGE plpgsql STABLE
    SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_text text;
    v_count int;
BEGIN
    IF EXISTS (SELECT FROM unnest(p_tags) AS tag WHERE (tag ~ '^[a-z0-9][a-z0-9_.-]{0,62}$') IS NOT TRUE) THEN
        RAISE EXCEPTION 'bad tag' USING ERRCODE = 'MQ004',
            HINT = 'use a-z or 0-9 first, then a-z 0-9 _ . - up to 63 characters';
    END IF;
    SELECT string_agg(encode(substr(sha256(convert_to(tag, 'UTF8')), 1, 4), 'hex'), '' ORDER BY tag) || ':'
           || string_agg(tag, ',' ORDER BY tag), count(*) INTO v_text, v_count
    FROM (SELECT DISTINCT tag COLLATE "C" AS tag FROM unnest(p_tags) AS tag) AS once;
    IF v_count > 8 THEN
        RAISE EXCEPTION '% tags, at most 8', v_count USING ERRCODE = 'MQ004';
    END IF;
    RETURN CASE WHEN v_count = 0 THEN '{}' ELSE jsonb_build_object('mq-tags', v_text) END;
END $$;

-- In place of the first one, not beside it: what publish_v1 and publish_many_v1 refuse grows less by one name, and
-- callers and grants stay as they are.
CREATE OR REPLACE FUNCTION mqlayer_app.headers_check_v1(p_headers jsonb) RETURNS void LANGUAGE plpgsql IMMUTABLE
    SET search_path = pg_catalog, mqlayer_app AS $$
DECLARE
    v_tags text;
BEGIN
    IF jsonb_typeof(p_headers) <> 'object' THEN
        RAISE EXCEPTION 'headers must be a JSON object of strings' USING ERRCODE = 'MQ004';
    ELSIF EXISTS (SELECT FROM jsonb_each(p_headers) WHERE jsonb_typeof(value) <> 'string') THEN
        RAISE EXCEPTION 'header values must be strings' USING ERRCODE = 'MQ004';
    END IF;
    IF p_headers ? 'mq-tags' THEN
        v_tags := p_headers ->> 'mq-tags';
        IF v_tags IS DISTINCT FROM mqlayer_app.tags_v1(VARIADIC string_to_array(split_part(v_tags, ':', 2), ',')) ->> 'mq-tags' THEN
            RAISE EXCEPTION 'the header mq-tags is not what tags_v1 makes'
                USING ERRCODE = 'MQ004', HINT = 'headers || mqlayer_app.tags_v1(''eu'', ''vip'')';
        END IF;
        p_headers := p_headers - 'mq-tags';
    END IF;
    IF (SELECT count(*) > 32 OR sum(octet_length(key) + octet_length(value)) > 8192 FROM jsonb_each_text(p_headers)) THEN
        RAISE EXCEPTION 'at most 32 headers and 8192 bytes of them' USING ERRCODE = 'MQ004';
    ELSIF EXISTS (SELECT FROM jsonb_object_keys(p_headers) AS name WHERE name LIKE 'mq-%') THEN
        RAISE EXCEPTION 'header names that begin with mq- are reserved' USING ERRCODE = 'MQ004';
    END IF;
END $$;

REVOKE EXECUTE ON FUNCTION mqlayer_app.tags_v1(text[]) FROM PUBLIC;
