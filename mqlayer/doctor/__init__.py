"""Read-only checks of an installation."""

from mqlayer.doctor.diagnosis import diagnose
from mqlayer.doctor.findings import CheckLimits, CheckStatus, Finding

__all__ = ["CheckLimits", "CheckStatus", "Finding", "diagnose"]
