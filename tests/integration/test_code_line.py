"""The `code` and `sql` families through the line: real Redis, sandboxes of bubblewrap, the scripted policy."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from tests.integration.crew import all_of, configured, serving
from tests.services import RedisService, require
from workers import trial
from workers.demo import answers_of
from workers.policy import scripted, tokenizer

SUM = {
    "question": "Print the sum of two numbers.",
    "tests": [{"input": "1 2", "output": "3"}, {"input": "2 3", "output": "5"}],
    "solution": "print(sum(map(int, input().split())))",
}
HALF = {**SUM, "question": "Print the sum of the two numbers.", "solution": "print(3)", "partial": True}
PETS = {
    "question": "How many pets are there?",
    "schema": "CREATE TABLE pets (name TEXT)",
    "setup": "INSERT INTO pets VALUES ('Tom'), ('Kit')",
    "gold": "SELECT count(*) FROM pets",
}
BROKEN = {**PETS, "question": "How many are there?", "gold": "SELECT count(*) FROM absent"}


def task(name: str, data: dict[str, Any]) -> Task:
    return Task(handler=f"handlers.{name}:{name.capitalize()}", data=data)


TASKS = [task("code", SUM), task("code", HALF), task("sql", PETS), task("sql", BROKEN)]


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: sockets lie under it."""
    with TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder) / "s"


@pytest.mark.parametrize("p_correct", [1.0, 0.0])
async def test_right_and_wrong_answers(
    redis_service: RedisService, tokens: tokenizer.Tokenizer, root: Path, p_correct: float
) -> None:
    require("bwrap")
    answers = answers_of(TASKS, redis_service.config)
    server = await scripted.start(scripted.Options(tokenizer=tokens, answers=answers, p_correct=p_correct))
    config = configured(
        redis_service, sandbox__driver="bubblewrap", sandbox__root=str(root), policy__url=server.url,
        policy__tokenizer=tokens.name_or_path, policy__renderer="qwen3",
    )  # fmt: skip
    try:
        async with RolloutClient(config=config) as client, serving(config):
            added, half, pets, broken = await all_of(client, TASKS, timeout=60)
    finally:
        await server.stop()
    assert (added.outcome, added.reward) == ("scored", p_correct), added.evidence
    assert half.reward == p_correct / 2 and pets.reward == p_correct
    if p_correct:
        assert added.evidence["ran"] == 2 and added.evidence["why"] == "passed all tests"
        assert half.evidence["failing"]["expected"] == "5"
        assert pets.trajectory.turns == 2 and pets.evidence["gold_rows"] == 1
        assert (broken.outcome, broken.failure.kind) == ("failed", "task")
        assert "no such table: absent" in broken.failure.why
    else:
        assert added.evidence["ran"] == 0 and pets.evidence == {"why": "no query was handed in"}


@pytest.mark.parametrize("item", [TASKS[0], TASKS[2]], ids=["code", "sql"])
async def test_a_trial_needs_no_redis(tokens: tokenizer.Tokenizer, root: Path, item: Task) -> None:
    """What `rollout try` does."""
    require("bwrap")
    config = Config().changed({
        "sandbox.driver": "bubblewrap", "sandbox.root": str(root), "policy.tokenizer": tokens.name_or_path,
        "policy.renderer": "qwen3",
    })  # fmt: skip
    options = scripted.Options(tokenizer=tokens, answers=answers_of([item], config), p_correct=1.0)
    played = await trial.play(config, item, options, loud=False)
    assert played.reward is not None and played.reward.value == 1.0, played.failed
    assert played.reward.evidence["why"]
