"""Logins at the console: the rules that need no server."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from argon2 import PasswordHasher, Type
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from mqlayer.console import Anyone, Level, LevelGroups, LoginAccess, OpenId, PasswordFile, ProxyAccess, Site, User
from mqlayer.console.access.password_file import Busy, password_line
from mqlayer.console.access.paths import safe_path
from mqlayer.console.access.throttle import PER_ADDRESS, PER_PAIR, PER_USER, SPAN_S, Throttle
from mqlayer.console.prefix import Prefixed
from mqlayer.errors import InvalidInput

CHEAP = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)
ANN = f"ann:operator+bodies:{CHEAP.hash('correct horse')}"
VIC = f"vic:viewer:{CHEAP.hash('battery staple')}"


def written(tmp_path: Path, *lines: str, mode: int = 0o600) -> Path:
    path = tmp_path / "passwords"
    path.write_text("\n".join(lines))
    path.chmod(mode)
    return path


def request(peer: str = "192.0.2.1", scheme: str = "http", root: str = "", **headers: str) -> Request:
    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    facts = {"type": "http", "method": "GET", "path": "/", "query_string": b"", "scheme": scheme, "root_path": root}
    return Request({**facts, "headers": raw, "client": (peer, 4711), "server": ("127.0.0.1", 9480)})


def test_a_password_file_lets_in_its_users_alone(tmp_path: Path) -> None:
    users = PasswordFile(written(tmp_path, "# people", "", ANN, VIC))
    found = users.login("ann", "correct horse")
    assert found is not None
    assert found.user == User("ann", Level.OPERATOR, bodies=True)
    vic = users.login("vic", "battery staple")
    assert vic is not None
    assert vic.user == User("vic")
    for name, password in [("ann", "battery staple"), ("eve", "correct horse"), ("", ""), ("ann", "x" * 10_000)]:
        assert users.login(name, password) is None, name


def test_an_unknown_user_costs_a_hash_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    users = PasswordFile(written(tmp_path, ANN))
    tried: list[str] = []

    def verify(self: PasswordHasher, known: str, password: str) -> bool:
        tried.append(known)
        return True

    monkeypatch.setattr(PasswordHasher, "verify", verify)
    assert users.login("eve", "correct horse") is None
    assert tried == [users.entries()["ann"].hash]


def test_hashes_at_once_are_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mqlayer.console.access.password_file.PATIENCE_S", 0.01)
    users = PasswordFile(written(tmp_path, ANN))
    assert users._hashing.acquire()
    assert users._hashing.acquire()
    with pytest.raises(Busy):
        users.login("ann", "correct horse")


@pytest.mark.parametrize("mode", [0o604, 0o620, 0o602, 0o601])
def test_a_file_that_is_open_to_others_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(InvalidInput, match=f"mode {mode:04o}.*chmod 600"):
        PasswordFile(written(tmp_path, ANN, mode=mode))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_another_accounts_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path, ANN)
    os.chown(path, 12345, -1)
    with pytest.raises(InvalidInput, match="belongs to account 12345"):
        PasswordFile(path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("sesame-open", "no line NAME:LEVEL:HASH"),
        ("ann:sesame-open", "no line NAME:LEVEL:HASH"),
        ("ann:boss:" + CHEAP.hash("sesame-open"), "neither viewer nor operator"),
        ("ann:operator:sesame-open", "no hash by argon2id"),
        ("ann:operator:" + PasswordHasher(1, 8, 1, type=Type.I).hash("sesame-open"), "no hash by argon2id"),
        ("<ann>:operator:" + CHEAP.hash("sesame-open"), "a name has up to 64"),
        (ANN + "\n" + ANN, "a line before"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_not_quoted(tmp_path: Path, line: str, said: str) -> None:
    with pytest.raises(InvalidInput, match=r"passwords, line \d+: ") as raised:
        PasswordFile(written(tmp_path, VIC, line))
    assert said in str(raised.value)
    assert "sesame" not in str(raised.value)
    assert "argon2id$" not in str(raised.value)


def test_a_file_that_is_missing_large_or_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="can't be read: No such file"):
        PasswordFile(tmp_path / "none")
    with pytest.raises(InvalidInput, match="more than 1,000,000 bytes"):
        PasswordFile(written(tmp_path, "#" * 1_000_001))
    path = written(tmp_path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidInput, match="no text in UTF-8"):
        PasswordFile(path)


def test_a_changed_file_is_read_again_and_a_broken_one_lets_nobody_in(tmp_path: Path) -> None:
    users = PasswordFile(written(tmp_path, ANN, VIC))
    ann = users.entries()["ann"]
    assert users.user_of("ann", ann.proof) == ann.user
    written(tmp_path, ANN.replace("operator+bodies", "viewer"), VIC)
    assert users.user_of("ann", ann.proof) == User("ann"), "a level counts at once"
    written(tmp_path, f"ann:operator:{CHEAP.hash('another one')}")
    assert users.user_of("ann", ann.proof) is None, "another password"
    assert users.user_of("vic", "any") is None
    written(tmp_path, ANN, "half a li")
    for _ in range(2):
        with pytest.raises(InvalidInput, match="line 2"):
            users.user_of("ann", ann.proof)


def test_a_made_line_is_one_of_the_file(tmp_path: Path) -> None:
    line = password_line("ann", Level.OPERATOR, "correct horse", bodies=True)
    found = PasswordFile(written(tmp_path, line)).login("ann", "correct horse")
    assert found is not None
    assert found.user == User("ann", Level.OPERATOR, bodies=True)
    with pytest.raises(InvalidInput, match="8 characters or more"):
        password_line("ann", Level.VIEWER, "short")
    with pytest.raises(InvalidInput, match="a name has"):
        password_line("a:b", Level.VIEWER, "correct horse")


def failing(limits: Throttle, user: str, address: str, times: int = 1) -> list[float]:
    return [limits.attempt(user, address) for _ in range(times)]


def test_failures_are_limited_by_pair_by_address_and_by_user_for_a_while() -> None:
    now = [0.0]
    limits = Throttle(now_s=lambda: now[0])
    assert failing(limits, "ann", "192.0.2.1", PER_PAIR + 1) == [0] * PER_PAIR + [SPAN_S]
    assert failing(limits, "vic", "192.0.2.1") == [0]
    for number in range(PER_ADDRESS - PER_PAIR - 1):
        failing(limits, f"user-{number}", "192.0.2.1")
    assert failing(limits, "eve", "192.0.2.1") == [SPAN_S], "one address, many users"
    for number in range(PER_USER - PER_PAIR):
        assert failing(limits, "ann", f"198.51.100.{number}") == [0]
    assert failing(limits, "ann", "203.0.113.1") == [SPAN_S], "one user, many addresses"
    now[0] = SPAN_S
    assert failing(limits, "ann", "192.0.2.1") == [0]


def test_logins_that_pass_count_nowhere() -> None:
    limits = Throttle()
    for _ in range(2 * PER_USER):
        assert limits.attempt("ann", "192.0.2.1") == 0
        limits.passed("ann", "192.0.2.1")
    for _ in range(2 * PER_USER):
        assert limits.attempt("ann", "192.0.2.1") == 0
        limits.undo("ann", "192.0.2.1")


def test_an_ipv6_network_is_one_address_and_memory_is_bounded() -> None:
    limits = Throttle(room=50)
    for number in range(PER_PAIR):
        failing(limits, "ann", f"2001:db8::{number}")
    assert failing(limits, "ann", "2001:db8::ffff") > [0]
    assert failing(limits, "ann", "2001:db8:0:1::1") == [0]
    for number in range(1_000):
        failing(limits, f"user-{number}", f"198.51.{number // 200}.{number % 200}")
    assert len(limits._failures) == 50


@pytest.mark.parametrize(
    "path",
    [
        "//evil.example", "/\\evil.example", "https://evil.example", "\\\\evil.example", "/\t/evil.example",
        "javascript:1", "/login?next=/", "/logout", "/live", "", "evil.example", "/\r\nSet-Cookie: a=b", "/ä",
        f"/{'x' * 3_000}",
    ],
)  # fmt: skip
def test_a_path_out_of_the_console_leads_to_its_overview(path: str) -> None:
    assert safe_path(path) == "/"


def test_a_path_within_the_console_stays() -> None:
    assert safe_path("/keys?topic=orders&key=a%2Fb") == "/keys?topic=orders&key=a%2Fb"


def test_forwarded_headers_count_from_trusted_peers_only() -> None:
    site = Site(proxies=["10.0.0.0/8", "2001:db8::/32"])
    forged = {"x_forwarded_for": "203.0.113.9", "x_forwarded_proto": "https"}
    outside = request("192.0.2.1", **forged)
    assert (site.address(outside), site.is_secure(outside), site.is_proxied(outside)) == ("192.0.2.1", False, False)
    behind = request("::ffff:10.1.2.3", **forged)
    assert (site.address(behind), site.is_secure(behind), site.is_proxied(behind)) == ("203.0.113.9", True, True)
    appended = request("10.0.0.1", x_forwarded_for="1.1.1.1, 203.0.113.9, 10.9.9.9")
    assert site.address(appended) == "203.0.113.9", "what a client wrote itself stands before"
    assert site.address(request("10.0.0.1", x_forwarded_for="<b>")) == "10.0.0.1"


@pytest.mark.parametrize(
    ("headers", "own"),
    [
        ({}, True),
        ({"sec_fetch_site": "same-origin"}, True),
        ({"sec_fetch_site": "cross-site"}, False),
        ({"sec_fetch_site": "same-site"}, False),
        ({"origin": "https://mq.example.com"}, True),
        ({"origin": "http://mq.example.com"}, False),
        ({"origin": "https://mq.example.com.evil.example"}, False),
        ({"origin": "https://mq.example.com:8443"}, False),
        ({"origin": "null"}, False),
        ({"origin": "https://["}, False),
    ],
)
def test_a_form_comes_from_the_public_address(headers: dict[str, str], own: bool) -> None:
    assert Site("https://mq.example.com/mq").is_own_form(request(host="127.0.0.1:9480", **headers)) is own


def test_without_a_public_address_a_form_comes_from_the_host_that_was_asked() -> None:
    assert Site().is_own_form(request(host="mq.example.com", origin="https://mq.example.com"))
    assert not Site().is_own_form(request(host="mq.example.com", origin="https://evil.example"))
    assert not Site().is_own_form(request(origin="null"))


@pytest.mark.parametrize(
    ("peer", "host", "let_in"),
    [
        ("127.0.0.1", "127.0.0.1:9480", True),
        ("127.0.0.1", "localhost:9480", True),
        ("::1", "[::1]:9480", True),
        ("127.0.0.1", "rebound.example:9480", False),
        ("127.0.0.1", "localhost.evil.example", False),
        ("127.0.0.1", "", False),
        ("127.0.0.1", "[", False),
        ("192.0.2.1", "localhost:9480", False),
    ],
)
def test_without_a_login_only_this_machine_is_let_in_by_a_name_of_it(peer: str, host: str, let_in: bool) -> None:
    """Another name may lead an attacker's page to this address (DNS rebinding)."""
    assert (Anyone().user_of(request(peer, host=host)) is not None) is let_in


def test_without_a_login_nobody_comes_through_a_proxy() -> None:
    assert Anyone().user_of(request("127.0.0.1", host="127.0.0.1", x_forwarded_for="192.0.2.1")) is None


@pytest.mark.parametrize(
    ("groups", "user"),
    [
        (["oncall"], User("ann", Level.OPERATOR)),
        (["staff", "oncall", "readers"], User("ann", Level.OPERATOR, bodies=True)),
        (["staff", "readers"], User("ann", Level.VIEWER, bodies=True)),
        (["readers"], None),
        (["ONCALL", "oncall2", "*", ""], None),
    ],
)
def test_groups_make_levels(groups: list[str], user: User | None) -> None:
    assert LevelGroups(["staff"], ["oncall"], ["readers"]).user("ann", groups) == user


def test_a_name_that_is_none_has_no_level() -> None:
    for name in (None, "", "x" * 257, "a\0b", "a\nb", "\ud800", "\u202e"):
        assert LevelGroups(["*"]).user(name, []) is None
    assert LevelGroups(["*"]).user("ann", []) == User("ann")


def test_accesses_that_could_let_nobody_in_or_anybody_are_refused() -> None:
    with pytest.raises(InvalidInput, match="--viewers or --operators"):
        LevelGroups(readers=["readers"])
    with pytest.raises(InvalidInput, match="--proxy-from"):
        ProxyAccess(Site(), LevelGroups(["*"]))
    with pytest.raises(InvalidInput, match="password file"):
        LoginAccess()
    with pytest.raises(InvalidInput, match="no network"):
        Site(proxies=["10.0.0.1/8"])
    with pytest.raises(InvalidInput, match="no address of a console"):
        Site("mq.example.com")
    with pytest.raises(InvalidInput, match="no address of TLS"):
        OpenId("http://id.example.com", "console", None, LevelGroups(["*"]))


@pytest.mark.parametrize(
    ("asked", "found"),
    [("/mq/topics", "/mq/topics"), ("/topics", "/mq/topics"), ("/mq", "/mq/"), ("/mqueue", "/mq/mqueue")],
)
def test_a_prefix_is_left_or_taken_away_by_the_proxy(asked: str, found: str) -> None:
    seen: list[Scope] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(scope)

    async def none() -> Message:
        return {}

    async def nowhere(message: Message) -> None:
        pass

    asyncio.run(Prefixed(app, "/mq")({"type": "http", "path": asked}, none, nowhere))
    assert (seen[0]["path"], seen[0]["root_path"]) == (found, "/mq")
