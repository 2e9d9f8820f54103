"""The only reader of packaged Lua and SQL files."""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files

_INCLUDE = re.compile(r"^-- include (\w+)\n", re.MULTILINE)


@cache
def lua_source(name: str) -> str:
    """Return ``lua/<name>.lua``; lines ``-- include <part>`` become ``lua/lib/<part>.lua``."""
    return _with_parts(f"{name}.lua")


def _with_parts(*path: str) -> str:
    text = (files("mqlayer") / "lua").joinpath(*path).read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _with_parts("lib", f"{found[1]}.lua"), text)


def lua_names() -> list[str]:
    """Return all scripts' names, sorted."""
    return sorted(entry.name[:-4] for entry in (files("mqlayer") / "lua").iterdir() if entry.name.endswith(".lua"))


def sql_source(path: str) -> str:
    """Return ``sql/<path>``, read anew."""
    return (files("mqlayer") / "sql").joinpath(*path.split("/")).read_text(encoding="utf-8")


def sql_names(folder: str) -> list[str]:
    """Return names of files in ``sql/<folder>``, sorted."""
    directory = (files("mqlayer") / "sql").joinpath(*folder.split("/"))
    return sorted(entry.name for entry in directory.iterdir() if entry.name.endswith(".sql"))
