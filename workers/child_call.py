"""What a child does: one method of a handler, one function, or a whole stage of a rollout that must run alone.

Request and reply are length-prefixed msgpack maps. Errors travel as their kind and a sentence; no class is ever rebuilt
from a name that the other side sent.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import struct
import traceback
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import handlers
from pipeline import wire
from pipeline.config import Config
from pipeline.connection import connect
from pipeline.envelope import SCHEMA, Envelope, Payload, Stage, Task, from_map, to_map
from pipeline.errors import (
    EnvelopeError,
    EvaluationTimeout,
    Fatal,
    HandlerError,
    LineError,
    Retryable,
    SandboxGone,
    Stale,
    WorkerLost,
)
from pipeline.interfaces import Reward
from pipeline.log import AttemptLog
from pipeline.queue import Queue
from workers.handler_call import as_reward, collected, context, wrapped
from workers.job import Done, Job
from workers.stages import process

_LENGTH = struct.Struct("<Q")


def frame(value: Any) -> bytes:
    data = wire.pack(value)
    return _LENGTH.pack(len(data)) + data


def _map(message: Task | Envelope | Payload) -> dict[str, Any]:
    """Between a worker and its child, which are of one version: the line's number does not matter."""
    return to_map(message, SCHEMA)


def job_to_map(job: Job) -> dict[str, Any]:
    about: dict[str, Any] = {"stage": job.stage.value, "id": job.id, "token": job.token, "attempt": job.attempt}
    about |= {"place": job.place, "made": job.made, "late": job.late}
    return {**about, "envelope": _map(job.envelope), "task": _map(job.task), "payload": _map(job.payload)}


def job_from_map(value: dict[str, Any]) -> Job:
    return Job(
        stage=Stage(value["stage"]),
        id=value["id"],
        token=value["token"],
        attempt=value["attempt"],
        envelope=from_map(Envelope, value["envelope"]),
        task=from_map(Task, value["task"]),
        payload=from_map(Payload, value["payload"]),
        place=value["place"],
        made=value["made"],
        late=value["late"],
    )


def reward_to_map(reward: Reward | None) -> dict[str, Any] | None:
    return {"value": reward.value, "parts": reward.parts, "evidence": reward.evidence} if reward else None


def reward_from_map(value: dict[str, Any] | None) -> Reward | None:
    return Reward(value=value["value"], parts=value["parts"], evidence=value["evidence"]) if value else None


def done_from_map(value: dict[str, Any]) -> Done:
    return Done(
        envelope=from_map(Envelope, value["envelope"]),
        payload=from_map(Payload, value["payload"]) if value["payload"] else None,
        reward=reward_from_map(value["reward"]),
        restart=value["restart"],
    )


def _done_to_map(done: Done) -> dict[str, Any]:
    return {
        "envelope": _map(done.envelope),
        "payload": _map(done.payload) if done.payload else None,
        "reward": reward_to_map(done.reward),
        "restart": done.restart,
    }


def _method(request: dict[str, Any], log: AttemptLog) -> dict[str, Any]:
    job = job_from_map(request["job"])
    handler = handlers.load(job.task.handler, request["path"])
    ctx = context(job, handler, log, request["max_turns"], Path(request["artifacts"]) if request["artifacts"] else None)
    try:
        answer = getattr(handler, request["method"])(ctx)
    except (Retryable, Fatal, Stale):
        raise
    except (Exception, SystemExit) as error:
        raise wrapped(job.task.handler, job.stage, error, log) from error
    reward = as_reward(job, answer) if request["method"] == "eval" else None
    return {"payload": _map(collected(job, ctx)), "reward": reward_to_map(reward)}


def _function(request: dict[str, Any], log: AttemptLog) -> dict[str, Any]:
    function = handlers.function_of(request["function"], request["path"])
    try:
        return {"result": function(*request["args"])}
    except (Retryable, Fatal, Stale):
        raise
    except (Exception, SystemExit) as error:
        raise wrapped(request["handler"], Stage(request["job"]["stage"]), error, log) from error


async def _stage(request: dict[str, Any], log: AttemptLog) -> dict[str, Any]:
    from workers.children import Children
    from workers.clock import WorkingClock
    from workers.workshop import close, open_workshop

    config = Config.model_validate(request["config"])
    config._source = Path(request["source"]) if request["source"] else None  # relative paths start at its folder
    job = job_from_map(request["job"])
    async with AsyncExitStack() as stack:
        queue: Queue | None = None
        name = f"{request['worker']}/{job.id}"
        if request["worker"]:  # it has its own look at the policy servers' registry, and so at the weights in force
            queue = Queue(await stack.enter_async_context(connect(config, name=name)), config)
        shop = await open_workshop(config, request["path"], children=False, queue=queue, worker=name)
        stack.push_async_callback(close, shop)
        calls = Children(config, request["path"])  # what it computes must be as easy to kill here as in a worker
        stack.callback(calls.close)
        shop.compute = calls.function
        return _done_to_map(await process(job, shop, log, WorkingClock(request["limit"])))


def answer(request: dict[str, Any]) -> dict[str, Any]:
    """The reply to one request: a result, or {"error": sentence, "kind": ..., "log": ...}."""
    log = AttemptLog(logging.getLogger("handler"), rollout=request["job"]["id"])
    try:
        if "config" in request:
            result = asyncio.run(_stage(request, log))
        else:
            result = (_function if "function" in request else _method)(request, log)
        return {**result, "log": log.tail}
    except LineError as error:
        told: dict[str, Any] = {"error": str(error), "kind": error.kind, "log": log.tail}
        if isinstance(error, EvaluationTimeout):
            told["late"] = error.evidence
        return {**told, "gone": isinstance(error, SandboxGone)}
    except Exception as error:  # the far side can't see our traceback otherwise
        log.keep(traceback.format_exc())
        return {"error": f"{type(error).__name__}: {error}", "kind": HandlerError.kind, "log": log.tail}


def serve(sock: socket.socket, told: Sequence[int] = ()) -> None:
    """Read one request, write one reply. `told`: signals to end that have come; there is no result then."""
    size = _LENGTH.unpack(_exactly(sock, _LENGTH.size))[0]
    request = wire.unpack(_exactly(sock, size))
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    reply = answer(request)
    if told:  # what the handler started got the signal too and may have died of it: its score is none
        why = f"signal {told[0]} reached the handler's process while it ran"
        reply = {"error": why, "kind": WorkerLost.kind, "log": reply["log"]}
    try:
        answered = frame(reply)
    except EnvelopeError as error:
        what = request.get("function") or request.get("method") or request["job"]["stage"]
        why = f"what {what} gives back can't leave its process: {error}"
        answered = frame({"error": why, "kind": HandlerError.kind, "log": reply["log"]})
    sock.sendall(answered)


def _exactly(sock: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = sock.recv(min(size - len(parts), 1 << 20))
        if not part:
            raise EOFError("the worker closed the call")
        parts += part
    return bytes(parts)
