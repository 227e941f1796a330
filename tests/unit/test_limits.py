"""Limits of boxes: what is asked and what the site allows, where cgroups may be made, whom the watchdog kills first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipeline.config import Config
from pipeline.errors import ConfigError, HandlerError
from workers.sandbox.box import Spec
from workers.sandbox.boxes.limits import MB, Cgroup, Limits, find_hierarchy, make_cgroup, prefix
from workers.sandbox.boxes.subtrees import Usage, largest, main_of, without_main
from workers.sandbox.processes import Process

LIMITS = Limits(memory=64 * MB, processes=40, disk=32 * MB, cpus=1.5)


def version_2(folder: Path, controllers: str = "cpuset cpu io memory pids") -> tuple[Path, Path]:
    """A fake /proc/self and /sys/fs/cgroup in which this process's cgroup is delegated."""
    proc, own = folder / "proc", folder / "cgroup" / "user.slice" / "job"
    proc.mkdir()
    own.mkdir(parents=True)
    (folder / "cgroup" / "cgroup.controllers").write_text("cpu memory pids\n")
    (proc / "cgroup").write_text("0::/user.slice/job\n")
    (own / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.procs").write_text(f"{os.getpid()}\n")
    (own / "cgroup.subtree_control").touch()
    return proc, folder / "cgroup"


def version_1(folder: Path) -> tuple[Path, Path]:
    """A fake machine with the old hierarchies: ours are those of memory and pids."""
    proc = folder / "proc"
    proc.mkdir()
    (proc / "cgroup").write_text("9:name=systemd:/\n8:pids:/\n4:memory:/mine\n2:cpu,cpuacct:/not-there\n0::/\n")
    for place in ("pids", "memory/mine"):
        (folder / "cgroup" / place).mkdir(parents=True)
        (folder / "cgroup" / place / "cgroup.procs").touch()
    return proc, folder / "cgroup"


@pytest.mark.parametrize(
    ("site", "asked", "expected"),
    [
        ({}, {}, (4096 * MB, 512, 10_240 * MB, 0.0)),
        ({"memory_mb": 100}, {"memory_mb": 50, "processes": 30, "disk_mb": 7}, (50 * MB, 30, 7 * MB, 0.0)),
        (
            {"memory_mb": 100, "cpus": 2.0},
            {"memory_mb": 500, "processes": 9999, "cpus": 8.0},
            (100 * MB, 512, None, 2.0),
        ),
        ({"cpus": 2.0}, {"cpus": 0.5}, (4096 * MB, 512, None, 0.5)),
        ({}, {"cpus": 0.5}, (4096 * MB, 512, None, 0.5)),
    ],
)
def test_a_task_lowers_and_never_raises(
    site: dict[str, float], asked: dict[str, float], expected: tuple[int, int, int | None, float]
) -> None:
    config = Config().changed({f"sandbox.{name}": value for name, value in site.items()})
    limits = Limits.of(config.sandbox, Spec(**asked))  # type: ignore[arg-type]
    memory, processes, disk, cpus = expected
    assert (limits.memory, limits.processes, limits.cpus) == (memory, processes, cpus)
    assert disk is None or limits.disk == disk


@pytest.mark.parametrize("asked", [{"memory_mb": 31}, {"processes": 15}])
def test_limits_that_no_sandbox_can_live_with_are_told(asked: dict[str, int]) -> None:
    name, value = next(iter(asked.items()))
    with pytest.raises(HandlerError, match=f"{name} = {value}: a sandbox needs {value + 1}"):
        Limits.of(Config().sandbox, Spec(**asked))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=f"sandbox.{name} is {value}: a sandbox needs {value + 1}"):
        Limits.of(Config().changed({f"sandbox.{name}": value}).sandbox, Spec())


def test_files_larger_than_the_disk_limit_are_told() -> None:
    spec = Spec(files={"a": "x" * MB, "b": b"y"}, disk_mb=1)
    with pytest.raises(HandlerError, match="`files` of 2 MB where disk_mb is 1"):
        Limits.of(Config().sandbox, spec).check_files(spec)
    LIMITS.check_files(spec)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"files": {"/x": ""}}, "files: .*inside the home"),
        ({"files": {"a/../../x": ""}}, "files: .*inside the home"),
        ({"files": {"x\0": ""}}, "files: .*inside the home"),
        ({"memory_mb": 0}, "memory_mb: "),
        ({"network": "all"}, "network: 'all' is wrong"),
        ({"images": "x"}, "images: .*valid: image, files"),
    ],
)
def test_what_cant_be_asked_for_is_told_with_its_key(asked: dict[str, object], said: str) -> None:
    with pytest.raises(HandlerError, match=said):
        Spec.of(asked)


def test_version_2_where_it_is_delegated(tmp_path: Path) -> None:
    proc, root = version_2(tmp_path)
    own = root / "user.slice" / "job"
    looked = find_hierarchy(proc, root, look_only=True)
    assert looked is not None
    assert (own / "cgroup.subtree_control").read_text() == ""
    found = find_hierarchy(proc, root)
    assert found == looked
    assert (found.version, set(found.folders)) == (2, {"memory", "pids", "cpu"})
    assert (own / "cgroup.subtree_control").read_text() == "+cpu +memory +pids"
    group = make_cgroup(found, "rollout-x", LIMITS)
    assert group is not None
    assert group.entries == [own / "rollout-x" / "cgroup.procs"]
    texts = {path.name: path.read_text() for path in (own / "rollout-x").iterdir()}
    assert texts == {
        "memory.max": str(64 * MB), "pids.max": "40", "cpu.max": "150000 100000", "memory.swap.max": "0",
    }  # fmt: skip


@pytest.mark.parametrize("controllers", ["cpu pids", ""])
def test_version_2_without_the_memory_controller_is_none(tmp_path: Path, controllers: str) -> None:
    assert find_hierarchy(*version_2(tmp_path, controllers)) is None


def test_version_1_takes_what_is_there(tmp_path: Path) -> None:
    found = find_hierarchy(*version_1(tmp_path))
    assert found is not None
    assert (found.version, set(found.folders)) == (1, {"memory", "pids"})
    group = make_cgroup(found, "rollout-x", LIMITS)
    assert group is not None
    assert len(group.entries) == 2
    assert (found.folders["memory"] / "rollout-x" / "memory.limit_in_bytes").read_text() == str(64 * MB)
    assert (found.folders["pids"] / "rollout-x" / "pids.max").read_text() == "40"


def test_no_cgroups_is_no_error(tmp_path: Path) -> None:
    assert find_hierarchy(tmp_path / "nothing", tmp_path) is None
    found = find_hierarchy(*version_1(tmp_path))
    assert found is not None
    (found.folders["memory"] / "rollout-x").write_text("a file stands where the cgroup should be")
    assert make_cgroup(found, "rollout-x", LIMITS) is None


def test_counters_of_a_cgroup(tmp_path: Path) -> None:
    group = Cgroup(2, {"memory": tmp_path, "pids": tmp_path})
    assert (group.kills(), group.refusals()) == (0, 0)
    (tmp_path / "memory.events").write_text("low 0\noom 4\noom_kill 3\noom_group_kill 0\n")
    (tmp_path / "pids.events").write_text("max 17\n")
    assert (group.kills(), group.refusals()) == (3, 17)
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert Cgroup(1, {"memory": tmp_path}).kills() == 2


def test_what_stands_before_a_command(tmp_path: Path) -> None:
    plain = prefix(LIMITS, None, count_processes=True)
    assert plain[1:] == ["--core=0", f"--fsize={32 * MB}", f"--data={64 * MB}", "--nproc=40", "--"]
    assert "--nproc=47" in prefix(LIMITS, None, count_processes=True, beside=7)
    assert "--nproc=40" not in prefix(LIMITS, None, count_processes=False)
    group = Cgroup(1, {"memory": tmp_path / "a b", "pids": tmp_path / "c"})
    held = prefix(LIMITS, group, count_processes=True)
    assert held[0] == "/bin/sh"
    assert held[4:6] == [str(tmp_path / "a b" / "cgroup.procs"), str(tmp_path / "c" / "cgroup.procs")]
    assert not [word for word in held if word.startswith(("--data", "--nproc"))]


def usage(*rows: tuple[int, int, int]) -> Usage:
    """Rows of (pid, parent, bytes); the first is the oldest."""
    found = [Process(pid, parent, pid, born) for born, (pid, parent, _) in enumerate(rows)]
    return Usage(found, {pid: size for pid, _, size in rows}, len(rows))


@pytest.mark.parametrize(
    ("rows", "killed"),
    [
        ([(1, 99, 1), (2, 1, 50), (3, 1, 60)], {3}),  # the larger child of the shell
        ([(1, 99, 1), (2, 1, 5), (3, 2, 5), (4, 3, 80), (5, 1, 60)], {4}),  # the one that holds it, deep down
        ([(1, 99, 1), (2, 1, 5), (3, 2, 40), (4, 2, 40), (5, 1, 60)], {2, 3, 4}),  # many that hold it together
        ([(1, 99, 1), (2, 98, 70), (3, 1, 60)], {2}),  # a kernel beside the shell
        ([(1, 99, 100), (2, 1, 50)], {1}),  # the shell itself uses most
        ([(1, 99, 100)], {1}),  # nothing else is there
    ],
)
def test_what_uses_most_is_killed_first(rows: list[tuple[int, int, int]], killed: set[int]) -> None:
    assert {item.pid for item in largest(usage(*rows))} == killed


def test_the_oldest_is_the_shell() -> None:
    found = usage((7, 1, 0), (3, 7, 0), (5, 7, 0)).processes
    assert main_of(found) == found[0]
    assert without_main(reversed(found)) == [found[2], found[1]]
    assert main_of([]) is None
