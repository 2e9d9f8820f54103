"""Whether a process lives and serves: what its parts say, and the endpoint where others ask."""

from mqlayer.health.endpoint import HealthEndpoint, health_endpoint
from mqlayer.health.reports import Health, Liveness, stuck_after_s
from mqlayer.health.server import Reply

__all__ = ["Health", "HealthEndpoint", "Liveness", "Reply", "health_endpoint", "stuck_after_s"]
