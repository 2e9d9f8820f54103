"""The documents as a site: it builds strictly, asks no other server, and has every page and public name."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Final

import pytest

import mqlayer
from docs.site import build

ASSETS: Final = {"script": "src", "img": "src", "iframe": "src", "source": "src", "link": "href"}
"""Elements that a browser loads by itself, and the attribute with the address."""


class Loaded(HTMLParser):
    """The addresses that a page loads."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [value for name, value in attrs if value and name == ASSETS.get(tag)]


def loaded_by(page: Path) -> list[str]:
    parser = Loaded()
    parser.feed(page.read_text("utf-8"))
    return parser.addresses


@pytest.mark.full
@pytest.mark.slow
def test_the_site_is_whole_and_asks_no_other_server(tmp_path: Path) -> None:
    """Strict: a link to a page or heading that is not there fails the build."""
    html = build.build(tmp_path / "site")
    pages = sorted(html.rglob("*.html"))
    assert len(pages) > 150
    loaded = {address for page in pages for address in loaded_by(page)}
    assert len(loaded) > 5
    assert [address for address in loaded if re.match(r"\w*:|//", address)] == []
    styles = "".join(style.read_text("utf-8") for style in html.rglob("*.css"))
    assert re.findall(r"(?:url\(|@import )[\"']?(?:https?:)?//[^)]*", styles) == []
    anchors = set(re.findall(r'id="mqlayer\.([\w.]+)"', "".join(page.read_text("utf-8") for page in pages)))
    assert set(mqlayer.__all__) - {"__version__"} - anchors == set()
    assert {f"Settings.{name}" for name in mqlayer.Settings.model_fields} - anchors == set()
    app = re.sub("<[^>]+>", "", (html / "reference/python/app.html").read_text("utf-8"))
    assert re.search(r"App\(settings: Settings \| None = None, \*, describe_error: Describe", app)
    assert "Parked" in (html / "search.json").read_text("utf-8")


def test_a_page_that_the_index_does_not_link_to_is_named() -> None:
    page = build.DOCS / "how-to" / "new.md"
    with pytest.raises(build.BuildError, match=r"docs/README\.md does not link to docs/how-to/new\.md"):
        build.navigation(build.sources() | {page: "how-to/new.md"})


def test_links_lead_to_the_sites_pages() -> None:
    """Of files outside of docs/, those with a page in the site are linked, and others are named."""
    staged = build.Staged(Path())
    found = build.LINK.search("[security](../../SECURITY.md#redis-users)")
    assert found
    there = staged.linked(found, build.DOCS / "how-to" / "deploy.md", "how-to/deploy.md")
    assert there == "[security](../project/security.md#redis-users)"
    found = build.LINK.search("[the test](../../tests/integration/test_site.py)")
    assert found
    assert staged.linked(found, build.DOCS / "how-to" / "deploy.md", "how-to/deploy.md") == "the test"
    found = build.LINK.search("[gone](gone.md)")
    assert found
    with pytest.raises(build.BuildError, match=r"docs/how-to/deploy\.md links to gone\.md, which is not there"):
        staged.linked(found, build.DOCS / "how-to" / "deploy.md", "how-to/deploy.md")
