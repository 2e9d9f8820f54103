"""Metrics by OpenTelemetry, off without the setting `metrics` (docs/design/decisions/0066-metrics-from-counts.md)."""

from mqlayer.metrics.catalog import CATALOG, Instrument
from mqlayer.metrics.meters import MemberMeters, Meters, meters_of
from mqlayer.metrics.scrape import CONTENT_TYPE, metrics_page

__all__ = ["CATALOG", "CONTENT_TYPE", "Instrument", "MemberMeters", "Meters", "meters_of", "metrics_page"]
