"""Groups as files for offline training and analysis: JSON lines, or Parquet (extra `parquet`), a row a sequence.

Both hold the same records and give them back as they were: `read_jsonl` and `read_parquet` yield what `records` made.
A rollout without a trajectory (it failed early, or was cut) is one record without tokens, so that it is counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from pipeline.adapters.rows import AdapterError, members
from pipeline.results import Group, Rollout
from pipeline.trajectory import Sequence

BATCH = 64
"""Records that are turned into one row group of a Parquet file; 64 sequences of 32k tokens are 20 MB."""

ARRAYS: dict[str, type[np.generic]] = {"token_ids": np.int32, "loss_mask": np.int8, "logprobs": np.float32}
TURN = ("kind", "start", "end", "finish_reason", "reward", "started", "seconds")


def records(groups: Iterable[Group]) -> Iterator[dict[str, Any]]:
    """One dict a sequence, in the order of groups, samples and sequences.

    rollout, group, sample, samples, lane, handler, policy, outcome; reward (float, None unless scored), parts (name to
    float), truncated, failure_kind, failure_stage, failure_why (None without a failure); seconds, worked, staleness,
    stale, late; sequence (which) of sequences (how many; 0 where there is no trajectory).

    Tokens, [T] each: token_ids int32, loss_mask int8, logprobs float32. versions: [version, start, end] of each run.
    turns: kind, start, end, finish_reason, reward, started, seconds of each. Raises AdapterError for an id beyond
    int32.
    """
    for group in groups:
        for rollout in members(group):
            about = _about(rollout)
            sequences = rollout.trajectory.sequences if rollout.trajectory else ()
            for at, sequence in enumerate(sequences):
                yield {**about, "sequence": at, "sequences": len(sequences), **_tokens(rollout, sequence)}
            if not sequences:
                yield {**about, "sequence": 0, "sequences": 0, **_tokens(rollout, _NOTHING)}


def write_jsonl(groups: Iterable[Group], file: str | Path) -> int:
    """Write the records of `groups`, one a line; gives their number. The file appears once it is whole."""
    count = 0
    with _whole(file) as part, part.open("wb") as opened:
        for record in records(groups):
            opened.write(orjson.dumps(record, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE))
            count += 1
    return count


def read_jsonl(file: str | Path) -> Iterator[dict[str, Any]]:
    """The records of `write_jsonl`, arrays included. Raises AdapterError for a line that is none."""
    with Path(file).open("rb") as opened:
        for number, line in enumerate(opened, 1):
            try:
                record = orjson.loads(line)
                yield record | {name: np.array(record[name], dtype) for name, dtype in ARRAYS.items()}
            except (ValueError, KeyError, TypeError) as error:
                raise AdapterError(f"{file}, line {number} is no exported record: {error}") from error


def write_parquet(groups: Iterable[Group], file: str | Path) -> int:
    """Write the records of `groups`; gives their number. The file appears once it is whole.

    Token columns are list<int32>, list<int8> and list<float>; `versions` is a list of lists, `turns` of structs,
    `parts` a map. Raises AdapterError where pyarrow is missing.
    """
    arrow, parquet = _arrow(file)
    schema = _schema(arrow)
    made, count = records(groups), 0
    with _whole(file) as part, parquet.ParquetWriter(part, schema) as writer:
        while batch := list(islice(made, BATCH)):
            writer.write_table(_table(arrow, schema, batch))
            count += len(batch)
    return count


def read_parquet(file: str | Path) -> Iterator[dict[str, Any]]:
    """The records of `write_parquet`, arrays included. Raises AdapterError where pyarrow is missing or the file is no
    export."""
    arrow, parquet = _arrow(file)
    try:
        with parquet.ParquetFile(file) as opened:
            if not opened.schema_arrow.equals(_schema(arrow)):
                raise AdapterError(f"{file} is no file of write_parquet: its columns are {opened.schema_arrow.names}")
            for batch in opened.iter_batches(BATCH):
                yield from _records_of(batch)
    except arrow.ArrowException as error:
        raise AdapterError(f"{file} can't be read as Parquet: {error}") from error


_NOTHING = Sequence(token_ids=np.empty(0, np.uint32), loss_mask=np.empty(0, np.uint8), logprobs=np.empty(0, np.float32))


def _about(rollout: Rollout) -> dict[str, Any]:
    failure = rollout.failure
    return {
        "rollout": rollout.id, "group": rollout.group, "sample": rollout.sample, "samples": rollout.samples,
        "lane": rollout.lane, "handler": rollout.handler, "policy": rollout.policy, "outcome": rollout.outcome,
        "reward": None if rollout.reward is None else float(rollout.reward),
        "parts": {name: float(value) for name, value in rollout.parts.items()},
        "truncated": rollout.truncated,
        "failure_kind": failure.kind if failure else None, "failure_stage": failure.stage if failure else None,
        "failure_why": failure.why if failure else None,
        "seconds": float(rollout.seconds), "worked": float(rollout.worked), "staleness": rollout.staleness,
        "stale": rollout.stale, "late": rollout.late,
    }  # fmt: skip


def _tokens(rollout: Rollout, sequence: Sequence) -> dict[str, Any]:
    if len(sequence) and int(sequence.token_ids.max()) > np.iinfo(np.int32).max:
        raise AdapterError(f"rollout {rollout.id} has token id {int(sequence.token_ids.max())}, beyond int32")
    return {
        "token_ids": sequence.token_ids.astype(np.int32),
        "loss_mask": sequence.loss_mask.astype(np.int8),
        "logprobs": sequence.logprobs,
        "versions": [list(run) for run in sequence.versions],
        "turns": [{name: getattr(turn, name) for name in TURN} for turn in sequence.turns],
    }


@contextmanager
def _whole(file: str | Path) -> Iterator[Path]:
    """Another name beside the file while it is written; what was begun and not ended is removed."""
    target = Path(file)
    if target.exists() and not target.is_file():
        raise AdapterError(f"{file} is no plain file, which an export could take the place of: name another one")
    part = target.with_name(f"{target.name}.part-{os.getpid()}")
    try:
        yield part
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _arrow(file: str | Path) -> tuple[Any, Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise AdapterError(
            f"{file}: a Parquet file needs pyarrow, which is not installed: pip install 'pyarrow>=20' (extra `parquet`)"
        ) from None
    return pyarrow, parquet


def _schema(arrow: Any) -> Any:
    text, whole, real, yes = arrow.string(), arrow.int32(), arrow.float64(), arrow.bool_()
    turn = arrow.struct([
        ("kind", text), ("start", whole), ("end", whole), ("finish_reason", text), ("reward", real),
        ("started", real), ("seconds", real),
    ])  # fmt: skip
    return arrow.schema([
        ("rollout", text), ("group", text), ("sample", whole), ("samples", whole), ("lane", text), ("handler", text),
        ("policy", text), ("outcome", text), ("reward", real), ("parts", arrow.map_(text, real)), ("truncated", text),
        ("failure_kind", text), ("failure_stage", text), ("failure_why", text), ("seconds", real), ("worked", real),
        ("staleness", arrow.int64()), ("stale", yes), ("late", yes), ("sequence", whole), ("sequences", whole),
        ("token_ids", arrow.list_(whole)), ("loss_mask", arrow.list_(arrow.int8())),
        ("logprobs", arrow.list_(arrow.float32())), ("versions", arrow.list_(arrow.list_(arrow.int64()))),
        ("turns", arrow.list_(turn)),
    ])  # fmt: skip


def _table(arrow: Any, schema: Any, batch: list[dict[str, Any]]) -> Any:
    columns = [
        _lists(arrow, schema.field(name).type, [record[name] for record in batch])
        if name in ARRAYS
        else arrow.array([record[name] for record in batch], schema.field(name).type)
        for name in schema.names
    ]
    return arrow.Table.from_arrays(columns, schema=schema)


def _lists(arrow: Any, type: Any, arrays: list[Any]) -> Any:
    """A list column from numpy arrays, without a Python object for each value."""
    borders = np.zeros(len(arrays) + 1, np.int32)
    np.cumsum([len(item) for item in arrays], out=borders[1:])
    return arrow.ListArray.from_arrays(arrow.array(borders), arrow.array(np.concatenate(arrays)), type=type)


def _records_of(batch: Any) -> Iterator[dict[str, Any]]:
    plain = batch.drop_columns(list(ARRAYS)).to_pylist(maps_as_pydicts="strict")
    for at, record in enumerate(plain):
        arrays = {name: batch.column(name)[at].values.to_numpy(zero_copy_only=False) for name in ARRAYS}
        yield {name: arrays[name] if name in ARRAYS else record[name] for name in batch.schema.names}
