"""The outbox: messages written in the application's own transaction."""

from mqlayer.outbox.aside import AsideRow, list_aside, retry_aside
from mqlayer.outbox.rotation import rotate

__all__ = ["AsideRow", "list_aside", "retry_aside", "rotate"]
