"""Logs of workers and beat."""

from __future__ import annotations

import logging
import os
from typing import Any

from celery.signals import after_setup_logger

from mqlayer.logs import EventFormatter, JsonFormatter


@after_setup_logger.connect
def show_fields(logger: logging.Logger, **_: Any) -> None:
    """Set mqlayer's formatters: Celery's omit fields."""
    as_json = os.environ.get("MQLAYER_LOG_JSON", "").lower() in ("1", "true", "yes")
    for handler in logger.handlers:
        handler.setFormatter(JsonFormatter() if as_json else EventFormatter())
