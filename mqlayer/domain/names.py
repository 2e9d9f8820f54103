"""Names and limits; SQL and scripts check them too."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from mqlayer.domain.message import TTL_FORM, TTL_HEADER, Identity
from mqlayer.errors import BodyTooLarge, InvalidInput, InvalidName, KeyTooLarge, ReservedHeader

IDENTITY_FORM: Final = re.compile(r"(\d{1,9}):(\d{1,4}):(\d{1,18})")
NAME_FORM: Final = re.compile(r"[a-z][a-z0-9_.-]{0,62}")
DELETED_SUFFIX: Final = re.compile(r"@[0-9]{1,10}\Z")
INSTANCE_FORM: Final = re.compile(r"[a-z0-9][a-z0-9_.-]{0,62}")
KEY_LIMIT: Final = 512
BODY_LIMIT: Final = 1_000_000
DEFAULT_BODY_LIMIT: Final = 262_144
HEADER_COUNT_LIMIT: Final = 32
HEADER_BYTES_LIMIT: Final = 8_192
RESERVED_PREFIX: Final = "mq-"
BATCH_COUNT_LIMIT: Final = 500
BATCH_BYTES_LIMIT: Final = 1_000_000


def check_name(kind: str, name: str) -> str:
    """Return a valid topic, group, node or member name. Raises InvalidName."""
    # Configuration and command lines may give any type.
    if not NAME_FORM.fullmatch(str(name)):
        raise InvalidName(kind, name)
    return name


def check_any_topic(name: str) -> str:
    """Return a valid name of a topic, or NAME@ID of a deleted one. Raises InvalidName."""
    check_name("topic", DELETED_SUFFIX.sub("", str(name)))
    return name


def check_instance(instance: str) -> str:
    """Return a valid broadcast instance's name. Raises InvalidName."""
    if not INSTANCE_FORM.fullmatch(str(instance)):
        raise InvalidName("instance", instance)
    return instance


def check_deployment(name: str) -> str:
    """Return a deployment's valid name. Raises InvalidName."""
    if not INSTANCE_FORM.fullmatch(str(name)):
        raise InvalidName("deployment", name)
    return name


def check_zone(zone: str) -> str:
    """Return a valid zone's name, or "" for none. Raises InvalidName."""
    if zone and not INSTANCE_FORM.fullmatch(str(zone)):
        raise InvalidName("zone", zone)
    return zone


def instance_name(group: str, instance: str) -> str:
    """Return an instance's group name, impossible for other groups."""
    return f"{group}@{instance}"


def check_group(name: str) -> str:
    """Return a group's or instance's valid name. Raises InvalidName."""
    group, at, instance = str(name).partition("@")
    check_name("group", group)
    if at:
        check_instance(instance)
    return name


def check_id(kind: str, text: str) -> str:
    """Return an application's id of 1 to 512 bytes. Raises InvalidInput."""
    if not 1 <= len(text.encode(errors="replace")) <= KEY_LIMIT or not _storable(text):
        raise InvalidInput(f"the name of an {kind} is a text of 1 to {KEY_LIMIT} bytes, without zero bytes: use an id")
    return text


def _storable(text: str) -> bool:
    try:
        return b"\0" not in text.encode()
    except UnicodeEncodeError:
        return False


def encode_key(key: str) -> bytes:
    """Return UTF-8. Raises KeyTooLarge over 512 bytes, InvalidInput for invalid Unicode or another type."""
    # Applications may ignore the annotation.
    if not isinstance(key, str):
        raise InvalidInput(f"a message key is a str, not {type(key).__name__}: give str(customer_id)")
    try:
        data = key.encode()
    except UnicodeEncodeError:
        raise InvalidInput("a message key is a str of valid Unicode, without lone surrogates") from None
    if len(data) > KEY_LIMIT:
        raise KeyTooLarge(len(data), KEY_LIMIT)
    return data


def check_body(topic: str, body: bytes, limit: int) -> bytes:
    """Return the body. Raises BodyTooLarge."""
    if len(body) > limit:
        raise BodyTooLarge(topic, len(body), limit)
    return body


def check_headers(headers: Mapping[str, str]) -> Mapping[str, str]:
    """Return the headers. Raises ReservedHeader."""
    if len(headers) > HEADER_COUNT_LIMIT:
        raise ReservedHeader(f"{len(headers)} of them, at most {HEADER_COUNT_LIMIT}")
    size = 0
    for name, value in headers.items():
        if not all(isinstance(part, str) for part in (name, value)):
            raise ReservedHeader("names and values must be str")
        if name == TTL_HEADER:
            if not TTL_FORM.fullmatch(value):
                raise ReservedHeader(f"{name!r} is a number of ms: use expires_after")
        elif name.startswith(RESERVED_PREFIX):
            raise ReservedHeader(f"names that begin with {RESERVED_PREFIX!r} are reserved, rename {name!r}")
        size += len(name.encode()) + len(value.encode())
    if size > HEADER_BYTES_LIMIT:
        raise ReservedHeader(f"{size} bytes of them, at most {HEADER_BYTES_LIMIT}")
    return headers


def with_headers(headers: Mapping[str, str], more: Mapping[str, str]) -> Mapping[str, str]:
    """Return headers with further ones, or as they are where those find no room."""
    joined = {**headers, **more}
    try:
        return check_headers(joined)
    except ReservedHeader:
        return headers


def parse_identity(text: str) -> Identity:
    """Parse source:lp:seq. Raises InvalidInput."""
    match = IDENTITY_FORM.fullmatch(text)
    if match is None:
        raise InvalidInput(f"{text!r} names no message: say its source:lp:seq, such as 3:512:17")
    return Identity(*map(int, match.groups()))


def oversize(key: bytes | None, body: bytes | None) -> str:
    """Return why an outbox row can never be sent, or ''. `body` None: too large."""
    if key is not None and len(key) > KEY_LIMIT:
        return f"key of {len(key)} bytes, the limit is {KEY_LIMIT}"
    if body is None:
        return f"body over the hard limit of {BODY_LIMIT} bytes"
    return ""
