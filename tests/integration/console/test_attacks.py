"""Attacks on the console that are refused, on all of its pages and actions."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path
from urllib.parse import quote

import pytest
from markupsafe import escape
from starlette.responses import StreamingResponse
from starlette.testclient import TestClient

from mqlayer.console import LevelGroups, ProxyAccess, Site
from mqlayer.console.access.guard import BODY_BYTES
from mqlayer.console.access.throttle import PER_PAIR
from mqlayer.console.headers import POLICY
from mqlayer.console.live import PER_USER, LivePages
from mqlayer.console.page import Action, Outcome, Plan, Visit
from mqlayer.console.views import ACTIONS, PAGES
from mqlayer.postgres.audit import write_audit
from tests.fixtures.console import OPERATOR, console_client, do_action
from tests.fixtures.console_logins import HOST, SESSION, browser, is_in, log_in, log_out, password_access, token_of
from tests.fixtures.consumers import Stage
from tests.fixtures.failed_messages import Failing, identity_of
from tests.proof.world import World

pytestmark = pytest.mark.world(partitions=0)

MARKUP = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
SECRET = b"a-body-of-its-own-s3cret"
OTHERS = [
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": HOST},
]


def _note(visit: Visit) -> Outcome:
    with visit.runtime.control.connection() as connection:
        write_audit(connection, visit.runtime.actor, "test act", "x", {})
    return Outcome("done")


SAMPLE = Action("test-act", "Test", lambda _: Plan(["one line"]), _note)
"""It needs nothing, so it would run."""


@pytest.fixture(autouse=True)
def with_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqlayer.console.app.ACTIONS", (*ACTIONS, SAMPLE))


@pytest.fixture
def person(world: World, tmp_path: Path) -> Iterator[TestClient]:
    with browser(world, password_access(tmp_path)) as client:
        yield client


def acts(world: World) -> list[tuple[str, str | None]]:
    rows = world.rows("SELECT actor, facts->>'reason' FROM mqlayer.audit WHERE actor <> 'api'")
    return [(actor, reason) for actor, reason in rows]


def token(client: TestClient) -> str:
    return token_of(client.get("/audit").text)


def test_an_operators_own_form_acts_with_its_reason(world: World, person: TestClient) -> None:
    """What the attacks below lack."""
    log_in(person)
    form = {"token": token(person), "reason": "a test"}
    answer = person.post("/actions/test-act", data=form, headers={"Origin": HOST, "Sec-Fetch-Site": "same-origin"})
    assert (answer.status_code, acts(world)) == (303, [("ann@console", "a test")])
    assert person.post("/actions/test-act", data={"token": form["token"]}).status_code == 400, "without a reason"


def test_forms_of_other_sites_are_refused(world: World, person: TestClient) -> None:
    log_in(person)
    good = {"token": token(person), "reason": "a test"}
    for number, action in enumerate((SAMPLE, *ACTIONS)):
        # One function checks them all: of an action beyond the first, one form of each kind.
        for headers in OTHERS if number == 0 else [OTHERS[number % len(OTHERS)]]:
            refused = person.post(f"/actions/{action.name}", data=good, headers=headers)
            assert refused.status_code == 403, (action.name, headers)
        last = "1" if good["token"].endswith("0") else "0"
        for wrong in ("", "x", good["token"] + "ä", good["token"][:-1] + last)[0 if number == 0 else 3 :]:
            refused = person.post(f"/actions/{action.name}", data=good | {"token": wrong})
            assert refused.status_code == 403, (action.name, wrong)
    for headers in OTHERS:
        assert person.post("/logout", data=good, headers=headers).status_code == 403
    assert person.post("/logout", data={}).status_code == 403
    assert is_in(person)
    assert acts(world) == []


def test_a_form_of_a_login_is_of_this_browser_and_site(person: TestClient) -> None:
    """Else another site would log its visitor in as somebody else."""
    page = person.get("/login")
    form = {"token": token_of(page.text), "name": "ann", "password": "correct horse"}
    for headers in OTHERS:
        assert person.post("/login", data=form, headers=headers).status_code == 403
    person.cookies.clear()
    assert person.post("/login", data=form).status_code == 403
    assert SESSION not in person.cookies


def test_a_token_of_another_session_is_none(world: World, person: TestClient, tmp_path: Path) -> None:
    log_in(person)
    with browser(world, password_access(tmp_path)) as other:
        log_in(other)
        taken = token(other)
    assert person.post("/actions/test-act", data={"token": taken, "reason": "r"}).status_code == 403


def test_a_viewer_is_refused_each_action(world: World, person: TestClient) -> None:
    log_in(person, "vic")
    form = {"token": token(person), "reason": "a test"}
    for action in (*ACTIONS, SAMPLE):
        assert person.get(f"/actions/{action.name}").status_code == 403, action.name
        answer = person.post(f"/actions/{action.name}", data=form)
        assert (answer.status_code, "vic is a viewer" in answer.text) == (403, True), action.name
    assert acts(world) == []


def test_without_a_session_no_page_and_no_action_answers(world: World, person: TestClient) -> None:
    for page in PAGES:
        assert person.get(_at(page.path)).status_code == 303, page.path
    for action in (*ACTIONS, SAMPLE):
        assert person.get(f"/actions/{action.name}").status_code == 303
        assert person.post(f"/actions/{action.name}", data={"reason": "r"}).status_code == 403
    assert person.get("/live?path=/").text == 'event: ended\ndata: ""\n\n'
    assert person.get("/no-such-page").status_code == 303


def test_acts_are_posts_alone(world: World, person: TestClient) -> None:
    log_in(person)
    query = {"token": token(person), "reason": "a test"}
    assert person.get("/actions/test-act", params=query).status_code == 200, "the plan"
    assert person.get("/logout").status_code == 405
    assert acts(world) == []
    assert is_in(person)


def test_a_session_ends_with_its_logout(world: World, person: TestClient) -> None:
    log_in(person)
    taken, form = person.cookies[SESSION], {"token": token(person), "reason": "a test"}
    assert log_out(person).status_code == 303
    person.cookies.update({SESSION: taken})
    assert not is_in(person)
    assert person.post("/actions/test-act", data=form).status_code == 303
    assert acts(world) == []


def test_a_session_that_a_browser_brings_is_not_the_one_after_the_login(person: TestClient) -> None:
    """An attacker who plants one would have it too."""
    log_in(person, "vic")
    planted = person.cookies[SESSION]
    log_in(person)
    assert person.cookies[SESSION] != planted
    person.cookies.clear()
    person.cookies.update({SESSION: planted})
    assert not is_in(person)
    person.cookies.update({SESSION: "x" * 43})
    assert not is_in(person)


@pytest.mark.parametrize("path", ["//evil.example", "https://evil.example/", "/\\evil.example", "/%5cevil", "\t//evil"])
def test_a_login_leads_nowhere_else(person: TestClient, path: str) -> None:
    page = person.get("/login", params={"next": path})
    assert "evil.example" not in page.text
    there = log_in(person, path=path).headers["location"]
    assert there == "/" or (there.startswith("/%5c") and "://" not in there)


def test_a_request_to_another_sites_address_leads_into_the_console(person: TestClient) -> None:
    assert person.get("//evil.example/").headers["location"] == "/login?next=%2F"


@pytest.mark.parametrize("chunked", [False, True])
def test_large_forms_are_refused(world: World, person: TestClient, chunked: bool) -> None:
    log_in(person)
    body = f"token={token(person)}&reason={'x' * BODY_BYTES}".encode()
    kind = {"Content-Type": "application/x-www-form-urlencoded"}
    for path in ("/actions/test-act", "/login", "/logout"):
        sent = iter([body[:70], body[70:]]) if chunked else body
        answer = person.post(path, content=sent, headers=kind)
        assert (answer.status_code, "at most 65,536 bytes" in answer.text) == (413, True), path
    assert person.post("/login", headers={"Content-Length": "-1", **kind}, content=b"").status_code in {403, 413}
    assert acts(world) == []


def test_guesses_are_limited(world: World, person: TestClient, tmp_path: Path) -> None:
    for name in ("ann", "nobody"):
        answers = [log_in(person, name, "wrong password") for _ in range(PER_PAIR + 1)]
        assert [one.status_code for one in answers] == [403] * PER_PAIR + [429], name
        assert len({one.text.replace(token_of(one.text), "") for one in answers[:PER_PAIR]}) == 1
        assert 0 < int(answers[-1].headers["retry-after"]) <= 300
    assert log_in(person).status_code == 429, "the right password tells nothing either"
    with browser(world, password_access(tmp_path), "192.0.2.2") as elsewhere:
        assert log_in(elsewhere).status_code == 303
    assert log_in(person, "vic").status_code == 303


def test_a_proxys_header_from_elsewhere_is_not_believed(world: World) -> None:
    forged = {"X-Forwarded-User": "ann", "X-Forwarded-Groups": "oncall", "X-Forwarded-For": "10.0.0.1"}
    access = ProxyAccess(Site(HOST, ["10.0.0.0/8"]), LevelGroups(operators=["oncall"]))
    with browser(world, access, "192.0.2.1") as client:
        assert client.get("/audit", headers=forged).status_code == 403
    with browser(world, access, "10.0.0.1") as client:
        assert client.get("/audit", headers=forged).status_code == 200
        for name in ("X-Forwarded-User", "X-Forwarded-Groups"):
            twice = [*forged.items(), (name, "oncall")]
            assert client.get("/audit", headers=twice).status_code == 403, "a client's own, and the proxy's behind it"
        act = client.post("/actions/test-act", data={"reason": "r"}, headers=forged)
        assert act.status_code == 403, "a form needs a token here too"
        form = {"token": token_of(client.get("/actions/test-act", headers=forged).text), "reason": "r"}
        assert client.post("/actions/test-act", data=form, headers=forged).status_code == 303
    assert acts(world) == [("ann@console", "r")]


def _at(path: str, value: str = "x") -> str:
    """Return a page's path with a value for each of its parameters."""
    parts = (quote(value, safe="") if part.startswith("{") else part for part in path.split("/"))
    return "/".join(parts)


def test_markup_stays_text_on_every_page(stage: Stage) -> None:
    """In keys, bodies, errors, reasons, names of users and groups, and in what a link says."""
    failing = Failing(stage)
    parked, dead = failing.publish((MARKUP, MARKUP.encode()), (f"{MARKUP}2", MARKUP.encode()))
    failing.park(parked, attempts=3)
    failing.attempt(parked, 1, f"ValueError: {MARKUP}")
    failing.dead_letter(dead, reason=f"ValueError: {MARKUP}", actor=MARKUP)
    failing.sql("INSERT INTO mqlayer.audit (actor, act, object, facts) "
                "VALUES (%s, %s, %s, jsonb_build_object('reason', %s::text))", *[MARKUP] * 4)  # fmt: skip
    access = ProxyAccess(Site(HOST, ["10.0.0.0/8"]), LevelGroups(operators=["*"], readers=["*"]))
    who = {"X-Forwarded-User": MARKUP, "X-Forwarded-Groups": MARKUP}
    names = ("topic", "key", "group", "error", "cause", "reason", "header", "id", "q", "node", "member", "partition")
    usual, wrong = {"topic": stage.topic, "group": failing.group, "key": MARKUP}, dict.fromkeys(names, MARKUP)
    with browser(World(stage.dsn, stage.prefix, ()), access, "10.0.0.1") as client:
        seen = 0
        for page in PAGES:
            for value, query in ((stage.topic, {}), (stage.topic, usual), (MARKUP, usual), (MARKUP, wrong)):
                answer = client.get(_at(page.path, value), params=query, headers=who)
                assert answer.status_code < 500, (page.path, answer.text)
                assert answer.headers["content-security-policy"] == POLICY
                assert answer.headers["x-content-type-options"] == "nosniff"
                if page.media_type and answer.status_code == 200:
                    assert answer.headers["content-type"].startswith(page.media_type), page.path
                    assert answer.headers["content-disposition"].startswith("attachment"), page.path
                    continue
                assert "<script>alert" not in answer.text, (page.path, query)
                assert "<img src=x" not in answer.text, (page.path, query)
                seen += str(escape(MARKUP)) in answer.text
        assert seen > 0, "the user's name at least"
        for action in (*ACTIONS, SAMPLE):
            for query in (usual, wrong):
                answer = client.get(f"/actions/{action.name}", params=query, headers=who)
                assert answer.status_code < 500, (action.name, answer.text)
                assert "<script>alert" not in answer.text, action.name
                assert "<img src=x" not in answer.text, action.name


def test_bodies_are_for_body_readers_on_every_page_and_file(stage: Stage) -> None:
    failing = Failing(stage)
    lies, parked, dead = failing.publish(*[(key, SECRET) for key in ("a", "b", "c")])
    failing.park(parked, attempts=3)
    (dead_id,) = failing.dead_letter(dead)
    query = {"topic": stage.topic, "group": failing.group, "partition": str(lies[0]), "offset": str(lies[1].offset)}
    values = query | {"dead_id": str(dead_id), "node": "node-1", "bulk_id": "1", "change": "1", "problem": "1"}

    def seen_by(name: str, client: TestClient) -> set[str]:
        found = set()
        who = {"X-Forwarded-User": name, "X-Forwarded-Groups": name}
        for page in PAGES:
            of_each = [(record, query | {"key": record[1].key.decode()}) for record in (lies, parked, dead)]
            named = (parked, {"message": str(identity_of(parked))})
            for record, asked in ((lies, {}), (lies, {"topic": stage.topic}), named, *of_each):
                path = page.path.replace(":path}", "}").format(**values, message=identity_of(record))
                answer = client.get(path, params=asked, headers=who)
                assert answer.status_code in {200, 400, 403, 404, 409}, (path, answer.text)
                found |= {page.path} if SECRET.decode() in answer.text else set()
        return found

    access = ProxyAccess(Site(HOST, ["10.0.0.0/8"]), LevelGroups(["vic"], ["ann", "olga"], ["ann"]))
    with browser(World(stage.dsn, stage.prefix, ()), access, "10.0.0.1") as client:
        files = {"/bodies/{topic}/{message:path}", "/dead/{dead_id}/body", "/parked/{topic}/{group}/body"}
        assert {"/messages", "/messages/export", "/dead/{dead_id}", *files} <= seen_by("ann", client)
        assert seen_by("olga", client) == seen_by("vic", client) == set()


def test_the_policy_of_scripts_allows_none_of_a_page(person: TestClient) -> None:
    log_in(person)
    for path in ("/audit", "/login", "/no-such-page", "/static/console.js", "/actions/test-act"):
        answer = person.get(path)
        assert "script-src 'self'" in answer.headers["content-security-policy"], path
        assert "unsafe" not in answer.headers["content-security-policy"], path
        assert answer.headers["x-frame-options"] == "DENY", path
        assert " style=" not in answer.text, path
        assert "<script>" not in answer.text, path


def test_an_act_is_on_the_very_key_that_its_page_shows(stage: Stage) -> None:
    """Whatever pages escape, and browsers make of line ends in a field."""
    failing = Failing(stage)
    key = "a\u202eb\r\nc\nd\t\x01é <b>&amp;"
    parked, other = failing.publish((key, b"1"), ("a\\u202eb", b"2"))
    failing.park(parked, attempts=3)
    failing.park(other, attempts=3)
    with console_client(World(stage.dsn, stage.prefix, ()), OPERATOR) as client:
        said = do_action(client, "parked-discard", topic=stage.topic, group=failing.group, key=key)
        assert "1 message of key" in said
        found = client.get("/keys", params={"topic": stage.topic, "key": "a\u202eb"}).text
    assert failing.dead() == [b"1"]
    assert 'name="key" required value="a\u202eb"' in found, "a search that is sent again is the same"


def test_one_user_leaves_live_pages_to_others() -> None:
    pages, codes = LivePages(every_s=60.0), []

    async def scene() -> None:
        async with AsyncExitStack() as streams:
            for user in ["vic"] * (PER_USER + 1) + ["ann"]:
                answer = pages.stream(user, lambda: "page")
                codes.append(answer.status_code)
                if isinstance(answer, StreamingResponse) and isinstance(answer.body_iterator, AsyncGenerator):
                    await anext(await streams.enter_async_context(aclosing(answer.body_iterator)))
        codes.append(pages.stream("vic", lambda: "page").status_code)

    asyncio.run(scene())
    assert codes == [200] * PER_USER + [503, 200, 200]


@pytest.mark.parametrize("place", ["²", "2026-01-01T00:00_²", "2026-01-01T00:00_99999999999999999999"])
def test_a_place_in_the_audit_that_is_none_is_refused(person: TestClient, place: str) -> None:
    log_in(person)
    assert person.get("/audit", params={"before": place}).status_code == 400


def test_a_page_of_a_topic_called_live_is_a_page(world: World, person: TestClient) -> None:
    log_in(person)
    world.rows("UPDATE mqlayer.console_session SET seen_at = now() - interval '50 min'")
    assert 'data-here="/topics/live"' in person.get("/topics/live").text
    assert world.rows("SELECT now() - seen_at < interval '1 min' FROM mqlayer.console_session") == [(True,)]
