"""Bytes on the wire: msgpack maps, numpy arrays as raw little-endian ExtType, zstd around a payload.

An array is one msgpack ExtType whose code names the dtype; its bytes are the array's, little-endian, C order.
Nothing is ever unpickled. Every fault of the bytes is an `EnvelopeError`.
"""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np
import numpy.typing as npt
import zstandard

from pipeline.errors import EnvelopeError

Array = npt.NDArray[Any]

# Codes are part of the wire format: append, never renumber.
_DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("<u4"),
    2: np.dtype("<f4"),
    3: np.dtype("u1"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    7: np.dtype("<u2"),
    8: np.dtype("<f2"),
    9: np.dtype("<i2"),
    10: np.dtype("i1"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}

MAX_BYTES = 512 * 1024 * 1024
"""A payload above this (bytes, unpacked) is refused: Redis takes no larger string, and it stops zstd bombs."""

_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


def _encode_array(value: Any) -> msgpack.ExtType:
    if isinstance(value, np.ndarray):
        dtype = value.dtype.newbyteorder("<")
        code = _CODES.get(dtype)
        if code is None:
            raise EnvelopeError(f"an array of dtype {value.dtype} can't travel (known: {sorted(map(str, _CODES))})")
        if value.ndim != 1:
            raise EnvelopeError(
                f"an array of shape {value.shape} can't travel: flatten it and send the shape beside it"
            )
        return msgpack.ExtType(code, np.ascontiguousarray(value, dtype=dtype).tobytes())
    if isinstance(value, np.generic):
        return value.item()
    raise EnvelopeError(
        f"a {type(value).__name__} can't travel: {str(value)[:80]!r} (send maps, lists, text, numbers, arrays)"
    )


def _decode_array(code: int, data: bytes) -> Array:
    dtype = _DTYPES.get(code)
    if dtype is None:
        raise EnvelopeError(f"array code {code} is unknown (known: {sorted(_DTYPES)})")
    if len(data) % dtype.itemsize:
        raise EnvelopeError(f"{len(data)} bytes are no whole number of {dtype} values")
    return np.frombuffer(data, dtype=dtype)


def pack(value: Any) -> bytes:
    """msgpack bytes of `value` (maps, lists, text, bytes, numbers, None, 1-d numpy arrays).

    Raises EnvelopeError for anything else.
    """
    try:
        return bytes(msgpack.packb(value, default=_encode_array, use_bin_type=True))
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise EnvelopeError(f"this can't be packed: {error}") from error


def unpack(data: bytes) -> Any:
    """The value of `pack`'s bytes; arrays come back as read-only 1-d numpy arrays. Raises EnvelopeError."""
    try:
        return msgpack.unpackb(
            data, ext_hook=_decode_array, raw=False, strict_map_key=False, max_bin_len=MAX_BYTES, max_ext_len=MAX_BYTES
        )
    except EnvelopeError as error:
        raise EnvelopeError(str(error), raw=data) from error
    except Exception as error:  # msgpack raises a handful of unrelated types for corrupt bytes; all mean the same here
        raise EnvelopeError(
            f"{len(data)} bytes are no msgpack of ours: {type(error).__name__} {error}", raw=data
        ) from error


def compress(value: Any, level: int = 1) -> bytes:
    """`pack(value)` under one zstd frame that carries its size and checksum."""
    return zstandard.ZstdCompressor(level=level, write_checksum=True).compress(pack(value))


def inflate(data: bytes) -> bytes:
    """`pack`'s bytes out of `compress`'s, without the interpreter's lock: work for a thread beside the event loop.

    Raises EnvelopeError, also when the frame claims more than MAX_BYTES.
    """
    if data[:4] != _ZSTD_MAGIC:
        raise EnvelopeError(f"{len(data)} bytes are no payload of ours: they do not begin with a zstd frame", raw=data)
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= MAX_BYTES:
            raise EnvelopeError(f"a payload that claims {size} bytes is refused (at most {MAX_BYTES})", raw=data)
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise EnvelopeError(f"a payload of {len(data)} bytes does not decompress: {error}", raw=data) from error


def expand(data: bytes) -> Any:
    """The value of `compress`'s bytes. Raises EnvelopeError as `inflate` and `unpack` do."""
    plain = inflate(data)
    try:
        return unpack(plain)
    except EnvelopeError as error:
        raise EnvelopeError(str(error), raw=data) from error
