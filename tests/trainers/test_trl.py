"""TRL's GRPO on rollouts that the line plays against a real vLLM: the example in docs/examples/trl_grpo, watched.

`watched_train.py` writes down what the trainer computes its loss on; a proxy before vLLM writes down what was sampled.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.trainers import trainers
from tests.vllm import servers
from tests.vllm.recorder import Recorder, recording
from tests.vllm.servers import Served

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "docs" / "examples" / "trl_grpo"
WATCHED, TWO_RANKS = Path(__file__).parent / "watched_train.py", Path(__file__).parent / "two_ranks.py"
ROWS = 32
"""Rollouts of one step of the example."""

GAP_MEAN, GAP_WORST = 0.02, 0.1
FULL_STEPS = 40


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The tiny model in float32, as the trainer has it."""
    trainers.require()
    folder = tmp_path_factory.mktemp("tiny")
    server = servers.launch("tiny", folder, dtype="float32")
    try:
        yield servers.ready(server)
    finally:
        server.stop()


class Run:
    """One run of the example, and what its two records say."""

    def __init__(self, out: Path, proxy: Recorder) -> None:
        self.out, self.proxy = out, proxy
        self.output = ""

    def lines(self, name: str) -> list[Any]:
        """Of all processes' files: by process, then in the order in which they were written."""
        files = sorted(self.out.glob(f"{name}.jsonl"))
        return [json.loads(line) for file in files for line in file.read_text().splitlines()]

    @property
    def steps(self) -> list[dict[str, Any]]:
        return self.lines("steps")

    def trained(self, rank: int | str = "*") -> list[dict[str, Any]]:
        """Rows on which a loss was computed."""
        return [row for loss in self.lines(f"trained-{rank}") for row in loss]

    @property
    def pids(self) -> dict[str, int]:
        found: dict[str, int] = json.loads((self.out / "processes.json").read_text())
        return found


@contextlib.asynccontextmanager
async def running(
    server: Served, out: Path, script: Path, *options: str
) -> AsyncIterator[tuple[Run, asyncio.subprocess.Process]]:
    """The example with this server as its policy, behind a proxy; it has ended when the block has."""
    async with recording(server.url) as proxy:
        command = [
            sys.executable, str(EXAMPLE / "run.py"), "--model", str(server.model), "--policy", proxy.url,
            "--trainer", str(trainers.PYTHON), "--script", str(script), "--out", str(out), "--", *options,
        ]  # fmt: skip
        environment = {name: value for name, value in os.environ.items() if not name.startswith("ROLLOUT_")}
        environment["ROLLOUT_POLICY__MODEL"] = servers.MODEL
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, env=environment
        )
        try:
            yield Run(out, proxy), process
        finally:
            if process.returncode is None:
                process.terminate()
            await process.wait()


async def play(
    server: Served,
    out: Path,
    *options: str,
    script: Path = WATCHED,
    meanwhile: Callable[[Run], Awaitable[None]] | None = None,
) -> Run:
    """`options`: of train.py."""
    async with running(server, out, script, *options) as (run, process):
        troubles = asyncio.create_task(meanwhile(run)) if meanwhile else None
        output, _ = await process.communicate()
        run.output = output.decode()
        if troubles is not None:
            assert troubles.done(), f"the run ended before its troubles came:\n{run.output}"
            await troubles
        assert process.returncode == 0, run.output
        return run


def check_tokens(run: Run, count: int) -> None:
    """Every token that was trained on was sampled by the server for that rollout; none is missing, none came twice."""
    rows = [row for call in run.lines("rows-*") for row in _by_row(call)]
    assert len(rows) == count
    assert len({row["rollout_id"] for row in rows}) == len(rows), "a rollout was handed to the trainer twice"
    sampled: Counter[tuple[tuple[int, ...], tuple[int, ...]]] = Counter()
    for row in rows:
        assert row["outcome"] == "scored", row
        answers = [call for call in run.proxy.of(row["rollout_id"]) if call.status == 200 and call.answer]
        (match,) = [call for call in answers if call.ids == row["completion_ids"]]
        assert match.versions is not None
        assert {version for version, _, _ in match.versions} == {row["version_min"]} == {row["version_max"]}
        sampled[tuple(match.prompt), tuple(match.ids)] += 1
    assert all(set(row["mask"]) == {1} for row in run.trained())
    assert Counter((tuple(row["prompt"]), tuple(row["completion"])) for row in run.trained()) == sampled


def _by_row(call: dict[str, list[Any]]) -> list[dict[str, Any]]:
    return [dict(zip(call, values, strict=True)) for values in zip(*call.values(), strict=True)]


def check_steps(run: Run, steps: int) -> None:
    """Each step's rollouts were sampled by the step's own weights, which say the same of them as the trainer."""
    assert [step["step"] for step in run.steps] == list(range(steps))
    for call, step in zip(run.lines("rows-*"), run.steps, strict=True):
        assert {*call["version_min"], *call["version_max"]} == {step["step"]}
        assert (step["staleness"], step["scored"], step["failed"]) == (0, ROWS, 0)
        assert step["gap_tokens"] == step["tokens"] == sum(map(len, call["completion_ids"]))
        assert step["reward"] == pytest.approx(sum(call["reward"]) / ROWS)
    gaps = [step["gap"] for step in run.steps]
    assert sum(gaps) / steps <= GAP_MEAN
    assert max(gaps) <= GAP_WORST


def check_learnt(run: Run) -> None:
    assert run.steps[0]["reward"] <= 0.1
    assert run.steps[-1]["reward"] >= 0.9


def sum_of_advantages(run: Run, rank: int | str = "*") -> float:
    """Within a group they sum to nothing."""
    return sum(row["advantage"] for row in run.trained(rank))


@pytest.mark.ci
async def test_a_short_run_trains_on_what_was_sampled_and_on_nothing_else(tiny: Served, tmp_path: Path) -> None:
    run = await play(tiny, tmp_path, "--steps", "6")
    check_tokens(run, 6 * ROWS)
    check_steps(run, 6)
    assert any(row["advantage"] for row in run.trained())
    assert abs(sum_of_advantages(run)) < 1e-2
    assert (tmp_path / "training.png").read_bytes().startswith(b"\x89PNG")
    assert [folder.name for folder in (tmp_path / "weights").iterdir()] == ["step-5"]


@pytest.mark.slow
async def test_two_processes_share_the_groups_that_rank_zero_pops(tiny: Served, tmp_path: Path) -> None:
    """One group a step, half of it for each process; its mean is over the whole group."""
    run = await play(tiny, tmp_path, "--steps", "3", "--batch", "8", script=TWO_RANKS)
    check_tokens(run, 3 * 16)
    assert [(step["step"], step["scored"]) for step in run.steps] == [(0, 16), (1, 16), (2, 16)]
    assert [len(run.trained(rank)) for rank in (0, 1)] == [24, 24]
    assert abs(sum_of_advantages(run)) < 1e-2 < abs(sum_of_advantages(run, 0))
    assert max(step["gap"] for step in run.steps) <= GAP_MEAN, "both processes train the same weights"


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_full_run_learns(tiny: Served, tmp_path: Path) -> None:
    run = await play(tiny, tmp_path, "--steps", str(FULL_STEPS))
    check_learnt(run)
    check_tokens(run, FULL_STEPS * ROWS)
    check_steps(run, FULL_STEPS)


@pytest.mark.slow
@pytest.mark.timeout(900)
async def test_the_full_run_ends_as_well_when_workers_are_killed_in_the_middle(tiny: Served, tmp_path: Path) -> None:
    """A RUN worker while the server answers it, an INIT worker some steps later; run.py starts others, as Slurm."""

    async def killed(run: Run) -> None:
        await reached(run, FULL_STEPS // 3)
        before = len(run.proxy.calls)
        while not any(call.answer is None and not call.cut for call in run.proxy.calls[before:]):
            await asyncio.sleep(0.001)
        os.kill(run.pids["run"], signal.SIGKILL)
        await reached(run, FULL_STEPS // 2)
        os.kill(run.pids["init"], signal.SIGKILL)

    run = await play(tiny, tmp_path, "--steps", str(FULL_STEPS), meanwhile=killed)
    assert run.output.count("it is started anew") == 2
    check_learnt(run)
    check_tokens(run, FULL_STEPS * ROWS)
    check_steps(run, FULL_STEPS)


@pytest.mark.slow
async def test_nothing_is_left_of_a_launcher_that_is_killed(tiny: Served, tmp_path: Path) -> None:
    async with running(tiny, tmp_path, WATCHED, "--steps", "80") as (run, process):
        await reached(run, 1)
        family = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, 20)
        assert len(family) >= 5
        assert alive == []


async def reached(run: Run, step: int) -> None:
    while len(run.steps) <= step:
        await asyncio.sleep(0.05)
