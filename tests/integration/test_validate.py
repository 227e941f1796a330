"""`rollout task validate`: every verdict, from handlers with real sandboxes and child processes; nothing is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

import handlers
from pipeline.datasets import read_tasks
from tests.services import require
from workers.cli.app import rollout

BOXED = '''
import pathlib

from handlers.turns import Turns
from pipeline import Reward
from pipeline.errors import EvaluationTimeout, TaskError


class Boxed(Turns):
    """Write 42 into a file; `how` says what goes wrong."""

    tools = ("bash",)
    sandbox = {}
    eval_sandbox = "same"

    async def init(self, ctx):
        if ctx.task["how"] == "task":
            raise TaskError("its image does not exist")

    def prompt(self, task):
        return "The same words for all tasks."

    async def eval(self, ctx):
        how = ctx.task["how"]
        said = (await ctx.sandbox.bash("cat answer")).text
        first = pathlib.Path(ctx.task.get("mark", "none"))
        if how == "grader" or (how == "once" and ctx.attempt == 1):
            raise RuntimeError("the tests broke")
        if how == "hang" and said == "42" or how == "hangs empty" and said != "42":
            ctx.log.info("test_one PASSED, test_two hangs")
            raise EvaluationTimeout("the tests took longer than 5 s", {"why": "out of time", "ran": 1})
        if how == "unsteady" and said == "42":
            seen = first.exists()
            first.touch()
            return float(seen)
        if how == "empty":
            return 1.0
        if how == "slow":
            await ctx.sandbox.bash("sleep 60")
        right = said == "42" and how != "wrong"
        evidence = {"why": "1 of 2 tests failed", "failing": ["test_two"], "log": "E  assert 41 == 42"}
        return Reward(value=float(right), parts={"tests": float(right)}, evidence={} if right else evidence)

    def gold(self, task):
        if task["how"] == "none":
            return None
        call = {"name": "bash", "arguments": {"command": "printf 42 > answer"}}
        return [{"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
                {"role": "assistant", "content": "Done."}]
'''

WANTED = {
    "ok": ("ok", ""),
    "once": ("ok", ""),
    "hangs empty": ("ok", ""),
    "wrong": ("gold fails", "reward 0: 1 of 2 tests failed"),
    "hang": ("gold fails", "limit: the tests took longer than 5 s"),
    "empty": ("empty passes", "reward 1"),
    "grader": ("error", "grader: boxed:Boxed.eval raised RuntimeError: the tests broke"),
    "task": ("error", "task: its image does not exist"),
    "none": ("no gold", "its handler knows no right answer for it (`gold`)"),
}


@pytest.fixture
def root() -> Iterator[Path]:
    """A short path: sockets lie under it."""
    with tempfile.TemporaryDirectory(prefix="rs-") as folder:
        yield Path(folder) / "s"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "boxed.py").write_text(BOXED)
    return tmp_path


def write(folder: Path, *hows: str, **more: Any) -> Path:
    file = folder / "tasks.jsonl"
    rows = [{"handler": "boxed:Boxed", "id": how, "data": {"how": how, **more}} for how in hows]
    file.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return file


def words(root: Path, driver: str = "local") -> list[str]:
    return ["--set", f"sandbox.root={root}", "--set", f"sandbox.driver={driver}", "--set", "sandbox.max_live=2"]


def call(*parts: str) -> Any:
    return CliRunner().invoke(rollout, list(parts))


def test_every_verdict(here: Path, root: Path) -> None:
    file = write(here, *WANTED)
    result = call(*words(root), "task", "validate", str(file), "--jobs", "4", "--write", "good.jsonl", "--json")
    assert result.exit_code == 1, result.output
    told = json.loads(result.stdout)
    found = {item["id"]: (item["verdict"], item["why"]) for item in told["results"]}
    assert found == WANTED
    assert (told["tasks"], told["ok"], told["gold fails"], told["error"]) == (9, 3, 2, 2)
    results = {item["id"]: item for item in told["results"]}
    assert results["wrong"]["log"] == "E  assert 41 == 42" and results["wrong"]["empty"] is None
    assert "test_two hangs" in results["hang"]["log"] and results["hang"]["evidence"]["ran"] == 1
    assert (results["ok"]["gold"], results["ok"]["empty"]) == (1.0, 0.0) and results["ok"]["seconds"] > 0
    assert not [path for path in root.rglob("*") if path.is_dir() and path.parent.parent == root]
    good = list(read_tasks(here / "good.jsonl"))
    assert [task.id for task in good] == ["ok", "once", "hangs empty"]
    assert good[0].validated["line"] == "rollout" and good[0].validated["seconds"] > 0
    assert good[0].validated["handler"] == handlers.digest_of("boxed:Boxed", here)


def test_a_gold_that_passes_only_sometimes_is_unsteady_and_the_table_says_why(here: Path, root: Path) -> None:
    require("bwrap")
    file = write(here, "unsteady", "wrong", "ok", mark=str(here / "mark"))
    result = call(*words(root, "bubblewrap"), "task", "validate", str(file), "--only", "unsteady", "--only", "wrong",
                  "--repeat", "3")  # fmt: skip
    assert result.exit_code == 1, result.output
    head, *lines = result.stdout.splitlines()
    assert head.split() == ["task", "gold", "empty", "eval", "verdict"]
    assert any(line.startswith("unsteady  ") and "unsteady: 1 of 3 plays of the gold failed" in line for line in lines)
    assert any(line.startswith("wrong ") and "gold fails: reward 0: 1 of 2 tests failed" in line for line in lines)
    assert "    | E  assert 41 == 42" in lines
    assert lines[-1].startswith("2 tasks in ") and lines[-1].endswith("0 ok, 1 gold fails, 1 unsteady")


def test_the_right_answers_of_math_pass_in_child_processes(here: Path) -> None:
    rows = [{"question": f"What is {at}+1?", "expected_answer": str(at + 1), "id": at} for at in range(4)]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    result = CliRunner().invoke(rollout, ["task", "validate", "-", "--handler", "math", "--limit", "3"], input=text)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("3 ok")


def test_the_right_answers_of_the_training_example_pass(here: Path) -> None:
    """They are capital letters and nothing else, so a sentence around them would not be one."""
    example = Path(__file__).parents[2] / "docs" / "examples" / "trl_grpo"
    result = CliRunner().invoke(
        rollout,
        ["--config", str(example / "config.yaml"), "task", "validate", "-", "--handler", "family:Capitals"],
        input='{"word": "apple"}\n{"word": "bridge"}\n',
    )
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1].endswith("2 ok")


@pytest.mark.parametrize(
    ("parts", "says", "code"),
    [
        (["--only", "x"], "holds no task with the id 'x'", 1),
        (["--rows", "5:3"], "'5:3' holds no row", 2),
        (["--dataset", "x"], "no dataset 'x' in section `datasets`", 1),
        (["--write", "none/out.jsonl"], "none/out.jsonl can't be written", 1),
    ],
)
def test_what_is_wrong_with_the_command_is_a_sentence(parts: list[str], says: str, code: int, here: Path) -> None:
    file = write(here, "none")
    result = call("task", "validate", str(file), *parts)
    assert result.exit_code == code and says in result.stderr


def answers(root: Path) -> list[Path]:
    """The files in which an answer of 42 lies; none where a sandbox went while it was looked at."""
    try:
        return [path for path in root.rglob("answer") if path.read_text() == "42"]
    except FileNotFoundError:
        return []


def test_an_interrupt_leaves_no_sandbox_and_keeps_what_is_known(here: Path, root: Path) -> None:
    file = write(here, "ok", "slow")
    command = [sys.executable, "-P", "-m", "workers.cli", *words(root), "task", "validate", str(file)]
    process = subprocess.Popen(
        [*command, "--jobs", "1", "--write", "good.jsonl"], cwd=here, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, start_new_session=True, env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )  # fmt: skip
    assert process.stdout is not None
    try:
        assert process.stdout.readline().startswith("task")
        assert "ok" in process.stdout.readline()
        until = time.monotonic() + 30
        while not (found := answers(root)):
            assert time.monotonic() < until, "the slow task never began"
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        said, told = process.communicate(timeout=30)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "1 were not looked at" in said and "wrote 1 of 2 tasks" in told and "Traceback" not in told
    assert not found[0].exists()
    assert [task.id for task in read_tasks(here / "good.jsonl")] == ["ok"]
