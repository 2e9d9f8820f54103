"""The pytest plugin: fixtures for tests on real servers. It imports what a fixture needs when the fixture is used."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

try:
    import pytest
except ModuleNotFoundError as error:
    raise ImportError("the test kit's fixtures need pytest: pip install 'mqlayer[testing]'") from error

if TYPE_CHECKING:
    from mqlayer.testing.servers import TestServers
    from mqlayer.testing.stack import TestStack


@pytest.hookimpl(tryfirst=True)
def pytest_load_initial_conftests(early_config: pytest.Config) -> None:
    """Have mqlayer imported as without a plugin: pytest would compile it anew, which takes a second where none is kept.

    Where pytest has no such names any more, it does.
    """
    hook = getattr(early_config.pluginmanager, "rewrite_hook", None)
    getattr(hook, "_must_rewrite", set()).discard("mqlayer")
    getattr(hook, "_marked_for_rewrite_cache", {}).clear()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--mqlayer`."""
    says = "where applications of the fixture mqlayer_engine run: in memory, or on the servers of mqlayer_stack"
    parser.getgroup("mqlayer").addoption("--mqlayer", choices=("memory", "real"), default="memory", help=says)


@pytest.fixture(scope="session")
def mqlayer_schema() -> Callable[[str], None]:
    """A function that makes your tables, given a DSN; override it. It runs once per process, on the template."""
    return lambda _: None


@pytest.fixture(scope="session")
def mqlayer_servers(mqlayer_schema: Callable[[str], None]) -> Iterator[TestServers]:
    """Postgres and nodes of this test process: as MQLAYER_DSN and MQLAYER_REDIS_URL say, else its own."""
    from mqlayer.testing.servers import TestServers

    with TestServers(mqlayer_schema) as servers:
        yield servers


@pytest.fixture
def mqlayer_stack(mqlayer_servers: TestServers, monkeypatch: pytest.MonkeyPatch) -> Iterator[TestStack]:
    """Real servers with a database and a key prefix of the test's own; `MQLAYER_…` variables name them."""
    from mqlayer.testing.stack import TestStack, variables_of_stacks

    for name in variables_of_stacks():
        monkeypatch.delenv(name, raising=False)
    with mqlayer_servers.database() as (dsn, prefix), TestStack(mqlayer_servers, dsn, prefix) as stack:
        for name, value in stack.env.items():
            monkeypatch.setenv(name, value)
        yield stack


@pytest.fixture
def mqlayer_engine(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """A function as `engine_for`, of the kind that `--mqlayer` says: give it an App, and `topics=`."""
    from mqlayer.testing.real import engine_for

    kind = request.config.getoption("--mqlayer")
    settings = request.getfixturevalue("mqlayer_stack").settings if kind == "real" else None
    return partial(engine_for, kind=kind, settings=settings)
