"""All that the line knows of one rollout, alive, finished or dead, gathered for `show` and `logs`."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from pipeline import inspect, letters, wire
from pipeline.envelope import Payload, Task, decode_compressed
from pipeline.errors import EnvelopeError, TaskError
from pipeline.queue import Queue
from pipeline.trajectory import Trajectory

FIELDS = (
    "group", "lane", "stage", "state", "owner", "losses", "deaths", "alone", "worked", "cancel", "restart", "outcome",
    "kind", "why", "at", "host", "exit", "log",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dossier:
    """`about`: JSON types (where, why, reward, ...). `trajectory` is None before RUN has ended, and after the ack."""

    about: dict[str, Any]
    attempts: list[dict[str, Any]]
    trajectory: Trajectory | None = None
    state: dict[str, Any] = field(default_factory=dict)


async def gather(queue: Queue, id: str) -> Dossier:
    """Everything about a rollout. Raises TaskError when the line has no record of it."""
    fields = await inspect.fields_of(queue, id)
    if fields:
        return await _of(queue, id, fields, await inspect.attempts_of(queue, id), letter=False)
    letter = await inspect.fields_of(queue, id, "letter")
    if letter:
        return await _of(queue, id, letter, letters.history(letter), letter=True)
    if await queue.execute("EXISTS", queue.key("gone", id)):
        raise TaskError(
            f"{id} was popped and acknowledged: the line has forgotten it, and keeps its id alone for "
            f"{queue.config.keep.gone_hours:g} h"
        )
    raise TaskError(
        f"the line {queue.config.line.name!r} has no record of a rollout {id!r}: `rollout ls STAGE` lists ids, "
        "which are GROUP.SAMPLE"
    )


async def _of(
    queue: Queue, id: str, fields: dict[str, bytes], attempts: list[dict[str, Any]], *, letter: bool
) -> Dossier:
    about = _about(id, fields)
    envelope = inspect.envelope_of(fields)
    if envelope is not None:
        about |= {
            "handler": envelope.handler,
            "sample": envelope.sample,
            "samples": envelope.samples,
            "retry_of": envelope.retry_of,
        }
    about["task"] = await _task(queue, about.get("group", ""))
    about |= await _where(queue, id, letter)
    if letter and "requeued" in fields:
        about["requeued"] = fields["requeued"].decode()
    about |= _result(fields)
    payload = await _payload(queue, id, fields)
    if payload is None:
        return Dossier(about=about, attempts=attempts)
    about["truncated"] = payload.truncated
    return Dossier(about=about, attempts=attempts, trajectory=payload.trajectory, state=payload.state)


def _about(id: str, fields: dict[str, bytes]) -> dict[str, Any]:
    """The hash as JSON types; times in seconds."""
    about: dict[str, Any] = {"id": id}
    about |= {name: fields[name].decode("utf-8", "replace") for name in FIELDS if fields.get(name)}
    about["worked"] = int(about.get("worked", 0)) / 1000
    about["losses"] = int(about.get("losses", 0))
    if "entered" in fields and "ended" in fields:
        about["seconds"] = (int(fields["ended"]) - int(fields["entered"])) / 1000
    return about


async def _where(queue: Queue, id: str, letter: bool) -> dict[str, Any]:
    """Where it is and why it waits, as one sentence."""
    if letter:
        return {
            "stage": "dead",
            "state": "dead",
            "now": "it failed; the record was popped; this is the dead letter's copy",
        }
    found = await inspect.where(queue, [id])
    return {"now": found[id].why} if id in found else {}


async def _task(queue: Queue, group: str) -> dict[str, Any] | None:
    data = await queue.read_task(group)
    if data is None:
        return None
    try:
        return decode_compressed(Task, data).data
    except EnvelopeError as error:
        return {"error": f"the task does not decode: {error}"}


def _result(fields: dict[str, bytes]) -> dict[str, Any]:
    if not fields.get("result"):
        return {}
    try:
        result = wire.unpack(fields["result"])
        found: dict[str, Any] = {name: result.get(name) for name in ("reward", "parts", "evidence")}
        return dict(json.loads(json.dumps(found, default=repr)))
    except EnvelopeError as error:
        return {"why": f"its result does not decode: {error}"}


async def _payload(queue: Queue, id: str, fields: dict[str, bytes]) -> Payload | None:
    token = fields.get("payload", b"").decode()
    data = await queue.read_payload(id, token) if token else None
    if data is None:
        return None
    try:
        return decode_compressed(Payload, data)
    except EnvelopeError:
        return None
