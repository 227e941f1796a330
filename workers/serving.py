"""`rollout serve`: a vLLM of our own, registered in the line for as long as it generates."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.backends import SEEN_SECONDS, Backend, Backends, backend_id
from pipeline.config import TRAINED, Config
from pipeline.engine import Engine
from pipeline.engine_calls import EngineError
from pipeline.errors import ConfigError, LineError, PolicyError
from pipeline.registration import Registration, looked_at
from pipeline.weights import bring_up
from workers import scheduler
from workers.listening import Place, place
from workers.vllm_process import Process

log = logging.getLogger(__name__)

FLAGS = ("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--scheduling-policy", "priority")
"""What the line needs of vLLM: token in, token out; logprobs of the distribution that was sampled from; priorities."""

LOOK_SECONDS = 0.5

MISSES = 2
"""Looks in a row at which nothing was generated: it hangs."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """What to serve, and where. `host`: address to listen on, "" for the one that reaches Redis; `port` 0: a free one.

    `advertise`: the URL by which workers reach it, "" for host and port. `version`: of the weights in `model`, where it
    is not 0. `policy`: whose server it is. `arguments`: vLLM's own, after ours.
    """

    model: str
    program: str = "vllm"
    id: str = ""
    host: str = ""
    port: int = 0
    advertise: str = ""
    version: int | None = None
    policy: str = TRAINED
    arguments: Sequence[str] = ()


class Serving:
    """One run of `rollout serve`. `config` names a Redis; `backends` is its registry."""

    def __init__(self, config: Config, backends: Backends, options: Options, said: Callable[[Backend], None]) -> None:
        self._config, self._backends, self._options, self._said = config, backends, options, said
        at = place(config, "vLLM", host=options.host, port=options.port, advertise=options.advertise)
        self._address, self._url = at.near, at.far
        self._command = _command(config, options, at)
        self._told = asyncio.Event()
        self._signals: list[int] = []
        self._process: Process | None = None
        self._refused = ""
        self._grace = config.limits.grace

    async def run(self) -> int:
        """Serve until told to stop: the signal's number. Raises PolicyError when vLLM ends or hangs."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        process = self._process = Process(self._command)
        asking = asyncio.create_task(self._ask_scheduler())
        try:
            async with Engine(self._address, timeout=self._config.policy.probe_timeout) as engine:
                why = await self._serve(process, engine)
        finally:
            asking.cancel()
            await process.stop()
        if why:
            raise PolicyError(f"{why}. Its log ended with:\n{process.tail()}")
        return self._signals[0]

    async def _ask_scheduler(self) -> None:
        """Slurm kills a job KillWait after SIGTERM, whatever limits.grace says: the server is signed off before."""
        if scheduler.job():
            self._grace = (await scheduler.ask()).grace(self._grace)

    def _signalled(self, number: int) -> None:
        """The first signal: end in good order; the second: at once."""
        self._signals.append(number)
        self._told.set()
        if len(self._signals) > 1 and self._process is not None:
            self._process.kill()

    async def _serve(self, process: Process, engine: Engine) -> str:
        """Why it can't go on; empty when it was told to stop."""
        backend = await self._until_it_generates(process, engine)
        if backend is None:
            return self._over(process)
        owner = f"serve-{socket.gethostname()}-{os.getpid()}"
        registration = Registration(
            self._config, backend, owner, alive=lambda: process.code is None, policy=self._options.policy
        )
        await registration.open()
        try:
            beginning = asyncio.create_task(self._begin(process, backend, engine))
            why = await self._watch(process, engine, backend)
            beginning.cancel()
            if not why:
                await self._drain(process, engine, registration.id)
            return why
        finally:
            await registration.close()

    async def _until_it_generates(self, process: Process, engine: Engine) -> Backend | None:
        """What was started, once one token came of it; None when it ended before, or we are told to."""
        options = self._options
        id = options.id or backend_id(self._url)
        tokenizer = str(Path(options.model).resolve()) if Path(options.model, "tokenizer.json").is_file() else ""
        while not await self._pause(process, LOOK_SECONDS):
            if not await engine.healthy():
                continue
            try:
                found = await looked_at(engine, id=id, tokenizer=tokenizer, version=options.version)
            except EngineError as error:
                if error.fault in ("misfit", "refused"):
                    raise
                log.info("vLLM answers but does not generate yet: %s", error)
                continue
            return replace(found, url=self._url)
        return None

    async def _begin(self, process: Process, backend: Backend, engine: Engine) -> None:
        """Load the weights in force, where the line knows their folder (else it waits for the next update); say it.

        A vLLM that does not take them is ended.
        """
        try:
            await bring_up(self._backends, backend.id, engine)
            view = await self._backends.view()
            backend = next((found for found in view.backends if found.id == backend.id), backend)
        except LineError as error:
            if isinstance(error, EngineError) and error.fault in ("refused", "dead"):
                self._refused = (
                    f"vLLM can't load the weights in force; is {self._options.model} of their model? {error}"
                )
                process.kill()  # what a broken load leaves can't be trusted
                return
            log.warning("the weights in force can't be loaded now, a RUN worker tries again: %s", error)
        self._said(backend)

    async def _watch(self, process: Process, engine: Engine, backend: Backend) -> str:
        """Look at it until it is over; why it can't go on, empty when we are told to stop."""
        worked, misses, why = -1, 0, ""
        while not await self._pause(process, self._config.policy.probe_every):
            try:
                before, worked = worked, await engine.generated()
                if worked == before:
                    await engine.probe(backend.model, backend.endpoint)
                    worked = await engine.generated()
                misses = 0
            except EngineError as error:
                if error.fault == "overload" or await _paused(engine):
                    log.debug("vLLM is paused or sends calls away, it does not hang: %s", error)
                    continue
                misses, why = misses + 1, str(error)
                log.warning("vLLM generated nothing (%d of %d looks): %s", misses, MISSES, error)
            if misses >= MISSES:
                return f"vLLM hangs: {why}"
        return self._over(process)

    def _over(self, process: Process) -> str:
        return "" if self._told.is_set() else self._refused or f"vLLM ended with exit code {process.code}"

    async def _drain(self, process: Process, engine: Engine, id: str) -> None:
        """No new calls; those in flight may end within limits.grace, or what Slurm leaves of it."""
        loop = asyncio.get_running_loop()
        until = loop.time() + self._grace
        try:
            await self._backends.note(id, drained=True)
            seen = loop.time() + (SEEN_SECONDS if (await self._backends.view()).workers else 0.0)
            while loop.time() < until and process.code is None:
                if loop.time() >= seen and not await engine.queued():
                    return
                await asyncio.wait({process.ended}, timeout=LOOK_SECONDS)
        except LineError as error:
            log.warning("calls in flight are not waited for: %s", error)
            return
        log.warning("calls are still in flight after %g s of grace (limits.grace): they are cut off", self._grace)

    async def _pause(self, process: Process, seconds: float) -> bool:
        """Whether it is over, by vLLM's end or by a signal, within so long."""
        told = asyncio.ensure_future(self._told.wait())
        await asyncio.wait({told, process.ended}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        told.cancel()
        return self._told.is_set() or process.code is not None


async def _paused(engine: Engine) -> bool:
    try:
        return await engine.is_paused()
    except EngineError:
        return False


def _command(config: Config, options: Options, at: Place) -> list[str]:
    """vLLM's command line; what the user adds comes last and wins."""
    if options.model.startswith(("/", ".", "~")) and not Path(options.model).exists():
        raise ConfigError(f"no model lies in {options.model}: give a folder, or a name that vLLM can fetch")
    program = shutil.which(options.program)
    if program is None:
        raise ConfigError(
            f"{options.program} is no program here: give vLLM's own by --vllm or policy.vllm (it may lie in another "
            "virtual environment: /path/to/bin/vllm)"
        )
    where = ("--host", at.listen, "--port", str(at.port))
    named = ("--served-model-name", config.policy_of(options.policy).model, *where)
    return [program, "serve", options.model, *named, *FLAGS, *options.arguments]
