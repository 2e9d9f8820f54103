"""Settings of a process, from ``MQLAYER_*`` environment variables or arguments."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from mqlayer.errors import InvalidInput

PREFIX: Final = "MQLAYER_"
OTHERS: Final = (
    "MQLAYER_REDIS_URL",
    "MQLAYER_CONSUMERS",
    "MQLAYER_LOG_LEVEL",
    "MQLAYER_LOG_JSON",
    "MQLAYER_FAILPOINTS",
    "MQLAYER_SUPERVISOR_FD",
    "MQLAYER_SUPERVISOR_NUMBER",
)
"""Variables that are no field of Settings: of commands, of the worker, of a supervisor to its children."""
_OF_TESTS: Final = ("MQLAYER_TEST_", "MQLAYER_CHAOS_")
_OF_KUBERNETES: Final = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*|\w+_PORT=(tcp|udp|sctp)://.*"
)
"""Kubernetes tells each pod of the services beside it: one that is called mqlayer-relay makes MQLAYER_RELAY_PORT."""


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """How long a session may be at a statement, wait for a lock, and do nothing inside of a transaction; 0: no limit,
    None: as long as the kind of process needs."""

    statement_s: float | None = None
    lock_s: float | None = None
    idle_in_transaction_s: float | None = None


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How a database is reached, and what its sessions are for."""

    direct: str = field(default="", repr=False)
    """The DSN past a pooler."""
    direct_setting: str = "MQLAYER_DIRECT_DSN"
    pooled_by_session: bool = False
    pooler_prepares: bool = False
    limits: SessionLimits = SessionLimits()
    reads_only: bool = False


class Dsn(str):
    """A DSN that knows the way to its database. A plain str is a DSN with the ordinary way."""

    __slots__ = ("options",)
    options: ConnectionOptions

    def __new__(cls, dsn: str, options: ConnectionOptions = ConnectionOptions()) -> Dsn:
        """Make it of a DSN."""
        made = super().__new__(cls, dsn)
        made.options = options
        return made


def options_of(dsn: str) -> ConnectionOptions:
    """Return the way of a DSN."""
    return dsn.options if isinstance(dsn, Dsn) else ConnectionOptions()


class Settings(BaseSettings):
    """What a process needs to reach the stores, and its bounds.

    Every field can be given as an environment variable with the prefix ``MQLAYER_``, for example
    ``MQLAYER_DSN``. Addresses are secrets: they are never shown by ``repr``.
    Durations are seconds; sizes are bytes.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True)

    dsn: SecretStr = SecretStr("")
    """Postgres with the control schema (nodes, topics, routes, groups)."""
    app_dsn: SecretStr | None = None
    """Postgres with the application schema (outbox, fence); the control database where not given."""
    direct_dsn: SecretStr | None = None
    """The control database past a pooler: needed where MQLAYER_DSN leads through one."""
    app_direct_dsn: SecretStr | None = None
    """The application database past a pooler; the control database's where there is no MQLAYER_APP_DSN."""
    pooler: Literal["auto", "session"] = "auto"
    """`session`: the pooler keeps a server connection for each of ours. `auto`: no pooler is trusted to."""
    pooler_prepares: bool = False
    """Whether the pooler keeps clients' prepared statements apart, as pgbouncer's max_prepared_statements does."""
    statement_timeout_s: float | None = Field(default=None, ge=0)
    """How long a statement of ours may take; 0: no limit. Where not given, as long as the kind of process needs."""
    lock_timeout_s: float | None = Field(default=None, ge=0)
    """How long a statement of ours waits for a lock; 0: no limit. Where not given, as the kind of process needs."""
    idle_in_transaction_timeout_s: float | None = Field(default=None, ge=0)
    """After how long Postgres ends a transaction of ours whose process does nothing; 0: never. Where not given, as the
    kind of process needs."""
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

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_variables(cls, values: Any) -> Any:
        """Refuse MQLAYER_* variables that nothing reads: one that is misspelt would leave a default in force."""
        unknown = sorted(name for name in os.environ if name.startswith(PREFIX) and not _is_known(name, cls))
        if unknown:
            known = [*(name.upper() for name in cls.model_fields), *(name.removeprefix(PREFIX) for name in OTHERS)]
            near = difflib.get_close_matches(unknown[0].removeprefix(PREFIX), known, n=1)
            meant = (
                f"did you mean {PREFIX}{near[0]}?" if near else "unset it; docs/reference/settings.md has all settings"
            )
            raise InvalidInput(f"no setting is called {', '.join(unknown)}: {meant}")
        return values

    def control_dsn(self) -> Dsn:
        """Return the control database's DSN, to be given to the driver only."""
        return Dsn(self.dsn.get_secret_value(), self._options(self.direct_dsn, "MQLAYER_DIRECT_DSN"))

    def application_dsn(self) -> Dsn:
        """Return the application database's DSN, to be given to the driver only."""
        if self.app_dsn is None:
            options = self._options(self.app_direct_dsn or self.direct_dsn, "MQLAYER_DIRECT_DSN")
            return Dsn(self.dsn.get_secret_value(), options)
        return Dsn(self.app_dsn.get_secret_value(), self._options(self.app_direct_dsn, "MQLAYER_APP_DIRECT_DSN"))

    def _options(self, direct: SecretStr | None, setting: str) -> ConnectionOptions:
        return ConnectionOptions(
            direct=direct.get_secret_value() if direct is not None else "",
            direct_setting=setting,
            pooled_by_session=self.pooler == "session",
            pooler_prepares=self.pooler_prepares,
            limits=SessionLimits(self.statement_timeout_s, self.lock_timeout_s, self.idle_in_transaction_timeout_s),
        )


def _is_known(variable: str, settings: type[Settings]) -> bool:
    name = variable.removeprefix(PREFIX).lower()
    if name in settings.model_fields or variable in OTHERS or variable.startswith(_OF_TESTS):
        return True
    return _OF_KUBERNETES.fullmatch(f"{variable}={os.environ[variable]}") is not None
