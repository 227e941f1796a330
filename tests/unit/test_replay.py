"""Going on with a lost RUN attempt: recorded turns come back bit for bit, and another prompt is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from pipeline.errors import SandboxGone
from pipeline.interfaces import Completion
from workers.replay import Replay


class Notebook:
    """What a sandbox keeps of the turns."""

    def __init__(self, turns: list[bytes]) -> None:
        self.turns = turns
        self.noted: list[bytes] = []

    def note_turn(self, turn: bytes) -> None:
        self.noted.append(turn)


class Counter:
    """A policy that counts its calls."""

    context = 100

    def __init__(self) -> None:
        self.calls = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        self.calls += 1
        return Completion(
            ids=[7, 2**32 - 1, self.calls], logprobs=[-0.1, -1 / 3, -1e-30], versions=[(3, 0, 2), (4, 2, 3)],
            finish_reason="stop", sampling={"max_tokens": 5, "top_p": 0.9}, started=12.5, seconds=0.25,
            prompt_ids=[5, 2**32 - 1], endpoint="chat",
        )  # fmt: skip


async def test_recorded_turns_come_back_as_they_were_and_ask_nobody() -> None:
    first, policy = Notebook([]), Counter()
    live = Replay(policy, first)
    prompts = [[1, 2, 3], [1, 2, 3, 7, 9]]
    said = [await live.generate(prompt, {}) for prompt in prompts]
    assert policy.calls == 2 and len(first.noted) == 2

    second = Notebook(first.noted)
    again = Replay(policy, second)
    assert [await again.generate(prompt, {}) for prompt in prompts] == said
    assert policy.calls == 2 and second.noted == [] and again.replayed == 2
    await again.generate([1], {})
    assert policy.calls == 3 and len(second.noted) == 1
    assert again.context == 100


@pytest.mark.parametrize("prompt", [[1, 2], [1, 2, 4], []])
async def test_another_prompt_than_before_starts_over(prompt: list[int]) -> None:
    first = Notebook([])
    await Replay(Counter(), first).generate([1, 2, 3], {})
    with pytest.raises(SandboxGone, match="turn 1 asks the policy another thing"):
        await Replay(Counter(), Notebook(first.noted)).generate(prompt, {})
