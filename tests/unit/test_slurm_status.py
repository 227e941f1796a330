"""What is shown of the jobs, why a kind is not there yet, the logs, and who keeps them."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from workers.slurm import state as states, status, tails
from workers.slurm.bring_up import NotUp, Wait, lack
from workers.slurm.jobs import Jobs, Step
from workers.slurm.keeper import KeeperThread
from workers.slurm.plan import Plan
from workers.slurm.rows import Row
from workers.slurm.state import Kind, State, Strike
from workers.slurm.status import Live

TAG = "0a1b2c3d"


def state(**sizes: int) -> State:
    return State(
        line="line", folder="/f", tag=TAG, overlap=600.0, patience=90.0,
        kinds={kind: Kind(jobs=jobs, text="") for kind, jobs in sizes.items()},
    )  # fmt: skip


def row(id: str, kind: str = "run", **changes: Any) -> Row:
    about = {"state": "RUNNING", "left": 7200.0, "used": 3600.0, "reason": "None", "node": "n1"}
    return Row(id=id, kind=kind, name=f"line-{kind}-{TAG}", **{**about, **changes})


ROWS = [
    row("1", "redis"), row("2_1"), row("2_2", left=100.0), row("2_3", left=50.0),
    row("3_1", state="PENDING", reason="Priority"),
    row("3_2", state="PENDING", reason="Priority"), row("4_1", state="FAILED", used=70.0), row("5_1", "maint"),
]  # fmt: skip


def test_the_numbers_of_each_kind(tmp_path: Path) -> None:
    known = state(redis=1, init=2, run=4, maint=1, vllm=0)
    known.draining["2_3"] = 1.0
    known.struck["init"] = Strike(count=1, at=0.0, until=time.time() + 100, why="its tasks end at once")
    found = Live(workers={"run": 2}, slots={"run": 128}, busy={"run": 7}, servers=3)
    told = status.report(known, ROWS, found, tmp_path)
    table = {line[0]: line[1:] for line in status.table(told)}
    assert table["run"] == (4, 2, 2, 1, 1, 2, "7/128", "2 wait: Priority: others come first")
    assert table["redis"] == (1, 1, 0, 0, 0, "", "", "")
    assert table["init"][-1].startswith("its tasks end at once; tried again in ")
    assert list(table) == ["redis", "init", "run", "maint"]  # nothing of the others
    assert status.missing(known, ROWS, 0.0) == {"init": 2}
    assert told["kept"]


def test_what_failed_comes_with_its_last_words(tmp_path: Path) -> None:
    (tmp_path / f"line-run-{TAG}-4_1.out").write_text("one\n\x1b[31mError: no model\x1b[0m\n\n")
    told = status.report(state(run=4), ROWS, Live(trouble="no Redis"), tmp_path)
    assert status.sentences(told) == ["no Redis", "run 4_1 ended as FAILED after 70.0 s on n1: Error: no model"]
    assert "workers" not in told["kinds"]["run"]  # not 0: it is not known


def test_nobody_keeps_the_line(tmp_path: Path) -> None:
    rows = [row("2_1"), row("5_1", "maint", state="PENDING")]
    (said,) = status.sentences(status.report(state(run=1, maint=1), rows, Live(), tmp_path))
    assert "nothing replaces what ends: no maint task runs" in said
    assert status.sentences(status.report(state(run=0), [], Live(), tmp_path)) == []


def step(rows: list[Row], **sizes: int) -> Step:
    return Step(rows=rows, state=state(**sizes), plan=Plan())


def test_why_a_kind_is_not_there(tmp_path: Path) -> None:
    jobs = Jobs(tmp_path, 10.0)
    jobs.logs.mkdir()

    def why(kind: str, rows: list[Row], found: Live | None = None) -> str:
        return lack(kind, step(rows, redis=1, run=1, maint=1, vllm=0), found or Live(), jobs)

    assert why("vllm", []) == ""  # none is wanted
    assert why("run", [row("1_1")], Live(workers={"run": 1})) == ""
    assert why("run", [], Live(workers={"run": 1})) == ""
    assert why("redis", [row("1", "redis")]) == ""
    assert why("maint", [row("1_1", "maint")]) == ""
    assert (
        why("run", [row("1_1", state="PENDING", reason="Resources")])
        == "run: 1 waits: Resources: no node has enough free"
    )
    assert why("run", [row("1_1")], Live(trouble="no Redis")) == "run: 1 run, and wait for Redis"
    assert "does n1 see that folder?" in why("run", [row("1_1")])
    assert "not submitted yet" in why("run", [])
    (jobs.logs / f"line-run-{TAG}-1_1.out").write_text("a\nError: no bubblewrap\n")
    assert "Error: no bubblewrap" in why("run", [row("1_1")])
    assert "Error: no bubblewrap" in why("run", [row("1_1", state="FAILED")])


def test_tasks_that_failed_alike_are_one_sentence(tmp_path: Path) -> None:
    failed = [row(f"{number}_1", state="FAILED", used=2.0) for number in range(10, 18)]
    for item in failed[1:]:
        tails.path_of(item, tmp_path).write_text("no program\n")
    never = row("9_1", state="FAILED", used=0.0, node="")
    told = status.sentences(status.report(state(run=0), [*failed, never], Live(), tmp_path))
    assert told == [
        "run 13_1, run 14_1, run 15_1, run 16_1, run 17_1 and 2 more ended as FAILED: no program",
        "run 9_1, run 10_1 ended as FAILED, and wrote nothing",
    ]
    (only,) = status.sentences(status.report(state(run=0), [never], Live(), tmp_path))
    assert only == "run 9_1 ended as FAILED after 0.00 s, and wrote nothing"


def test_what_failed_is_said_once_and_nothing_of_what_failed_before(tmp_path: Path) -> None:
    rows = [row("1_1", state="FAILED", used=2.0), *(row(f"2_{number}", state="FAILED", used=2.0) for number in (1, 2))]
    for item in rows:
        tails.path_of(item, tmp_path / "logs").parent.mkdir(exist_ok=True)
        tails.path_of(item, tmp_path / "logs").write_text("boom\n")

    class Stands(Jobs):
        def step(self) -> Step:
            found = step(list(rows), init=1, run=1)
            for kind in ("init", "run"):
                found.refused[kind] = f"sbatch refused the {kind} jobs: no"
            return found

    said: list[str] = []
    wait = Wait(
        jobs=Stands(tmp_path, 1.0),
        changes=0,
        timeout=60.0,
        look=Live,
        say=said.append,
        old=frozenset({"1_1"}),
    )
    with pytest.raises(NotUp, match="is not up:\n  init: sbatch refused it\n  run: sbatch refused it\nWhat was"):
        wait.until_up()
    assert said == ["sbatch refused the init, run jobs: no", "run 2_1, run 2_2 ended as FAILED: boom"]


def test_logs_by_kind_job_and_task(tmp_path: Path) -> None:
    names = [
        f"line-run-{TAG}-1_1.out",
        f"line-run-{TAG}-1_2.out",
        f"line-eval-{TAG}-2_1.out",
        f"line-redis-{TAG}-3.out",
    ]
    for name in [*names, "line-run-ffffffff-1_1.out", "other.out", f"line-run-{TAG}-1_1.txt"]:
        (tmp_path / name).write_text("x\n")

    def found(**about: str) -> set[str]:
        return {path.name for path in tails.files(tmp_path, TAG, **about)}

    assert found() == set(names)
    assert found(kind="run") == set(names[:2])
    assert found(job="3") == {names[3]}
    assert found(kind="run", job="2") == set()
    all_files = tails.files(tmp_path, TAG)
    assert [path.name for path in tails.chosen(all_files, [row("1_2")], tmp_path)] == [names[1]]
    assert len(tails.chosen(all_files, [], tmp_path)) == 1  # Slurm knows none: the youngest
    assert tails.files(tmp_path / "none", TAG) == []


def test_what_is_added_to_logs_is_followed(tmp_path: Path) -> None:
    name = tmp_path / f"line-run-{TAG}-1_1.out"
    name.write_text("before\n")
    looks = []

    def look() -> list[Path]:
        looks.append(1)
        if len(looks) == 2:
            with name.open("a") as file:
                file.write("after\n")
        return tails.files(tmp_path, TAG)

    following = tails.follow(look, 0.01)
    assert next(following) == (name, "after\n")
    other = tmp_path / f"line-run-{TAG}-1_2.out"
    other.write_text("new\n")
    assert next(following) == (other, "new\n")


@pytest.mark.parametrize(
    ("environ", "up", "kept"),
    [
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": f"line-maint-{TAG}"}, True, True),
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": "rollout-maint"}, True, False),  # submitted by hand
        ({"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": f"line-maint-{TAG}"}, False, False),  # `up` was never said
        ({}, True, False),  # no job
    ],
)
def test_who_keeps(
    environ: dict[str, str], up: bool, kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sbatch").write_text("#!/bin/bash\n")
    (tmp_path / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    if up:
        states.write(tmp_path, state(run=1))
    config = Config().changed({"slurm.folder": str(tmp_path)})
    with KeeperThread.of_job(config, environ) as keeper:
        assert keeper.works == kept
    assert not keeper.works


def test_a_node_without_sbatch_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    states.write(tmp_path, state(run=1))
    monkeypatch.setenv("PATH", str(tmp_path))
    config = Config().changed({"slurm.folder": str(tmp_path)})
    with KeeperThread.of_job(config, {"SLURM_JOB_ID": "1", "SLURM_JOB_NAME": f"line-maint-{TAG}"}) as keeper:
        assert not keeper.works
    assert caplog.text.count("`rollout slurm keep` run on a login node") == 1
