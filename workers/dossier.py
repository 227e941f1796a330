"""All that the line knows of one rollout, alive, finished or dead, gathered for `show` and `logs`."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from pipeline import inspect, letters, wire
from pipeline.config import Config
from pipeline.envelope import Payload, Task, decode_compressed
from pipeline.errors import EnvelopeError, PayloadFilesAway, TaskError
from pipeline.queue import Queue
from pipeline.trajectory import Trajectory
from workers.handler_call import artifacts_of

MOST_FILES = 100

HAD_RUN = "what had run: "
"""Begins the line in the log of an evaluation that was out of time."""

FIELDS = (
    "group", "lane", "stage", "state", "owner", "losses", "deaths", "alone", "worked", "cancel", "restart", "outcome",
    "kind", "why", "at", "host", "exit", "log",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Dossier:
    """`about`: JSON types (where, why, reward, ...). `trajectory` is None before RUN has ended, and after the ack.

    `artifacts`: the rollout's files that are kept and can be seen from this machine.
    """

    about: dict[str, Any]
    attempts: list[dict[str, Any]]
    trajectory: Trajectory | None = None
    state: dict[str, Any] = field(default_factory=dict)
    artifacts: list[Path] = field(default_factory=list)

    @property
    def evidence(self) -> dict[str, Any]:
        """That of the reward; of an evaluation that was out of time what had run, as its log tells it."""
        told = had_run(self.about.get("log", ""))
        told.pop("why", None)  # which the failure says itself
        return self.about.get("evidence") or told

    @property
    def log(self) -> str:
        """The end of a failure's log, without what `evidence` has of it."""
        lines = str(self.about.get("log", "")).splitlines()
        return "\n".join(line for line in lines if not (line.startswith(HAD_RUN) and had_run(line)))


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
    kept = await asyncio.to_thread(artifacts, queue.config, id)
    if payload is None:
        return Dossier(about=about, attempts=attempts, artifacts=kept)
    about["truncated"] = payload.truncated
    return Dossier(about=about, attempts=attempts, trajectory=payload.trajectory, state=payload.state, artifacts=kept)


def artifacts(config: Config, id: str) -> list[Path]:
    """The first files in a rollout's folder of artifacts; links are left out: they may lead anywhere."""
    folder = artifacts_of(config, id)
    if folder is None or not folder.is_dir():
        return []
    found = (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())
    return [path for path in islice(found, MOST_FILES) if not path.name.startswith(".")]


def had_run(log: str) -> dict[str, Any]:
    """The evidence that an evaluation left in its log when it was out of time for good; {} where there is none."""
    line = log.rpartition(HAD_RUN)[2].partition("\n")[0] if HAD_RUN in log else ""
    try:
        found = json.loads(line) if line else {}
    except ValueError:  # the log is cut, and so is this line
        return {}
    return found if isinstance(found, dict) else {}


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
    try:
        data = await queue.read_task(group)
        return decode_compressed(Task, data).data if data is not None else None
    except (EnvelopeError, PayloadFilesAway) as error:
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
    try:
        data = await queue.read_payload(id, token) if token else None
        return decode_compressed(Payload, data) if data is not None else None
    except (EnvelopeError, PayloadFilesAway):
        return None
