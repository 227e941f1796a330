"""Scripted policy server: nobody's model. It speaks vLLM's HTTP interface and gives answers looked up beforehand.

For demo, tests and benchmarks only: `python -m workers.policy.scripted --tokenizer DIR --answers FILE`. Tests start it
in their own process with `start`; commands start it as a process of its own with `launch`.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from aiohttp import web

from pipeline.errors import ConfigError, PolicyError
from workers.address import bracketed
from workers.policy.rendering import Rendering
from workers.policy.scripted_engine import Engine, Pace
from workers.policy.scripted_faults import Faults
from workers.policy.scripted_http import Face
from workers.policy.scripted_speech import NAME, Speech
from workers.policy.tokenizer import Tokenizer

log = logging.getLogger(__name__)
START_SECONDS = 30.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the server behaves. `tokenizer`: folder or loaded one. Latencies are in seconds, see Pace.

    `slots`: calls that run at once, 0 = all. `dev_mode`, `scale_out`: whether it has vLLM's control side and its token
    path. `only_chat`: it is an engine of NeMo RL: it has chat completions that take a prefix of ids, and nothing else.
    `poison`: a question that kills the engine. `says`: what is said where no answer is known.
    """

    tokenizer: str | Tokenizer
    answers: dict[str, Any] = field(default_factory=dict)
    p_correct: float = 0.6
    latency: float = 0.0
    latency_per_token: float = 0.0
    latency_per_prompt_token: float = 0.0
    slots: int = 0
    seed: int = 0
    faults: str = ""
    model: str = "policy"
    max_model_len: int = 32_768
    drift: float = 0.2
    dev_mode: bool = True
    scale_out: bool = True
    only_chat: bool = False
    poison: str = ""
    says: str = ""


@dataclass
class Running:
    """A server in this process. `engine`, `face` and `faults` may be looked at and changed by a test."""

    url: str
    engine: Engine
    face: Face
    faults: Faults
    _runner: web.AppRunner

    async def stop(self) -> None:
        await self._runner.cleanup()


async def start(
    options: Options, port: int = 0, host: str = "127.0.0.1", on_exit: Callable[[], None] = lambda: None
) -> Running:
    """Serve in the running loop; port 0 takes a free one. Raises ConfigError for faults that mean nothing."""
    try:
        faults = Faults(options.faults)
    except ValueError as error:
        raise ConfigError(f"--faults {options.faults}: {error}") from None
    rendering = Rendering(options.tokenizer)
    speech = Speech(rendering, options.answers, options.p_correct, options.drift, options.seed, options.says)
    pace = Pace(
        latency=options.latency, per_token=options.latency_per_token,
        per_prompt_token=options.latency_per_prompt_token, slots=options.slots,
    )  # fmt: skip
    engine = Engine(speech, pace, options.poison)
    face = Face(
        engine, model=options.model, window=options.max_model_len, faults=faults, dev_mode=options.dev_mode,
        scale_out=options.scale_out, only_chat=options.only_chat, on_exit=on_exit,
    )  # fmt: skip
    runner = web.AppRunner(face.app(), access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, host, port, backlog=4096)
    await site.start()
    taken = runner.addresses[0][1]
    return Running(f"http://{bracketed(host)}:{taken}", engine, face, faults, runner)


@dataclass
class Launched:
    """A server process started by `launch`; it ends with the process that started it."""

    url: str
    process: subprocess.Popen[bytes]

    def stop(self, timeout: float = 5.0) -> None:
        """End the process; safe twice."""
        if self.process.stdin:
            self.process.stdin.close()
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def launch(folder: Path, *arguments: str) -> Launched:
    """Start a server process with these command-line arguments; `folder` takes its port file and its log.

    Blocks until it listens. Raises PolicyError with the log's end when it does not come up.
    """
    port_file, log_file = folder / "scripted.port", folder / "scripted.log"
    port_file.unlink(missing_ok=True)
    command = [sys.executable, "-P", "-m", "workers.policy.scripted"]
    command += ["--port-file", str(port_file), "--tied", *arguments]
    with log_file.open("wb") as output:
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True)
    until = time.monotonic() + START_SECONDS
    while not port_file.exists():
        if process.poll() is not None or time.monotonic() > until:
            process.kill()
            process.wait()
            tail = log_file.read_text(errors="replace")[-2000:]
            raise PolicyError(f"the scripted policy server did not start (exit code {process.returncode}): {tail}")
        time.sleep(0.02)
    return Launched(f"http://127.0.0.1:{int(port_file.read_text())}", process)


async def _serve(options: Options, port: int, port_file: Path | None, tied: bool) -> None:
    over = asyncio.Event()
    running = await start(options, port, on_exit=over.set)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    if tied:
        threading.Thread(target=_until_stdin_closes, args=(loop, over), daemon=True).start()
    log.warning("%s, at %s", NAME, running.url)
    if port_file is not None:
        beside = port_file.with_suffix(".part")
        beside.write_text(running.url.rsplit(":", 1)[1])
        os.replace(beside, port_file)
    await over.wait()
    await running.stop()


def _until_stdin_closes(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
    while os.read(0, 4096):
        pass
    with contextlib.suppress(RuntimeError):  # the loop has ended already, by a signal
        loop.call_soon_threadsafe(over.set)


@click.command(help=f"{NAME}: speaks vLLM's HTTP interface with answers looked up beforehand.")
@click.option("--port", default=0, show_default=True, help="0 takes a free one.")
@click.option("--tokenizer", required=True, help="Folder with tokenizer.json.")
@click.option("--answers", type=click.Path(exists=True, dir_okay=False), help="JSON: question -> answer or messages.")
@click.option("--p-correct", default=0.6, show_default=True, help="Chance of the right answer.")
@click.option("--latency", default=0.0, show_default=True, help="Seconds before the first token.")
@click.option("--latency-per-token", default=0.0, show_default=True, help="Seconds for each further token.")
@click.option("--latency-per-prompt-token", default=0.0, show_default=True, help="Seconds for each that is not cached.")
@click.option("--slots", default=0, show_default=True, help="Calls that run at once; the others wait. 0 = all run.")
@click.option("--dev-mode/--no-dev-mode", default=True, show_default=True, help="Whether it has a control side.")
@click.option("--scale-out/--no-scale-out", default=True, show_default=True, help="Whether it has the token path.")
@click.option("--only-chat", is_flag=True, help="Be an engine of NeMo RL: chat completions that take a prefix.")
@click.option("--poison", default="", help="For tests: a question that kills the engine.")
@click.option("--seed", default=0, show_default=True)
@click.option("--faults", default="", help="For tests, e.g. 500:0.1,drop*2.")
@click.option("--drift", default=0.2, show_default=True, help="Share of replies in an unusual tokenisation.")
@click.option("--model", default="policy", show_default=True, help="Name of the model that requests give.")
@click.option("--max-model-len", default=32_768, show_default=True, help="Most tokens of prompt and completion.")
@click.option("--port-file", type=click.Path(path_type=Path), help="Where to write the port, once it listens.")
@click.option("--tied", is_flag=True, help="End when standard input closes.")
def main(port: int, answers: str | None, port_file: Path | None, tied: bool, **named: Any) -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    try:
        known = json.loads(Path(answers).read_text(encoding="utf-8")) if answers else {}
        asyncio.run(_serve(Options(answers=known, **named), port, port_file, tied))
    except (ConfigError, OSError, ValueError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
