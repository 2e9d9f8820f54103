"""What all pages share: the way back from a plan, the time of a page, foreign text, known and unknown figures."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Iterator
from urllib.parse import unquote

import pytest
from starlette.responses import Response
from starlette.testclient import TestClient

from mqlayer.console import User, console_app, live
from mqlayer.console.glossary import GLOSSARY
from mqlayer.console.render import ago, number, size, unambiguous, when
from mqlayer.console.views import ACTIONS, PAGES
from tests.fixtures.console import OPERATOR, VIEWER, FixedAccess, console_client
from tests.fixtures.console_pages import kind_of, words
from tests.fixtures.consumers import Stage
from tests.fixtures.failed_messages import Failing
from tests.proof.world import World

TIME = re.compile(r'<time id="as-of">\d\d:\d\d:\d\d UTC</time>')
LINK = re.compile(r'(?:href|action)="([^"#]*)"')


@pytest.fixture
def failing(stage: Stage) -> Failing:
    found = Failing(stage)
    parked, dead = found.publish(("a", b"1"), ("b", b"2"))
    found.park(parked, attempts=3)
    found.attempt(parked, 1, "KeyError: price")
    found.dead_letter(dead)
    return found


@pytest.fixture
def ann(stage: Stage, failing: Failing) -> Iterator[TestClient]:
    with console_client(world_of(stage), OPERATOR) as browser:
        yield browser


def world_of(stage: Stage) -> World:
    return World(stage.dsn, stage.prefix, ())


def walked(browser: TestClient) -> dict[str, tuple[str, str]]:
    """Return one example of each page and plan that links lead to: its path and text, by its pattern."""
    waiting, seen = ["/"], dict[str, tuple[str, str]]()
    while waiting:
        path = waiting.pop(0)
        kind = kind_of(path)
        if kind is None or kind in seen:
            continue
        answer = browser.get(path, headers={"Referer": "http://testserver/topics?contains=o"})
        seen[kind] = path, answer.text
        waiting += [html.unescape(one) for one in LINK.findall(answer.text)]
    return seen


def test_each_page_says_of_when_it_is_and_has_a_link_to_load_it_again_and_each_plan_leads_back(ann: TestClient) -> None:
    plans = {f"/actions/{one.name}" for one in ACTIONS}
    seen = walked(ann)
    assert len(seen.keys() - plans) >= 15, seen.keys()
    assert len(seen.keys() & plans) >= 8, seen.keys()
    for kind, (path, page) in seen.items():
        if kind in plans:
            assert '<a href="/topics?contains=o">' in page, kind
            assert TIME.search(page) is None, kind
            continue
        assert TIME.search(page), kind
        refresh = re.search(r'</time> · <a href="([^"]*)">Refresh</a>', page)
        assert refresh, kind
        assert unquote(html.unescape(refresh[1])) == unquote(path), kind
        live_page = next(one.live for one in PAGES if one.path == kind)
        assert ("data-stream" in page) == live_page, kind
        for table in re.findall(r"<table[^>]*>.*?</table>", page, re.DOTALL):
            if "/nodes" not in kind and kind not in {"/", "/doctor"}:
                cells = re.findall(r"<td(?![^>]*colspan)[^>]*>", table)
                assert all("data-label=" in one for one in cells), (kind, table)
        assert "—" not in re.sub(r"<code>.*?</code>", "", page) or "/nodes" in kind, (kind, "neither zero nor unknown")


def test_words_have_a_page_and_their_meaning_where_they_stand(ann: TestClient) -> None:
    page = ann.get("/glossary").text
    for path in ("/topics/orders", "/topics/orders/route", "/changes"):
        shown = ann.get(path).text
        terms = re.findall(r'<a class="term" href="/glossary#([a-z-]+)" title="([^"]+)">', html.unescape(shown))
        assert ("lp", GLOSSARY["LP"]) in terms, path
        for anchor, _ in terms:
            assert f'<dt id="{anchor}">' in page, anchor
        assert 'href="/glossary">Words of these pages' in shown
        assert 'class="scope" title="A panel with this tag shows the whole system' in shown
    for term in ("armed run", "epoch", "fenced effect", "LP set", "outbox slot"):
        assert f">{term}</dt>" in page, term


@pytest.mark.parametrize(
    ("came", "back"),
    [
        ("", "/"),
        ("http://testserver/parked?topic=o", "/parked?topic=o"),
        ("https://evil.example//evil.example/x", "/"),
        ("https://evil.example/\\evil.example", "/"),
        ("http://[", "/"),
        ("javascript:alert(1)", "/"),
        ("http://testserver/login?next=/x", "/"),
        ("http://testserver/actions/topic-pause?topic=orders", "/"),
    ],
)
def test_cancel_leads_to_the_page_before_and_nowhere_else(ann: TestClient, came: str, back: str) -> None:
    page = ann.get("/actions/topic-pause", params={"topic": "orders"}, headers={"Referer": came} if came else {}).text
    assert f'<a href="{back}">Back, without doing it</a>' in page
    form = {"token": "token", "fields": "topic=orders", "back": came.removeprefix("https://evil.example"), "reason": ""}
    refused = ann.post("/actions/topic-pause", data=form).text
    assert "say why" in refused
    for link in LINK.findall(refused):
        assert link.startswith("/"), link
        assert not link.startswith(("//", "/\\")), link


def test_behind_a_prefix_the_way_back_has_it_once(stage: Stage, failing: Failing) -> None:
    app = console_app(world_of(stage).settings(), access=FixedAccess(OPERATOR))
    with TestClient(app, root_path="/mq") as browser:
        plan = browser.get(
            "/mq/actions/topic-pause?topic=orders", headers={"Referer": "http://testserver/mq/topics/orders"}
        )
        assert '<a href="/mq/topics/orders">Back, without doing it</a>' in plan.text
        assert 'name="back" value="/topics/orders"' in plan.text
        other = browser.get("/mq/actions/topic-pause?topic=orders", headers={"Referer": "http://testserver/shop"})
        assert '<a href="/mq/">Back, without doing it</a>' in other.text


def test_a_done_act_leads_on_and_back(ann: TestClient) -> None:
    form = {"token": "token", "fields": "topic=orders", "back": "/groups?topic=orders", "reason": "r"}
    sent = ann.post("/actions/topic-pause", data=form, follow_redirects=False)
    assert sent.status_code == 303
    at = sent.headers["location"]
    done = ann.get(at)
    assert 'Go on to <a href="/topics/orders">Topic orders</a>' in done.text
    assert 'Back to <a href="/groups?topic=orders">Groups</a>' in done.text
    assert "is paused" in done.text
    assert ann.get(at).text == done.text, "no second act"
    forged = ann.get(at.replace("text=", "text=Log+in+at+evil.example"))
    assert forged.status_code == 404
    assert "evil" not in words(forged.text)
    assert ann.get("/actions/topic-resume/done?text=x&path=/&back=/").status_code == 404


_stream = live.LivePages.stream


def _two_looks(pages: live.LivePages, user: str, render: Callable[[], str | None]) -> Response:
    pages.every_s = 0.05
    looks = iter((render, render, lambda: None))

    def look() -> str | None:
        return next(looks)()

    return _stream(pages, user, look)


def test_a_stream_says_of_when_each_look_is_and_sends_pages_that_differ(
    ann: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.LivePages, "stream", _two_looks)
    events = ann.get("/live", params={"path": "/topics"}).text
    assert events.count("event: page") == 1, "the same page is sent once"
    assert len(re.findall(r'event: at\ndata: "\d\d:\d\d:\d\d UTC"', events)) == 2
    assert "as-of" not in events


def test_a_character_and_its_escape_differ(ann: TestClient) -> None:
    marks = ["\u202e", r"\u202e", "\\" + "\u202e", r"\\u202e", "\t", r"\u0009", "\U000e0001", r"\udb40\udc01"]
    assert len({unambiguous(one) for one in marks}) == len(marks)
    for plain in ("C:\\users", '{"a": "x\\ny\\u00e9"}', "a\nb"):
        assert unambiguous(plain) == plain
    pages = [ann.get("/keys", params={"topic": "orders", "key": one}).text for one in marks[:2]]
    shown = [re.sub(r'value="[^"]*"|data-here="[^"]*"|href="[^"]*"', "", one) for one in pages]
    assert "\u202e" not in shown[0]
    assert ann.get("/topics", params={"contains": "\u202e"}).text.count(r"contains \u202e.") == 1
    assert ann.get("/topics", params={"contains": r"\u202e"}).text.count(r"contains \\u202e.") == 1


def test_zero_and_unknown_differ() -> None:
    for shown in (number, size, when):
        assert shown(None) == "unknown"
    assert (number(0), number(0.0), size(0)) == ("0", "0", "0 B")
    assert ago(None) == "never"


def test_a_viewer_is_a_viewer_on_each_page(stage: Stage, failing: Failing) -> None:
    with console_client(world_of(stage), User(VIEWER.name)) as vic:
        for kind, (_, page) in walked(vic).items():
            assert "/actions/" not in page, kind
