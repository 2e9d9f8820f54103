"""Whether a process lives and serves: what its parts say, and the endpoint where others ask."""

from mqlayer.health.endpoint import HealthEndpoint, health_endpoint
from mqlayer.health.reports import Health, Turns, stuck_after_s

__all__ = ["Health", "HealthEndpoint", "Turns", "health_endpoint", "stuck_after_s"]
