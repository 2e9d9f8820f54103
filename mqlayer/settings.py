"""Settings of a process, from ``MQLAYER_*`` environment variables or arguments."""

from __future__ import annotations

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """What a process needs to reach the stores, and its bounds.

    Every field can be given as an environment variable with the prefix ``MQLAYER_``, for example
    ``MQLAYER_DSN``. Addresses are secrets: they are never shown by ``repr``.
    Durations are seconds; sizes are bytes.
    """

    model_config = SettingsConfigDict(env_prefix="MQLAYER_", frozen=True, extra="forbid", hide_input_in_errors=True)

    dsn: SecretStr = SecretStr("")
    """Postgres with the control schema (nodes, topics, routes, groups)."""
    app_dsn: SecretStr | None = None
    """Postgres with the application schema (outbox, fence); the control database where not given."""
    broker_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """Celery's broker: another Redis than the partitions' nodes."""
    broker_user: str = ""
    broker_password: SecretStr = SecretStr("")
    broker_password_file: str = ""
    """How to log in to the broker, where its URL does not say; the file is read anew at each connection."""
    redis_user: str = ""
    """This process's user on the nodes; `mqlayer node acl ROLE` prints what it may need. One for the whole process."""
    redis_password: SecretStr = SecretStr("")
    redis_password_file: str = ""
    """The file that holds it, read anew at each connection; `{node}` in its path stands for the node's name."""
    redis_sentinel_user: str = ""
    redis_sentinel_password: SecretStr = SecretStr("")
    redis_sentinel_password_file: str = ""
    """The same for Sentinels, which have users of their own."""
    redis_ca_file: str = ""
    """Whose certificates are believed of nodes at rediss://; the system's authorities where not given."""
    redis_cert_file: str = ""
    redis_key_file: str = ""
    """The certificate that this process shows to nodes that ask for one."""
    key_prefix: str = Field(default="mq", pattern=r"^[a-z][a-z0-9_.-]{0,31}$")
    """First part of every Redis key; lets several systems share a node."""

    lease_s: float = Field(default=10.0, gt=0.2)
    """How long a member may go on without a heartbeat before its partitions are given away."""
    lease_margin: float = Field(default=0.2, gt=0, lt=0.9)
    """Part of the lease by which a member stops before the database frees its partitions."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    socket_timeout_s: float = Field(default=10.0, gt=0)
    delivery_timeout_s: float = Field(default=30.0, gt=0)
    """How long a synchronous publish waits for an outcome."""
    dedup_window_s: float = Field(default=300.0, ge=1, le=86_400)
    """How long a message's dedup id is remembered. The same for all processes: the shortest one counts."""
    inbox_horizon_s: float = Field(default=604_800.0, ge=3_600)
    """How long the inbox remembers an effect at least; longer while its message may still be delivered."""
    relay_chunk_rows: int = Field(default=2_000, ge=1)
    relay_chunk_bytes: int = Field(default=4_000_000, ge=1)
    """How much a relay reads from an outbox at once; its memory is a few times that, whatever the backlog."""
    instance: str = ""
    """Which instance of its broadcast groups this process is; the host's name where not given."""
    health_port: int = Field(default=0, ge=0, le=65_535)
    """Where this process says whether it lives and serves; 0: nowhere. Of several, each takes the next port."""
    health_host: str = "127.0.0.1"
    """The address of that; anyone who reaches it may ask."""
    allow_unsafe_redis: bool = False
    """Serve on Redis settings that void the promise (tests of such settings, throw-away data)."""

    def control_dsn(self) -> str:
        """Return the control database's DSN, to be given to the driver only."""
        return self.dsn.get_secret_value()

    def application_dsn(self) -> str:
        """Return the application database's DSN, to be given to the driver only."""
        return (self.app_dsn or self.dsn).get_secret_value()
