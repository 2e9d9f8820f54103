"""The console in the browser; needs the extra `console`."""

try:
    from mqlayer.console.access import (
        Access,
        Anyone,
        Claims,
        LevelGroups,
        LoginAccess,
        OpenId,
        PasswordFile,
        ProxyAccess,
        Sessions,
        Site,
        password_line,
    )
    from mqlayer.console.app import console_app
    from mqlayer.console.users import Level, User
except ImportError as error:
    raise ImportError("mqlayer.console needs an extra: pip install 'mqlayer[console]'") from error

__all__ = [
    "Access",
    "Anyone",
    "Claims",
    "Level",
    "LevelGroups",
    "LoginAccess",
    "OpenId",
    "PasswordFile",
    "ProxyAccess",
    "Sessions",
    "Site",
    "User",
    "console_app",
    "password_line",
]
