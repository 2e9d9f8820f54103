-- protocol 2
-- Exports of the archive into tables of a lake: what each destination has, what of it was verified, and days that may go
-- from Postgres for that. Retention and readers of older code know none of it. Schedules may export.

CREATE TABLE mqlayer_archive.lake (
    lake_id    int GENERATED ALWAYS AS IDENTITY CONSTRAINT lake_key PRIMARY KEY,
    location   text        NOT NULL,
    -- The tables at the destination have it too: another archive's are refused.
    lake_uuid  uuid        NOT NULL DEFAULT gen_random_uuid(),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT lake_location_unique UNIQUE (location),
    CONSTRAINT lake_location CHECK (octet_length(location) BETWEEN 1 AND 1024)
);

-- What a lake has of a topic: batches from first_batch to batch. The destination itself says so first: this row follows.
-- Digests add up over rows, modulo 2^60, in whatever files these are.
CREATE TABLE mqlayer_archive.lake_topic (
    lake_id        int         NOT NULL REFERENCES mqlayer_archive.lake ON DELETE CASCADE,
    topic_id       int         NOT NULL REFERENCES mqlayer.topic,
    first_batch    bigint      NOT NULL,
    batch          bigint      NOT NULL,
    exported_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    verified_batch bigint      NOT NULL DEFAULT 0,
    verified_at    timestamptz,
    records        bigint      NOT NULL DEFAULT 0,
    record_digest  bigint      NOT NULL DEFAULT 0,
    outcomes       bigint      NOT NULL DEFAULT 0,
    outcome_digest bigint      NOT NULL DEFAULT 0,
    CONSTRAINT lake_topic_key PRIMARY KEY (lake_id, topic_id),
    CONSTRAINT lake_topic_batches CHECK (first_batch >= 1 AND verified_batch BETWEEN 0 AND batch)
);
CREATE INDEX lake_topic_by_topic ON mqlayer_archive.lake_topic (topic_id);

-- Verified files of a lake.
CREATE TABLE mqlayer_archive.lake_file (
    lake_id     int         NOT NULL REFERENCES mqlayer_archive.lake ON DELETE CASCADE,
    path        text        NOT NULL,
    topic_id    int         NOT NULL,
    "table"     text        NOT NULL,
    rows        bigint      NOT NULL,
    digest      bigint      NOT NULL,
    bytes       bigint      NOT NULL,
    sha256      text        NOT NULL,
    verified_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT lake_file_key PRIMARY KEY (lake_id, path),
    CONSTRAINT lake_file_path CHECK (octet_length(path) <= 2048),
    CONSTRAINT lake_file_table CHECK ("table" IN ('records', 'outcomes')),
    CONSTRAINT lake_file_sha256 CHECK (sha256 ~ '^[0-9a-f]{64}$')
);
CREATE INDEX lake_file_by_topic ON mqlayer_archive.lake_file (lake_id, topic_id);

-- Retention waits until a lake has the topic's days, verified; then it drops those that snapshots cover, too.
ALTER TABLE mqlayer.topic ADD COLUMN keep_until_exported boolean NOT NULL DEFAULT false;

-- Where a schedule's job `export` goes. Older workers fail such a run, and note it.
ALTER TABLE mqlayer.analytics_schedule ADD COLUMN export_to text,
    ADD CONSTRAINT analytics_schedule_export CHECK (
        octet_length(export_to) BETWEEN 1 AND 1024 AND (export_to IS NOT NULL) = ('export' = ANY (jobs)));

-- Up to which batch rows of a snapshot's topic may be in a lake alone.
ALTER TABLE mqlayer_archive.snapshot_topic ADD COLUMN exported_batch bigint NOT NULL DEFAULT 0;

-- As snapshot_v1, for readers who have batches from a lake: per topic up to which one. Where more of the snapshot may be
-- in a lake alone, an answer would lack rows.
CREATE FUNCTION mqlayer_archive.snapshot_v2(p_snapshot int, p_exported jsonb) RETURNS int
    LANGUAGE plpgsql SET search_path = pg_catalog, mqlayer_archive, pg_temp AS $$
BEGIN
    PERFORM mqlayer_archive.snapshot_v1(p_snapshot);
    IF EXISTS (SELECT FROM snapshot_topic p WHERE p.snapshot_id = p_snapshot
               AND p.exported_batch > coalesce((p_exported ->> p.topic_id::text)::bigint, 0)) THEN
        RAISE EXCEPTION 'days of snapshot % were dropped after their export', p_snapshot
            USING ERRCODE = 'MQ013', HINT = 'read it with the export: mqlayer archive exports';
    END IF;
    RETURN p_snapshot;
END $$;

-- A replay may read an export.
ALTER TABLE mqlayer.redrive DROP CONSTRAINT redrive_filter_names;
ALTER TABLE mqlayer.redrive ADD CONSTRAINT redrive_filter_names CHECK (
    jsonb_typeof(filter) = 'object'
    AND filter - ARRAY['key', 'since', 'until']
               - CASE WHEN kind IN ('redrive', 'keep') THEN ARRAY['cause', 'error', 'min_attempts', 'dead_ids']
                      WHEN kind IN ('release', 'discard') THEN ARRAY['cause', 'error', 'min_attempts', 'waiting']
                      WHEN kind = 'replay' THEN ARRAY['tag', 'snapshot', 'export']
                      ELSE ARRAY['tag', 'snapshot'] END = '{}'
    AND coalesce(jsonb_typeof(filter -> 'export'), 'string') = 'string' AND octet_length(filter ->> 'export') <= 1024
);
