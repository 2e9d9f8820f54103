-- The schemas at a glance: tables with their columns, constraints, indexes, triggers and policies, then sequences,
-- views and functions, in the order in which the migrations make them. Bodies and reasons are in sql/migrations.
-- For readers, not for psql. `scripts/schema` writes this file, and a test compares it.


-- mqlayer -------------------------------------------------------------------------------------------------------------

CREATE TABLE mqlayer.granted (
    role      regrole NOT NULL,
    privilege text    NOT NULL,
    scope     text    NOT NULL DEFAULT '',
    CONSTRAINT granted_key PRIMARY KEY (role, privilege, scope),
    CONSTRAINT granted_privilege
        CHECK (privilege IN ('publish', 'consume', 'relay', 'work', 'view', 'analyze', 'operate'))
);

CREATE TABLE mqlayer.protocol (
    only_one     boolean     NOT NULL DEFAULT true,
    serves_from  int         NOT NULL,
    in_force     int         NOT NULL,
    serves_to    int         NOT NULL,
    expanded_at  timestamptz NOT NULL DEFAULT now(),
    finalized_at timestamptz,
    CONSTRAINT protocol_key PRIMARY KEY (only_one),
    CONSTRAINT protocol_only_one CHECK (only_one),
    CONSTRAINT protocol_versions CHECK (in_force >= 0 AND serves_from >= in_force AND serves_from <= (in_force + 1)
        AND serves_to >= serves_from AND serves_to <= 1000000)
);

CREATE TABLE mqlayer.node (
    node_id      int         NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name         text        NOT NULL,
    url          text        NOT NULL,
    armed_run_id text,
    armed_at     timestamptz,
    last_run_id  text,
    former_runs  text[]      NOT NULL DEFAULT '{}',
    lost_at      timestamptz,
    draining_at  timestamptz,
    removed_at   timestamptz,
    zone         text        NOT NULL DEFAULT '',
    created_at   timestamptz NOT NULL DEFAULT now(),
    replicas     smallint    NOT NULL DEFAULT 0,
    CONSTRAINT node_name_unique UNIQUE (name),
    CONSTRAINT node_name_form CHECK (name ~ CASE WHEN removed_at IS NULL THEN '^[a-z][a-z0-9_.-]{0,62}$'
        ELSE '^[a-z][a-z0-9_.-]{0,62}@[0-9]+$' END),
    CONSTRAINT node_zone_form CHECK (zone ~ '^([a-z0-9][a-z0-9_.-]{0,62})?$'),
    CONSTRAINT node_drain_times CHECK (draining_at >= '1970-01-01 00:00:00+00'
        AND draining_at <= '9000-01-01 00:00:00+00' AND removed_at >= '1970-01-01 00:00:00+00'
        AND removed_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT node_url_is_address CHECK (url !~ '^[^/]*//[^/?#]*@'
        AND url !~ '[?&](username|password|credential_provider|sentinel_username|sentinel_password|ssl_password)='),
    CONSTRAINT node_texts CHECK (octet_length(url) <= 4096 AND octet_length(armed_run_id) <= 1024
        AND octet_length(last_run_id) <= 1024 AND pg_column_size(former_runs) <= 1000000),
    CONSTRAINT node_replicas CHECK (replicas >= 0 AND replicas <= 100)
);
-- Row-level security by the policies read, hold, add, remove.

CREATE TABLE mqlayer.topic (
    topic_id            int         NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name                text        NOT NULL,
    strategy            text        NOT NULL,
    body_limit          int         NOT NULL,
    backlog_limit       bigint      NOT NULL,
    archived            boolean     NOT NULL DEFAULT false,
    retention_days      int,
    retain_s            bigint      NOT NULL DEFAULT 0,
    retain_bytes        bigint      NOT NULL DEFAULT 0,
    retain_messages     bigint      NOT NULL DEFAULT 0,
    retain_unsettled    text        NOT NULL DEFAULT 'keep',
    message_ttl_s       bigint      NOT NULL DEFAULT 0,
    expired             text        NOT NULL DEFAULT 'settle',
    version             int,
    lp_zero             smallint    NOT NULL DEFAULT 0,
    paused_at           timestamptz,
    paused_by           text,
    schema_mode         text        NOT NULL DEFAULT 'backward',
    home_zone           text        NOT NULL DEFAULT '',
    created_at          timestamptz NOT NULL DEFAULT now(),
    deleting_at         timestamptz,
    deleted_at          timestamptz,
    detached            bigint[]    NOT NULL DEFAULT '{}'::bigint[],
    durability          text        NOT NULL DEFAULT 'node',
    keep_until_exported boolean     NOT NULL DEFAULT false,
    CONSTRAINT topic_name_unique UNIQUE (name),
    CONSTRAINT topic_name_form CHECK (name ~ CASE WHEN deleted_at IS NULL THEN '^[a-z][a-z0-9_.-]{0,62}$'
        ELSE '^[a-z][a-z0-9_.-]{0,62}@[0-9]+$' END),
    CONSTRAINT topic_deleting_first CHECK (deleted_at IS NULL OR deleting_at IS NOT NULL),
    CONSTRAINT topic_deletion_times CHECK (deleting_at >= '1970-01-01 00:00:00+00'
        AND deleting_at <= '9000-01-01 00:00:00+00' AND deleted_at >= '1970-01-01 00:00:00+00'
        AND deleted_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT topic_detached_size CHECK (pg_column_size(detached) <= 1000000),
    CONSTRAINT topic_strategy CHECK (strategy IN ('strict', 'best_effort')),
    CONSTRAINT topic_body_limit CHECK (body_limit >= 1 AND body_limit <= 1000000),
    CONSTRAINT topic_backlog_limit CHECK (backlog_limit >= 0),
    CONSTRAINT topic_retention CHECK (retention_days >= 1),
    CONSTRAINT topic_retain CHECK (retain_s >= 0 AND retain_s <= 3153600000 AND retain_bytes >= 0
        AND retain_bytes <= 1000000000000000 AND retain_messages >= 0 AND retain_messages <= 1000000000000000),
    CONSTRAINT topic_retain_unsettled CHECK (retain_unsettled IN ('keep', 'drop')),
    CONSTRAINT topic_drop_needs_limit CHECK (retain_unsettled = 'keep'
        OR GREATEST(retain_s, retain_bytes, retain_messages) > 0),
    CONSTRAINT topic_message_ttl CHECK (message_ttl_s >= 0 AND message_ttl_s <= 3153600000),
    CONSTRAINT topic_expired CHECK (expired IN ('settle', 'dead')),
    CONSTRAINT topic_version CHECK (version >= 1),
    CONSTRAINT topic_lp_zero CHECK (lp_zero = 0),
    CONSTRAINT topic_paused_by CHECK (octet_length(paused_by) <= 4096),
    CONSTRAINT topic_home_zone_form CHECK (home_zone ~ '^([a-z0-9][a-z0-9_.-]{0,62})?$'),
    CONSTRAINT topic_schema_mode CHECK (schema_mode IN ('backward', 'forward', 'full', 'none')),
    CONSTRAINT topic_durability CHECK (durability IN ('node', 'disk', 'replica', 'quorum')),
    CONSTRAINT topic_version_has_routes FOREIGN KEY (topic_id, version, lp_zero)
        REFERENCES mqlayer.route(topic_id, version, lp_from) DEFERRABLE INITIALLY DEFERRED
);
CREATE TRIGGER topic_version_consecutive BEFORE UPDATE OF version ON mqlayer.topic FOR EACH ROW
    EXECUTE FUNCTION mqlayer.route_version_guard();

CREATE TABLE mqlayer.topic_schema (
    topic_id  int         NOT NULL REFERENCES mqlayer.topic(topic_id) ON DELETE CASCADE,
    version   int         NOT NULL,
    mode      text        NOT NULL,
    schema    text        NOT NULL,
    actor     text        NOT NULL,
    role      name        NOT NULL DEFAULT mqlayer.caller_v1(),
    stored_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT topic_schema_key PRIMARY KEY (topic_id, version),
    CONSTRAINT topic_schema_version CHECK (version >= 1 AND version <= 1000),
    CONSTRAINT topic_schema_mode CHECK (mode IN ('backward', 'forward', 'full', 'none')),
    CONSTRAINT topic_schema_texts CHECK (octet_length(schema) <= 262144 AND octet_length(actor) <= 4096)
);

CREATE TABLE mqlayer.route_change (
    change_id  int         NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id   int         NOT NULL REFERENCES mqlayer.topic(topic_id),
    version    int         NOT NULL,
    kind       text        NOT NULL,
    state      text        NOT NULL DEFAULT 'planned',
    mode       text        NOT NULL DEFAULT 'live',
    actor      text        NOT NULL,
    planned_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    sealed_at  timestamptz,
    opened_at  timestamptz,
    ended_at   timestamptz,
    CONSTRAINT route_change_kind CHECK (kind IN ('split', 'merge', 'move')),
    CONSTRAINT route_change_mode CHECK (mode IN ('live', 'unreachable', 'lost')),
    CONSTRAINT route_change_state CHECK (state IN ('planned', 'sealing', 'sealed', 'done', 'dropped')),
    CONSTRAINT route_change_actor CHECK (octet_length(actor) <= 4096)
);
CREATE UNIQUE INDEX route_change_one_at_a_time ON mqlayer.route_change (topic_id)
    WHERE state IN ('planned', 'sealing', 'sealed');
CREATE UNIQUE INDEX route_change_version ON mqlayer.route_change (topic_id, version) WHERE state <> 'dropped';

CREATE TABLE mqlayer.partition (
    partition_id      int         NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id          int         NOT NULL REFERENCES mqlayer.topic(topic_id),
    node_id           int         NOT NULL REFERENCES mqlayer.node(node_id),
    lp_from           smallint    NOT NULL,
    lp_to             smallint    NOT NULL,
    state             text        NOT NULL DEFAULT 'importing',
    created_by_change int         REFERENCES mqlayer.route_change(change_id),
    ended_by_change   int         REFERENCES mqlayer.route_change(change_id),
    created_at        timestamptz NOT NULL DEFAULT now(),
    retired_at        timestamptz,
    CONSTRAINT partition_of_topic UNIQUE (topic_id, partition_id),
    CONSTRAINT partition_range_known UNIQUE (partition_id, lp_from, lp_to),
    CONSTRAINT partition_range CHECK (lp_from >= 0 AND lp_from < lp_to AND lp_to <= 1024),
    CONSTRAINT partition_state CHECK (state IN ('importing', 'open', 'sealed', 'deleted'))
);
CREATE INDEX partition_by_node ON mqlayer.partition (node_id);
CREATE INDEX partition_by_created_by_change ON mqlayer.partition (created_by_change)
    WHERE created_by_change IS NOT NULL;
CREATE INDEX partition_by_ended_by_change ON mqlayer.partition (ended_by_change) WHERE ended_by_change IS NOT NULL;
CREATE INDEX partition_in_use ON mqlayer.partition (topic_id) WHERE state IN ('open', 'sealed');
-- Row-level security by the policies read, hold, add, remove.

CREATE TABLE mqlayer.route (
    topic_id     int      NOT NULL REFERENCES mqlayer.topic(topic_id),
    version      int      NOT NULL,
    lp_from      smallint NOT NULL,
    lp_to        smallint NOT NULL,
    next_from    smallint NOT NULL GENERATED ALWAYS AS ((((lp_to)::int % 1024))::smallint) STORED,
    partition_id int      NOT NULL,
    CONSTRAINT route_key PRIMARY KEY (topic_id, version, lp_from),
    CONSTRAINT route_end_unique UNIQUE (topic_id, version, next_from),
    CONSTRAINT route_partition_once UNIQUE (topic_id, version, partition_id),
    CONSTRAINT route_range CHECK (lp_from >= 0 AND lp_from < lp_to AND lp_to <= 1024),
    CONSTRAINT route_version CHECK (version >= 1),
    CONSTRAINT route_partition_range FOREIGN KEY (partition_id, lp_from, lp_to)
        REFERENCES mqlayer.partition(partition_id, lp_from, lp_to),
    CONSTRAINT route_partition_topic FOREIGN KEY (topic_id, partition_id)
        REFERENCES mqlayer.partition(topic_id, partition_id),
    CONSTRAINT route_tiles FOREIGN KEY (topic_id, version, next_from)
        REFERENCES mqlayer.route(topic_id, version, lp_from) DEFERRABLE INITIALLY DEFERRED
);

CREATE TABLE mqlayer.seal (
    partition_id int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    change_id    int         NOT NULL REFERENCES mqlayer.route_change(change_id),
    seal_id      uuid        NOT NULL,
    next_offset  bigint      NOT NULL,
    run_id       text        NOT NULL,
    marks        jsonb       NOT NULL,
    unreachable  boolean     NOT NULL DEFAULT false,
    cut          boolean     NOT NULL DEFAULT false,
    sealed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT seal_key PRIMARY KEY (partition_id),
    CONSTRAINT seal_run_id CHECK (octet_length(run_id) <= 1024)
);

CREATE TABLE mqlayer.abandoned (
    node_id      int         NOT NULL REFERENCES mqlayer.node(node_id),
    partition_id int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    at           timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT abandoned_key PRIMARY KEY (node_id, partition_id)
);

CREATE TABLE mqlayer.partition_rate (
    partition_id int              NOT NULL REFERENCES mqlayer.partition(partition_id),
    next_offset  bigint           NOT NULL,
    per_s        double precision NOT NULL,
    measured_at  timestamptz      NOT NULL,
    CONSTRAINT partition_rate_key PRIMARY KEY (partition_id)
);

CREATE TABLE mqlayer.route_policy (
    topic_id         int              NOT NULL REFERENCES mqlayer.topic(topic_id),
    mode             text             NOT NULL,
    min_partitions   int              NOT NULL DEFAULT 1,
    max_partitions   int              NOT NULL DEFAULT 64,
    capacity_per_s   double precision,
    measured_per_s   double precision,
    changes_per_hour int              NOT NULL DEFAULT 20,
    cool_down_s      double precision NOT NULL DEFAULT 60,
    rest_s           double precision NOT NULL DEFAULT 1800,
    quiet_from       smallint,
    quiet_to         smallint,
    failed           int              NOT NULL DEFAULT 0,
    unhelpful        int              NOT NULL DEFAULT 0,
    stopped_at       timestamptz,
    stopped_because  text,
    set_at           timestamptz      NOT NULL DEFAULT now(),
    set_by           text             NOT NULL,
    CONSTRAINT route_policy_key PRIMARY KEY (topic_id),
    CONSTRAINT route_policy_mode CHECK (mode IN ('off', 'report', 'on')),
    CONSTRAINT route_policy_partitions CHECK (min_partitions >= 1 AND min_partitions <= 1024
        AND max_partitions >= min_partitions AND max_partitions <= 1024),
    CONSTRAINT route_policy_capacity CHECK (capacity_per_s >= 1::double precision
        AND capacity_per_s <= '1000000000'::numeric::double precision AND measured_per_s >= 1::double precision
        AND measured_per_s <= '1000000000'::numeric::double precision),
    CONSTRAINT route_policy_budget CHECK (changes_per_hour >= 1 AND changes_per_hour <= 720),
    CONSTRAINT route_policy_waits CHECK (cool_down_s >= 5::double precision AND cool_down_s <= 3600::double precision
        AND rest_s >= 5::double precision AND rest_s <= 86400::double precision),
    CONSTRAINT route_policy_quiet CHECK ((quiet_from IS NULL) = (quiet_to IS NULL) AND quiet_from <> quiet_to
        AND quiet_from >= 0 AND quiet_from <= 1439 AND quiet_to >= 0 AND quiet_to <= 1439),
    CONSTRAINT route_policy_counts CHECK (failed >= 0 AND failed <= 1000000 AND unhelpful >= 0
        AND unhelpful <= 1000000),
    CONSTRAINT route_policy_stopped CHECK ((stopped_at IS NULL) = (stopped_because IS NULL)),
    CONSTRAINT route_policy_times CHECK (stopped_at >= '1970-01-01 00:00:00+00'
        AND stopped_at <= '9000-01-01 00:00:00+00' AND set_at >= '1970-01-01 00:00:00+00'
        AND set_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT route_policy_texts CHECK (octet_length(set_by) <= 4096 AND octet_length(stopped_because) <= 4096)
);

CREATE TABLE mqlayer.route_load (
    partition_id int                NOT NULL REFERENCES mqlayer.partition(partition_id),
    at_s         double precision[] NOT NULL,
    next_offset  bigint[]           NOT NULL,
    settled      bigint[]           NOT NULL,
    sampled_at   timestamptz,
    CONSTRAINT route_load_key PRIMARY KEY (partition_id),
    CONSTRAINT route_load_samples CHECK (cardinality(at_s) >= 1 AND cardinality(at_s) <= 64
        AND cardinality(next_offset) >= 1 AND cardinality(next_offset) <= 64 AND cardinality(settled) >= 1
        AND cardinality(settled) <= 64 AND cardinality(next_offset) = cardinality(at_s)
        AND cardinality(settled) = cardinality(at_s)),
    CONSTRAINT route_load_sampled_at CHECK (sampled_at >= '1970-01-01 00:00:00+00'
        AND sampled_at <= '9000-01-01 00:00:00+00')
);

CREATE TABLE mqlayer.route_decision (
    decision_id bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id    int         NOT NULL REFERENCES mqlayer.topic(topic_id),
    at          timestamptz NOT NULL DEFAULT clock_timestamp(),
    verdict     text        NOT NULL,
    kind        text        NOT NULL,
    partitions  int[]       NOT NULL,
    reason      text        NOT NULL,
    key         text,
    lp          smallint,
    change_id   int         REFERENCES mqlayer.route_change(change_id),
    facts       jsonb       NOT NULL DEFAULT '{}',
    judged_at   timestamptz,
    helped      boolean,
    CONSTRAINT route_decision_verdict CHECK (verdict IN ('changed', 'reported', 'refused', 'failed', 'stopped')),
    CONSTRAINT route_decision_kind CHECK (kind IN ('split', 'merge', 'move', 'none')),
    CONSTRAINT route_decision_change CHECK ((verdict = 'changed') = (change_id IS NOT NULL)),
    CONSTRAINT route_decision_lp CHECK (lp >= 0 AND lp <= 1023),
    CONSTRAINT route_decision_times CHECK (at >= '1970-01-01 00:00:00+00' AND at <= '9000-01-01 00:00:00+00'
        AND judged_at >= '1970-01-01 00:00:00+00' AND judged_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT route_decision_texts CHECK (octet_length(reason) <= 4096 AND octet_length(key) <= 65536
        AND pg_column_size(facts) <= 100000 AND cardinality(partitions) <= 1024)
);
CREATE INDEX route_decision_of_topic ON mqlayer.route_decision (topic_id, decision_id);
CREATE UNIQUE INDEX route_decision_of_change ON mqlayer.route_decision (change_id) WHERE change_id IS NOT NULL;

CREATE TABLE mqlayer.source (
    source_id   bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    kind        text        NOT NULL,
    name        text        NOT NULL,
    outbox_uuid uuid,
    cluster     text,
    opened_by   name        NOT NULL DEFAULT mqlayer.caller_v1(),
    opened_at   timestamptz NOT NULL DEFAULT now(),
    closed_at   timestamptz,
    dropped_at  timestamptz,
    tried_at    timestamptz,
    CONSTRAINT source_kind CHECK (kind IN ('outbox', 'direct')),
    CONSTRAINT source_outbox_identity CHECK ((kind = 'outbox') = (outbox_uuid IS NOT NULL AND cluster IS NOT NULL)),
    CONSTRAINT source_closed_at CHECK (closed_at >= '1970-01-01 00:00:00+00' AND closed_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT source_name_length CHECK (octet_length(name) <= 1024),
    CONSTRAINT source_cluster_length CHECK (octet_length(cluster) <= 1024)
);
CREATE INDEX source_closed ON mqlayer.source (closed_at) WHERE kind = 'direct' AND dropped_at IS NULL;
CREATE UNIQUE INDEX source_outbox_live ON mqlayer.source (outbox_uuid) WHERE kind = 'outbox' AND closed_at IS NULL;
-- Row-level security by the policies read, add, change.

CREATE TABLE mqlayer.consumer_group (
    group_id              bigint             NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    topic_id              int                NOT NULL REFERENCES mqlayer.topic(topic_id),
    name                  text               NOT NULL,
    state                 text               NOT NULL DEFAULT 'creating',
    mode                  text               NOT NULL DEFAULT 'exclusive',
    ordered               boolean            NOT NULL DEFAULT true,
    scope                 text,
    start                 text               NOT NULL,
    start_at              timestamptz,
    from_archive          boolean            NOT NULL DEFAULT false,
    broadcast_of          bigint             REFERENCES mqlayer.consumer_group(group_id),
    instance              text,
    instance_expiry_s     double precision,
    absent_since          timestamptz,
    copied_from           bigint             REFERENCES mqlayer.consumer_group(group_id),
    deployment            text               NOT NULL DEFAULT 'main',
    canary                text,
    canary_lps            int,
    previous_deployment   text,
    fallback              boolean            NOT NULL DEFAULT false,
    settings_version      int                NOT NULL DEFAULT 1,
    tag_filter            text               NOT NULL DEFAULT 'none',
    balance               text               NOT NULL DEFAULT 'count',
    attempt_limit         int                NOT NULL DEFAULT 17,
    policy                text               NOT NULL DEFAULT 'park',
    backoff_s             double precision[] NOT NULL,
    backoff_jitter        double precision   NOT NULL DEFAULT 0,
    non_retryable_errors  text[]             NOT NULL DEFAULT '{}',
    retryable_errors      text[]             NOT NULL DEFAULT '{}',
    time_limit_s          double precision,
    max_time_limit_s      double precision,
    visibility_timeout_s  double precision,
    rate_limit            double precision,
    rate_burst            double precision,
    parked_keys_limit     int                NOT NULL DEFAULT 10000,
    parked_messages_limit bigint             NOT NULL DEFAULT 10000000,
    parked_bytes_limit    bigint             NOT NULL DEFAULT 10737418240,
    key_messages_limit    bigint             NOT NULL DEFAULT 2000000,
    key_bytes_limit       bigint             NOT NULL DEFAULT 2147483648,
    breaker_share         double precision,
    breaker_keys          int                NOT NULL DEFAULT 10,
    breaker_window_s      double precision   NOT NULL DEFAULT 10,
    breaker_errors        text[]             NOT NULL DEFAULT '{}',
    key_class             text               NOT NULL DEFAULT 'none',
    class_concurrency     int,
    class_rate            double precision,
    version               int                NOT NULL DEFAULT 1,
    seek                  int                NOT NULL DEFAULT 0,
    replay                int                NOT NULL DEFAULT 0,
    allocation            bigint             NOT NULL DEFAULT 0,
    parking               bigint             NOT NULL DEFAULT 0,
    paused_at             timestamptz,
    paused_by             text,
    created_at            timestamptz        NOT NULL DEFAULT now(),
    retired_at            timestamptz,
    CONSTRAINT consumer_group_name_unique UNIQUE (topic_id, name),
    CONSTRAINT consumer_group_name_form CHECK (name ~ CASE WHEN instance IS NULL THEN '^[a-z][a-z0-9_.-]{0,62}$'
        ELSE '^[a-z][a-z0-9_.-]{0,62}@[a-z0-9][a-z0-9_.-]{0,62}$' END),
    CONSTRAINT consumer_group_state CHECK (state IN ('creating', 'live', 'retired')),
    CONSTRAINT consumer_group_mode CHECK (mode IN ('exclusive', 'pop', 'shared', 'broadcast')),
    CONSTRAINT consumer_group_scope CHECK (scope IN ('partition', 'key')),
    CONSTRAINT consumer_group_scope_of_pop CHECK ((mode = 'pop') = (scope IS NOT NULL)),
    CONSTRAINT consumer_group_start CHECK (start IN ('earliest', 'latest', 'time')),
    CONSTRAINT consumer_group_start_time CHECK ((start = 'time') = (start_at IS NOT NULL)),
    CONSTRAINT consumer_group_from_archive CHECK (NOT from_archive OR mode = 'exclusive' AND start <> 'latest'),
    CONSTRAINT consumer_group_instance CHECK ((broadcast_of IS NULL) = (instance IS NULL)),
    CONSTRAINT consumer_group_instance_mode CHECK (instance IS NULL OR mode = 'exclusive'),
    CONSTRAINT consumer_group_instance_length CHECK (octet_length(instance) <= 63),
    CONSTRAINT consumer_group_keep_away CHECK ((mode = 'broadcast') = (instance_expiry_s IS NOT NULL)
        AND instance_expiry_s > 0::double precision AND instance_expiry_s <= '100000000000'::numeric::double precision),
    CONSTRAINT consumer_group_deployments CHECK (deployment ~ '^[a-z0-9][a-z0-9_.-]{0,62}$'
        AND canary ~ '^[a-z0-9][a-z0-9_.-]{0,62}$' AND canary <> deployment
        AND previous_deployment ~ '^[a-z0-9][a-z0-9_.-]{0,62}$' AND previous_deployment <> deployment),
    CONSTRAINT consumer_group_canary CHECK (canary_lps >= 1 AND canary_lps <= 1023),
    CONSTRAINT consumer_group_tag_filter
        CHECK (tag_filter ~ '^(none|(any|all):[a-z0-9][a-z0-9_.-]*(,[a-z0-9][a-z0-9_.-]*)*)$'),
    CONSTRAINT consumer_group_balance CHECK (balance IN ('count', 'rate')),
    CONSTRAINT consumer_group_attempt_limit CHECK (attempt_limit >= 1 AND attempt_limit <= 2000000000),
    CONSTRAINT consumer_group_policy CHECK (policy IN ('park', 'block', 'dead_letter', 'skip')),
    CONSTRAINT consumer_group_backoff CHECK (cardinality(backoff_s) >= 1),
    CONSTRAINT consumer_group_backoff_jitter CHECK (backoff_jitter >= 0::double precision
        AND backoff_jitter <= 1::double precision),
    CONSTRAINT consumer_group_time_limit CHECK (time_limit_s > 0::double precision
        AND time_limit_s <= '100000000000'::numeric::double precision),
    CONSTRAINT consumer_group_max_time_limit CHECK (max_time_limit_s > 0::double precision
        AND max_time_limit_s <= '100000000000'::numeric::double precision),
    CONSTRAINT consumer_group_visibility_timeout CHECK (visibility_timeout_s > 0::double precision
        AND visibility_timeout_s <= '100000000000'::numeric::double precision),
    CONSTRAINT consumer_group_visibility_timeout_of_shared CHECK (mode <> 'shared' OR visibility_timeout_s IS NOT NULL),
    CONSTRAINT consumer_group_shared CHECK (mode <> 'shared' OR NOT ordered AND (policy IN ('dead_letter', 'skip'))),
    CONSTRAINT consumer_group_rate_limit CHECK (rate_limit > 0::double precision
        AND rate_limit <= '100000000000'::numeric::double precision),
    CONSTRAINT consumer_group_rate_burst CHECK (rate_burst >= 1::double precision
        AND rate_burst <= '100000000000'::numeric::double precision),
    CONSTRAINT consumer_group_parking_limits CHECK (parked_keys_limit >= 1 AND parked_keys_limit <= 2000000000
        AND parked_messages_limit >= 1 AND parked_messages_limit <= 9007199254740991 AND parked_bytes_limit >= 1
        AND parked_bytes_limit <= 9007199254740991 AND key_messages_limit >= 1
        AND key_messages_limit <= 9007199254740991 AND key_bytes_limit >= 1 AND key_bytes_limit <= 9007199254740991),
    CONSTRAINT consumer_group_breaker CHECK (breaker_share > 0::double precision
        AND breaker_share <= 1::double precision AND breaker_keys >= 1 AND breaker_keys <= 4096
        AND breaker_window_s >= 1::double precision AND breaker_window_s <= 3600::double precision
        AND (breaker_share IS NULL OR mode <> 'pop')),
    CONSTRAINT consumer_group_counts CHECK (version >= 1 AND version <= 1000000000 AND seek >= 0 AND seek <= 1000000000
        AND replay >= 0 AND replay <= 1000000000 AND settings_version >= 1 AND settings_version <= 1000000000
        AND allocation >= 0 AND allocation <= 4611686018427387904 AND parking >= 0 AND parking <= 4611686018427387904),
    CONSTRAINT consumer_group_times CHECK (absent_since >= '1970-01-01 00:00:00+00'
        AND absent_since <= '9000-01-01 00:00:00+00' AND paused_at >= '1970-01-01 00:00:00+00'
        AND paused_at <= '9000-01-01 00:00:00+00' AND retired_at >= '1970-01-01 00:00:00+00'
        AND retired_at <= '9000-01-01 00:00:00+00' AND start_at >= '1970-01-01 00:00:00+00'
        AND start_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT consumer_group_texts_length CHECK (octet_length(COALESCE(paused_by, '')) <= 1024
        AND octet_length(COALESCE(tag_filter, '')) <= 65536 AND cardinality(backoff_s) <= 1000
        AND pg_column_size(non_retryable_errors) <= 1000000 AND pg_column_size(retryable_errors) <= 1000000
        AND pg_column_size(breaker_errors) <= 1000000),
    CONSTRAINT consumer_group_key_class CHECK (key_class ~ '^(none|prefix:[ -~]+|header:[ -~]+)$'
        AND octet_length(key_class) <= 64 AND (key_class = 'none' OR mode <> 'pop' OR scope = 'key')
        AND class_concurrency >= 1 AND class_concurrency <= 2000000000 AND class_rate > 0::double precision
        AND class_rate <= '100000000000'::numeric::double precision)
);
CREATE UNIQUE INDEX consumer_group_instances ON mqlayer.consumer_group (broadcast_of, instance)
    WHERE broadcast_of IS NOT NULL;
CREATE TRIGGER consumer_group_instance_of_broadcast BEFORE INSERT
    OR UPDATE OF broadcast_of, instance, name, topic_id ON mqlayer.consumer_group FOR EACH ROW
    WHEN (new.broadcast_of IS NOT NULL) EXECUTE FUNCTION mqlayer.group_instance_guard();
CREATE TRIGGER group_known AFTER INSERT ON mqlayer.consumer_group FOR EACH ROW
    EXECUTE FUNCTION mqlayer.group_known_v1();
-- Row-level security by the policies read, add, change, remove.

CREATE TABLE mqlayer.group_start (
    group_id     bigint NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    partition_id int    NOT NULL REFERENCES mqlayer.partition(partition_id),
    start_offset bigint NOT NULL,
    CONSTRAINT group_start_key PRIMARY KEY (group_id, partition_id),
    CONSTRAINT group_start_offset CHECK (start_offset >= 1 AND start_offset <= 9007199254740991)
);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.drained (
    group_id     bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    partition_id int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    drained_at   timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT drained_key PRIMARY KEY (group_id, partition_id)
);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.retention_loss (
    group_id     bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    partition_id int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    event        text        NOT NULL,
    lost         bigint      NOT NULL,
    seen         bigint      NOT NULL,
    lost_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT retention_loss_key PRIMARY KEY (group_id, partition_id, event),
    CONSTRAINT retention_loss_event CHECK (event IN ('dropped', 'expired')),
    CONSTRAINT retention_loss_numbers CHECK (lost >= 0 AND lost <= 9007199254740991 AND seen >= 0
        AND seen <= 9007199254740991),
    CONSTRAINT retention_loss_lost_at CHECK (lost_at >= '1970-01-01 00:00:00+00'
        AND lost_at <= '9000-01-01 00:00:00+00')
);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.partition_pause (
    group_id     bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    partition_id int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    paused_at    timestamptz NOT NULL DEFAULT now(),
    paused_by    text        NOT NULL,
    CONSTRAINT partition_pause_key PRIMARY KEY (group_id, partition_id),
    CONSTRAINT partition_pause_by CHECK (octet_length(paused_by) <= 4096)
);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.member (
    group_id     bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    member_id    text        NOT NULL,
    session      bigint      NOT NULL DEFAULT nextval('mqlayer.member_session'),
    host         text        NOT NULL,
    pid          int         NOT NULL,
    leaving      boolean     NOT NULL DEFAULT false,
    deployment   text        NOT NULL DEFAULT 'main',
    zone         text        NOT NULL DEFAULT '',
    joined_at    timestamptz NOT NULL DEFAULT now(),
    lease_until  timestamptz NOT NULL,
    version      text        NOT NULL DEFAULT '',
    least        int         NOT NULL DEFAULT 1,
    most         int         NOT NULL DEFAULT 1,
    acts_on      int         NOT NULL DEFAULT 1,
    failing_keys int         NOT NULL DEFAULT 0,
    tried_keys   int         NOT NULL DEFAULT 0,
    reported_at  timestamptz NOT NULL DEFAULT '1970-01-01 00:00:00+00',
    CONSTRAINT member_key PRIMARY KEY (group_id, member_id),
    CONSTRAINT member_version CHECK (octet_length(version) <= 64 AND "least" >= 1 AND "least" <= 1000000 AND most >= 1
        AND most <= 1000000 AND acts_on >= 0 AND acts_on <= 1000000),
    CONSTRAINT member_id_form CHECK (member_id ~ '^[a-z][a-z0-9_.-]{0,62}$'),
    CONSTRAINT member_deployment CHECK (deployment ~ '^[a-z0-9][a-z0-9_.-]{0,62}$'),
    CONSTRAINT member_host_length CHECK (octet_length(host) <= 1024),
    CONSTRAINT member_zone_form CHECK (zone ~ '^([a-z0-9][a-z0-9_.-]{0,62})?$'),
    CONSTRAINT member_numbers CHECK (session >= 0 AND session <= 4611686018427387904 AND pid >= 0
        AND pid <= 2000000000),
    CONSTRAINT member_reported CHECK (failing_keys >= 0 AND failing_keys <= 1000000000 AND tried_keys >= 0
        AND tried_keys <= 1000000000 AND reported_at >= '1970-01-01 00:00:00+00'
        AND reported_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT member_joined_at CHECK (joined_at >= '1970-01-01 00:00:00+00' AND joined_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT member_lease_until CHECK (lease_until = '-infinity' OR lease_until >= '1970-01-01 00:00:00+00'
        AND lease_until <= '9000-01-01 00:00:00+00')
);
CREATE TRIGGER member_admitted BEFORE INSERT ON mqlayer.member FOR EACH ROW EXECUTE FUNCTION mqlayer.member_admit_v1();
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.process (
    process_id  text        NOT NULL,
    kind        text        NOT NULL,
    name        text        NOT NULL,
    host        text        NOT NULL,
    pid         int         NOT NULL,
    opened_by   name        NOT NULL,
    started_at  timestamptz NOT NULL DEFAULT now(),
    lease_until timestamptz NOT NULL,
    version     text        NOT NULL,
    least       int         NOT NULL,
    most        int         NOT NULL,
    acts_on     int         NOT NULL,
    topics      int[]       NOT NULL DEFAULT '{}'::int[],
    CONSTRAINT process_key PRIMARY KEY (process_id),
    CONSTRAINT process_kind CHECK (kind IN ('relay', 'worker', 'producer', 'receiver')),
    CONSTRAINT process_texts CHECK (octet_length(process_id) <= 128 AND octet_length(name) <= 1024
        AND octet_length(host) <= 1024 AND octet_length(version) <= 64),
    CONSTRAINT process_numbers CHECK (pid >= 0 AND pid <= 2000000000 AND "least" >= 1 AND "least" <= 1000000
        AND most >= 1 AND most <= 1000000 AND acts_on >= 0 AND acts_on <= 1000000),
    CONSTRAINT process_topics CHECK (cardinality(topics) <= 1001)
);

CREATE TABLE mqlayer.breaker (
    group_id      bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    state         text        NOT NULL,
    changed_at    timestamptz NOT NULL DEFAULT clock_timestamp(),
    opened_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    cause         text        NOT NULL,
    actor         text        NOT NULL,
    failing_keys  int         NOT NULL DEFAULT 0,
    probes        int         NOT NULL DEFAULT 0,
    probe_at      timestamptz NOT NULL,
    probe_session bigint,
    CONSTRAINT breaker_key PRIMARY KEY (group_id),
    CONSTRAINT breaker_state CHECK (state IN ('closed', 'open', 'probing', 'ramping')),
    CONSTRAINT breaker_prober CHECK (state <> 'probing' OR probe_session IS NOT NULL),
    CONSTRAINT breaker_counts CHECK (failing_keys >= 0 AND failing_keys <= 1000000000 AND probes >= 0
        AND probes <= 1000000000 AND probe_session >= 0 AND probe_session <= 4611686018427387904),
    CONSTRAINT breaker_texts CHECK (octet_length(cause) <= 1024 AND octet_length(actor) <= 4096),
    CONSTRAINT breaker_times CHECK (changed_at >= '1970-01-01 00:00:00+00' AND changed_at <= '9000-01-01 00:00:00+00'
        AND opened_at >= '1970-01-01 00:00:00+00' AND opened_at <= '9000-01-01 00:00:00+00'
        AND probe_at >= '1970-01-01 00:00:00+00' AND probe_at <= '9000-01-01 00:00:00+00')
);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.assignment (
    group_id     bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    partition_id int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    member_id    text,
    epoch        bigint      NOT NULL,
    target       text,
    changed_at   timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT assignment_key PRIMARY KEY (group_id, partition_id),
    CONSTRAINT assignment_epoch CHECK (epoch >= 0 AND epoch <= 9007199254740991),
    CONSTRAINT assignment_changed_at CHECK (changed_at >= '1970-01-01 00:00:00+00'
        AND changed_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT assignment_texts CHECK (octet_length(member_id) <= 1024 AND octet_length(target) <= 1024),
    CONSTRAINT assignment_member FOREIGN KEY (group_id, member_id) REFERENCES mqlayer.member(group_id, member_id)
);
CREATE INDEX assignment_by_member ON mqlayer.assignment (group_id, member_id);
CREATE TRIGGER assignment_epoch_grows BEFORE UPDATE ON mqlayer.assignment FOR EACH ROW
    EXECUTE FUNCTION mqlayer.assignment_epoch_guard();
CREATE TRIGGER assignment_epoch_given AFTER INSERT OR UPDATE OF epoch ON mqlayer.assignment FOR EACH ROW
    EXECUTE FUNCTION mqlayer.assignment_epoch_given_v1();
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.parked_key (
    group_id      bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    lp            smallint    NOT NULL,
    name          bytea       NOT NULL,
    cause         text        NOT NULL,
    due_at        timestamptz,
    attempts      int         NOT NULL DEFAULT 0,
    started       bigint,
    started_alone boolean     NOT NULL DEFAULT false,
    released      boolean     NOT NULL DEFAULT false,
    messages      bigint      NOT NULL DEFAULT 0,
    bytes         bigint      NOT NULL DEFAULT 0,
    paused_at     timestamptz,
    paused_by     text,
    parked_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT parked_key_key PRIMARY KEY (group_id, lp, name),
    CONSTRAINT parked_key_cause CHECK (cause IN ('retry', 'exhausted', 'rejected', 'paused', 'redriven', 'replayed')),
    CONSTRAINT parked_key_due_at CHECK (due_at >= '1970-01-01 00:00:00+00' AND due_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT parked_key_numbers CHECK (lp >= 0 AND lp <= 1023 AND attempts >= 0 AND attempts <= 2000000000
        AND started >= 0 AND started <= 9007199254740991),
    CONSTRAINT parked_key_texts CHECK (octet_length(name) <= 65536 AND octet_length(paused_by) <= 4096)
);
CREATE INDEX parked_key_due ON mqlayer.parked_key (due_at) WHERE due_at IS NOT NULL;
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.parked_message (
    group_id     bigint   NOT NULL,
    lp           smallint NOT NULL,
    name         bytea    NOT NULL,
    source       bigint   NOT NULL,
    seq          bigint   NOT NULL,
    position     bigint   NOT NULL,
    partition_id int      NOT NULL REFERENCES mqlayer.partition(partition_id),
    log_offset   bigint   NOT NULL,
    key          bytea    NOT NULL,
    m            bytea    NOT NULL,
    body         bytea    NOT NULL,
    redriven     boolean  NOT NULL DEFAULT false,
    replay       bigint,
    attempts     int      NOT NULL DEFAULT 0,
    tried        int      NOT NULL DEFAULT 0,
    CONSTRAINT parked_message_key PRIMARY KEY (group_id, lp, source, seq),
    CONSTRAINT parked_message_numbers CHECK (source >= 1 AND source <= 9007199254740991 AND seq >= 1
        AND seq <= 9007199254740991 AND log_offset >= 0 AND log_offset <= 9007199254740991
        AND "position" >= -4611686018427387904 AND "position" <= 4611686018427387904 AND attempts >= 0
        AND attempts <= 2000000000 AND tried >= 0 AND tried <= 2000000000),
    CONSTRAINT parked_message_sizes CHECK (octet_length(name) <= 65536 AND octet_length(key) <= 65536
        AND octet_length(m) <= 1000000 AND octet_length(body) <= 16777216),
    CONSTRAINT parked_message_of_key FOREIGN KEY (group_id, lp, name) REFERENCES mqlayer.parked_key(group_id, lp, name)
);
CREATE INDEX parked_message_queue ON mqlayer.parked_message (group_id, lp, name, "position", seq);
CREATE INDEX parked_message_log ON mqlayer.parked_message (group_id, partition_id, log_offset);
CREATE INDEX parked_message_numbers ON mqlayer.parked_message (group_id, lp, name, source, seq);
CREATE INDEX parked_message_position ON mqlayer.parked_message (group_id, lp, name, partition_id, log_offset);
CREATE INDEX parked_message_replay ON mqlayer.parked_message (replay) WHERE replay IS NOT NULL;
CREATE INDEX parked_message_body ON mqlayer.parked_message (mqlayer.body_named_v1(encode(m, 'escape')))
    WHERE POSITION((decode('226d712d626f6479223a', 'hex')) IN (m)) > 0;
CREATE TRIGGER parked_message_in AFTER INSERT ON mqlayer.parked_message REFERENCING NEW TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION mqlayer.parked_count_v1();
CREATE TRIGGER parked_message_out AFTER DELETE ON mqlayer.parked_message REFERENCING OLD TABLE AS changed
    FOR EACH STATEMENT EXECUTE FUNCTION mqlayer.parked_count_v1();
ALTER TABLE mqlayer.parked_message ALTER COLUMN group_id SET STATISTICS 0;
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.parked_total (
    group_id bigint   NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    slot     smallint NOT NULL,
    messages bigint   NOT NULL,
    bytes    bigint   NOT NULL,
    CONSTRAINT parked_total_key PRIMARY KEY (group_id, slot)
);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.parking_change (
    group_id bigint   NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    number   bigint   NOT NULL,
    lp       smallint NOT NULL,
    name     bytea    NOT NULL,
    CONSTRAINT parking_change_key PRIMARY KEY (group_id, number, lp, name),
    CONSTRAINT parking_change_name CHECK (octet_length(name) <= 65536)
);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.dead_message (
    dead_id       bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id      bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    lp            smallint    NOT NULL,
    source        bigint      NOT NULL,
    seq           bigint      NOT NULL,
    partition_id  int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    log_offset    bigint      NOT NULL,
    key           bytea       NOT NULL,
    m             bytea       NOT NULL,
    body          bytea,
    cause         text        NOT NULL,
    reason        text        NOT NULL,
    attempts      int         NOT NULL,
    actor         text        NOT NULL,
    died_at       timestamptz NOT NULL DEFAULT clock_timestamp(),
    redriven_at   timestamptz,
    redriven_seek int,
    log_lost      boolean     NOT NULL DEFAULT false,
    CONSTRAINT dead_message_once UNIQUE (group_id, lp, source, seq),
    CONSTRAINT dead_message_cause CHECK (cause IN ('exhausted', 'rejected', 'skipped', 'discarded', 'expired')),
    CONSTRAINT dead_message_numbers CHECK (lp >= 0 AND lp <= 1023 AND source >= 1 AND source <= 9007199254740991
        AND seq >= 1 AND seq <= 9007199254740991 AND log_offset >= 0 AND log_offset <= 9007199254740991
        AND attempts >= 0 AND attempts <= 2000000000 AND redriven_seek >= 0 AND redriven_seek <= 1000000000),
    CONSTRAINT dead_message_times CHECK (died_at >= '1970-01-01 00:00:00+00' AND died_at <= '9000-01-01 00:00:00+00'
        AND redriven_at >= '1970-01-01 00:00:00+00' AND redriven_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT dead_message_sizes CHECK (octet_length(key) <= 65536 AND octet_length(m) <= 1000000
        AND octet_length(body) <= 16777216),
    CONSTRAINT dead_message_texts CHECK (octet_length(reason) <= 65536 AND octet_length(actor) <= 4096)
);
CREATE INDEX dead_message_listed ON mqlayer.dead_message (group_id, died_at, dead_id) WHERE redriven_at IS NULL;
CREATE INDEX dead_message_latest ON mqlayer.dead_message (died_at, dead_id) WHERE redriven_at IS NULL;
CREATE INDEX dead_message_redriven ON mqlayer.dead_message (group_id, died_at, dead_id) WHERE redriven_at IS NOT NULL;
CREATE INDEX dead_message_redriven_latest ON mqlayer.dead_message (died_at, dead_id) WHERE redriven_at IS NOT NULL;
CREATE INDEX dead_message_stream ON mqlayer.dead_message (group_id, partition_id, log_offset);
CREATE INDEX dead_message_queue ON mqlayer.dead_message (group_id, lp, key, partition_id, log_offset, dead_id)
    WHERE redriven_at IS NULL;
CREATE INDEX dead_message_log_lost ON mqlayer.dead_message (group_id, lp) WHERE log_lost;
CREATE INDEX dead_message_body ON mqlayer.dead_message (mqlayer.body_named_v1(encode(m, 'escape')))
    WHERE body IS NOT NULL AND POSITION((decode('226d712d626f6479223a', 'hex')) IN (m)) > 0;
ALTER TABLE mqlayer.dead_message ALTER COLUMN group_id SET STATISTICS 0;
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.failed_attempt (
    group_id  bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    lp        smallint    NOT NULL,
    source    bigint      NOT NULL,
    seq       bigint      NOT NULL,
    attempt   int         NOT NULL,
    failed_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    member_id text        NOT NULL,
    error     text        NOT NULL,
    CONSTRAINT failed_attempt_key PRIMARY KEY (group_id, lp, source, seq, attempt, failed_at),
    CONSTRAINT failed_attempt_numbers CHECK (lp >= 0 AND lp <= 1023 AND source >= 1 AND source <= 9007199254740991
        AND seq >= 1 AND seq <= 9007199254740991 AND attempt >= 0 AND attempt <= 2000000000),
    CONSTRAINT failed_attempt_texts CHECK (octet_length(error) <= 65536 AND octet_length(member_id) <= 1024)
);
CREATE INDEX failed_attempt_old ON mqlayer.failed_attempt (failed_at);
ALTER TABLE mqlayer.failed_attempt ALTER COLUMN group_id SET STATISTICS 0;
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.failure_count (
    group_id     bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    partition_id int         NOT NULL,
    event        text        NOT NULL,
    count        bigint      NOT NULL,
    last_at      timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT failure_count_key PRIMARY KEY (group_id, partition_id, event),
    CONSTRAINT failure_count_partition CHECK (partition_id >= 0 AND partition_id <= 2147483646),
    CONSTRAINT failure_count_last_at CHECK (last_at >= '1970-01-01 00:00:00+00'
        AND last_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT failure_count_event_length CHECK (octet_length(event) <= 63),
    CONSTRAINT failure_count_count CHECK (count >= 0 AND count <= 9007199254740991)
);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.redrive (
    redrive_id  bigint           NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    group_id    bigint           NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    kind        text             NOT NULL,
    filter      jsonb            NOT NULL,
    per_s       double precision NOT NULL,
    actor       text             NOT NULL,
    state       text             NOT NULL DEFAULT 'running',
    reason      text,
    size        int,
    matched     bigint,
    at_number   int              NOT NULL DEFAULT 0,
    failed      int              NOT NULL DEFAULT 0,
    planned_at  timestamptz,
    upto_batch  bigint,
    snapshot_id int,
    bounds      jsonb            NOT NULL DEFAULT '{}',
    position    bigint,
    newer       text,
    name        bytea,
    at_batch    bigint           NOT NULL DEFAULT 0,
    at_record   bigint           NOT NULL DEFAULT 0,
    sent        bigint           NOT NULL DEFAULT 0,
    not_sent    bigint           NOT NULL DEFAULT 0,
    results     jsonb            NOT NULL DEFAULT '{}',
    worker      text,
    lease_until timestamptz,
    next_at     timestamptz      NOT NULL DEFAULT clock_timestamp(),
    blocked_by  text,
    started_at  timestamptz      NOT NULL DEFAULT clock_timestamp(),
    ended_at    timestamptz,
    CONSTRAINT redrive_kind CHECK (kind IN ('redrive', 'keep', 'release', 'discard', 'replay', 'backfill')),
    CONSTRAINT redrive_state CHECK (state IN ('planned', 'running', 'done', 'cancelled')),
    CONSTRAINT redrive_rate CHECK (per_s >= 0::double precision AND per_s <= '100000000000'::numeric::double precision),
    CONSTRAINT redrive_ended CHECK ((state IN ('planned', 'running')) = (ended_at IS NULL)),
    CONSTRAINT redrive_numbers CHECK (size >= 0 AND size <= 1000000 AND matched >= 0 AND matched <= 4611686018427387904
        AND at_number >= 0 AND at_number <= size AND failed >= 0 AND failed <= size AND upto_batch >= 0
        AND upto_batch <= 4611686018427387904 AND "position" >= -4611686018427387904
        AND "position" <= 4611686018427387904 AND snapshot_id >= 0 AND snapshot_id <= 2000000000),
    CONSTRAINT redrive_times CHECK (lease_until >= '1970-01-01 00:00:00+00' AND lease_until <= '9000-01-01 00:00:00+00'
        AND planned_at >= '1970-01-01 00:00:00+00' AND planned_at <= '9000-01-01 00:00:00+00'
        AND ended_at >= '1970-01-01 00:00:00+00' AND ended_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT redrive_newer CHECK (newer IN ('wait', 'between')),
    CONSTRAINT redrive_of_archive CHECK ((kind IN ('replay', 'backfill')) = (upto_batch IS NOT NULL)
        AND (upto_batch IS NULL) = ("position" IS NULL) AND (upto_batch IS NULL) = (newer IS NULL)),
    CONSTRAINT redrive_of_bulk CHECK ((upto_batch IS NULL) = (size IS NOT NULL) AND (size IS NULL) = (matched IS NULL)
        AND (size IS NULL) = (planned_at IS NULL) AND (state <> 'planned' OR size IS NOT NULL)),
    CONSTRAINT redrive_started CHECK (planned_at IS NULL OR (state IN ('planned', 'cancelled'))
        OR started_at > planned_at),
    CONSTRAINT redrive_filter_values CHECK (COALESCE(jsonb_typeof(filter -> 'key'), 'string') = 'string'
        AND COALESCE(jsonb_typeof(filter -> 'cause'), 'string') = 'string'
        AND COALESCE(jsonb_typeof(filter -> 'error'), 'string') = 'string'
        AND COALESCE(jsonb_typeof(filter -> 'tag'), 'string') = 'string'
        AND COALESCE(jsonb_typeof(filter -> 'snapshot'), 'string') = 'string'
        AND COALESCE(jsonb_typeof(filter -> 'since'), 'string') = 'string'
        AND COALESCE(jsonb_typeof(filter -> 'until'), 'string') = 'string'
        AND COALESCE(jsonb_typeof(filter -> 'dead_ids'), 'array') = 'array'
        AND COALESCE(jsonb_typeof(filter -> 'waiting'), 'boolean') = 'boolean'
        AND COALESCE(jsonb_typeof(filter -> 'min_attempts'), 'number') = 'number'
        AND octet_length(filter::text) <= 1000000),
    CONSTRAINT redrive_filter_times CHECK ( CASE WHEN NOT filter ? 'since' AND NOT filter ? 'until' THEN true
        WHEN COALESCE(filter ->> 'since',
        filter ->> 'until') ~ '^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d([.]\d{6})?([+-]\d\d:\d\d(:\d\d)?)$'
        AND COALESCE(filter ->> 'until',
        filter ->> 'since') ~ '^\d{4}-\d\d-\d\dT([01]\d|2[0-3]):[0-5]\d:[0-5]\d([.]\d{6})?([+-]\d\d:\d\d(:\d\d)?)$'
        THEN COALESCE(filter ->> 'since', filter ->> 'until')::timestamptz IS NOT NULL
        AND COALESCE(filter ->> 'until', filter ->> 'since')::timestamptz IS NOT NULL ELSE false END),
    CONSTRAINT redrive_texts CHECK (octet_length(actor) <= 4096 AND octet_length(worker) <= 1024
        AND octet_length(blocked_by) <= 65536 AND octet_length(name) <= 65536 AND octet_length(reason) <= 65536),
    CONSTRAINT redrive_documents CHECK (octet_length(bounds::text) <= 1000000
        AND octet_length(results::text) <= 1000000),
    CONSTRAINT redrive_filter_names CHECK (jsonb_typeof(filter) = 'object'
        AND (filter - ARRAY['key', 'since', 'until'] - CASE WHEN kind IN ('redrive', 'keep')
        THEN ARRAY['cause', 'error', 'min_attempts', 'dead_ids'] WHEN kind IN ('release', 'discard')
        THEN ARRAY['cause', 'error', 'min_attempts', 'waiting'] WHEN kind = 'replay'
        THEN ARRAY['tag', 'snapshot', 'export'] ELSE ARRAY['tag', 'snapshot'] END) = '{}'
        AND COALESCE(jsonb_typeof(filter -> 'export'), 'string') = 'string'
        AND octet_length(filter ->> 'export') <= 1024)
);
CREATE INDEX redrive_running ON mqlayer.redrive (redrive_id) WHERE state = 'running';
CREATE UNIQUE INDEX redrive_one_replay ON mqlayer.redrive (group_id) WHERE state = 'running'
    AND (kind IN ('replay', 'backfill'));
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.bulk_item (
    redrive_id bigint      NOT NULL REFERENCES mqlayer.redrive(redrive_id),
    number     int         NOT NULL,
    group_id   bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    dead_id    bigint,
    lp         smallint,
    name       bytea,
    source     bigint,
    seq        bigint,
    since      timestamptz,
    cause      text,
    messages   bigint,
    upto       bigint,
    gone       bigint      NOT NULL DEFAULT 0,
    result     text,
    error      text,
    at         timestamptz,
    CONSTRAINT bulk_item_key PRIMARY KEY (redrive_id, number),
    CONSTRAINT bulk_item_word
        CHECK (result IN ('done', 'already', 'no_body', 'gone', 'changed', 'paused', 'due', 'failed')),
    CONSTRAINT bulk_item_numbers CHECK (number >= 1 AND number <= 1000000 AND lp >= 0 AND lp <= 1023 AND messages >= 0
        AND messages <= 9007199254740991 AND source >= 1 AND source <= 9007199254740991 AND seq >= 1
        AND seq <= 9007199254740991 AND gone >= 0 AND gone <= 9007199254740991),
    CONSTRAINT bulk_item_times CHECK (since >= '1970-01-01 00:00:00+00' AND since <= '9000-01-01 00:00:00+00'
        AND at >= '1970-01-01 00:00:00+00' AND at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT bulk_item_texts CHECK (octet_length(name) <= 65536 AND octet_length(cause) <= 63
        AND octet_length(error) <= 65536)
);
CREATE INDEX bulk_item_failed ON mqlayer.bulk_item (redrive_id, number) WHERE result = 'failed';
CREATE INDEX bulk_item_dead ON mqlayer.bulk_item (dead_id) WHERE dead_id IS NOT NULL;
CREATE INDEX bulk_item_of_key ON mqlayer.bulk_item (group_id, lp, name, redrive_id);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer.replay_result (
    redrive_id bigint      NOT NULL REFERENCES mqlayer.redrive(redrive_id),
    lp         smallint    NOT NULL,
    source     bigint      NOT NULL,
    seq        bigint      NOT NULL,
    result     text        NOT NULL,
    at         timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT replay_result_key PRIMARY KEY (redrive_id, lp, source, seq),
    CONSTRAINT replay_result_word CHECK (result IN ('already', 'dead', 'ahead'))
);

CREATE TABLE mqlayer.job (
    name     text        NOT NULL,
    epoch    bigint      NOT NULL DEFAULT 0,
    next_at  timestamptz NOT NULL DEFAULT now(),
    last_at  timestamptz,
    ended_at timestamptz,
    error    text,
    CONSTRAINT job_key PRIMARY KEY (name),
    CONSTRAINT job_name CHECK (octet_length(name) <= 63),
    CONSTRAINT job_error CHECK (octet_length(error) <= 4096)
);

CREATE TABLE mqlayer.sample (
    kind         text             NOT NULL,
    object_id    bigint           NOT NULL,
    at           timestamptz      NOT NULL,
    lag          bigint,
    oldest_s     double precision,
    parked       bigint,
    dead         bigint,
    members      int,
    busy         int,
    committed    bigint,
    relayed      bigint,
    stored       bigint,
    memory_bytes bigint,
    memory_limit bigint,
    cpu_s        double precision,
    ops_per_s    double precision,
    CONSTRAINT sample_key PRIMARY KEY (kind, object_id, at),
    CONSTRAINT sample_kind CHECK (kind IN ('group', 'topic', 'node')),
    CONSTRAINT sample_minute CHECK (at = date_trunc('minute', at, 'UTC'))
);
CREATE INDEX sample_old ON mqlayer.sample (at);

CREATE TABLE mqlayer.problem (
    problem_id    bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    alert         text        NOT NULL,
    severity      text        NOT NULL,
    part          text        NOT NULL,
    topic         text        NOT NULL,
    group_name    text        NOT NULL,
    node          text        NOT NULL,
    item          text        NOT NULL,
    text          text        NOT NULL,
    effect        text        NOT NULL,
    since         timestamptz,
    first_seen_at timestamptz NOT NULL,
    last_seen_at  timestamptz NOT NULL,
    ended_at      timestamptz,
    CONSTRAINT problem_lengths CHECK (octet_length(alert) <= 63 AND octet_length(severity) <= 63
        AND octet_length(part) <= 63 AND octet_length(topic) <= 80 AND octet_length(group_name) <= 255
        AND octet_length(node) <= 255 AND octet_length(item) <= 255 AND octet_length(text) <= 4096
        AND octet_length(effect) <= 4096)
);
CREATE UNIQUE INDEX problem_open ON mqlayer.problem (alert, topic, group_name, node, item) WHERE ended_at IS NULL;
CREATE INDEX problem_ended ON mqlayer.problem (ended_at, problem_id) WHERE ended_at IS NOT NULL;

CREATE TABLE mqlayer.audit (
    audit_id bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    at       timestamptz NOT NULL DEFAULT now(),
    actor    text        NOT NULL,
    role     name        NOT NULL DEFAULT mqlayer.caller_v1(),
    act      text        NOT NULL,
    object   text        NOT NULL,
    facts    jsonb       NOT NULL DEFAULT '{}',
    CONSTRAINT audit_texts CHECK (octet_length(actor) <= 4096 AND octet_length(act) <= 1024
        AND octet_length(object) <= 4096),
    CONSTRAINT audit_facts CHECK (octet_length(facts::text) <= 1000000)
);
CREATE INDEX audit_by_object ON mqlayer.audit (object, at);
CREATE INDEX audit_by_time ON mqlayer.audit (at, audit_id);
CREATE INDEX audit_by_act ON mqlayer.audit (act, at, audit_id);
CREATE INDEX audit_by_actor ON mqlayer.audit ("left"(actor, 200), at, audit_id);
CREATE INDEX audit_of_people ON mqlayer.audit (at, audit_id) WHERE strpos(actor, '@') > 0;

CREATE TABLE mqlayer.console_session (
    token_hash bytea       NOT NULL,
    login      name        NOT NULL,
    name       text        NOT NULL,
    level      text        NOT NULL,
    bodies     boolean     NOT NULL,
    proof      text        NOT NULL,
    began_at   timestamptz NOT NULL DEFAULT now(),
    seen_at    timestamptz NOT NULL DEFAULT now(),
    idle_s     int         NOT NULL,
    ends_at    timestamptz NOT NULL,
    CONSTRAINT console_session_key PRIMARY KEY (token_hash),
    CONSTRAINT console_session_hash CHECK (octet_length(token_hash) = 32),
    CONSTRAINT console_session_texts CHECK (octet_length(name) >= 1 AND octet_length(name) <= 256
        AND octet_length(proof) <= 256),
    CONSTRAINT console_session_level CHECK (level IN ('viewer', 'operator'))
);
CREATE INDEX console_session_by_name ON mqlayer.console_session (login, name, began_at);

CREATE TABLE mqlayer.server (
    only_one  boolean     NOT NULL DEFAULT true,
    system_id text        NOT NULL,
    timeline  int         NOT NULL,
    since     timestamptz NOT NULL DEFAULT now(),
    replaced  int         NOT NULL DEFAULT 0,
    CONSTRAINT server_key PRIMARY KEY (only_one),
    CONSTRAINT server_only_one CHECK (only_one)
);

CREATE TABLE mqlayer.migration (
    number int         NOT NULL PRIMARY KEY,
    name   text        NOT NULL,
    at     timestamptz NOT NULL DEFAULT now()
);

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
    export_to  text,
    CONSTRAINT analytics_schedule_key PRIMARY KEY (name),
    CONSTRAINT analytics_schedule_name CHECK (name ~ '^[a-z][a-z0-9_.-]{0,39}$'),
    CONSTRAINT analytics_schedule_lists CHECK (cardinality(topics) >= 1 AND cardinality(topics) <= 1000
        AND octet_length(topics::text) <= 100000 AND cardinality(jobs) >= 0 AND cardinality(jobs) <= 20
        AND octet_length(jobs::text) <= 1000),
    CONSTRAINT analytics_schedule_numbers CHECK (every_s >= 600 AND every_s <= 31622400 AND keep >= 1 AND keep <= 100),
    CONSTRAINT analytics_schedule_actor CHECK (octet_length(actor) <= 255),
    CONSTRAINT analytics_schedule_times CHECK (next_at >= '1970-01-01 00:00:00+00'
        AND next_at <= '9000-01-01 00:00:00+00' AND paused_at >= '1970-01-01 00:00:00+00'
        AND paused_at <= '9000-01-01 00:00:00+00'),
    CONSTRAINT analytics_schedule_export CHECK (octet_length(export_to) >= 1 AND octet_length(export_to) <= 1024
        AND (export_to IS NOT NULL) = ('export' = ANY (jobs)))
);

CREATE TABLE mqlayer.analytics_run (
    run_id      bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    schedule    text        NOT NULL REFERENCES mqlayer.analytics_schedule(name) ON DELETE CASCADE,
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
    CONSTRAINT analytics_run_texts CHECK (octet_length(schedule) <= 40 AND octet_length(snapshot) <= 63
        AND octet_length(job) <= 63 AND octet_length(results::text) <= 100000 AND octet_length(error) <= 4096
        AND octet_length(worker) <= 255),
    CONSTRAINT analytics_run_times CHECK (lease_until >= '1970-01-01 00:00:00+00'
        AND lease_until <= '9000-01-01 00:00:00+00' AND ended_at >= '1970-01-01 00:00:00+00'
        AND ended_at <= '9000-01-01 00:00:00+00')
);
CREATE UNIQUE INDEX analytics_run_running ON mqlayer.analytics_run (state) WHERE state = 'running';
CREATE INDEX analytics_run_schedule ON mqlayer.analytics_run (schedule, run_id);

-- sequences
CREATE SEQUENCE mqlayer.member_session;
CREATE SEQUENCE mqlayer.epoch;
CREATE SEQUENCE mqlayer.parked_position INCREMENT BY 16777216 START WITH 16777216;
CREATE SEQUENCE mqlayer.repaired_at;

-- views
CREATE VIEW mqlayer.readable (group_id bigint, partition_id int, deployment text);
CREATE VIEW mqlayer.living (kind text, name text, host text, pid int, since timestamptz, version text, least int,
    most int, acts_on int, beats boolean, group_id bigint);
CREATE VIEW mqlayer.parked_fact (group_id bigint, lp smallint, name bytea, source bigint, seq bigint, position bigint,
    partition_id int, log_offset bigint, key bytea, redriven boolean, replay bigint, attempts int, tried int, m bytea,
    m_size int, body_size int, large_size bigint);
CREATE VIEW mqlayer.dead_fact (dead_id bigint, group_id bigint, lp smallint, source bigint, seq bigint,
    partition_id int, log_offset bigint, key bytea, body_size int, cause text, reason text, attempts int, actor text,
    died_at timestamptz, redriven_at timestamptz, redriven_seek int, log_lost boolean, large_size bigint);

-- functions
CREATE FUNCTION mqlayer.caller_v1() RETURNS name STABLE;
CREATE FUNCTION mqlayer.has_v1(VARIADIC p_privileges text[]) RETURNS boolean STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer.has_for_v1(p_privilege text, p_scope text) RETURNS boolean STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer.groups_v1() RETURNS bigint[] STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer.protocol_admit_v1(p_least int, p_most int) RETURNS int SECURITY DEFINER;
CREATE FUNCTION mqlayer.topic_schema_put_v1(p_topic text, p_version int, p_mode text, p_schema text, p_actor text)
    RETURNS boolean SECURITY DEFINER;
CREATE FUNCTION mqlayer.route_version_guard() RETURNS trigger;
CREATE FUNCTION mqlayer.group_instance_guard() RETURNS trigger;
CREATE FUNCTION mqlayer.group_known_v1() RETURNS trigger SECURITY DEFINER;
CREATE FUNCTION mqlayer.may_create_group_v1(p_topic_id int, p_name text, p_broadcast_of bigint)
    RETURNS boolean STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer.member_admit_v1() RETURNS trigger SECURITY DEFINER;
CREATE FUNCTION mqlayer.process_beat_v1(p_facts jsonb, p_lease_s double precision, OUT serves_from int,
    OUT in_force int, OUT serves_to int) SECURITY DEFINER;
CREATE FUNCTION mqlayer.process_end_v1(p_id text) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer.protocol_finalize_v1(p_version int, p_drain boolean) RETURNS text SECURITY DEFINER;
CREATE FUNCTION mqlayer.protocol_reopen_v1() RETURNS boolean SECURITY DEFINER;
CREATE FUNCTION mqlayer.assignment_epoch_guard() RETURNS trigger;
CREATE FUNCTION mqlayer.assignment_epoch_given_v1() RETURNS trigger SECURITY DEFINER;
CREATE FUNCTION mqlayer.parked_count_v1() RETURNS trigger SECURITY DEFINER;
CREATE FUNCTION mqlayer.body_named_v1(p_headers text) RETURNS text IMMUTABLE;
CREATE FUNCTION mqlayer.members_wanted_v1(p_topic text, p_group text, p_least int DEFAULT 1,
    p_lag_target_s double precision DEFAULT 60) RETURNS double precision STABLE;
CREATE FUNCTION mqlayer.check_console_v1() RETURNS void STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer.console_session_begin_v1(p_token_hash bytea, p_name text, p_level text, p_bodies boolean,
    p_proof text, p_idle_s int, p_longest_s int) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer.console_session_v1(p_token_hash bytea, p_use boolean, OUT name text, OUT level text,
    OUT bodies boolean, OUT proof text) SECURITY DEFINER;
CREATE FUNCTION mqlayer.console_session_end_v1(p_token_hash bytea) RETURNS boolean SECURITY DEFINER;
CREATE FUNCTION mqlayer.timeline_v1() RETURNS int SECURITY DEFINER;
CREATE FUNCTION mqlayer.system_v1() RETURNS text SECURITY DEFINER;
CREATE FUNCTION mqlayer.server_repair_v1(p_facts jsonb) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer.server_replaced_v1(p_facts jsonb) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer.numbers_used_v1(OUT sequence_name text, OUT used double precision) STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer.server_seen_v1() RETURNS boolean SECURITY DEFINER;
CREATE FUNCTION mqlayer.check_group_v1(p_group_id bigint) RETURNS void STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer.check_count_v1(p_name text, p_count bigint) RETURNS void IMMUTABLE;
CREATE FUNCTION mqlayer.members_forget_v1(p_group_id bigint) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer.beginnings_forget_v1(p_group_id bigint) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer.parked_messages_end_v1(p_group_id bigint, p_lps smallint[], p_sources bigint[], p_seqs bigint[],
    p_handled boolean[], p_given_s double precision, p_actor text) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer.parked_key_end_v1(p_group_id bigint, p_lp smallint, p_name bytea)
    RETURNS SETOF smallint SECURITY DEFINER;
CREATE FUNCTION mqlayer.parked_keys_forget_v1(p_group_id bigint, p_lps smallint[], p_names bytea[])
    RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer.retired_messages_drop_v1(p_group_id bigint, p_limit int) RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer.retired_keys_drop_v1(p_group_id bigint, p_limit int) RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer.bodies_named_v1(p_ids text[]) RETURNS SETOF text STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer.process_beat_v2(p_facts jsonb, p_lease_s double precision, OUT serves_from int,
    OUT in_force int, OUT serves_to int) SECURITY DEFINER;
CREATE FUNCTION mqlayer.parked_messages_end_v2(p_group_id bigint, p_lps smallint[], p_names bytea[], p_sources bigint[],
    p_seqs bigint[], p_handled boolean[], p_given_s double precision, p_actor text) RETURNS void SECURITY DEFINER;


-- mqlayer_archive -----------------------------------------------------------------------------------------------------

CREATE TABLE mqlayer_archive.topic (
    topic_id      int         NOT NULL REFERENCES mqlayer.topic(topic_id),
    batch         bigint      NOT NULL DEFAULT 0,
    segment       int         NOT NULL DEFAULT 1,
    last_pass_at  timestamptz,
    dropped_batch bigint      NOT NULL DEFAULT 0,
    CONSTRAINT topic_key PRIMARY KEY (topic_id)
);
-- Row-level security by the policies read, hold, add, remove.

CREATE TABLE mqlayer_archive.progress (
    partition_id int     NOT NULL REFERENCES mqlayer.partition(partition_id),
    topic_id     int     NOT NULL REFERENCES mqlayer.topic(topic_id),
    upto_offset  bigint  NOT NULL,
    complete     boolean NOT NULL DEFAULT false,
    CONSTRAINT progress_key PRIMARY KEY (partition_id)
);
CREATE INDEX progress_by_topic ON mqlayer_archive.progress (topic_id);

CREATE TABLE mqlayer_archive.mark (
    topic_id  int      NOT NULL REFERENCES mqlayer.topic(topic_id),
    source    bigint   NOT NULL,
    lp        smallint NOT NULL,
    first_seq bigint   NOT NULL,
    last_seq  bigint   NOT NULL,
    segment   int      NOT NULL DEFAULT 1,
    CONSTRAINT mark_key PRIMARY KEY (topic_id, source, lp)
) WITH (fillfactor=50);

CREATE TABLE mqlayer_archive.gap (
    topic_id     int         NOT NULL REFERENCES mqlayer.topic(topic_id),
    source       bigint      NOT NULL,
    lp           smallint    NOT NULL,
    after_seq    bigint      NOT NULL,
    next_seq     bigint      NOT NULL,
    partition_id int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    log_offset   bigint      NOT NULL,
    found_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    accepted_at  timestamptz,
    actor        text,
    CONSTRAINT gap_key PRIMARY KEY (topic_id, source, lp, after_seq),
    CONSTRAINT gap_range CHECK (next_seq > (after_seq + 1)),
    CONSTRAINT gap_actor CHECK (octet_length(actor) <= 4096)
);

CREATE TABLE mqlayer_archive.record (
    topic_id     int         NOT NULL,
    batch        bigint      NOT NULL,
    version      int         NOT NULL,
    partition_id int         NOT NULL,
    log_offset   bigint      NOT NULL,
    source       bigint      NOT NULL,
    lp           smallint    NOT NULL,
    seq          bigint      NOT NULL,
    published_at timestamptz NOT NULL,
    archived_at  timestamptz NOT NULL,
    key          bytea,
    tags         text[],
    headers      text,
    body         bytea       NOT NULL
) PARTITION BY RANGE (archived_at);
CREATE INDEX record_read ON mqlayer_archive.record (topic_id, batch, partition_id);
CREATE INDEX record_ranges ON mqlayer_archive.record USING brin (published_at, log_offset) WITH (pages_per_range='32',
    autosummarize='on');
CREATE INDEX record_body ON mqlayer_archive.record (mqlayer.body_named_v1(headers)) WHERE headers ~~ '%"mq-body":%';

CREATE TABLE mqlayer_archive.outcome (
    topic_id     int         NOT NULL,
    batch        bigint      NOT NULL,
    group_id     bigint      NOT NULL,
    partition_id int         NOT NULL,
    first_offset bigint      NOT NULL,
    last_offset  bigint      NOT NULL,
    outcome      text        NOT NULL,
    attempts     int         NOT NULL,
    delivered_at timestamptz,
    settled_at   timestamptz NOT NULL,
    actor        text        NOT NULL,
    reason       text,
    archived_at  timestamptz NOT NULL,
    epoch        bigint      NOT NULL,
    position     bigint      NOT NULL,
    CONSTRAINT outcome_range CHECK (first_offset <= last_offset),
    CONSTRAINT outcome_known
        CHECK (outcome IN ('handled', 'unmatched', 'parked', 'exhausted', 'rejected', 'skipped', 'discarded',
        'redriven', 'replayed', 'dropped', 'expired'))
) PARTITION BY RANGE (archived_at);
CREATE INDEX outcome_by_offset ON mqlayer_archive.outcome (group_id, partition_id, first_offset);
CREATE INDEX outcome_by_batch ON mqlayer_archive.outcome (topic_id, batch);

CREATE TABLE mqlayer_archive.outcome_queue (
    position     bigint      NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY ("position"),
    topic_id     int         NOT NULL,
    group_id     bigint      NOT NULL,
    partition_id int         NOT NULL,
    log_offset   bigint      NOT NULL,
    outcome      text        NOT NULL,
    attempts     int         NOT NULL,
    delivered_at timestamptz,
    settled_at   timestamptz NOT NULL DEFAULT statement_timestamp(),
    actor        text        NOT NULL,
    reason       text,
    epoch        bigint      NOT NULL DEFAULT COALESCE(pg_sequence_last_value('mqlayer.epoch'), (0)::bigint),
    CONSTRAINT outcome_queue_known
        CHECK (outcome IN ('handled', 'unmatched', 'parked', 'exhausted', 'rejected', 'skipped', 'discarded',
        'redriven', 'replayed', 'dropped', 'expired')),
    CONSTRAINT outcome_queue_offset CHECK (log_offset >= 0 AND log_offset <= 9007199254740991),
    CONSTRAINT outcome_queue_attempts CHECK (attempts >= 0 AND attempts <= 2000000000),
    CONSTRAINT outcome_queue_texts CHECK (octet_length(actor) <= 4096 AND octet_length(reason) <= 65536),
    CONSTRAINT outcome_queue_delivered_at CHECK (delivered_at >= '1970-01-01 00:00:00+00'
        AND delivered_at <= '9000-01-01 00:00:00+00')
);
CREATE INDEX outcome_queue_by_topic ON mqlayer_archive.outcome_queue (topic_id, "position");
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer_archive.outcome_progress (
    group_id     bigint      NOT NULL REFERENCES mqlayer.consumer_group(group_id),
    partition_id int         NOT NULL REFERENCES mqlayer.partition(partition_id),
    epoch        bigint      NOT NULL,
    position     bigint      NOT NULL,
    dropped      bigint      NOT NULL DEFAULT 0,
    dropped_at   timestamptz,
    CONSTRAINT outcome_progress_key PRIMARY KEY (group_id, partition_id)
) WITH (fillfactor=50);
-- Row-level security by the policies read, change, remove, add.

CREATE TABLE mqlayer_archive.day (
    day         date   NOT NULL,
    topic_id    int    NOT NULL REFERENCES mqlayer.topic(topic_id),
    first_batch bigint NOT NULL,
    last_batch  bigint NOT NULL,
    records     bigint NOT NULL,
    outcomes    bigint NOT NULL,
    CONSTRAINT day_key PRIMARY KEY (day, topic_id)
);

CREATE TABLE mqlayer_archive.snapshot (
    snapshot_id int         NOT NULL GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    name        text        NOT NULL,
    upto_at     timestamptz,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT snapshot_name_unique UNIQUE (name),
    CONSTRAINT snapshot_name_form CHECK (name ~ '^[a-z][a-z0-9_.-]{0,62}$')
);

CREATE TABLE mqlayer_archive.snapshot_topic (
    snapshot_id    int     NOT NULL REFERENCES mqlayer_archive.snapshot(snapshot_id) ON DELETE CASCADE,
    topic_id       int     NOT NULL REFERENCES mqlayer.topic(topic_id),
    batch          bigint  NOT NULL,
    version        int     NOT NULL,
    records        bigint  NOT NULL,
    whole          boolean,
    exported_batch bigint  NOT NULL DEFAULT 0,
    CONSTRAINT snapshot_topic_key PRIMARY KEY (snapshot_id, topic_id)
);

CREATE TABLE mqlayer_archive.cut (
    snapshot_id int      NOT NULL REFERENCES mqlayer_archive.snapshot(snapshot_id) ON DELETE CASCADE,
    topic_id    int      NOT NULL,
    source      bigint   NOT NULL,
    lp          smallint NOT NULL,
    first_seq   bigint   NOT NULL,
    last_seq    bigint   NOT NULL,
    CONSTRAINT cut_key PRIMARY KEY (snapshot_id, topic_id, source, lp)
);

CREATE TABLE mqlayer_archive.lake (
    lake_id    int         NOT NULL GENERATED ALWAYS AS IDENTITY,
    location   text        NOT NULL,
    lake_uuid  uuid        NOT NULL DEFAULT gen_random_uuid(),
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT lake_key PRIMARY KEY (lake_id),
    CONSTRAINT lake_location_unique UNIQUE (location),
    CONSTRAINT lake_location CHECK (octet_length(location) >= 1 AND octet_length(location) <= 1024)
);

CREATE TABLE mqlayer_archive.lake_topic (
    lake_id        int         NOT NULL REFERENCES mqlayer_archive.lake(lake_id) ON DELETE CASCADE,
    topic_id       int         NOT NULL REFERENCES mqlayer.topic(topic_id),
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
    CONSTRAINT lake_topic_batches CHECK (first_batch >= 1 AND verified_batch >= 0 AND verified_batch <= batch)
);
CREATE INDEX lake_topic_by_topic ON mqlayer_archive.lake_topic (topic_id);

CREATE TABLE mqlayer_archive.lake_file (
    lake_id     int         NOT NULL REFERENCES mqlayer_archive.lake(lake_id) ON DELETE CASCADE,
    path        text        NOT NULL,
    topic_id    int         NOT NULL,
    table       text        NOT NULL,
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

-- functions
CREATE FUNCTION mqlayer_archive.day_made_v1(p_day date) RETURNS boolean STABLE;
CREATE FUNCTION mqlayer_archive.day_make_v1(p_day date) RETURNS boolean SECURITY DEFINER;
CREATE FUNCTION mqlayer_archive.day_index_v1(p_day date) RETURNS boolean SECURITY DEFINER;
CREATE FUNCTION mqlayer_archive.day_drop_v1(p_day date) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer_archive.lock_v1() RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer_archive.snapshot_v1(p_snapshot int) RETURNS int;
CREATE FUNCTION mqlayer_archive.batches_v1(p_topic int, p_after bigint) RETURNS bigint;
CREATE FUNCTION mqlayer_archive.final_outcomes_v1(topic text, upto_batch bigint DEFAULT NULL)
    RETURNS TABLE(group_name text, partition_id int, log_offset bigint, outcome text, attempts int,
    delivered_at timestamptz, settled_at timestamptz, actor text, reason text) STABLE;
CREATE FUNCTION mqlayer_archive.snapshot_v2(p_snapshot int, p_exported jsonb) RETURNS int;


-- mqlayer_app ---------------------------------------------------------------------------------------------------------

CREATE TABLE mqlayer_app.granted (
    role      regrole NOT NULL,
    privilege text    NOT NULL,
    scope     text    NOT NULL DEFAULT '',
    CONSTRAINT granted_key PRIMARY KEY (role, privilege, scope),
    CONSTRAINT granted_privilege
        CHECK (privilege IN ('publish', 'consume', 'relay', 'work', 'view', 'analyze', 'operate'))
);

CREATE TABLE mqlayer_app.known_group (
    group_id bigint NOT NULL,
    scope    text   NOT NULL,
    CONSTRAINT known_group_key PRIMARY KEY (group_id),
    CONSTRAINT known_group_scope_length CHECK (octet_length(scope) <= 1024)
);

CREATE TABLE mqlayer_app.version_user (
    name text    NOT NULL,
    role regrole NOT NULL,
    CONSTRAINT version_user_key PRIMARY KEY (name)
);

CREATE TABLE mqlayer_app.identity (
    only_one    boolean NOT NULL DEFAULT true,
    outbox_uuid uuid    NOT NULL DEFAULT gen_random_uuid(),
    timeline    int     DEFAULT mqlayer_app.timeline_v1(),
    replaces    uuid[],
    CONSTRAINT identity_key PRIMARY KEY (only_one),
    CONSTRAINT identity_only_one CHECK (only_one)
);

CREATE UNLOGGED TABLE mqlayer_app.term (
    only_one  boolean NOT NULL DEFAULT true,
    term_uuid uuid    NOT NULL DEFAULT gen_random_uuid(),
    CONSTRAINT term_key PRIMARY KEY (only_one),
    CONSTRAINT term_only_one CHECK (only_one)
);

CREATE TABLE mqlayer_app.topic (
    topic_id   int         NOT NULL,
    name       text        NOT NULL,
    body_limit int         NOT NULL,
    deleted_at timestamptz,
    CONSTRAINT topic_key PRIMARY KEY (topic_id),
    CONSTRAINT topic_name_unique UNIQUE (name),
    CONSTRAINT topic_name_length CHECK (octet_length(name) <= CASE WHEN deleted_at IS NULL THEN 63 ELSE 80 END)
);

CREATE TABLE mqlayer_app.counter (
    topic_id   int                   NOT NULL,
    lp         smallint              NOT NULL,
    topic      character varying(63) NOT NULL,
    body_limit int                   NOT NULL,
    seq        bigint                NOT NULL DEFAULT 0,
    CONSTRAINT counter_key PRIMARY KEY (topic_id, lp),
    CONSTRAINT counter_topic_unique UNIQUE (topic, lp)
) WITH (fillfactor=20);

CREATE TABLE mqlayer_app.outbox (
    id         bigint      NOT NULL,
    topic_id   int         NOT NULL,
    lp         smallint    NOT NULL,
    slot       smallint    NOT NULL,
    seq        bigint      NOT NULL,
    created_at timestamptz NOT NULL,
    key        text,
    headers    text,
    body       bytea       NOT NULL
) PARTITION BY LIST (slot);
CREATE INDEX outbox_id ON mqlayer_app.outbox (id);

CREATE TABLE mqlayer_app.outbox_0 PARTITION OF mqlayer_app.outbox FOR VALUES IN ('0');
CREATE UNIQUE INDEX outbox_0_key ON mqlayer_app.outbox_0 (topic_id, lp, seq);

CREATE TABLE mqlayer_app.outbox_1 PARTITION OF mqlayer_app.outbox FOR VALUES IN ('1');
CREATE UNIQUE INDEX outbox_1_key ON mqlayer_app.outbox_1 (topic_id, lp, seq);

CREATE TABLE mqlayer_app.outbox_2 PARTITION OF mqlayer_app.outbox FOR VALUES IN ('2');
CREATE UNIQUE INDEX outbox_2_key ON mqlayer_app.outbox_2 (topic_id, lp, seq);

CREATE TABLE mqlayer_app.outbox_3 PARTITION OF mqlayer_app.outbox FOR VALUES IN ('3');
CREATE UNIQUE INDEX outbox_3_key ON mqlayer_app.outbox_3 (topic_id, lp, seq);

CREATE TABLE mqlayer_app.relayed (
    topic_id int      NOT NULL,
    lp       smallint NOT NULL,
    seq      bigint   NOT NULL,
    CONSTRAINT relayed_key PRIMARY KEY (topic_id, lp)
) WITH (fillfactor=50);

CREATE TABLE mqlayer_app.quarantined (
    topic_id       int         NOT NULL,
    lp             smallint    NOT NULL,
    seq            bigint      NOT NULL,
    reason         text        NOT NULL,
    quarantined_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT quarantined_key PRIMARY KEY (topic_id, lp),
    CONSTRAINT quarantined_reason_length CHECK (octet_length(reason) <= 65536)
);

CREATE TABLE mqlayer_app.voided (
    id         bigint      NOT NULL,
    topic_id   int         NOT NULL,
    lp         smallint    NOT NULL,
    seq        bigint      NOT NULL,
    reason     text        NOT NULL,
    created_at timestamptz NOT NULL,
    key        text,
    headers    text,
    body       bytea,
    voided_at  timestamptz NOT NULL DEFAULT now(),
    ended      text,
    ended_at   timestamptz,
    CONSTRAINT voided_key PRIMARY KEY (id),
    CONSTRAINT voided_ended CHECK (ended IN ('published', 'discarded')),
    CONSTRAINT voided_keeps_its_message CHECK ((ended IS NULL) = (body IS NOT NULL)
        AND (ended IS NULL) = (ended_at IS NULL)),
    CONSTRAINT voided_sizes CHECK (octet_length(key) <= 65536 AND octet_length(headers) <= 1000000
        AND octet_length(body) <= 16777216 AND octet_length(reason) <= 65536)
);
CREATE INDEX voided_body ON mqlayer_app.voided (mqlayer_app.body_named_v1(headers)) WHERE ended IS NULL
    AND headers ~~ '%"mq-body":%';

CREATE TABLE mqlayer_app.relay (
    relay_id    text        NOT NULL,
    lease_until timestamptz NOT NULL,
    sent_at     timestamptz,
    version     text        NOT NULL DEFAULT '',
    least       int         NOT NULL DEFAULT 1,
    most        int         NOT NULL DEFAULT 1,
    acts_on     int         NOT NULL DEFAULT 1,
    host        text        NOT NULL DEFAULT '',
    pid         int         NOT NULL DEFAULT 0,
    CONSTRAINT relay_key PRIMARY KEY (relay_id),
    CONSTRAINT relay_id_length CHECK (octet_length(relay_id) <= 1024),
    CONSTRAINT relay_version CHECK (octet_length(version) <= 64 AND "least" >= 1 AND "least" <= 1000000 AND most >= 1
        AND most <= 1000000 AND acts_on >= 0 AND acts_on <= 1000000),
    CONSTRAINT relay_place CHECK (octet_length(host) <= 1024 AND pid >= 0 AND pid <= 2000000000)
);
CREATE TRIGGER relay_admitted BEFORE INSERT ON mqlayer_app.relay FOR EACH ROW
    EXECUTE FUNCTION mqlayer_app.relay_admit_v1();

CREATE TABLE mqlayer_app.protocol (
    only_one     boolean     NOT NULL DEFAULT true,
    serves_from  int         NOT NULL,
    in_force     int         NOT NULL,
    serves_to    int         NOT NULL,
    expanded_at  timestamptz NOT NULL DEFAULT now(),
    finalized_at timestamptz,
    CONSTRAINT protocol_key PRIMARY KEY (only_one),
    CONSTRAINT protocol_only_one CHECK (only_one),
    CONSTRAINT protocol_versions CHECK (in_force >= 0 AND serves_from >= in_force AND serves_from <= (in_force + 1)
        AND serves_to >= serves_from AND serves_to <= 1000000)
);

CREATE TABLE mqlayer_app.lp_set (
    lp_set      smallint    NOT NULL,
    relay_id    text,
    epoch       bigint      NOT NULL DEFAULT 0,
    lease_until timestamptz NOT NULL DEFAULT '-infinity',
    CONSTRAINT lp_set_key PRIMARY KEY (lp_set),
    CONSTRAINT lp_set_range CHECK (lp_set >= 0 AND lp_set <= 15),
    CONSTRAINT lp_set_relay_id_length CHECK (octet_length(relay_id) <= 1024)
);

CREATE TABLE mqlayer_app.dedup (
    topic_id     int         NOT NULL,
    lp           smallint    NOT NULL,
    token        bytea       NOT NULL,
    seq          bigint      NOT NULL,
    published_at timestamptz NOT NULL,
    CONSTRAINT dedup_key PRIMARY KEY (topic_id, lp, token)
);
CREATE INDEX dedup_published_at ON mqlayer_app.dedup (published_at);

CREATE TABLE mqlayer_app.delayed (
    delayed_id bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    topic_id   int         NOT NULL,
    lp         smallint    NOT NULL,
    due_at     timestamptz NOT NULL,
    created_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    key        text,
    headers    text,
    body       bytea       NOT NULL,
    CONSTRAINT delayed_key PRIMARY KEY (delayed_id)
);
CREATE INDEX delayed_topic_due_at ON mqlayer_app.delayed (topic_id, due_at);
CREATE INDEX delayed_order ON mqlayer_app.delayed (topic_id, lp, due_at, delayed_id);
CREATE INDEX delayed_body ON mqlayer_app.delayed (mqlayer_app.body_named_v1(headers)) WHERE headers ~~ '%"mq-body":%';

CREATE TABLE mqlayer_app.large_body (
    body_id     uuid        NOT NULL,
    topic_id    int         NOT NULL,
    bucket      text,
    location    text,
    size        bigint      NOT NULL,
    sha256      bytea       NOT NULL,
    direct      boolean     NOT NULL,
    created_at  timestamptz NOT NULL DEFAULT clock_timestamp(),
    publish_xid xid8        NOT NULL DEFAULT pg_current_xact_id(),
    cut_id      bigint,
    free_since  timestamptz,
    looked_at   timestamptz,
    removing    boolean     NOT NULL DEFAULT false,
    CONSTRAINT large_body_key PRIMARY KEY (body_id),
    CONSTRAINT large_body_place CHECK ((bucket IS NULL) = (location IS NULL)),
    CONSTRAINT large_body_numbers CHECK (size >= 0 AND size <= 1000000000 AND octet_length(sha256) = 32),
    CONSTRAINT large_body_texts CHECK (octet_length(bucket) <= 255 AND octet_length(location) <= 1024)
);
CREATE INDEX large_body_of_cut ON mqlayer_app.large_body (cut_id, looked_at);
CREATE INDEX large_body_removing ON mqlayer_app.large_body (body_id) WHERE removing;

CREATE TABLE mqlayer_app.large_body_chunk (
    body_id uuid  NOT NULL REFERENCES mqlayer_app.large_body(body_id) ON DELETE CASCADE,
    number  int   NOT NULL,
    data    bytea NOT NULL,
    CONSTRAINT large_body_chunk_key PRIMARY KEY (body_id, number),
    CONSTRAINT large_body_chunk_size CHECK (octet_length(data) <= 1000000)
);

CREATE TABLE mqlayer_app.large_body_cut (
    cut_id      bigint      NOT NULL GENERATED ALWAYS AS IDENTITY,
    topic_id    int         NOT NULL,
    outbox_uuid uuid,
    seqs        bigint[]    NOT NULL,
    made_at     timestamptz NOT NULL DEFAULT clock_timestamp(),
    ends        jsonb,
    trimmed_at  timestamptz,
    CONSTRAINT large_body_cut_key PRIMARY KEY (cut_id),
    CONSTRAINT large_body_cut_size CHECK (octet_length(ends::text) <= 262144)
);

CREATE TABLE mqlayer_app.fence_epoch (
    group_id bigint   NOT NULL,
    lp       smallint NOT NULL,
    epoch    bigint   NOT NULL,
    CONSTRAINT fence_epoch_key PRIMARY KEY (group_id, lp)
) WITH (fillfactor=50);

CREATE TABLE mqlayer_app.fence_applied (
    group_id   bigint      NOT NULL,
    lp         smallint    NOT NULL,
    source_id  bigint      NOT NULL,
    key        text        NOT NULL,
    replay     int         NOT NULL DEFAULT 0,
    seq        bigint      NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT fence_applied_key PRIMARY KEY (group_id, lp, key, source_id)
) WITH (fillfactor=70);

CREATE TABLE mqlayer_app.inbox (
    group_id   bigint      NOT NULL,
    id         text        COLLATE "C" NOT NULL,
    source_id  bigint      NOT NULL,
    lp         smallint    NOT NULL,
    seq        bigint      NOT NULL,
    replay     int         NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    kept_at    timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT inbox_key PRIMARY KEY (group_id, id)
);
CREATE INDEX inbox_kept_at ON mqlayer_app.inbox (group_id, kept_at);

CREATE TABLE mqlayer_app.entity_version (
    name          text             NOT NULL,
    entity        text             NOT NULL,
    version       bigint           NOT NULL,
    held_messages int              NOT NULL DEFAULT 0,
    held_bytes    bigint           NOT NULL DEFAULT 0,
    missing_since timestamptz,
    alarm_at      timestamptz,
    gap_s         double precision NOT NULL,
    released      boolean          NOT NULL DEFAULT false,
    CONSTRAINT entity_version_key PRIMARY KEY (name, entity),
    CONSTRAINT entity_version_held CHECK (held_messages >= 0 AND held_bytes >= 0),
    CONSTRAINT entity_version_missing CHECK (held_messages > 0 OR missing_since IS NULL AND alarm_at IS NULL)
) WITH (fillfactor=70);
CREATE INDEX entity_version_alarm ON mqlayer_app.entity_version (alarm_at) WHERE alarm_at IS NOT NULL;
CREATE INDEX entity_version_released ON mqlayer_app.entity_version (name) WHERE released;

CREATE TABLE mqlayer_app.held_version (
    name    text        NOT NULL,
    entity  text        NOT NULL,
    version bigint      NOT NULL,
    origin  text        NOT NULL,
    headers text        NOT NULL,
    body    bytea       NOT NULL,
    held_at timestamptz NOT NULL DEFAULT clock_timestamp(),
    CONSTRAINT held_version_key PRIMARY KEY (name, entity, version)
);

CREATE TABLE mqlayer_app.held_total (
    name     text     NOT NULL,
    slot     smallint NOT NULL,
    messages bigint   NOT NULL,
    bytes    bigint   NOT NULL,
    CONSTRAINT held_total_key PRIMARY KEY (name, slot)
);

CREATE TABLE mqlayer_app.migration (
    number int         NOT NULL PRIMARY KEY,
    name   text        NOT NULL,
    at     timestamptz NOT NULL DEFAULT now()
);

-- sequences
CREATE SEQUENCE mqlayer_app.publish_any;
CREATE SEQUENCE mqlayer_app.consume_any;
CREATE SEQUENCE mqlayer_app.outbox_number;
CREATE SEQUENCE mqlayer_app.relay_epoch;

-- views
CREATE VIEW mqlayer_app.outbox_message (id bigint, topic_id int, lp smallint, seq bigint, key text, size int,
    facts text, body bytea);
CREATE VIEW mqlayer_app.delayed_fact (delayed_id bigint, topic_id int, lp smallint, due_at timestamptz,
    created_at timestamptz, key text, body_size int);
CREATE VIEW mqlayer_app.delayed_next (topic_id int, due_at timestamptz);
CREATE VIEW mqlayer_app.held_version_fact (name text, entity text, version bigint, origin text, size int,
    held_at timestamptz);

-- functions
CREATE FUNCTION mqlayer_app.caller_v1() RETURNS name STABLE;
CREATE FUNCTION mqlayer_app.has_v1(VARIADIC p_privileges text[]) RETURNS boolean STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.has_for_v1(p_privilege text, p_scope text) RETURNS boolean STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.may_publish_all_v1() RETURNS boolean STABLE;
CREATE FUNCTION mqlayer_app.may_consume_all_v1() RETURNS boolean STABLE;
CREATE FUNCTION mqlayer_app.check_topic_v1(p_topic text) RETURNS void STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.check_group_v1(p_group_id bigint) RETURNS void STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.check_versions_v1(p_name text) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.within_v1(p_name text, p_value numeric, p_low numeric, p_high numeric)
    RETURNS void IMMUTABLE;
CREATE FUNCTION mqlayer_app.timeline_v1() RETURNS int SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.timeline_holds_v1(p_timeline int) RETURNS boolean;
CREATE FUNCTION mqlayer_app.term_v1() RETURNS text SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.relay_admit_v1() RETURNS trigger SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.protocol_finalize_v1(p_version int, p_drain boolean) RETURNS text SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.protocol_reopen_v1() RETURNS boolean SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.outbox_rotate_v1(p_slot smallint) RETURNS text SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.lp_v1(p_key text) RETURNS smallint STABLE;
CREATE FUNCTION mqlayer_app.tags_v1(VARIADIC p_tags text[]) RETURNS jsonb STABLE;
CREATE FUNCTION mqlayer_app.headers_check_v1(p_headers jsonb) RETURNS void;
CREATE FUNCTION mqlayer_app.publish_v1(p_topic text, p_key text, p_body bytea, p_headers jsonb DEFAULT NULL)
    RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.publish_many_v1(p_topics text[], p_keys text[], p_bodies bytea[],
    p_headers jsonb[] DEFAULT NULL) RETURNS int SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.dedup_token_v1(p_key text, p_dedup_id text) RETURNS bytea STABLE;
CREATE FUNCTION mqlayer_app.outbox_put_v1(p_topic text, p_lp smallint, p_key text, p_body bytea, p_headers jsonb,
    p_dedup_id text, OUT seq bigint, OUT duplicate boolean);
CREATE FUNCTION mqlayer_app.publish_once_v1(p_topic text, p_key text, p_body bytea, p_dedup_id text,
    p_headers jsonb DEFAULT NULL, OUT seq bigint, OUT duplicate boolean) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.publish_many_once_v1(p_topics text[], p_keys text[], p_bodies bytea[], p_dedup_ids text[],
    p_headers jsonb[] DEFAULT NULL) RETURNS int SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.publish_at_v1(p_topic text, p_key text, p_body bytea, p_at timestamptz,
    p_headers jsonb DEFAULT NULL) RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.cancel_delayed_v1(p_delayed_id bigint) RETURNS boolean SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.delayed_release_v1(p_limit int, p_wait_ms int, OUT released int,
    OUT next_s double precision) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.body_named_v1(p_headers text) RETURNS text IMMUTABLE;
CREATE FUNCTION mqlayer_app.large_body_use_v1(p_reference text) RETURNS void;
CREATE FUNCTION mqlayer_app.large_body_put_v1(p_topic text, p_body_id uuid, p_size bigint, p_sha256 bytea,
    p_bucket text, p_location text, p_direct boolean, p_number int, p_data bytea) RETURNS void SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.large_body_v1(p_topic text, p_body bytea) RETURNS jsonb SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.large_body_scope_v1() RETURNS uuid STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.large_body_read_v1(p_body_id uuid, p_number int, OUT topic text, OUT bucket text,
    OUT location text, OUT data bytea) STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.large_body_cut_v1(p_limit int, p_hold_s double precision) RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.large_body_waits_v1(p_body_id uuid) RETURNS boolean STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.large_body_sent_v1(p_cut_id bigint) RETURNS boolean STABLE SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.outbox_renew_v1(p_keep boolean) RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.outbox_recover_v1(p_outbox uuid, p_topic_ids int[], p_lps smallint[], p_seqs bigint[],
    p_fallen boolean[]) RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.topic_drop_v1(p_topic_id int, p_name text, p_force boolean, OUT dropped boolean,
    OUT unsent bigint, OUT delayed bigint, OUT voided bigint) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.topic_rows_drop_v1(p_topic_id int, p_limit int) RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.fence_v1(p_group_id bigint, p_lp smallint, p_source_id bigint, p_key text, p_seq bigint,
    p_epoch bigint, p_replay int DEFAULT 0, OUT answer text, OUT epoch bigint) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.fence_many_v1(p_group_id bigint, p_lps smallint[], p_source_ids bigint[], p_keys text[],
    p_seqs bigint[], p_epochs bigint[], p_replays int[], OUT answers text[], OUT epochs bigint[]) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.fence_raise_v1(p_group_id bigint, p_lp_from smallint, p_lp_to smallint, p_epoch bigint)
    RETURNS int SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.fence_clean_v1(p_horizon interval, p_limit int) RETURNS int SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.fence_copy_v1(p_group_id bigint, p_new_id bigint, p_replay int, p_lp_from smallint,
    p_lp_to smallint) RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.inbox_put_v1(p_group_id bigint, p_source_id bigint, p_lp smallint, p_seq bigint,
    p_name text DEFAULT NULL, p_seek int DEFAULT 0, p_replay bigint DEFAULT NULL) RETURNS text SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.inbox_copy_v1(p_group_id bigint, p_new_id bigint, p_replay int, p_after text, p_limit int,
    OUT last_id text, OUT copied bigint) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.held_total_add_v1(p_name text, p_messages bigint, p_bytes bigint) RETURNS void;
CREATE FUNCTION mqlayer_app.version_take_v1(p_name text, p_entity text, p_version bigint, p_body bytea, p_headers text,
    p_origin text, p_first bigint, p_messages int, p_bytes bigint, p_all_messages bigint, p_all_bytes bigint,
    p_gap_s double precision, OUT answer text, OUT current bigint, OUT alarm boolean, OUT missing_s double precision,
    OUT held int, OUT versions bigint[], OUT bodies bytea[], OUT headers text[], OUT origins text[]) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.version_released_v1(p_name text, p_gap_s double precision, OUT entity text,
    OUT versions bigint[], OUT bodies bytea[], OUT headers text[], OUT origins text[]) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.version_set_v1(p_name text, p_entity text, p_version bigint, p_drop boolean DEFAULT false)
    RETURNS int SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.fence_clean_v2(p_horizon interval, p_block bigint, p_blocks int, OUT forgotten int,
    OUT blocks bigint) SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.check_body_v1(p_topic text, p_body bytea, p_limit int) RETURNS void;
CREATE FUNCTION mqlayer_app.publish_further_v1(p_topic text, p_key text, p_body bytea, p_headers jsonb)
    RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.publish_v2(p_topic text, p_key text, p_body bytea, p_headers jsonb DEFAULT NULL)
    RETURNS bigint SECURITY DEFINER;
CREATE FUNCTION mqlayer_app.fence_many_v2(p_group_id bigint, p_lps smallint[], p_source_ids bigint[], p_keys text[],
    p_seqs bigint[], p_epochs bigint[], p_replays int[], OUT answers text[], OUT epochs bigint[]) SECURITY DEFINER;
