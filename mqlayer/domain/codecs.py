"""Encode and decode message bodies: one place for every way of publishing and receiving."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Final, Protocol, TypeVar, runtime_checkable

import msgspec

from mqlayer.domain.body_streams import STREAMS
from mqlayer.errors import BodyMismatch, HandlerFault, InvalidInput

Body = TypeVar("Body")
ReadBody_co = TypeVar("ReadBody_co", covariant=True)
AnyBody = Any
"""bytes-like: unchanged. str: UTF-8. JSON: pydantic models and all that msgspec knows, such as dict, dataclass, Struct,
datetime, UUID."""
Decode = Callable[[bytes], Any]


def _as_is(body: bytes) -> bytes:
    return body


AS_IS: Final[Decode] = _as_is
"""The decoder of bytes."""


class Codec(Protocol[Body]):
    """Another content type than JSON: a class of the application's, such as for protobuf or Avro.

    A method `json_schema()`, where it has one, returns the JSON Schema of its bodies.
    """

    def encode(self, body: Body) -> bytes:
        """Return a body's bytes; with any exception, nothing is published."""

    def decode(self, data: bytes) -> Body:
        """Return a body; any exception means a body that does not fit."""


@runtime_checkable
class TypedBodies(Protocol[ReadBody_co]):
    """What a consumer needs of a typed topic."""

    @property
    def name(self) -> str:
        """The topic's name."""

    @property
    def body(self) -> type[ReadBody_co]:
        """The type of its bodies."""

    @property
    def schema(self) -> dict[str, Any] | None:
        """The JSON Schema of its bodies; None where they have none."""

    def decode(self, data: bytes) -> ReadBody_co:
        """Return a body. Raises BodyMismatch."""


_encode_json = msgspec.json.Encoder().encode
_PLACE: Final = re.compile(r" - at (`\$[^`]*`)\Z")


def decoder_for(body_type: Any) -> Decode:
    """Return a decoder for bytes, str, a stream, a msgspec Struct, pydantic model, dataclass, or any type msgspec reads
    from JSON.

    It raises BodyMismatch, which names the place in the body, never its content. Raises InvalidInput for another type.
    """
    if body_type is bytes:
        return AS_IS
    if body_type is str:
        return _text
    if body_type in STREAMS:
        return body_type.of  # type: ignore[no-any-return]
    if hasattr(body_type, "model_validate_json"):
        return _pydantic(body_type)
    try:
        return _json(body_type)
    except TypeError as error:
        raise InvalidInput(f"bodies of type {type_name(body_type)} can't be read from JSON: {error}") from error


def encode_body(body: AnyBody) -> bytes:
    """Return a body's bytes. Raises InvalidInput."""
    if isinstance(body, bytes):
        return body
    if isinstance(body, str):
        return body.encode()
    if isinstance(body, bytearray | memoryview):
        return bytes(body)
    if hasattr(body, "model_dump_json"):
        return str(body.model_dump_json()).encode()
    try:
        return _encode_json(body)
    except (TypeError, msgspec.MsgspecError) as error:
        raise InvalidInput(f"a body of type {type(body).__name__} can't be encoded as JSON: give bytes") from error


def content_type_of(body_type: Any) -> str:
    """Return the media type of what `encode_body` makes of a type."""
    if body_type is bytes or body_type in STREAMS:
        return "application/octet-stream"
    return "text/plain; charset=utf-8" if body_type is str else "application/json"


def decoder_of(codec: Codec[Body], body_type: Any) -> Callable[[bytes], Body]:
    """Return a codec's decoder. It raises BodyMismatch, which names the codec's error but not its text."""
    name, decode = type_name(body_type), codec.decode

    def read(data: bytes) -> Body:
        try:
            return decode(data)
        except HandlerFault:
            raise
        except Exception as error:
            raise BodyMismatch(name, f"{type(codec).__name__} raised {type(error).__name__}") from error

    return read


def type_name(body_type: Any) -> str:
    """Return a type's name."""
    return str(getattr(body_type, "__name__", body_type))


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
    name, known = type_name(model), _declared_names(model)

    def read(body: bytes) -> Any:
        try:
            return model.model_validate_json(body)
        except ValueError as error:
            raise BodyMismatch(name, _pydantic_places(error, known)) from None

    return read


def _place(error: msgspec.ValidationError) -> str:
    text = str(error)
    # Only at the end: a quoted value before it may look like a place.
    found = _PLACE.search(text)
    place = found[1] if found else "`$`"
    if text.startswith("Expected `"):
        return f"{text.split(',', 1)[0].split(' - at', 1)[0]} at {place}"
    for kind in ("missing required field", "unknown field"):
        if text.startswith(("Object " + kind, "Object contains " + kind)):
            return f"{kind} at {place}"
    return f"invalid value at {place}"


def _pydantic_places(error: ValueError, known: frozenset[str]) -> str:
    faults = error.errors(include_input=False, include_url=False) if hasattr(error, "errors") else []
    shown = []
    for fault in faults[:3]:
        place = ".".join(str(part) if isinstance(part, int) or part in known else "*" for part in fault["loc"])
        shown.append(f"{fault['type']} at `{place or '$'}`")
    return ", ".join(shown) or "it can't be read"


def _declared_names(model: Any) -> frozenset[str]:
    try:
        return _field_names(model.model_json_schema())
    except Exception:  # noqa: BLE001 - not every model has a schema; then its own fields must do
        return frozenset(model.model_fields)


def _field_names(schema: Any) -> frozenset[str]:
    if isinstance(schema, dict):
        own = schema.get("properties", {})
        return frozenset(own if isinstance(own, dict) else ()).union(*map(_field_names, schema.values()))
    if isinstance(schema, list):
        return frozenset().union(*map(_field_names, schema))
    return frozenset()
