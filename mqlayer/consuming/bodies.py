"""From a record's bytes to what a handler asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from mqlayer.errors import BodyMismatch

Decode = Callable[[bytes], Any]


def decoder_for(body_type: Any) -> Decode:
    """Return what decodes bodies to a type: bytes, str, a msgspec Struct, a pydantic model, a dataclass, or whatever
    msgspec reads from JSON (dict, list, int, Any, …). What does not fit raises BodyMismatch, which names the place in
    the body, never its content."""
    if body_type is bytes:
        return _as_is
    if body_type is str:
        return _text
    if hasattr(body_type, "model_validate_json"):
        return _pydantic(body_type)
    return _json(body_type)


def type_name(body_type: Any) -> str:
    """Return a type's name for messages."""
    return str(getattr(body_type, "__name__", body_type))


def _as_is(body: bytes) -> bytes:
    return body


def _text(body: bytes) -> str:
    try:
        return body.decode()
    except UnicodeDecodeError:
        raise BodyMismatch("str", "it is not UTF-8") from None


def _json(body_type: Any) -> Decode:
    decode = msgspec.json.Decoder(body_type).decode
    name = type_name(body_type)

    def read(body: bytes) -> Any:
        try:
            return decode(body)
        except msgspec.ValidationError as error:
            raise BodyMismatch(name, _place(error)) from None
        except (msgspec.DecodeError, UnicodeDecodeError):
            raise BodyMismatch(name, "it is not JSON") from None

    return read


def _pydantic(model: Any) -> Decode:
    name = type_name(model)

    def read(body: bytes) -> Any:
        try:
            return model.model_validate_json(body)
        except ValueError as error:
            raise BodyMismatch(name, _pydantic_places(error)) from None

    return read


def _place(error: msgspec.ValidationError) -> str:
    """Return where and what kind of fault, without any value from the body."""
    text = str(error)
    place = text[text.rfind(" - at `") :].removeprefix(" - at ") if " - at `" in text else "`$`"
    for kind in ("missing required field", "unknown field", "Expected `"):
        if kind in text:
            wanted = text.split(",", 1)[0].split(" - at", 1)[0] if kind == "Expected `" else kind
            return f"{wanted} at {place}"
    return f"invalid value at {place}"


def _pydantic_places(error: ValueError) -> str:
    faults = error.errors(include_input=False, include_url=False) if hasattr(error, "errors") else []
    shown = [f"{fault['type']} at `{'.'.join(map(str, fault['loc']))}`" for fault in faults[:3]]
    return ", ".join(shown) or "it can't be read"
