"""References to large bodies: their text, and the records that carry them."""

from __future__ import annotations

import uuid

from mqlayer.domain.large_bodies import CHUNK_BYTES, chunks_of, reference_in, reference_to
from mqlayer.domain.message import ParkedRecord, Record, encode_facts, extra_size, mark_reordered

BODY = bytes(range(256)) * 1_025


def test_a_record_carries_a_reference_that_no_handler_sees() -> None:
    reference = reference_to(str(uuid.uuid4()), BODY)
    facts = encode_facts(5, {"a": "b"}, body=str(reference))
    record = Record(7, b"1:2:3:" + mark_reordered(facts), b"k", b"")
    assert record.large_body == reference
    assert record.headers == {"a": "b"}
    assert extra_size(record) == len(BODY)


def test_a_parked_record_keeps_its_facts_with_its_body() -> None:
    parked = ParkedRecord.of((7, b"1:2:3:5", b"k", b""), attempts=3, redriven=True, replay=9).with_body(BODY)
    assert isinstance(parked, ParkedRecord)
    assert (parked.body, parked.attempts, parked.redriven, parked.replay) == (BODY, 3, True, 9)


def test_a_headers_value_that_is_no_reference_names_no_body() -> None:
    good = str(reference_to(str(uuid.uuid4()), BODY))
    assert str(reference_in(good)) == good
    for bad in ("", good[1:], good + "0", good.replace(":", ";"), good.upper()):
        assert reference_in(bad) is None
    assert Record(7, b'1:2:3:5:{"x":"\\"mq-body\\":\\"y\\""}', b"k", b"").large_body is None


def test_chunks_are_the_body() -> None:
    chunks = list(chunks_of(BODY))
    assert [number for number, _ in chunks] == [0, 1]
    assert [len(data) for _, data in chunks] == [CHUNK_BYTES, len(BODY) - CHUNK_BYTES]
    assert b"".join(data for _, data in chunks) == BODY
