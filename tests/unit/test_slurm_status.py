"""What is shown of the jobs, why a kind is not there yet, the logs, and who keeps them."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import Config
from pipeline.errors import RedisUnavailable
from pipeline.queue import Queue
from tests.line import put
from workers.slurm import finish, state as states, status, tails
from workers.slurm.bring_up import NotUp, Wait, lack
from workers.slurm.jobs import Jobs, Step
from workers.slurm.keeper import KeeperThread
from workers.slurm.plan import Plan
from workers.slurm.rows import Row
from workers.slurm.state import Kind, State, Strike
from workers.slurm.status import Live
from workers.slurm.text import setup_lines, text

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


def test_what_ended_before_the_last_up_is_not_said(tmp_path: Path) -> None:
    rows = [row("4_1", state="FAILED"), row("5_1", state="FAILED", used=0.0, end=time.time())]
    known = replace(state(run=0), before=["4_1"])
    clock = time.strftime("%H:%M", time.localtime(rows[1].end))
    (said,) = status.sentences(status.report(known, rows, Live(), tmp_path))
    assert said.startswith(clock) and "run 5_1 ended as FAILED" in said


def test_a_cancelled_task_is_named_until_it_is_replaced() -> None:
    rows = [row(f"4_{number}", state="CANCELLED") for number in (1, 2, 3)]
    known = replace(state(run=2), before=["4_1"], draining={"4_2": 1.0})
    assert status.of_kind(known, rows, "run", 0.0).why == ["4_3 cancelled (scancel), not replaced yet"]
    assert status.of_kind(known, [*rows, row("5_1"), row("5_2")], "run", 0.0).why == []


def test_who_tries_again_is_said_only_where_somebody_does() -> None:
    known = replace(state(run=2), struck={"run": Strike(count=1, at=0.0, until=20.0, why="w")})
    assert status.of_kind(known, [], "run", 0.0).why == ["w; tried again in 20 s"]
    assert status.of_kind(known, [], "run", 0.0, kept=False).why == [
        "w; nobody tries again but `rollout slurm up` or `keep`"
    ]


def test_a_line_of_setup_is_named(tmp_path: Path) -> None:
    script = text(Config().changed({"slurm.setup": ["module load x", "a"]}), "run", None)
    lines = setup_lines(script)
    assert [script.splitlines()[number - 1] for number in lines] == ["module load x", "a"]
    assert list(setup_lines(text(Config(), "run", None))) == []
    known = replace(state(), kinds={"run": Kind(jobs=1, text=script)})
    failed = [row(f"4_{number}", state="FAILED") for number in (1, 2)]
    for item, place in zip(failed, ("job00004", "job00005"), strict=True):
        said = f"/var/spool/{place}/slurm_script: line {lines[0]}: module: command not found\n"
        tails.path_of(item, tmp_path).write_text(said)
    (_, told) = status.sentences(status.report(known, failed, Live(), tmp_path))  # the other: nobody keeps the line
    assert told.startswith("run 4_1, run 4_2 ended as") and told.endswith("not found (a line of slurm.setup)")


def test_up_waits_for_what_it_submitted_where_older_tasks_work(tmp_path: Path) -> None:
    wait = Wait(
        jobs=Jobs(tmp_path, 1.0), changes=0, timeout=60.0, look=Live, say=lambda _: None, known=frozenset({"1"})
    )
    old, found = row("1_1"), Live(workers={"run": 1}, jobs=frozenset({"1"}))

    def why(rows: list[Row], found: Live = found) -> str:
        return wait.lack("run", step(rows, run=2), found)

    assert why([old]) == ""
    assert "older tasks work, none of those just submitted: 1 waits: Prio" in why(
        [old, row("2_1", state="PENDING", reason="Priority")]
    )
    assert "task 2_1 runs, but" in why([old, row("2_1")])
    tails.path_of(old, tmp_path / "logs").parent.mkdir()
    tails.path_of(row("2_1"), tmp_path / "logs").write_text("boom\n")
    assert "the end of 2_1's log:\n  boom" in why([old, row("2_1", state="FAILED", used=1.0)])
    assert why([old, row("2_1"), row("2_2", state="FAILED")], replace(found, jobs=frozenset({"1", "2"}))) == ""
    wait._began -= 100.0  # no node is free for long: the older ones do it
    assert why([old, row("2_1", state="PENDING", reason="Priority")]) == ""


def test_the_wait_for_an_empty_line_says_what_holds_it_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = replace(state(run=1, eval=1), struck={"eval": Strike(count=1, at=0.0, until=20.0, why="they end at once")})

    class Still(Jobs):
        def look(self) -> tuple[State, list[Row]]:
            return known, [row("1_1")]

    monkeypatch.setattr(finish, "LOOK", 0.0)
    monkeypatch.setattr(finish, "EVERY", 0.0)
    stuck = Live(workers={"run": 1}, rollouts={"run": 1, "eval": 2, "done": 4}, stuck=["no live worker serves eval"])
    answers = iter([stuck, Live(trouble="no Redis"), Live(workers={"run": 1}, rollouts={"run": 1}), Live()])
    said: list[str] = []
    finish.until_empty(Still(tmp_path, 1.0), lambda: next(answers), said.append)
    assert said[0].startswith(
        "3 rollouts are still under way (1 in run, 2 in eval): no live worker serves eval; eval: they end at once"
    )
    assert "1 of eval), and no maint task runs" in said[0] and "without --finish" in said[0]
    assert said[1].startswith("whether the line is empty is not known: no Redis")
    assert said[2].startswith("1 rollout is still under way (1 in run): jobs are missing")
    with pytest.raises(RedisUnavailable, match="not known: no Redis"):
        finish.until_empty(Still(tmp_path, 1.0), lambda: Live(trouble="no Redis"), said.append)


async def test_a_look_at_the_line_itself(queue: Queue, monkeypatch: pytest.MonkeyPatch) -> None:
    async def memory() -> tuple[int, int]:  # fakeredis does not know INFO
        return 0, 0

    monkeypatch.setattr(queue, "memory", memory)
    assert (await status.live(queue, troubled=True)).stuck == []
    await put(queue)
    about = {"stage": "run", "running": 3, "slots": 64}
    await queue.beat("run-n3-16_1-12172-1fad", about, [])
    await queue.beat("run-laptop-12172-1fae", about, [])  # in no job
    found = await status.live(queue, troubled=True)
    assert (found.workers["run"], found.slots["run"], found.busy["run"]) == (2, 128, 6)
    assert found.jobs == {"16"}
    assert len(found.stuck) == 1 and "no live worker serves it (start one: rollout work init)" in found.stuck[0]
    assert (await status.live(queue)).stuck == []


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
    assert "maint: task 1_1 runs, but" in why("maint", [row("1_1", "maint", used=1.0)])  # it may end at once
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
