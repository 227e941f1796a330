"""A trajectory against the record of what went over the wire for it, and against a forward pass of the trainer's."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from pipeline import trajectory
from pipeline.results import Rollout
from tests.vllm import servers
from tests.vllm.recorder import Exchange


class Compared(NamedTuple):
    """Of `ids` sent and returned, `differing` are others in the trajectory; so are `logprobs` of the replies."""

    ids: int
    differing: int
    logprobs: int


def sequences_of(rollouts: Iterable[Rollout]) -> list[trajectory.Sequence]:
    found: list[trajectory.Sequence] = []
    for rollout in rollouts:
        assert rollout.trajectory is not None, f"{rollout.id} has no trajectory: {rollout.failure}"
        found.extend(rollout.trajectory.sequences)
    return found


def actions_of(rollout: Rollout) -> list[tuple[trajectory.Sequence, trajectory.Turn]]:
    """What the policy said, in order."""
    return [
        (sequence, turn) for sequence in sequences_of([rollout]) for turn in sequence.turns if turn.kind == "action"
    ]


def against_record(rollout: Rollout, record: Sequence[Exchange]) -> Compared:
    """Call by call: each prompt is the sequence up to there, each reply is in it. Every reply must be used up."""
    answered = [exchange for exchange in record if exchange.status == 200 and exchange.ids]
    actions = actions_of(rollout)
    assert len(actions) == len(answered), f"{rollout.id}: {len(actions)} actions of {len(answered)} replies"
    ids = differing = logprobs = 0
    for (sequence, turn), exchange in zip(actions, answered, strict=True):
        before, said = sequence.token_ids[: turn.start], sequence.token_ids[turn.start : turn.end]
        ids += len(exchange.prompt) + len(exchange.ids)
        differing += _differing(before, np.array(exchange.prompt)) + _differing(said, np.array(exchange.ids))
        logprobs += _differing(sequence.logprobs[turn.start : turn.end], np.array(exchange.logprobs, np.float32))
        assert turn.finish_reason == exchange.choice["finish_reason"]
        assert exchange.versions in (None, runs_of(sequence, turn)), "the weights' version of each token"
    return Compared(ids, differing, logprobs)


def runs_of(sequence: trajectory.Sequence, turn: trajectory.Turn) -> list[tuple[int, int, int]]:
    """(version, start, end) within the turn."""
    cut = [(run.version, max(run.start, turn.start), min(run.end, turn.end)) for run in sequence.versions]
    return [(version, start - turn.start, end - turn.start) for version, start, end in cut if start < end]


def _differing(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    shorter = min(len(one), len(other))
    return int((one[:shorter] != other[:shorter]).sum()) + abs(len(one) - len(other))


def computed(sequences: Sequence[trajectory.Sequence], model: Path, folder: Path) -> npt.NDArray[np.float32]:
    """Logprob of every token of these sequences, one after another, by transformers with the model's weights."""
    source, target = folder / "stored.npz", folder / "computed.npz"
    ends = np.cumsum([len(sequence) for sequence in sequences])
    np.savez(source, ids=np.concatenate([sequence.token_ids for sequence in sequences]), ends=ends)
    script = Path(__file__).parent / "recompute.py"
    command: list[str | Path] = [servers.PYTHON, "-W", "ignore", script, model, source, target]
    subprocess.run(command, check=True, env=servers.environment())
    found: npt.NDArray[np.float32] = np.load(target)["logprobs"]
    return found


def changed_by_text(rollout: Rollout, tokenizer: Tokenizer) -> int:
    """How many replies would have other ids if they had been text in between; their end tokens are not looked at."""
    changed = 0
    for sequence, turn in actions_of(rollout):
        ids = sequence.token_ids[turn.start : turn.end].tolist()
        ids = ids[:-1] if turn.finish_reason == "stop" else ids
        text = tokenizer.decode(ids, skip_special_tokens=False)
        changed += tokenizer.encode(text, add_special_tokens=False).ids != ids
    return changed
