"""Builds the documents as a site: `scripts/docs`.

The pages stay as a forge shows them. This stages copies, in which links out of docs/ lead to pages of the site,
pictures are part of their page, and the Python reference is made from docstrings; Zensical makes HTML of these.
The navigation is docs/README.md: its sections, its table's rows, its links. A page that it does not link to fails.
"""

from __future__ import annotations

import argparse
import importlib
import json
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, is_dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
DOCS: Final = ROOT / "docs"
SITE: Final = DOCS / "site"
INDEX: Final = DOCS / "README.md"
PYTHON: Final = "reference/python"
"""Where the pages made from docstrings are."""

OUTSIDE: Final = {
    ROOT / "README.md": "index.md",
    ROOT / "ARCHITECTURE.md": "design/architecture.md",
    ROOT / "CHANGELOG.md": "project/changelog.md",
    ROOT / "CONTRIBUTING.md": "project/contributing.md",
    ROOT / "SECURITY.md": "project/security.md",
    SITE / "index.md": "index.md",
    INDEX: "pages.md",
}
"""Pages that stand elsewhere in the site than in docs/. The landing page takes the place of the README."""

FENCE: Final = re.compile(r"^( *)(`{3,}).*?^\1\2[ \t]*$\n?", re.DOTALL | re.MULTILINE)
LINK: Final = re.compile(r"(?P<picture>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^)\s]+)\)")
COMMENT: Final = re.compile(r"^<!-- not run: .*? -->\n", re.MULTILINE)
PART: Final = re.compile(r"^<!-- README: (.+) -->\n", re.MULTILINE)
ROW: Final = re.compile(r"^\| (?P<first>[^|]+?) \| (?P<rest>.*) \|$", re.MULTILINE)
WORKER: Final = '<script src="https://unpkg.com/iframe-worker/shim" type="text/javascript">'
"""What the generator's offline pages load for their search."""
NAMES: Final = re.compile(r"`([A-Za-z_]\w*)`")


class BuildError(Exception):
    """The site can't be built; the message says what to change."""


@dataclass
class Entry:
    """A page or a section of the navigation."""

    title: str
    page: str | None = None
    below: list[Entry] = field(default_factory=list)

    def pages(self) -> Iterator[str]:
        """Yield the pages of this entry."""
        if self.page:
            yield self.page
        for entry in self.below:
            yield from entry.pages()

    def toml(self) -> str:
        """Return the entry as Zensical's `nav` has it."""
        value = json.dumps(self.page) if self.page else toml_list(self.below)
        return f"{{ {json.dumps(self.title)} = {value} }}"


def toml_list(entries: list[Entry]) -> str:
    """Return entries as an array of TOML."""
    return f"[{', '.join(entry.toml() for entry in entries)}]"


def sources() -> dict[Path, str]:
    """Return each page with its place in the site."""
    found = {}
    for page in sorted(DOCS.rglob("*.md")):
        place = page.relative_to(DOCS)
        if page.parent != SITE and page != INDEX:
            # A folder's page is what a link to the folder shows.
            found[page] = str(place.with_name("index.md") if place.name == "README.md" else place)
    return found | {page: place for page, place in OUTSIDE.items() if page != ROOT / "README.md"}


def title_of(page: Path) -> str:
    """Return the first heading of a page."""
    return page.read_text("utf-8").split("\n", 1)[0].removeprefix("# ").replace("`", "")


def relative(target: str, page: str) -> str:
    """Return the way from a page of the site to another one."""
    return posixpath.relpath(target, posixpath.dirname(page) or ".")


class Staged:
    """The copies of all pages, with links that hold in the site."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.places = sources() | {ROOT / "README.md": "index.md"}
        self.api = api_pages()

    def write(self) -> None:
        """Write all copies."""
        for page, place in sources().items():
            self._put(place, self.copy(page, place))
        for place, (title, names) in self.api.items():
            self._put(place, reference(title, names))
        for name in ("site.css", "file-worker.js"):
            shutil.copy(SITE / name, self.out / name)

    def _put(self, place: str, text: str) -> None:
        path = self.out / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, "utf-8")

    def copy(self, page: Path, place: str) -> str:
        """Return a page as the site has it."""
        text = PART.sub(lambda found: self._part(found[1]), page.read_text("utf-8"))
        text = COMMENT.sub("", text)
        outside = FENCE.split(text)
        fences = [found[0] for found in FENCE.finditer(text)]
        prose = [self._prose(part, page, place) for part in outside[:: FENCE.groups + 1]]
        return front_matter(page) + "".join(map("".join, zip(prose, [*fences, ""], strict=True)))

    def _part(self, heading: str) -> str:
        """Return a section of the README, below its heading, with links that hold in a page of docs/site."""
        found = (ROOT / "README.md").read_text("utf-8").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
        if not found:
            raise BuildError(f"README.md has no section {heading!r}, which docs/site/index.md shows")
        return LINK.sub(lambda link: link[0].replace("](docs/", "](../"), found.strip() + "\n")

    def _prose(self, text: str, page: Path, place: str) -> str:
        text = LINK.sub(lambda found: self.linked(found, page, place), text)
        return self._with_reference(text) if place == "reference/api.md" else text

    def linked(self, found: re.Match[str], page: Path, place: str) -> str:
        """Return a link of a page as it holds in the site, or a picture."""
        target, _, anchor = found["target"].partition("#")
        if not target or re.match(r"\w+:", target):
            return found[0]
        path = (page.parent / target).resolve()
        if found["picture"]:
            return picture(path, found["text"])
        if path.is_dir() and (path / "README.md").exists():
            path /= "README.md"
        if path not in self.places:
            if not path.exists():
                raise BuildError(f"{page.relative_to(ROOT)} links to {found['target']}, which is not there")
            # A file of the sources: named, not part of the site.
            return found["text"]
        there = relative(self.places[path], place)
        return f"[{found['text']}]({there}{'#' + anchor if anchor else ''})"

    def _with_reference(self, text: str) -> str:
        """Return the table of public names, each linked to what its docstring says."""
        at = {name: place for place, (_, names) in self.api.items() for name in names}
        lines = []
        for line in text.splitlines(keepends=True):
            cells = line.split("|")
            if len(cells) > 2:
                cells[1] = NAMES.sub(lambda name: with_link(name[1], at), cells[1])
                line = "|".join(cells)  # noqa: PLW2901 - the row with links
            lines.append(line)
        return "".join(lines)


def with_link(name: str, at: dict[str, str]) -> str:
    """Return a public name with a link to its reference."""
    place = at.get(f"mqlayer.{name}")
    return f"[`{name}`]({place.removeprefix('reference/')}#mqlayer.{name})" if place else f"`{name}`"


def front_matter(page: Path) -> str:
    """Return the head that gives a page its title in browsers and searches."""
    if page == SITE / "index.md":
        return "---\ntitle: mqlayer\nhide:\n  - navigation\n  - toc\n---\n\n"
    # Maintainers' pages would come first: they say most of each word.
    hidden = "search:\n  exclude: true\n" if page.is_relative_to(DOCS / "design") else ""
    return f"---\ntitle: {json.dumps(title_of(page))}\n{hidden}---\n\n"


def picture(path: Path, text: str) -> str:
    """Return a picture as a part of its page: its words are found by a search, its colours follow the page's."""
    drawn = path.read_text("utf-8").split("?>")[-1].strip()
    lines = (line for line in drawn.splitlines() if line.strip())
    return f'<figure class="picture" aria-label={json.dumps(text)}>\n' + "\n".join(lines) + "\n</figure>\n"


def reference(title: str, names: list[str]) -> str:
    """Return a page of the Python reference."""
    if len(names) == 1:
        # The name's own heading is the page's.
        return described(names[0], heading_level="1")
    return f"# {title}\n\n" + "\n".join(map(described, names))


def described(name: str, **options: str) -> str:
    """Return the line for what a name's docstring says; of a record, all fields count, also those without one."""
    if is_record(name):
        options["show_if_no_docstring"] = "true"
    lines = "".join(f"      {option}: {value}\n" for option, value in options.items())
    return f"::: {name}\n" + (f"    options:\n{lines}" if lines else "")


def is_record(name: str) -> bool:
    """Say whether a public name is a class whose fields are its content."""
    module, _, last = name.rpartition(".")
    if not last[0].isupper():
        return False
    found = getattr(importlib.import_module(module), last)
    return is_dataclass(found) or any(hasattr(found, mark) for mark in ("model_fields", "_fields", "__total__"))


def api_pages() -> dict[str, tuple[str, list[str]]]:
    """Return the pages made from docstrings, one for each row of docs/reference/api.md, with title and names."""
    text = (DOCS / "reference" / "api.md").read_text("utf-8")
    top, _, modules = text.partition("Operating functions")
    modules = modules.partition("## SQL functions")[0]
    pages = {}
    for row in list(ROW.finditer(top))[1:]:
        names = [name for name in NAMES.findall(row["first"]) if not name.startswith("__")]
        if names:
            pages[f"{PYTHON}/{names[0].lower()}.md"] = (", ".join(names), [f"mqlayer.{name}" for name in names])
    for row in list(ROW.finditer(modules))[1:]:
        module = row["first"].strip("`")
        names = [f"{module}.{name}" for name in NAMES.findall(row["rest"]) if name.islower() or name[0].isupper()]
        pages[f"{PYTHON}/{module.replace('.', '_')}.md"] = (module, names or [module])
    return pages


def navigation(places: dict[Path, str]) -> list[Entry]:
    """Return the navigation: the sections of docs/README.md."""
    home = Entry("Home", below=[Entry("mqlayer", "index.md"), Entry("All pages", "pages.md")])
    sections = re.split(r"^## ", INDEX.read_text("utf-8"), flags=re.MULTILINE)[1:]
    entries = [home, *(section(text, places) for text in sections)]
    reference_part = next(entry for entry in entries if entry.title == "Reference")
    made = [Entry(title, place) for place, (title, _) in api_pages().items()]
    reference_part.below.append(Entry("Python names", below=made))
    shown = {page for entry in entries for page in entry.pages()}
    missing = sorted(page for page, place in places.items() if place not in shown)
    if missing:
        named = ", ".join(str(page.relative_to(ROOT)) for page in missing)
        raise BuildError(f"docs/README.md does not link to {named}: link each from the section of its kind")
    return entries


def section(text: str, places: dict[Path, str]) -> Entry:
    """Return a section of docs/README.md: rows of its table as parts, links as pages."""
    title, _, body = text.partition("\n")
    rows = list(ROW.finditer(body))[1:]
    if rows:
        below = [Entry(capital(row["first"]), below=list(links(row["rest"], places))) for row in rows]
    else:
        below = list(links(body, places))
    return Entry(title.strip(), below=below)


def links(text: str, places: dict[Path, str]) -> Iterator[Entry]:
    """Yield the pages that a text links to; of a folder's page, the pages of that folder below it."""
    for found in LINK.finditer(text):
        page = (DOCS / found["target"]).resolve()
        if page not in places:
            continue
        if page.name == "README.md" and page.parent.is_relative_to(DOCS) and page != INDEX:
            inside = [one for one in sorted(page.parent.glob("*.md")) if one != page]
            parts = [Entry(title_of(one), places[one]) for one in inside]
            yield Entry(capital(found["text"]), below=[Entry(title_of(page), places[page]), *parts])
        else:
            yield Entry(capital(found["text"]), places[page])


def capital(text: str) -> str:
    """Return a text with a capital letter at its start."""
    return text[:1].upper() + text[1:]


def build(out: Path) -> Path:
    """Build the site below a folder, which is emptied before; return the folder of its HTML."""
    shutil.rmtree(out, ignore_errors=True)
    (out / "pages").mkdir(parents=True)
    staged = Staged(out / "pages")
    staged.write()
    settings = (SITE / "zensical.toml").read_text("utf-8").replace('"ROOT"', json.dumps(str(ROOT)))
    entries = navigation(sources())
    (out / "zensical.toml").write_text(settings.replace("nav = []", f"nav = {toml_list(entries)}", 1), "utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(out / "zensical.toml")],
        cwd=out, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        # Its findings; a traceback of its own follows them.
        raise BuildError(done.stdout.partition("Traceback (")[0])
    for page in (out / "html").rglob("*.html"):
        own_worker(page, out / "html")
    return out / "html"


def own_worker(page: Path, html: Path) -> None:
    """Let a page start its search by our script: the generator's one would come from another server."""
    text = page.read_text("utf-8")
    script = posixpath.relpath("file-worker.js", page.parent.relative_to(html).as_posix())
    page.write_text(text.replace(WORKER, f'<script src="{script}">'), "utf-8")


def main() -> None:
    """Build the site; print where it is."""
    parser = argparse.ArgumentParser(prog="scripts/docs", description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / "build" / "site", help="folder to build in")
    try:
        print(build(parser.parse_args().out.resolve()) / "index.html")  # noqa: T201 - the program's answer
    except BuildError as error:
        sys.exit(f"scripts/docs: {error}")


if __name__ == "__main__":
    main()
