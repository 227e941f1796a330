"""Hypothesis strategies for what travels on the line: values, arrays, sequences, messages."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import strategies as st

from pipeline.builder import TrajectoryBuilder
from pipeline.envelope import Envelope, Payload, Task
from pipeline.trajectory import PerToken, Sequence, Trajectory

DTYPES = ("<u4", "<f4", "u1", "<i4", "<i8", "<f8", "<u2", "<f2", "<i2", "i1")
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False)
arrays = st.builds(
    lambda dtype, data: np.frombuffer(data[: len(data) // np.dtype(dtype).itemsize * np.dtype(dtype).itemsize], dtype),
    st.sampled_from(DTYPES), st.binary(max_size=64),
)  # fmt: skip
plain = st.recursive(
    st.none() | st.booleans() | numbers | names | st.binary(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)
maps = st.dictionaries(names, plain, max_size=4)
token_ids = st.lists(st.integers(0, 2**32 - 1), max_size=12)
logprobs = st.floats(-100.0, 0.0, width=32)


@st.composite
def builders(draw: st.DrawFn) -> TrajectoryBuilder:
    """A builder after a few turns of any kind, over one sequence or several."""
    builder = TrajectoryBuilder()
    for _ in range(draw(st.integers(0, 6))):
        kind = draw(st.sampled_from(["prompt", "action", "action", "observation", "begin"]))
        if kind == "begin":
            builder.begin()
        elif kind == "action":
            ids = draw(token_ids)
            cut = draw(st.integers(0, len(ids)))
            runs = [(draw(st.integers(0, 9)), start, end) for start, end in ((0, cut), (cut, len(ids))) if end > start]
            finish = draw(st.sampled_from([None, "stop", "length"]))
            probabilities = draw(st.lists(logprobs, min_size=len(ids), max_size=len(ids)))
            builder.action(ids, probabilities, runs, finish_reason=finish, sampling=draw(st.none() | maps))
        else:
            getattr(builder, kind)(draw(token_ids), seconds=draw(st.floats(0, 1e6)))
    return builder


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    built = draw(builders()).build()
    sequences = tuple(draw(with_extras(sequence)) for sequence in built.sequences)
    return Trajectory(sequences=sequences, extra=draw(unknown(Trajectory)))


@st.composite
def with_extras(draw: st.DrawFn, sequence: Sequence) -> Sequence:
    """The same tokens with further per-token arrays, and fields that this version does not know."""
    from dataclasses import replace

    width = draw(st.integers(1, 3))
    values = np.arange(len(sequence) * width, dtype=np.uint16)
    per_token = {"experts": PerToken(values, (width,))} if draw(st.booleans()) else {}
    return replace(sequence, per_token=per_token, extra=draw(unknown(Sequence)))


def unknown(cls: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Fields that a later version may have."""
    from dataclasses import fields

    taken = {item.name for item in fields(cls)} | {"schema"}
    return st.dictionaries(names.filter(lambda name: name not in taken), plain, max_size=2)


ids = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=20)
tasks = st.builds(
    Task, handler=names, data=maps, id=st.none() | ids, sampling=maps, limits=st.dictionaries(names, st.floats(0, 1e6)),
    policy=names, deadline=st.none() | st.floats(0, 1e10), extra=unknown(Task),
)  # fmt: skip
envelopes = st.builds(
    Envelope, id=ids, group=ids, handler=names, sample=st.integers(0, 99), samples=st.integers(1, 99), lane=names,
    priority=st.integers(-99, 99), policy=names, sandbox=st.none() | maps, enqueued=st.floats(0, 1e10),
    deadline=st.none() | st.floats(0, 1e10), retry_of=st.none() | ids, extra=unknown(Envelope),
)  # fmt: skip
payloads = st.builds(
    Payload, state=maps, trajectory=st.none() | trajectories(), truncated=st.none() | names, extra=unknown(Payload)
)


def same(one: Any, other: Any) -> bool:
    """Equal, arrays inside included."""
    if isinstance(one, np.ndarray) or isinstance(other, np.ndarray):
        return (
            isinstance(one, np.ndarray)
            and isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and np.array_equal(one.view(np.uint8), other.view(np.uint8))
        )
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other) and one == other
