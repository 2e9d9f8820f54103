"""The relay: from the outbox of a database to the partitions."""

from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.relay import Relay, relay_once

__all__ = ["Relay", "RelayLimits", "relay_once"]
