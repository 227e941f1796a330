"""What an evaluation may need, and what becomes of one that does not end: by the line's real workers."""

from __future__ import annotations

import asyncio
import logging
import socket
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import handlers
from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Envelope, Payload, Stage, Task
from pipeline.inspect import attempts_of
from pipeline.log import AttemptLog
from tests.integration.crew import HANDLERS, all_of, configured, serving
from tests.services import RedisService
from workers.children import Children
from workers.job import Job


def task(handler: str, **named: Any) -> Task:
    return Task(handler=f"eval_handlers:{handler}", **named)


@pytest.fixture
async def line(redis_service: RedisService, tmp_path: Path) -> AsyncIterator[tuple[RolloutClient, Config]]:
    with tempfile.TemporaryDirectory(prefix="rs-") as root:  # a short path: sockets lie under it
        config = configured(
            redis_service, sandbox__root=f"{root}/s", artifacts__folder=str(tmp_path / "kept"), retry__backoff=0.05
        )
        async with RolloutClient(config=config) as client:
            yield client, config


async def test_only_eval_has_a_sandbox_and_it_is_the_tasks_own(line: Any, tmp_path: Path) -> None:
    client, config = line
    async with serving(config) as crew:
        found = await all_of(client, [task("Only", data={"text": text}) for text in ("one", "two")])
        assert crew["init"].hosting.host is None or not crew["init"].hosting.host.stock.live
    for rollout, text in zip(found, ("one", "two"), strict=True):
        kept = tmp_path / "kept" / config.line.name / rollout.id / "deep" / "note.txt"
        assert rollout.evidence == {"had": False, "seen": text, "kept": str(kept)}, rollout
        assert kept.read_bytes() == b"kept"


@pytest.mark.parametrize("alone", [False, True])
async def test_a_function_runs_in_a_child_that_can_be_killed(line: Any, alone: bool) -> None:
    """`alone`: in a child of the child that the whole stage runs in."""
    client, config = line
    (id,) = await client.enqueue([task("Computes")])
    if alone:
        await client.queue.execute("HSET", client.queue.key("r", id), "alone", "1")
    async with serving(config):
        (rollout,) = await client.pop(1, timeout=30)
        await client.ack([rollout])
        assert rollout.evidence == {"doubled": b"abab", "apart": True, "late": "killed"}, rollout
        assert [item["stage"] for item in rollout.attempts].count("eval") == 2
        (first,) = [item for item in rollout.attempts if item["stage"] == "eval" and item["outcome"] == "failed"]
        assert first["kind"] == "grader" and "raised KeyError: 'boom'" in first["error"]


async def test_no_kill_is_lost_where_the_child_server_is_busy(line: Any) -> None:
    """More calls end at once than its socket holds messages; each spins, and would do so for ever."""
    _, config = line
    children = Children(config, str(HANDLERS))
    job = Job(
        stage=Stage.EVAL, id="g.0", token="t", attempt=1, envelope=Envelope(id="g.0", group="g", handler="echo"),
        task=Task(handler="echo"), payload=Payload(),
    )  # fmt: skip
    log, spin = (
        AttemptLog(logging.getLogger("test"), rollout="g.0"),
        handlers.function_of("eval_handlers:spin", HANDLERS),
    )
    calls = [asyncio.create_task(children.function(job, log, spin, (), None)) for _ in range(30)]
    try:
        async with asyncio.timeout(30):
            while len(children._ends) < len(calls):
                await asyncio.sleep(0.01)
        assert children._server is not None and children._control is not None
        children._control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the kernel's least: some six messages
        server = psutil.Process(children._server.pid)
        server.suspend()
        for call in calls:
            call.cancel()
        await asyncio.wait(calls)
        server.resume()
        async with asyncio.timeout(10):
            while server.children():
                await asyncio.sleep(0.01)
    finally:
        children.close()


@pytest.mark.parametrize(
    ("timeout", "valid", "late", "outcome"),
    [
        ("mask", True, 9, "failed"),
        ("zero", False, 9, "failed"),
        ("zero", True, 9, "scored"),
        pytest.param("zero", True, 1, "scored", marks=pytest.mark.ci),
        ("mask", False, 1, "scored"),
    ],
)
async def test_an_evaluation_out_of_time_is_done_twice(
    line: Any, timeout: str, valid: bool, late: int, outcome: str
) -> None:
    """A second time-out is 0 only where the site says so and the gold passed here; it is no reward otherwise."""
    client, config = line
    name = "eval_handlers:Late"
    validated = {"line": config.line.name, "handler": handlers.digest_of(name, HANDLERS), "seconds": 1.0}
    async with serving(config.changed({"limits.eval_timeout": timeout})):
        asked = task("Late", data={"late": late}, validated=validated if valid else {**validated, "line": "elsewhere"})
        ids = await client.enqueue([asked])
        (rollout,) = await client.pop(1, timeout=30)
        history = [item for item in await attempts_of(client.queue, ids[0]) if item["stage"] == "eval"]
        assert rollout.outcome == outcome and len(history) == 2, (rollout, history)
        assert '"ran": 12, "passed": 11' in history[0]["log"]
        if late == 1:
            assert rollout.reward == 1.0
        elif outcome == "scored":
            assert rollout.reward == 0.0 and rollout.parts == {"timeout": 1.0}
            assert rollout.evidence == {"why": "the tests took longer than 5 s", "ran": 12, "passed": 11}
        else:
            assert rollout.reward is None and rollout.failure.kind == "limit" and rollout.failure.stage == "eval"
        await client.ack([rollout])
        assert not await audit(client.queue)


async def test_a_grader_that_broke_before_is_no_time_out(line: Any) -> None:
    """Of a plain method the evidence comes along too."""
    client, config = line
    name = "eval_handlers:LatePlainly"
    validated = {"line": config.line.name, "handler": handlers.digest_of(name, HANDLERS)}
    async with serving(config.changed({"limits.eval_timeout": "zero"})):
        (rollout,) = await all_of(client, [task("LatePlainly", validated=validated)])
    kinds = [item.get("kind", "") for item in rollout.attempts if item["stage"] == "eval"]
    assert kinds == ["grader", "limit", ""] and rollout.reward == 0.0, rollout
    assert rollout.evidence == {"why": "the tests took longer than 5 s", "ran": 12}


async def test_a_sandbox_that_a_task_can_not_have_ends_it_at_once(line: Any) -> None:
    client, config = line
    wrong = {
        "raises": "eval_handlers:Odd.sandbox_for raised KeyError: 'raises'",
        "nothing": "eval_handlers:Odd.sandbox_for gave None",
        "imagine": "the handler's `sandbox` can't be met: imagine",
    }
    async with serving(config):
        found = await all_of(client, [task("Odd", data={"does": does}) for does in wrong])
    for rollout, why in zip(found, wrong.values(), strict=True):
        assert (rollout.outcome, rollout.failure.kind) == ("failed", "handler") and why in rollout.failure.why, rollout
        assert len([item for item in rollout.attempts if item["stage"] == "eval"]) == 1


async def test_what_can_not_travel_to_a_child_is_told(line: Any) -> None:
    client, config = line
    async with serving(config):
        there, back = await all_of(client, [task("Unsent", data={"does": does}) for does in ("argument", "result")])
    assert there.failure.kind == back.failure.kind == "handler"
    assert "a child process can't be sent this: a set can't travel" in there.failure.why
    assert "what eval_handlers:pair gives back can't leave its process: a set can't travel" in back.failure.why


async def test_the_stages_own_limit_counts_as_well(line: Any) -> None:
    client, config = line
    async with serving(config):
        (rollout,) = await all_of(client, [task("Stuck", limits={"eval": 0.3})])
        assert (rollout.outcome, rollout.failure.kind, rollout.reward) == ("failed", "limit", None)
        assert len([item for item in rollout.attempts if item["stage"] == "eval"]) == 2


async def test_modules_are_imported_before_the_first_call_that_needs_them(line: Any) -> None:
    """One that is not installed spoils nothing: the call that uses it would say so."""
    client, config = line
    async with serving(config):
        (rollout,) = await all_of(client, [Task(handler="preload_handlers:Preloads")])
        assert rollout.evidence == {"there": ["colorsys"]}, rollout
