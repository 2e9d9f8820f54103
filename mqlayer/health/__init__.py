"""Liveness and readiness, and their HTTP endpoint."""

from mqlayer.health.endpoint import HealthEndpoint, health_endpoint, metrics_route
from mqlayer.health.reports import Health, Liveness, stuck_after_s
from mqlayer.health.server import Reply

__all__ = ["Health", "HealthEndpoint", "Liveness", "Reply", "health_endpoint", "metrics_route", "stuck_after_s"]
