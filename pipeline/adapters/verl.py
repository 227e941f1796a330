"""verl: a rollout as the fields of `AgentLoopOutput` (verl/experimental/agent_loop/agent_loop.py, read at 0.9.1).

`AgentLoopOutput(**fields)` is what an agent loop's `run` returns. verl pads, groups and computes advantages itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from itertools import pairwise
from typing import Any

from pipeline.adapters.rows import AdapterError, Row, rows_of, usable, why_unusable
from pipeline.results import Rollout
from pipeline.trajectory import Turn


def agent_loop_output(
    rollout: Rollout,
    *,
    prompt_length: int | None = None,
    response_length: int | None = None,
    parts: SequenceOf[str] = (),
) -> list[dict[str, Any]]:
    """One dict of fields for each sequence of a scored rollout; k > 1: several, which share reward and rollout id.

    verl's V1 trainer takes such a list: GRPO counts the session once, by its last output. Its older path takes one
    output a session: give it the only one, or refuse.

    `prompt_length`, `response_length`: what verl's config allows, in tokens. A longer response is cut there, as verl's
    own loops do, and says so (`truncated` 1.0, `truncation` "response_length"). A longer prompt can't be cut without a
    change to what the policy saw, so it is refused. `parts`: named parts of the reward for verl's metrics; verl wants
    the same names in all samples, so one that a rollout lacks is NaN.

    Raises AdapterError for a rollout that can't be trained on: it failed, was cancelled, or sampled nothing. Raised in
    an agent loop it fails the session, so that the reward is counted nowhere (V1: prompt status "failure").
    """
    if not usable(rollout):
        why = why_unusable(rollout)
        raise AdapterError(f"rollout {rollout.id} can't be trained on: {why}; it has no row in verl's batch")
    return [_fields(row, prompt_length, response_length, parts) for row in rows_of(rollout, "split")]


def _fields(row: Row, prompt_length: int | None, response_length: int | None, parts: SequenceOf[str]) -> dict[str, Any]:
    rollout = row.rollout
    if prompt_length is not None and row.prompt > prompt_length:
        raise AdapterError(
            f"rollout {rollout.id} has a prompt of {row.prompt} tokens and verl's limit is {prompt_length}: raise "
            "data.max_prompt_length"
        )
    size = len(row.sequence) - row.prompt
    kept = size if response_length is None else min(size, response_length)
    truncation = "response_length" if kept < size else rollout.truncated
    versions = [run.version for run in row.sequence.versions if run.start < row.prompt + kept]
    return {
        "prompt_ids": row.prompt_ids.tolist(),
        "response_ids": row.response_ids[:kept].tolist(),
        "response_mask": row.mask[:kept].tolist(),
        "response_logprobs": row.logprobs[:kept].tolist(),
        "reward_score": row.reward,
        "num_turns": _turns(row.sequence.turns),
        "metrics": {
            "generate_sequences": sum(turn.seconds for turn in row.sequence.turns if turn.kind == "action"),
            "tool_calls": sum(turn.seconds for turn in row.sequence.turns if turn.kind == "observation"),
            "compute_score": sum(item.get("seconds", 0.0) for item in rollout.attempts if item.get("stage") == "eval"),
            "num_preempted": -1,
        },
        "extra_fields": {
            "min_global_steps": min(versions),
            "max_global_steps": max(versions),
            "rollout_id": rollout.id,
            "sequence_index": row.index,
            "sequence_count": row.count,
            "truncation": truncation,
            "reward_extra_info": {
                "score": row.reward,
                "truncated": float(truncation is not None),
                **{name: rollout.parts.get(name, math.nan) for name in parts},
            },
        },
    }


def _turns(turns: tuple[Turn, ...]) -> int:
    """verl counts messages: each action is one, and so is all that the policy was shown in one go."""
    kinds = [turn.kind == "action" for turn in turns if turn.end > turn.start]
    shown = sum(not kind for kind in kinds[:1]) + sum(before and not kind for before, kind in pairwise(kinds))
    return sum(kinds) + shown
