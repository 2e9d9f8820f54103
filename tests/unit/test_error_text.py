"""How failures of handlers are told."""

from __future__ import annotations

import json
import sysconfig
import types
from pathlib import Path

import pytest

from mqlayer.errors import BodyMismatch, MessageTimeout, Reject
from mqlayer.runtime.error_text import HIDDEN, ErrorTexts, own_place

LIBRARY = Path(sysconfig.get_paths()["purelib"]) / "driver.py"


def function_of(path: Path | str, module: str, source: str, **names: object) -> types.FunctionType:
    """Return the function `run` of a module that seems to be in another place."""
    namespace = {"__name__": module, **names}
    exec(compile(source, str(path), "exec"), namespace)
    found = namespace["run"]
    assert isinstance(found, types.FunctionType)
    return found


def raised_by(function: types.FunctionType, *arguments: object) -> BaseException:
    with pytest.raises(Exception) as raised:  # noqa: PT011 - any
        function(*arguments)
    # From here on, this test stands for mqlayer: it called the handler.
    raised.value.__traceback__ = raised.value.__traceback__.tb_next if raised.value.__traceback__ else None
    return raised.value


@pytest.fixture
def driver() -> types.FunctionType:
    return function_of(LIBRARY, "driver.connection", "def run():\n    raise KeyError('no table')\n")


def test_the_line_is_the_applications_own_and_not_the_drivers(driver: types.FunctionType) -> None:
    handler = function_of("/srv/shop/orders.py", "orders", "def run(driver):\n\n    driver()\n")
    error = raised_by(handler, driver)
    assert ErrorTexts().text(error) == "KeyError: 'no table' (/srv/shop/orders.py:3 in run)"


def test_an_installed_application_is_the_handlers_package(driver: types.FunctionType) -> None:
    place = LIBRARY.parent / "shop"
    book = function_of(place / "book.py", "shop.book", "def run(driver):\n    driver()\n")
    handler = function_of(place / "main.py", "shop.main", "def run(book, driver):\n    book(driver)\n")
    assert own_place(raised_by(handler, book, driver)) == f"{place}/book.py:2 in run"


def test_lines_of_python_itself_are_not_the_applications() -> None:
    handler = function_of("/srv/shop/orders.py", "orders", "def run(read):\n    read('{')\n")
    assert own_place(raised_by(handler, json.loads)) == "/srv/shop/orders.py:2 in run"


def test_an_error_without_any_line_is_told_without() -> None:
    assert ErrorTexts().text(ValueError("odd")) == "ValueError: odd"
    assert ErrorTexts().text(ValueError()) == "ValueError"


def test_what_handlers_decide_is_told_as_it_is() -> None:
    assert ErrorTexts(shown=False).text(Reject("no address")) == "rejected: no address"
    mismatch = BodyMismatch("Order", "it is not JSON")
    assert ErrorTexts().text(mismatch) == "body does not fit Order: it is not JSON"
    assert ErrorTexts().trace_if_new(mismatch) is None


def test_a_time_limit_is_told_with_the_line_that_the_handler_was_at() -> None:
    handler = function_of("/srv/shop/orders.py", "orders", "def run(error):\n    raise error\n")
    assert (
        ErrorTexts(shown=False).text(raised_by(handler, MessageTimeout(2))).endswith("(/srv/shop/orders.py:2 in run)")
    )


def test_messages_are_left_out_of_texts_and_traces(driver: types.FunctionType) -> None:
    handler = function_of(
        "/srv/shop/orders.py",
        "orders",
        "def run(driver):\n    try:\n        driver()\n"
        "    except KeyError as error:\n        raise OSError('secret') from error\n",
    )
    error, texts = raised_by(handler, driver), ErrorTexts(shown=False)
    assert texts.text(error) == f"OSError: {HIDDEN} (/srv/shop/orders.py:5 in run)"
    trace = texts.trace(error)
    assert "KeyError" in trace
    assert trace.endswith(f"OSError: {HIDDEN}")
    assert "no table" not in trace
    assert "secret" not in trace


def test_the_applications_rule_speaks_for_the_exception() -> None:
    texts = ErrorTexts(describe=lambda error: f"{len(str(error))} characters")
    assert texts.text(ValueError("card 4711")) == "ValueError: 9 characters"
    assert "4711" not in texts.trace(ValueError("card 4711"))


def test_a_rule_that_fails_hides_nothing_but_the_message() -> None:
    def rule(error: BaseException) -> str:
        raise RuntimeError("odd")

    text = ErrorTexts(describe=rule).text(ValueError("card 4711"))
    assert text.startswith("ValueError: (its message can't be told: RuntimeError at ")
    assert "4711" not in text


def test_a_failure_has_its_traceback_once(driver: types.FunctionType) -> None:
    handler = function_of("/srv/shop/orders.py", "orders", "def run(driver):\n    driver()\n")
    other = function_of("/srv/shop/orders.py", "orders", "\ndef run(driver):\n    driver()\n")
    texts = ErrorTexts()
    first, again, elsewhere = (raised_by(one, driver) for one in (handler, handler, other))
    assert (texts.trace_if_new(first) or "").startswith('  File "/srv/shop/orders.py", line 2, in run')
    assert texts.trace_if_new(again) is None
    assert texts.trace_if_new(elsewhere) is not None


def test_the_circle_of_causes_ends() -> None:
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert ErrorTexts().trace(one).count("ValueError") == 2
