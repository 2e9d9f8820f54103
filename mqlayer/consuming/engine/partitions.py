"""What a member may consume."""

from __future__ import annotations

from abc import ABC, abstractmethod

from mqlayer.groups.members import HeartbeatReply, MemberSession


class MemberPartitions(ABC):
    """A member's assigned partitions.

    Only the heartbeat's thread calls `follow`, `lease_lost` and `report`.
    """

    @abstractmethod
    def follow(self, session: MemberSession, reply: HeartbeatReply) -> None:
        """Follow a heartbeat's reply."""

    @abstractmethod
    def lease_lost(self) -> None:
        """Follow the lease's end."""

    @abstractmethod
    def report(self, session: MemberSession) -> None:
        """Report changes to Postgres, before a heartbeat."""

    @property
    @abstractmethod
    def unreported(self) -> bool:
        """Whether to repeat a report soon."""

    @abstractmethod
    def close(self) -> None:
        """Take nothing more."""

    @abstractmethod
    def served(self) -> dict[int, tuple[int, str]]:
        """Return partition -> (epoch, state)."""

    @abstractmethod
    def missing(self) -> tuple[str, ...]:
        """Return why partitions are not consumed."""
