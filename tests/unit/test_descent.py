"""What descends from a process, found without a look at the whole machine."""

from __future__ import annotations

import os
import subprocess
import threading
from collections.abc import Iterator

import pytest

from tests.waiting import until
from workers.sandbox import processes
from workers.sandbox.descent import below, near


@pytest.fixture
def family() -> Iterator[subprocess.Popen[str]]:
    """A shell with a child and a grandchild, started by a thread that has ended."""
    made: list[subprocess.Popen[str]] = []
    script = "(sleep 60 & echo $!; wait) & echo $!; wait"

    def start() -> None:
        made.append(
            subprocess.Popen(
                ["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True,
                env={**os.environ, processes.MARK: "descent"},
            )
        )  # fmt: skip

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    yield made[0]
    processes.kill_all("descent")
    made[0].wait()
    if made[0].stdout is not None:
        made[0].stdout.close()


def told(family: subprocess.Popen[str]) -> set[int]:
    assert family.stdout is not None
    return {int(family.stdout.readline()), int(family.stdout.readline())}


def test_all_generations_are_found_and_nobody_else(family: subprocess.Popen[str]) -> None:
    pids = {family.pid} | told(family)
    assert set(below(family.pid)) == pids
    assert pids | {os.getpid()} <= set(below(os.getpid()))
    assert os.getppid() not in below(os.getpid())
    assert below(family.pid) == {pid: item for pid, item in processes.living().items() if pid in pids}


def test_an_orphan_that_an_ancestor_got_is_near(family: subprocess.Popen[str]) -> None:
    pids = told(family)
    os.kill(family.pid, 9)
    family.wait()
    assert not pids & set(below(os.getpid()))
    orphan = {pid for pid in pids if (item := processes.look(pid)) is not None and item.parent not in pids}
    assert len(orphan) == 1 and orphan <= set(near())
    assert processes.kill_all("descent", among=near) == []
    until(lambda: all(processes.look(pid) is None for pid in orphan))


def test_who_has_ended_has_no_family() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    assert below(ended.pid) == {}


def test_a_kernel_without_lists_of_children_has_all_looked_at(
    family: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = told(family)
    monkeypatch.setattr(os.path, "exists", lambda _: False)
    assert {family.pid} | pids <= set(below(family.pid))
