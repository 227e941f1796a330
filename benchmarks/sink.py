"""A policy server that does no work of its own, so that what is measured is the client: `python benchmarks/sink.py`.

It reads each generate body and drops it, holds the call for `--hold` seconds (drawn evenly between half and one and a
half of it; with `--even` exactly so long), and answers `--tokens` tokens from a body that it made once. A probe, which
has one token, is answered at once.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
from pathlib import Path

import orjson
from aiohttp import web

SMALL = 1000
"""Bytes of a body that can only be a probe's."""


class Sink:
    """`open`: calls that are held now, `most`: at once so far, `done`: answered."""

    def __init__(self, hold: float, tokens: int, spread: float = 0.5) -> None:
        self.spread = spread
        self.hold, self.answer, self.probe = hold, reply(tokens), reply(1)
        self.open = self.most = self.done = 0
        self._chance = random.Random(7)

    async def generate(self, request: web.Request) -> web.Response:
        size = 0
        async for chunk in request.content.iter_any():
            size += len(chunk)
        if size < SMALL:
            return web.Response(body=self.probe, content_type="application/json")
        self.open += 1
        self.most = max(self.most, self.open)
        try:
            if self.hold:
                await asyncio.sleep(self.hold * self._chance.uniform(1 - self.spread, 1 + self.spread))
        finally:
            self.open -= 1
        self.done += 1
        return web.Response(body=self.answer, content_type="application/json")

    async def about(self, request: web.Request) -> web.Response:
        return web.json_response({"open": self.open, "most": self.most, "done": self.done})

    def app(self) -> web.Application:
        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "policy", "max_model_len": 131_072}]})

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=f"vllm:generation_tokens_total {self.done}\n")

        app = web.Application(client_max_size=1 << 30)
        app.add_routes([
            web.post("/inference/v1/generate", self.generate),
            web.get("/v1/models", models),
            web.get("/metrics", metrics),
            web.get("/sink", self.about),
        ])  # fmt: skip
        return app


def reply(tokens: int) -> bytes:
    """A whole reply with so many tokens, as vLLM shapes it."""
    chance = random.Random(tokens)
    ids = [chance.randrange(150_000) for _ in range(tokens)]
    content = []
    for token in ids:
        value = -round(chance.expovariate(2.0) + 0.0001, 6)
        about = {"token_id": token, "logprob": value, "rank": 1}
        content.append({**about, "top_logprobs": [about]})
    choice = {
        "index": 0, "finish_reason": "stop", "stop_reason": None, "token_ids": ids, "routed_experts": None,
        "weight_versions": [{"version": "default", "start": 0, "end": tokens}], "logprobs": {"content": content},
    }  # fmt: skip
    usage = {"prompt_tokens": 1, "total_tokens": tokens + 1, "completion_tokens": tokens}
    return orjson.dumps({"request_id": "x", "model": "policy", "usage": usage, "choices": [choice]})


async def serve(sink: Sink, port_file: Path) -> None:
    runner = web.AppRunner(sink.app(), access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
    beside = port_file.with_suffix(".part")
    beside.write_text(str(runner.addresses[0][1]))
    os.replace(beside, port_file)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port-file", type=Path, required=True)
    parser.add_argument("--hold", type=float, default=0.0)
    parser.add_argument("--tokens", type=int, default=1)
    parser.add_argument("--even", action="store_true", help="every call is held for exactly --hold seconds")
    options = parser.parse_args()
    asyncio.run(serve(Sink(options.hold, options.tokens, 0.0 if options.even else 0.5), options.port_file))


if __name__ == "__main__":
    main()
