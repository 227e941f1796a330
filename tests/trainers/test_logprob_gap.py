"""The trainer-against-rollout logprob gap, with torch: it is nothing where nothing differs, and shows what does."""

from __future__ import annotations

import json
from pathlib import Path

from tests.trainers import trainers


def test_the_gap_counts_the_tokens_of_one_version_and_shows_what_differs() -> None:
    found = json.loads(trainers.run(Path(__file__).parent / "recomputed_gap.py", timeout=120))
    tokens, mean, largest = found["same"]
    assert tokens == 6, "sampled ones of that version alone: no prompt, no observation, no newer weights"
    assert mean <= largest < 1e-5
    assert found["newer"][0] == 1
    assert found["none"] == [0, None, None]
    assert found["temperature"][1] > 0.01
    assert found["changed"][2] > 0.5, "one weight differs"
