"""Bodies to keep as files, sent piece by piece."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from mqlayer.console.page import Visit
from mqlayer.domain.body_streams import READ_BYTES, BodyStream
from mqlayer.domain.large_bodies import BodyReference
from mqlayer.large_bodies import BodyReader

BINARY: Final = "application/octet-stream"
_UNFIT: Final = re.compile(r"[^A-Za-z0-9_.-]+")


def body_file(visit: Visit, message: str, body: bytes, large: BodyReference | None) -> Mapping[str, Any]:
    """Return a file's variables. Raises MissingBody, StoreUnavailable: its beginning is fetched."""
    stream = BodyStream.of(body) if large is None else BodyReader(visit.runtime).opened(large)
    stream.peek(1)
    return {"pieces": _pieces(stream), "bytes": stream.size, "file": f"body-{_UNFIT.sub('-', message)}.bin"}


def _pieces(stream: BodyStream) -> Iterator[bytes]:
    with stream:
        while piece := stream.read(READ_BYTES):
            yield piece
