"""A policy server whose logprobs say which weights really sampled each token, whatever label the token bears.

    python -m tests.faults.true_policy TOKENIZER PORT [--load 0.2] [--per-token 0.01] [--no-op] [--no-scale-out] ...

It is the scripted one (nobody's model). Weights of version 12 lie in a folder whose name ends in 12; `POST
/scripted/weights {"version": 12}` moves them from outside. A fresh one has BASE. While a load runs the weights are
BROKEN, and a token that is sampled then says so. `--no-op`: control calls are answered with 200, and nothing is done.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
from typing import Any

import click
from aiohttp import web

from pipeline.engine import version_number
from pipeline.results import Rollout
from workers.policy import scripted
from workers.policy.scripted_engine import Call, Engine, Outcome, Pace
from workers.policy.scripted_faults import Faults
from workers.policy.scripted_http import Face
from workers.policy.scripted_shapes import as_json
from workers.policy.scripted_speech import Speech

BASE, BROKEN = -2, -1
"""Weights that are no version: those of a fresh server, and those in the middle of a load."""

SCALE = 1024.0


def truth(logprob: float) -> int:
    """The weights that sampled a token with this logprob."""
    return round(-logprob * SCALE) - 3


class TrueEngine(Engine):
    """Knows at each moment which weights it has."""

    def __init__(self, speech: Speech, pace: Pace) -> None:
        super().__init__(speech, pace)
        self._weights = [(0.0, BASE)]

    def weigh(self, version: int) -> None:
        """It has these weights from now on."""
        self._weights.append((self._now(), version))

    def _outcome(self, call: Call) -> Outcome:
        out, pace = super()._outcome(call), self.pace.per_token
        moments = [max(call.first + at * pace, 0.0) for at in range(len(out.ids))]
        true = [next(has for since, has in reversed(self._weights) if since <= moment) for moment in moments]
        return dataclasses.replace(out, logprobs=[-(has + 3) / SCALE for has in true])


class TrueFace(Face):
    """Loads take `load` seconds; with `no_op` nothing that the control side is told is done."""

    load_seconds = 0.0
    no_op = False

    def app(self) -> web.Application:
        app = super().app()
        app.add_routes([web.post("/scripted/weights", self.weigh)])
        return app

    async def weigh(self, request: web.Request) -> web.Response:
        version = int((await request.json())["version"])
        await self._load(version)
        return as_json({"version": version})

    async def _load(self, version: int) -> None:
        assert isinstance(self.engine, TrueEngine)
        self.engine.weigh(BROKEN)
        await asyncio.sleep(self.load_seconds)
        self.engine.weigh(version)

    async def collective_rpc(self, request: web.Request) -> web.Response:
        answer = web.Response() if self.no_op else await super().collective_rpc(request)
        if answer.status == 200 and not self.no_op:
            await self._load(version_number(self.engine.loaded[-1]))
        return answer

    async def pause(self, request: web.Request) -> web.Response:
        return as_json({"status": "paused"}) if self.no_op else await super().pause(request)

    async def relabel(self, request: web.Request) -> web.Response:
        return as_json({"success": True}) if self.no_op else await super().relabel(request)


async def start(tokenizer: Any, port: int = 0, **about: Any) -> scripted.Running:
    """Serve in the running loop. `about`: load, per_token, no_op, scale_out, dev_mode, window."""
    named = {"load": 0.0, "per_token": 0.0, "no_op": False, "scale_out": True, "dev_mode": True, "window": 4096} | about
    plain = await scripted.start(scripted.Options(tokenizer=tokenizer))  # for its speech
    await plain.stop()
    engine = TrueEngine(plain.engine.speech, Pace(per_token=named["per_token"]))
    face = TrueFace(
        engine, model="policy", window=named["window"], faults=Faults(), dev_mode=named["dev_mode"],
        scale_out=named["scale_out"], on_exit=lambda: os._exit(0),
    )  # fmt: skip
    face.load_seconds, face.no_op = named["load"], named["no_op"]
    runner = web.AppRunner(face.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port, backlog=4096, reuse_address=True).start()
    return scripted.Running(f"http://127.0.0.1:{runner.addresses[0][1]}", engine, face, face.faults, runner)


def lies(rollouts: list[Rollout]) -> list[str]:
    """Every token that bears another version than that of the weights that sampled it."""
    found = []
    for rollout in rollouts:
        for sequence in rollout.trajectory.sequences if rollout.trajectory else ():
            for run in sequence.versions:
                true = {truth(float(value)) for value in sequence.logprobs[run.start : run.end]}
                if true != {run.version}:
                    found.append(f"{rollout.id} {run.start}:{run.end} bears {run.version}, sampled by {sorted(true)}")
    return found


@click.command()
@click.argument("tokenizer")
@click.argument("port", type=int)
@click.option("--load", default=0.0)
@click.option("--per-token", default=0.0)
@click.option("--no-op", is_flag=True)
@click.option("--scale-out/--no-scale-out", default=True)
@click.option("--dev-mode/--no-dev-mode", default=True)
def main(tokenizer: str, port: int, **about: Any) -> None:
    async def serve() -> None:
        running = await start(tokenizer, port, **about)
        print(running.url, flush=True)  # noqa: T201
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
