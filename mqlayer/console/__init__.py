"""The console in the browser; needs the extra `console`."""

from mqlayer.console.access import Access
from mqlayer.console.app import console_app
from mqlayer.console.users import Level, User

__all__ = ["Access", "Level", "User", "console_app"]
