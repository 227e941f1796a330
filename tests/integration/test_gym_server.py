"""The Gym-style server on a real line: a caller that asserts what NeMo RL asserts, failures, hang-ups, the end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from tests import line
from tests.integration.chat_handlers import Shop
from tests.integration.crew import configured, serving
from tests.nemo_rl import calls_of
from tests.policies import until
from tests.services import RedisService
from workers.gym_server import GymServer, Options
from workers.policy import scripted
from workers.policy.tokenizer import Tokenizer

QUESTION = "What are the prices?"
PARAMS = {"input": [{"role": "user", "content": QUESTION}], "temperature": 1.0, "top_p": 1.0}


class Caller:
    """A client of the server, as a trainer is one."""

    def __init__(self, url: str, client: RolloutClient) -> None:
        self.url, self.client = url, client

    async def run(self, **row: Any) -> tuple[int, Any]:
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.url}/run", json={"responses_create_params": PARAMS, **row}) as reply,
        ):
            return reply.status, await reply.json()

    async def echo(self, **data: Any) -> tuple[int, Any]:
        return await self.run(handler="echo", data={"tokens": 32, **data})

    async def empty(self) -> bool:
        return await line.count(self.client.queue, "live") == 0

    async def runs(self) -> bool:
        return bool(await self.client.queue.execute("ZCARD", self.client.queue.key("lease", "run")))


@pytest.fixture
def config(redis_service: RedisService) -> Config:
    return configured(
        redis_service, handlers__path=str(Path(__file__).parent), retry__attempts=1, limits__policy_wait=20.0,
        policy__renderer="qwen3",
    )  # fmt: skip


@contextlib.asynccontextmanager
async def caller(config: Config, *stages: str, **options: Any) -> AsyncIterator[Caller]:
    """The server and whoever calls it; `stages` without a name: all."""
    async with RolloutClient(config=config) as client, contextlib.AsyncExitStack() as stack:
        if stages != ("none",):
            await stack.enter_async_context(serving(config, *stages))
        server = GymServer(client, Options(**options))
        url = await server.start()
        try:
            yield Caller(url, client)
        finally:
            await server.stop()


async def test_a_rollout_of_several_turns_is_answered_as_nemo_rl_wants_it(config: Config, tokens: Tokenizer) -> None:
    names = ["ham", "tea"]
    answers = {QUESTION: Shop().gold({"names": names})}
    server = await scripted.start(scripted.Options(tokenizer=tokens, answers=answers, p_correct=1.0, drift=1.0))
    try:
        async with caller(config, handler="chat_handlers:Shop") as gym:
            await gym.client.register_backend(server.url, tokenizer=str(tokens.name_or_path))
            row = {"question": QUESTION, "names": names, "_ng_task_index": 3, "group": "g"}
            status, told = await gym.run(**row)

            assert status == 200, told
            assert (told["reward"], told["mask_sample"], told["names"]) == (1.0, False, names)
            assert told["rollout"]["id"].startswith("g-")
            output = told["response"]["output"]
            calls = calls_of(output)
            assert len(calls) == 3
            assert tokens.decode(calls[0][0]).count(QUESTION) == 1
            assert "3 coins" in tokens.decode(calls[1][0])
            assert "5 coins" in tokens.decode(calls[2][0])
            kinds = [item["type"] for item in output]
            assert kinds == ["function_call", "function_call", "message"]
            assert json.loads(output[0]["arguments"]) == {"name": "ham"}
            assert output[-1]["content"][0]["text"].endswith("sold")
            assert await gym.empty()
    finally:
        await server.stop()


async def test_many_requests_share_a_client_and_each_gets_its_own(config: Config) -> None:
    async with caller(config) as gym:
        replies = await asyncio.gather(*(gym.echo(text=str(at), sleep=(at % 3) / 10) for at in range(30)))
        assert [status for status, _ in replies] == [200] * 30
        assert [told["data"]["text"] for _, told in replies] == [str(at) for at in range(30)]
        assert len({told["rollout"]["id"] for _, told in replies}) == 30
        assert await audit(gym.client.queue) == []
        assert await line.leftovers(gym.client.queue) == []


async def test_a_failure_is_an_error_and_never_a_reward(config: Config) -> None:
    """H08: the caller can tell them apart, and knows whether another try makes sense."""
    async with caller(config.changed({"limits.policy_wait": 0.1})) as gym:
        wrong = {
            422: gym.run(handler="no_such_handler", data={}),
            400: gym.run(question="?"),
            503: gym.run(handler="chat_handlers:Shop", data={"question": QUESTION, "names": []}),  # there is no policy
        }
        for status, request in wrong.items():
            got, told = await request
            assert got == status, told
            assert told["error"]["message"]
            assert "reward" not in told
        status, told = await gym.echo(tokens=0)
        assert status == 422
        assert "0 tokens were sampled" in told["error"]["message"]
        await until(gym.empty)


async def test_a_caller_that_hangs_up_cancels_its_rollout(config: Config) -> None:
    async with caller(config) as gym:
        asking = asyncio.create_task(gym.echo(sleep=60.0))
        await until(gym.runs)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
        await until(gym.empty)


async def test_a_line_without_workers_and_a_time_that_is_over_are_said(config: Config) -> None:
    async with caller(config, "none", dead_after=0.3) as gym:
        status, told = await gym.echo()
        assert status == 504
        assert "no live worker serves it" in told["error"]["message"]
    async with caller(config, timeout=0.3) as gym:
        status, told = await gym.echo(sleep=60.0)
        assert status == 504
        assert "did not end within" in told["error"]["message"]
        await until(gym.empty)


def test_the_command_serves_and_ends_in_good_order(redis_service: RedisService) -> None:
    """SIGTERM with a request open: it is answered with 503, its rollout is cancelled, the exit code is 0."""
    words = [sys.executable, "-m", "workers.cli", f"--set=redis.url={redis_service.url}"]
    words += [f"--set=redis.password_file={redis_service.password_file}", "gym", "--json"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = json.loads(process.stdout.readline())["url"]
        status, told = asyncio.run(_stopped(url, process, redis_service))
        assert (status, process.wait(20)) == (503, 0)
        assert "closed" in told["error"]["message"]
    finally:
        process.kill()
        process.communicate()


async def _stopped(url: str, process: subprocess.Popen[str], service: RedisService) -> tuple[int, Any]:
    async with RolloutClient(config=service.config) as client, aiohttp.ClientSession() as session:
        async with session.get(f"{url}/health") as reply:
            assert (reply.status, (await reply.json())["open"]) == (200, 0)
        gym = Caller(url, client)
        asking = asyncio.create_task(gym.echo())
        await until(lambda: _waits(client))
        process.send_signal(signal.SIGTERM)
        answer = await asking
        await until(gym.empty)
        return answer


async def _waits(client: RolloutClient) -> bool:
    return await line.count(client.queue, "live") == 1
