"""What a process's operations and services share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import ClassVar

from mqlayer.errors import InvalidInput
from mqlayer.postgres.database import Database
from mqlayer.postgres.protocol import InForce
from mqlayer.redis.acl_check import RequiredAccess
from mqlayer.redis.cluster_connection import ClusterConnection
from mqlayer.redis.node_connection import Node, NodeConnection
from mqlayer.redis.roles import RedisRole
from mqlayer.runtime.heartbeat_sender import HeartbeatSender
from mqlayer.settings import Settings


@dataclass(frozen=True, slots=True)
class Runtime:
    """A process's databases and settings, and the actor that audit rows name.

    What needs two of these takes a Runtime; what needs one database takes that. It opens and closes nothing: its maker
    does.
    """

    control: Database
    settings: Settings
    application: Database | None = None
    """The database of outbox and fence; None: this process has no way to it."""
    actor: str = "api"
    in_force: InForce = field(default_factory=InForce)
    """The control schema's protocol version that this process acts on."""
    beats: Database | None = None
    """Heartbeats' own connections; None: `control`."""
    sender: HeartbeatSender | None = None
    """Sends heartbeats together; None: each by itself."""
    connection_class: ClassVar[type[NodeConnection]] = NodeConnection
    cluster_connection_class: ClassVar[type[ClusterConnection]] = ClusterConnection

    @property
    def prefix(self) -> str:
        """First part of every Redis key."""
        return self.settings.key_prefix

    @property
    def outbox(self) -> Database:
        """The application database. Raises InvalidInput without one."""
        if self.application is None:
            raise InvalidInput("no application database given: pass `application` to Runtime")
        return self.application

    @property
    def heartbeats(self) -> Database:
        """Heartbeats' control database."""
        return self.beats or self.control

    def connection(
        self, node: Node, role: RedisRole | None = None, *, any_run: bool = False, within_s: float | None = None
    ) -> NodeConnection:
        """Return a connection to a node; it connects on use.

        `role`: rights to check once per run. `within_s`: in place of the settings' timeouts.
        """
        settings = self.settings
        return (self.cluster_connection_class if node.is_cluster else self.connection_class)(
            node,
            connect_timeout_s=settings.connect_timeout_s if within_s is None else within_s,
            timeout_s=settings.socket_timeout_s if within_s is None else within_s,
            any_run=any_run,
            unsafe=settings.allow_unsafe_redis,
            required=None if role is None else RequiredAccess(role, self.prefix, node.is_cluster),
        )


@contextmanager
def open_runtime(
    settings: Settings, *, name: str = "mqlayer", actor: str = "api", max_size: int = 4
) -> Iterator[Runtime]:
    """Lend a runtime with a pool per schema, each opened at first use. `name`: shown by Postgres.

    Two pools also on one database: a holder of control locks may need the outbox, and must not queue behind its locks'
    waiters.
    """
    with (
        Database(settings.control_dsn(), application=name, max_size=max_size) as control,
        Database(settings.application_dsn(), application=name, max_size=max_size) as application,
    ):
        yield Runtime(control, settings, application, actor)
