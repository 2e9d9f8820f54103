"""Logins at the console by a provider of OpenID Connect, which runs as a process of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from starlette.testclient import TestClient

from mqlayer.console import LevelGroups, LoginAccess, OpenId, Site
from mqlayer.console.access.openid import AGAIN, DENIED, NOT_HERE, NOT_NOW, Claims
from tests.fixtures.console_logins import HOST, SESSION, browser, is_in, log_out
from tests.fixtures.openid_provider import CLIENT, SECRET, Running, running_provider
from tests.proof.world import World

pytestmark = [pytest.mark.world(partitions=0), pytest.mark.xdist_group("openid")]


@pytest.fixture(scope="module")
def provider() -> Iterator[Running]:
    with running_provider() as found:
        yield found


def access(provider: Running, claims: Claims | None = None) -> LoginAccess:
    groups = LevelGroups(["staff"], ["oncall"], ["readers"])
    return LoginAccess(Site(HOST), openid=OpenId(provider.issuer, CLIENT, SECRET, groups, claims=claims))


@pytest.fixture
def client(world: World, provider: Running) -> Iterator[TestClient]:
    with browser(world, access(provider)) as found:
        yield found


def sent_back(client: TestClient, provider: Running, path: str = "/audit", **asked: str) -> str:
    """Begin a login; return the address to which the provider sends the browser back."""
    begun = client.get("/login/openid", params={"next": path})
    assert begun.status_code == 303, begun.text
    return provider.let_in(begun.headers["location"], **{"user": "ann@example.com", **asked})


def test_a_provider_names_users_with_their_groups(client: TestClient, provider: Running) -> None:
    assert "/login/openid?next=%2Faudit" in client.get("/login?next=/audit").text
    entered = client.get(sent_back(client, provider, groups="staff,oncall,readers"))
    assert (entered.status_code, entered.headers["location"]) == (303, "/audit"), entered.text
    assert "mqlayer-openid" not in str(client.cookies)
    page = client.get("/audit").text
    assert "ann@example.com" in page
    assert "(operator)" in page
    log_out(client)
    assert not is_in(client)
    assert f"{provider.issuer}/end?client_id=console" in client.get("/login?out=1").text


def test_groups_may_come_from_the_users_facts(client: TestClient, provider: Running) -> None:
    assert client.get(sent_back(client, provider, more_groups="staff")).status_code == 303
    assert "(viewer)" in client.get("/audit").text


def test_claims_may_have_other_names(world: World, provider: Running) -> None:
    claims = Claims("sub", "groups")
    with browser(world, access(provider, claims)) as client:
        client.get(sent_back(client, provider, groups="staff"))
        assert "id-of-ann@example.com" in client.get("/audit").text


FAULTS = {
    "nonce": NOT_NOW, "no nonce": NOT_NOW, "audience": NOT_NOW, "audience and party": NOT_NOW, "issuer": NOT_NOW,
    "expired": NOT_NOW, "key": NOT_NOW, "token": NOT_NOW, "refused": DENIED, "unverified": NOT_HERE,
}  # fmt: skip
"""What a provider does, and what the browser is told."""


def test_a_token_that_is_not_for_this_login_is_refused(world: World, client: TestClient, provider: Running) -> None:
    for fault, said in FAULTS.items():
        refused = client.get(sent_back(client, provider, groups="oncall", fault=fault))
        assert (refused.status_code, said in refused.text) == (403, True), (fault, refused.text)
        assert "script>alert" not in refused.text
        assert SESSION not in client.cookies, fault
    assert world.rows("SELECT 1 FROM mqlayer.console_session") == []


def test_another_users_facts_are_refused(client: TestClient, provider: Running) -> None:
    assert NOT_NOW in client.get(sent_back(client, provider, more_groups="staff", fault="subject")).text


def test_a_user_without_a_group_has_no_level(client: TestClient, provider: Running) -> None:
    assert NOT_HERE in client.get(sent_back(client, provider, groups="sales")).text


def test_the_way_back_is_for_the_browser_that_began_and_once(
    world: World, client: TestClient, provider: Running
) -> None:
    """An attacker who sends a victim his own way back would log him in as himself."""
    back = sent_back(client, provider, groups="oncall")
    with browser(world, access(provider)) as victim:
        assert AGAIN in victim.get(back).text
        sent_back(victim, provider)
        assert AGAIN in victim.get(back).text, "the state of another login"
        assert SESSION not in victim.cookies
    assert client.get(back).status_code == 303
    assert AGAIN in client.get(back).text


def test_a_code_without_its_verifier_is_refused(world: World, client: TestClient, provider: Running) -> None:
    """A code that was seen on the way is of no use with a state of one's own."""
    code = sent_back(client, provider, groups="oncall").partition("code=")[2]
    with browser(world, access(provider)) as thief:
        own = sent_back(thief, provider, groups="staff").partition("code=")[0]
        assert NOT_NOW in thief.get(f"{own}code={code}").text


def test_a_provider_that_is_away_or_another_is_told_apart(world: World) -> None:
    with browser(world, access(Running("http://127.0.0.1:1", 1))) as client:
        assert NOT_NOW in client.get("/login/openid").text
        assert client.get("/login").status_code == 200


def test_a_provider_that_calls_itself_otherwise_is_refused(world: World, provider: Running) -> None:
    with browser(world, access(Running(f"http://localhost:{provider.port}", provider.port))) as client:
        assert NOT_NOW in client.get("/login/openid").text
