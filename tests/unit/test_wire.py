"""Bytes on the wire: what goes in comes out, and every corruption is an EnvelopeError and nothing else."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import pytest
import zstandard
from hypothesis import given, strategies as st

from pipeline import wire
from pipeline.errors import EnvelopeError
from tests.unit import strategies as made


@given(made.plain | made.arrays | st.dictionaries(made.names, made.arrays, max_size=3))
def test_a_value_comes_back(value: Any) -> None:
    assert made.same(wire.unpack(wire.pack(value)), value)
    assert made.same(wire.expand(wire.compress(value)), value)


@pytest.mark.parametrize("dtype", made.DTYPES)
def test_an_array_comes_back_in_its_dtype_and_can_t_be_written(dtype: str) -> None:
    values = np.arange(5).astype(dtype)
    back = wire.unpack(wire.pack(values))
    assert (back.dtype, back.tolist(), back.flags.writeable) == (np.dtype(dtype), [0, 1, 2, 3, 4], False)


def test_big_endian_and_strided_arrays_travel_as_plain_ones() -> None:
    assert wire.unpack(wire.pack(np.arange(6, dtype=">u4")[::2])).tolist() == [0, 2, 4]


def test_numpy_scalars_travel_as_numbers() -> None:
    assert wire.unpack(wire.pack({"a": np.float32(0.5), "b": np.int64(3), "c": np.bool_(True)})) == {
        "a": 0.5, "b": 3, "c": True,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({1, 2}, "a set can't travel"),
        (object(), "a object can't travel"),
        (np.zeros((2, 2), np.float32), r"an array of shape \(2, 2\) can't travel: flatten it"),
        (np.zeros(2, complex), "an array of dtype complex128 can't travel"),
        (np.array(["a"]), "an array of dtype <U1 can't travel"),
        (2**64, "can't travel|can't be packed"),
        ("\ud800", "can't be packed"),
    ],
)
def test_what_can_t_travel_is_said(value: Any, sentence: str) -> None:
    with pytest.raises(EnvelopeError, match=sentence):
        wire.pack({"x": [value]})


def test_endless_nesting_is_refused() -> None:
    deep: list[Any] = []
    deep.append(deep)
    with pytest.raises(EnvelopeError):
        wire.pack(deep)
    with pytest.raises(EnvelopeError):
        wire.unpack(b"\x91" * 100_000)


def only_envelope_errors(read: Any, data: bytes) -> Any:
    """The value, or None after an EnvelopeError that holds the bytes. Any other error fails the test."""
    try:
        return read(data)
    except EnvelopeError as error:
        assert error.size == len(data)
        assert error.raw == data
        assert str(error)
        return None


@given(st.binary(max_size=200))
def test_any_bytes_are_a_value_or_an_envelope_error(data: bytes) -> None:
    only_envelope_errors(wire.unpack, data)
    only_envelope_errors(wire.expand, data)


@given(made.maps, st.data())
def test_a_flipped_bit_never_raises_anything_else(value: dict[str, Any], data: st.DataObject) -> None:
    packed = bytearray(wire.pack(value))
    at = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[at // 8] ^= 1 << at % 8
    only_envelope_errors(wire.unpack, bytes(packed))


@given(made.maps, st.data())
def test_a_flipped_bit_in_a_payload_is_found(value: dict[str, Any], data: st.DataObject) -> None:
    """Its checksum finds it; only the two header bits that say nothing about the content may change unseen."""
    packed = bytearray(wire.compress(value))
    at = data.draw(st.integers(0, len(packed) * 8 - 1))
    packed[at // 8] ^= 1 << at % 8
    found = only_envelope_errors(wire.expand, bytes(packed))
    assert found is None or made.same(found, value)


@given(made.maps, st.data())
def test_a_truncated_payload_is_found(value: dict[str, Any], data: st.DataObject) -> None:
    packed = wire.compress(value)
    cut = data.draw(st.integers(0, len(packed) - 1))
    assert only_envelope_errors(wire.expand, packed[:cut]) is None


@pytest.mark.parametrize(
    "data",
    [
        b"\xdd\xff\xff\xff\xff",  # an array of four thousand million items
        b"\xdf\xff\xff\xff\xff",  # a map of as many
        b"\xc6\xff\xff\xff\xff",  # bytes of as many
        b"\xc9\xff\xff\xff\xff\x01",  # an extension of as many
        b"\xc7\x03\x01abc",  # three bytes of uint32
        b"\xd4\x63a",  # an unknown array code
        b"\xd4\xffa",  # a broken timestamp
        b"\x81\x90\x01",  # a list for a key
        b"\x81\xd6\x01aaaa\x01",  # an array for a key
        b"\xa4\xff\xff\xff\xff",  # no UTF-8
        b"\xc1",
        b"",
        b"\x01\x02",
    ],
)
def test_hostile_bytes_are_refused_without_taking_memory(data: bytes) -> None:
    assert only_envelope_errors(wire.unpack, data) is None


def test_a_zstd_bomb_is_refused_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(64 * 1024 * 1024))
    assert len(bomb) < 10_000
    monkeypatch.setattr(wire, "MAX_BYTES", 1024 * 1024)
    with pytest.raises(EnvelopeError, match="claims 67108864 bytes is refused"):
        wire.expand(bomb)


def test_a_frame_that_hides_its_size_is_refused() -> None:
    hidden = zstandard.ZstdCompressor(write_content_size=False).compress(msgpack.packb({"a": 1}))
    with pytest.raises(EnvelopeError, match="claims -1 bytes is refused"):
        wire.expand(hidden)


def test_what_is_no_frame_is_said() -> None:
    with pytest.raises(EnvelopeError, match="do not begin with a zstd frame"):
        wire.expand(msgpack.packb({"a": 1}))


def test_32k_tokens_take_nine_bytes_each_before_zstd() -> None:
    arrays = {
        "ids": np.zeros(32_768, np.uint32),
        "logprobs": np.zeros(32_768, np.float32),
        "mask": np.zeros(32_768, np.uint8),
    }
    assert len(wire.pack(arrays)) < 32_768 * 9 + 100
