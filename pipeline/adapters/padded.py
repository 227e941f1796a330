"""For a trainer of your own: rows as one batch of numpy arrays, padded or end to end, and the same as torch tensors.

Each array is allocated once and filled in place, so the peak is what the result takes. Rows of very different length
(32k tokens beside 1k) belong end to end (`flat`): padded, they would mostly be padding.
"""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.adapters.rows import AdapterError, Row

INT32 = 2**31 - 1
UNSAMPLED = -1
"""Version of a token that no weights sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RowFacts:
    """What belongs to a row as a whole, [B] each.

    `rewards` float32. `group` int32: rows of one group have the same number, counted from 0 in order of appearance.
    `sample` int32: which member of the group. `index` of `count` int32: which of its rollout's sequences the row is;
    rows of one rollout share its reward, so weigh by 1 / count where each rollout should count once.
    `prompt_lengths`, `response_lengths` int32: tokens.
    """

    rewards: npt.NDArray[np.float32]
    group: npt.NDArray[np.int32]
    sample: npt.NDArray[np.int32]
    index: npt.NDArray[np.int32]
    count: npt.NDArray[np.int32]
    prompt_lengths: npt.NDArray[np.int32]
    response_lengths: npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True, kw_only=True)
class Padded:
    """B rows; prompts padded on the left to P, responses on the right to R.

    `input_ids` int64 [B, P + R], with `prompts` [B, P] and `responses` [B, R] as views of it. `attention_mask` bool
    [B, P + R], True on tokens. `position_ids` int64 [B, P + R], 0 on padding. `response_mask` bool [B, R], True where
    the policy sampled. `logprobs` float32 [B, R], 0.0 elsewhere. `versions` int32 [B, R], -1 elsewhere.
    """

    input_ids: npt.NDArray[np.int64]
    prompts: npt.NDArray[np.int64]
    responses: npt.NDArray[np.int64]
    attention_mask: npt.NDArray[np.bool_]
    position_ids: npt.NDArray[np.int64]
    response_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    versions: npt.NDArray[np.int32]
    facts: RowFacts


@dataclass(frozen=True, slots=True, kw_only=True)
class Flat:
    """B rows end to end, T tokens; row i is `cu_seqlens[i]:cu_seqlens[i + 1]` (int32 [B + 1]), `longest` the maximum.

    `token_ids` int64 [T]. `loss_mask` bool [T], True where the policy sampled. `logprobs` float32 [T], 0.0 elsewhere.
    `position_ids` int64 [T], from 0 in each row. `versions` int32 [T], -1 where it was not sampled.
    """

    token_ids: npt.NDArray[np.int64]
    loss_mask: npt.NDArray[np.bool_]
    logprobs: npt.NDArray[np.float32]
    position_ids: npt.NDArray[np.int64]
    versions: npt.NDArray[np.int32]
    cu_seqlens: npt.NDArray[np.int32]
    longest: int
    facts: RowFacts


def padded(
    rows: SequenceOf[Row], *, pad: int, prompt_length: int | None = None, response_length: int | None = None
) -> Padded:
    """The rows (`pipeline.adapters.rows.usable_rows(groups)`) as one batch, `pad` being the padding's token id.

    `prompt_length`, `response_length`: P and R; by default the longest of the rows. Raises AdapterError for a row that
    is longer than those (nothing is cut), that has no reward, or whose weights' version is beyond int32.
    """
    facts = _facts(rows)
    size = len(rows)
    left = _width("prompt", rows, facts.prompt_lengths, prompt_length)
    right = _width("response", rows, facts.response_lengths, response_length)
    ids = np.full((size, left + right), pad, np.int64)
    batch = Padded(
        input_ids=ids,
        prompts=ids[:, :left],
        responses=ids[:, left:],
        attention_mask=np.zeros((size, left + right), np.bool_),
        position_ids=np.zeros((size, left + right), np.int64),
        response_mask=np.zeros((size, right), np.bool_),
        logprobs=np.zeros((size, right), np.float32),
        versions=np.full((size, right), UNSAMPLED, np.int32),
        facts=facts,
    )
    positions = np.arange(left + right)
    for at, row in enumerate(rows):
        length = len(row.sequence)
        start, response = left - row.prompt, length - row.prompt
        ids[at, start : start + length] = row.sequence.token_ids
        batch.attention_mask[at, start : start + length] = True
        batch.position_ids[at, start : start + length] = positions[:length]
        batch.response_mask[at, :response] = row.mask
        batch.logprobs[at, :response] = row.logprobs
        _label(batch.versions[at], row, row.prompt)
    return batch


def flat(rows: SequenceOf[Row]) -> Flat:
    """The rows (`pipeline.adapters.rows.usable_rows(groups)`) end to end, as kernels of variable length want them.

    Raises AdapterError for a row without a reward, a version beyond int32, or 2**31 tokens and more in all.
    """
    facts = _facts(rows)
    lengths = np.array([len(row.sequence) for row in rows], np.int64)
    total = int(lengths.sum())
    if total > INT32:
        raise AdapterError(f"{len(rows)} rows have {total} tokens, and cu_seqlens ends at {INT32}: take fewer rows")
    borders = np.zeros(len(rows) + 1, np.int32)
    np.cumsum(lengths, out=borders[1:], dtype=np.int32)
    batch = Flat(
        token_ids=np.empty(total, np.int64),
        loss_mask=np.empty(total, np.bool_),
        logprobs=np.empty(total, np.float32),
        position_ids=np.empty(total, np.int64),
        versions=np.full(total, UNSAMPLED, np.int32),
        cu_seqlens=borders,
        longest=int(lengths.max(initial=0)),
        facts=facts,
    )
    positions = np.arange(batch.longest)
    for row, start, end in zip(rows, borders[:-1].tolist(), borders[1:].tolist(), strict=True):
        batch.token_ids[start:end] = row.sequence.token_ids
        batch.loss_mask[start:end] = row.sequence.loss_mask
        batch.logprobs[start:end] = row.sequence.logprobs
        batch.position_ids[start:end] = positions[: end - start]
        _label(batch.versions[start:end], row, 0)
    return batch


def to_torch(batch: Padded | Flat) -> dict[str, Any]:
    """The batch as tensors by name, those of `facts` among them; they share the arrays' memory, so nothing is copied.

    Imports torch. `longest` stays an int.
    """
    import torch

    parts = {item.name: getattr(batch, item.name) for item in fields(batch) if item.name != "facts"}
    parts |= {item.name: getattr(batch.facts, item.name) for item in fields(batch.facts)}
    return {name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in parts.items()}


def _facts(rows: SequenceOf[Row]) -> RowFacts:
    groups: dict[str, int] = {}
    numbers = [groups.setdefault(row.rollout.group, len(groups)) for row in rows]
    return RowFacts(
        rewards=np.array([row.reward for row in rows], np.float32),
        group=np.array(numbers, np.int32),
        sample=np.array([row.rollout.sample for row in rows], np.int32),
        index=np.array([row.index for row in rows], np.int32),
        count=np.array([row.count for row in rows], np.int32),
        prompt_lengths=np.array([row.prompt for row in rows], np.int32),
        response_lengths=np.array([len(row.sequence) - row.prompt for row in rows], np.int32),
    )


def _width(what: str, rows: SequenceOf[Row], lengths: npt.NDArray[np.int32], asked: int | None) -> int:
    longest = int(lengths.max(initial=0))
    if asked is not None and longest > asked:
        rollout = rows[int(np.argmax(lengths))].rollout
        raise AdapterError(
            f"rollout {rollout.id} has a {what} of {longest} tokens, more than {what}_length {asked}: raise that, or "
            "leave the rollout out"
        )
    return longest if asked is None else asked


def _label(versions: npt.NDArray[np.int32], row: Row, shift: int) -> None:
    """Write the row's version runs over `versions`, which begins at token `shift` of the sequence."""
    for run in row.sequence.versions:
        if run.version > INT32:
            raise AdapterError(f"rollout {row.rollout.id} was sampled by version {run.version}, beyond int32")
        versions[run.start - shift : run.end - shift] = run.version
