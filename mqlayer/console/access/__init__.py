"""Who is at the console."""

from mqlayer.console.access.groups import LevelGroups
from mqlayer.console.access.guard import Guard
from mqlayer.console.access.local import Anyone
from mqlayer.console.access.logins import LoginAccess
from mqlayer.console.access.openid import Claims, OpenId
from mqlayer.console.access.password_file import PasswordFile, password_line
from mqlayer.console.access.protocol import Access
from mqlayer.console.access.proxy import ProxyAccess
from mqlayer.console.access.sessions import Sessions
from mqlayer.console.access.site import Site, is_loopback

__all__ = [
    "Access",
    "Anyone",
    "Claims",
    "Guard",
    "LevelGroups",
    "LoginAccess",
    "OpenId",
    "PasswordFile",
    "ProxyAccess",
    "Sessions",
    "Site",
    "is_loopback",
    "password_line",
]
