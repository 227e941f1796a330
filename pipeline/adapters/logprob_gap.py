"""How far the trainer's logprobs lie from those with which the tokens were sampled: for a trainer's process alone.

Where trainer and policy server hold the same weights, both should give a token the same probability. A gap that grows
means that they do not: a weight that was not loaded, another temperature, another chat format, a kernel that differs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as Many
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.results import Rollout
from pipeline.trajectory import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Gap:
    """Absolute differences of logprobs (nats) over `tokens` tokens; mean and largest are None where there are none."""

    tokens: int = 0
    mean: float | None = None
    largest: float | None = None


def logprob_gap(model: Any, rollouts: Iterable[Rollout], version: int, *, temperature: float = 1.0) -> Gap:
    """Recompute, in float32, the logprobs of all tokens that weights `version` sampled, and compare.

    `model`: a causal language model of transformers that holds these weights. `temperature`: of the sampling; its other
    settings must leave the distribution as it is (top_p 1, top_k off). One forward pass for each sequence, whose logits
    [T, V] are in memory at once. The model's training mode is put back afterwards.
    """
    sequences = [item for rollout in rollouts if rollout.trajectory for item in rollout.trajectory.sequences]
    chosen = [(sequence, sampled) for sequence in sequences if len(sampled := sampled_by(sequence, version))]
    if not chosen:
        return Gap()
    training = model.training
    model.eval()
    try:
        return summed_up([_differences(model, sequence, sampled, temperature) for sequence, sampled in chosen])
    finally:
        model.train(training)


def sampled_by(sequence: Sequence, version: int) -> npt.NDArray[np.int64]:
    """Positions (int64) of the tokens that these weights sampled. The first of a sequence has no logprob: left out."""
    runs = [np.arange(max(run.start, 1), run.end) for run in sequence.versions if run.version == version]
    return np.concatenate(runs) if runs else np.empty(0, dtype=np.int64)


def summed_up(differences: Many[npt.NDArray[np.float32]]) -> Gap:
    """One Gap of the absolute differences (float32) of one sequence or more."""
    flat = np.concatenate(differences)
    return Gap(tokens=len(flat), mean=float(flat.mean(dtype=np.float64)), largest=float(flat.max()))


def _differences(
    model: Any, sequence: Sequence, sampled: npt.NDArray[np.int64], temperature: float
) -> npt.NDArray[np.float32]:
    import torch

    device = next(model.parameters()).device
    ids = torch.from_numpy(sequence.token_ids.astype(np.int64)).to(device)
    at = torch.from_numpy(sampled).to(device)
    with torch.inference_mode():
        logits = model(input_ids=ids[None], use_cache=False).logits[0, at - 1].float() / temperature
        chosen = logits.gather(1, ids[at, None])[:, 0] - logits.logsumexp(dim=1)
    difference: npt.NDArray[np.float32] = np.abs(chosen.cpu().numpy() - sequence.logprobs[sampled])
    return difference
