"""Finding an application by its path."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import mqlayer
from mqlayer.consuming.api.app_loader import load_app
from mqlayer.errors import InvalidInput, NotFound


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `shop_program` in the working directory, to be filled."""
    monkeypatch.chdir(tmp_path)
    path_before = sys.path[:]
    yield tmp_path / "shop_program.py"
    sys.modules.pop("shop_program", None)
    sys.path[:] = path_before


def test_an_application_of_the_working_directory_is_found(program: Path) -> None:
    program.write_text("import mqlayer\nclass deep: app = mqlayer.App()\napp = mqlayer.App()\n")
    assert isinstance(load_app("shop_program:app"), mqlayer.App)
    assert isinstance(load_app("shop_program:deep.app"), mqlayer.App)


@pytest.mark.parametrize("path", ["", "shop_program", "shop_program:", ":app", "shop program:app", "a:b:c", "1a:b"])
def test_what_is_no_path_is_refused_with_an_example(path: str) -> None:
    with pytest.raises(InvalidInput, match=r"give module:name, such as shop\.consumers:app"):
        load_app(path)


@pytest.mark.parametrize("path", ["no_such_shop:app", "no_such_shop.consumers:app"])
def test_a_module_that_is_not_there_is_named(program: Path, path: str) -> None:
    with pytest.raises(NotFound, match=path.split(":", maxsplit=1)[0]):
        load_app(path)


def test_a_name_that_the_module_has_not_is_named(program: Path) -> None:
    program.write_text("")
    with pytest.raises(NotFound, match="module 'shop_program' has no 'app'"):
        load_app("shop_program:app")


def test_what_is_not_an_application_is_refused(program: Path) -> None:
    program.write_text("app = 42\n")
    with pytest.raises(InvalidInput, match=r"is a int: give the name of a mqlayer\.App"):
        load_app("shop_program:app")


@pytest.mark.parametrize(
    ("text", "error"), [("import no_such_library", ModuleNotFoundError), ("1 / 0", ZeroDivisionError)]
)
def test_a_failure_inside_the_module_is_not_taken_for_a_wrong_path(
    program: Path, text: str, error: type[Exception]
) -> None:
    program.write_text(text)
    with pytest.raises(error):
        load_app("shop_program:app")
