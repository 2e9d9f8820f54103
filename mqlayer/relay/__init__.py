"""The relay: from an outbox to the partitions."""

from mqlayer.relay.limits import RelayLimits
from mqlayer.relay.recovery import RecoveryReport, recover_now
from mqlayer.relay.relay import Relay, relay_once

__all__ = ["RecoveryReport", "Relay", "RelayLimits", "recover_now", "relay_once"]
