"""Settings of a process, from arguments, ``MQLAYER_*`` environment variables, or `.env`."""

from __future__ import annotations

import difflib
import os
import re
from collections import ChainMap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal, Self

from pydantic import Field, ModelWrapValidatorHandler, SecretStr, ValidationError, model_validator
from pydantic_settings import BaseSettings, InitSettingsSource, PydanticBaseSettingsSource, SettingsConfigDict

from mqlayer.env_file import ENV_FILE, PREFIX, env_file
from mqlayer.errors import InvalidInput

OTHERS: Final = (
    "MQLAYER_REDIS_URL",
    "MQLAYER_CONSUMERS",
    "MQLAYER_LOG_LEVEL",
    "MQLAYER_LOG_JSON",
    "MQLAYER_FAILPOINTS",
    "MQLAYER_ALLOW_FAILPOINTS",
    "MQLAYER_SUPERVISOR_FD",
    "MQLAYER_SUPERVISOR_NUMBER",
)
"""Variables for other readers than Settings."""
_OF_TESTS: Final = ("MQLAYER_TEST_", "MQLAYER_CHAOS_")
# Kubernetes sets MQLAYER_RELAY_PORT in each pod for a service mqlayer-relay.
_OF_KUBERNETES: Final = re.compile(
    r"\w+_(SERVICE_(HOST|PORT(_\w+)?)|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)=.*|\w+_PORT=(tcp|udp|sctp)://.*"
)


_sources: Final[list[Callable[[], Mapping[str, Any]]]] = []
_first_sources: Final[list[Callable[[], Mapping[str, Any]]]] = []


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Seconds; 0: no limit, None: by kind of process."""

    statement_s: float | None = None
    lock_s: float | None = None
    idle_in_transaction_s: float | None = None


@dataclass(frozen=True, slots=True)
class ConnectionOptions:
    """How to reach a database."""

    direct: str = field(default="", repr=False)
    direct_setting: str = "MQLAYER_DIRECT_DSN"
    pooled_by_session: bool = False
    pooler_prepares: bool = False
    limits: SessionLimits = SessionLimits()
    reads_only: bool = False
    role: str = ""
    """Taken by `SET ROLE`; needs a direct connection."""


NO_DATABASE: Final = "no database given: set MQLAYER_DSN, or start a stack with `mqlayer up`"


class Dsn(str):
    """A DSN with connection options."""

    __slots__ = ("options",)
    options: ConnectionOptions

    def __new__(cls, dsn: str, options: ConnectionOptions = ConnectionOptions()) -> Dsn:
        """Return a DSN."""
        made = super().__new__(cls, dsn)
        made.options = options
        return made


def options_of(dsn: str) -> ConnectionOptions:
    """Return a DSN's connection options."""
    return dsn.options if isinstance(dsn, Dsn) else ConnectionOptions()


def as_role(dsn: Dsn, role: str) -> Dsn:
    """Return a DSN whose sessions take a Postgres role; empty: the login's."""
    return Dsn(str(dsn), replace(dsn.options, role=role))


class Settings(BaseSettings):
    """Addresses and limits of a process; the page 'Settings' explains them.

    Each field is also a variable: `dsn` is MQLAYER_DSN. Durations are seconds, sizes bytes. `repr` hides addresses.
    """

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid", hide_input_in_errors=True)

    dsn: SecretStr = SecretStr("")
    """Postgres with nodes, topics, routes, groups."""
    app_dsn: SecretStr | None = None
    """Postgres with outbox and fence; default: `dsn`."""
    direct_dsn: SecretStr | None = None
    """`dsn` past a pooler; required with one."""
    app_direct_dsn: SecretStr | None = None
    """`app_dsn` past a pooler; without `app_dsn`, default: `direct_dsn`."""
    pooler: Literal["auto", "session"] = "auto"
    """`session`: the pooler keeps a server connection per client. `auto`: trust none."""
    pooler_prepares: bool = False
    """The pooler keeps clients' prepared statements apart."""
    statement_timeout_s: float | None = Field(default=None, ge=0)
    """0: no limit, None: by kind of process; the next two too."""
    lock_timeout_s: float | None = Field(default=None, ge=0)
    idle_in_transaction_timeout_s: float | None = Field(default=None, ge=0)
    broker_url: SecretStr = SecretStr("redis://127.0.0.1:6379/0")
    """Another Redis than the nodes."""
    broker_user: str = ""
    broker_password: SecretStr = SecretStr("")
    broker_password_file: str = ""
    """Replace the URL's credentials; Celery reads the file at its start."""
    redis_user: str = ""
    """On all nodes; `mqlayer node acl ROLE` prints its rights."""
    redis_password: SecretStr = SecretStr("")
    redis_password_file: str = ""
    """Read at each connection; `{node}` stands for the node's name."""
    redis_sentinel_user: str = ""
    redis_sentinel_password: SecretStr = SecretStr("")
    redis_sentinel_password_file: str = ""
    redis_ca_file: str = ""
    """Default: the system's authorities."""
    redis_cert_file: str = ""
    redis_key_file: str = ""
    """This process's certificate, for nodes that require one."""
    redis_hosts: str = ""
    """Nodes' and Sentinels' hosts, divided by commas: no other one gets the login. Default: all."""
    key_prefix: str = Field(default="mq", pattern=r"^[a-z][a-z0-9_.-]{0,31}$")
    """First part of every Redis key; systems can share a node."""

    lease_s: float = Field(default=10.0, gt=0.2)
    """A member silent for longer loses its partitions."""
    lease_margin: float = Field(default=0.2, gt=0, lt=0.9)
    """Part of the lease by which a member stops earlier than the database frees partitions."""
    connect_timeout_s: float = Field(default=5.0, gt=0)
    socket_timeout_s: float = Field(default=10.0, gt=0)
    delivery_timeout_s: float = Field(default=30.0, gt=0)
    """A synchronous publish's wait for an outcome."""
    large_bodies: Literal["off", "postgres", "s3"] = "off"
    """Where this process stores bodies over the threshold."""
    large_body_threshold: int = Field(default=262_144, ge=16_384, le=1_000_000)
    large_body_limit: int = Field(default=100_000_000, ge=1_000_000, le=1_000_000_000)
    """Bytes of a stored body; a handler has it in memory."""
    large_body_hold_s: float = Field(default=86_400.0, ge=3_600)
    """How long an unreferenced body stays."""
    s3_bucket: str = ""
    s3_prefix: str = "mqlayer/"
    s3_endpoint: str = ""
    """Default: AWS. Credentials come from boto3's chain."""
    s3_region: str = ""
    dedup_window_s: float = Field(default=300.0, ge=1, le=86_400)
    """How long dedup ids are remembered; of several processes, the shortest counts."""
    inbox_horizon_s: float = Field(default=604_800.0, ge=3_600)
    """The inbox's minimum memory of an effect."""
    lag_target_s: float = Field(default=60.0, ge=1)
    """A group needs as many members as work its lag off within this time."""
    relay_chunk_rows: int = Field(default=2_000, ge=1)
    relay_chunk_bytes: int = Field(default=4_000_000, ge=1)
    """Most that a relay reads at once; it needs a few times that memory."""
    error_messages: bool = True
    """Whether logs, events and Postgres hold the messages of handlers' exceptions, besides type and line."""
    zone: str = Field(default="", pattern=r"^([a-z0-9][a-z0-9_.-]{0,62})?$")
    """Where this process is: its members prefer partitions on nodes of this zone."""
    instance: str = ""
    """Its name in broadcast groups; default: the host's."""
    deployment: str = Field(default="main", pattern=r"^[a-z0-9][a-z0-9_.-]{0,62}$")
    """The version of the program, as `mqlayer group deploy` names it."""
    health_port: int = Field(default=0, ge=0, le=65_535)
    """0: none; of several processes, each takes the next."""
    health_host: str = "127.0.0.1"
    """Anyone who reaches it may ask."""
    metrics: bool = False
    """Record metrics, and answer `/metrics` beside the probes; needs the extra `otel`."""
    traces: bool = False
    """Make spans, and carry their context in messages; needs the extra `otel`."""
    trace_parent: bool = False
    """A handler's span is a child of its message's, not a root linked to it."""
    trace_all: bool = False
    """Handlers have spans for messages without a trace too."""
    analytics_dir: str = ""
    """Where scheduled analytics write pages and certificates; empty: nowhere."""
    certificate_key: str = ""
    """File of the Ed25519 key that signs certificates; empty: unsigned."""
    spark_master: str = ""
    """Spark's master for `mqlayer analytics`, such as spark://host:7077; default: Spark's own."""
    finalize_after_s: float = Field(default=0.0, ge=0)
    """Workers finalize an upgrade this long after `mqlayer migrate`, once no older process lives; 0: never."""
    allow_unsafe_redis: bool = False
    """Accept Redis settings that void the promise: for tests."""

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # as the base class has it
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Read arguments, the environment, `.env`, and what a framework has."""
        return init_settings, InitSettingsSource(settings_cls, dict(_given(cls)))

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown_variables(cls, values: Any) -> Any:
        # A misspelt variable would leave a default in force.
        for place, variables in (("", os.environ), (f" in {ENV_FILE}", env_file())):
            unknown = sorted(one for one in variables if one.startswith(PREFIX) and not _is_known(one, variables, cls))
            if unknown:
                raise InvalidInput(f"no setting is called {', '.join(unknown)}{place}: {_meant(unknown[0], cls)}")
        return values

    @model_validator(mode="wrap")
    @classmethod
    def _name_variables(cls, values: Any, handler: ModelWrapValidatorHandler[Self]) -> Self:
        try:
            return handler(values)
        except ValidationError as error:
            raise InvalidInput(_faults(error, cls)) from None

    def control_dsn(self) -> Dsn:
        """Return the control database's DSN, password included. Raises InvalidInput where none is given."""
        _check_given(self.dsn)
        return Dsn(self.dsn.get_secret_value(), self._options(self.direct_dsn, "MQLAYER_DIRECT_DSN"))

    def application_dsn(self) -> Dsn:
        """Return the application database's DSN, password included. Raises InvalidInput where none is given."""
        _check_given(self.dsn if self.app_dsn is None else self.app_dsn)
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


def _faults(error: ValidationError, settings: type[Settings]) -> str:
    """Name each wrong setting, never its value: it may be a secret."""
    told = []
    for fault in error.errors(include_input=False, include_url=False, include_context=False)[:3]:
        name = ".".join(map(str, fault["loc"]))
        if name in settings.model_fields:
            told.append(f"{PREFIX}{name.upper()}: {_lower_first(fault['msg'])}")
        else:
            told.append(f"{name}: {_meant(name, settings)}")
    return f"wrong settings: {'; '.join(told)}. The page 'Settings' has what each takes"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _check_given(dsn: SecretStr) -> None:
    # libpq would take a local server with an empty one.
    if not dsn:
        raise InvalidInput(NO_DATABASE)


def switched_on(field: str) -> bool:
    """Return a switch of this process, without a look at its other settings. Raises InvalidInput."""
    from pydantic import TypeAdapter

    value = _given(Settings).get(field, False)
    try:
        return TypeAdapter(bool).validate_python(value)
    except ValueError:
        raise InvalidInput(f"{PREFIX}{field.upper()} is true or false, not {value!r}") from None


def _given(settings: type[Settings]) -> Mapping[str, Any]:
    # Fields are plain: to look at the annotation of each, as pydantic does here, takes longer than all the rest.
    given = (_fields(variables, settings) for variables in (os.environ, env_file()))
    return ChainMap(*(dict(source()) for source in _first_sources), *given, *(dict(source()) for source in _sources))


def add_source(source: Callable[[], Mapping[str, Any]]) -> None:
    """Let all Settings of this process take what nothing else gives from a framework's own, by field."""
    if source not in _sources:
        _sources.append(source)


def _fields(variables: Mapping[str, str], settings: type[Settings]) -> dict[str, Any]:
    ours = ((name.upper(), value) for name, value in variables.items())
    found = ((_field(name), value) for name, value in ours if name.startswith(PREFIX))
    return {name: value for name, value in found if name in settings.model_fields}


def _field(variable: str) -> str:
    return variable.removeprefix(PREFIX).lower()


def add_first_source(source: Callable[[], Mapping[str, Any]]) -> None:
    """Let a framework's values of tests win over the environment."""
    if source not in _first_sources:
        _first_sources.append(source)


def _meant(variable: str, settings: type[Settings]) -> str:
    known = [*(name.upper() for name in settings.model_fields), *(name.removeprefix(PREFIX) for name in OTHERS)]
    near = difflib.get_close_matches(variable.removeprefix(PREFIX), known, n=1)
    return f"did you mean {PREFIX}{near[0]}?" if near else "unset it; the page 'Settings' has all settings"


def _is_known(variable: str, variables: Mapping[str, str], settings: type[Settings]) -> bool:
    if _field(variable) in settings.model_fields or variable in OTHERS or variable.startswith(_OF_TESTS):
        return True
    return _OF_KUBERNETES.fullmatch(f"{variable}={variables[variable]}") is not None
