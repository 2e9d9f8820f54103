"""Ordered calls as messages, and Celery's options that order forbids."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias
from uuid import UUID

import msgspec
from kombu.utils import json as celery_json

from mqlayer.domain.codecs import decoder_for
from mqlayer.errors import BodyMismatch, InvalidInput

Key: TypeAlias = "str | Callable[..., object]"
"""A parameter's name, or a function of the arguments returning the key."""


class TaskCall(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message's body: one call; `arguments` is Celery's JSON."""

    task: str
    id: str
    arguments: str
    headers: dict[str, Any] = {}
    root_id: str | None = None
    parent_id: str | None = None
    group: str | None = None
    group_index: int | None = None
    ignore_result: bool | None = None
    shadow: str | None = None


BODY: Final = "call of an ordered task"
_read: Final = decoder_for(TaskCall)
_write: Final = msgspec.json.Encoder().encode

UNREADABLE: Final = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)
SCHEDULE_IT: Final = "it runs when those before it are done: let an ordinary task with that delay make this call"
ITS_TOPIC: Final = "it goes to the task's topic, not to a queue: give topic= to the decorator"
LAST_ONLY: Final = "it can be the last one of a chain, not one that others wait for: make the next call in the body"
GROUPS_LIMIT: Final = "its group says how long a body has: give time_limit_s= to consume_tasks, or mqlayer group set"
GROUPS_RULES: Final = (
    "its group says how often a failed call is repeated, and after which waits: give attempt_limit= and backoff_s= to "
    "consume_tasks, or mqlayer group set; a body may raise Reject or RetryLater"
)

REFUSED: Final[Mapping[str, str]] = {
    "countdown": SCHEDULE_IT,
    "eta": SCHEDULE_IT,
    "expires": "dropping it would be a gap in its key's order: look at the time in the body",
    "priority": "its place is behind the earlier calls of its key",
    "queue": ITS_TOPIC,
    "exchange": ITS_TOPIC,
    "routing_key": ITS_TOPIC,
    "link": LAST_ONLY,
    "link_error": LAST_ONLY,
    "chain": LAST_ONLY,
    "chord": LAST_ONLY,
    "time_limit": GROUPS_LIMIT,
    "soft_time_limit": GROUPS_LIMIT,
}
"""Refused options of a call, with reasons."""

REFUSED_OF_TASKS: Final[Mapping[str, str]] = {
    **{name: REFUSED[name] for name in ("expires", "priority", "queue", "exchange", "routing_key")},
    "time_limit": GROUPS_LIMIT,
    "soft_time_limit": GROUPS_LIMIT,
    "rate_limit": "its group's concurrency bounds how many run at once",
    "max_retries": GROUPS_RULES,
    "retry_backoff": GROUPS_RULES,
    "retry_kwargs": GROUPS_RULES,
}
"""The same for decorators."""

# Canvas adds these, or they concern only delivery to a broker.
_WITHOUT_MEANING: Final = frozenset(
    {
        "add_to_parent",
        "connection",
        "producer",
        "publisher",
        "reply_to",
        "result_cls",
        "retry",
        "retry_policy",
        "task_type",
    }
)
_FIELDS: Final = frozenset({"headers", "root_id", "parent_id", "group_index", "ignore_result", "shadow"})


def check_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidInput for refused options; empty ones pass."""
    for option, value in options.items():
        if not value or option in _WITHOUT_MEANING or option in _FIELDS or option == "group_id":
            continue
        if option == "serializer" and value == "json":
            continue
        reason = REFUSED.get(option, "it means nothing to a message of a topic")
        raise InvalidInput(f"a call of ordered task {name!r} takes no {option}: {reason}")


def check_task_options(name: str, options: Mapping[str, Any]) -> None:
    """Raise InvalidInput for ineffective options."""
    for option in sorted(REFUSED_OF_TASKS.keys() & options.keys()):
        if options[option] is not None:
            raise InvalidInput(f"ordered task {name!r} takes no {option}: {REFUSED_OF_TASKS[option]}")


def check_body(name: str, run: Any, key: Key) -> None:
    """Raise InvalidInput for an `async` body or an unknown key."""
    if inspect.iscoroutinefunction(run):
        raise InvalidInput(f"ordered task {name!r} is `async def`, which Celery does not run: make it a plain function")
    if key and isinstance(key, str):
        if key not in inspect.signature(run).parameters:
            raise InvalidInput(f"ordered task {name!r} has no parameter {key!r} to take the key from")
    elif not callable(key):
        raise InvalidInput(f"ordered task {name!r} needs key=: the name of a parameter, or a function of the arguments")


def key_of(name: str, key: Key, run: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Return the message key. Raises InvalidInput for its type, TypeError for unfit arguments."""
    if isinstance(key, str):
        bound = inspect.signature(run).bind(*args, **kwargs)
        bound.apply_defaults()
        found: object = bound.arguments[key]
    else:
        found = key(*args, **kwargs)
    if isinstance(found, bool) or not isinstance(found, str | int | UUID):
        raise InvalidInput(
            f"ordered task {name!r}: a key is text, a whole number or a UUID, not {type(found).__name__}"
        )
    # Not str(found): an enum member must have the key of its value, which is sent.
    match found:
        case str():
            return str.__str__(found)
        case int():
            return int.__repr__(found)
    return str(found)


def call_of(
    name: str, task_id: str, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> TaskCall:
    """Return a call. Raises InvalidInput for non-JSON arguments."""
    fields = {field: options[field] for field in _FIELDS if options.get(field) is not None}
    if not isinstance(fields.get("headers", {}), Mapping):
        raise InvalidInput(f"headers of a call of ordered task {name!r} are names with values")
    if options.get("group_id") is not None:
        fields["group"] = options["group_id"]
    return TaskCall(task=name, id=task_id, arguments=_json(name, [list(args), dict(kwargs)]), **fields)


def encode(call: TaskCall) -> bytes:
    """Return a body. Raises InvalidInput for non-JSON headers."""
    try:
        return _write(call)
    except (TypeError, msgspec.MsgspecError) as error:
        raise InvalidInput(f"headers of a call of ordered task {call.task!r} can't be JSON: {error}") from None


def decode(body: bytes) -> TaskCall:
    """Return a body's call. Raises BodyMismatch, without the body's content."""
    call: TaskCall = _read(body)
    return call


def arguments_of(call: TaskCall) -> tuple[list[Any], dict[str, Any]]:
    """Return a call's arguments. Raises BodyMismatch."""
    try:
        found = celery_json.loads(call.arguments)  # type: ignore[no-untyped-call]
    except UNREADABLE:
        raise BodyMismatch(BODY, "its arguments are not JSON") from None
    match found:
        case [list() as args, dict() as kwargs]:
            return args, kwargs
        case _:
            raise BodyMismatch(BODY, "its arguments are not a list and names")


def _json(name: str, value: Any) -> str:
    try:
        text = str(celery_json.dumps(value, allow_nan=False))  # type: ignore[no-untyped-call]
        # Read back here: a mapping that only looks like one of Celery's types would block its key for ever.
        celery_json.loads(text)  # type: ignore[no-untyped-call]
    except UNREADABLE as error:
        # The encoder's own text may quote a value.
        raise InvalidInput(
            f"arguments of ordered task {name!r} can't be JSON ({type(error).__name__}): give ids and plain values"
        ) from None
    return text


def as_request(call: TaskCall, args: list[Any], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return `self.request` without the worker's fields."""
    request: dict[str, Any] = {
        "task": call.task,
        "id": call.id,
        "correlation_id": call.id,
        "args": args,
        "kwargs": kwargs,
        "headers": call.headers,
        "root_id": call.root_id or call.id,
        "parent_id": call.parent_id,
        "group": call.group,
        "group_index": call.group_index,
        "shadow": call.shadow,
        "argsrepr": "not shown",
        "kwargsrepr": "not shown",
    }
    if call.ignore_result is not None:
        request["ignore_result"] = call.ignore_result
    return request
