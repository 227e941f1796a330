"""Rollouts through a line before a recorded real server, and the waiting that such tests do."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.results import Rollout
from tests.integration.crew import serving
from tests.vllm.recorder import Exchange, Recorder, recording
from tests.vllm.servers import Served

LONG = {"temperature": 1.0, "ignore_eos": True, "stop_token_ids": []}
"""Sampling of replies that end by their length alone."""


@dataclass
class Play:
    """A line with workers, a trainer's client, and the record of what the workers sent to `server`."""

    server: Served
    proxy: Recorder
    client: RolloutClient

    async def start(
        self, question: str = "Tell a long story.", turns: int = 1, priority: int = 0, **sampling: Any
    ) -> str:
        """Enqueue one rollout; its id."""
        data = {"question": question, "turns": turns}
        task = Task(handler="vllm_handlers:Chat", data=data, sampling={**LONG, **sampling})
        (id,) = await self.client.enqueue([task], priority=priority)
        return id

    async def sampling(self, id: str, tokens: int = 10) -> Exchange:
        """Wait until the engine has sampled this many tokens more, with a call of this rollout under way."""
        before: list[float] = []

        def under_way() -> bool:
            mine = self.proxy.of(id)
            if not mine or mine[-1].answer is not None:
                before.clear()
                return False
            before.append(self.server.metric("generation_tokens_total"))
            return before[-1] - before[0] >= tokens

        await until(under_way, "the engine samples")
        return self.proxy.of(id)[-1]

    async def call(self, path: str, body: Any = None, timeout: float = 60.0) -> Any:
        """A POST to the server itself."""
        return await asyncio.to_thread(self.server.call, path, {} if body is None else body, timeout)

    async def pop(self, timeout: float = 120.0) -> Rollout:
        """The next rollout, acked."""
        batch = await self.client.pop(1, timeout=timeout)
        await self.client.ack(batch)
        rollout: Rollout = batch[0]
        return rollout


@contextlib.asynccontextmanager
async def playing(server: Served, line: Callable[..., Config], **changes: Any) -> AsyncIterator[Play]:
    """A line with one worker for each stage before a recorded server."""
    async with recording(server.url) as proxy:
        config = line(proxy.url, **changes)
        async with RolloutClient(config=config) as client, serving(config, slots=48):
            yield Play(server, proxy, client)


async def until(true: Callable[[], object], what: str, seconds: float = 60.0) -> None:
    """Wait for something of another process; `true` may block, and is asked in a thread."""
    end = time.monotonic() + seconds
    while not await asyncio.to_thread(true):
        assert time.monotonic() < end, f"{what}: not within {seconds:g} s"
        await asyncio.sleep(0.02)
