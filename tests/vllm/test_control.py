"""Calls that are interrupted: aborted, paused, cancelled, cut by the window; weights that change under them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.vllm.compare import actions_of, against_record, computed, sequences_of
from tests.vllm.play import Play, playing, until
from tests.vllm.servers import MODELS, WINDOW, Served

REPLY = 400
"""Tokens of a reply that is met while it is sampled: seconds, also on an idle machine."""


@pytest.fixture
async def play(smollm2: Served, line: Any) -> AsyncIterator[Play]:
    async with playing(smollm2, line) as play:
        yield play


def engine_id(request_id: str) -> str:
    """The id under which the engine knows a generate."""
    return f"generate-tokens-{request_id}"


async def test_an_aborted_reply_is_kept_and_gone_on_with(play: Play) -> None:
    """The engine knows the request by its prefixed id alone; what it had sampled stays, and the rest is asked for."""
    id = await play.start(max_tokens=REPLY)
    exchange = await play.sampling(id)
    await play.call("/abort_requests", {"request_ids": [exchange.id]})
    await play.sampling(id)
    assert exchange.answer is None, "the bare id aborts nothing"
    await play.call("/inference/v1/abort_requests", {"request_ids": [engine_id(exchange.id)]})
    rollout = await play.pop()
    first, second = play.proxy.of(id)
    assert (first.choice["finish_reason"], second.choice["finish_reason"]) == ("abort", "length")
    assert second.prompt == first.prompt + first.ids
    assert len(first.ids) + len(second.ids) == REPLY, "the budget is what the first one left"
    assert against_record(rollout, play.proxy.of(id))[1:] == (0, 0)


async def test_a_pause_that_keeps_freezes_the_reply(play: Play) -> None:
    id = await play.start(max_tokens=REPLY)
    exchange = await play.sampling(id)
    await play.call("/pause?mode=keep")
    try:
        assert await asyncio.to_thread(play.server.call, "/is_paused") == {"is_paused": True}
        still = await _generated_when_still(play)
        await until(
            lambda: play.server.metric("num_requests_running") + play.server.metric("num_requests_waiting"), "kept"
        )
        assert exchange.answer is None and play.server.metric("generation_tokens_total") == still
    finally:
        await play.call("/resume")
    rollout = await play.pop()
    assert play.proxy.of(id) == [exchange]
    assert exchange.choice["finish_reason"] == "length" and len(exchange.ids) == REPLY
    assert against_record(rollout, [exchange])[1:] == (0, 0)


async def _generated_when_still(play: Play) -> float:
    """The engine's count of tokens, once two looks agree."""
    seen = [-1.0]

    def still() -> bool:
        seen.append(play.server.metric("generation_tokens_total"))
        return seen[-1] == seen[-2]

    await until(still, "the engine stands still")
    return seen[-1]


async def test_a_pause_that_aborts_keeps_the_partial_reply(play: Play) -> None:
    id = await play.start(max_tokens=REPLY)
    await play.sampling(id)
    await play.call("/pause?mode=abort")
    try:
        await until(lambda: play.proxy.of(id)[0].answer, "the reply is ended")
    finally:
        await play.call("/resume")
    rollout = await play.pop()
    first, *others = play.proxy.of(id)
    assert first.choice["finish_reason"] == "abort" and 0 < len(first.ids) < REPLY
    assert sum(len(exchange.ids) for exchange in others) == REPLY - len(first.ids)
    assert against_record(rollout, play.proxy.of(id))[1:] == (0, 0)


async def test_a_pause_that_waits_lets_the_reply_end(play: Play) -> None:
    id = await play.start(max_tokens=REPLY)
    exchange = await play.sampling(id)
    try:
        await play.call("/pause?mode=wait")
        await until(lambda: exchange.answer, "the whole reply", 5.0)
    finally:
        await play.call("/resume")
    rollout = await play.pop()
    assert (exchange.choice["finish_reason"], len(exchange.ids)) == ("length", REPLY)
    assert against_record(rollout, [exchange])[1:] == (0, 0)


async def test_a_cancelled_rollout_ends_in_the_engine(play: Play) -> None:
    id = await play.start(max_tokens=800)
    exchange = await play.sampling(id)
    await play.client.cancel([id])
    rollout = await play.pop()
    assert rollout.outcome == "cancelled"
    await until(lambda: exchange.cut, "the client hangs up", 5.0)
    await until(lambda: not play.server.metric("num_requests_running"), "the engine drops the request", 5.0)


async def test_the_budget_is_what_the_window_holds(play: Play) -> None:
    """A prompt that all but fills the window gets what is left of it, and the rollout says so."""
    words = "word " * (WINDOW - 60)
    id = await play.start(question=words, max_tokens=400, turns=3)
    rollout = await play.pop()
    (exchange,) = play.proxy.of(id)
    left = WINDOW - len(exchange.prompt)
    assert 0 < left < 100 and exchange.asked["sampling_params"]["max_tokens"] == left
    assert (len(exchange.ids), exchange.choice["finish_reason"]) == (left, "length")
    assert (rollout.outcome, rollout.truncated) == ("scored", "context")
    assert against_record(rollout, [exchange])[1:] == (0, 0)


async def test_a_prompt_beyond_the_window_is_truncated_and_no_failure(smollm2: Served, line: Any) -> None:
    """Also where the line believes in a larger window than the server has."""
    async with playing(smollm2, line, policy__context=2 * WINDOW) as play:
        await play.start(question="word " * (WINDOW + 10), max_tokens=10)
        rollout = await play.pop()
    assert (rollout.outcome, rollout.truncated) == ("scored", "context")


async def test_priorities_are_sent_and_seeds_are_not(play: Play) -> None:
    """The engine's order is lowest first. A seed can kill it on the CPU, and two samples of a prompt must differ."""
    urgent, usual = [await play.start(max_tokens=20, priority=priority) for priority in (10, 0)]
    for rollout in (await play.pop(), await play.pop()):
        assert rollout.outcome == "scored"
    (first,), (second,) = play.proxy.of(urgent), play.proxy.of(usual)
    assert first.asked["priority"] < second.asked["priority"]
    assert not any("seed" in exchange.asked["sampling_params"] for exchange in (first, second))
    assert first.prompt == second.prompt and first.ids != second.ids


@contextlib.asynccontextmanager
async def swapped(play: Play, model: str, label: str) -> AsyncIterator[None]:
    """Other weights in the server, as an update with mode `keep` brings them; the first ones again afterwards."""
    await _swap(play, model, label)
    try:
        yield
    finally:
        await _swap(play, play.server.model.name, "default")


async def _swap(play: Play, model: str, label: str) -> None:
    await play.call("/pause?mode=keep")
    try:
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(MODELS / model)}}
        await play.call("/collective_rpc", load, timeout=120)
        await play.call("/update_weight_version", {"new_version": label})
        await play.call("/reset_prefix_cache?reset_running_requests=true")
    finally:
        await play.call("/resume")


async def test_a_swap_in_mid_reply_is_recorded_at_its_token(play: Play, tmp_path: Path) -> None:
    """The border in the trajectory is the engine's; on each side the logprobs are those of that side's weights."""
    id = await play.start(max_tokens=REPLY)
    await play.sampling(id, tokens=30)
    async with swapped(play, "smollm2-2", "7"):
        rollout = await play.pop()
    assert against_record(rollout, play.proxy.of(id))[1:] == (0, 0)
    assert rollout.trajectory is not None and rollout.trajectory.version_range == (0, 7)
    (sequence,) = sequences_of([rollout])
    (_, turn), *more = actions_of(rollout)
    assert not more
    old, new = sequence.versions
    assert (old.start, old.end, new.end) == (turn.start, new.start, turn.end)
    before, after = [
        np.abs(await asyncio.to_thread(computed, [sequence], MODELS / name, tmp_path) - sequence.logprobs)
        for name in ("smollm2", "smollm2-2")
    ]
    assert before[old.start : old.end].max() < 1e-3 < after[old.start : old.end].mean()
    assert after[new.start : new.end].max() < 1e-3 < before[new.start : new.end].mean()
