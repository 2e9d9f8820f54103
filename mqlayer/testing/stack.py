"""Real servers of one test, and the application that runs on them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, Final, Self

import psycopg
from pydantic import SecretStr

from mqlayer import outbox
from mqlayer.consuming.api.app import App
from mqlayer.domain.codecs import TypedBodies
from mqlayer.domain.routing import Route
from mqlayer.env_file import PREFIX
from mqlayer.errors import NotFound
from mqlayer.groups.group import Group, ensure_group, settings_of
from mqlayer.inspect.group_status import GroupStatus, group_statuses
from mqlayer.postgres.queries import query
from mqlayer.redelivery import DeadMessage, ParkedKey, dead_messages, parked_keys, release_parked
from mqlayer.redelivery.filters import ParkedFilter
from mqlayer.redelivery.lists import PAGE_LIMIT
from mqlayer.relay import Relay, RelayLimits
from mqlayer.runtime.route_cache import RouteCache, load_route
from mqlayer.runtime.runtime import Runtime, open_runtime
from mqlayer.settings import Settings
from mqlayer.testing.app_run import AppRun
from mqlayer.testing.faults import Faults
from mqlayer.testing.outbox_table import effects_in
from mqlayer.testing.servers import TestServers
from mqlayer.topics import create_topic, register_node
from mqlayer.typed_topic import Topic

QUICK_RELAY: Final = RelayLimits(sweep_s=0.05, compare_s=0.1, progress_s=0.05, heartbeat_s=0.05, late_s=0.5)
LEASE_S: Final = 1.0
PARTITIONS: Final = 2
POLL_S: Final = 0.02


def variables_of_stacks() -> tuple[str, ...]:
    """Return the environment variables that name servers, or how to reach them."""
    return tuple(f"{PREFIX}{name.upper()}" for name in Settings.model_fields)


class TestStack:
    """A database, nodes and a relay for one test, and the applications that the test runs.

    `settings`, `dsn`, `env`: where the servers are, for this process and for those that the test starts.
    """

    __test__ = False

    def __init__(self, servers: TestServers, dsn: str, key_prefix: str) -> None:
        self.servers, self.dsn = servers, dsn
        self.settings = Settings(
            dsn=SecretStr(dsn), key_prefix=key_prefix, lease_s=LEASE_S, connect_timeout_s=2.0, socket_timeout_s=5.0
        )
        self.env: Mapping[str, str] = {
            "MQLAYER_DSN": dsn, "MQLAYER_KEY_PREFIX": key_prefix, "MQLAYER_LEASE_S": str(LEASE_S)
        }  # fmt: skip
        self._cleanup = contextlib.ExitStack()
        self._runs: dict[int, AppRun] = {}
        self.faults = Faults(self)

    def __enter__(self) -> Self:
        for name, url in self.servers.urls.items():
            register_node(self.runtime, name=name, url=url)
        self._cleanup.enter_context(effects_in(self.runtime.outbox))
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @cached_property
    def runtime(self) -> Runtime:
        """An operator's way to the servers."""
        opened = open_runtime(self.settings, name="mqlayer test", actor="test")
        return self._cleanup.enter_context(opened)

    def add_topic(self, topic: str | TypedBodies[Any], *, partitions: int = PARTITIONS, **options: Any) -> Route:
        """Create a topic; `options` as of `create_topic`. Starting an application creates those that it consumes."""
        return create_topic(self.runtime, _name_of(topic), partitions=partitions, **options)

    def add_group(self, topic: str | TypedBodies[Any], name: str, **rules: Any) -> Group:
        """Create a group without a member; `rules` as of `App.consumer`."""
        settings = settings_of(rules.pop("start", None), **rules)
        with contextlib.closing(RouteCache(self.runtime.control)) as routes:
            return ensure_group(self.runtime, routes, topic=_name_of(topic), name=name, settings=settings)

    def execute(self, statement: str, parameters: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run a statement in a transaction of its own; return its rows."""
        with psycopg.connect(self.dsn) as connection:
            cursor = connection.execute(statement.encode(), parameters or None)
            return cursor.fetchall() if cursor.description is not None else []

    def publish(
        self,
        topic: str | Topic[Any],
        body: Any,
        *,
        key: str | None = None,
        headers: Mapping[str, str] | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        """Publish through the outbox, in a transaction of its own."""
        with psycopg.connect(self.dsn) as connection:
            if isinstance(topic, Topic):
                topic.publish(connection, body, key=key, headers=headers, tags=tags)
            else:
                outbox.publish(connection, topic, body=body, key=key, headers=headers, tags=tags)

    def start(self, app: App) -> None:
        """Create the topics that it consumes, and start it; it stops at the end of the test."""
        run = self.run_of(app)
        for topic in {consumer.topic for consumer in app.consumers}:
            if not self._is_there(topic):
                self.add_topic(topic)
        self._relay.check()
        run.start()

    def stop(self, app: App) -> None:
        """Stop it; its handlers end."""
        self.run_of(app).stop()
        self._runs.pop(id(app))

    @contextlib.contextmanager
    def run(self, app: App) -> Iterator[App]:
        """Run it for the block."""
        self.start(app)
        try:
            yield app
        finally:
            self.stop(app)

    def drain(self, app: App, *, timeout_s: float = 20.0, raise_errors: bool = True) -> None:
        """Wait until its groups have handled all that was published, and each fault that struck is over.

        Raises the first error of a handler, and TimeoutError, which says what waits. With `raise_errors=False` it
        raises no handler's error, and leaves keys that wait for an operator parked.
        """
        run, deadline, quiet = self.run_of(app), time.monotonic() + timeout_s, 0
        while quiet < 2:
            self._relay.check()
            run.check(raise_errors=raise_errors)
            left = self._left(run, parked=raise_errors)
            # Twice: a handler may publish to a topic that was looked at before.
            quiet = 0 if left else quiet + 1
            if left and time.monotonic() >= deadline:
                raise TimeoutError(f"not all is handled after {timeout_s:g} s: {'; '.join(left)}")
            time.sleep(POLL_S)
        run.check(raise_errors=raise_errors)

    def parked(self, topic: str | TypedBodies[Any], *, group: str | None = None) -> list[str | None]:
        """Return a group's parked keys."""
        return [row.key for row in self._parked(_name_of(topic), group)]

    def dead(self, topic: str | TypedBodies[Any], *, group: str | None = None) -> list[DeadMessage]:
        """Return messages that left a group without an effect, latest first."""
        return dead_messages(self.runtime.control, topic=_name_of(topic), group=group, limit=PAGE_LIMIT)

    def release(self, topic: str | TypedBodies[Any], key: str | None = None, *, group: str | None = None) -> None:
        """Have a parked key, or all, tried now. Raises NotFound for a key that is not parked."""
        rows = self._parked(_name_of(topic), group, key)
        if key is not None and not rows:
            raise NotFound("parked key", key, f"parked are: {self.parked(topic, group=group)}")
        for row in rows:
            release_parked(self.runtime, row.topic, row.group, key=row.key)

    def run_of(self, app: App) -> AppRun:
        """Return what knows of an application's runs here."""
        return self._runs.setdefault(id(app), AppRun(app, self.settings, self.runtime, self.is_drained))

    def is_drained(self, run: AppRun) -> bool:
        """Whether its groups have handled all that the partitions hold."""
        return not any(_unhandled(status) for status in self._statuses(run))

    def close(self) -> None:
        """Stop all that runs."""
        for run in [*self._runs.values()]:
            run.stop()
        self._runs.clear()
        self._cleanup.close()

    @cached_property
    def _relay(self) -> RelayThread:
        return self._cleanup.enter_context(RelayThread(self.settings))

    def _is_there(self, topic: str) -> bool:
        try:
            load_route(self.runtime.control, topic)
        except NotFound:
            return False
        return True

    def _left(self, run: AppRun, *, parked: bool) -> list[str]:
        with self.runtime.outbox.connection() as connection:
            row = connection.execute(query("check_outbox")).fetchone()
        waiting = [f"{row[0]} messages wait in the outbox"] if row and row[0] else []
        left = [_unhandled(one, parked=parked or self._is_due(one)) for one in self._statuses(run)]
        return [*waiting, *run.unfinished(), *filter(None, left)]

    def _is_due(self, status: GroupStatus) -> bool:
        rows = self._parked(status.facts.topic, status.facts.name) if status.parked.messages else ()
        return any(row.due_in_s is not None for row in rows)

    def _parked(self, topic: str, group: str | None, key: str | None = None) -> list[ParkedKey]:
        return parked_keys(self.runtime.control, ParkedFilter(topic, group, key), limit=PAGE_LIMIT)

    def _statuses(self, run: AppRun) -> Iterator[GroupStatus]:
        for topic, group in run.groups:
            for status in group_statuses(self.runtime, topic):
                # The instances of a broadcast group have positions.
                if status.facts.name == group or status.facts.name.startswith(f"{group}@"):
                    yield status


class RelayThread:
    """A relay in a thread."""

    def __init__(self, settings: Settings) -> None:
        self._relay = Relay(settings, limits=QUICK_RELAY)
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="mqlayer-relay", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._relay.stop()
        self._thread.join(30.0)

    def check(self) -> None:
        """Raise the error that ended it."""
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        try:
            self._relay.run()
        except BaseException as error:  # noqa: BLE001 - handed to the test
            self._failure = error


def _name_of(topic: str | TypedBodies[Any]) -> str:
    return topic if isinstance(topic, str) else topic.name


def _unhandled(status: GroupStatus, *, parked: bool = True) -> str:
    named = f"group {status.facts.name} of topic {status.facts.topic}"
    if status.facts.state != "live" or any(one.lag is None for one in status.partitions):
        return f"{named} does not answer"
    if status.lag or (parked and status.parked.messages):
        also = f", {status.parked.messages} are parked" if status.parked.messages else ""
        return f"{named} has {status.lag} messages to handle{also}"
    return ""
