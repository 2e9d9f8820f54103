"""Receivers of ordered pop: no membership, no assignment.

```python
with mqlayer.Receiver("orders", group="mailer") as receiver:
    while running:
        for message in receiver.receive(max_messages=32, visibility_timeout_s=30):
            send_mail(message.body)
            receiver.ack([message])
```
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Self

from mqlayer.arguments import explain_methods
from mqlayer.domain.body_streams import BodyStream
from mqlayer.domain.names import check_name
from mqlayer.domain.retry_rules import Policy
from mqlayer.errors import Conflict
from mqlayer.groups.group import Group, GroupSettings, Scope, check_settings, check_start
from mqlayer.groups.start_positions import Start
from mqlayer.idempotency import record_effect
from mqlayer.postgres.caller_connections import run
from mqlayer.receiving.pop_message import PopMessage
from mqlayer.receiving.pop_session import PopSession, open_session, receive_call
from mqlayer.settings import Settings


@explain_methods
class ReceiverBase:
    """A receiver's arguments, and its session while open."""

    def __init__(
        self,
        topic: str,
        *,
        group: str,
        settings: Settings | None = None,
        scope: Scope | None = None,
        start: Start | None = None,
        tag_filter: str | None = None,
        attempt_limit: int | None = None,
        policy: Policy | None = None,
    ) -> None:
        self._topic, self._group = check_name("topic", topic), check_name("group", group)
        check_start(start)
        self._wanted = GroupSettings(
            start, mode="pop", scope=scope, tag_filter=tag_filter, attempt_limit=attempt_limit, policy=policy
        )
        check_settings(self._wanted)
        self._settings = settings
        self._session: PopSession | None = None

    @property
    def group(self) -> Group:
        """The group at opening."""
        return self._opened().group

    @property
    def fetch_count(self) -> int:
        """Calls to partitions."""
        return self._opened().fetcher.fetch_count

    def _connect(self) -> PopSession:
        if self._session is not None:
            raise Conflict("the receiver is open", "close it first")
        return open_session(self._topic, self._wanted, group=self._group, settings=self._settings or Settings())

    def _opened(self) -> PopSession:
        if self._session is None:
            raise not_open()
        return self._session


def not_open() -> Conflict:
    """Return the error for a closed receiver."""
    return Conflict("the receiver is not open", "use it as a context manager, or call open()")


@explain_methods
class Receiver(ReceiverBase):
    """Receives and settles messages of a topic for a group with ordered pop.

    Any number may run in any process; a dead one delays its messages by their visibility timeout. The first creates the
    group: `scope` is withheld while a message is out ("key", the default, or "partition"); `start` as in
    `App.consumer`. One thread at a time receives, any settles. Opening raises Conflict for a group of members, or
    another scope.
    """

    def open(self) -> Self:
        """Connect; create a missing group. Raises the stores' errors."""
        self._session = self._connect()
        return self

    def close(self) -> None:
        """Disconnect. Messages stay out until their visibility timeout: `nack` them before."""
        session, self._session = self._session, None
        if session is not None:
            session.close()

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def receive(
        self,
        max_messages: int = 32,
        *,
        visibility_timeout_s: float = 30.0,
        wait_s: float = 20.0,
        attempt_id: str | None = None,
        ack: Iterable[PopMessage] = (),
        renew_for_s: float = 0.0,
    ) -> list[PopMessage]:
        """Return the next batch, in order per partition; empty after `wait_s`.

        Other receivers get neither these messages nor later ones of their scope until they are settled or time out.
        Handle a key's in turn; on failure `nack`, skip the rest of the key. After a lost reply, the same `attempt_id`
        (a-z, then a-z 0-9 _ . -) returns the same messages, uncounted, from nodes that answer. `ack`: messages to
        settle in the same write, as the method does; if that raises, the next call returns the new ones.
        `renew_for_s`: extend the messages' timeouts so long, until each is settled. Raises InvalidInput for bad bounds
        (max_messages 1 to 500), StoreUnavailable if no partition could be asked, VersionRefused.
        """
        session = self._opened()
        call = receive_call(max_messages, visibility_timeout_s, wait_s, attempt_id, ack, renew_for_s)
        with session.receiving:
            while (fetched := session.poll(call)) is None:
                session.wait([call])
            session.delivered(call, fetched.messages)
            return fetched.messages

    def fetch_body(self, message: PopMessage) -> bytes:
        """Return a message's body, also a large one. Raises MissingBody, StoreUnavailable."""
        return self._opened().body_of(message)

    def open_body(self, message: PopMessage) -> BodyStream:
        """Return a message's body as a file that fetches as it is read, while the receiver is open."""
        return self._opened().stream_of(message, BodyStream)

    def ack(self, messages: Iterable[PopMessage]) -> None:
        """Settle messages of any batches; idempotent.

        Raises StaleToken for redelivered messages (the rest is settled), InvalidInput for unknown offsets,
        StoreUnavailable: call again.
        """
        self._opened().ack(messages)

    def nack(self, message: PopMessage, *, delay_s: float = 0.0, error: BaseException | None = None) -> None:
        """Return a failed message and all behind it in its scope; they come again after the delay, in order.

        It counts as a failed attempt, up to the group's limit; `error` is recorded with it, as a handler's would be.
        Tokens of those behind are void. Raises as `ack`; repeated after StoreUnavailable, StaleToken means that the
        first call succeeded.
        """
        self._opened().nack(message, delay_s, error)

    def extend(self, message: PopMessage, seconds: float) -> None:
        """Withhold a message for `seconds` from now. Raises as `ack`."""
        self._opened().extend(message, seconds)

    def fence(self, connection: Any, message: PopMessage) -> None:
        """Check, in the effect's own transaction, that the message is not applied and its epoch is current.

        Call it first, once per message, on the effect's connection. Roll back on AlreadyApplied, StaleOwner, StaleToken
        and OutOfOrder; after AlreadyApplied, `ack`. The seq per key makes the effect happen once, since receivers share
        the epoch. If an earlier message of the key is in hand without its effect: OutOfOrder.
        """
        run(connection, self._opened().fence(message))

    def inbox(self, connection: Any, message: PopMessage, *, name: str | None = None) -> None:
        """Record the effect in its transaction: once, in any order, under any token. After AlreadyApplied, `ack`."""
        record_effect(connection, self._opened().inbox_entry(message, name))
