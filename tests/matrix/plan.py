"""Rows of the matrix: the versions that each row runs on, and the parts of the tests that it runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Product = Literal["redis", "valkey", "postgres", "python", "docker", "nginx"]

PARTS: Final[dict[str, tuple[str, ...]]] = {
    "unit": ("tests/unit",),
    "scripts": (
        "tests/property/test_change_scripts.py",
        "tests/property/test_consumer_scripts.py",
        "tests/property/test_cut_scripts.py",
        "tests/property/test_log_append.py",
        "tests/property/test_pop_scripts.py",
        "tests/property/test_retention_scripts.py",
        "tests/property/test_shared_scripts.py",
        "tests/integration/test_scripts.py",
    ),
    "consumers": (
        "tests/integration/test_consumer_order.py",
        "tests/integration/test_consumer_ownership.py",
        "tests/integration/test_consumer_settling.py",
        "tests/integration/test_parking.py",
        "tests/integration/test_receiver.py",
        "tests/integration/test_shared.py",
        "tests/chaos/test_consumer_kills.py",
    ),
    "producers": (
        "tests/integration/test_async_producer.py",
        "tests/integration/test_first_producers.py",
        "tests/integration/test_producer.py",
        "tests/integration/test_producer_faults.py",
        "tests/integration/test_producer_kills.py",
        "tests/integration/test_producer_routes.py",
    ),
    "relay": (
        "tests/integration/test_outbox_psycopg.py",
        "tests/integration/test_relay.py",
        "tests/integration/test_relay_kills.py",
        "tests/integration/test_relay_outages.py",
        "tests/integration/test_rotation.py",
    ),
    "routes": (
        "tests/integration/test_node_drain.py",
        "tests/integration/test_route_changes.py",
        "tests/integration/test_route_gates.py",
        "tests/chaos/test_route_change_kills.py",
    ),
    "fail-over": (
        "tests/integration/failover/test_crashed_postgres.py",
        "tests/integration/failover/test_durability.py",
        "tests/integration/failover/test_lost_commits.py",
        "tests/integration/failover/test_new_timeline.py",
        "tests/integration/failover/test_promotion.py",
        "tests/integration/failover/test_sentinel.py",
        "tests/integration/test_durability_classes.py",
        "tests/integration/test_node_data_loss.py",
    ),
    "archive": ("tests/integration/test_archive.py", "tests/chaos/test_archive_kills.py"),
    "users": (
        "tests/integration/test_redis_rights.py",
        "tests/integration/test_redis_users.py",
        "tests/integration/test_tls.py",
    ),
    "schema": (
        "tests/integration/test_migrations.py",
        "tests/integration/test_query_plans.py",
        "tests/integration/test_schema_file.py",
        "tests/integration/test_search_paths.py",
        "tests/integration/rights/test_matrix.py",
    ),
    "cluster": (
        "tests/integration/failover/test_cluster.py",
        "tests/integration/failover/test_cluster_tls.py",
        "tests/integration/failover/test_cluster_users.py",
    ),
    "atomic slots": ("tests/matrix/atomic_slots.py",),
    "refusals": ("tests/matrix/old_servers.py",),
    "containers": ("tests/matrix/container_servers.py",),
    "tls": ("tests/matrix/tls_everywhere.py",),
    "compose": ("tests/matrix/composed_stack.py",),
}
LEFT_OUT_OF_UNIT: Final = ("tests/unit/test_models.py", "tests/unit/test_pyright.py", "tests/unit/test_report_page.py")
"""They look at no server and no Python: they search models, check types, and draw a page of Spark."""

EVERYWHERE: Final = ("consumers", "producers", "relay", "routes", "fail-over", "archive")
ON_REDIS: Final = ("scripts", *EVERYWHERE, "users")
ON_POSTGRES: Final = (*EVERYWHERE, "schema")
ON_PYTHON: Final = ("unit", "scripts", "consumers", "producers", "relay", "users")


@dataclass(frozen=True, slots=True)
class Series:
    """The versions of a product that begin with `number`, and the Debian package that has them."""

    product: Product
    number: str
    suite: str
    package: str

    def __str__(self) -> str:
        return f"{self.product}-{self.number}"

    def has(self, version: str) -> bool:
        """Return whether a version such as `9.1.2` is of this series."""
        return f"{version}.".startswith(f"{self.number}.")


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One run of tests. Without a Redis it has the embedded one, without a Python the one of `.venv`."""

    name: str
    postgres: Series
    redis: Series | None
    python: Series | None = None
    parts: tuple[str, ...] = ON_REDIS
    others: tuple[Series, ...] = ()
    """Programs that tests start besides."""
    full: bool = False
    """With the tests that are marked so."""
    too_old: bool = False
    """The library takes none of its servers: tests start them themselves, beside others."""
    long: bool = False
    """Of a pair: chaos lasts ten minutes."""
    images: tuple[str, ...] = ()
    """Stand-ins of an engine that runs for the row alone, in which tests start containers."""

    @property
    def series(self) -> tuple[Series, ...]:
        """The series that have to be there."""
        return tuple(series for series in (self.redis, self.postgres, self.python, *self.others) if series)

    def arguments(self, parts: tuple[str, ...] = ()) -> list[str]:
        """Return pytest's arguments: the files of these parts, or of all."""
        chosen = [part for part in self.parts if part in parts or not parts]
        files = [file for part in chosen for file in PARTS[part]]
        left_out = [f"--ignore={file}" for file in LEFT_OUT_OF_UNIT if "unit" in chosen]
        return [*files, *left_out, *(["--full"] if self.full else [])]


REDIS_6: Final = Series("redis", "6.0", "bullseye", "redis-server")
REDIS_7: Final = Series("redis", "7.0", "bookworm", "redis-server")
REDIS_8: Final = Series("redis", "8.0", "trixie", "redis-server")
VALKEY_8: Final = Series("valkey", "8.1", "trixie", "valkey-server")
VALKEY_9: Final = Series("valkey", "9", "sid", "valkey-server")
POSTGRES_13: Final = Series("postgres", "13", "bullseye", "postgresql-13")
POSTGRES_15: Final = Series("postgres", "15", "bookworm", "postgresql-15")
POSTGRES_17: Final = Series("postgres", "17", "trixie", "postgresql-17")
POSTGRES_18: Final = Series("postgres", "18", "sid", "postgresql-18")
PYTHON_11: Final = Series("python", "3.11", "bookworm", "python3.11")
PYTHON_13: Final = Series("python", "3.13", "trixie", "python3.13")
PYTHON_14: Final = Series("python", "3.14", "sid", "python3.14")
COMPOSE: Final = Series("docker", "2.26", "trixie", "docker-compose")
NGINX: Final = Series("nginx", "1.26", "trixie", "nginx")
DOCKER: Final = Series("docker", "20.10", "bookworm", "docker.io")

ROWS: Final = (
    MatrixRow("redis-6.2", POSTGRES_15, None),
    MatrixRow("redis-7.0", POSTGRES_15, REDIS_7),
    MatrixRow("redis-8.0", POSTGRES_15, REDIS_8),
    MatrixRow("valkey-8.1", POSTGRES_15, VALKEY_8),
    MatrixRow("valkey-9", POSTGRES_15, VALKEY_9),
    MatrixRow("cluster-redis-7.0", POSTGRES_15, REDIS_7, parts=("cluster",), full=True),
    MatrixRow("cluster-redis-8.0", POSTGRES_15, REDIS_8, parts=("cluster",), full=True),
    MatrixRow("cluster-valkey-8.1", POSTGRES_15, VALKEY_8, parts=("cluster",), full=True),
    MatrixRow("cluster-valkey-9", POSTGRES_15, VALKEY_9, parts=("cluster", "atomic slots"), full=True),
    MatrixRow("postgres-15", POSTGRES_15, REDIS_7, parts=("schema",)),
    MatrixRow("postgres-17", POSTGRES_17, REDIS_7, parts=ON_POSTGRES),
    MatrixRow("postgres-18", POSTGRES_18, REDIS_7, parts=ON_POSTGRES),
    MatrixRow("python-3.11", POSTGRES_15, REDIS_7, PYTHON_11, parts=ON_PYTHON),
    MatrixRow("python-3.13", POSTGRES_15, REDIS_7, PYTHON_13, parts=ON_PYTHON),
    MatrixRow("python-3.14", POSTGRES_15, REDIS_7, PYTHON_14, parts=ON_PYTHON),
    MatrixRow("too-old", POSTGRES_13, REDIS_6, parts=("refusals",), too_old=True),
    MatrixRow("containers", POSTGRES_18, REDIS_8, parts=("containers",), images=("redis", "postgres")),
    MatrixRow("compose", POSTGRES_18, REDIS_8, parts=("compose",), images=("valkey", "postgres", "python")),
    MatrixRow("tls", POSTGRES_18, REDIS_8, PYTHON_13, parts=("tls",), others=(NGINX,)),
    MatrixRow("newest", POSTGRES_18, VALKEY_9, PYTHON_14, parts=(*ON_REDIS, "schema")),
)

PAIRS: Final = (
    *(
        MatrixRow(f"{redis}+{postgres}", postgres, redis)
        for redis in (REDIS_7, REDIS_8, VALKEY_8, VALKEY_9)
        for postgres in (POSTGRES_15, POSTGRES_18)
    ),
    MatrixRow(f"{REDIS_7}+{POSTGRES_17}", POSTGRES_17, REDIS_7),
    MatrixRow(f"{VALKEY_9}+{POSTGRES_17}", POSTGRES_17, VALKEY_9),
    MatrixRow("newest", POSTGRES_18, VALKEY_9, long=True),
)
"""Servers of the chaos run: every Redis with the oldest and the newest Postgres, and ten minutes on the newest."""
