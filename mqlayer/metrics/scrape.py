"""The page `/metrics`: everything in Prometheus' registry of this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from mqlayer.metrics.meters import Meters, check_packages, meters_of, use_provider
from mqlayer.settings import Settings

if TYPE_CHECKING:
    from opentelemetry.exporter.prometheus import PrometheusMetricReader

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"


def metrics_page(settings: Settings) -> Callable[[], bytes] | None:
    """Return the page's text maker; None with metrics off. Raises InvalidInput without the extra.

    Without a provider of the program's own, the process gets one for Prometheus.
    """
    if meters_of(settings) is None:
        return None
    from opentelemetry.metrics import get_meter_provider, set_meter_provider
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import REGISTRY, generate_latest

    if not isinstance(get_meter_provider(), MeterProvider):
        from opentelemetry.exporter.prometheus import PrometheusMetricReader

        _own_reader.append(PrometheusMetricReader(scope_info_enabled=False))
        set_meter_provider(MeterProvider(metric_readers=tuple(_own_reader)))
    return lambda: generate_latest(REGISTRY)


_own_reader: Final[list[PrometheusMetricReader]] = []


def count_anew() -> None:
    """Let a forked child count from zero where `metrics_page` had made its parent's provider."""
    # Another provider is the program's: its sums are, too.
    if not _own_reader:
        return
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider

    _own_reader.pop().shutdown()
    _own_reader.append(PrometheusMetricReader(scope_info_enabled=False))
    use_provider(MeterProvider(metric_readers=tuple(_own_reader), shutdown_on_exit=False))


def separate_meters() -> tuple[Meters, Callable[[], bytes]]:
    """Return meters apart from this process's, and their page. Raises InvalidInput without the extra."""
    check_packages()
    from opentelemetry.exporter.prometheus import PrometheusMetricReader
    from opentelemetry.sdk.metrics import MeterProvider
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    reader = PrometheusMetricReader(disable_target_info=True, scope_info_enabled=False, registry=registry)
    return Meters(MeterProvider(metric_readers=[reader], shutdown_on_exit=False)), lambda: generate_latest(registry)
