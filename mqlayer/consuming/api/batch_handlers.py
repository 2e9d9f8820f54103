"""Batch handlers: their parameters and their calls."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

from mqlayer.consuming.api.batch_messages import BatchMessage, MessageMark
from mqlayer.consuming.api.batches import Batch, BatchOf
from mqlayer.consuming.engine.timeouts import current_deadline
from mqlayer.consuming.ordered.owned_partitions import KeyQueue
from mqlayer.domain.codecs import type_name
from mqlayer.domain.large_bodies import BODY_MARK
from mqlayer.errors import InvalidInput, MqlayerError
from mqlayer.groups.group import Group
from mqlayer.large_bodies import BodyReader

LISTS: Final = (list, Sequence, Iterable)


class BatchShape(NamedTuple):
    """A handler's parameters: the body type; bodies, batch, or both."""

    body_type: Any
    bodies: bool
    batch: bool


class BatchHandler:
    """A batch handler and its batches' settings."""

    def __init__(
        self,
        topic: str,
        group: Group,
        batch_of: BatchOf,
        handler: Callable[..., Any],
        shape: BatchShape,
        decode: Callable[[bytes], Any],
        bodies: BodyReader | None = None,
    ) -> None:
        self.batch_of = batch_of
        self._topic, self._group, self._handler, self._shape = topic, group, handler, shape
        self._decode, self._bodies = decode, bodies

    def batch(self, key_queues: list[KeyQueue]) -> Batch[Any]:
        """Return the key queues' batch."""
        name, group_id = self._group.name, self._group.group_id
        pairs = [(key_queue, record) for key_queue in key_queues for record in key_queue.batch]
        messages: list[BatchMessage[Any]] = [
            BatchMessage(self._topic, name, group_id, key_queue, record, index)
            for index, (key_queue, record) in enumerate(pairs)
        ]
        return Batch(self.batch_of.kind, self._topic, name, messages)

    def has_large_bodies(self, batch: Batch[Any]) -> bool:
        """Whether to fetch bodies first."""
        return self._bodies is not None and any(BODY_MARK in message.record.m for message in batch.everything)

    def fetch(self, batch: Batch[Any]) -> None:
        """Fetch large bodies, once; note those that fail."""
        for message in batch.everything:
            reference = message.large_body
            if reference is None or self._bodies is None or message.filled or message.error is not None:
                continue
            try:
                message.fill(self._bodies.fetch(reference))
            except MqlayerError as error:
                message.mark, message.error = MessageMark.FAILED, error

    def __call__(self, batch: Batch[Any]) -> Any:
        """Call the handler, unless no body decodes."""
        if self.has_large_bodies(batch):
            self.fetch(batch)
        batch.begin(current_deadline.get(), self._decode)
        if not batch:
            return None
        if not self._shape.bodies:
            return self._handler(batch)
        return self._handler(batch.values, batch) if self._shape.batch else self._handler(batch.values)


def batch_shape(handler: Callable[..., Any], body: Any) -> BatchShape:
    """Return the shape of `list[Order]`, optionally with a Batch, or of `Batch[Order]`.

    `body`: the type where the annotation has none. Raises InvalidInput for other parameters.
    """
    name = type_name(handler)
    parameters = [
        p
        for p in inspect.signature(handler).parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    if not 1 <= len(parameters) <= 2:
        raise InvalidInput(f"batch handler {name!r} must take the bodies, the bodies and the batch, or the batch")
    function = handler if inspect.isroutine(handler) else type(handler).__call__
    said = get_type_hints(function).get(parameters[0].name, list)
    origin, arguments = get_origin(said) or said, get_args(said)
    if origin is not Batch and origin not in LISTS:
        raise InvalidInput(
            f"batch handler {name!r} takes {type_name(said)}: let it take list[{type_name(said)}], with a Batch as its "
            "second parameter if it wants one, or a Batch alone"
        )
    if origin is Batch and len(parameters) == 2:
        raise InvalidInput(f"batch handler {name!r} takes a Batch: let it be the only parameter, it has the bodies")
    if body is None:
        body = arguments[0] if arguments and not isinstance(arguments[0], TypeVar) else bytes
    return BatchShape(body, bodies=origin is not Batch, batch=len(parameters) == 2)
