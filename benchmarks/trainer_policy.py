"""The policy server of the trainer's benchmarks: the package's scripted one, and how busy its slots have been.

    python benchmarks/trainer_policy.py --tokenizer DIR --slots N --per-token SECONDS --port-file FILE

It says more than any call asks for (some 200 tokens), so a call lasts max_tokens x SECONDS: whoever calls draws it. The
second port answers /busy with {"slot_seconds": ..., "clock": ...}, counted here, at the server, every few milliseconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from pathlib import Path

from aiohttp import web

from workers.policy import scripted
from workers.policy.scripted_engine import Engine

LOOK_EVERY = 0.004
SAYS = "So far so good. " * 30


class Meter:
    """Integral of the busy slots over time."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slot_seconds = 0.0

    async def run(self) -> None:
        at = time.monotonic()
        while True:
            busy = self._engine.running
            await asyncio.sleep(LOOK_EVERY)
            now = time.monotonic()
            self._slot_seconds += (busy + self._engine.running) / 2 * (now - at)
            at = now

    async def told(self, _: web.Request) -> web.Response:
        return web.json_response({"slot_seconds": self._slot_seconds, "clock": time.monotonic()})


async def serve(tokenizer: str, slots: int, per_token: float, port_file: Path) -> None:
    options = scripted.Options(
        tokenizer=tokenizer, slots=slots, latency_per_token=per_token, latency=per_token, drift=0.0, says=SAYS
    )
    running = await scripted.start(options)
    meter = Meter(running.engine)
    counting = asyncio.create_task(meter.run())
    app = web.Application()
    app.router.add_get("/busy", meter.told)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    over = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, over.set)
    beside = port_file.with_suffix(".part")
    beside.write_text(json.dumps({"policy": running.url, "meter": f"http://127.0.0.1:{runner.addresses[0][1]}/busy"}))
    os.replace(beside, port_file)
    await over.wait()
    counting.cancel()
    await runner.cleanup()
    await running.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--per-token", type=float, required=True)
    parser.add_argument("--port-file", type=Path, required=True)
    options = parser.parse_args()
    asyncio.run(serve(options.tokenizer, options.slots, options.per_token, options.port_file))


if __name__ == "__main__":
    main()
