"""What a trainer pops is what the engine sampled: every id, logprob and version, against a recording proxy."""

from __future__ import annotations

import asyncio
import datetime
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from tokenizers import Tokenizer

from pipeline.envelope import Task
from tests.vllm.compare import against_record, changed_by_text, computed, sequences_of
from tests.vllm.play import playing
from tests.vllm.servers import Served

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "tokens.json"
FULL = 400
MEAN_GAP, P99_GAP = 0.02, 0.1
"""Most that a logprob may differ from the one that transformers computes."""

QUESTIONS = (
    "Name three things that float in water, and say why.",
    "Write a Python function that adds two numbers without +.",
    "What is 17 * 23? Think step by step.",
    "Translate 'the cat sleeps' into French, German and Spanish.",
    "List the files in this folder, then read the largest one.",
    "Tell a story about a lighthouse in two sentences.",
    "Give a JSON object with a name and an age.",
    "Why is the sky blue? Use an equation.",
)


def task(number: int, tokens: int) -> Task:
    """3 or 4 turns of at most `tokens` tokens, each sampled from the policy's own distribution."""
    data = {"question": QUESTIONS[number % len(QUESTIONS)], "turns": 3 + number % 2}
    return Task(handler="vllm_handlers:Chat", data=data, sampling={"temperature": 1.0, "max_tokens": tokens})


@pytest.mark.parametrize(
    ("count", "tokens"),
    [(24, 16), pytest.param(FULL, 32, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])],
    ids=["short", "full"],
)
async def test_every_id_is_the_engines_own(smollm2: Served, line: Any, tmp_path: Path, count: int, tokens: int) -> None:
    """0 ids differ from the record, and a forward pass of the trainer's agrees on the logprobs."""
    async with playing(smollm2, line) as play:
        ids = await play.client.enqueue([task(number, tokens) for number in range(count)])
        rollouts = await play.client.pop(len(ids), timeout=3000)
        await play.client.ack(rollouts)
    assert {rollout.outcome for rollout in rollouts} == {"scored"}
    found = [against_record(rollout, play.proxy.of(rollout.id)) for rollout in rollouts]
    compared, differing, logprobs = (sum(column) for column in zip(*found, strict=True))
    assert (differing, logprobs) == (0, 0), f"of {compared} ids"

    sequences = sequences_of(rollouts)
    turns = [sum(turn.kind == "action" for turn in sequence.turns) for sequence in sequences]
    assert len(sequences) == count and min(turns) >= 3, "each rollout is one sequence of all its turns"
    stored, mask = (
        np.concatenate([getattr(sequence, name) for sequence in sequences]) for name in ("logprobs", "loss_mask")
    )
    gap = np.abs(stored - await asyncio.to_thread(computed, sequences, smollm2.model, tmp_path))[mask == 1]
    tokenizer = Tokenizer.from_file(str(smollm2.model / "tokenizer.json"))
    changed = [changed_by_text(rollout, tokenizer) for rollout in rollouts]
    figures = {
        "drift_ids_differing": differing, "logprob_gap_mean": round(float(gap.mean()), 7),
        "logprob_gap_p99": round(float(np.percentile(gap, 99)), 7), "ids_compared": compared,
        "logprobs_compared": len(gap), "rollouts": count, "replies": sum(turns),
        "replies_changed_if_retokenised": sum(changed), "rollouts_changed_if_retokenised": sum(map(bool, changed)),
        "model": f"{smollm2.model.name}, float32 on both sides",
    }  # fmt: skip
    assert sum(changed) > sum(turns) / 20, "these texts are too tame to show a drift"
    if count == FULL:
        write(figures)
    assert figures["logprob_gap_mean"] <= MEAN_GAP and figures["logprob_gap_p99"] <= P99_GAP


def write(figures: dict[str, Any]) -> None:
    """Into benchmarks/results/tokens.json, with where they are from."""
    memory = psutil.virtual_memory().total / 2**30
    about = {
        "commit": subprocess.check_output(["git", "describe", "--always", "--dirty"], cwd=ROOT, text=True).strip(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {psutil.cpu_count()} processors, {memory:.0f} GiB, no GPU",
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps({**figures, **about}, indent=1) + "\n", encoding="utf-8")
