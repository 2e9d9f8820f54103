"""Histories: what each process of a test did, written so that a kill at any line leaves them readable.

Every process appends lines of JSON to a file of its own: one write per line, an `invoke` before each operation and its
outcome after it. Nothing waits for the disk: a killed process loses nothing that it wrote, only a machine would.
An operation without an outcome may have happened or not, as if it had ended with `info`.

    with History(directory, "writer-3") as history:
        operation = history.begin(Publish(topic="orders", key="k1", value=digest(body)))
        ...
        operation.ok(source=1, lp=17, seq=4)

Bodies are not stored, only a short value: something readable that the test put into the body, or `digest(body)`.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Callable, Iterator
from hashlib import blake2b
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Literal, Self, TypeAlias

import msgspec

__all__ = [
    "Ack",
    "Append",
    "Deliver",
    "Drain",
    "Effect",
    "Event",
    "FallBack",
    "Gate",
    "Health",
    "History",
    "Lineage",
    "MessageEvent",
    "Operation",
    "OwnershipEvent",
    "Phase",
    "Publish",
    "Quarantined",
    "Record",
    "Seal",
    "SharedSequence",
    "digest",
    "read_histories",
]

Phase = Literal["invoke", "ok", "fail", "info"]
"""Before the operation; after it: it happened, it certainly did not happen, it may have happened."""


class MessageEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Something that happened to one message; `seq` is 0 and `value` empty while they are not known."""

    topic: str
    key: str | None = None
    source: int = 0
    lp: int = 0
    seq: int = 0
    value: str = ""


class Publish(MessageEvent, frozen=True, kw_only=True, omit_defaults=True, tag="publish"):
    """A message given to an outbox or to a direct producer.

    In an outbox, begun before the publishing statement, `ok` after the commit, `fail` after a rollback.
    """

    transaction: str = ""


class Append(MessageEvent, frozen=True, kw_only=True, omit_defaults=True, tag="append"):
    """A record put into a partition, or found in it by reading it; an answer `dup` is none.

    `run` names the stretch of the node's life between two losses of data, for instance its run id.
    """

    partition: int
    offset: int
    run: str = ""


class Deliver(MessageEvent, frozen=True, kw_only=True, omit_defaults=True, tag="deliver"):
    """A handler's run: begun before the handler, `ok` when it returned, `fail` when it raised."""

    group: str
    partition: int
    epoch: int = 0
    attempt: int = 1


class Effect(MessageEvent, frozen=True, kw_only=True, omit_defaults=True, tag="effect"):
    """An effect of a handler. Fenced ones are best read from the sink itself, with their place in its order.

    That place must be drawn after the fence call, in the same transaction.
    """

    group: str
    partition: int
    epoch: int = 0
    fenced: bool = True
    place: int | None = None


class Ack(MessageEvent, frozen=True, kw_only=True, omit_defaults=True, tag="ack"):
    """A message reported as settled: `ok` if the node took it, `fail` if it refused (fenced)."""

    group: str
    partition: int
    epoch: int = 0


class Settled(MessageEvent, frozen=True, kw_only=True, omit_defaults=True, tag="settled"):
    """A message whose handling a member reported, written when it knows that the node took that."""

    group: str
    partition: int
    epoch: int = 0


class Quarantined(MessageEvent, frozen=True, kw_only=True, omit_defaults=True, tag="quarantined"):
    """The written reason for which a message leaves (skip, dead) or waits elsewhere (park)."""

    group: str
    how: Literal["skip", "park", "dead"]
    reason: str = ""


class Gate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="gate"):
    """The opening of a successor partition for a group, because these parents are drained."""

    topic: str
    group: str
    partition: int
    parents: tuple[int, ...]


class Drain(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="drain"):
    """A group's word that it has settled all of a sealed partition: begun before it is said, `ok` if it was taken."""

    topic: str
    group: str
    partition: int
    epoch: int = 0


class Lineage(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="lineage"):
    """Which partitions a route change put this one in the place of; holds at all times."""

    topic: str
    partition: int
    parents: tuple[int, ...]


class Seal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="seal"):
    """The command record that closes a partition, behind the record with this offset; `run` as for an append."""

    topic: str
    partition: int
    offset: int
    run: str = ""


class OwnershipEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="assignment"):
    """A partition taken, kept or released by a member.

    `until_ns`: up to when it may go on by its own lease, on the clock of the histories.
    """

    topic: str
    group: str
    partition: int
    member: str
    epoch: int
    change: Literal["taken", "kept", "released"]
    until_ns: int | None = None


class FallBack(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="fall_back"):
    """The loss of recent changes of a partition: what was settled in it may come again."""

    topic: str
    partition: int


class Health(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind", tag="health"):
    """Whether, from here on, messages must flow: false from before a fault until after its repair."""

    healthy: bool


Event: TypeAlias = (
    Publish
    | Append
    | Deliver
    | Effect
    | Ack
    | Settled
    | Quarantined
    | Gate
    | Drain
    | Lineage
    | Seal
    | OwnershipEvent
    | FallBack
    | Health
)


class Record(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of a history: an event, and who wrote it when.

    `at_ns` is CLOCK_MONOTONIC, which all processes of one machine share.
    `sequence` numbers the lines of all processes where the test gave them a SharedSequence.
    `operation` joins an invoke with its outcome, within one process.
    """

    process: str
    pid: int
    operation: int
    phase: Phase
    at_ns: int
    event: Event
    sequence: int | None = None


class History:
    """The history of this process; safe for threads, and a forked child goes on in a file of its own."""

    def __init__(self, directory: Path | str, process: str, *, sequence: Callable[[], int] | None = None) -> None:
        self._directory = Path(directory)
        self._process = process
        self._sequence = sequence
        self._operations = itertools.count(1)
        self._encode = msgspec.json.Encoder().encode
        self._open()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def begin(self, event: Event) -> Operation:
        """Write that an operation is about to begin."""
        operation = Operation(self, next(self._operations), event)
        self.write(operation.number, "invoke", event)
        return operation

    def note(self, event: Event, *, since_ns: int | None = None) -> None:
        """Write that something happened, where nothing was to be written before it.

        `since_ns`: when it began, on CLOCK_MONOTONIC, where what it was became known only afterwards.
        """
        operation = next(self._operations)
        if since_ns is not None:
            self.write(operation, "invoke", event, at_ns=since_ns)
        self.write(operation, "ok", event)

    def write(self, operation: int, phase: Phase, event: Event, *, at_ns: int | None = None) -> None:
        """Append one line, of now or of another time."""
        if self._pid != os.getpid():
            self._open()
        record = Record(
            process=self._process,
            pid=self._pid,
            operation=operation,
            phase=phase,
            at_ns=time.monotonic_ns() if at_ns is None else at_ns,
            event=event,
            sequence=None if self._sequence is None else self._sequence(),
        )
        line = self._encode(record) + b"\n"
        written = os.write(self._descriptor, line)
        if written != len(line):
            raise OSError(f"history of {self._process}: {written} of {len(line)} bytes written; is the disk full?")

    def close(self) -> None:
        """Close the file; nothing can be written after it."""
        os.close(self._descriptor)

    def _open(self) -> None:
        self._pid = os.getpid()
        path = self._directory / f"{self._process}.{self._pid}.jsonl"
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


class Operation:
    """An operation under way; exactly one of its outcomes is to be written."""

    def __init__(self, history: History, number: int, event: Event) -> None:
        self._history = history
        self._event = event
        self.number = number

    def ok(self, **facts: Any) -> None:
        """It happened; with the facts learned meanwhile, such as a seq."""
        self._end("ok", facts)

    def fail(self, **facts: Any) -> None:
        """It certainly did not happen."""
        self._end("fail", facts)

    def info(self, **facts: Any) -> None:
        """It may have happened or not, or may still happen."""
        self._end("info", facts)

    def _end(self, phase: Phase, facts: dict[str, Any]) -> None:
        self._event = msgspec.structs.replace(self._event, **facts)
        self._history.write(self.number, phase, self._event)


class SharedSequence:
    """Numbers for the lines of many processes, each given once, in the order in which they are asked for."""

    WIDTH_BYTES: Final = 8

    def __init__(self, path: Path | str) -> None:
        self._path = path

    def __call__(self) -> int:
        """Return the next number: 1, 2, 3 and so on."""
        # Opened anew each time: a lock belongs to the open file, which threads and forked children would share.
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            number = int.from_bytes(os.pread(descriptor, self.WIDTH_BYTES, 0), "big") + 1
            os.pwrite(descriptor, number.to_bytes(self.WIDTH_BYTES, "big"), 0)
            return number
        finally:
            os.close(descriptor)


def digest(body: bytes) -> str:
    """Return a short value that stands for a body."""
    return blake2b(body, digest_size=8).hexdigest()


def read_histories(directory: Path | str) -> list[Record]:
    """Return the lines of all histories in a directory, in the order of their time.

    A torn last line, which a killed process may leave, is passed over; a torn line elsewhere raises ValueError.
    """
    paths = sorted(Path(directory).glob("*.jsonl"))
    records = [record for path in paths for record in _read_history(path)]
    return sorted(records, key=lambda record: record.at_ns)


def _read_history(path: Path) -> Iterator[Record]:
    decode = msgspec.json.Decoder(Record).decode
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # behind the last line end there is nothing, or a torn line
        try:
            yield decode(line)
        except msgspec.DecodeError as error:
            raise ValueError(f"{path}, line {number}: {error}") from error
