"""The lock in a shared folder: one holder, followed only when it is silent for a lease, lost when it can't renew."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline import folder_lock
from pipeline.folder_lock import FolderLock, look
from tests.waiting import until

LEASE = 2.0
ABOUT = {"job": "12", "host": "n3", "pid": 77, "started": 1.5}
HOLDER = """
import sys, time
from pathlib import Path
from pipeline.folder_lock import FolderLock
lock = FolderLock(Path(sys.argv[1]), {"pid": 5}, float(sys.argv[2]))
assert lock.take(wait=0)
print("taken", flush=True)
while lock.held:
    time.sleep(0.01)
print(lock.why_lost, flush=True)
lock.release()
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "lock"


def names(path: Path) -> list[str]:
    return sorted(os.listdir(path.parent))


def silent(path: Path, number: int = 1, text: str = '{"state": "held    ", "host": "n9"}') -> None:
    """A holder that is not heard of any more."""
    path.with_name(f"lock.{number}").write_text(text, encoding="utf-8")


def test_it_has_one_holder_and_the_next_one_follows_at_once(path: Path) -> None:
    one, two = FolderLock(path, ABOUT, 60.0), FolderLock(path, ABOUT, 60.0)
    assert one.take(wait=0) and one.held and one.before is None
    assert not two.take(wait=0) and not two.held
    one.release()
    assert not one.held
    assert two.take(wait=0) and two.held and two.number == 2
    assert two.before is not None and two.before.released
    assert names(path) == ["lock.2"], "what is over is removed"
    two.release()
    two.release()
    assert names(path) == ["lock.2"], "the number stays, so that it only grows"


def test_who_goes_without_a_word_leaves_what_a_dead_holder_leaves(path: Path) -> None:
    lock = FolderLock(path, ABOUT, 0.3)
    assert lock.take(wait=0)
    lock.release(in_order=False)
    found = look(path)
    assert not lock.held and found is not None and not found.released
    with FolderLock(path, ABOUT, 0.3) as follower:
        assert not follower.take(wait=0) and follower.take(wait=30.0)


def test_a_living_holder_is_never_followed(path: Path) -> None:
    with FolderLock(path, ABOUT, LEASE) as one:
        assert one.take(wait=0)
        told: list[str] = []
        assert not FolderLock(path, {}, 0.9 * LEASE).take(
            wait=1.3 * LEASE, told=lambda holder: told.append(str(holder))
        )
        assert one.held
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(1.5))
        assert set(told) == {f"job 12 on n3 (pid 77, since {since})"}


def test_a_silent_holder_is_followed_after_a_whole_lease_of_watching(path: Path) -> None:
    silent(path, 7)
    began = time.monotonic()
    with FolderLock(path, ABOUT, 0.5) as lock:
        assert lock.take(wait=30.0)
        assert time.monotonic() - began >= 0.5
        assert lock.number == 8 and lock.before is not None and not lock.before.released
        assert lock.before.about["host"] == "n9"


@pytest.mark.parametrize("text", ["", '{"state": "he', "[]", "\0" * 40])
def test_a_file_that_says_nothing_is_a_holder_that_may_live(path: Path, text: str) -> None:
    silent(path, 1, text)
    began = time.monotonic()
    with FolderLock(path, ABOUT, 0.3) as lock:
        assert lock.take(wait=30.0)
    assert time.monotonic() - began >= 0.3


def test_of_many_takers_one_gets_it(path: Path) -> None:
    """All watch the same silent holder, so all try in the same moment; they give up before the new one could be
    followed, however slowly it renews."""
    silent(path, 10)
    locks = [FolderLock(path, ABOUT, 1.5) for _ in range(16)]
    got: list[bool] = []
    threads = [threading.Thread(target=lambda lock=lock: got.append(lock.take(wait=2.5))) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == [False] * 15 + [True]
    assert [lock.number for lock in locks if lock.number] == [11]
    for lock in locks:
        lock.release()


def test_who_slept_does_not_take_a_number_that_is_over(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It saw number 1 released; meanwhile others have used 2 to 5 and removed them."""
    silent(path, 5)
    seen = folder_lock.Holder(1, "", True, {})
    monkeypatch.setattr(folder_lock, "look", lambda path: seen)
    lock = FolderLock(path, ABOUT, 60.0)
    assert not lock.take(wait=0) and not lock.held
    assert names(path) == ["lock.5"], "and its own file is gone"


def test_a_frozen_holder_has_lost_it_when_it_wakes(path: Path) -> None:
    command = [sys.executable, "-c", HOLDER, str(path), str(LEASE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "taken\n"
            process.send_signal(signal.SIGSTOP)
            renewed: list[float] = []
            with FolderLock(path, ABOUT, LEASE, on_renewed=renewed.append) as lock:
                assert lock.take(wait=30.0)
                process.send_signal(signal.SIGCONT)
                why = process.stdout.readline()
                assert "could not be renewed" in why or "another one has it" in why
                assert process.wait(20) == 0
                since = len(renewed)
                until(lambda: len(renewed) > since + 1)
                assert lock.held and lock.number == 2, "its last words change nothing"
        finally:
            process.kill()


def test_a_folder_that_takes_nothing_is_said_after_a_lease(path: Path) -> None:
    with pytest.raises(OSError, match="No such file"):
        FolderLock(path.parent / "away" / "lock", ABOUT, 0.2).take(wait=3600.0)


def test_it_is_lost_after_half_a_lease_without_a_renewal(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = FolderLock(path, ABOUT, LEASE)
    assert lock.take(wait=0)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        until(lambda: not lock.held)
    assert lock._thread is not None
    assert "could not be renewed for 1 s" in lock.why_lost
    lock._thread.join(LEASE)
    assert not lock.held, "lost is lost, also where it could be renewed again"
    lock.release()
    found = look(path)
    assert found is not None and found.released


def test_a_short_trouble_of_the_folder_is_outlasted(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    renewed: list[float] = []
    lock = FolderLock(path, ABOUT, 4.0, on_renewed=renewed.append)
    failed: list[int] = []
    write = os.pwrite

    def flaky(*about: object) -> int:
        if not failed:
            failed.append(1)
            raise OSError(errno.EIO, "Input/output error")
        return write(*about)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "pwrite", flaky)
    assert lock.take(wait=0)
    began = time.monotonic()
    until(lambda: renewed)
    assert failed and lock.held and renewed[0] >= began
    lock.release()


@pytest.mark.parametrize(("later", "why"), [(True, "another one has it"), (False, "its file is gone")])
def test_another_number_or_none_is_a_loss(path: Path, later: bool, why: str) -> None:
    lock = FolderLock(path, ABOUT, LEASE)
    assert lock.take(wait=0)
    if later:
        silent(path, 2)
    else:
        path.with_name("lock.1").unlink()
    until(lambda: not lock.held)
    assert why in lock.why_lost
    lock.release()


def test_it_can_be_told_to_give_up(path: Path) -> None:
    silent(path)
    looks: list[object] = []
    assert not FolderLock(path, ABOUT, 60.0).take(stop=lambda: len(looks) == 3, told=looks.append)
    assert len(looks) == 3


def test_a_folder_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FolderLock(tmp_path / "no" / "lock", ABOUT, 60.0).take(wait=0)


def test_two_locks_of_one_folder_do_not_meet(tmp_path: Path) -> None:
    with FolderLock(tmp_path / "lock", {}, 60.0) as one, FolderLock(tmp_path / "lock.more", {}, 60.0) as two:
        assert one.take(wait=0) and two.take(wait=0)
        assert names(tmp_path / "lock") == ["lock.1", "lock.more.1"]
