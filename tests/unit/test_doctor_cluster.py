"""`rollout doctor --cluster`: a task's place in its Slurm step, and what the notes of all nodes mean."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from workers.doctor import node
from workers.doctor.cluster import Step, step, tasks_per_node
from workers.doctor.matrix import Seen, findings, grouped, reach, table
from workers.doctor.meeting import InFolder, Meeting, beside
from workers.doctor.node import Listener, ask, call, same_folder

STEP = {
    "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0", "SLURM_PROCID": "2", "SLURM_NNODES": "3", "SLURM_STEP_NUM_NODES": "3",
    "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NODELIST": "n[1-3]", "SLURM_STEP_TASKS_PER_NODE": "1(x3)",
}  # fmt: skip
BATCH = {"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NNODES": "3", "SLURM_JOB_NUM_NODES": "3"}


def expand(text: str) -> list[str]:
    return {"n[1-3]": ["n1", "n2", "n3"], "n[1-2]": ["n1", "n2"]}[text]


def test_a_task_knows_its_place() -> None:
    assert step(STEP, expand) == Step(2, ["n1", "n2", "n3"], "7-0-0")
    again = step({**STEP, "SLURM_RESTART_COUNT": "1"}, expand)
    assert again is not None and again.run == "7-0-1", "a requeued job does not read the notes of its first run"


def test_several_tasks_on_a_node_are_told_apart() -> None:
    two = {"SLURM_STEP_NODELIST": "n[1-2]", "SLURM_STEP_TASKS_PER_NODE": "2,1", "SLURM_STEP_NUM_NODES": "2"}
    found = step({**STEP, **two, "SLURM_NNODES": "2"}, expand)
    assert found is not None and found.names == ["n1#0", "n1#1", "n2"]


def test_without_the_nodes_names_the_ranks_do() -> None:
    found = step(STEP, lambda _: [])
    assert found is not None and found.names == ["rank 0", "rank 1", "rank 2"]


@pytest.mark.parametrize(("text", "wanted"), [("1(x3)", [1, 1, 1]), ("2(x2),1", [2, 2, 1]), ("4", [4]), ("", [])])
def test_tasks_per_node(text: str, wanted: list[int]) -> None:
    assert tasks_per_node(text) == wanted


@pytest.mark.parametrize("more", [{}, {"SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NUM_TASKS": "1"}])
def test_in_an_allocation_srun_is_called(more: dict[str, str]) -> None:
    """In a batch script, and in the interactive step that salloc makes at some sites."""
    assert step({**BATCH, **more}, expand) is None


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({}, "from inside a job: srun -N4 --ntasks-per-node=1 rollout doctor --cluster"),
        ({"SLURM_JOB_ID": "7", "SLURM_NNODES": "1"}, "job 7 has one node"),
    ],
)
def test_elsewhere_a_sentence_says_what_to_type(environ: dict[str, str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        step(environ, expand)


def hello(name: str, **about: Any) -> dict[str, Any]:
    return {
        "node": name, "machine": name, "package": "1.0", "schema": 2, "python": "3.11.7",
        "address": f"10.1.0.{name[1:]}", "port": 40_000, "nonce": "x", "wrong": "", **about,
    }  # fmt: skip


def report(calls: dict[str, str], **home: Any) -> dict[str, Any]:
    """`calls`: rank -> why it failed, or empty."""
    return {
        "calls": {rank: {"ms": 0.0 if why else 0.25, "error": why} for rank, why in calls.items()},
        "redis": {"ms": 0.3, "clock": 0.01, "error": ""}, "folder": {"path": "/line", "kind": "nfs4", "error": ""},
        "temporary": {"path": "/tmp", "kind": "ext4", "error": ""}, "sandbox": {"seconds": 0.2, "error": ""}, **home,
    }  # fmt: skip


def three(**changed: Any) -> Seen:
    """Three nodes without a fault; `changed` replaces fields."""
    names = ["n1", "n2", "n3"]
    hellos = {str(rank): hello(name) for rank, name in enumerate(names)}
    reports = {str(rank): report({str(to): "" for to in range(3) if to != rank}) for rank in range(3)}
    about: dict[str, Any] = {"hellos": hellos, "reports": reports, "folder": {"1": 0.1, "2": 3.0}, **changed}
    return Seen(names, **about)


def told(seen: Seen) -> dict[str, tuple[str, str]]:
    return {item.name: (item.grade, item.text) for item in findings(seen)}


def test_all_is_well() -> None:
    found = told(three())
    assert {grade for grade, _ in found.values()} == {"ok"}
    assert found["reach"][1] == "all 6 ways between nodes work, 0.25 ms"
    assert found["slurm.folder"][1] == "every node writes to it (nfs4); a change is seen elsewhere within 3.00 s"
    assert table(three())[1][0] == ["n1", "10.1.0.1", "-", "0.25", "0.25"]


def test_a_node_that_others_can_t_reach_is_named_once_in_each_direction() -> None:
    seen = three()
    for rank, why in (("0", "no answer"), ("1", "no answer")):
        seen.reports[rank]["calls"]["2"] = {"ms": 0.0, "error": why}
    assert told(seen)["reach"] == ("fail", "n3 can't be reached from n1, n2: no answer")
    for to in ("0", "1"):
        seen.reports["2"]["calls"][to] = {"ms": 0.0, "error": "refused"}
    text = told(seen)["reach"][1]
    assert text == "n3 reaches no other node (n1, n2: refused). n3 can't be reached from n1, n2: no answer"
    assert table(seen)[1][2] == ["n3", "10.1.0.3", "no", "no", "-"]
    assert reach(seen)["n1"] == {"n2": 0.25, "n3": "no answer"}


def test_one_way_that_fails_is_told_with_those_that_work() -> None:
    seen = three()
    seen.reports["0"]["calls"]["2"] = {"ms": 0.0, "error": "no answer"}
    assert told(seen)["reach"][1] == "n3 can't be reached from n1: no answer, but from n2"


def test_who_did_not_come_and_who_fell_silent_are_named() -> None:
    seen = three()
    del seen.hellos["2"], seen.reports["2"], seen.reports["1"]
    texts = [item.text for item in findings(seen) if item.grade == "fail"]
    assert texts == ["n3 did not come within 30 s", "n2 came, and then said nothing more"]
    assert table(seen)[1][1] == ["n2", "10.1.0.2", "?", "-", "?"]


@pytest.mark.parametrize(
    ("rank", "about", "name", "grade", "words"),
    [
        ("1", {"address": "127.0.0.1"}, "addresses", "fail", "n2 would publish a loopback address"),
        ("1", {"address": "10.1.0.1"}, "addresses", "fail", "n1, n2 all publish 10.1.0.1"),
        ("1", {"wrong": "no interface 'ib0'", "address": ""}, "addresses", "fail", "n2: no interface 'ib0'"),
        (
            "1",
            {"package": "0.9"},
            "versions",
            "warn",
            "n1, n3: rollout-line 1.0 (schema 2), Python 3.11.7; n2: rollout",
        ),
    ],
)
def test_what_a_node_is(rank: str, about: dict[str, Any], name: str, grade: str, words: str) -> None:
    seen = three()
    seen.hellos[rank] |= about
    assert told(seen)[name][0] == grade and words in told(seen)[name][1]


@pytest.mark.parametrize(
    ("home", "name", "grade", "words"),
    [
        ({"redis": {"error": "it can't be reached"}}, "redis", "fail", "n2: it can't be reached"),
        ({"redis": {"ms": 1.0, "clock": -7.25, "error": ""}}, "clocks", "warn", "n2: 7.2 s behind Redis's"),
        ({"folder": {"error": "/line is not there"}}, "slurm.folder", "fail", "n2: /line is not there"),
        ({"sandbox": {"error": "no bwrap"}}, "sandbox", "fail", "n2: no bwrap"),
        (
            {"temporary": {"path": "/tmp", "kind": "lustre", "error": ""}},
            "temporary files",
            "warn",
            "/tmp lies on lustre",
        ),
        ({"temporary": {"error": "/tmp is full"}}, "temporary files", "fail", "n2: /tmp is full"),
    ],
)
def test_what_a_node_finds_at_home(home: dict[str, Any], name: str, grade: str, words: str) -> None:
    seen = three()
    seen.reports["1"] |= home
    assert told(seen)[name][0] == grade and words in told(seen)[name][1]


@pytest.mark.parametrize(
    ("late", "grade", "words"),
    [(30.5, "warn", "within 30.50 s"), ("a file that another node wrote is not there", "fail", "n3: a file that")],
)
def test_a_folder_that_is_slow_or_not_the_same(late: float | str, grade: str, words: str) -> None:
    found = told(three(folder={"1": 0.1, "2": late}))["slurm.folder"]
    assert found[0] == grade and words in found[1]


def test_nothing_set_is_a_warning_and_no_failure() -> None:
    seen = three(folder={})
    for item in seen.reports.values():
        item |= {"redis": {"error": "none runs yet"}, "folder": {"error": "none is set"}}
    found = told(seen)
    assert found["redis"][0] == found["slurm.folder"][0] == "warn" and "clocks" not in found


def test_a_hundred_nodes_make_short_sentences() -> None:
    assert grouped({f"n{at}": "slow" for at in range(100)}, 100) == "every node: slow"
    assert grouped({f"n{at}": "slow" for at in range(50)}, 100).endswith("n7 and 42 more: slow")


async def test_a_wrong_answerer_is_no_node() -> None:
    mine, other = Listener(), Listener()
    await mine.open("127.0.0.1")
    await other.open("127.0.0.1")
    try:
        right = {"address": "127.0.0.1", "port": mine.port, "nonce": mine.nonce}
        assert (await call(right)).ms > 0
        assert (await call({**right, "port": other.port})).error.startswith("somebody else answers at 127.0.0.1 port")
    finally:
        await mine.close()
        await other.close()
    assert (await call(right)).error == f"127.0.0.1 port {mine.port} refuses"


async def test_a_change_in_the_folder_is_seen_and_another_folder_is_not_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node, "SAME_SECONDS", 1.0)
    listener, elsewhere = Listener(tmp_path / "doctor-7"), Listener(tmp_path / "another")
    await listener.open("127.0.0.1")
    await elsewhere.open("127.0.0.1")
    peer = {"address": "127.0.0.1", "port": listener.port, "nonce": listener.nonce}
    nobody = {**peer, "address": "127.0.0.2"}
    away = {**peer, "port": elsewhere.port}
    (tmp_path / "secret").write_text("x")
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        assert await ask(reader, writer, f"look 0.1 x {tmp_path / 'secret'}") != "seen", "it tells of no other file"
        writer.close()
        found = await same_folder({"1": peer, "2": nobody, "3": away}, InFolder(tmp_path, "7"))
        assert list(found) == ["1", "3"] and 0 <= found["1"] < 30, "who can't be reached is not asked"
        assert found["3"] == "a file that another node wrote is not there (No such file or directory)"
    finally:
        await listener.close()
        await elsewhere.close()


async def test_they_meet_in_the_place_that_works(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    both = Meeting([InFolder(tmp_path, "7"), InFolder(tmp_path / "file", "7")])
    await both.put("hello-0", {"node": "n1"})
    assert await both.notes() == {"hello-0": {"node": "n1"}}
    assert list(both.silent) == [str(tmp_path / "file")]
    await both.clear()
    assert await both.notes() == {} and [path.name for path in tmp_path.iterdir()] == ["file"]


async def test_what_hangs_holds_up_nobody() -> None:
    release = asyncio.Event()
    loop = asyncio.get_running_loop()
    with pytest.raises(TimeoutError):
        await beside(lambda: asyncio.run_coroutine_threadsafe(release.wait(), loop).result(), 0.05)
    release.set()
