"""The command line without a server: help, exit codes, sentences."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from workers.cli import hiding
from workers.cli.app import rollout
from workers.cli.base import Group

ROOT = Path(__file__).parents[2]


def commands(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], click.Command]]:
    """Every command with the words that call it."""
    for name, command in group.commands.items():
        yield (*before, name), command
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))


EVERY = dict(commands(rollout))


def call(*words: str, text: str = "") -> Result:
    return CliRunner().invoke(rollout, list(words), input=text)


@pytest.fixture(autouse=True)
def in_an_empty_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)


@pytest.mark.parametrize("words", EVERY, ids=" ".join)
def test_every_command_and_option_has_help(words: tuple[str, ...]) -> None:
    result = call(*words, "--help")
    assert result.exit_code == 0
    assert EVERY[words].help
    for option in EVERY[words].params:
        if isinstance(option, click.Option) and option.name not in ("lane", "state", "as_json") and not option.hidden:
            assert option.help, f"{words}: {option.name} has no help"


def test_every_command_that_prints_takes_json() -> None:
    without = {
        words for words, command in EVERY.items()
        if not isinstance(command, click.Group) and not any(item.name == "as_json" for item in command.params)
    }  # fmt: skip
    assert without == {("work",), ("slurm", "keep")}, "only these print no result"


@pytest.mark.parametrize(
    "words",
    [
        ("nope",), ("work",), ("work", "bake"), ("work", "run", "--nope"), ("work", "run", "--slots", "0"),
        ("depth", "more"), ("ls", "run", "--state", "lost"), ("cancel",), ("cancel", "a.0", "--all"), ("requeue",),
        ("try", "echo", "--task", "{"),
        ("try", "echo", "--task", "{}", "--tasks", "x"), ("redis", "start", "--port", "7000"), ("pop", "0"),
        ("enqueue", "x", "--timeout", "3"),
    ],
)  # fmt: skip
def test_wrong_use_is_2_and_on_stderr(words: tuple[str, ...]) -> None:
    result = call(*words)
    assert result.exit_code == 2
    assert "Error" in result.stderr and not result.stdout


@pytest.mark.parametrize(
    "words",
    [("work", "run"), ("depth",), ("pop",), ("show", "a.0"), ("cancel", "--all"), ("audit",), ("watch", "--once")],
)
def test_without_a_redis_nothing_is_started_and_the_mend_is_said(words: tuple[str, ...]) -> None:
    result = call(*words)
    assert result.exit_code == 1
    assert "no Redis" in result.stderr and "rollout redis start" in result.stderr and not result.stdout


def test_in_a_job_that_knows_of_no_redis_none_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    said = call("work", "run").stderr
    assert "no Redis" in said and "LINE_CONFIG" in said and "LINE_FOLDER" in said and "redis start" not in said


def test_a_wrong_setting_names_the_valid_keys() -> None:
    result = call("--set", "redis.urrl=x", "depth")
    assert result.exit_code == 1
    assert "redis.urrl" in result.stderr and "password_file" in result.stderr


def test_settings_may_stand_behind_the_command_too() -> None:
    assert "urrl" in call("depth", "--set", "redis.urrl=x").stderr
    assert "nope.yaml" in call("depth", "--config", "nope.yaml").stderr


def test_an_interrupt_is_130() -> None:
    @click.group(cls=Group)
    def group() -> None: ...

    @group.command()
    def wait() -> None:
        raise KeyboardInterrupt

    assert CliRunner().invoke(group, ["wait"]).exit_code == 130


def test_a_reader_that_has_gone_is_no_traceback() -> None:
    """As in `rollout ... | head`."""
    code = "from workers.cli import main; main()"
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", code, "--help"], stdout=write, stderr=subprocess.PIPE, cwd=ROOT)
    os.close(write)
    assert done.returncode == 1
    assert done.stderr == b""


@pytest.mark.parametrize("broken", ["raise RuntimeError('mine')", ""])
@pytest.mark.parametrize("name", ["pipeline", "handlers"])
def test_a_package_that_hides_ours_is_told(tmp_path: Path, name: str, broken: str) -> None:
    other = tmp_path / "other" / name
    other.mkdir(parents=True)
    (other / "__init__.py").write_text(broken)
    code = "import sys; sys.argv[0] = 'rollout'; from workers.cli import main; main()"
    environ = {**os.environ, "PYTHONPATH": f"{other.parent}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, "depth"], env=environ, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert f"another package named '{name}' (at {other}) hides ours" in done.stderr
    assert "Traceback" not in done.stderr


def test_nothing_hides_ours_here() -> None:
    assert hiding() == ""


def test_init_writes_a_folder_that_try_can_use(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    assert call("init", str(place)).exit_code == 0
    assert sorted(item.name for item in place.iterdir()) == ["config.yaml", "sums.py", "tasks.jsonl"]
    assert len((place / "sums.py").read_text().splitlines()) <= 30
    again = call("init", str(place))
    assert again.exit_code == 1 and "not empty" in again.stderr
    assert call("init", str(place), "--force").exit_code == 0


def test_init_refuses_a_file(tmp_path: Path) -> None:
    (tmp_path / "f").write_text("")
    assert "is a file" in call("init", str(tmp_path / "f")).stderr


def test_try_of_a_handler_without_a_policy() -> None:
    result = call("try", "echo", "--task", '{"text": "hi", "tokens": 16}', "--json")
    assert result.exit_code == 0, result.output
    told = json.loads(result.stdout)
    assert (told["reward"], told["tokens"], told["outcome"]) == (1.0, 16, "scored")


def test_try_shows_only_the_users_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_that_raises.py").write_text(
        "from pipeline import AgentHandler\n\n\nclass Mine(AgentHandler):\n    async def run(self, ctx):\n"
        "        helper()\n\n    async def eval(self, ctx):\n        return 1.0\n\n\ndef helper():\n"
        "    raise KeyError('merge')\n"
    )
    result = call("try", "mine_that_raises:Mine", "--task", "{}")
    assert result.exit_code == 1
    assert "KeyError: 'merge'" in result.stderr and "in helper" in result.stderr and "stages.py" not in result.stderr
    assert "stages.py" in call("try", "mine_that_raises:Mine", "--task", "{}", "--traceback").stderr


def test_try_says_how_to_give_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_wants_k.py").write_text(
        "from pipeline import AgentHandler\nfrom pydantic import BaseModel\n\n\nclass Mine(AgentHandler):\n"
        "    class Task(BaseModel):\n        k: str\n\n    async def run(self, ctx): ...\n\n"
        "    async def eval(self, ctx):\n        return 1.0\n"
    )
    bare, empty = call("try", "mine_wants_k:Mine"), call("try", "mine_wants_k:Mine", "--data", "{}")
    assert "say --data JSON, or --tasks FILE" in bare.stderr and "field 'k' is missing" in bare.stderr
    assert "Error: --data: Mine: field 'k' is missing" in empty.stderr
    demo = call("demo", "--handler", "mine_wants_k:Mine")
    assert "say --tasks FILE" in demo.stderr and "--data" not in demo.stderr
    assert (bare.exit_code, empty.exit_code, demo.exit_code) == (1, 1, 1)


@pytest.mark.parametrize("sandbox", [{"imgae": "x"}, {"image": "x", "network": "host"}])
def test_try_of_what_the_sandbox_refuses_is_one_sentence(
    sandbox: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = f"mine_boxed_{len(sandbox)}"
    (tmp_path / f"{name}.py").write_text(
        f"from pipeline import AgentHandler\n\n\nclass Mine(AgentHandler):\n    sandbox = {sandbox!r}\n\n"
        "    async def run(self, ctx): ...\n\n    async def eval(self, ctx):\n        return 1.0\n"
    )
    words = ("--set", f"sandbox.root={tmp_path}", "try", f"{name}:Mine", "--data", "{}")
    result = call(*words)
    lines = result.stderr.splitlines()
    assert [line for line in lines if " warning " not in line] == [lines[-1]]
    assert lines[-1].startswith("failed, kind handler: ") and "Traceback" in call(*words, "--traceback").stderr


def test_try_of_an_unknown_handler_lists_the_known() -> None:
    result = call("try", "ecko")
    assert result.exit_code == 1
    assert "echo, math, stem, reason, code, sql, swe, web, judge" in result.stderr


def test_a_demo_of_a_handler_without_tasks_asks_for_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine_without_tasks.py").write_text(
        "from pipeline import AgentHandler\n\n\nclass Mine(AgentHandler):\n    pass\n"
    )
    result = call("demo", "--handler", "mine_without_tasks:Mine")
    assert result.exit_code == 1
    assert "--tasks FILE" in result.stderr


def test_a_bad_line_is_told_before_anything_is_looked_for() -> None:
    result = call(
        "enqueue", "-", text='{"handler": "echo", "data": {"text": "x"}}\n{"handler": "echo", "data": {"text": 3}}\n'
    )
    assert result.exit_code == 1
    assert "stdin, line 2" in result.stderr and "text" in result.stderr and "3" in result.stderr
