"""Whether an installation is well: servers, settings, schemas, and what waits. Each check is a small function.

A check takes what was asked of a server and returns findings; it changes nothing. What can't be asked is a finding too.
"""

from mqlayer.doctor.diagnosis import diagnose
from mqlayer.doctor.findings import CheckLimits, CheckStatus, Finding

__all__ = ["CheckLimits", "CheckStatus", "Finding", "diagnose"]
