"""Messages: round trips, unknown fields, the schema number, and corruption of every kind."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given, strategies as st

from pipeline import wire
from pipeline.envelope import (
    READS,
    SCHEMA,
    Envelope,
    Payload,
    Task,
    check_task,
    decode,
    decode_compressed,
    encode,
    encode_compressed,
    from_map,
    to_map,
)
from pipeline.errors import EnvelopeError, TaskError
from tests.unit import strategies as made

messages = made.tasks | made.envelopes | made.payloads


@given(messages)
def test_a_message_comes_back(message: Any) -> None:
    for back in (
        decode(type(message), encode(message, SCHEMA)),
        decode_compressed(type(message), encode_compressed(message, SCHEMA)),
    ):
        assert made.same(to_map(back, SCHEMA), to_map(message, SCHEMA))


@given(messages)
def test_unknown_fields_survive_a_round_trip(message: Any) -> None:
    later = {**to_map(message, SCHEMA), "from_a_later_version": {"a": [1, b"x"]}}
    back = from_map(type(message), wire.unpack(wire.pack(later)))
    assert back.extra["from_a_later_version"] == {"a": [1, b"x"]}
    assert made.same(to_map(back, SCHEMA), later)


def test_an_envelope_is_small() -> None:
    envelope = Envelope(id="x" * 60, group="y" * 60, handler="math", sandbox={"driver": "local", "path": "z" * 120})
    assert len(encode(envelope, SCHEMA)) < 1024


@pytest.mark.parametrize("schema", [None, 0, SCHEMA + 1, "1", 1.5, [1]])
@pytest.mark.parametrize("cls", [Task, Envelope, Payload])
def test_another_schema_is_refused(cls: Any, schema: Any) -> None:
    value = {**to_map(cls(**{"handler": "h"} if cls is Task else SMALLEST[cls]), SCHEMA), "schema": schema}
    with pytest.raises(EnvelopeError, match=rf"{cls.__name__} of schema .*: this version reads {READS}"):
        decode(cls, wire.pack(value))


SMALLEST: dict[Any, dict[str, Any]] = {
    Task: {"handler": "h"},
    Envelope: {"id": "i", "group": "g", "handler": "h"},
    Payload: {},
}


@given(messages, st.data())
def test_a_wrong_type_is_an_envelope_error_or_changes_nothing_unseen(message: Any, data: st.DataObject) -> None:
    value = to_map(message, SCHEMA)
    name = data.draw(st.sampled_from(sorted(value)))
    value[name] = data.draw(made.plain | made.arrays)
    packed = wire.pack(value)
    try:
        back = decode(type(message), packed)
    except EnvelopeError as error:
        assert str(error)
    else:
        assert made.same(to_map(back, SCHEMA), value)


@given(messages, st.data())
def test_a_missing_field_is_an_envelope_error_or_its_default(message: Any, data: st.DataObject) -> None:
    value = to_map(message, SCHEMA)
    del value[data.draw(st.sampled_from(sorted(value)))]
    try:
        decode(type(message), wire.pack(value))
    except EnvelopeError as error:
        assert type(message).__name__ in str(error)


@given(messages, st.data())
def test_a_damaged_message_is_an_envelope_error_and_nothing_else(message: Any, data: st.DataObject) -> None:
    packed = bytearray(encode(message, SCHEMA))
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(packed) - 1))
        packed[at] = data.draw(st.integers(0, 255))
    damaged = bytes(packed)[: data.draw(st.integers(0, len(packed)))]
    with contextlib.suppress(EnvelopeError):
        decode(type(message), damaged)


@given(messages, st.data())
def test_a_damaged_payload_is_never_taken_for_another(message: Any, data: st.DataObject) -> None:
    packed = bytearray(encode_compressed(message, SCHEMA))
    at = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[at // 8] ^= 1 << at % 8
    try:
        back = decode_compressed(type(message), bytes(packed))
    except EnvelopeError:
        return
    assert made.same(to_map(back, SCHEMA), to_map(message, SCHEMA))


@pytest.mark.parametrize("value", [None, 1, "text", [1], b"x"])
@pytest.mark.parametrize("cls", [Task, Envelope, Payload])
def test_what_is_no_map_is_said(cls: Any, value: Any) -> None:
    with pytest.raises(EnvelopeError, match=f"expected a {cls.__name__}, found a {type(value).__name__}"):
        decode(cls, wire.pack(value))


def test_the_raw_bytes_are_kept_for_the_dead_letters() -> None:
    data = wire.pack({"schema": 99})
    with pytest.raises(EnvelopeError) as caught:
        decode(Envelope, data)
    assert (caught.value.raw, caught.value.size) == (data, len(data))


def test_a_bool_is_no_number() -> None:
    with pytest.raises(EnvelopeError, match="Envelope.sample is True, a bool"):
        from_map(Envelope, {**to_map(Envelope(id="i", group="g", handler="h"), SCHEMA), "sample": True})


def test_a_good_task_passes() -> None:
    check_task(
        Task(handler="echo", data={"a": [1, 2.5, None]}, limits={"run": 3, "max_turns": 5}, id="mine", deadline=1.0)
    )


@given(made.tasks)
def test_a_checked_task_decodes(task: Task) -> None:
    try:
        check_task(task)
    except TaskError:
        return
    assert made.same(to_map(decode_compressed(Task, encode_compressed(task, SCHEMA)), SCHEMA), to_map(task, SCHEMA))
