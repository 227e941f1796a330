"""What an evaluation may need, and what becomes of one that does not end: by the line's real workers."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import handlers
from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.inspect import attempts_of
from tests.integration.crew import HANDLERS, all_of, configured, serving
from tests.services import RedisService


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


async def test_a_function_runs_in_a_child_that_can_be_killed(line: Any) -> None:
    client, config = line
    async with serving(config):
        (rollout,) = await all_of(client, [task("Computes")])
        assert rollout.evidence == {"doubled": b"abab", "apart": True, "late": "killed"}, rollout
        assert [item["stage"] for item in rollout.attempts].count("eval") == 2
        (first,) = [item for item in rollout.attempts if item["stage"] == "eval" and item["outcome"] == "failed"]
        assert first["kind"] == "grader" and "raised KeyError: 'boom'" in first["error"]


@pytest.mark.parametrize(
    ("timeout", "valid", "late", "outcome"),
    [
        ("mask", True, 9, "failed"),
        ("zero", False, 9, "failed"),
        ("zero", True, 9, "scored"),
        ("zero", True, 1, "scored"),
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
