"""What a worker learns of its scheduler, and the grace that it has there."""

from __future__ import annotations

import asyncio
import os
import stat
from pathlib import Path

import pytest

from workers import scheduler
from workers.scheduler import Scheduler

CONFIG = """Configuration data as of 2024-01-01T00:00:00
KillOnBadExit           = 0
KillWait                = 45 sec
ProctrackType           = proctrack/cgroup

Slurmctld(primary) at host is UP
"""


def test_it_reads_what_slurm_says() -> None:
    assert scheduler.read(CONFIG) == Scheduler(45.0, "cgroup")
    assert not scheduler.read(CONFIG).signals_all
    linuxproc = scheduler.read(CONFIG.replace("cgroup", "linuxproc"))
    assert linuxproc.signals_all and linuxproc.by_pid
    pgid = scheduler.read(CONFIG.replace("cgroup", "pgid"))
    assert pgid.signals_all and not pgid.by_pid


@pytest.mark.parametrize("said", ["", "slurm_load_ctl_conf error: Unable to contact slurm controller", "KillWait = x"])
def test_of_silence_it_thinks_the_worst(said: str) -> None:
    assert scheduler.read(said) == Scheduler()
    assert Scheduler().signals_all and not Scheduler().by_pid


@pytest.mark.parametrize(
    ("wait", "wanted", "grace"), [(30.0, 30.0, 20.0), (5.0, 30.0, 2.5), (300.0, 30.0, 30.0), (30.0, 5.0, 5.0)]
)
def test_what_is_in_work_goes_back_before_slurm_kills(wait: float, wanted: float, grace: float) -> None:
    assert Scheduler(wait).grace(wanted) == grace


def test_it_asks_and_does_not_wait_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.defpath}")
    program = tmp_path / "scontrol"
    program.write_text(f"#!/bin/sh\n[ \"$*\" = 'show config' ] && cat <<'E'\n{CONFIG}E\n", "utf-8")
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    assert asyncio.run(scheduler.ask()) == Scheduler(45.0, "cgroup")
    program.write_text("#!/bin/sh\nexec sleep 600\n", "utf-8")
    monkeypatch.setattr(scheduler, "ASK_SECONDS", 0.2)
    assert asyncio.run(scheduler.ask()) == Scheduler()
    program.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert asyncio.run(scheduler.ask()) == Scheduler()


def test_the_job_as_slurm_writes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID"):
        monkeypatch.delenv(name, raising=False)
    assert scheduler.job() == ""
    monkeypatch.setenv("SLURM_JOB_ID", "14")
    assert scheduler.job() == "14"
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    assert scheduler.job() == "12_3"
