"""The one worker loop of all three stages: claim, decode, process, commit; else retry, else bury."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import os
import signal
import socket
import time
from typing import Any

import handlers
from pipeline.arrival import arrived
from pipeline.config import Config
from pipeline.connection import connect, connect_sync
from pipeline.envelope import Stage
from pipeline.errors import LineError, NeedsPlace, PayloadFolderAway, RedisUnavailable, Retryable, Stale, WorkerLost
from pipeline.leases import Claim
from pipeline.line_schema import package_version
from pipeline.queue import Queue
from workers import scheduler
from workers.attempt import Attempt
from workers.children import Children
from workers.claims import Claims, worker_name
from workers.ending import Ending
from workers.gauges import watch_lanes, watch_loop
from workers.hosting import Hosting
from workers.job import Done
from workers.metrics import Metrics
from workers.stages import Workshop
from workers.upkeep import Held, Upkeep
from workers.workshop import close, handlers_path, open_workshop

log = logging.getLogger(__name__)

FIRST_STEPS = 4
"""Attempts that begin in one turn of the event loop: a whole batch of long first steps would hold it."""


class Worker:
    """One process that serves one stage with `slots` rollouts at a time."""

    def __init__(
        self, config: Config, stage: Stage, slots: int, *, burst: bool = False, metrics: Metrics | None = None
    ) -> None:
        self.config = config
        self.stage = stage
        self.slots = slots
        self.burst = burst
        self.name = worker_name(stage.value)
        self.host = socket.gethostname()
        self.version = package_version()
        self.started = time.time()
        self.metrics = metrics or Metrics(stage.value)
        self.running: dict[str, Attempt] = {}
        self.shop: Workshop
        self.queue: Queue
        self.claims: Claims
        self.upkeep: Upkeep
        self.hosting = Hosting(config)
        self.ending = Ending(config.limits.grace, self._begin_to_end, self._give_up)
        self._slot_free = asyncio.Event()
        self._tasks: set[asyncio.Task[None]] = set()

    # -- life --------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until told to stop, or, with `burst`, until nothing is left. Raises RedisUnavailable, ConfigError.

        Raises TooOld where the line's schema is above what this version reads: at once, or, when it is raised
        meanwhile, after what was in work.
        """
        client, bell = connect(self.config), connect(self.config, blocking=True)
        self.queue = Queue(client, self.config, patience=self.config.limits.outage)
        self.claims = Claims(self.queue, bell, self.stage, self.name, self.hosting, burst=self.burst)
        try:
            for warning in (await arrived(client, self.config)).warnings:
                log.warning("%s", warning)
            await self.queue.check_schema()
            await self.queue.check_files()
            await self._run()
        finally:
            with contextlib.suppress(OSError):
                await client.aclose()
                await bell.aclose()
        log.info("worker %s ends", self.name)

    async def _run(self) -> None:
        await self.ending.canary.start()  # before any other child
        try:
            await self._open_and_serve()
        finally:
            self.ending.canary.close()

    async def _open_and_serve(self) -> None:
        self.shop = await open_workshop(self.config, handlers_path(self.config), queue=self.queue, worker=self.name)
        self.metrics.watch(self.shop.policy.pool)
        if self.stage is Stage.RUN:
            self.shop.policy.pool.start()
        if self.stage is Stage.INIT:
            known = [*handlers.BUILT_IN, *self.config.handlers.load]
            await self.hosting.open(self.name, self.queue, self.shop, known, self.ending.canary)
        self.upkeep = Upkeep(
            connect_sync(self.config, blocking=True), self.queue, self.name,
            held=self._held, on_beat=self._heard, about=self.about, kill=self._kill_children,
            on_down=self._line_is_down,
        )  # fmt: skip
        self._loop = asyncio.get_running_loop()
        self.upkeep.start()
        helpers = [asyncio.create_task(watch_loop(self.upkeep, self.metrics))]
        if self.config.workers.metrics_port:
            helpers.append(asyncio.create_task(watch_lanes(self.queue, self.stage.value, self.metrics)))
        helpers.append(asyncio.create_task(self.queue.keep_removing()))
        if scheduler.job():
            helpers.append(asyncio.create_task(self.ending.ask_scheduler()))
        log.info("worker %s serves %s with %d slots", self.name, self.stage, self.slots)
        try:
            await self._warm_children()
            await self._serve()
            await self._drain()
            if not self.ending.stopping.is_set():
                self.claims.check()
        finally:
            for helper in helpers:
                helper.cancel()
            self.upkeep.stop()
            await asyncio.to_thread(self.upkeep.join, 2.0)
            await close(self.shop)

    async def _warm_children(self) -> None:
        """Where a known handler has a plain method for this stage, its child server starts now."""
        known = [self.shop.handler(name) for name in [*handlers.BUILT_IN, *self.config.handlers.load]]
        plain = [item for item in known if not inspect.iscoroutinefunction(getattr(item, self.stage.value))]
        if plain and isinstance(self.shop.children, Children):
            await self.shop.children.warm()

    def stop(self, why: str = "") -> None:
        """Claim nothing more; finish or give back within limits.grace. `why`: a few words for the log and the line."""
        self.ending.stop(why)

    def install_signals(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.ending.on_signal, number)

    def _begin_to_end(self) -> None:
        why = f" ({self.ending.why})" if self.ending.why else ""
        log.warning("asked to stop%s: nothing more is claimed, %d rollouts in work", why, len(self.running))
        if hasattr(self, "queue"):  # else the signal came before anything began
            self.queue.close_within(self.ending.grace)
        self._slot_free.set()

    def _give_up(self) -> None:
        """A signal reached all that this worker has started: all is given back, as a loss."""
        self.hosting.give_up()
        self._stop_all(self.ending.distrust)

    def _stop_all(self, why: str) -> None:
        for attempt in list(self.running.values()):
            attempt.stop(WorkerLost(f"worker {self.name} gave it back: {why}"))

    async def _drain(self) -> None:
        """Wait for what is in work; what has not ended after the grace time is given back as a loss."""
        await self.ending.wait(self._tasks)
        self._stop_all(self.ending.distrust or f"it was asked to stop, and {self.ending.grace:g} s of grace are over")
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=self.config.limits.swallow + self.config.redis.socket_timeout + 1)
        await self.hosting.drain(self.ending)

    # -- claiming ----------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        idle = False
        while not self.ending.stopping.is_set() and not self.claims.over:
            free = self.slots - len(self.running)
            if free <= 0 or self.upkeep.stalled or (self.stage is Stage.INIT and self.upkeep.memory_high):
                self._slot_free.clear()
                await self._wait_for_slot(None if free <= 0 else 0.2)
                continue
            wanted = min(free, self.config.workers.claim_batch)
            claims = await self.claims.claim(wanted, wait=idle)
            idle = len(claims) < wanted
            if self.ending.stopping.is_set():
                await self.claims.give_back(claims)
            else:
                for number, claim in enumerate(claims, 1):
                    self._begin(claim)
                    if number % FIRST_STEPS == 0:
                        await asyncio.sleep(0)
            idling = not claims and not self.running and self.hosting.empty  # what is hosted may come back to INIT
            if self.burst and idling and await self.claims.none_left():
                return
            await asyncio.sleep(0)

    async def _wait_for_slot(self, timeout: float | None) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._slot_free.wait(), timeout)

    # -- one rollout -------------------------------------------------------------------------------------------------

    def _begin(self, claim: Claim) -> None:
        attempt = Attempt(self, claim)
        self.hosting.begun(claim)
        self.running[claim.token] = attempt
        self.metrics.taken.inc()
        self.metrics.waiting.observe(claim.waited)
        self.metrics.running.set(len(self.running))
        task = asyncio.create_task(self._attempt(attempt))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attempt(self, attempt: Attempt) -> None:
        """All outcomes on one screen."""
        done: Done | None = None
        try:
            try:
                done = await attempt.work()
                status = await attempt.commit(done)
            except Stale as error:
                status = "STALE"
                attempt.log.warning("its lease is no longer ours (%s); what was done is dropped", error)
            except RedisUnavailable:
                raise
            except LineError as error:
                status = await attempt.fail(error)
                if isinstance(error, PayloadFolderAway):
                    self.claims.lost_files(error)
                if isinstance(error, NeedsPlace) and attempt.job is not None:
                    await self.queue.note_place(attempt.job.task.handler, True)
            except Exception as error:  # not of the tree, so ours: given up at once, not when the lease runs out
                attempt.log.exception("a fault of the worker itself")
                status = await attempt.fail(Retryable(f"the worker itself failed: {type(error).__name__}: {error}"))
            self._count(status)
        except RedisUnavailable as error:
            attempt.log.error("its result could not be written: %s; it will be done again elsewhere", error)
        except Exception:  # nothing may end here unseen: a rollout whose task died would keep its lease for ever
            attempt.log.exception("a fault of the worker itself; the lease is left to run out")
        finally:
            self._release(attempt)

    def _release(self, attempt: Attempt) -> None:
        if self.running.pop(attempt.claim.token, None) is not None:
            self.metrics.working.observe(attempt.clock.elapsed)
            self.metrics.running.set(len(self.running))
            self._slot_free.set()
        self.hosting.ended(attempt.claim)

    def abandon(self, attempt: Attempt) -> None:
        """Its coroutine swallowed the cancel: it is fenced, counted, and its slot opened again."""
        self.metrics.swallowed.inc()

    def _count(self, status: str) -> None:
        metrics = self.metrics
        counter = {
            "OK": metrics.committed, "READY": metrics.retried, "DELAYED": metrics.retried, "FAILED": metrics.dead,
            "CANCELLED": metrics.cancelled, "STALE": metrics.stale,
        }.get(status)  # fmt: skip
        if counter is not None:
            counter.inc()

    # -- what the heartbeat thread sees --------------------------------------------------------------------------------

    def _held(self) -> Held:
        return [(self.stage.value, a.claim.id, a.claim.token) for a in list(self.running.values()) if not a.overdue()]

    def _heard(self, held: Held, replies: list[str | int]) -> None:
        self.hosting.ring()
        bad = {triple[2]: reply for triple, reply in zip(held, replies, strict=True) if reply != 1}
        if bad:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nothing is left to tell
                self._loop.call_soon_threadsafe(self._told, bad)

    def _told(self, bad: dict[str, str | int]) -> None:
        for token, reply in bad.items():
            attempt = self.running.get(token)
            if attempt is not None:
                attempt.told(reply)

    def about(self) -> dict[str, Any]:
        """What this worker says of itself with each beat."""
        return {
            "stage": self.stage.value, "host": self.host, "pid": os.getpid(), "slots": self.slots,
            "running": len(self.running), "version": self.version, "started": self.started,
            "reads": self.queue.reads, "outdated": self.queue.outdated,
            "why_stopping": self.ending.why,
            "stopping": self.ending.stopping.is_set() or self.queue.outdated, **self.hosting.about(),
            "memory_high": self.upkeep.memory_high, "stalled": self.upkeep.stalled, "blind": self.claims.blind,
            "paused": next((a.clock.why for a in list(self.running.values()) if a.clock.why), ""),
            **({"policy": self.shop.policy.pool.about()} if self.stage is Stage.RUN else {}),
        }  # fmt: skip

    def _line_is_down(self) -> None:
        """Redis will not come back: the line was taken down, and nobody told us. There is nobody to give back to."""

        def end() -> None:
            self.stop("the line was taken down")
            self.ending.at_once.set()
            self.queue.close_within(0.0)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(end)

    def _kill_children(self) -> None:
        if isinstance(self.shop.children, Children):
            self.shop.children.kill_all()
