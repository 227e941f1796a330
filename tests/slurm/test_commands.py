"""`rollout slurm` on a real Slurm: up, status, scale, logs, down; and what is said when something is not there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.slurm.cluster import Cluster
from tests.waiting import until

ROLLOUT = str(Path(sys.executable).with_name("rollout"))
STAGES = ("init", "run", "eval")
SMALL = {"memory_mb": 500, "cpus": 1, "time": "20:00"}


def settings(folder: Path, **slurm: Any) -> Path:
    """A config file for a small line in `folder`/line; two RUN workers, one of each other kind."""
    kinds = {kind: {**SMALL, "jobs": 2 if kind == "run" else 1, **slurm.pop(kind, {})}
             for kind in ("redis", "init", "run", "eval", "maint")}  # fmt: skip
    told = {
        "line": {"name": "small"},
        "lease": {"seconds": 6.0, "beat": 2.0},
        "limits": {"grace": 3.0},
        "slurm": {"folder": "line", "signal": 20, "overlap": 60.0, "look": 1.0, "lock": 3.0, **kinds, **slurm},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(told), encoding="utf-8")
    return folder


def rollout(folder: Path, *words: str, code: int = 0, **environ: str) -> subprocess.CompletedProcess[str]:
    """`rollout WORDS` in a folder with a config.yaml; its exit code must be `code`."""
    done = subprocess.run(
        [ROLLOUT, *words], cwd=folder, capture_output=True, text=True, timeout=180, check=False,
        env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == code, f"{words}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def told(folder: Path, *words: str) -> Any:
    return json.loads(rollout(folder, *words, "--json").stdout)


def alive(cluster: Cluster, kind: str = "") -> list[str]:
    """Ids of the tasks of the small line that wait or run, of one kind or of all."""
    return [row.id for row in cluster.rows() if not row.over and f"small-{kind}" in row.name]


@pytest.fixture
def line(cluster: Cluster, tmp_path: Path) -> Iterator[Path]:
    """A folder with the settings of a small line; its jobs are ended with the cluster's."""
    yield settings(tmp_path)
    jobs = [row.id for row in cluster.rows() if not row.over and row.name.startswith("small-")]
    if jobs:
        cluster.call("scancel", "--quiet", *jobs)


def test_the_whole_line_comes_up_changes_and_goes(cluster: Cluster, line: Path) -> None:
    shown = rollout(line, "slurm", "up", "--print").stdout
    assert shown.count("#!/bin/bash") == 5
    assert alive(cluster) == []

    up = told(line, "slurm", "up")
    assert {kind: item["wanted"] for kind, item in up["kinds"].items()} == {
        "redis": 1, "init": 1, "run": 2, "eval": 1, "maint": 1, "vllm": 0,
    }  # fmt: skip
    assert all(up["kinds"][stage]["workers"] >= 1 for stage in STAGES)
    first = alive(cluster)
    assert len(first) == 6

    rollout(line, "slurm", "up")  # a second one submits nothing
    assert alive(cluster) == first

    # The jobs' environment and scripts hold no password, and nothing of this shell but what jobs need.
    password = json.loads((line / "line" / "address.json").read_text())["password"]
    job = alive(cluster, "run")[0]
    stored = cluster.call("scontrol", "write", "batch_script", job, "-") + cluster.call(
        "scontrol", "show", "job", "-dd"
    )
    assert "work run" in stored
    assert password not in stored
    environments = [process.environ() for process in cluster.processes(jobs=True) if "work" in process.cmdline()]
    assert environments
    assert not any("PYTEST_CURRENT_TEST" in item or password in item.values() for item in environments)

    said = rollout(line, "slurm", "scale", "run", "4").stdout
    assert "run: 2 -> 4" in said
    until(lambda: told(line, "slurm", "status")["kinds"]["run"]["workers"] == 4, 60)
    others = {id for id in first if id not in alive(cluster, "run")}
    assert others <= set(alive(cluster))  # nobody else was touched

    rollout(line, "slurm", "scale", "run", "1")
    until(lambda: len(alive(cluster, "run")) == 1, 60)
    assert others <= set(alive(cluster))
    status = rollout(line, "slurm", "status").stdout
    assert "ended as" not in status  # who is told to go, and goes, has not failed

    killed = alive(cluster, "eval")
    cluster.cancel(killed[0])  # the keeper, in the maint job, sees that one is missing
    until(lambda: set(alive(cluster, "eval")) - set(killed), 60)

    logs = rollout(line, "slurm", "logs", "run", "-n", "50").stdout
    assert "serves run" in logs
    assert rollout(line, "slurm", "logs", "--job", "999", code=1).stderr.startswith("Error: no log of the line 999")

    down = rollout(line, "slurm", "down")
    assert down.stderr.index("told to end") < down.stderr.index("redis")
    assert alive(cluster) == []
    ended = Counter(row.state for row in cluster.rows() if row.name.startswith("small-") and row.id != killed[0])
    assert set(ended) <= {"COMPLETED", "CANCELLED"}, ended  # cancelled: those that had just begun
    assert ended["COMPLETED"] >= 2
    assert cluster.processes(jobs=True) == []
    assert (line / "line" / "redis").is_dir()


def test_rollouts_of_one_up_are_there_in_the_next(cluster: Cluster, line: Path) -> None:
    tasks = "".join(
        json.dumps({"id": f"g{n}", "handler": "echo", "data": {"text": "x"}}) + "\n" for n in range(3)
    )  # fmt: skip
    (line / "tasks.jsonl").write_text(tasks)
    rollout(line, "slurm", "up")
    rollout(line, "slurm", "scale", "init", "0")
    until(lambda: not alive(cluster, "init"), 60)
    rollout(line, "enqueue", "tasks.jsonl")
    down = rollout(line, "slurm", "down").stdout
    assert "3 rollouts go on when the line is up again, 0 wait to be popped" in down
    rollout(line, "slurm", "up")
    assert (
        rollout(line, "slurm", "down", "--finish").stdout.count("0 rollouts go on when the line is up again, 3 wait")
        == 1
    )


def test_what_slurm_refuses_is_said_and_the_rest_stays(cluster: Cluster, tmp_path: Path) -> None:
    sleep = ["exec sleep 600"]
    line = settings(tmp_path, setup=sleep, run={"partition": "nope"})
    said = rollout(line, "slurm", "up", code=1).stderr
    assert "sbatch refused the run jobs: invalid partition specified: nope" in said
    assert "slurm.run.partition names it" in said
    assert len(alive(cluster)) == 4  # all but run
    settings(tmp_path, setup=sleep)
    rollout(line, "slurm", "up", "--timeout", "0", code=1)  # the mended settings are enough
    assert len(alive(cluster)) == 6
    rollout(line, "slurm", "down")


def test_a_kind_that_waits_is_said_with_the_reason(cluster: Cluster, tmp_path: Path) -> None:
    few = {kind: {"jobs": 0} for kind in ("init", "eval", "maint")}
    line = settings(tmp_path, run={"options": ["--begin=now+1hour"]}, **few)
    said = rollout(line, "slurm", "up", "--timeout", "8", code=1).stderr
    assert "the line is not up after 8 s:" in said
    assert "run: 2 wait: BeginTime: it starts later" in said
    status = told(line, "slurm", "status")  # exit 0: they are on their way
    assert status["kinds"]["run"]["waiting"] == 2
    rollout(line, "slurm", "down")
    assert alive(cluster) == []


def test_tasks_that_end_at_once_are_said_with_their_log_and_not_repeated_for_ever(
    cluster: Cluster, tmp_path: Path
) -> None:
    only = {kind: {"jobs": 0} for kind in ("init", "eval", "maint")}
    line = settings(
        tmp_path, setup=['case "$SLURM_JOB_NAME" in *-run-*) echo "no such module" >&2; exit 3;; esac'], **only
    )
    said = rollout(line, "slurm", "up", "--timeout", "12", code=1).stderr
    assert "ended as FAILED" in said
    assert "its tasks end as soon as they start" in said
    assert "no such module" in said
    tag = json.loads((line / "line" / "slurm.json").read_text())["tag"]
    names = [row.name for row in cluster.rows() if row.name == f"small-run-{tag}"]
    assert len(names) == 2  # of 2 wanted tasks: none was submitted again within 12 s
    status = rollout(line, "slurm", "status", code=1).stdout
    assert "nobody tries again but" in status
    assert "nothing replaces what ends" in status
    rollout(line, "slurm", "down")


@pytest.mark.slow
def test_up_ends_after_three_strikes_without_a_keeper(cluster: Cluster, tmp_path: Path) -> None:
    few = {kind: {"jobs": 0} for kind in ("init", "eval", "maint")}
    line = settings(tmp_path, setup=["nosuchmodule load x"], **few)
    began = time.monotonic()
    said = rollout(line, "slurm", "up", "--timeout", "170", code=1).stderr
    assert time.monotonic() - began < 150 and "the line is not up:" in said
    assert "command not found (a line of slurm.setup)" in said
    rollout(line, "slurm", "down")


def test_up_does_not_take_older_tasks_for_what_it_submitted(cluster: Cluster, tmp_path: Path) -> None:
    few = {kind: {"jobs": 0} for kind in ("init", "eval", "maint")}
    line = settings(tmp_path, run={"jobs": 1}, **few)
    rollout(line, "slurm", "up")
    settings(tmp_path, run={"jobs": 2}, setup=["nosuchmodule load x"], **few)
    assert "the settings have changed since the last `up` (" in rollout(line, "slurm", "status").stdout
    said = rollout(line, "slurm", "up", "--timeout", "6", code=1).stderr
    assert "run: older tasks work, none of those just submitted: " in said
    assert "command not found (a line of slurm.setup)" in said
    rollout(line, "slurm", "down")


def test_a_mend_is_not_held_up_by_what_failed_before_and_two_may_ask_for_it(cluster: Cluster, tmp_path: Path) -> None:
    few = {kind: {"jobs": 0} for kind in ("init", "eval", "maint")}
    line = settings(tmp_path, program="/no/such/rollout", **few)
    said = rollout(line, "slurm", "up", "--timeout", "6", code=1).stderr
    assert "ended as FAILED" in said and said.count("no program /no/such/rollout on this node") <= 2
    settings(tmp_path, **few)
    ups = [
        subprocess.Popen([ROLLOUT, "slurm", "up", "--timeout", "25"], cwd=line, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    heard = [up.communicate(timeout=60)[1] for up in ups]
    assert [up.returncode for up in ups] == [0, 0], heard
    assert "FAILED" not in "".join(heard)
    assert len(alive(cluster)) == 3
    rollout(line, "slurm", "down")
    assert "the line is down: " in rollout(line, "depth", code=1).stderr


def test_down_in_the_middle_of_up(cluster: Cluster, tmp_path: Path) -> None:
    line = settings(tmp_path, setup=["sleep 100"])
    up = subprocess.Popen([ROLLOUT, "slurm", "up"], cwd=line, stderr=subprocess.PIPE, text=True)
    until(lambda: len(alive(cluster)) == 6, 60)
    rollout(line, "slurm", "down")
    _, said = up.communicate(timeout=60)
    assert up.returncode == 1
    assert "somebody else changed what is wanted meanwhile" in said
    assert alive(cluster) == []


def test_two_lines_side_by_side(cluster: Cluster, tmp_path: Path) -> None:
    lines = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        few = {kind: {"jobs": 0} for kind in ("init", "eval", "maint")}
        lines.append(settings(tmp_path / name, setup=["exec sleep 600"], run={"jobs": 1}, **few))
    for line in lines:
        rollout(line, "slurm", "up", "--timeout", "0", code=1)
    assert len(alive(cluster)) == 4
    rollout(lines[0], "slurm", "down")
    assert len(alive(cluster)) == 2
    assert [row["kind"] for row in told(lines[1], "slurm", "status")["tasks"]] == ["redis", "run"]
    rollout(lines[1], "slurm", "down")
    assert alive(cluster) == []


def test_what_is_missing_here_is_a_sentence(cluster: Cluster, tmp_path: Path) -> None:
    line = settings(tmp_path)
    assert "`rollout slurm up` makes a new one" in rollout(line, "slurm", "status", code=1).stderr
    assert "slurm.folder is empty" in rollout(line, "--set", "slurm.folder=", "slurm", "up", code=1).stderr
    assert "no sbatch on PATH" in rollout(line, "slurm", "up", code=1, PATH=str(tmp_path)).stderr
    assert "squeue refused" in rollout(line, "slurm", "up", code=1, SLURM_CONF=os.devnull).stderr
