"""Settles parked messages that a receiver was given."""

from __future__ import annotations

from collections.abc import Sequence

from mqlayer.receiving.parking import PopParking
from mqlayer.receiving.partition_cache import PartitionCache
from mqlayer.receiving.pop_message import Claimed, PopMessage, Token


class ParkedSettler:
    """Each call returns void tokens. Thread-safe."""

    def __init__(self, parking: PopParking, cache: PartitionCache) -> None:
        self._parking, self._cache = parking, cache

    def ack(self, messages: Sequence[PopMessage]) -> list[Token]:
        """End handled messages."""
        stale = [one.token for one, claimed in _with_claims(messages) if not self._parking.handled(one, claimed)]
        for message in messages:
            self._is_due(message)
        return stale

    def nack(self, message: PopMessage, delay_s: float) -> list[Token]:
        """Give a message back."""
        view = self._cache.view_of(message.token.partition)
        for one, claimed in _with_claims([message]):
            if not self._parking.failed(one, claimed, None if view is None else view.info, delay_s):
                return [one.token]
        self._is_due(message)
        return []

    def extend(self, messages: Sequence[PopMessage], seconds: float) -> list[Token]:
        """Keep messages for `seconds`."""
        return [one.token for one, claimed in _with_claims(messages) if not self._parking.extend(claimed, seconds)]

    def note_error(self, message: PopMessage, error: BaseException) -> None:
        """Record a failed attempt."""
        self._parking.note_error(message, error)

    def _is_due(self, message: PopMessage) -> None:
        view = self._cache.view_of(message.token.partition)
        if view is not None:
            view.parked_due_at = 0.0


def _with_claims(messages: Sequence[PopMessage]) -> list[tuple[PopMessage, Claimed]]:
    return [(one, one.claimed) for one in messages if one.claimed is not None]
