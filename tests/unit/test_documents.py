"""What the documents name is there: commands with their options, tests and modules, tables, how often jobs run, links.

And the other way round: the reference pages name every command, error, event, group setting and public name.

The page on health names every check of the doctor.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import Any, Final, get_args

from typer.main import get_command

import mqlayer
from mqlayer import errors
from mqlayer.cli.main import app
from mqlayer.events import EventKind
from mqlayer.groups import GroupSettings
from mqlayer.maintenance.jobs import PERIODIC_JOBS

ROOT: Final = Path(__file__).parents[2]
REFERENCE: Final = ROOT / "docs" / "reference"
PAGES: Final = [
    *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MERGE_MARK: Final = re.compile(r"^(<{7} |>{7} |={7}$)", re.MULTILINE)
BLOCK: Final = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
INLINE: Final = re.compile(r"`([^`\n]+)`")
PATH: Final = re.compile(r"(?:(?:tests|unit|property|integration|chaos|proof|fixtures|bench|sql|lua)/)[\w/.]+")
MARKDOWN: Final = [
    *sorted(ROOT.glob("*.md")),
    # build/ has the site's copies.
    *(page for top in sorted(ROOT.glob("[a-z]*/")) if top.name != "build" for page in sorted(top.rglob("*.md"))),
]
LINK: Final = re.compile(r"\]\(([\w./-]+\.md)[)#]")
RELATIVE: Final = re.compile(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING: Final = re.compile(r"^#{1,6} (.*)$", re.MULTILINE)
SLOT: Final = re.compile(r"outbox_\d")
TEST: Final = re.compile(r"test_\w+")
MODULE: Final = re.compile(r"[a-z_]+/[\w/]+\.(?:py|lua|sql|pml)|(?:[a-z_]+/)+")
FIELD: Final = re.compile(r"[a-z_]+")
DECISIONS: Final = ROOT / "docs" / "design" / "decisions"
OVERVIEW_BYTES: Final = 30_000
IN_UNIT_S: Final = {"s": 1.0, "second": 1.0, "seconds": 1.0, "min": 60.0, "minute": 60.0, "minutes": 60.0}
LATER: Final = re.compile(
    r"\b(?:with|in|by) (?:a |the )?(?:later|future|coming|next) (?:versions?|releases?)\b", re.IGNORECASE
)


def page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def test_the_code_names_pages_by_titles_that_there_are() -> None:
    """Who has a wheel has no docs/."""
    titles = {page.read_text("utf-8").split("\n")[0].removeprefix("# ").replace("`", "") for page in PAGES}
    named = set()
    for path in [*(ROOT / "mqlayer").rglob("*.py"), *(ROOT / "mqlayer" / "templates").rglob("*.tmpl")]:
        text = path.read_text("utf-8")
        assert not re.search(r"docs/(how-to|reference|explanation|tutorial)/", text), path
        named |= {title for start in re.findall(r"\bpages? '(.*)", text) for title in [named_first(start, titles)]}
    assert len(named) > 10
    assert named <= titles


def named_first(start: str, titles: set[str]) -> str:
    """Return the title with which a text begins, else its first words."""
    return next((title for title in titles if start.startswith(f"{title}'")), start[:40])


def inline(page: Path) -> list[str]:
    """Return what a page has in the type of code between its words."""
    return INLINE.findall(BLOCK.sub("", page.read_text("utf-8")))


def spelled_out(text: str) -> Iterator[list[str]]:
    """Yield the words of a command that a page shows; of `topic create|list`, of each."""
    words = [word.split("|") for word in text.split()]
    longest = max(map(len, words))
    for number in range(longest):
        yield [one[number % len(one)] for one in words]


@cache
def program() -> Any:
    """Return our program."""
    return get_command(app)


def unknown_of(words: list[str]) -> list[str]:
    """Return the words of a command that our program does not know."""
    command = program()
    rest = words[1:]
    while rest and hasattr(command, "commands"):
        if rest[0] not in command.commands:
            return [] if rest[0].startswith(("-", "…")) else rest[:1]
        command = command.commands[rest.pop(0)]
    options = {"--help", *(one for param in command.params for one in (*param.opts, *param.secondary_opts))}
    return [word for word in rest if word.startswith("--") and word.partition("=")[0] not in options]


def by_page(found: Callable[[Path], object], pages: Iterable[Path] = PAGES) -> dict[str, object]:
    """Return what is found by the pages that have some; a case for each page would cost more than the search."""
    return {page_id(page): told for page in pages if (told := found(page))}


def test_every_command_and_option_that_a_page_names_is_there() -> None:
    def unknown(page: Path) -> dict[str, list[str]]:
        shown = [words for text in inline(page) if text.startswith("mqlayer ") for words in spelled_out(text)]
        return {" ".join(words): unknown for words in shown if (unknown := unknown_of(words))}

    assert by_page(unknown) == {}


def test_every_file_that_a_page_names_is_there() -> None:
    def missing(page: Path) -> list[str]:
        named = [path for text in inline(page) if (path := text.rstrip("/")) and PATH.fullmatch(path)]
        missing = [path for path in named if not any((place / path).exists() for place in (ROOT, ROOT / "tests"))]
        return missing + [link for link in LINK.findall(page.read_text("utf-8")) if not (page.parent / link).exists()]

    assert by_page(missing) == {}


@cache
def names_of_tests() -> frozenset[str]:
    """Return the names of all test functions."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return frozenset(name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text("utf-8")))


def has_source(path: Path) -> bool:
    """Return whether a file is there, or a folder with more than what Python left of former modules."""
    return path.is_file() or (path.is_dir() and any(inside.name != "__pycache__" for inside in path.iterdir()))


def test_every_test_and_module_that_a_page_names_is_there() -> None:
    """Modules and packages of the library are named from its root or from `mqlayer/`."""
    places = (ROOT, ROOT / "mqlayer", ROOT / "tests", ROOT / "docs" / "model")

    def missing(page: Path) -> list[str]:
        named = inline(page)
        modules = [text for text in named if MODULE.fullmatch(text)]
        missing = [text for text in named if TEST.fullmatch(text) and text not in names_of_tests()]
        return missing + [text for text in modules if not any(has_source(at / text) for at in places)]

    assert by_page(missing) == {}


def test_no_page_and_no_statement_keeps_the_marks_of_a_merge() -> None:
    """Of code, Python and Lua themselves say so."""
    texts = [*MARKDOWN, *(path for top in ("sql", "lua") for path in sorted((ROOT / top).rglob("*.*")))]
    marked = [page_id(path) for path in texts if MERGE_MARK.search(path.read_text("utf-8"))]
    assert marked == []


def test_the_overview_stays_one() -> None:
    assert (ROOT / "ARCHITECTURE.md").stat().st_size <= OVERVIEW_BYTES


def test_the_overview_draws_the_layers_that_the_imports_keep() -> None:
    contract = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["tool"]["importlinter"]["contracts"][0]
    drawn = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("\n## Layers\n")[2].split("```")[1].splitlines()
    first_words = [re.split(r" {2,}", line)[0].replace("│", "|") for line in drawn[1:] if line and line[0] != " "]
    assert first_words == contract["layers"]


def test_every_decision_is_a_short_page_in_the_index() -> None:
    pages = sorted(DECISIONS.glob("[0-9]*.md"))
    assert sorted(LINK.findall((DECISIONS / "README.md").read_text("utf-8"))) == [page.name for page in pages]
    for number, page in enumerate(pages, start=1):
        lines = page.read_text("utf-8").splitlines()
        assert page.name.startswith(f"{number:04}-"), page.name
        assert [line for line in lines if line.startswith("## ")] == ["## Context", "## Decision", "## Consequences"]
        assert 15 <= len(lines) <= 40, f"{page.name}: {len(lines)} lines"


def test_no_page_puts_off_to_later_what_is_to_be_told_as_it_is() -> None:
    """Of a change that comes, its page speaks once it is there."""
    pages = (page for page in PAGES if page.name != "CHANGELOG.md")
    assert by_page(lambda page: LATER.findall(page.read_text("utf-8")), pages) == {}


def test_no_page_says_a_thing_twice() -> None:
    """Headings, paragraphs, items and settings: merges put sections in twice. Comments and heads of tables repeat."""

    def repeated(page: Path) -> list[str]:
        lines = re.findall(r"^(?!<!--|\|.*\|\n\|-)\S.{29,}$", BLOCK.sub("", page.read_text("utf-8")), re.MULTILINE)
        return [line for line, count in Counter(lines).items() if count > 1]

    assert by_page(repeated) == {}


def test_a_period_that_a_page_names_with_a_job_is_the_jobs() -> None:
    every = {job.name: job.every_s for job in PERIODIC_JOBS}
    amount = r"(?:every )?(?:(\d+) )?(s|seconds?|min|minutes?)\b"
    told = 0
    for page in PAGES:
        for line in page.read_text("utf-8").splitlines():
            for name, after in re.findall(r"[Jj]ob `(\w+)`([^`]*)", line) + re.findall(r"^\| `(\w+)` (\| .*)", line):
                found = re.match(rf"^\| {amount} \||.*?\bevery {amount}", after)
                if name in every and found:
                    number, unit = next((found[at], found[at + 1]) for at in (1, 3) if found[at + 1])
                    assert float(number or 1) * IN_UNIT_S[unit] == every[name], f"{page.name}: {name} {after[:60]}"
                    told += 1
    assert told >= 6


def test_every_table_is_in_the_catalogue() -> None:
    """Also those of the archive; the slots of the outbox are said with it."""
    text = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "sql" / "migrations").rglob("*.sql")))
    made = set(re.findall(r"CREATE TABLE (?:IF NOT EXISTS )?mqlayer\w*\.(\w+)", text))
    made -= set(re.findall(r"DROP TABLE (?:IF EXISTS )?mqlayer\w*\.(\w+)", text))
    told = {name.rpartition(".")[2] for name in inline(ROOT / "ARCHITECTURE.md")}
    assert {name for name in made - told if not SLOT.fullmatch(name)} == set()


def test_every_field_in_the_catalogue_of_redis_keys_is_a_scripts() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text("utf-8").partition("\n## Redis keys\n")[2].partition("\n## ")[0]
    contents = [row.split("|")[3] for row in text.splitlines() if row.startswith("| ")][1:]
    fields_shown = {name for content in contents for name in INLINE.findall(content) if FIELD.fullmatch(name)}
    scripts = "\n".join(path.read_text("utf-8") for path in sorted((ROOT / "lua").rglob("*.lua")))
    assert len(fields_shown) > 20
    assert {name for name in fields_shown if f"'{name}'" not in scripts} <= {"m", "k", "b"}


def test_every_relative_link_of_a_page_leads_somewhere() -> None:
    """To a file or folder that is there, and to a heading of it where the link names one."""

    def broken(page: Path) -> list[str]:
        broken = []
        for path, anchor in RELATIVE.findall(BLOCK.sub("", page.read_text("utf-8"))):
            target = (page.parent / path).resolve() if path else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{path}#{anchor}")
        return broken

    assert by_page(broken, MARKDOWN) == {}


@cache
def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    seen: Counter[str] = Counter()
    found = set()
    for heading in HEADING.findall(BLOCK.sub("", page.read_text("utf-8"))):
        text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        slug = re.sub(r"[^\w\- ]", "", text).replace(" ", "-")
        found.add(f"{slug}-{seen[slug]}" if seen[slug] else slug)
        seen[slug] += 1
    return found


def test_every_command_is_in_the_reference() -> None:
    assert set(commands(program(), "mqlayer")) - set(inline(REFERENCE / "cli.md")) == set()


def commands(command: Any, path: str) -> Iterator[str]:
    """Yield the names of all commands below one."""
    if hasattr(command, "commands"):
        for name, below in command.commands.items():
            yield from commands(below, f"{path} {name}")
    else:
        yield path


def test_every_error_is_in_the_reference() -> None:
    base = errors.MqlayerError
    ours = {name for name, one in vars(errors).items() if isinstance(one, type) and issubclass(one, base)}
    assert ours - {"MqlayerError", *inline(REFERENCE / "errors.md")} == set()


def test_every_event_is_in_the_reference() -> None:
    assert set(get_args(EventKind)) - set(inline(REFERENCE / "events.md")) == set()


def test_every_event_that_a_hook_of_a_page_waits_for_is_there() -> None:
    named = {name for page in PAGES for name in re.findall(r'event\.kind == "(\w+)"', page.read_text("utf-8"))}
    assert named
    assert named <= set(get_args(EventKind))


def test_every_group_setting_is_in_the_reference() -> None:
    assert {one.name for one in fields(GroupSettings)} - set(inline(REFERENCE / "group-settings.md")) == set()


def test_every_public_name_is_in_the_reference() -> None:
    assert set(mqlayer.__all__) - set(inline(REFERENCE / "api.md")) == set()


def test_every_check_of_the_doctor_is_in_its_table() -> None:
    assert {"reachable", "quarantined"} < checks()
    assert checks() - set(inline(ROOT / "docs" / "how-to" / "check-health.md")) == set()


def checks() -> set[str]:
    """Return the names with which the doctor's findings are made."""
    found = set()
    for module in (ROOT / "mqlayer" / "doctor").glob("*.py"):
        for node in ast.walk(ast.parse(module.read_text("utf-8"))):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "Finding":
                found |= {str(one.value) for one in node.args[:1] if isinstance(one, ast.Constant)}
    return found
