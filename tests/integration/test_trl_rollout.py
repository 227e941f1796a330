"""The client for TRL against a scripted policy server, real workers and a real Redis; the trainer is a stand-in.

`tests/trainers/test_trl.py` has the real one; here stands what it does not meet.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline import RolloutClient, Task
from pipeline.adapters import trl_rollout
from pipeline.adapters.rows import AdapterError
from pipeline.adapters.trl_rollout import LineRollouts, Played
from pipeline.backends import Backend
from pipeline.config import Config
from pipeline.errors import Incomplete, PolicyError
from tests.integration.crew import serving
from tests.services import RedisService
from workers.policy import scripted, tokenizer
from workers.policy.scripted import Options, Running

HERE = Path(__file__).parent
QUESTIONS = ("What is 6 x 7?", "What is 2 + 2?")
ANSWERS = {QUESTIONS[0]: "forty-two", QUESTIONS[1]: "four"}
FILLER = 3


class Model:
    """A model that can be saved; what is saved says nothing."""

    training = True

    def save_pretrained(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").touch()


def trainer(step: int = 0, samples: int = 2, spread: str = "NO", **args: Any) -> Any:
    """What the client reads of a GRPOTrainer."""
    model = Model()
    settings = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": None, "repetition_penalty": 1.0, **args}
    return SimpleNamespace(
        model=model,
        accelerator=SimpleNamespace(num_processes=1, distributed_type=spread, unwrap_model=lambda wrapped: wrapped),
        state=SimpleNamespace(global_step=step),
        args=SimpleNamespace(**settings),
        processing_class=SimpleNamespace(pad_token_id=FILLER),
        num_generations=samples,
        num_generations_eval=1,
    )


def ask(question: str) -> Task:
    return Task(handler="weight_handlers:Ask", data={"question": question})


def twice(*questions: str) -> list[str]:
    return [question for question in questions for _ in range(2)]


@pytest.fixture
def config(redis_service: RedisService, tokens: tokenizer.Tokenizer) -> Config:
    return redis_service.config.changed(
        {"handlers.path": str(HERE), "policy.tokenizer": tokens.name_or_path, "limits.grace": 1.0}
    )


@contextlib.asynccontextmanager
async def scripted_line(config: Config, tokens: tokenizer.Tokenizer) -> AsyncIterator[Running]:
    """Workers, and one registered server."""
    server = await scripted.start(Options(tokenizer=tokens, answers=ANSWERS))
    try:
        async with RolloutClient(config=config) as client, serving(config):
            await client.backends.add(Backend(id="a", url=server.url))
            yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def rollouts_of(config: Config, folder: Path, task_of: Callable[[str], Task] = ask, **about: Any) -> Any:
    """The client, each call in a thread of its own as it blocks; made and closed there too."""
    about = {"timeout": 20.0, "compared": 0, **about}
    client = await asyncio.to_thread(LineRollouts, task_of, weights=folder, config=config, **about)

    async def call(prompts: list[str], of: Any) -> dict[str, list[Any]]:
        return await asyncio.to_thread(client, prompts, of)

    try:
        yield call, client
    finally:
        await asyncio.to_thread(client.close)


async def test_each_step_pushes_its_weights_and_gets_rows_in_the_order_of_its_prompts(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    heard: list[Played] = []
    async with (
        scripted_line(config, tokens) as server,
        rollouts_of(config, tmp_path, told=heard.append) as (call, _),
    ):
        for step in (0, 1, 4):
            rows = await call(twice(*QUESTIONS), trainer(step))
            asked = [tokens.decode(ids) for ids in rows["prompt_ids"]]
            assert all(question in text for question, text in zip(twice(*QUESTIONS), asked, strict=True))
            assert rows["reward"] == [1.0] * 4
            assert {*rows["version_min"], *rows["version_max"]} == {step}
        await call(twice(*QUESTIONS), trainer(4))  # the optimiser has not moved: nothing is pushed
        assert server.engine.loaded == [str(tmp_path / f"step-{step}") for step in (0, 1, 4)]
        assert [item.name for item in tmp_path.iterdir()] == ["step-4"], "only what is in force is kept"
    assert [(item.version, item.scored, item.failed, item.staleness) for item in heard] == [
        (0, 4, 0, 0), (1, 4, 0, 0), (4, 4, 0, 0), (4, 4, 0, 0),
    ]  # fmt: skip
    assert heard[0].gap.mean is None


async def test_rows_are_acked_by_the_next_step_and_at_a_good_end(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    async with scripted_line(config, tokens), RolloutClient(config=config) as looking:

        async def acked() -> int:
            return int((await looking.status())["counts"].get("acked", 0))

        async with rollouts_of(config, tmp_path) as (call, client):
            await call(twice(QUESTIONS[0]), trainer(0))
            assert await acked() == 0
            await call(twice(*QUESTIONS), trainer(1))
            assert await acked() == 2
            await asyncio.to_thread(client.__exit__, None, None, None)
        assert await acked() == 6


async def test_what_a_dead_trainer_left_is_thrown_away(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with scripted_line(config, tokens):
        async with rollouts_of(config, tmp_path) as (call, _):
            first = await call(twice(QUESTIONS[0]), trainer(0))  # closed without an ack
        async with rollouts_of(config, tmp_path) as (call, _):
            with caplog.at_level(logging.WARNING):
                second = await call(twice(QUESTIONS[0]), trainer(0))
    assert not set(first["rollout_id"]) & set(second["rollout_id"])
    assert "1 groups that this run did not ask for are thrown away" in caplog.text


async def test_an_evaluation_uses_its_own_lane_and_its_own_number_of_samples(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    evaluating = trainer(3)
    evaluating.model.training = False
    async with scripted_line(config, tokens), rollouts_of(config, tmp_path) as (call, client):
        async with RolloutClient(config=config) as other:
            asking = asyncio.create_task(other.evaluate([ask(QUESTIONS[0])] * 4, timeout=20))
            rows = await call([*QUESTIONS], evaluating)
            assert (await asking).scored == 4, "another evaluation in the lane keeps its rollouts"
        assert all(id.startswith("trl-") for id in rows["rollout_id"])
        assert len(rows["reward"]) == 2
        assert not client._held, "nothing is trained on: acked at once"


async def test_a_failed_rollout_is_a_row_that_is_not_trained_on(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    def task_of(question: str) -> Task:
        task = ask(question)
        return replace(task, sampling={"no_such_setting": 1}) if question == QUESTIONS[1] else task

    heard: list[Played] = []
    async with (
        scripted_line(config, tokens),
        rollouts_of(config, tmp_path, task_of, told=heard.append) as (call, _),
    ):
        rows = await call(twice(*QUESTIONS), trainer(0))
        with pytest.raises(AdapterError, match="not one of the step's 2 rollouts was scored; 2 of them: task in run"):
            await call(twice(QUESTIONS[1]), trainer(1))
    assert rows["reward"] == [1.0, 1.0, None, None]
    assert rows["env_mask"][2:] == [[0], [0]]
    assert rows["completion_ids"][2:] == [[FILLER], [FILLER]]
    assert (heard[0].scored, heard[0].failed, heard[0].reward) == (2, 2, 1.0)


async def test_the_trainers_sampling_is_the_rollouts(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    """Its loss divides by its temperature."""
    seen: list[Any] = []
    async with scripted_line(config, tokens), rollouts_of(config, tmp_path) as (call, client):
        await call(twice(QUESTIONS[0]), trainer(0, temperature=0.7, top_k=5))
        for group in client._held:
            seen += [turn.sampling for item in group.rollouts for turn in item.trajectory.sequences[0].turns[1:]]
    assert [(said["temperature"], said["top_k"]) for said in seen] == [(0.7, 5)] * 2


async def test_groups_that_do_not_come_in_time_are_named(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    server = await scripted.start(Options(tokenizer=tokens, answers=ANSWERS))
    try:
        async with RolloutClient(config=config) as client, rollouts_of(config, tmp_path, timeout=1.0) as (call, _):
            await client.backends.add(Backend(id="a", url=server.url))
            with pytest.raises(Incomplete, match="0 of 1") as caught:  # no workers
                await call(twice(QUESTIONS[0]), trainer(0))
    finally:
        await server.stop()
    assert len(caught.value.missing) == 2
    assert caught.value.__notes__ == ["1 of this step's 1 groups are not there; what came goes back"]


async def test_a_line_without_a_server_is_said_to_have_none(
    config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    assert trl_rollout.FIRST_WORD < 10
    monkeypatch.setattr(trl_rollout, "FIRST_WORD", 0.1)
    async with rollouts_of(config, tmp_path, timeout=1.0) as (call, _):
        with pytest.raises(PolicyError, match="no policy server has registered within 1 s"):
            await call(twice(QUESTIONS[0]), trainer(0))
    assert "the trainer waits for a policy server: none has registered" in caplog.text


async def test_what_it_can_not_play_for_is_refused(config: Config, tmp_path: Path) -> None:
    adapter = trainer()
    adapter.model.peft_config = {}
    async with rollouts_of(config, tmp_path) as (call, _):
        with pytest.raises(AdapterError, match=r"spread over processes \(FSDP\)"):
            await call(twice(QUESTIONS[0]), trainer(spread="FSDP"))
        with pytest.raises(AdapterError, match="PEFT adapter"):
            await call(twice(QUESTIONS[0]), adapter)
        with pytest.raises(AdapterError, match="3 prompts that are not 2 equal ones at a time"):
            await call([QUESTIONS[0], QUESTIONS[0], QUESTIONS[1]], trainer())
        with pytest.raises(AdapterError, match="2 prompts that are not 2 equal ones"):
            await call([*QUESTIONS], trainer())
        with pytest.raises(AdapterError, match="0 prompts that are not 2 equal ones"):
            await call([], trainer())


async def test_weights_that_can_not_be_saved_leave_no_part_and_are_saved_later(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    class Full(Model):
        def save_pretrained(self, folder: Path) -> None:
            super().save_pretrained(folder)
            raise OSError(28, "No space left on device")

    full = trainer(1)
    full.model = Full()
    async with scripted_line(config, tokens), rollouts_of(config, tmp_path) as (call, _):
        await call(twice(QUESTIONS[0]), trainer(0))
        (tmp_path / "unfinished-9").mkdir()  # a killed trainer's
        with pytest.raises(OSError, match="No space left") as caught:
            await call(twice(QUESTIONS[0]), full)
        assert caught.value.__notes__ == [f"the weights of step 1 were being saved to {tmp_path / 'step-1'}"]
        assert [item.name for item in tmp_path.iterdir()] == ["step-0"], "what is in force stays"
        assert (await call(twice(QUESTIONS[0]), trainer(1)))["version_min"] == [1, 1]


@pytest.mark.ci
async def test_a_step_without_a_score_is_behind_us_when_the_next_one_asks(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path
) -> None:
    broken = True

    def task_of(question: str) -> Task:
        return replace(ask(question), sampling={"no_such_setting": 1}) if broken else ask(question)

    async with scripted_line(config, tokens), rollouts_of(config, tmp_path, task_of) as (call, client):
        with pytest.raises(AdapterError, match="not one of the step's 2 rollouts was scored"):
            await call(twice(QUESTIONS[0]), trainer(0))
        broken = False
        rows = await call(twice(QUESTIONS[0]), trainer(0))
        assert client._line._client._consumer.held == set(rows["rollout_id"])


@pytest.mark.ci
async def test_each_process_gets_the_rows_of_its_own_prompts_however_many(
    config: Config, tokens: tokenizer.Tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What torch.distributed does is played: `tests/trainers/test_trl.py` has two real processes."""
    parts = [[*twice(*QUESTIONS), QUESTIONS[0]], [QUESTIONS[0]]]
    monkeypatch.setattr(trl_rollout, "gathered", lambda _: parts)
    monkeypatch.setattr(trl_rollout, "on_rank_zero", lambda fetch: fetch())
    async with scripted_line(config, tokens), rollouts_of(config, tmp_path) as (call, _):
        for rank, prompts in enumerate(parts):
            one = trainer(0)
            one.accelerator.num_processes, one.accelerator.process_index = 2, rank
            rows = await call(prompts, one)
            asked = [tokens.decode(ids) for ids in rows["prompt_ids"]]
            assert all(question in text for question, text in zip(prompts, asked, strict=True))
