"""Outcomes of pending sends."""

from __future__ import annotations

from typing import NamedTuple

from mqlayer.domain.message import Identity
from mqlayer.errors import MqlayerError


class Appended(NamedTuple):
    """A batch's place."""

    partition: int
    source: int
    replicas: int | None


class Recovered(NamedTuple):
    """Each message's (partition, offset), after an earlier try."""

    source: int
    replicas: int | None
    positions: tuple[tuple[int, int | None], ...]


class Duplicate(NamedTuple):
    """The earlier message with the dedup id."""

    partition: int
    offset: int
    identity: Identity
    replicas: int | None


SendOutcome = Appended | Recovered | Duplicate | MqlayerError
