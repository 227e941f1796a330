"""The code in docs/trainers.md for trainers that can't be installed here, on a real line; the trainer is a stand-in."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import pipeline
from pipeline import RolloutClient, SyncRolloutClient, Task
from pipeline.adapters import skyrl, slime
from pipeline.backends import Backend
from pipeline.config import Config
from tests.integration.crew import serving
from tests.services import RedisService
from workers.policy import scripted, tokenizer
from workers.policy.scripted import Options

pytestmark = pytest.mark.ci  # a real line for each of them, fifteen seconds in all

PAGE = (Path(__file__).parents[2] / "docs" / "trainers.md").read_text(encoding="utf-8")
ROWS = [
    {"question": "What is 6 x 7?", "expected_answer": "42"},
    {"question": "What is 2 + 2?", "expected_answer": "5"},
]
ANSWERS = {ROWS[0]["question"]: "\\boxed{42}", ROWS[1]["question"]: "\\boxed{4}"}


def code(part: str) -> list[str]:
    """The Python blocks of a section of the page."""
    _, found, rest = PAGE.partition(f"\n## {part}\n")
    assert found
    return re.findall(r"```python\n(.*?)```", rest.partition("\n## ")[0], re.DOTALL)


def stand_in(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """Modules by dotted name with `__` for the dots, each holding these names."""
    for name, held in names.items():
        dotted = name.replace("__", ".")
        module = ModuleType(dotted)
        vars(module).update(held)
        monkeypatch.setitem(sys.modules, dotted, module)


@pytest.fixture
async def config(redis_service: RedisService, tokens: tokenizer.Tokenizer) -> AsyncIterator[Config]:
    """A line with workers and a scripted policy."""
    made = redis_service.config.changed({"policy.tokenizer": tokens.name_or_path, "limits.grace": 1.0})
    server = await scripted.start(Options(tokenizer=tokens, answers=ANSWERS, p_correct=1.0))
    try:
        async with RolloutClient(config=made) as client, serving(made):
            await client.backends.add(Backend(id="a", url=server.url))
            yield made
    finally:
        await server.stop()


@dataclass
class Sample:
    """What is filled of slime's."""

    group_index: int | None = None
    rollout_id: int | None = None
    tokens: list[int] = field(default_factory=list)
    reward: float | None = None
    loss_mask: list[int] | None = None
    response_length: int = 0
    remove_sample: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class Source:
    """slime's data source: n samples to fill for each prompt."""

    def get_samples(self, count: int) -> list[list[Sample]]:
        return [[Sample(metadata=row) for _ in range(2)] for row in ROWS[:count]]


@dataclass
class Output:
    samples: list[list[Any]]


async def acked(config: Config) -> int:
    async with RolloutClient(config=config) as looking:
        return int((await looking.status())["counts"].get("acked", 0))


async def test_slimes_hook(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(
        monkeypatch, slime__rollout__base_types={"RolloutFnTrainOutput": Output}, slime__utils__types={"Sample": Sample}
    )
    monkeypatch.setattr(pipeline, "SyncRolloutClient", lambda: SyncRolloutClient(config=config), raising=False)
    [block] = code("slime")
    names: dict[str, Any] = {}
    await asyncio.to_thread(exec, block, names)
    args = SimpleNamespace(
        rollout_batch_size=2, n_samples_per_prompt=2, advantage_estimator="grpo", rewards_normalization=True,
        grpo_std_normalization=False,
    )  # fmt: skip
    try:
        output = await asyncio.to_thread(names["generate"], args, 7, Source())
        flattened = [sample for inner in output.samples for item in inner for sample in item]
        assert sorted(sample.reward for sample in flattened) == [0.0, 0.0, 1.0, 1.0]
        assert all(sum(sample.loss_mask) and len(sample.loss_mask) == sample.response_length for sample in flattened)
        assert slime.post_process_rewards(args, flattened)[1] == [0.0] * 4, "no spread within a group"
        assert await acked(config) == 0
        await asyncio.to_thread(names["generate"], args, 8, Source())
        assert await acked(config) == 4
    finally:
        await asyncio.to_thread(names["line"].close)


async def test_skyrls_generator(config: Config, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, skyrl__train__generators__base={"GeneratorInterface": object})
    [block] = code("SkyRL")
    names: dict[str, Any] = {}
    exec(block, names)
    ids = [skyrl.TrajectoryID(f"row-{row}", at) for row in (1, 0) for at in range(2)]
    asked = {
        "trajectory_ids": ids,
        "env_extras": [ROWS[int(id.instance_id[-1])] for id in ids],
        "batch_metadata": SimpleNamespace(global_step=3, training_phase="train"),
    }
    async with RolloutClient(config=config) as line:
        generator = names["LineGenerator"](line, 0)
        output = await generator.generate(asked)
        skyrl.check(output, num_prompts=4)
        assert output["rewards"] == [0.0, 0.0, 1.0, 1.0]
        assert output["trajectory_ids"] == ids
        asked["batch_metadata"].global_step = 4
        await generator.generate(asked)
        assert await acked(config) == 4


async def test_prime_rl_and_ones_own_trainer(config: Config, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("pipeline.adapters.padded.to_torch", lambda batch: batch)  # torch is no package of these tests
    names: dict[str, Any] = {}
    for block in code("prime-rl") + code("Your own trainer"):
        exec(block, names)
    async with RolloutClient(config=config) as line:
        await line.enqueue([Task(handler="math", data=row) for row in ROWS], samples=2)
        groups = await line.pop_groups(2, timeout=30)
        samples = names["samples_of"](groups, lambda **fields: fields)
        assert [sample["env_name"] for sample in samples] == ["math"] * 4
        batch, advantages = names["batch_of"](groups)
        assert len(batch.token_ids) == sum(len(sample["token_ids"]) for sample in samples)
        assert advantages.tolist() == [0.0] * 4
        kept = names["kept"](groups, tmp_path / "groups.parquet")
        assert [ids.tolist() for ids in kept] == [sample["token_ids"] for sample in samples]
        await line.ack(groups)
