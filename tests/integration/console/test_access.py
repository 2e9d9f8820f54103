"""Logins, sessions and users of the console, on a real Postgres."""

from __future__ import annotations

import hashlib
import http.client
import json
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import psycopg
import pytest
from anyio import to_thread
from starlette.testclient import TestClient

from mqlayer.console import (
    Anyone,
    Level,
    LevelGroups,
    LoginAccess,
    PasswordFile,
    ProxyAccess,
    Sessions,
    Site,
    console_app,
)
from mqlayer.console.runtimes import Runtimes
from mqlayer.errors import MqlayerError, PermissionDenied
from mqlayer.postgres.rights import Right
from tests.fixtures.commands import Commands
from tests.fixtures.console import VIEWER, FixedAccess
from tests.fixtures.console_logins import SESSION, browser, is_in, log_in, log_out, password_access, token_of
from tests.fixtures.console_logins import write_passwords as write
from tests.fixtures.forked_programs import start_python
from tests.fixtures.health_probes import free_ports
from tests.fixtures.kept_connections import ask_postgres
from tests.fixtures.roles import Roles, role_dsn
from tests.fixtures.wait import wait_until
from tests.proof.world import World

pytestmark = pytest.mark.world(partitions=0)


@pytest.fixture
def ann(world: World, tmp_path: Path) -> Iterator[TestClient]:
    with browser(world, password_access(tmp_path)) as client:
        yield client


def sessions(world: World) -> int:
    ((count,),) = world.rows("SELECT count(*)::int FROM mqlayer.console_session")
    return int(count)


def test_a_login_leads_to_the_page_asked_for(ann: TestClient) -> None:
    asked = ann.get("/audit?x=a%26b")
    assert (asked.status_code, asked.headers["location"]) == (303, "/login?next=%2Faudit%3Fx%3Da%2526b")
    entered = log_in(ann, path="/audit?x=a%26b")
    assert (entered.status_code, entered.headers["location"]) == (303, "/audit?x=a%26b")
    cookie = next(line for line in entered.headers.get_list("set-cookie") if line.startswith(SESSION))
    assert {"HttpOnly", "Secure", "SameSite=lax", "Path=/"} <= set(cookie.split("; "))
    assert "Domain" not in cookie
    page = ann.get("/audit").text
    assert "ann" in page
    assert "(operator)" in page


def test_the_table_holds_no_token(world: World, ann: TestClient) -> None:
    log_in(ann)
    ((row,),) = world.rows("SELECT to_jsonb(s)::text FROM mqlayer.console_session s")
    assert ann.cookies[SESSION] not in row
    assert '"name": "ann"' in row


def test_a_logout_ends_the_session_for_all_processes(world: World, ann: TestClient, tmp_path: Path) -> None:
    log_in(ann)
    with browser(world, password_access(tmp_path)) as elsewhere:
        assert not is_in(elsewhere)
        elsewhere.cookies.update({SESSION: ann.cookies[SESSION]})
        assert is_in(elsewhere), "the same file, another process"
        left = log_out(ann)
        assert (left.status_code, left.headers["location"]) == (303, "/login?out=1")
        assert "logged out" in ann.get("/login?out=1").text
        assert not is_in(ann)
        assert not is_in(elsewhere)
    assert sessions(world) == 0


def test_a_session_ends_after_idle_time_and_for_good(world: World, ann: TestClient) -> None:
    for later in ("seen_at = now() - interval '1 hour 1 second'", "ends_at = now() - interval '1 second'"):
        log_in(ann)
        assert sessions(world) == 1, "those that are over are forgotten at the next login"
        assert is_in(ann)
        world.rows(f"UPDATE mqlayer.console_session SET {later} RETURNING 1")
        assert not is_in(ann), later


def test_use_keeps_a_session_but_live_parts_do_not(world: World, ann: TestClient) -> None:
    log_in(ann)
    old = "UPDATE mqlayer.console_session SET seen_at = now() - interval '50 minutes' RETURNING 1"
    seen = "SELECT seen_at > now() - interval '1 minute' FROM mqlayer.console_session"
    world.rows(old)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("mqlayer.console.live.LONGEST_S", 0.5)
        assert ann.get("/live", params={"path": "/audit"}).text.startswith("event: page\n")
    assert world.rows(seen) == [(False,)]
    assert is_in(ann)
    assert world.rows(seen) == [(True,)]


def test_a_user_keeps_the_ten_newest_sessions(world: World, ann: TestClient, tmp_path: Path) -> None:
    log_in(ann)
    first = ann.cookies[SESSION]
    for _ in range(10):
        ann.cookies.clear()
        log_in(ann)
    assert sessions(world) == 10
    assert is_in(ann)
    ann.cookies.clear()
    ann.cookies.update({SESSION: first})
    assert not is_in(ann)


def test_a_changed_password_ends_sessions_and_a_changed_level_counts_at_once(
    world: World, ann: TestClient, tmp_path: Path
) -> None:
    log_in(ann)
    path = tmp_path / "passwords"
    path.write_text(path.read_text().replace("operator+bodies", "viewer"))
    assert "(viewer)" in ann.get("/audit").text
    write(path, {"ann": "another password"})
    assert not is_in(ann)
    assert log_in(ann).status_code == 403
    assert log_in(ann, password="another password").status_code == 303
    path.write_text("ann:oper")
    assert ann.get("/audit").status_code == 503
    broken = log_in(ann, password="another password")
    assert broken.status_code == 503
    assert str(tmp_path) not in broken.text


@pytest.mark.full
def test_guesses_don_t_slow_pages_and_pages_don_t_hold_up_logins(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, begun = threading.Event(), threading.Semaphore(0)
    slow = {"password": PasswordFile.login, "page": PasswordFile.user_of}

    def holding(name: str) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            begun.release()
            assert held.wait(20)
            return slow[name](*args)

        return call

    with browser(world, password_access(tmp_path)) as ann, ThreadPoolExecutor(4) as people:
        log_in(ann)
        assert ann.portal is not None
        ann.portal.call(_few_page_threads)
        for attribute, request, meanwhile in (
            ("login", lambda: log_in(ann, "vic", "a guess").status_code == 403, lambda: is_in(ann)),
            ("user_of", lambda: is_in(ann), lambda: log_in(ann, "vic").status_code == 303),
        ):
            held.clear()
            with monkeypatch.context() as patched:
                patched.setattr(PasswordFile, attribute, holding("password" if attribute == "login" else "page"))
                asked = [people.submit(request) for _ in range(2)]
                for _ in asked:
                    assert begun.acquire(timeout=10)
                try:
                    assert people.submit(meanwhile).result(10), attribute
                finally:
                    held.set()
                assert all(one.result(10) for one in asked), attribute


async def _few_page_threads() -> None:
    to_thread.current_default_thread_limiter().total_tokens = 2


def test_without_postgres_nobody_is_let_in_nor_told_where_it_is(tmp_path: Path, world: World) -> None:
    settings = world.settings().model_copy(update={"dsn": type(world.settings().dsn)("postgresql://u@127.0.0.1:1/x")})
    with TestClient(console_app(settings, access=password_access(tmp_path)), follow_redirects=False) as client:
        client.cookies.update({"mqlayer-session": "x" * 43})
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr("mqlayer.console.runtimes.POOL", 1)
            answer = client.get("/audit")
    assert answer.status_code == 503
    assert "127.0.0.1" not in answer.text


def test_roles_that_view_share_no_sessions(world: World, database_dsn: str, roles: Roles, tmp_path: Path) -> None:
    """Else each role that may look would make itself a session of an operator."""
    one, other = (roles.login(Right.VIEW) for _ in range(2))
    access = password_access(tmp_path)
    clients = []
    for dsn in (one, other):
        settings = world.settings().model_copy(update={"dsn": type(world.settings().dsn)(dsn), "app_dsn": None})
        clients.append(TestClient(console_app(settings, access=access), base_url="https://x", follow_redirects=False))
    with clients[0] as first, clients[1] as second:
        log_in(first)
        second.cookies.update({SESSION: first.cookies[SESSION]})
        assert is_in(first)
        assert not is_in(second)
        taken = hashlib.sha256(first.cookies[SESSION].encode()).digest()
        assert ask_postgres(other, "SELECT mqlayer.console_session_end_v1(%s)", [taken]) == [(False,)]
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            ask_postgres(other, "SELECT * FROM mqlayer.console_session")
        assert is_in(first)


@contextmanager
def proxied(world: World, peer: str = "10.0.0.1") -> Iterator[TestClient]:
    site = Site("https://console.example", ["10.0.0.0/8"])
    with browser(world, ProxyAccess(site, LevelGroups(["staff"], ["oncall"], ["readers"])), peer) as client:
        yield client


def test_a_proxy_names_users_and_their_groups(world: World) -> None:
    with proxied(world) as client:
        seen = client.get("/audit", headers={"X-Forwarded-User": "ann", "X-Forwarded-Groups": "staff, oncall"})
        assert "(operator)" in seen.text
        assert "/logout" not in seen.text
        seen = client.get("/audit", headers={"X-Forwarded-User": "vic", "X-Forwarded-Groups": "staff"})
        assert "(viewer)" in seen.text
        assert client.get("/audit", headers={"X-Forwarded-User": "eve"}).status_code == 403
        assert client.get("/audit").status_code == 403


def test_a_login_that_lacks_a_right_or_a_role_is_told_so(world: World, roles: Roles, database_dsn: str) -> None:
    dsn = roles.login()
    operator = roles.name_of(role_dsn(database_dsn, Right.OPERATE))
    viewer = roles.name_of(role_dsn(database_dsn, Right.VIEW))
    name = roles.name_of(dsn)
    settings = world.settings().model_copy(update={"dsn": type(world.settings().dsn)(dsn), "app_dsn": None})

    def refusal(level: Level, role: str) -> str:
        with pytest.raises(PermissionDenied) as raised:
            Runtimes(settings, {level: role}).check(level)
        return str(raised.value)

    assert f"mqlayer grant view {name}" in refusal(Level.VIEWER, "")
    assert f"'{name}' may not become '{viewer}': GRANT {viewer} TO {name}" in refusal(Level.VIEWER, viewer)
    with pytest.raises(MqlayerError, match="no_such_role"):
        Runtimes(settings, {Level.VIEWER: "no_such_role"}).check(Level.VIEWER)
    world.rows(f'GRANT "{viewer}", "{operator}" TO "{name}"')
    try:
        Runtimes(settings, {Level.VIEWER: viewer}).check(Level.VIEWER)
        assert f"mqlayer grant operate {viewer}" in refusal(Level.OPERATOR, viewer)
        Runtimes(settings, {Level.OPERATOR: operator}).check(Level.OPERATOR)
    finally:
        world.rows(f'REVOKE "{viewer}", "{operator}" FROM "{name}"')


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--host", "0.0.0.0"], "no login is set up"),
        (["--host", "192.0.2.1", "--viewers", "x"], "groups are a proxy's"),
        (["--password-file", "none"], "none can't be read"),
        (["--proxy-from", "10.0.0.0/8", "--proxy-user-header", "X-User"], "--viewers or --operators"),
        (["--prefix", "mq"], "no path"),
        (["--url", "console"], "no address of a console"),
    ],
)
def test_a_console_without_a_login_of_its_own_stays_off(run: Commands, words: list[str], said: str) -> None:
    assert said in run.failure("console", *words)


def test_a_command_prints_the_line_of_a_user(run: Commands, tmp_path: Path) -> None:
    line = run.text("console-password", "ann", "--operator", "--bodies", "--password-stdin", typed="correct horse\n")
    path = tmp_path / "file"
    path.write_text(line)
    path.chmod(0o600)
    found = PasswordFile(path).login("ann", "correct horse")
    assert found is not None
    assert found.user.may_act
    assert "8 characters" in run("console-password", "ann", "--password-stdin", typed="short\n").output


class Served:
    """A console that runs as a process, and a browser's connection to it."""

    def __init__(self, port: int) -> None:
        self.port, self.cookies = port, dict[str, str]()

    def ask(self, method: str, path: str, form: dict[str, str] | None = None) -> tuple[int, str]:
        with closing(self.open(method, path, form)) as answer:
            return answer.status, answer.read().decode()

    def open(self, method: str, path: str, form: dict[str, str] | None = None) -> http.client.HTTPResponse:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        headers = {"Cookie": "; ".join(map("=".join, self.cookies.items())), "Connection": "close"}
        if form is not None:
            headers["Content-Type"] = "application/x-www-form-urlencoded"
        connection.request(method, path, urlencode(form) if form is not None else None, headers)
        answer = connection.getresponse()
        for line in answer.headers.get_all("set-cookie", []):
            name, _, value = line.partition(";")[0].partition("=")
            self.cookies[name] = value
        return answer

    def log_in(self) -> None:
        _, page = self.ask("GET", "/mq/login")
        form = {"name": "ann", "password": "correct horse", "token": token_of(page)}
        assert self.ask("POST", "/mq/login", form)[0] == 303


@pytest.mark.full
@pytest.mark.slow
def test_live_parts_end_with_the_session_and_with_the_process(world: World, tmp_path: Path) -> None:
    passwords, port = write(tmp_path / "passwords"), free_ports()
    words = ("console", "--port", str(port), "--prefix", "/mq", "--password-file", str(passwords))
    process = start_python("mqlayer", *words, env=world.environment())
    try:
        served = Served(port)

        def is_up() -> bool:
            try:
                return served.ask("GET", "/mq/login")[0] == 200
            except OSError:
                return False

        wait_until(is_up, timeout_s=30, what="the console answers")
        served.log_in()
        stream = served.open("GET", "/mq/live?path=/audit")
        assert stream.readline() == b"event: page\n"
        page = json.loads(stream.readline().removeprefix(b"data: "))
        assert 'href="/mq/topics"' in page
        assert served.ask("POST", "/mq/logout", {"token": token_of(page)})[0] == 303
        rest = stream.read().decode()
        stream.close()
        assert rest.endswith('event: ended\ndata: ""\n\n'), rest[-200:]
        served.log_in()
        stream = served.open("GET", "/mq/live?path=/audit")
        assert stream.readline() == b"event: page\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=40) == 0
        stream.close()
    finally:
        process.kill()
        process.wait()


def test_local_browsers_need_no_login(world: World) -> None:
    app = console_app(world.settings(), access=Anyone(Level.VIEWER))
    with TestClient(app, base_url="http://localhost:9480", client=("127.0.0.1", 1)) as client:
        seen = client.get("/audit")
        assert (seen.status_code, "(viewer)" in seen.text) == (200, True)
        assert client.get("/audit", headers={"Host": "rebound.example"}).status_code == 403


def test_sessions_have_the_times_that_were_asked_for(world: World, tmp_path: Path) -> None:
    passwords = PasswordFile(write(tmp_path / "passwords"))
    with browser(world, LoginAccess(passwords=passwords, sessions=Sessions(idle_s=120, longest_s=600))) as client:
        log_in(client)
    assert world.rows("SELECT idle_s, extract(epoch FROM ends_at - began_at)::int FROM mqlayer.console_session") == [
        (120, 600)
    ]


def test_the_doctor_asks_with_the_role_of_the_users_level(world: World, roles: Roles, database_dsn: str) -> None:
    """The login itself may do nothing, as in the guide."""
    dsn, viewer = roles.login(), roles.name_of(role_dsn(database_dsn, Right.VIEW))
    name = roles.name_of(dsn)
    settings = world.settings().model_copy(update={"dsn": type(world.settings().dsn)(dsn), "app_dsn": None})
    world.rows(f'ALTER ROLE "{name}" NOINHERIT')
    world.rows(f'GRANT "{viewer}" TO "{name}"')
    try:
        app = console_app(settings, access=FixedAccess(VIEWER), roles={Level.VIEWER: viewer})
        with TestClient(app) as client:
            found = client.get("/doctor", params={"run": "1"}).text
    finally:
        world.rows(f'REVOKE "{viewer}" FROM "{name}"')
    assert "no relay lives" in found
    assert "permission denied" not in found
