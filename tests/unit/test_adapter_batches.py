"""Batches and files for a trainer of one's own: padded, end to end, JSON lines, Parquet."""

from __future__ import annotations

import os
import sys
import tracemalloc
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as arrow
import pytest
from hypothesis import given, settings
from pyarrow import parquet

from pipeline.adapters import export
from pipeline.adapters.padded import Flat, Padded, flat, padded
from pipeline.adapters.rows import AdapterError, Row, rows, usable_rows
from pipeline.results import Group
from pipeline.trajectory import Sequence, Turn, VersionRun
from tests.golden_groups import golden, golden_groups
from tests.unit import strategies as made
from tests.unit.adapted import groups, without_big_ids

G1, G2 = golden_groups()


def as_lists(batch: Padded | Flat) -> dict[str, Any]:
    parts = {item.name: getattr(batch, item.name) for item in fields(batch) if item.name != "facts"}
    parts |= {item.name: getattr(batch.facts, item.name) for item in fields(batch.facts)}
    return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in parts.items()}


def test_padded() -> None:
    batch = padded(usable_rows([G1, G2]), pad=99)
    assert as_lists(batch) == golden("padded")
    assert batch.prompts.base is batch.input_ids and batch.responses.base is batch.input_ids
    kinds = {item.name: getattr(batch, item.name).dtype for item in fields(batch) if item.name != "facts"}
    assert kinds == {
        "input_ids": np.int64, "prompts": np.int64, "responses": np.int64, "attention_mask": np.bool_,
        "position_ids": np.int64, "response_mask": np.bool_, "logprobs": np.float32, "versions": np.int32,
    }  # fmt: skip


def test_padded_to_given_lengths() -> None:
    batch = padded(usable_rows([G1]), pad=99, prompt_length=4, response_length=6)
    assert batch.input_ids.shape == (3, 10)
    assert batch.prompts[0].tolist() == [99, 5, 6, 7]
    assert batch.responses[0].tolist() == [8, 9, 10, 11, 12, 99]
    with pytest.raises(AdapterError, match=r"g1\.0 has a prompt of 3 tokens, more than prompt_length 2"):
        padded(usable_rows([G1]), pad=99, prompt_length=2)
    with pytest.raises(AdapterError, match=r"g1\.0 has a response of 5 tokens, more than response_length 4"):
        padded(usable_rows([G1]), pad=99, response_length=4)


def test_flat() -> None:
    batch = flat(usable_rows([G1, G2]))
    assert as_lists(batch) == golden("flat")
    assert batch.cu_seqlens.dtype == np.int32


def test_nothing_makes_an_empty_batch() -> None:
    assert padded([], pad=0).input_ids.shape == (0, 0)
    assert flat([]).cu_seqlens.tolist() == [0]


def test_a_row_without_a_reward_is_in_no_batch() -> None:
    unscored = replace(G1.rollouts[0], outcome="failed", reward=None)
    assert usable_rows([Group("g1", (unscored,))]) == []
    for make in (lambda: flat(rows([unscored])), lambda: padded(rows([unscored]), pad=0)):
        with pytest.raises(AdapterError, match=r"rollout g1\.0 has no reward: its outcome is failed"):
            make()


def long_rows(count: int, size: int) -> list[Row]:
    """`count` rows of `size` tokens, half of them prompt."""
    half = size // 2
    sequence = Sequence(
        token_ids=np.arange(size, dtype=np.uint32),
        loss_mask=np.repeat(np.array([0, 1], np.uint8), half),
        logprobs=np.repeat(np.array([0.0, -1.0], np.float32), half),
        versions=(VersionRun(1, half, size),),
        turns=(Turn(kind="prompt", start=0, end=half), Turn(kind="action", start=half, end=size)),
    )
    return [Row(rollout=G1.rollouts[0], sequence=sequence, prompt=half)] * count


@pytest.mark.parametrize("make", [flat, lambda found: padded(found, pad=0)], ids=["flat", "padded"])
def test_a_batch_takes_no_more_than_it_holds(make: Any) -> None:
    found = long_rows(32, 32_768)
    tracemalloc.start()
    try:
        batch = make(found)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    arrays = [getattr(batch, item.name) for item in fields(batch)]
    held = sum(item.nbytes for item in arrays if isinstance(item, np.ndarray) and item.base is None)
    assert peak < 1.2 * held


def test_a_version_beyond_int32_is_refused() -> None:
    [row] = long_rows(1, 4)
    far = replace(row, sequence=replace(row.sequence, versions=(VersionRun(2**31, 2, 4),)))
    for make in (lambda: flat([far]), lambda: padded([far], pad=0)):
        with pytest.raises(AdapterError, match=r"rollout g1\.0 was sampled by version 2147483648, beyond int32"):
            make()


@settings(max_examples=40)
@given(found=groups())
def test_both_files_give_the_records_back(tmp_path_factory: pytest.TempPathFactory, found: list[Group]) -> None:
    found = without_big_ids(found)
    folder = tmp_path_factory.mktemp("export")
    wanted = list(export.records(found))
    assert export.write_jsonl(found, folder / "a.jsonl") == len(wanted)
    assert export.write_parquet(found, folder / "a.parquet") == len(wanted)
    assert made.same(list(export.read_jsonl(folder / "a.jsonl")), wanted)
    assert made.same(list(export.read_parquet(folder / "a.parquet")), wanted)
    assert {item.name for item in folder.iterdir()} == {"a.jsonl", "a.parquet"}
    assert {record["rollout"] for record in wanted} == {rollout.id for group in found for rollout in group.rollouts}


def test_records_of_the_golden_groups() -> None:
    found = list(export.records([G1, G2]))
    told = [(record["rollout"], record["sequence"], record["sequences"], record["reward"]) for record in found]
    assert told == [
        ("g1.0", 0, 1, 1.0), ("g1.1", 0, 1, 0.0), ("g1.2", 0, 1, 1.0), ("g1.3", 0, 0, None),
        ("g2.0", 0, 2, 0.5), ("g2.0", 1, 2, 0.5), ("g2.1", 0, 0, None),
    ]  # fmt: skip
    assert found[0]["token_ids"].tolist() == [5, 6, 7, 8, 9, 10, 11, 12]
    assert found[0]["loss_mask"].tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert found[0]["versions"] == [[3, 3, 5], [4, 7, 8]]
    assert [turn["kind"] for turn in found[0]["turns"]] == ["prompt", "action", "observation", "action"]
    assert (found[3]["failure_kind"], found[3]["failure_why"]) == ("sandbox", "its sandbox died")
    assert len(found[3]["token_ids"]) == 0


def test_the_columns_are_typed(tmp_path: Path) -> None:
    export.write_parquet([G1], tmp_path / "a.parquet")
    schema = parquet.read_schema(tmp_path / "a.parquet")
    assert schema.field("token_ids").type == arrow.list_(arrow.int32())
    assert schema.field("loss_mask").type == arrow.list_(arrow.int8())
    assert schema.field("logprobs").type == arrow.list_(arrow.float32())
    assert schema.field("reward").type == arrow.float64()


def test_a_file_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    """One id does not fit, after a first group that does."""
    assert G1.rollouts[0].trajectory is not None
    [sequence] = G1.rollouts[0].trajectory.sequences
    far = replace(sequence, token_ids=sequence.token_ids + np.uint32(2**31))
    broken = replace(G1.rollouts[0], trajectory=replace(G1.rollouts[0].trajectory, sequences=(far,)))
    for write, name in ((export.write_jsonl, "a.jsonl"), (export.write_parquet, "a.parquet")):
        with pytest.raises(AdapterError, match=r"rollout g1\.0 has token id 2147483660, beyond int32"):
            write([G2, Group("g1", (broken,))], tmp_path / name)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("write", [export.write_jsonl, export.write_parquet])
def test_what_is_no_file_is_not_replaced(write: Any, tmp_path: Path) -> None:
    """A device or a pipe by that name would be gone."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(AdapterError, match="is no plain file"):
        write([], pipe)
    assert pipe.is_fifo()


def test_what_is_no_export_is_named(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    export.write_jsonl([G1], lines)
    lines.write_bytes(lines.read_bytes() + b'{"rollout": 1}\n')
    with pytest.raises(AdapterError, match=r"a\.jsonl, line 5 is no exported record"):
        list(export.read_jsonl(lines))
    with pytest.raises(AdapterError, match=r"a\.jsonl can't be read as Parquet"):
        list(export.read_parquet(lines))
    parquet.write_table(arrow.table({"x": [1]}), tmp_path / "b.parquet")
    with pytest.raises(AdapterError, match=r"is no file of write_parquet: its columns are \['x'\]"):
        list(export.read_parquet(tmp_path / "b.parquet"))


def test_without_pyarrow_the_mend_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(AdapterError, match="needs pyarrow, which is not installed: pip install"):
        export.write_parquet([G1], tmp_path / "a.parquet")
