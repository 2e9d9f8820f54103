-- The control schema: nodes, topics, partitions, route versions, sources, groups, members, assignments.
-- Who holds what: ARCHITECTURE.md, table catalogue.

CREATE SCHEMA IF NOT EXISTS mqlayer;
REVOKE ALL ON SCHEMA mqlayer FROM PUBLIC;

CREATE TABLE mqlayer.node (
    node_id     int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text NOT NULL,
    url         text NOT NULL,
    -- The run that may be served; another run id at the same address is refused until the node is armed again.
    armed_run_id text,
    armed_at    timestamptz,
    created_at  timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT node_name_unique UNIQUE (name),
    CONSTRAINT node_name_form CHECK (name ~ '^[a-z][a-z0-9_.-]{0,62}$')
);

CREATE TABLE mqlayer.topic (
    topic_id      int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name          text NOT NULL,
    strategy      text NOT NULL,
    body_limit    int NOT NULL,
    backlog_limit bigint NOT NULL,
    -- The route version in force; null until the first one exists.
    version       int,
    -- Always 0: lets a foreign key demand that the version's first range is there.
    lp_zero       smallint NOT NULL DEFAULT 0,
    created_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT topic_name_unique UNIQUE (name),
    CONSTRAINT topic_name_form CHECK (name ~ '^[a-z][a-z0-9_.-]{0,62}$'),
    CONSTRAINT topic_strategy CHECK (strategy IN ('strict', 'best_effort')),
    CONSTRAINT topic_body_limit CHECK (body_limit BETWEEN 1 AND 1000000),
    CONSTRAINT topic_backlog_limit CHECK (backlog_limit >= 0),
    CONSTRAINT topic_version CHECK (version >= 1),
    CONSTRAINT topic_lp_zero CHECK (lp_zero = 0)
);

CREATE TABLE mqlayer.partition (
    -- Never used twice: an identity column that only grows; deleted partitions keep their row.
    partition_id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id     int NOT NULL REFERENCES mqlayer.topic,
    node_id      int NOT NULL REFERENCES mqlayer.node,
    lp_from      smallint NOT NULL,
    lp_to        smallint NOT NULL,
    state        text NOT NULL DEFAULT 'importing',
    created_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT partition_range CHECK (lp_from >= 0 AND lp_from < lp_to AND lp_to <= 1024),
    CONSTRAINT partition_state CHECK (state IN ('importing', 'open', 'sealed', 'deleted')),
    CONSTRAINT partition_of_topic UNIQUE (topic_id, partition_id),
    CONSTRAINT partition_range_known UNIQUE (partition_id, lp_from, lp_to)
);
CREATE INDEX partition_by_node ON mqlayer.partition (node_id);

-- The ranges of every version tile [0, 1024): each range's end, taken round the ring, is the start of another range of
-- the same version, starts and ends are unique, and ranges only go forward. Following the ends from 0 therefore walks
-- every range exactly once and comes back through 1024. No version can commit with a gap or an overlap.
CREATE TABLE mqlayer.route (
    topic_id     int NOT NULL REFERENCES mqlayer.topic,
    version      int NOT NULL,
    lp_from      smallint NOT NULL,
    lp_to        smallint NOT NULL,
    next_from    smallint NOT NULL GENERATED ALWAYS AS ((lp_to % 1024)::smallint) STORED,
    partition_id int NOT NULL,
    CONSTRAINT route_key PRIMARY KEY (topic_id, version, lp_from),
    CONSTRAINT route_range CHECK (lp_from >= 0 AND lp_from < lp_to AND lp_to <= 1024),
    CONSTRAINT route_version CHECK (version >= 1),
    CONSTRAINT route_end_unique UNIQUE (topic_id, version, next_from),
    CONSTRAINT route_partition_once UNIQUE (topic_id, version, partition_id),
    CONSTRAINT route_partition_range FOREIGN KEY (partition_id, lp_from, lp_to)
        REFERENCES mqlayer.partition (partition_id, lp_from, lp_to),
    CONSTRAINT route_partition_topic FOREIGN KEY (topic_id, partition_id)
        REFERENCES mqlayer.partition (topic_id, partition_id),
    CONSTRAINT route_tiles FOREIGN KEY (topic_id, version, next_from)
        REFERENCES mqlayer.route (topic_id, version, lp_from) DEFERRABLE INITIALLY DEFERRED
);

ALTER TABLE mqlayer.topic ADD CONSTRAINT topic_version_has_routes FOREIGN KEY (topic_id, version, lp_zero)
    REFERENCES mqlayer.route (topic_id, version, lp_from) DEFERRABLE INITIALLY DEFERRED;

CREATE FUNCTION mqlayer.route_version_guard() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer AS $$
BEGIN
    IF NEW.version IS DISTINCT FROM OLD.version THEN
        IF NEW.version IS NULL OR NEW.version <> coalesce(OLD.version, 0) + 1 THEN
            RAISE EXCEPTION 'route version of topic % can only go from % to the next one',
                OLD.name, coalesce(OLD.version, 0)
                USING ERRCODE = 'check_violation', CONSTRAINT = 'topic_version_consecutive';
        END IF;
        PERFORM pg_notify('mqlayer_route', OLD.name);
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER topic_version_consecutive BEFORE UPDATE OF version ON mqlayer.topic
    FOR EACH ROW EXECUTE FUNCTION mqlayer.route_version_guard();

CREATE TABLE mqlayer.source (
    -- Names one incarnation: a restarted producer and a restored outbox get another one.
    source_id    int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind         text NOT NULL,
    name         text NOT NULL,
    -- Outbox only: which database it is, and the cluster it was seen in.
    outbox_uuid  uuid,
    cluster      text,
    opened_at    timestamptz NOT NULL DEFAULT now(),
    closed_at    timestamptz,
    -- Direct only: its marks are gone from every partition.
    dropped_at   timestamptz,
    -- Direct only: when the removal of its marks was last tried.
    tried_at     timestamptz,
    CONSTRAINT source_kind CHECK (kind IN ('outbox', 'direct')),
    CONSTRAINT source_outbox_identity CHECK ((kind = 'outbox') = (outbox_uuid IS NOT NULL AND cluster IS NOT NULL))
);
CREATE INDEX source_closed ON mqlayer.source (closed_at) WHERE kind = 'direct' AND dropped_at IS NULL;
CREATE UNIQUE INDEX source_outbox_live ON mqlayer.source (outbox_uuid) WHERE kind = 'outbox' AND closed_at IS NULL;

CREATE TABLE mqlayer.consumer_group (
    group_id   int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id   int NOT NULL REFERENCES mqlayer.topic,
    name       text NOT NULL,
    state      text NOT NULL DEFAULT 'creating',
    -- Where it starts: stored at once, never asked again.
    start      text NOT NULL,
    backoff_s  double precision[] NOT NULL,
    -- Grows with every change of assignments; a member ignores a lower one.
    allocation bigint NOT NULL DEFAULT 0,
    created_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT consumer_group_name_unique UNIQUE (topic_id, name),
    CONSTRAINT consumer_group_name_form CHECK (name ~ '^[a-z][a-z0-9_.-]{0,62}$'),
    CONSTRAINT consumer_group_state CHECK (state IN ('creating', 'live', 'retired')),
    CONSTRAINT consumer_group_start CHECK (start IN ('earliest', 'latest')),
    CONSTRAINT consumer_group_backoff CHECK (cardinality(backoff_s) >= 1)
);

CREATE TABLE mqlayer.group_start (
    group_id     int NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    start_offset bigint NOT NULL,
    CONSTRAINT group_start_key PRIMARY KEY (group_id, partition_id),
    CONSTRAINT group_start_offset CHECK (start_offset >= 1)
);

CREATE SEQUENCE mqlayer.member_session;

CREATE TABLE mqlayer.member (
    group_id    int NOT NULL REFERENCES mqlayer.consumer_group,
    member_id   text NOT NULL,
    -- A member id that joins again gets a new session; the old process is refused.
    session     bigint NOT NULL DEFAULT nextval('mqlayer.member_session'),
    host        text NOT NULL,
    pid         int NOT NULL,
    leaving     boolean NOT NULL DEFAULT false,
    joined_at   timestamptz NOT NULL DEFAULT now(),
    -- Judged by this database's clock only.
    lease_until timestamptz NOT NULL,
    CONSTRAINT member_key PRIMARY KEY (group_id, member_id),
    CONSTRAINT member_id_form CHECK (member_id ~ '^[a-z][a-z0-9_.-]{0,62}$')
);

-- One sequence for all groups and partitions: an epoch given out later is higher, over restarts and route changes.
CREATE SEQUENCE mqlayer.epoch;

CREATE TABLE mqlayer.assignment (
    group_id     int NOT NULL REFERENCES mqlayer.consumer_group,
    partition_id int NOT NULL REFERENCES mqlayer.partition,
    -- Who may consume; null while nobody does.
    member_id    text,
    epoch        bigint NOT NULL,
    -- Who shall: differs from member_id until the owner has released.
    target       text,
    changed_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT assignment_key PRIMARY KEY (group_id, partition_id),
    CONSTRAINT assignment_member FOREIGN KEY (group_id, member_id) REFERENCES mqlayer.member (group_id, member_id)
);
CREATE INDEX assignment_by_member ON mqlayer.assignment (group_id, member_id);

CREATE FUNCTION mqlayer.assignment_epoch_guard() RETURNS trigger LANGUAGE plpgsql
    SET search_path = pg_catalog, mqlayer AS $$
BEGIN
    IF NEW.epoch < OLD.epoch OR (NEW.member_id IS NOT NULL AND NEW.member_id IS DISTINCT FROM OLD.member_id
                                 AND NEW.epoch = OLD.epoch) THEN
        RAISE EXCEPTION 'an epoch only grows, and a new owner needs a new one'
            USING ERRCODE = 'check_violation', CONSTRAINT = 'assignment_epoch_grows';
    END IF;
    RETURN NEW;
END $$;

CREATE TRIGGER assignment_epoch_grows BEFORE UPDATE ON mqlayer.assignment
    FOR EACH ROW EXECUTE FUNCTION mqlayer.assignment_epoch_guard();

-- One row per periodic job: whoever raises the epoch runs it, so that two schedulers do no harm.
CREATE TABLE mqlayer.job (
    name       text NOT NULL,
    epoch      bigint NOT NULL DEFAULT 0,
    next_at    timestamptz NOT NULL DEFAULT now(),
    last_at    timestamptz,
    CONSTRAINT job_key PRIMARY KEY (name)
);

CREATE TABLE mqlayer.audit (
    audit_id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT now(),
    actor    text NOT NULL,
    act      text NOT NULL,
    object   text NOT NULL,
    facts    jsonb NOT NULL DEFAULT '{}'
);
