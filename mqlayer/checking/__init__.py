"""Whether an installation is well: servers, settings, schemas, and what waits. Each check is a small function.

A check takes what was asked of a server and returns findings; it changes nothing. What can't be asked is a finding too.
"""

from mqlayer.checking.examination import examine
from mqlayer.checking.findings import Finding, Limits, Verdict

__all__ = ["Finding", "Limits", "Verdict", "examine"]
