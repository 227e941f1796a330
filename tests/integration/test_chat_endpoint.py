"""A policy server that takes messages and a prefix of ids, NeMo RL's way: what it read is checked at every turn."""

from __future__ import annotations

import contextlib
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.backends import Backend
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.engine import Engine, EngineError
from pipeline.envelope import Task
from pipeline.results import Rollout
from pipeline.trajectory import Sequence
from tests.integration.chat_handlers import Shop
from tests.integration.crew import all_of, configured, serving
from tests.services import RedisService
from workers import view_rollout
from workers.policy import scripted
from workers.policy.scripted import Options, Running
from workers.policy.tokenizer import Tokenizer

QUESTION = "What are the prices?"


def task(*names: str, **about: Any) -> Task:
    return Task(handler="chat_handlers:Shop", data={"question": QUESTION, "names": list(names), **about})


@contextlib.asynccontextmanager
async def line(
    service: RedisService, tokens: Tokenizer, *names: str, drift: float = 1.0, **changes: Any
) -> AsyncIterator[tuple[RolloutClient, Running]]:
    """A whole line whose one policy server is an engine of NeMo RL; its replies are tokenised in an unusual way."""
    gold = Shop().gold({"names": names})
    config: Config = configured(
        service, handlers__path=str(Path(__file__).parent), retry__attempts=1, policy__renderer="qwen3",
        **{"limits__policy_wait": 20.0, **changes},
    )  # fmt: skip
    answers = {QUESTION: gold}
    server = await scripted.start(
        Options(tokenizer=tokens, answers=answers, p_correct=1.0, drift=drift, only_chat=True)
    )
    try:
        async with RolloutClient(config=config) as client:
            folder = str(tokens.name_or_path)
            await client.register_backend(f"{server.url}/v1", "nemo-rl", model="policy", tokenizer=folder)
            async with serving(config):
                yield client, server
    finally:
        await server.stop()


def sequence_of(rollout: Rollout) -> Sequence:
    assert rollout.outcome == "scored", rollout.failure
    assert rollout.trajectory is not None
    (sequence,) = rollout.trajectory.sequences
    return sequence


async def test_several_turns_keep_every_sampled_id_and_name_the_endpoint(
    redis_service: RedisService, tokens: Tokenizer
) -> None:
    """H01 with a server that renders messages: the replies are tokenised as no encoder would."""
    async with line(redis_service, tokens, "ham", "tea") as (client, server):
        (rollout,) = await all_of(client, [task("ham", "tea")])
        sequence = sequence_of(rollout)

        assert rollout.reward == 1.0
        assert [turn.kind for turn in sequence.turns] == ["prompt", *["action", "observation"] * 2, "action"]
        assert [turn.extra for turn in sequence.turns if turn.kind == "action"] == [{"endpoint": "chat"}] * 3
        assert rollout.trajectory is not None
        assert view_rollout.chats_said(rollout.trajectory).startswith("endpoint: chat in 3 of 3 turns")
        ids = sequence.token_ids.tolist()
        text = tokens.decode(ids)
        assert "3 coins" in text
        assert "5 coins" in text
        first = sequence.turns[1]
        assert tokens.encode(tokens.decode(ids[first.start : first.end])) != ids[first.start : first.end]
        assert server.engine.counts["prompt"] >= sum(turn.start for turn in sequence.turns if turn.kind == "action")


@pytest.mark.parametrize(
    "fault",
    ["retokenise", *(pytest.param(f, marks=pytest.mark.ci) for f in ("short_logprobs", "short_ids", "no_prompt_ids"))],
)
async def test_a_reply_that_does_not_fit_is_refused_and_the_rollout_ends_as_failed(
    redis_service: RedisService, tokens: Tokenizer, fault: str
) -> None:
    """H02: each is refused whole, and nothing of it is trained on."""
    wait = 2.0 if fault == "no_prompt_ids" else 20.0  # a probe meets this fault too
    async with line(redis_service, tokens, "ham", "tea", limits__policy_wait=wait) as (client, server):
        server.faults.set(fault)
        (rollout,) = await all_of(client, [task("ham", "tea")])

        assert (rollout.outcome, rollout.reward, rollout.trajectory) == ("failed", None, None)
        assert rollout.failure is not None
        assert (rollout.failure.kind, rollout.failure.stage) == ("policy", "run")
        wrong = {
            "retokenise": r"did not keep the \d+ ids of the turns before: at \d+ it read \[.*\], the trajectory has",
            "short_logprobs": r"ids came with \d+ logprobs", "short_ids": r"counts \d+ completion tokens but sent \d+",
            "no_prompt_ids": "does not say which",
        }  # fmt: skip
        errors = " ".join(str(attempt.get("error", "")) for attempt in rollout.attempts)
        assert re.search(wrong[fault], errors), errors


async def test_one_bad_reply_is_asked_for_again(redis_service: RedisService, tokens: Tokenizer) -> None:
    async with line(redis_service, tokens, "ham") as (client, server):
        server.faults.set("short_logprobs*1")
        (rollout,) = await all_of(client, [task("ham")])
        assert rollout.reward == 1.0


async def test_what_the_server_renders_otherwise_is_what_the_trajectory_holds(
    redis_service: RedisService, tokens: Tokenizer
) -> None:
    """Its template says other words than ours, in the prompt and in an observation: the trajectory has the server's."""
    async with line(redis_service, tokens, "ham") as (client, server):
        rendering = server.engine.speech.rendering
        plain, note = rendering.render, tokens.encode("(noted)")
        end = tokens.eos_token_id
        rendering.render = lambda messages, tools=(): _noted(plain(messages, tools), note, end)  # type: ignore[method-assign]
        (rollout,) = await all_of(client, [task("ham")])

        sequence = sequence_of(rollout)
        for turn in sequence.turns:
            text = tokens.decode(sequence.token_ids[turn.start : turn.end].tolist())
            assert ("(noted)" in text) == (turn.kind != "action")
            assert bool(sequence.loss_mask[turn.start : turn.end].any()) == (turn.kind == "action")
        assert not np.any(sequence.logprobs[sequence.loss_mask == 0])


def _noted(ids: list[int], note: list[int], end: int | None) -> list[int]:
    """A note before the last end token: that of the message that comes last."""
    at = len(ids) - 1 - ids[::-1].index(end) if end in ids else len(ids)
    return [*ids[:at], *note, *ids[at:]]


async def test_its_owner_moves_the_weights(redis_service: RedisService, tokens: Tokenizer) -> None:
    """It has no control side: its calls are waited for, and its tokens are of the version that was named."""
    async with line(redis_service, tokens, "ham") as (client, _):
        moved: list[str] = []
        await client.start_run(3)
        before = (await all_of(client, [task("ham")]))[0]

        async def move(servers: tuple[Backend, ...]) -> None:
            moved.extend(server.kind for server in servers)

        update = await client.update_weights(4, move=move)
        after = (await all_of(client, [task("ham")]))[0]

        assert (before.versions, after.versions) == ((3, 3), (4, 4))
        assert (moved, len(update.updated), len(update.ejected)) == (["nemo-rl"], 1, 0)
        (backend,) = (await client.policy()).backends
        assert (backend.kind, backend.endpoint, backend.version) == ("nemo-rl", "chat", 4)


async def test_a_tool_can_not_forge_a_turn(redis_service: RedisService, tokens: Tokenizer) -> None:
    """The server is not told to leave text alone, so what spells a control token is sent with a blank in it."""
    async with line(redis_service, tokens, "forged") as (client, _):
        sequence = sequence_of(*await all_of(client, [task("forged")]))
        observation = next(turn for turn in sequence.turns if turn.kind == "observation")
        starts = sequence.token_ids[observation.start : observation.end].tolist().count(
            tokens.convert_tokens_to_ids("<|im_start|>")
        )  # fmt: skip
        assert starts == 2  # the tool's turn, and the policy's


async def test_a_server_without_the_prefix_is_not_registered(tokens: Tokenizer) -> None:
    """A plain vLLM passes over a field that it does not know, and tokenises anew."""
    server = await scripted.start(Options(tokenizer=tokens, only_chat=True))
    try:
        async with Engine(server.url) as engine:
            assert (await engine.probe("policy", "chat")).endpoint == "chat"
            server.faults.set("no_prompt_ids")
            with pytest.raises(EngineError, match="does not say which ids") as caught:
                await engine.probe("policy", "chat")
            assert caught.value.fault == "misfit"
            server.faults.set("no_prefix")
            with pytest.raises(EngineError, match="takes no required_prefix_token_ids"):
                await engine.probe("policy", "chat")
    finally:
        await server.stop()
