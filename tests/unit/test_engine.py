"""The control side of a policy server: what is asked, how replies are read, and how faults are told apart."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from aiohttp import web

from pipeline.engine import About, Engine, EngineError, version_number
from pipeline.errors import ConfigError, PolicyError, PolicyReplyError
from workers.policy import scripted
from workers.policy.scripted import Options, Running
from workers.policy.tokenizer import Tokenizer

Reply = Callable[[web.Request], Any]


@contextlib.asynccontextmanager
async def serving(replies: dict[str, Reply], timeout: float = 2.0) -> AsyncIterator[tuple[Engine, list[Any]]]:
    """A server with these paths, and (path, body) of what it was asked. A handler gives a status, text or document."""
    asked: list[Any] = []

    async def answer(request: web.Request) -> web.Response:
        asked.append((request.path_qs, await request.json() if request.can_read_body else None))
        given = replies[request.path](request) if request.path in replies else 404
        if asyncio.iscoroutine(given):
            given = await given
        if isinstance(given, str):
            return web.Response(text=given)
        return web.Response(status=given) if isinstance(given, int) else web.json_response(given)

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with Engine(f"http://127.0.0.1:{runner.addresses[0][1]}/", timeout=timeout) as engine:
            yield engine, asked
    finally:
        await runner.cleanup()


@pytest.fixture
async def server(tokens: Tokenizer) -> AsyncIterator[Running]:
    running = await scripted.start(Options(tokenizer=tokens, max_model_len=512))
    yield running
    await running.stop()


async def test_a_server_says_what_it_is_and_generates(server: Running, tokens: Tokenizer) -> None:
    async with Engine(server.url) as engine:
        assert await engine.about() == About("policy", tokens.name_or_path, 512, 0, True)
        probe = await engine.probe("policy")
        assert (probe.endpoint, probe.version) == ("generate", 0) and 0 < probe.seconds < 5
        assert await engine.healthy()
        with pytest.raises(EngineError, match=r"serves no model called 'other' \(it serves: policy\)") as raised:
            await engine.about("other")
        assert raised.value.fault == "misfit"


async def test_control(server: Running) -> None:
    async with Engine(server.url) as engine:
        assert not await engine.is_paused()
        await engine.pause("keep")
        assert await engine.is_paused()
        await engine.relabel(7)
        await engine.resume()
        assert not await engine.is_paused()
        assert await engine.version() == 7
        assert (await engine.probe()).version == 7
        with pytest.raises(EngineError, match="HTTP 400: mode 'never'") as raised:
            await engine.pause("never")
        assert raised.value.fault == "refused"


async def test_progress_and_queue_are_read_from_the_metrics(server: Running) -> None:
    async with Engine(server.url) as engine:
        before = await engine.generated()
        await engine.probe()
        assert await engine.generated() == before + 2  # one id of the prompt, one sampled
        assert await engine.queued() == 0


async def test_metrics_of_several_engines_are_added_up() -> None:
    text = (
        "# HELP vllm:generation_tokens_total Number\n"
        'vllm:generation_tokens_total{engine="0",model_name="a b"} 12.0\n'
        'vllm:generation_tokens_total{engine="1",model_name="a b"} 1e3\n'
        'vllm:generation_tokens_created{engine="0"} 99.0\n'
        'vllm:prompt_tokens_total{engine="0"} 5\n'
    )
    async with serving({"/metrics": lambda _: text}) as (engine, _):
        assert await engine.generated() == 1017
        with pytest.raises(EngineError, match="has no vllm:num_requests_running"):
            await engine.queued()


COMPLETION = {"choices": [{"token_ids": [5], "logprobs": {}}]}


async def test_completions_are_the_fall_back_and_must_give_ids() -> None:
    for status in (403, 404):
        replies: dict[str, Reply] = {
            "/inference/v1/generate": lambda _, status=status: status,  # type: ignore[misc]
            "/v1/completions": lambda _: COMPLETION,
            "/weight_info": lambda _: {"weight_version": "step-4"},
        }
        async with serving(replies) as (engine, asked):
            probe = await engine.probe("m")
            assert (probe.endpoint, probe.version) == ("completions", 4)
            body = asked[1][1]
            assert body["prompt"] == [1] and body["return_token_ids"] and "priority" not in body
    async with serving({"/v1/completions": lambda _: {"choices": [{"text": "x"}]}}) as (engine, asked):
        with pytest.raises(EngineError, match=r"HTTP 404.*enable-scale-out.*answers without token_ids") as raised:
            await engine.probe()
        assert raised.value.fault == "misfit"


async def test_priority_is_sent_only_where_given_and_no_version_is_none() -> None:
    reply = {"choices": [{"token_ids": [5]}]}
    async with serving({"/inference/v1/generate": lambda _: reply}) as (engine, asked):
        assert (await engine.probe(priority=-5)).version is None
        assert asked[0][1]["priority"] == -5


async def test_weights_are_loaded_labelled_and_the_cache_forgotten() -> None:
    said = {"success": True}
    replies: dict[str, Reply] = {
        "/collective_rpc": lambda _: {"results": [None]},
        "/update_weight_version": lambda _: {"success": True},
        "/reset_prefix_cache": lambda _: said,
    }
    async with serving(replies) as (engine, asked):
        await engine.load("/weights/3")
        await engine.relabel(3)
        await engine.reset_cache()
        assert asked == [
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": "/weights/3"}}),
            ("/update_weight_version", {"new_version": "3"}),
            ("/reset_prefix_cache?reset_running_requests=true", None),
        ]
        said["success"] = False
        with pytest.raises(EngineError, match="in use and was not reset"):
            await engine.reset_cache()


async def test_without_dev_mode_the_mend_is_said() -> None:
    async with serving({"/v1/models": lambda _: {"data": [{"id": "m", "root": "/m", "max_model_len": 9}]}}) as (
        engine,
        _,
    ):
        assert await engine.about() == About("m", "/m", 9, None, False)
        for call in (engine.pause(), engine.resume(), engine.load("x"), engine.relabel(1), engine.is_paused()):
            with pytest.raises(EngineError, match="VLLM_SERVER_DEV_MODE=1") as raised:
                await call
            assert raised.value.fault == "misfit"


@pytest.mark.parametrize(
    ("status", "health", "fault"),
    [
        (429, 200, "overload"),
        (503, 200, "overload"),
        (503, 503, "dead"),
        (500, 200, "refused"),
        (500, 503, "dead"),
        (502, 200, "dead"),
        (400, 200, "refused"),
    ],
)
async def test_statuses_are_told_apart(status: int, health: int, fault: str) -> None:
    async with serving({"/inference/v1/generate": lambda _: status, "/health": lambda _: health}) as (engine, _):
        with pytest.raises(EngineError, match=f"HTTP {status}") as raised:
            await engine.probe()
    assert raised.value.fault == fault
    assert isinstance(raised.value, PolicyError)


async def test_silence_is_a_hang_and_a_closed_port_a_death() -> None:
    async def never(_: web.Request) -> int:
        await asyncio.Event().wait()
        return 200

    async with serving({"/inference/v1/generate": never}, timeout=0.05) as (engine, _):
        with pytest.raises(EngineError, match=r"no reply within 0.05 s") as raised:
            await engine.probe()
        assert raised.value.fault == "hang"
    with socket.socket() as closed:  # bound, and nobody listens
        closed.bind(("127.0.0.1", 0))
        async with Engine(f"http://127.0.0.1:{closed.getsockname()[1]}") as engine:
            with pytest.raises(EngineError) as raised:
                await engine.probe()
            assert raised.value.fault == "dead"
            assert not await engine.healthy()


async def test_a_reply_of_another_kind_of_server_is_a_misfit() -> None:
    async with serving({"/v1/models": lambda _: "<html>", "/is_paused": lambda _: "<html>"}) as (engine, _):
        for call in (engine.about(), engine.is_paused()):
            with pytest.raises(EngineError, match="answers without") as raised:
                await call
            assert raised.value.fault == "misfit"
    async with Engine("nowhere") as engine:
        with pytest.raises(ConfigError, match="'nowhere' is no URL"):
            await engine.probe()


def test_labels() -> None:
    assert [version_number(label) for label in ("default", "step-12", "12", 3)] == [0, 12, 12, 3]
    with pytest.raises(PolicyReplyError, match="ends in no number"):
        version_number("latest")
