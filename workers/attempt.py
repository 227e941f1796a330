"""One lease's work in a worker: decode, process under limits, write the result, or say how it failed."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pipeline import wire
from pipeline.envelope import NEXT, Envelope, Payload, Stage, Task, decode, decode_compressed, encode, encode_compressed
from pipeline.errors import (
    Cancelled,
    EnvelopeError,
    LimitExceeded,
    LineError,
    NeedsPlace,
    OutOfTime,
    Stale,
    TaskError,
    WorkerLost,
)
from pipeline.inspect import attempts_of
from pipeline.leases import Claim, Failure
from pipeline.log import AttemptLog
from workers.children import Children
from workers.clock import WorkingClock
from workers.failures import failure_of, times_late
from workers.job import Done, Job
from workers.sandbox.stock import reference_text
from workers.stages import prepare, process

if TYPE_CHECKING:
    from workers.loop import Worker

logger = logging.getLogger("attempt")


class Attempt:
    """One lease of one rollout in this process."""

    def __init__(self, worker: Worker, claim: Claim) -> None:
        self.worker = worker
        self.claim = claim
        self.stage = worker.stage
        self.config = worker.config
        self.started = time.time()
        self.log = AttemptLog(
            logger, rollout=claim.id, stage=worker.stage.value, attempt=claim.attempt, worker=worker.name
        )
        self.clock = WorkingClock(getattr(self.config.limits, worker.stage.value), worker.upkeep.away)
        self.job: Job | None = None
        self._ended = False
        self._why: LineError | None = None
        self._stop: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    # -- from outside ------------------------------------------------------------------------------------------------

    def stop(self, why: LineError) -> None:
        """End the work; `why` is what `work` raises."""
        if self._why is None:
            self._why = why
            self._stop.set_result(None)

    def told(self, reply: str | int) -> None:
        """What the beat said of this lease: lost, or a cancel."""
        if reply == 0:
            self.stop(Stale("the beat found another token"))
        else:
            self.stop(Cancelled(str(reply)))

    def overdue(self) -> bool:
        """The limit is long over and the work still has not ended (a blocked event loop): its lease is not renewed.

        Work that has ended and waits to be written (Redis away, or full) keeps its lease, however long that takes.
        """
        return not self._ended and self.clock.remaining < -(self.config.limits.swallow + 5.0)

    # -- work --------------------------------------------------------------------------------------------------------

    async def work(self) -> Done:
        """Decode and process. Raises LineError: the limit, a cancel, a lost lease, or what the handler met."""
        try:
            done = await self._work()
        except (Stale, Cancelled, NeedsPlace):
            raise
        except Exception:
            await self._settled()
            raise
        finally:
            self._ended = True
        await self._settled()
        return done

    async def _settled(self) -> None:
        """Raises WorkerLost where a signal to the whole job may have ended what this attempt's processes did."""
        ending = self.worker.ending
        await ending.canary.settled()
        if ending.distrust:
            raise WorkerLost(f"worker {self.worker.name} gave it back: {ending.distrust}")

    async def _work(self) -> Done:
        self.job = await self._decode()
        self.clock.limit = self._limit(self.job)
        task = asyncio.create_task(self._process(self.job))
        either: list[asyncio.Future[Any]] = [task, self._stop]
        while not task.done() and self._why is None:
            await asyncio.wait(either, timeout=max(self.clock.remaining, 0.001), return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self.clock.remaining <= 0:
                self.stop(self._over())
        if task.done() and not task.cancelled():
            return task.result()
        task.cancel()
        await asyncio.wait({task}, timeout=self.config.limits.swallow)
        if not task.done():
            self.log.error("it goes on after its cancel: it is fenced off, and its slot is opened again")
            self.worker.abandon(self)
        elif not task.cancelled() and task.exception() is None and not isinstance(self._why, Stale | Cancelled):
            return task.result()  # it finished in the very moment: a result is worth more than the limit
        raise self._why or WorkerLost()

    def _limit(self, job: Job) -> float:
        """Working seconds of this stage: the task's own, else the config's; never more than is left of the total."""
        limits = job.task.limits
        try:
            stage = float(limits.get(self.stage.value, getattr(self.config.limits, self.stage.value)))
            total = float(limits.get("total", self.config.limits.total))
        except (TypeError, ValueError):
            raise TaskError(f"the task's limits are {limits}: each must be a number") from None
        return min(stage, max(0.001, total - self.claim.worked)) if total > 0 else stage

    def _over(self) -> LineError:
        worked = self.claim.worked + self.clock.elapsed
        total = float(self.job.task.limits.get("total", self.config.limits.total)) if self.job else 0.0
        if total and worked >= total:
            return OutOfTime(f"its {total:g} s of work over all stages are over (limits.total)")
        return LimitExceeded(f"{self.stage} worked for {self.clock.limit:g} s, its limit (limits.{self.stage})")

    async def _process(self, job: Job) -> Done:
        children = self.worker.shop.children
        if self.claim.alone and isinstance(children, Children):
            self.log.warning("two processes died with it in company: it runs alone in a child process")
            return await self._alone(children, await self._with_sandbox(job))
        return await process(job, self.worker.shop, self.log, self.clock)

    async def _alone(self, children: Children, job: Job) -> Done:
        """In a child, which has no Redis to ask whether the host of its sandbox still lives: that is watched here."""
        hosts, reference = self.worker.shop.hosts, job.envelope.sandbox
        working = asyncio.create_task(children.stage(job, self.clock.limit, self.log))
        tasks: list[asyncio.Task[Any]] = [working]
        if hosts is not None and reference is not None and self.stage is not Stage.INIT:
            tasks.append(asyncio.create_task(hosts.until_dead(reference)))
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            result: Done = (working if working in done else done.pop()).result()
            return result
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks, timeout=self.config.limits.swallow)

    async def _with_sandbox(self, job: Job) -> Job:
        """INIT's sandbox is made here, in the process that serves it, and not in the child that uses it first."""
        shop = self.worker.shop
        handler = shop.handler(job.task.handler)
        if self.stage is not Stage.INIT or not handler.acts:
            return job
        return replace(job, made=(await prepare(job, handler, shop)).reference)

    async def _decode(self) -> Job:
        claim, queue = self.claim, self.worker.queue
        envelope = decode(Envelope, claim.envelope)
        raw = await queue.read_task(envelope.group, claim.task)
        if raw is None:
            raise EnvelopeError(f"the task of group {envelope.group} is not there: nothing says what to do")
        payload = Payload()
        if claim.payload_token and self.stage is not Stage.INIT:  # back at INIT, it begins anew
            data = await queue.read_payload(claim.id, claim.payload_token, claim.payload)
            if data is None:
                raise EnvelopeError(f"the payload that {claim.payload_token} committed is not there")
            payload = decode_compressed(Payload, data)
        late = 0
        if self.stage is Stage.EVAL and claim.attempt > 1:
            late = times_late(await attempts_of(queue, claim.id))
        return Job(
            stage=self.stage, id=claim.id, token=claim.token, attempt=claim.attempt, envelope=envelope,
            task=decode_compressed(Task, raw), payload=payload, place=bool(claim.place),
            late=late,
        )  # fmt: skip

    # -- results -----------------------------------------------------------------------------------------------------

    async def commit(self, done: Done) -> str:
        """Write the payload, then finish the stage in one step. Raises Stale when the lease is no longer ours."""
        queue, claim = self.worker.queue, self.claim
        payload, written = None, False
        if done.payload is not None and (claim.payload_token or done.payload != Payload()):
            payload = encode_compressed(done.payload, queue.schema, self.config.payload.zstd_level)
            if not queue.rides(payload):
                await queue.write_payload(claim.id, claim.token, payload, self._life())
                payload, written = None, True
        status = "NOPAYLOAD"
        while status == "NOPAYLOAD":
            status = await queue.commit(
                self.stage.value, claim.id, claim.token, NEXT[self.stage].value,
                encode(done.envelope, queue.schema),
                payload=payload, written=written, restart=done.restart, sandbox=reference_text(done.envelope.sandbox),
                record=self._record("committed"), worked=self.clock.elapsed, result=self._result(done),
            )  # fmt: skip
            if status == "NOPAYLOAD" and done.payload is not None:  # it expired while Redis was away: write it again
                again = encode_compressed(done.payload, queue.schema, self.config.payload.zstd_level)
                await queue.write_payload(claim.id, claim.token, again, self._life())
        if status == "STALE":
            raise Stale("the commit was refused")
        return status

    def _life(self) -> float:
        return self.config.limits.outage + float(getattr(self.config.limits, self.stage.value))

    def _result(self, done: Done) -> bytes:
        reward = done.reward
        if self.stage is not Stage.EVAL or reward is None or self.job is None:
            return b""
        return wire.pack({
            "reward": float(reward.value), "parts": reward.parts, "evidence": reward.evidence,
            "truncated": self.job.payload.truncated,
        })  # fmt: skip

    async def fail(self, error: LineError) -> str:
        """Give the rollout back, send it round again, or end it: the one place where a failure's kind decides."""
        about = {"log": self.log.tail, "host": self.worker.host}
        failure = failure_of(error, self.stage, self.claim.attempt, self.job, self.config.retry, about)
        moved = isinstance(error, NeedsPlace)  # no attempt that anybody would want to hear of
        record = "" if moved else self._record("failed" if failure.mode != "back" else "given back", failure)
        worked = self.clock.elapsed
        status, attempts, losses = await self.worker.queue.fail(
            self.stage.value, self.claim.id, self.claim.token, failure, record=record, worked=worked
        )
        say = {
            "READY": "it is given out again now", "DELAYED": f"it is tried again in {failure.delay:g} s",
            "FAILED": "it ends as failed", "CANCELLED": "it ends as cancelled",
            "STALE": "but its lease is no longer ours", "AGAIN": "which the line knew already",
        }[status]  # fmt: skip
        level = logging.ERROR if status == "FAILED" else logging.INFO if status == "CANCELLED" else logging.WARNING
        level = logging.DEBUG if moved and status == "READY" else level
        self.log.log(level, "%s: %s; %s (attempts %d, losses %d)", failure.kind, failure.why, say, attempts, losses)
        return status

    def _record(self, outcome: str, failure: Failure | None = None) -> str:
        """This attempt for `rollout show`: JSON."""
        worker = self.worker
        record: dict[str, Any] = {
            "stage": self.stage.value, "attempt": self.claim.attempt, "worker": worker.name, "host": worker.host,
            "version": worker.version, "outcome": outcome, "started": round(self.started, 6),
            "seconds": round(time.time() - self.started, 6), "waited": self.claim.waited,
        }  # fmt: skip
        if self.job is not None:
            record["handler"] = worker.shop.digest(self.job.task.handler)
        if failure is not None:
            record |= {"kind": failure.kind, "error": failure.why, "exit_code": failure.exit_code}
        if self.log.sampled:
            record["tokens"] = self.log.sampled
        if self.log.tail:
            record["log"] = self.log.tail
        return json.dumps(record)
