"""The policy client against the scripted server over real HTTP: tokens, versions, limits, faults, cancel."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pipeline.errors import ContextFull, PolicyError, PolicyReplyError, TaskError
from tests.policies import until
from workers.policy import scripted, tokenizer
from workers.policy.client import VllmPolicy
from workers.policy.scripted import Options, Running

QUESTION = "What is 6 x 7?"


class Pair:
    """A running server and a client of it."""

    def __init__(self, server: Running, policy: VllmPolicy) -> None:
        self.server, self.policy = server, policy
        self.prompt = policy.render([{"role": "user", "content": QUESTION}])

    async def call(self, path: str, body: Any = None) -> Any:
        async with aiohttp.ClientSession() as session, session.post(self.server.url + path, json=body) as answer:
            return await answer.json(content_type=None)


@contextlib.asynccontextmanager
async def pair(
    tokens: tokenizer.Tokenizer, *, context: int = 32_768, wait: float = 5.0, faults: str = "", **options: Any
) -> AsyncIterator[Pair]:
    """Both, after the client's first look at the server; `faults` begin then."""
    server = await scripted.start(Options(**{"tokenizer": tokens, "answers": {QUESTION: "42"}, **options}))
    policy = VllmPolicy(server.url, "policy", tokens, context=context, policy_wait=wait)
    try:
        await policy.ready()
        server.faults.set(faults)
        yield Pair(server, policy)
    finally:
        await policy.close()
        await server.stop()


async def test_answers_are_right_as_often_as_asked_and_the_same_each_time(tokens: tokenizer.Tokenizer) -> None:
    async with pair(tokens, p_correct=0.6) as both:
        first = [await both.policy.bound(name=f"r{n}").generate(both.prompt, {}) for n in range(200)]
        again = [await both.policy.bound(name=f"r{n}").generate(both.prompt, {}) for n in range(20)]
    texts = [both.policy.parse(item.ids, both.prompt).message["content"] for item in first]
    assert 90 <= sum("42" in text for text in texts) <= 150
    assert len({len(item.ids) for item in first}) > 10
    assert [(i.ids, i.logprobs) for i in first[:20]] == [(i.ids, i.logprobs) for i in again]
    assert all(value < 0 for item in first for value in item.logprobs)


async def test_some_replies_are_tokenised_unusually(tokens: tokenizer.Tokenizer) -> None:
    async with pair(tokens, p_correct=1.0) as both:
        said = [(await both.policy.bound(name=f"r{n}").generate(both.prompt, {})).ids[:-1] for n in range(100)]
    markup = both.policy.tokenizer
    drifted = sum(markup.encode(markup.decode(ids)) != ids for ids in said)
    assert 8 <= drifted <= 40


async def test_versions_are_those_of_each_token(tokens: tokenizer.Tokenizer) -> None:
    async with pair(tokens, latency_per_token=0.01, p_correct=1.0) as both:
        await both.call("/update_weight_version", {"new_version": "step-2"})
        running = asyncio.create_task(both.policy.generate(both.prompt, {}))
        await asyncio.sleep(0.05)
        await both.call("/update_weight_version", {"new_version": "step-3"})
        spans = (await running).versions
    assert [span[0] for span in spans] == [2, 3] and spans[0][2] == spans[1][1]


async def test_without_labels_the_version_is_that_of_dispatch(tokens: tokenizer.Tokenizer) -> None:
    """H06."""
    async with pair(tokens, latency=0.2, faults="no_versions") as both:
        await both.call("/update_weight_version", {"new_version": "4"})
        running = asyncio.create_task(both.policy.generate(both.prompt, {}))
        await until(lambda: both.server.engine.calls)
        await both.call("/update_weight_version", {"new_version": "5"})
        assert [span[0] for span in (await running).versions] == [4]
        assert [span[0] for span in (await both.policy.generate(both.prompt, {})).versions] == [5]


async def test_the_token_budget_is_what_the_window_still_holds(tokens: tokenizer.Tokenizer) -> None:
    """H05."""
    async with pair(tokens, context=64, max_model_len=64) as both:
        done = await both.policy.generate(list(range(10, 50)), {"max_tokens": 32})
        assert done.sampling["max_tokens"] == 24
        with pytest.raises(ContextFull, match="has 64 tokens, the window 64"):
            await both.policy.generate([10] * 64, {"max_tokens": 32})
        wider = VllmPolicy(both.policy.pool, "policy", tokens, context=1000)
        assert wider.context == 64
        with pytest.raises(ContextFull, match="has 70 tokens, the window 64"):
            await wider.generate([10] * 70, {})
        short = await both.policy.generate(both.prompt, {"max_tokens": 2})
        assert (len(short.ids), short.finish_reason) == (2, "length")


@pytest.mark.parametrize(
    ("ids", "sampling", "words"),
    [
        ([], {}, "at least one id"),
        ([10_000_000], {}, "out of vocabulary"),
        ([10], {"max_tokens": 0}, "wanted a whole number of at least 1"),
        ([10], {"n": 2}, "can't be set"),
        ([10], {"temprature": 1}, "sampling.temprature is no setting"),
        ([10], {"temperature": -1}, "must be non-negative"),
    ],
)
async def test_a_request_that_can_never_work_is_the_tasks_fault(
    tokens: tokenizer.Tokenizer, ids: list[int], sampling: dict[str, Any], words: str
) -> None:
    async with pair(tokens) as both:
        with pytest.raises(TaskError, match=words):
            await both.policy.generate(ids, sampling)


@pytest.mark.parametrize(
    ("fault", "kind", "words"),
    [
        ("500", PolicyError, "HTTP 500"),
        ("short_logprobs", PolicyReplyError, "logprobs"),
        ("short_ids", PolicyReplyError, "completion tokens but sent"),
        ("no_logprobs", PolicyReplyError, "0 logprobs"),
        ("nan_logprob", PolicyReplyError, "no finite evidence"),
        ("not_json", PolicyReplyError, "is not the one of"),
    ],
)
async def test_a_server_that_fails_is_told_apart(
    tokens: tokenizer.Tokenizer, fault: str, kind: type[Exception], words: str
) -> None:
    async with pair(tokens, faults=fault, wait=0.3) as both:
        with pytest.raises(kind, match=words):
            await both.policy.generate(both.prompt, {})


@pytest.mark.parametrize("fault", ["503*2", "429*2", "drop*2", "refuse*2"])
async def test_a_call_that_nobody_took_is_repeated_while_the_clock_stands(
    tokens: tokenizer.Tokenizer, fault: str
) -> None:
    paused: list[str] = []

    class Clock:
        @contextlib.contextmanager
        def paused(self, reason: str) -> Iterator[None]:
            paused.append(reason)
            yield

    async with pair(tokens, faults=fault) as both:
        done = await both.policy.bound(Clock()).generate(both.prompt, {})
    assert done.finish_reason == "stop" and set(paused) == {"no usable policy server"}


async def test_no_backend_is_waited_for_and_then_named(tokens: tokenizer.Tokenizer) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{free.getsockname()[1]}"
    policy = VllmPolicy(url, "policy", tokens, policy_wait=0.3)
    with pytest.raises(PolicyError, match=r"no usable policy server for 0.3 s .*: 127.*: .*refused|Connect"):
        await policy.generate([10], {})
    await policy.close()


async def test_a_slow_call_is_not_repeated(tokens: tokenizer.Tokenizer) -> None:
    server = await scripted.start(Options(tokenizer=tokens, latency_per_token=60))
    policy = VllmPolicy(server.url, "policy", tokens, request_timeout=0.2)
    with pytest.raises(PolicyError, match="no reply from .* within 0.2 s"):
        await policy.generate([10], {})
    await policy.close()
    await server.stop()


async def test_a_cancelled_call_ends_in_the_engine_too(tokens: tokenizer.Tokenizer) -> None:
    async with pair(tokens, latency_per_token=60) as both:
        calls = [asyncio.create_task(both.policy.bound(name=f"r{n}").generate(both.prompt, {})) for n in range(50)]
        await until(lambda: len(both.server.engine.calls) == 50)
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await until(lambda: not both.server.engine.calls)
        assert both.server.engine.counts["finished abort"] == 50


async def test_pause_keeps_aborts_and_holds(tokens: tokenizer.Tokenizer) -> None:
    async with pair(tokens, latency_per_token=0.005) as both:
        running = asyncio.create_task(both.policy.generate(both.prompt, {}))
        await until(lambda: both.server.engine.calls)
        await both.call("/pause?mode=keep")
        await asyncio.sleep(0.3)
        assert not running.done()
        await both.call("/resume")
        assert (await running).finish_reason == "stop"
        running = asyncio.create_task(both.policy.generate(both.prompt, {}))
        await until(lambda: both.server.engine.calls)
        await asyncio.sleep(0.02)
        await both.call("/pause?mode=abort")
        partial = await running
        assert partial.finish_reason == "abort" and len(partial.ids) == len(partial.logprobs) > 0
        held = asyncio.create_task(both.policy.generate(both.prompt, {}))
        await asyncio.sleep(0.05)
        assert not held.done()
        await both.call("/resume")
        assert (await held).finish_reason == "stop"
        assert "none of abort, keep, wait" in (await both.call("/pause?mode=zzz"))["error"]["message"]


async def test_abort_wants_the_prefixed_id(tokens: tokenizer.Tokenizer) -> None:
    async with pair(tokens, latency_per_token=60) as both:
        running = asyncio.create_task(both.policy.bound(name="r1").generate(both.prompt, {}))
        await until(lambda: both.server.engine.calls)
        await both.call("/abort_requests", {"request_ids": ["r1-1"]})
        assert both.server.engine.calls
        await both.call("/abort_requests", {"request_ids": ["generate-tokens-r1-1"]})
        assert (await running).finish_reason == "abort"


async def test_it_is_named_for_what_it_is(tokens: tokenizer.Tokenizer) -> None:
    async with pair(tokens) as both, aiohttp.ClientSession() as session:
        for path in ("/v1/models", "/version", "/metrics"):
            async with session.get(both.server.url + path) as answer:
                assert "nobody's model" in await answer.text()
                assert "nobody's model" in answer.headers["Server"]
        unknown = await both.policy.generate(both.policy.render([{"role": "user", "content": "who are you"}]), {})
        assert "nobody's model" in both.policy.text(unknown.ids)


def test_the_process_answers_and_ends_with_its_starter(tokens: tokenizer.Tokenizer, tmp_path: Path) -> None:
    answers = tmp_path / "answers.json"
    answers.write_text(json.dumps({QUESTION: "42"}))
    server = scripted.launch(
        tmp_path, "--tokenizer", tokens.name_or_path, "--answers", str(answers), "--p-correct", "1"
    )

    async def ask() -> str:
        policy = VllmPolicy(server.url, "policy", tokens)
        done = await policy.generate(policy.render([{"role": "user", "content": QUESTION}]), {})
        await policy.close()
        return policy.text(done.ids)

    assert "42" in asyncio.run(ask())
    server.stop()
    assert server.process.returncode == 0 and not os.path.exists(f"/proc/{server.process.pid}")


def test_the_policy_command_serves_until_it_is_told_to_stop(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "workers.cli", "policy", "scripted", "--handler", "math", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdout is not None
        about = json.loads(process.stdout.readline())
        folder = Path(about["ROLLOUT_POLICY__TOKENIZER"])
        assert (folder / "tokenizer.json").is_file()
        with urllib.request.urlopen(f"{about['ROLLOUT_POLICY__URL']}/health", timeout=10) as reply:
            assert reply.status == 200
        process.terminate()
        assert process.wait(20) == 0
    assert not folder.exists()


async def test_a_stop_string_ends_a_reply_and_its_tokens_stay(tokens: tokenizer.Tokenizer) -> None:
    async with pair(tokens) as both:
        prompt = both.policy.render([{"role": "user", "content": "what is it?"}])
        whole = await both.policy.generate(prompt, {"seed": 1})
        text = both.policy.text(whole.ids)
        cut = await both.policy.generate(prompt, {"seed": 1, "stop": [text[2:5]]})
        assert cut.finish_reason == "stop" and 0 < len(cut.ids) < len(whole.ids)
        assert list(cut.ids) == list(whole.ids)[: len(cut.ids)]
        assert text[2:5] in both.policy.text(cut.ids) and text[2:5] not in both.policy.text(cut.ids[:-1])
