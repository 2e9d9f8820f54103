"""Every error that mqlayer raises; the page 'Errors' lists meanings.

Facts are positional arguments, so errors survive pickling. The message names the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from mqlayer.redaction import redact as redact  # noqa: PLC0414 - re-exported


class MqlayerError(Exception):
    """Base of all errors of mqlayer."""


class InvalidInput(MqlayerError):
    """The arguments can never work: correct the call."""


class InvalidName(InvalidInput):
    """A name has a wrong form."""

    def __init__(self, kind: str, name: object) -> None:
        super().__init__(kind, name)
        self.kind, self.name = kind, name

    def __str__(self) -> str:
        return f"bad {self.kind} name {self.name!r}: use a-z first, then a-z 0-9 _ . - up to 63 characters"


class KeyTooLarge(InvalidInput):
    """A message key exceeds 512 bytes of UTF-8."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(size, limit)
        self.size, self.limit = size, limit

    def __str__(self) -> str:
        return f"message key of {self.size} bytes, the limit is {self.limit}: use an id as the key"


class BodyTooLarge(InvalidInput):
    """A body exceeds the topic's limit."""

    def __init__(self, topic: str, size: int, limit: int) -> None:
        super().__init__(topic, size, limit)
        self.topic, self.size, self.limit = topic, size, limit

    def __str__(self) -> str:
        return (
            f"body of {self.size} bytes, topic {self.topic!r} takes {self.limit}: "
            "raise the topic's body limit, switch on large bodies (MQLAYER_LARGE_BODIES), or send a reference"
        )


class ReservedHeader(InvalidInput):
    """Headers are too many, too large, not text or reserved."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"bad headers: {self.reason}"


class OutOfRange(InvalidInput):
    """A number, size or length is out of bounds."""

    def __init__(self, reason: str, hint: str = "") -> None:
        super().__init__(reason, hint)
        self.reason, self.hint = reason, hint

    def __str__(self) -> str:
        return f"{self.reason}: {self.hint}" if self.hint else self.reason


class NotFound(MqlayerError):
    """The named thing does not exist."""

    def __init__(self, kind: str, name: object, hint: str = "") -> None:
        super().__init__(kind, name, hint)
        self.kind, self.name, self.hint = kind, name, hint

    def __str__(self) -> str:
        return f"unknown {self.kind} {self.name!r}" + (f": {self.hint}" if self.hint else "")


class Conflict(MqlayerError):
    """It exists with other properties; nothing was changed."""

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what, hint)
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return self.what + (f": {self.hint}" if self.hint else "")


class GroupRetired(Conflict):
    """The group is retired."""

    def __init__(self, topic: str, group: str) -> None:
        Exception.__init__(self, topic, group)
        self.topic, self.group = topic, group
        self.what = f"group {group!r} of topic {topic!r} is retired"
        self.hint = "trimming does not wait for it: use another group, or see whether the topic was deleted"


class IncompatibleSchema(Conflict):
    """The schema of a topic's bodies breaks readers. `breaks`: (version, "new" or "old" readers, path, reason)."""

    def __init__(self, topic: str, mode: str, breaks: Sequence[tuple[int, str, str, str]]) -> None:
        Exception.__init__(self, topic, mode, breaks)
        self.topic, self.mode, self.breaks = topic, mode, tuple(breaks)
        self.what = f"the new schema of topic {topic!r} is not compatible (mode {mode}): " + "; ".join(
            f"{'its readers fail on bodies' if readers == 'new' else 'readers'} of version {version}"
            f"{'' if readers == 'new' else ' fail on its bodies'} at `{path}`: {reason}"
            for version, readers, path, reason in self.breaks[:5]
        )
        if len(self.breaks) > 5:
            self.what += f"; and {len(self.breaks) - 5} more"
        self.hint = f"change it so that they go on, or allow the break: mqlayer topic set {topic} --schema-mode none"


class InstanceTaken(Conflict):
    """Another process (`state`: running or leaving) consumes for this broadcast instance."""

    def __init__(self, topic: str, group: str, member: str, state: str) -> None:
        Exception.__init__(self, topic, group, member, state)
        self.topic, self.group, self.member, self.state = topic, group, member, state
        self.what = f"member {member!r} consumes for {group!r} of topic {topic!r}, and an instance has one process"
        self.hint = "give each process a name of its own: instance= of the consumer, or MQLAYER_INSTANCE"


class SparkMissing(MqlayerError):
    """Spark can't run on this machine."""

    def __init__(self, reason: str, hint: str) -> None:
        super().__init__(reason, hint)
        self.reason, self.hint = reason, hint

    def __str__(self) -> str:
        return f"Spark can't run here, {self.reason}: {self.hint}"


class ArchiveBroken(MqlayerError):
    """The archive, or an export, lacks expected records."""

    def __init__(self, what: str, hint: str) -> None:
        super().__init__(what, hint)
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}: {self.hint}"


class ConfigurationRefused(MqlayerError):
    """A server's setting voids the promise."""

    def __init__(self, address: str, setting: str, value: str, wanted: str) -> None:
        super().__init__(redact(address), setting, value, wanted)
        self.address, self.setting, self.value, self.wanted = redact(address), setting, value, wanted

    def __str__(self) -> str:
        if not self.setting:
            # The value is a sentence.
            return f"{self.address}: {self.value}: {self.wanted}"
        return f"{self.address}: {self.setting} is {self.value!r}, mqlayer needs {self.wanted}"


class SchemaMismatch(MqlayerError):
    """The schema is missing, older or newer than this code."""

    def __init__(self, address: str, found: str, wanted: str, hint: str) -> None:
        super().__init__(redact(address), found, wanted, hint)
        self.address, self.found, self.wanted, self.hint = redact(address), found, wanted, hint

    def __str__(self) -> str:
        return f"{self.address} has {self.found}, this code needs {self.wanted}: {self.hint}"


class VersionRefused(SchemaMismatch):
    """The schema no longer serves, or does not yet serve, this code's protocol versions: the process ends."""


class StoreUnavailable(MqlayerError):
    """Redis or Postgres is unavailable; the outcome is unknown."""

    def __init__(self, address: str, reason: str) -> None:
        super().__init__(redact(address), redact(reason))
        self.address, self.reason = redact(address), redact(reason)

    def __str__(self) -> str:
        return f"{self.address} is not available: {self.reason.strip()}"


class MissingBody(MqlayerError):
    """A large body can't be fetched whole."""

    def __init__(self, body_id: str, reason: str) -> None:
        super().__init__(body_id, reason)
        self.body_id, self.reason = body_id, reason

    def __str__(self) -> str:
        return f"large body {self.body_id} can't be fetched: {self.reason}; see the page 'Large bodies'"


class PermissionDenied(StoreUnavailable):
    """The Postgres role lacks a right, which the command `fix` grants; nothing was changed."""

    def __init__(self, address: str, reason: str, fix: str) -> None:
        super().__init__(address, reason)
        self.args = (self.address, self.reason, fix)
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.address}: {self.reason}: {self.fix}"


class NodeNotArmed(StoreUnavailable):
    """The node's address has another run than Postgres recorded."""


class AccessDenied(StoreUnavailable):
    """A node refuses this user or its command; mqlayer keeps trying."""

    def __str__(self) -> str:
        return f"{self.address} refuses this process: {self.reason.strip()}"


class PublishError(MqlayerError):
    """A publish failed, or its outcome is unknown."""


class BacklogFull(PublishError):
    """The partition holds its limit of messages; nothing was stored."""

    def __init__(self, topic: str, partition: int, limit: int) -> None:
        super().__init__(topic, partition, limit)
        self.topic, self.partition, self.limit = topic, partition, limit

    def __str__(self) -> str:
        return (
            f"topic {self.topic!r}: partition {self.partition} holds its limit of {self.limit} messages: "
            "let consumers catch up and trimming run, or raise the topic's backlog limit"
        )


class NodeOutOfMemory(PublishError):
    """Redis refuses writes for lack of memory; nothing was stored."""

    def __init__(self, address: str) -> None:
        super().__init__(redact(address))
        self.address = redact(address)

    def __str__(self) -> str:
        return (
            f"{self.address} is out of memory: publishing waits while consumers settle and streams are trimmed; "
            "raise maxmemory, or lower the topic's backlog limit"
        )


class PublishUnknown(PublishError):
    """The outcome is unknown: do not publish the message again.

    The producer repeats it under its seq, before later ones of its LP; `future` reports the outcome, in the raising
    process only.
    """

    def __init__(self, topic: str, lp: int, seq: int, reason: str) -> None:
        super().__init__(topic, lp, seq, redact(reason))
        self.topic, self.lp, self.seq, self.reason = topic, lp, seq, redact(reason)
        self.future: Future[Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        # A future stays in its process.
        return type(self), self.args

    def __str__(self) -> str:
        return (
            f"topic {self.topic!r}, LP {self.lp}, seq {self.seq}: outcome not known yet ({self.reason}); "
            "it stays queued and is repeated with the same seq, so do not publish it again"
        )


class PublishAborted(PublishError):
    """Not sent: an earlier message of the LP failed for good."""

    def __init__(self, topic: str, lp: int, reason: str) -> None:
        super().__init__(topic, lp, redact(reason))
        self.topic, self.lp, self.reason = topic, lp, redact(reason)

    def __str__(self) -> str:
        return f"topic {self.topic!r}, LP {self.lp}: not sent, an earlier message of the LP failed: {self.reason}"


class Loss(NamedTuple):
    """Acknowledged messages `first` to `last` of a source and LP that a node lost.

    `node` and runs are empty where unknown; an emptied node keeps its run.
    """

    topic: str
    lp: int
    first: int
    last: int
    source: int = 0
    node: str = ""
    run_before: str = ""
    run_after: str = ""

    @property
    def messages(self) -> int:
        """Number of lost messages."""
        return self.last - self.first + 1

    @property
    def where(self) -> str:
        """Node and runs as text; empty if unknown."""
        if not self.node:
            return ""
        before = f"run {self.run_before[:8]} before, " if self.run_before else ""
        return f"{self.node} ({before}run {self.run_after[:8]} now)"


class AcknowledgedLoss(PublishError):
    """A node lost acknowledged messages; `losses` has all unreported ones."""

    def __init__(self, loss: Loss, *others: Loss) -> None:
        super().__init__(loss, *others)
        self.topic, self.lp, self.first_lost, self.last_lost = loss.topic, loss.lp, loss.first, loss.last
        self.losses = (loss, *others)

    def __str__(self) -> str:
        first, *others = self.losses
        return (
            f"topic {self.topic!r}, LP {self.lp}: the node {first.where or 'that had them'} lost acknowledged messages "
            f"{self.first_lost} to {self.last_lost}"
            + (f" of source {first.source}" if first.source else "")
            + (f", and messages of {len(others)} other LPs, see `losses`" if others else "")
            + ": publish them again if you still have them; use the outbox where loss is not acceptable"
        )


class NotReplicated(PublishError):
    """Stored on the primary, but on too few replicas in time."""

    def __init__(self, topic: str, partition: int, wanted: int, received: int) -> None:
        super().__init__(topic, partition, wanted, received)
        self.topic, self.partition, self.wanted, self.received = topic, partition, wanted, received

    def __str__(self) -> str:
        return (
            f"topic {self.topic!r}, partition {self.partition}: stored, but {self.received} of {self.wanted} replicas "
            "received it in time: do not publish it again; look at the replicas"
        )


class PartlyPublished(PublishError):
    """Some messages of a batch have no receipt; the cause is the first one's error.

    `outcomes`: receipts or errors in batch order, in the raising process only.
    """

    def __init__(self, topic: str, stored: int, failed: int, reason: str) -> None:
        super().__init__(topic, stored, failed, redact(reason))
        self.topic, self.stored, self.failed, self.reason = topic, stored, failed, redact(reason)
        self.outcomes: Sequence[Any] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        # Outcomes may hold futures, which stay in their process.
        return type(self), self.args

    def __str__(self) -> str:
        return (
            f"topic {self.topic!r}: {self.stored} messages stored, {self.failed} without a receipt, "
            f"see `outcomes`; the first: {self.reason}"
        )


class ProducerFull(PublishError):
    """The producer holds its limit of unsettled messages; it refused this one."""

    def __init__(self, count: int, size: int, waited_s: float) -> None:
        super().__init__(count, size, waited_s)
        self.count, self.size, self.waited_s = count, size, waited_s

    def __str__(self) -> str:
        return (
            f"{self.count} messages of {self.size} bytes wait in this producer, and none was settled within "
            f"{self.waited_s:g} s: publish more slowly, raise max_pending_messages and max_pending_bytes, "
            "or see what holds up the node"
        )


class ProducerClosed(PublishError):
    """The producer is unusable, or closed before settling this message."""

    def __init__(self, reason: str) -> None:
        super().__init__(redact(reason))
        self.reason = redact(reason)

    def __str__(self) -> str:
        return f"producer can't be used: {self.reason}"


class TransactionConflict(MqlayerError):
    """Run the whole transaction again (SQLSTATE 40001, 40P01, 55P03)."""

    def __init__(self, sqlstate: str, reason: str) -> None:
        super().__init__(sqlstate, reason)
        self.sqlstate, self.reason = sqlstate, reason

    def __str__(self) -> str:
        return f"transaction conflict {self.sqlstate} ({self.reason}): roll back and run the whole transaction again"


class FenceError(MqlayerError):
    """The fence refused an effect: roll back."""


class AlreadyApplied(FenceError):
    """This message's effect exists, by the fence or the inbox."""

    def __init__(self, group: str, topic: str, lp: int, seq: int) -> None:
        super().__init__(group, topic, lp, seq)
        self.group, self.topic, self.lp, self.seq = group, topic, lp, seq

    def __str__(self) -> str:
        return f"group {self.group!r} applied {self.topic}/{self.lp}/{self.seq} before: nothing to do, let it settle"


class StaleOwner(FenceError):
    """A later owner of the LP acted: roll back, stop."""

    def __init__(self, group: str, topic: str, lp: int, epoch: int, current: int) -> None:
        super().__init__(group, topic, lp, epoch, current)
        self.group, self.topic, self.lp, self.epoch, self.current = group, topic, lp, epoch, current

    def __str__(self) -> str:
        return (
            f"group {self.group!r} lost {self.topic}/{self.lp}: epoch {self.epoch} is behind {self.current}; "
            "roll back, the new owner handles it"
        )


class StaleToken(FenceError):
    """Ordered pop: other receivers have the messages at `offsets` (partition, offset), or may get them.

    Nothing was changed for these; others of the call were taken.
    """

    def __init__(self, group: str, topic: str, offsets: Sequence[tuple[int, int]]) -> None:
        super().__init__(group, topic, tuple(offsets))
        self.group, self.topic, self.offsets = group, topic, tuple(offsets)

    def __str__(self) -> str:
        named = ", ".join(f"{partition}/{offset}" for partition, offset in self.offsets[:5])
        more = f" and {len(self.offsets) - 5} more" if len(self.offsets) > 5 else ""
        return (
            f"group {self.group!r} of {self.topic!r} gives {named}{more} to others by now: stop handling them; "
            "ask for a longer visibility timeout, or extend it in time"
        )


class OutOfOrder(FenceError):
    """Ordered pop: an earlier message of the key and batch has no effect yet; roll back."""

    def __init__(self, group: str, topic: str, partition: int, offset: int, earlier: int) -> None:
        super().__init__(group, topic, partition, offset, earlier)
        self.group, self.topic, self.partition, self.offset, self.earlier = group, topic, partition, offset, earlier

    def __str__(self) -> str:
        return (
            f"group {self.group!r} of {self.topic!r}: {self.partition}/{self.earlier} of the same key comes before "
            f"{self.partition}/{self.offset}: commit its effect or acknowledge it first"
        )


class VersionsFull(MqlayerError):
    """Too many later versions wait for missing ones: roll back; the message is retried.

    `scope`: "entity" or "all", whose limit is reached.
    """

    def __init__(self, name: str, scope: str, version: int, current: int) -> None:
        super().__init__(name, scope, version, current)
        self.name, self.scope, self.version, self.current = name, scope, version, current

    def __str__(self) -> str:
        what = "one entity" if self.scope == "entity" else "all entities"
        return (
            f"versions {self.name!r} hold as many events of {what} as they may: version {self.version} came while "
            f"{self.current + 1} is missing: see `mqlayer versions gaps {self.name}`; the message is tried again"
        )


class HandlerFault(MqlayerError):
    """Base of handlers' faults that members report."""


class BodyMismatch(HandlerFault):
    """The body does not fit the handler's type; the text never quotes the body."""

    def __init__(self, type_name: str, reason: str) -> None:
        super().__init__(type_name, reason)
        self.type_name, self.reason = type_name, reason

    def __str__(self) -> str:
        return f"body does not fit {self.type_name}: {self.reason}"


class MessageTimeout(HandlerFault):
    """The handler exceeded `limit_s`, extensions included."""

    def __init__(self, limit_s: float) -> None:
        super().__init__(limit_s)
        self.limit_s = limit_s

    def __str__(self) -> str:
        return (
            f"the handler had {self.limit_s:g} s for the message, and was still at it: let it do less, "
            "let it call ctx.extend, or raise the group's time limit"
        )


class HandlerControl(MqlayerError):
    """Base of handlers' requests about their message; let them pass."""


class RetryLater(HandlerControl):
    """Retry after `seconds`, in place of the group's backoff; the key waits."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(seconds, reason)
        self.seconds, self.reason = _wait_s(seconds), reason

    def __str__(self) -> str:
        return f"try it again in {self.seconds:g} s" + _because(self.reason)


class Reject(HandlerControl):
    """Stop retrying: the group's policy decides now; `reason` is required and kept."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        if not reason:
            raise InvalidInput("say why the message is rejected: operators will read this reason")
        self.reason = reason

    def __str__(self) -> str:
        return f"rejected{_because(self.reason)}"


class Skip(HandlerControl):
    """Pass the message over; its key goes on."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(reason)
        self.reason = reason

    def __str__(self) -> str:
        return f"passed over{_because(self.reason)}"


class PauseKey(HandlerControl):
    """Pause the key for `seconds`; no attempt counts."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        super().__init__(seconds, reason)
        self.seconds, self.reason = _wait_s(seconds), reason

    def __str__(self) -> str:
        return f"its key is paused for {self.seconds:g} s" + _because(self.reason)


class BatchUndone(HandlerControl):
    """A message of a batch failed after its fence: it counts as failed, the others return."""

    def __init__(self, topic: str, lp: int, seq: int) -> None:
        super().__init__(topic, lp, seq)
        self.topic, self.lp, self.seq = topic, lp, seq

    def __str__(self) -> str:
        return (
            f"{self.topic}/{self.lp}/{self.seq} failed after the fence let it through: roll the transaction back, "
            "or it counts as applied; the other messages of the batch come again"
        )


def _wait_s(seconds: Any) -> float:
    # Applications may ignore the annotation.
    if not isinstance(seconds, int | float) or not 0 <= seconds < math.inf:
        raise InvalidInput(f"a message waits for 0 seconds or more, not for {seconds}")
    return float(seconds)


def _because(reason: str) -> str:
    return f": {reason}" if reason else ""
