"""Transactions without a database: what a handler publishes, fences and notes happens at its commit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from types import TracebackType
from typing import Any, Final, NamedTuple, Self, TypeAlias

from mqlayer.errors import InvalidInput
from mqlayer.outbox.outbox_message import OutboxMessage
from mqlayer.postgres.caller_connections import Row, StandIn, Statement
from mqlayer.postgres.queries import query
from mqlayer.testing.broker import OUTBOX, MemoryBroker, check_message, token

_NO_SQL: Final = (
    "a session of TestApp runs no SQL: give the code under test a database of its own, or keep its effects behind a "
    "function that the test replaces"
)

_Mark: TypeAlias = tuple[int, int, int, int]
_BEGIN: Final[_Mark] = (0, 0, 0, 0)


class Effect(NamedTuple):
    """What a fence or an inbox records: a name, and a seq under it."""

    name: tuple[Any, ...]
    seq: int


class MemoryEffects:
    """Committed effects: of the fence the highest seq of a key, of the inbox each message."""

    def __init__(self) -> None:
        self._seqs: dict[tuple[Any, ...], int] = {}

    def has(self, effect: Effect) -> bool:
        """Whether it was recorded."""
        return self._seqs.get(effect.name, 0) >= effect.seq

    def record(self, effect: Effect) -> None:
        """Record it."""
        self._seqs[effect.name] = effect.seq


class TransactionState(StandIn):
    """What an open transaction did; nothing of it counts before the commit."""

    def __init__(self, broker: MemoryBroker, effects: MemoryEffects) -> None:
        self._broker, self._effects = broker, effects
        self._messages: list[tuple[OutboxMessage, int]] = []
        self._delayed: list[tuple[OutboxMessage, float, int]] = []
        self._cancelled: list[int] = []
        self._recorded: list[Effect] = []
        self._depth = 0
        self._answers: dict[str, Callable[[Mapping[str, Any]], Row]] = {
            query("outbox_publish"): self._publish,
            query("outbox_publish_once"): self._publish,
            query("outbox_publish_many"): self._publish_many,
            query("outbox_publish_many_once"): self._publish_many,
            query("delayed_publish"): self._publish_delayed,
            query("delayed_cancel"): self._cancel_delayed,
            query("fence"): self._fence,
            query("fence_many"): self._fence_many,
            query("inbox_put"): self._note,
        }

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{type(self).__name__} has no {name!r}: {_NO_SQL}")

    def answer(self, statement: Statement) -> Row:
        """Return a statement's row. Raises InvalidInput for one that needs a database."""
        known = self._answers.get(statement.text)
        if known is None:
            raise InvalidInput("a session of TestApp has no versions: use a database for what needs mqlayer.Versions")
        return known(statement.parameters)

    def _commit(self) -> None:
        for effect in self._recorded:
            self._effects.record(effect)
        for number in self._cancelled:
            self._broker.cancel(number)
        for message, due_s, number in self._delayed:
            if number not in self._cancelled:
                self._broker.delay(message, due_s, number)
        for message, _ in self._messages:
            self._broker.append(message, OUTBOX)
        self._roll_back(_BEGIN)

    def _mark(self) -> _Mark:
        return len(self._messages), len(self._delayed), len(self._cancelled), len(self._recorded)

    def _roll_back(self, mark: _Mark) -> None:
        messages, delayed, cancelled, recorded = mark
        del self._messages[messages:], self._delayed[delayed:]
        del self._cancelled[cancelled:], self._recorded[recorded:]

    def _end(self, error: BaseException | None) -> None:
        if error is None:
            self._commit()
        self._roll_back(_BEGIN)

    @contextmanager
    def _level(self) -> Iterator[None]:
        """Undo a failed block; the outermost commits."""
        mark = self._mark()
        self._depth += 1
        try:
            yield
        except BaseException:
            self._roll_back(mark)
            raise
        finally:
            self._depth -= 1
        if not self._depth:
            self._commit()

    # -- statements ---------------------------------------------------------------------------------------------------

    def _publish(self, facts: Mapping[str, Any]) -> Row:
        message = OutboxMessage(*(facts[name] for name in OutboxMessage._fields))
        check_message(message)
        first = self._broker.first_of(message)
        if first is not None:
            return first.identity.seq, True
        twin = [seq for other, seq in self._messages if _is_twin(message, other)]
        if twin:
            return twin[0], True
        lp = self._broker.lp(message)
        seq = 1 + self._broker.log(message.topic).seqs[OUTBOX, lp]
        seq += sum(other.topic == message.topic and self._broker.lp(other) == lp for other, _ in self._messages)
        self._messages.append((message, seq))
        return seq, False

    def _publish_many(self, facts: Mapping[str, Any]) -> Row:
        columns = [facts[f"{name}s" if name != "body" else "bodies"] for name in ("topic", "key", "body")]
        columns += [facts["headers"], facts.get("dedup_ids")]
        size = len(facts["topics"])
        rows = zip(*([None] * size if column is None else column for column in columns), strict=True)
        return (sum(not self._publish(OutboxMessage(*row)._asdict())[1] for row in rows),)

    def _publish_delayed(self, facts: Mapping[str, Any]) -> Row:
        message, clock = OutboxMessage(*(facts[name] for name in OutboxMessage._fields)), self._broker.clock
        check_message(message)
        wait_s = facts["delay_s"] if facts["at"] is None else (facts["at"] - clock.now()).total_seconds()
        number = self._broker.next_number()
        self._delayed.append((message, clock.seconds() + wait_s, number))
        return (number,)

    def _cancel_delayed(self, facts: Mapping[str, Any]) -> Row:
        number = facts["delayed_id"]
        mine = any(number == other for _, _, other in self._delayed)
        waits = number not in self._cancelled and (mine or self._broker.waits(number))
        if waits:
            self._cancelled.append(number)
        return (waits,)

    def _fence(self, facts: Mapping[str, Any]) -> Row:
        source, key = facts["source"], facts["key"]
        name = ("fence", facts["group_id"], facts["lp"], source, key if key is not None else ("alone", facts["seq"]))
        return self._take(Effect((*name, facts["replay"]), facts["seq"])), facts["epoch"]

    def _fence_many(self, facts: Mapping[str, Any]) -> Row:
        names = {"lp": "lps", "source": "sources", "key": "keys", "seq": "seqs", "epoch": "epochs", "replay": "replays"}
        size = len(facts["lps"])
        columns = {name: [None] * size if facts[many] is None else facts[many] for name, many in names.items()}
        rows = [{name: column[at] for name, column in columns.items()} for at in range(size)]
        answers = [self._fence({"group_id": facts["group_id"], **row}) for row in rows]
        return [answer for answer, _ in answers], [epoch for _, epoch in answers]

    def _note(self, facts: Mapping[str, Any]) -> Row:
        names = ("source", "lp", "seq") if facts["name"] is None else ("name",)
        entry = tuple(facts[name] for name in ("group_id", "seek", "replay", *names))
        return (self._take(Effect(("inbox", *entry), 1)),)

    def _take(self, effect: Effect) -> str:
        if self._effects.has(effect) or any(
            mine.name == effect.name and mine.seq >= effect.seq for mine in self._recorded
        ):
            return "applied"
        self._recorded.append(effect)
        return "current"


class MemorySession(TransactionState):
    """A transaction of a test, for everything that takes a connection; `with` commits it."""

    def commit(self) -> None:
        """Commit."""
        self._commit()

    def rollback(self) -> None:
        """Undo all changes since the last commit."""
        self._roll_back(_BEGIN)

    close = rollback

    @contextmanager
    def transaction(self) -> Iterator[Self]:
        """Open a transaction; inside of one, a savepoint."""
        with self._level():
            yield self

    begin = transaction

    def execute(self, *_: Any, **__: Any) -> Any:
        """Raise InvalidInput: there is no database."""
        raise InvalidInput(_NO_SQL)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)


class AsyncMemorySession(TransactionState):
    """As MemorySession, for async code."""

    asynchronous = True

    async def commit(self) -> None:
        """Commit."""
        self._commit()

    async def rollback(self) -> None:
        """Undo all changes since the last commit."""
        self._roll_back(_BEGIN)

    close = rollback

    @asynccontextmanager
    async def transaction(self) -> AsyncIterator[Self]:
        """Open a transaction; inside of one, a savepoint."""
        with self._level():
            yield self

    begin = transaction

    async def execute(self, *_: Any, **__: Any) -> Any:
        """Raise InvalidInput: there is no database."""
        raise InvalidInput(_NO_SQL)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end(error)


def _is_twin(message: OutboxMessage, other: OutboxMessage) -> bool:
    if message.dedup_id is None or other.dedup_id is None or message.topic != other.topic:
        return False
    return token(message) == token(other)


def messages_of(session: TransactionState) -> Sequence[OutboxMessage]:
    """Return what an open transaction has published."""
    return [message for message, _ in session._messages]  # noqa: SLF001
