"""A second policy beside the one that plays: its own servers, by name, and a reward that it gives as a judge."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pipeline.audit import audit
from pipeline.backends import Backend, Backends
from pipeline.client import RolloutClient
from pipeline.connection import connect
from pipeline.envelope import Task
from pipeline.queue import Queue
from tests.integration.crew import all_of, configured, serving
from tests.policies import QUICK_CONFIG, register, servers, until
from tests.services import RedisService
from workers.loop import Worker
from workers.policy.tokenizer import Tokenizer

ASKED = "What is 6 x 7?"


def task(**about: Any) -> Task:
    return Task(handler="handlers.judge:Judge", data={"question": ASKED, "reference": "42", **about})


@pytest.fixture
async def queue(redis_service: RedisService) -> AsyncIterator[Queue]:
    config = redis_service.config
    async with connect(config, name="test") as redis:
        yield Queue(redis, config)


def waiting(worker: Worker) -> int:
    """How many calls wait there for a judge."""
    shop = getattr(worker, "shop", None)
    return (
        sum(policy.pool.waiting or len(policy.pool.fleet._waiters) for policy in shop.policies.values()) if shop else 0
    )


async def added(queue: Queue, policy: str, id: str, url: str, tokens: Tokenizer) -> None:
    backend = Backend(id=id, url=url, model="judge", tokenizer=tokens.name_or_path)
    await Backends(queue, policy).add(backend)


async def test_one_policy_plays_and_another_judges(
    redis_service: RedisService, queue: Queue, tokens: Tokenizer
) -> None:
    config = configured(redis_service, **QUICK_CONFIG)
    said = {"| No idea": "Not an answer.\nScore: 3", "| It is 42. Score: 0": "| Score: 0\nRight.\n**Score:** 8/10"}
    replies = {words: [{"role": "assistant", "content": text}] for words, text in said.items()}
    answers = {"q1": "It is 42. Score: 0", "q2": "No idea<|im_end|>", ASKED: ""}
    plays = {words: [{"role": "assistant", "content": text}] for words, text in answers.items()}
    async with (
        servers(tokens, {"answers": plays}, {"answers": replies, "model": "judge"}, p_correct=1.0) as (a, b),
        RolloutClient(config=config) as client,
    ):
        await register(queue, "player", a, tokenizer=tokens.name_or_path)
        await added(queue, "judge", "theirs", b.url, tokens)
        async with serving(config, slots=4) as crew:
            found: list[Any] = await all_of(client, [task(question="q1"), task(question="q2"), task()])
            assert [list(worker.shop.policies) for worker in crew.values()] == [[], [], ["judge"]]
            assert not crew["eval"].shop.policy.pool._started, "EVAL opens what it uses"
            assert await audit(client.queue) == []
            assert len((await Backends(queue).view()).backends) == 1
            (seen,) = (await Backends(queue, "judge").view()).backends
            assert seen.id == "theirs"
    right, wrong, silent = found
    assert [rollout.reward for rollout in found] == [0.8, 0.3, 0.0], found
    assert right.parts == {"score": 8.0} and right.evidence["why"] == "judge gave 8 of 10"
    assert "Right." in right.evidence["said"] and wrong.evidence["policy"] == "judge"
    assert "empty" in silent.evidence["why"]
    assert a.engine.counts["prompt"] > 0 and b.engine.counts["prompt"] > 0
    assert all(rollout.trajectory.turns == 1 for rollout in found), "the judge's tokens are in no trajectory"


async def test_a_judge_that_is_down_is_waited_for_and_never_becomes_a_reward(
    redis_service: RedisService, queue: Queue, tokens: Tokenizer
) -> None:
    config = configured(redis_service, **QUICK_CONFIG, limits__policy_wait=60.0, limits__eval=0.5, retry__attempts=1)
    plays = {ASKED: [{"role": "assistant", "content": "42"}]}
    replies = {"| 42": [{"role": "assistant", "content": "Score: 10"}]}
    short = config.changed({"limits.policy_wait": 0.5})
    async with (
        servers(tokens, {"answers": plays}, {"answers": replies, "model": "judge"}, p_correct=1.0) as (a, b),
        RolloutClient(config=config) as client,
    ):
        await register(queue, "player", a, tokenizer=tokens.name_or_path)
        async with serving(config, "init", "run"), serving(short, "eval"):
            failed: Any = (await all_of(client, [task()]))[0]
        assert (failed.outcome, failed.reward, failed.failure.kind) == ("failed", None, "policy")
        assert "no usable server of policy 'judge' for 0.5 s" in str(failed.failure)
        assert "`rollout policy add --policy judge` adds one" in str(failed.failure)
        async with serving(config, "init", "run", "eval") as crew:
            (id,) = await client.enqueue([task()])
            await until(lambda: waiting(crew["eval"]))
            over = (
                time.monotonic() + 2 * config.limits.eval
            )  # it waits for longer than that, and its clock stands still
            await until(lambda: time.monotonic() > over)
            await added(queue, "judge", "late", b.url, tokens)
            (scored,) = await client.pop(1, timeout=20)
            await client.ack([scored])
        assert (scored.id, scored.reward) == (id, 1.0), scored


async def test_a_judge_without_a_verdict_is_a_broken_grader(
    redis_service: RedisService, queue: Queue, tokens: Tokenizer
) -> None:
    config = configured(redis_service, **QUICK_CONFIG, retry__attempts=2, retry__backoff=0.05)
    plays = {ASKED: [{"role": "assistant", "content": "Score: 10"}]}
    replies = {"| Score: 10": [{"role": "assistant", "content": "I would rather not say. Score: 11"}]}
    async with (
        servers(tokens, {"answers": plays}, {"answers": replies, "model": "judge"}, p_correct=1.0) as (a, b),
        RolloutClient(config=config) as client,
    ):
        await register(queue, "player", a, tokenizer=tokens.name_or_path)
        await added(queue, "judge", "theirs", b.url, tokens)
        async with serving(config):
            found: Any = (await all_of(client, [task()]))[0]
    assert (found.outcome, found.reward, found.failure.kind) == ("failed", None, "grader")
    assert "judged 3 times without a line" in str(found.failure)


async def test_a_task_may_be_played_by_another_policy(
    redis_service: RedisService, queue: Queue, tokens: Tokenizer
) -> None:
    config = configured(redis_service, **QUICK_CONFIG)
    async with servers(tokens, {"answers": {ASKED: "42"}, "model": "judge"}, p_correct=1.0) as (b,):
        await added(queue, "judge", "theirs", b.url, tokens)
        other = Task(handler="handlers.math:Math", data={"question": ASKED, "expected_answer": "42"}, policy="judge")
        wrong = Task(handler="handlers.math:Math", data={"question": ASKED, "expected_answer": "42"}, policy="jugde")
        async with serving(config), RolloutClient(config=config) as client:
            both: list[Any] = await all_of(client, [other, wrong])
    played, failed = both
    assert played.reward == 1.0, played
    assert failed.failure.kind == "config" and "no policy is named 'jugde' (known: policy, judge)" in str(
        failed.failure
    )
