"""Where settings come from: arguments, the environment, `.env`, a framework; in this order."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import SecretStr

from mqlayer import settings as module
from mqlayer.env_file import export_env_file
from mqlayer.errors import InvalidInput
from mqlayer.redis.access import access_here
from mqlayer.settings import Settings, add_source
from tests.fixtures.commands import Commands

FILE = """
# a comment
export MQLAYER_DSN='postgresql://of-the-file/shop'
MQLAYER_KEY_PREFIX="shop"
MQLAYER_REDIS_USER=of-the-file
MQLAYER_CONSUMERS=shop:app
PGPASSWORD=of-another-program
MQLAYER_EMPTY
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory, and an environment without addresses."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("MQLAYER_")]:
        monkeypatch.delenv(name)
    return tmp_path


@pytest.fixture
def framework() -> Iterator[dict[str, object]]:
    """What a framework has."""
    found: dict[str, object] = {}

    def source() -> dict[str, object]:
        return found

    add_source(source)
    yield found
    module._sources.remove(source)


def test_the_file_in_the_working_directory_is_read_and_the_environment_wins(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for dsn in (Settings().control_dsn, Settings().application_dsn, Settings(app_dsn=SecretStr("")).application_dsn):
        with pytest.raises(InvalidInput, match="set MQLAYER_DSN, or start a stack with `mqlayer up`"):
            dsn()
    (folder / ".env").write_text(FILE.replace("MQLAYER_EMPTY\n", ""))
    assert Settings().control_dsn() == "postgresql://of-the-file/shop"
    assert (Settings().key_prefix, Settings(key_prefix="given").key_prefix) == ("shop", "given")
    assert access_here().user == "of-the-file"
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", "environment")
    monkeypatch.setenv("MQLAYER_REDIS_USER", "environment")
    assert (Settings().key_prefix, access_here().user) == ("environment", "environment")
    assert "PGPASSWORD" not in os.environ
    assert "MQLAYER_CONSUMERS" not in os.environ


def test_a_process_of_ours_gives_the_file_to_those_that_it_starts(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".env").write_text(FILE)
    monkeypatch.setenv("MQLAYER_KEY_PREFIX", "environment")
    export_env_file()
    assert os.environ["MQLAYER_CONSUMERS"] == "shop:app"
    assert os.environ["MQLAYER_KEY_PREFIX"] == "environment"
    assert "PGPASSWORD" not in os.environ


def test_a_misspelt_name_is_refused_with_the_nearest_one_and_its_place(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / ".env").write_text("MQLAYER_LEASE=3\n")
    with pytest.raises(
        InvalidInput, match=r"no setting is called MQLAYER_LEASE in \.env: did you mean MQLAYER_LEASE_S"
    ):
        Settings()
    monkeypatch.setenv("MQLAYER_KEY_PREFX", "x")
    with pytest.raises(InvalidInput, match="no setting is called MQLAYER_KEY_PREFX: did you mean MQLAYER_KEY_PREFIX"):
        Settings()


def test_a_file_that_can_t_be_read_is_named(folder: Path) -> None:
    (folder / ".env").write_bytes(b"MQLAYER_DSN=\xff\n")
    with pytest.raises(InvalidInput, match=r"can't read \.env in the working directory"):
        Settings()
    (folder / ".env").unlink()
    (folder / ".env").mkdir()
    assert not Settings().dsn


def test_a_framework_gives_what_nothing_else_does(folder: Path, framework: dict[str, object]) -> None:
    framework |= {"dsn": "postgresql://framework/shop", "key_prefix": "framework"}
    (folder / ".env").write_text("MQLAYER_KEY_PREFIX=file\n")
    assert (Settings().control_dsn(), Settings().key_prefix) == ("postgresql://framework/shop", "file")


def test_commands_read_the_file_and_take_a_dsn(folder: Path, logging_as_before: None) -> None:
    run = Commands()
    (folder / ".env").write_text("MQLAYER_DSN=postgresql://127.0.0.1:1/file\nMQLAYER_LOG_LEVEL=odd\n")
    assert "odd" in run("topic", "list").stderr
    (folder / ".env").write_text("MQLAYER_DSN=postgresql://127.0.0.1:1/file\nMQLAYER_LOG_LEVEL=ERROR\n")
    os.environ.pop("MQLAYER_LOG_LEVEL")
    assert "127.0.0.1:1/file" in run.failure("topic", "list")
    assert "127.0.0.1:2/given" in run.failure("--dsn", "postgresql://127.0.0.1:2/given", "topic", "list")


def test_the_text_of_a_variable_is_enough_for_every_field() -> None:
    """Settings would have to read JSON for a list, as pydantic's own source of variables does."""
    plain = {str, SecretStr, float, int, bool, type(None)}
    for name, field in Settings.model_fields.items():
        found: Any = field.annotation
        kinds = get_args(found) if isinstance(found, UnionType) else (found,)
        assert all(kind in plain or get_origin(kind) is Literal for kind in kinds), name


def test_a_name_in_small_letters_is_the_same_variable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("mqlayer_lease_s", "3")
    monkeypatch.setenv("LEASE_S", "4")
    assert Settings().lease_s == 3
