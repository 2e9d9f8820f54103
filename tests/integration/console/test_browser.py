"""The console in a real browser: every page that links lead to, on a desk and a phone, in both themes."""

from __future__ import annotations

import os
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from mqlayer.console import Access, Level, User, console_app
from mqlayer.console.views import PAGES
from mqlayer.doctor.health import note_problems
from mqlayer.maintenance.sampling import take_samples
from mqlayer.settings import Settings
from tests.fixtures.browser import DESK, PHONE, TABLET
from tests.fixtures.command_scenes import System
from tests.fixtures.console import FixedAccess
from tests.fixtures.console_pages import kind_of
from tests.fixtures.consumers import Stage
from tests.fixtures.missing_tools import import_or_leave_out
from tests.fixtures.servers import StartRedis
from tests.fixtures.wait import wait_until
from tests.proof.runtimes import runtime_of

SHOTS = os.environ.get("MQLAYER_TEST_SCREENSHOTS", "")
"""A directory for pictures of each page, to be looked at."""
GRAVE = {"serious", "critical"}


@contextmanager
def served(settings: Settings, access: Access) -> Iterator[str]:
    """Serve the console on a port of its own; yield its address."""
    uvicorn = import_or_leave_out("uvicorn")
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(console_app(settings, access=access), log_level="warning", ws="none"))
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        wait_until(lambda: server.started, what="the console answers")
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        listener.close()


@pytest.fixture
def system(stage: Stage, start_redis: StartRedis) -> System:
    """Parked, dead, archived, a member, an open route change, rows that can't be sent, a problem that ended."""
    system = System(stage, start_redis)
    system.all_that_is_shown()
    system.member()
    system.planned_change()
    system.sql(
        "INSERT INTO mqlayer.failed_attempt (group_id, lp, source, seq, attempt, member_id, error) "
        "SELECT group_id, lp, source, seq, 1, 'm-1', 'KeyError: no price of article 4711' FROM mqlayer.parked_message"
    )
    system.sql(
        "INSERT INTO mqlayer.audit (actor, act, object, facts) VALUES ('bea@console', 'topic set', 'orders', "
        '\'{"body_limit": 9000, "before": {"body_limit": 1000}, "reason": "large bodies"}\')'
    )
    runtime = runtime_of(stage.database, stage.prefix, application=stage.database)
    take_samples(runtime)
    with stage.database.connection() as connection:
        connection.execute(
            "INSERT INTO mqlayer_app.quarantined (topic_id, lp, seq, reason) VALUES (1, 7, 1, 'no body')"
        )
        connection.execute(
            "INSERT INTO mqlayer_app.voided (id, topic_id, lp, seq, reason, created_at, body) "
            "VALUES (9000, 1, 8, 1, 'too large', now(), 'x')"
        )
        note_problems(runtime)
        connection.execute("UPDATE mqlayer.problem SET ended_at = now() WHERE alert = 'MqlayerNoRelay'")
    return system


@pytest.fixture
def address(system: System) -> Iterator[str]:
    """Where an operator finds the console."""
    with served(system.stage.settings(), FixedAccess(User("ann", Level.OPERATOR, bodies=True))) as address:
        yield address


class Walk:
    """A browser that follows links: one example of each page."""

    def __init__(self, page: Any, address: str) -> None:
        self.page, self.address = page, address
        self.faults: list[str] = []
        page.on("pageerror", lambda error: self.faults.append(f"{page.url}: {error}"))
        page.on("console", self._note)
        self.seen: dict[str, str] = {}

    def _note(self, message: Any) -> None:
        # A refusal's status is looked at where it is asked for.
        if message.type in {"error", "warning"} and "the server responded with a status" not in message.text:
            self.faults.append(f"{self.page.url}: {message.text}")

    def all(self, look: Callable[[str], None]) -> None:
        """Open one example of each page and each action's plan, and look at it."""
        waiting = ["/"]
        while waiting:
            path = waiting.pop(0)
            kind = kind_of(path)
            if kind is None or kind in self.seen:
                continue
            self.seen[kind] = path
            answer = self.page.goto(self.address + path)
            # A plan may say that it can't be done now, and why.
            fine = {200, 409} if kind.startswith("/actions/") else {200}
            assert answer.status in fine, (path, self.page.inner_text("main"))
            look(kind)
            links = self.page.eval_on_selector_all("a[href]", "all => all.map(one => one.href)")
            paths = (urlsplit(link) for link in links)
            waiting += [f"{one.path}?{one.query}" if one.query else one.path for one in paths]


def picture(page: Any, name: str) -> None:
    """Keep a picture where one is wanted."""
    if SHOTS:
        Path(SHOTS).mkdir(exist_ok=True)
        page.screenshot(path=f"{SHOTS}/{re.sub(r'[^a-z]+', '-', name).strip('-') or 'overview'}.png", full_page=True)


@pytest.mark.full
@pytest.mark.slow
def test_every_page_works_in_both_themes_and_on_a_phone_and_no_rule_of_accessibility_is_broken(
    chromium: Any, address: str
) -> None:
    axe = import_or_leave_out("axe_playwright_python.sync_playwright").Axe()
    with chromium.new_context(viewport=DESK, color_scheme="light") as context:
        page = context.new_page()
        walk, broken = Walk(page, address), list[str]()

        def look(kind: str) -> None:
            for theme in ("light", "dark"):
                page.emulate_media(color_scheme=theme)
                found = axe.run(page).response["violations"]
                broken.extend(
                    f"{kind} ({theme}): {one['id']}: {one['help']}: {one['nodes'][0]['html']}"
                    for one in found
                    if one["impact"] in GRAVE
                )
                picture(page, f"{kind} {theme}")
            for name, screen in (("tablet", TABLET), ("phone", PHONE)):
                page.set_viewport_size(screen)
                # Tables that scroll sideways hide columns; the route's picture may.
                wide = page.evaluate(
                    "[document.documentElement, ...document.querySelectorAll('.panel, .wide')]"
                    ".map(one => one.scrollWidth - one.clientWidth).filter(px => px > 1)"
                )
                if wide:
                    broken.append(f"{kind}: {wide} px too wide for a {name}")
                picture(page, f"{kind} {name}")
            page.set_viewport_size(DESK)

        walk.all(look)
    assert not broken, "\n".join(broken)
    assert not walk.faults, "\n".join(walk.faults)


@pytest.mark.full
def test_a_page_is_live_while_it_is_seen(chromium: Any, address: str) -> None:
    with chromium.new_context(viewport=DESK) as context:
        page = context.new_page()
        page.goto(f"{address}/")
        # The policy of scripts refuses what a waiting function would need.
        page.locator("#stream", has_text=re.compile("^live$")).wait_for()
        page.evaluate(
            "Object.defineProperty(document, 'hidden', {value: true, configurable: true});"
            "document.dispatchEvent(new Event('visibilitychange'))"
        )
        assert page.inner_text("#stream") == "paused"


def test_keys_lead_to_pages_and_the_theme_is_kept(chromium: Any, address: str) -> None:
    with chromium.new_context(viewport=DESK, color_scheme="light") as context:
        page = context.new_page()
        page.goto(f"{address}/")
        # At once: the second key counts for a second and a half.
        page.keyboard.type("gt")
        page.wait_for_url(f"{address}/topics")
        page.keyboard.press("t")
        page.reload()
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"
        page.keyboard.press("?")
        assert page.is_visible("#keys")


@pytest.mark.full
@pytest.mark.slow
def test_an_operator_does_what_pages_offer_and_the_audit_shows_it(chromium: Any, address: str) -> None:
    with chromium.new_context(viewport=DESK) as context:
        page = context.new_page()
        walk = Walk(page, address)
        walk.all(lambda _: None)
        missed = {page.path for page in PAGES if not page.media_type} - walk.seen.keys()
        assert not missed, f"no link of another page leads to {sorted(missed)}"
        offered = {kind: path for kind, path in walk.seen.items() if kind.startswith("/actions/")}
        said = {kind: outcome_of(page, address + path) for kind, path in sorted(offered.items(), key=is_an_end)}
        assert not walk.faults, "\n".join(walk.faults)
        page.goto(f"{address}/audit")
        shown = page.inner_text("main")
    done = {kind for kind, (answer, _) in said.items() if answer == "done"}
    assert {answer for answer, _ in said.values()} <= {"done", "refused"}, said
    assert len(done) >= 8, said
    assert "ann@console" in shown
    assert "it is a drill" in shown


def is_an_end(offered: tuple[str, str]) -> tuple[bool, str]:
    """What ends a group, a key or a topic comes last."""
    return any(word in offered[0] for word in ("retire", "delete", "evict", "lost")), offered[0]


def outcome_of(page: Any, address: str) -> tuple[str, str]:
    """Do what an action's page offers; return how it ended, and what the page says."""
    answer = page.goto(address)
    if answer.status == 200:
        page.fill("#reason", "it is a drill")
        with page.expect_navigation() as gone:
            page.click("main form button")
        answer = gone.value
    text = page.inner_text("main")
    # An act before it may have taken its object, or its way.
    return {200: "done", 400: "refused", 404: "refused", 409: "refused"}.get(answer.status, str(answer.status)), text
