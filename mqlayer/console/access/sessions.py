"""Sessions, in Postgres: a logout ends one for all consoles."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from starlette.requests import Request

from mqlayer.console.access.forms import new_secret
from mqlayer.console.users import Level, User
from mqlayer.postgres.database import Database
from mqlayer.postgres.queries import query


@dataclass(frozen=True, slots=True)
class Session:
    """A user, and the proof of the login."""

    user: User
    proof: str


@dataclass(frozen=True, slots=True)
class Sessions:
    """A session ends after `idle_s` without a request, and after `longest_s`."""

    idle_s: int = 3_600
    longest_s: int = 43_200

    def begin(self, request: Request, session: Session) -> str:
        """Begin a session; return its token."""
        token, user = new_secret(), session.user
        facts = {"name": user.name, "level": user.level.value, "bodies": user.bodies, "proof": session.proof}
        limits = {"idle_s": self.idle_s, "longest_s": self.longest_s}
        with _control(request).connection() as connection:
            connection.execute(query("session_begin"), {"token_hash": _hash(token)} | facts | limits)
        return token

    def find(self, request: Request, token: str, *, use: bool) -> Session | None:
        """Return the session of a token. `use`: its idle time begins anew."""
        with _control(request).connection() as connection:
            row = connection.execute(query("session_of"), {"token_hash": _hash(token), "use": use}).fetchone()
        if row is None:
            return None
        name, level, bodies, proof = row
        return Session(User(name, Level(level), bodies), proof)

    def end(self, request: Request, token: str) -> None:
        """End a session."""
        with _control(request).connection() as connection:
            connection.execute(query("session_end"), {"token_hash": _hash(token)})


def _control(request: Request) -> Database:
    # With the viewers' role: it has the right.
    control: Database = request.app.state.runtimes.of(User("", Level.VIEWER)).control
    return control


def _hash(token: str) -> bytes:
    return hashlib.sha256(token.encode()).digest()
