"""`logprob_gap` with a small real torch model: prints the gaps of cases whose answers are known, as JSON."""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from pipeline.adapters.logprob_gap import Gap, logprob_gap
from pipeline.results import Rollout
from pipeline.trajectory import Sequence, Trajectory, Turn, VersionRun

VOCABULARY, WIDTH = 50, 8
TEMPERATURE = 0.7


class Model(torch.nn.Module):
    """Logits of the next token out of the mean of all so far, with a dropout that would show in training mode."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.drop = torch.nn.Dropout(0.5)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        counts = torch.arange(1, input_ids.shape[1] + 1)[None, :, None]
        return SimpleNamespace(logits=self.head(self.drop(self.embed(input_ids)).cumsum(1) / counts))


def sampled(model: Model, temperature: float) -> Rollout:
    """A prompt of 3, an action of 4 by weights 1, an observation of 2, an action of 3 by weights 1 and 2."""
    ids = np.random.default_rng(1).integers(0, VOCABULARY, 12).astype(np.uint32)
    mask = np.array([0] * 3 + [1] * 4 + [0] * 2 + [1] * 3, dtype=np.uint8)
    logprobs = np.zeros(12, dtype=np.float32)
    with torch.inference_mode():
        for at in np.flatnonzero(mask):
            before = torch.from_numpy(ids[:at].astype(np.int64))[None]
            logits = model(before, use_cache=False).logits[0, -1].double() / temperature
            logprobs[at] = logits.log_softmax(0)[int(ids[at])].item()
    sequence = Sequence(
        token_ids=ids, loss_mask=mask, logprobs=logprobs,
        versions=(VersionRun(1, 3, 7), VersionRun(1, 9, 11), VersionRun(2, 11, 12)),
        turns=(
            Turn(kind="prompt", start=0, end=3), Turn(kind="action", start=3, end=7),
            Turn(kind="observation", start=7, end=9), Turn(kind="action", start=9, end=12),
        ),
    )  # fmt: skip
    sequence.check()
    return Rollout(
        id="r.0", group="r", sample=0, samples=1, lane="train", outcome="scored", reward=1.0,
        trajectory=Trajectory(sequences=(sequence,)),
    )  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    model = Model().eval()
    rollout = sampled(model, TEMPERATURE)
    model.train()

    def gap(version: int, temperature: float = TEMPERATURE) -> Gap:
        found = logprob_gap(model, [rollout], version, temperature=temperature)
        assert model.training, "its mode was not put back"
        return found

    gaps = {"same": gap(1), "newer": gap(2), "none": gap(3), "temperature": gap(1, 1.0)}
    with torch.no_grad():
        model.head.bias[int(rollout.trajectory.sequences[0].token_ids[4])] += 1.0  # type: ignore[union-attr]
    gaps["changed"] = gap(1)
    sys.stdout.write(json.dumps({name: [found.tokens, found.mean, found.largest] for name, found in gaps.items()}))


if __name__ == "__main__":
    main()
