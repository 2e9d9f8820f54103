"""Bodies as files: read once, front to end, a chunk at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from mqlayer import App, AsyncBodyStream, BatchOf, BodyStream, Context, Settings
from mqlayer.domain.body_schemas import schema_of
from mqlayer.domain.body_streams import READ_BYTES
from mqlayer.domain.codecs import content_type_of, decoder_for
from mqlayer.errors import InvalidInput, MissingBody, StoreUnavailable
from mqlayer.large_bodies import LargeBodyOptions

BODY = bytes(range(256)) * 5_000


def in_pieces(size: int, taken: list[int]) -> Iterator[bytes]:
    for start in range(0, len(BODY), size):
        taken.append(start)
        yield BODY[start : start + size]


@pytest.mark.parametrize("size", [1, 7, READ_BYTES - 1, READ_BYTES, READ_BYTES + 1, len(BODY)])
def test_reads_of_any_size_are_the_body(size: int) -> None:
    with BodyStream(in_pieces(100_000, []), len(BODY)) as stream:
        assert stream.size == len(BODY)
        assert not stream.seekable()
        begun = b"".join(stream.read(size) for _ in range(min(20, -(-len(BODY) // size))))
        assert begun + stream.read() == BODY
        assert stream.read() == b""


def test_chunks_are_fetched_only_as_they_are_read() -> None:
    taken: list[int] = []
    stream = BodyStream(in_pieces(READ_BYTES, taken), len(BODY))
    assert taken == []
    for count in range(1, 4):
        assert len(stream.read(READ_BYTES)) == READ_BYTES
        assert len(taken) <= count + 1


def test_lines_and_a_look_ahead_work_as_on_a_file() -> None:
    stream = BodyStream([b"a\nb", b"c\n", b"", b"d"], 7)
    assert stream.peek(1)[:1] == b"a"
    assert list(stream) == [b"a\n", b"bc\n", b"d"]


def test_an_error_of_the_store_comes_out_of_the_read() -> None:
    def broken() -> Iterator[bytes]:
        yield b"begins"
        raise MissingBody("id", "chunk 1 is gone")

    stream = BodyStream(broken(), 10)
    assert stream.read(6) == b"begins"
    with pytest.raises(MissingBody, match="chunk 1"):
        stream.read(1)


@pytest.mark.parametrize("size", [-1, 4])
def test_a_failed_stream_fails_again_and_never_looks_ended(size: int) -> None:
    def broken() -> Iterator[bytes]:
        yield b"a"
        raise StoreUnavailable("postgres", "it is away")

    stream = BodyStream(broken(), 10)
    for _ in range(3):
        with pytest.raises(StoreUnavailable):
            stream.read(size)


def test_a_coroutine_reads_chunks() -> None:
    async def read() -> tuple[bytes, bytes]:
        async with AsyncBodyStream(in_pieces(100_000, []), len(BODY)) as stream:
            head = await stream.read(3)
            return head, b"".join([chunk async for chunk in stream])

    head, rest = asyncio.run(read())
    assert (len(head), head + rest) == (3, BODY)


@pytest.mark.parametrize("kind", [BodyStream, AsyncBodyStream])
def test_streams_are_plain_bytes_to_documents_and_small_bodies_are_streams(kind: type) -> None:
    assert content_type_of(kind) == "application/octet-stream"
    assert schema_of(kind) is None
    assert decoder_for(kind)(b"small").size == 5


def test_a_handler_takes_a_stream_that_it_can_read() -> None:
    app = App()

    @app.consumer("t", group="g")
    async def reads(body: AsyncBodyStream, ctx: Context) -> None: ...

    with pytest.raises(InvalidInput, match="let it take BodyStream"):

        @app.consumer("t", group="sync")
        def awaits(body: AsyncBodyStream) -> None: ...

    with pytest.raises(InvalidInput, match="let it take AsyncBodyStream"):

        @app.consumer("t", group="async")
        async def blocks(body: BodyStream) -> None: ...

    with pytest.raises(InvalidInput, match="a batch has whole bodies"):

        @app.consumer("t", group="batch", batch=BatchOf("distinct"))
        def batch(bodies: list[BodyStream]) -> None: ...

    assert [one.group for one in app.consumers] == ["g"]


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("LARGE_BODIES", "gcs", "MQLAYER_LARGE_BODIES: input should be 'off', 'postgres' or 's3'"),
        ("LARGE_BODY_THRESHOLD", "1", "MQLAYER_LARGE_BODY_THRESHOLD: input should be greater than or equal to 16384"),
        ("LARGE_BODY_LIMIT", "many", "MQLAYER_LARGE_BODY_LIMIT: input should be a valid integer"),
        ("LARGE_BODY_HOLD_S", "0", "MQLAYER_LARGE_BODY_HOLD_S: input should be greater than or equal to 3600"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_takes(
    name: str, value: str, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"MQLAYER_{name}", value)
    with pytest.raises(InvalidInput) as refused:
        Settings()
    assert told in str(refused.value)
    assert "The page 'Settings' has what each takes" in str(refused.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"s3_bucket": ""}, "MQLAYER_S3_BUCKET"),
        ({"s3_prefix": "mq"}, "MQLAYER_S3_PREFIX is 'mq': end it with /"),
        ({"s3_endpoint": "minio:9000"}, "begin it with https://"),
        ({"s3_endpoint": "http://key:secret@minio:9000"}, "AWS_ACCESS_KEY_ID"),
    ],
)
def test_settings_of_s3_that_do_not_fit_are_refused_without_their_secrets(given: dict[str, str], told: str) -> None:
    with pytest.raises(InvalidInput) as refused:
        LargeBodyOptions.of(Settings(**({"large_bodies": "s3", "s3_bucket": "bodies"} | given)))  # type: ignore[arg-type]
    assert told in str(refused.value)
    assert "secret" not in str(refused.value)
