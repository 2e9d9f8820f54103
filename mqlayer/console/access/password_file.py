"""Users in a file of lines `NAME:LEVEL:HASH`."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from argon2 import PasswordHasher, Type, extract_parameters
from argon2.exceptions import Argon2Error, InvalidHashError

from mqlayer.console.users import Level, User
from mqlayer.errors import InvalidInput

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
BODIES: Final = "+bodies"
FILE_BYTES: Final = 1_000_000
PASSWORD_LENGTH: Final = 8
PASSWORD_BYTES: Final = 1_024
AT_ONCE: Final = 2
"""Hashes at once: each takes some 64 MB."""
PATIENCE_S: Final = 5.0
HOWTO: Final = "add one with `mqlayer console-password NAME`"


class Busy(Exception):
    """Too many logins wait for their hashes."""


@dataclass(frozen=True, slots=True)
class PasswordEntry:
    """A line of the file."""

    user: User
    hash: str

    @property
    def proof(self) -> str:
        """Another one if the password changes."""
        return f"password:{hashlib.sha256(self.hash.encode()).hexdigest()}"


@dataclass(slots=True)
class PasswordFile:
    """Users by password. Read again when it changes; a file with a fault lets no one in.

    The file belongs to the process's account or to root, and is closed to others. Raises InvalidInput.
    """

    path: Path
    _entries: Mapping[str, PasswordEntry] = field(default_factory=dict)
    _version: tuple[int, ...] = ()
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _hashing: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(AT_ONCE))

    def __post_init__(self) -> None:
        self.entries()

    def entries(self) -> Mapping[str, PasswordEntry]:
        """Return lines by name."""
        with self._lock:
            try:
                version = _version(self.path.stat())
                if version != self._version:
                    with self.path.open("rb") as file:
                        facts = os.fstat(file.fileno())
                        _check_mode(self.path, facts)
                        self._entries = _read(self.path, file)
                    self._version = _version(facts)
            except OSError as error:
                raise InvalidInput(f"{self.path} can't be read: {error.strerror or type(error).__name__}") from error
            return self._entries

    def login(self, name: str, password: str) -> PasswordEntry | None:
        """Return the user's line if it is the password. Raises Busy. An unknown user takes as long."""
        entries = self.entries()
        found = entries.get(name)
        # Another user's line, always the same one: its hash costs what hashes of this file cost.
        tried = found or (list(entries.values())[hash(name) % len(entries)] if entries else None)
        fits = tried is not None and len(password.encode()) <= PASSWORD_BYTES and self._fits(tried.hash, password)
        return found if fits else None

    def user_of(self, name: str, proof: str) -> User | None:
        """Return the user of a login while the password is the same."""
        entry = self.entries().get(name)
        return entry.user if entry is not None and entry.proof == proof else None

    def _fits(self, known: str, password: str) -> bool:
        if not self._hashing.acquire(timeout=PATIENCE_S):
            raise Busy
        try:
            return PasswordHasher().verify(known, password)
        except Argon2Error:
            return False
        finally:
            self._hashing.release()


def password_line(name: str, level: Level, password: str, *, bodies: bool = False) -> str:
    """Return a line for the file. Raises InvalidInput."""
    _check_name(name)
    if len(password) < PASSWORD_LENGTH or len(password.encode()) > PASSWORD_BYTES:
        raise InvalidInput(f"take a password of {PASSWORD_LENGTH} characters or more, up to {PASSWORD_BYTES} bytes")
    return f"{name}:{level.value}{BODIES if bodies else ''}:{PasswordHasher().hash(password)}"


def _read(path: Path, file: IO[bytes]) -> Mapping[str, PasswordEntry]:
    content = file.read(FILE_BYTES + 1)
    if len(content) > FILE_BYTES:
        raise InvalidInput(f"{path} has more than {FILE_BYTES:,} bytes: it is no password file")
    found: dict[str, PasswordEntry] = {}
    for number, line in _lines(path, content):
        try:
            entry = _entry(line)
        except InvalidInput as error:
            raise InvalidInput(f"{path}, line {number}: {error}") from None
        if entry.user.name in found:
            raise InvalidInput(f"{path}, line {number}: {entry.user.name} has a line before this one")
        found[entry.user.name] = entry
    return found


def _lines(path: Path, content: bytes) -> Iterator[tuple[int, str]]:
    try:
        text = content.decode()
    except UnicodeDecodeError:
        raise InvalidInput(f"{path} is no text in UTF-8") from None
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped and not stripped.startswith("#"):
            yield number, stripped


def _entry(line: str) -> PasswordEntry:
    name, found, rest = line.partition(":")
    level, with_hash, known = rest.partition(":")
    if not (found and with_hash):
        # Without its words: half a line may be a password.
        raise InvalidInput(f"this is no line NAME:LEVEL:HASH; {HOWTO}")
    _check_name(name)
    bodies = level.endswith(BODIES)
    try:
        user = User(name, Level(level.removesuffix(BODIES)), bodies)
    except ValueError:
        raise InvalidInput(f"the level of {name} is neither viewer nor operator, with or without {BODIES}") from None
    try:
        kind = extract_parameters(known).type
    except InvalidHashError:
        kind = None
    if kind is not Type.ID:
        raise InvalidInput(f"{name} has no hash by argon2id; {HOWTO}")
    return PasswordEntry(user, known)


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise InvalidInput("a name has up to 64 of A-Z a-z 0-9 . _ @ - and begins with a letter or digit")


def _check_mode(path: Path, facts: os.stat_result) -> None:
    mode = stat.S_IMODE(facts.st_mode)
    if mode & 0o027:
        raise InvalidInput(f"{path} has the mode {mode:04o}, open to other accounts: chmod 600 {path}")
    if facts.st_uid not in {0, os.geteuid()}:
        raise InvalidInput(f"{path} belongs to account {facts.st_uid}: chown it to the account of this process")


def _version(facts: os.stat_result) -> tuple[int, ...]:
    return facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns
