"""One word per idea, one idea per word, few words; classes, signatures and docstrings within the limits of size."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

# One worker reads the sources.
pytestmark = pytest.mark.xdist_group("sources")

ROOT = Path(__file__).parents[2]
CODE = ("mqlayer", "workers", "spark")
MOST_METHODS = 25
MOST_PARAMETERS = 8
MOST_WORDS_PER_DEFINITION = 7.4
REPLACED = {
    "burial": "dead letter",
    "buried": "dead-lettered, or deleted",
    "bury": "dead-letter, or delete",
    "clerk": "failure writer, or scheduler",
    "given on": "handed over",
    "heart": "heartbeat",
    "invisible time": "visibility timeout",
    "invisible_s": "visibility_timeout_s",
    "keep_away_s": "instance_expiry_s",
    "keeper": "parking worker",
    "lane": "key queue, LP queue, or cursor",
    "lanes": "key queues, LP queues, or cursors",
    "mend": "repair",
    "mended": "repaired",
    "mender": "repair",
    "orphan": "still running",
    "parcel": "pending send",
    "parcels": "pending sends",
    "set aside": "quarantined",
    "set_aside": "quarantined",
    "stands still": "is stuck",
    "stand still": "be stuck",
    "told_of": "encode_outcome",
    "upkeep": "metadata refresher",
}
"""Words that this project used once, and what it says now."""
WITHOUT_A_NOUN = re.compile(
    r"\b(whoever|whatever it|nobody|that which|what (?:is|was|are|were|has|have|it|they|of|comes|came)|is to be"
    r"|are to be|of theirs|of ours)\b",
    re.IGNORECASE,
)
"""Phrases that leave a reader to guess which thing is meant."""


def sources() -> Iterator[Path]:
    """Yield the modules of the library; the folders that it reaches by a link come under their own names."""
    for folder in CODE:
        yield from (path for path in sorted((ROOT / folder).rglob("*.py")) if not _by_a_link(path))


def _by_a_link(path: Path) -> bool:
    return any(parent.is_symlink() for parent in path.parents if parent.is_relative_to(ROOT))


def defined(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yield the classes of a module and its type aliases, without a leading underscore."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            yield node.name.lstrip("_"), "class"
    for node in tree.body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            name = node.targets[0].id.lstrip("_")
            if re.fullmatch(r"[A-Z]\w*[a-z]\w*", name) and isinstance(node.value, ast.Subscript | ast.BinOp):
                yield name, "alias"


def test_no_class_name_stands_for_two_things() -> None:
    found = defaultdict[str, list[str]](list)
    kinds = defaultdict[str, set[str]](set)
    for path, tree in trees().items():
        for name, kind in defined(tree):
            found[name].append(str(path.relative_to(ROOT)))
            kinds[name].add(kind)
    assert {name: paths for name, paths in found.items() if len(paths) > 1 and "class" in kinds[name]} == {}


@cache
def trees() -> Mapping[Path, ast.Module]:
    """Return the modules of the library, parsed."""
    return {path: ast.parse(path.read_text("utf-8")) for path in sources()}


def texts() -> Iterator[Path]:
    """Yield everything that says a word of ours: code, scripts, SQL, documents; what changed once may name the old."""
    yield from sources()
    for folder, pattern in (("lua", "*.lua"), ("sql", "*.sql"), ("docs", "*.md")):
        yield from sorted((ROOT / folder).rglob(pattern))
    yield from (path for path in sorted(ROOT.glob("*.md")) if path.name != "CHANGELOG.md")


@cache
def lowered() -> list[tuple[Path, str]]:
    """Return these texts in small letters."""
    return [(path, path.read_text("utf-8").lower()) for path in texts()]


@pytest.mark.parametrize("word", sorted(REPLACED))
def test_a_word_that_was_replaced_stays_away(word: str) -> None:
    """Where this fails, say the other word: REPLACED has it."""
    found = re.compile(rf"(?<![^\W_]){re.escape(word)}(?![^\W_])", re.IGNORECASE)
    lines = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path, text in lowered()
        if word in text
        for number, line in enumerate(path.read_text("utf-8").splitlines(), 1)
        if found.search(line)
    ]
    assert lines == []


def counted_classes() -> Iterator[tuple[int, str]]:
    """Yield each class with the number of its methods."""
    for path, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                methods = sum(isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef) for one in node.body)
                yield methods, f"{path.relative_to(ROOT)}: {node.name}"


def counted_functions() -> Iterator[tuple[int, str]]:
    """Yield each function with the number of its parameters; commands and App.consumer are lists of options."""
    for path, tree in trees().items():
        if "cli" in path.parts:
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name != "consumer":
                parameters = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
                own = [one for one in parameters if one.arg not in ("self", "cls")]
                yield len(own), f"{path.relative_to(ROOT)}: {node.name}"


def docstrings() -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions."""
    for tree in trees().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield ast.get_docstring(node) or ""


def test_no_class_has_more_than_25_methods() -> None:
    """Where this fails, split the class by the state that its parts own."""
    assert [found for found in counted_classes() if found[0] > MOST_METHODS] == []


def test_no_function_has_more_than_8_parameters() -> None:
    """Where this fails, parameters that travel together are an object."""
    assert [found for found in counted_functions() if found[0] > MOST_PARAMETERS] == []


def test_docstrings_say_only_what_signatures_do_not() -> None:
    """Where this fails, cut words that repeat a name or a type, not promises, units or reasons."""
    words = [len(text.split()) for text in docstrings()]
    assert sum(words) / len(words) <= MOST_WORDS_PER_DEFINITION


def test_docstrings_name_their_things() -> None:
    """Where this fails, put a noun in the place of a relative clause: "the stored rows", not "what was stored"."""
    assert [found for text in docstrings() for found in WITHOUT_A_NOUN.findall(text)] == []
