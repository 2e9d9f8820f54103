-- protocol 2
-- Schedules of analytics: snapshots that the worker makes by itself, and the jobs that it runs on them.
CREATE TABLE mqlayer.analytics_schedule (
    name       text        NOT NULL,
    topics     text[],
    jobs       text[]      NOT NULL,
    every_s    int         NOT NULL,
    keep       smallint    NOT NULL,
    actor      text        NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    next_at    timestamptz NOT NULL,
    paused_at  timestamptz,
    CONSTRAINT analytics_schedule_key PRIMARY KEY (name),
    CONSTRAINT analytics_schedule_name CHECK (name ~ '^[a-z][a-z0-9_.-]{0,39}$'),
    CONSTRAINT analytics_schedule_lists CHECK (
        cardinality(topics) BETWEEN 1 AND 1000 AND octet_length(topics::text) <= 100000
        AND cardinality(jobs) BETWEEN 0 AND 20 AND octet_length(jobs::text) <= 1000),
    CONSTRAINT analytics_schedule_numbers CHECK (every_s BETWEEN 600 AND 31622400 AND keep BETWEEN 1 AND 100),
    CONSTRAINT analytics_schedule_actor CHECK (octet_length(actor) <= 255),
    CONSTRAINT analytics_schedule_times CHECK (
        next_at BETWEEN '1970-01-01 00:00:00+00' AND '9000-01-01 00:00:00+00'
        AND paused_at BETWEEN '1970-01-01 00:00:00+00' AND '9000-01-01 00:00:00+00')
);

CREATE TABLE mqlayer.analytics_run (
    run_id      bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule    text        NOT NULL REFERENCES mqlayer.analytics_schedule (name) ON DELETE CASCADE,
    state       text        NOT NULL DEFAULT 'running',
    snapshot    text,
    job         text,
    results     jsonb       NOT NULL DEFAULT '{}',
    error       text,
    worker      text        NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    lease_until timestamptz NOT NULL,
    ended_at    timestamptz,
    CONSTRAINT analytics_run_state CHECK (state IN ('running', 'good', 'faults', 'failed')),
    CONSTRAINT analytics_run_ended CHECK ((state = 'running') = (ended_at IS NULL)),
    CONSTRAINT analytics_run_texts CHECK (
        octet_length(schedule) <= 40 AND octet_length(snapshot) <= 63 AND octet_length(job) <= 63 AND octet_length(results::text) <= 100000
        AND octet_length(error) <= 4096 AND octet_length(worker) <= 255),
    CONSTRAINT analytics_run_times CHECK (
        lease_until BETWEEN '1970-01-01 00:00:00+00' AND '9000-01-01 00:00:00+00'
        AND ended_at BETWEEN '1970-01-01 00:00:00+00' AND '9000-01-01 00:00:00+00')
);
-- One at a time: jobs share the worker's memory.
CREATE UNIQUE INDEX analytics_run_running ON mqlayer.analytics_run ((state)) WHERE state = 'running';
CREATE INDEX analytics_run_schedule ON mqlayer.analytics_run (schedule, run_id);
