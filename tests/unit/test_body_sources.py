"""Bodies that are read while they are published."""

from __future__ import annotations

import io
from array import array
from collections.abc import Iterator
from functools import partial
from hashlib import sha256

import pytest

from mqlayer.errors import BodyTooLarge, InvalidInput
from mqlayer.large_bodies import source_of

BODY = bytes(range(256)) * 100


@pytest.mark.parametrize("chunk", [1, 1_000, 4_096, len(BODY)])
@pytest.mark.parametrize("size", [7, 4_096, len(BODY) + 1])
def test_a_source_gives_the_body_in_the_sizes_that_are_asked_for(chunk: int, size: int) -> None:
    for body in (io.BytesIO(BODY), (BODY[at : at + chunk] for at in range(0, len(BODY), chunk))):
        source = source_of("t", body)
        assert source is not None
        begun = source.read(5_000)
        source.put_back(begun)
        found = list(iter(partial(source.read, size), b""))
        assert b"".join(found) == BODY
        assert {len(part) for part in found[:-1]} <= {size}
        assert source.reference("id") == ("id", len(BODY), sha256(BODY).hexdigest())


def test_an_empty_chunk_ends_no_iterator_and_views_count_bytes() -> None:
    for chunks in ([b"", b"ab", b"", b"", b"cd", b""], [memoryview(array("H", b"abcd"))]):
        source = source_of("t", iter(chunks))
        assert source is not None
        assert (source.read(10), source.read(10)) == (b"abcd", b"")
        assert source.reference("id") == ("id", 4, sha256(b"abcd").hexdigest())


def test_what_is_no_file_and_no_iterator_is_a_body_as_before() -> None:
    assert [source_of("t", body) for body in (b"x", "x", {"a": 1}, [b"x"], memoryview(b"x"), None)] == [None] * 6


def test_more_than_the_limit_is_not_read() -> None:
    taken = []

    def chunks() -> Iterator[bytes]:
        for number in range(100):
            taken.append(number)
            yield bytes(1_000)

    source = source_of("t", chunks())
    assert source is not None
    source.bound(3_000)
    with pytest.raises(BodyTooLarge, match="takes 3000"):
        source.read(100_000)
    assert len(taken) == 4
    whole = source_of("t", iter([BODY]))
    assert whole is not None
    whole.read(1)
    with pytest.raises(BodyTooLarge):
        whole.bound(10)


def test_text_is_refused() -> None:
    source = source_of("t", io.StringIO("text"))
    assert source is not None
    with pytest.raises(InvalidInput, match="open its file as 'rb'"):
        source.read(1)
