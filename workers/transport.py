"""Celery's Redis transport, for workers that no item of a queue and no broker ends.

It drops items that are no messages, and takes a broker that became a replica for a lost connection.
"""

# The driver's hooks are private, and partly untyped.
# ruff: noqa: SLF001, FBT001, FBT002, BLE001

from __future__ import annotations

from collections.abc import Callable
from queue import Empty
from typing import Any

from kombu.transport import TRANSPORT_ALIASES, redis
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, ResponseError

from mqlayer.logs import event_logger

log = event_logger(__name__)


def _drop(transport: Any, error: Exception, queue: str = "") -> None:
    """Log an item's error by its type, since its text may hold the item; raise another error again."""
    # kombu counts KeyError among the connection's errors: here a part of the item is missing.
    others = isinstance(error, (Empty, *transport.connection_errors, *transport.channel_errors))
    if others and not isinstance(error, KeyError):
        raise error
    log.warning("broker_item_dropped", extra={"queue": queue, "error": type(error).__name__})


def _tag(item: Any) -> str:
    """Return a message's delivery tag. Raises TypeError for another item."""
    properties = item.get("properties") if isinstance(item, dict) else None
    tag = properties.get("delivery_tag") if isinstance(properties, dict) else None
    if not isinstance(tag, str):
        raise TypeError("no delivery tag")
    return tag


class QoS(redis.QoS):
    """Unacknowledged messages."""

    def restore_by_tag(self, tag: Any, client: Any = None, leftmost: bool = False) -> None:
        """Restore a message; drop an item that can't be read."""
        restore: Any = super().restore_by_tag
        try:
            restore(tag, client=client, leftmost=leftmost)
        except Exception as error:
            _drop(self.channel.connection, error)
            remove: Any = self._remove_from_indices
            remove(tag).execute()


class Channel(redis.Channel):
    """A channel that survives each item."""

    QoS = QoS

    def basic_consume(self, queue: str, *args: Any, **options: Any) -> Any:
        """Consume; drop what the callback can't take."""
        consume: Any = super().basic_consume
        found = consume(queue, *args, **options)
        callbacks: dict[str, Callable[[Any], Any]] = self.connection._callbacks
        take = callbacks[queue]

        def take_or_drop(item: Any) -> Any:
            tag = ""
            try:
                tag = _tag(item)
                return take(item)
            except Exception as error:
                _drop(self.connection, error, queue)
                if tag in self.qos._delivered:
                    # Else it counts as prefetched for ever.
                    reject: Any = self.basic_reject
                    reject(tag)

        callbacks[queue] = take_or_drop
        return found

    def _brpop_read(self, **options: Any) -> Any:
        read: Any = super()._brpop_read
        try:
            return read(**options)
        except Exception as error:
            if isinstance(error, ResponseError) and str(error).startswith("UNBLOCKED"):
                # A primary that becomes a replica ends waits so, and then their connections.
                raise RedisConnectionError(str(error)) from error
            _drop(self.connection, error)
            return True

    def _receive_one(self, c: Any) -> Any:
        receive: Any = super()._receive_one
        try:
            return receive(c)
        except Exception as error:
            _drop(self.connection, error)
            return True


class Transport(redis.Transport):
    """The transport of `redis://` and `rediss://`."""

    Channel = Channel
    # A replica refuses writes; kombu counts that among errors of the command, which end a worker.
    connection_errors = (*redis.Transport.connection_errors, ReadOnlyError)

    def establish_connection(self) -> Any:
        """Connect to a server that takes writes; kombu would notice a replica later, and try again without a pause."""
        connect: Any = super().establish_connection
        connection = connect()
        channel = self._avail_channels[-1]
        try:
            # Nothing has this tag.
            channel.client.zrem(channel.unacked_index_key, "")
        except ReadOnlyError:
            self._avail_channels.remove(channel)
            channel.close()
            raise
        except ResponseError as error:
            log.debug("broker_writes_unproven", extra={"error": type(error).__name__})
        return connection


def use_transport() -> None:
    """Use it in this process: an application's setting would not reach further URLs of one broker."""
    TRANSPORT_ALIASES.update(dict.fromkeys(("redis", "rediss"), f"{__name__}:Transport"))
