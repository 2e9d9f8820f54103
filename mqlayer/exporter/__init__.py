"""Metrics of the whole system, read from Postgres and the nodes (`mqlayer exporter`)."""

from mqlayer.exporter.exporter import SystemExporter
from mqlayer.exporter.samples import control_samples, outbox_samples

__all__ = ["SystemExporter", "control_samples", "outbox_samples"]
