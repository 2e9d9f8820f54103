"""Metrics by OpenTelemetry, off without the setting `metrics` (docs/design/decisions/0067-metrics-from-counts.md)."""

from mqlayer.metrics.byte_counts import LARGE_BODY_BYTES
from mqlayer.metrics.catalog import CATALOG, Instrument
from mqlayer.metrics.meters import RECEIVED, Measurement, MemberMeters, Meters, meters_of, process_meters
from mqlayer.metrics.scrape import CONTENT_TYPE, count_anew, metrics_page, separate_meters

__all__ = [
    "CATALOG",
    "CONTENT_TYPE",
    "LARGE_BODY_BYTES",
    "RECEIVED",
    "Instrument",
    "Measurement",
    "MemberMeters",
    "Meters",
    "count_anew",
    "meters_of",
    "metrics_page",
    "process_meters",
    "separate_meters",
]
