"""`rollout doctor --cluster` in real jobs: a node that is cut off, one that never comes, a meeting in either place."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from pipeline import server
from tests.slurm.cluster import Cluster

ROLLOUT = f"{sys.executable} -P -m workers.cli"
DOCTOR = f"{ROLLOUT} doctor --cluster"
OWN = "export ROLLOUT_NETWORK__INTERFACE=127.0.0.${SLURMD_NODENAME#n}"
"""Each node of the test's Slurm publishes an address of its own, though all of them are this machine."""


def doctor(cluster: Cluster, script: str, *options: str, **variables: str) -> Any:
    """Run a script as one task a node; the finished srun."""
    command = ["srun", "-N4", "--ntasks-per-node=1", *options, "bash", "-c", script]
    env = cluster.env(**variables)
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=80, cwd=cluster.folder)


def grades(text: str) -> dict[str, str]:
    return {item["name"]: item["grade"] for item in json.loads(text)["findings"]}


def test_all_reach_each_other_and_nothing_is_left(cluster: Cluster, tmp_path: Path) -> None:
    with server.start(tcp=("127.0.0.1", 0)) as running:
        where = {"ROLLOUT_REDIS__URL": running.url, "ROLLOUT_REDIS__PASSWORD_FILE": running.password_file}
        done = doctor(cluster, f"{OWN}; exec {DOCTOR} --json", ROLLOUT_SLURM__FOLDER=str(tmp_path), **where)
        assert done.returncode == 0, done.stderr
        found = json.loads(done.stdout)
        assert {about["address"] for about in found["nodes"].values()} == {f"127.0.0.{at}" for at in range(1, 5)}
        assert all(isinstance(ms, float) for calls in found["reach"].values() for ms in calls.values())
        assert [len(calls) for calls in found["reach"].values()] == [3] * 4
        names = (
            "nodes",
            "addresses",
            "reach",
            "redis",
            "clocks",
            "versions",
            "slurm.folder",
            "sandbox",
            "temporary files",
        )
        assert grades(done.stdout) == dict.fromkeys(names, "ok")

        without = doctor(cluster, f"exec {DOCTOR} --json", **where)
        assert grades(without.stdout)["slurm.folder"] == "warn" and without.returncode == 0, without.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_node_that_is_cut_off_and_a_redis_that_one_can_t_reach(cluster: Cluster, tmp_path: Path) -> None:
    """n3's process has a network namespace of its own: it sees the shared folder and nothing else."""
    apart = f'[ "$SLURMD_NODENAME" = n3 ] && exec unshare -rn bash -c "ip link set lo up; exec {DOCTOR}"'
    if subprocess.run(["unshare", "-rn", "true"]).returncode:
        pytest.skip("this user can make no network namespace")
    with server.start(tcp=("127.0.0.1", 0)) as running:
        where = {"ROLLOUT_REDIS__URL": running.url, "ROLLOUT_REDIS__PASSWORD_FILE": running.password_file}
        done = doctor(cluster, f"{apart}; {OWN}; exec {DOCTOR}", ROLLOUT_SLURM__FOLDER=str(tmp_path), **where)
    assert done.returncode == 1
    text = " ".join(done.stdout.split())
    assert "n3 reaches no other node" in text and "n3 can't be reached from n1, n2, n4" in text, done.stdout
    assert "n3: Redis does not answer" in text
    rows = [line.split() for line in done.stdout.splitlines()[1:5]]
    assert [row[2:] for row in rows if row[0] == "n3"] == [["no", "no", "-", "no"]]
    assert [row[4] for row in rows] == ["no", "no", "-", "no"] and list(tmp_path.iterdir()) == []


def test_a_batch_script_needs_no_srun(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(DOCTOR, "-N3", ROLLOUT_SLURM__FOLDER=str(tmp_path))
    cluster.until_state(job, "COMPLETED", "FAILED")
    text = cluster.log(job)
    assert "all 6 ways between nodes work" in text and "none runs yet" in text, text
    assert cluster.rows(job)[0].state == "COMPLETED"


def test_outside_of_a_job_a_sentence_says_what_to_type() -> None:
    env = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    done = subprocess.run([*DOCTOR.split()], capture_output=True, text=True, env=env, timeout=60)
    assert done.returncode == 1
    assert "srun -N4 --ntasks-per-node=1 rollout doctor --cluster" in done.stderr


def test_no_place_to_meet_is_told_once_a_node(cluster: Cluster) -> None:
    done = doctor(cluster, f"exec {DOCTOR}", "-N2", ROLLOUT_REDIS__URL="unix:///nowhere.sock")
    assert done.returncode == 1 and "have no place to meet: set slurm.folder" in done.stderr


@pytest.mark.ci
def test_a_node_that_never_comes_is_named_after_half_a_minute(cluster: Cluster, tmp_path: Path) -> None:
    """It is the one with the lowest rank, which would have reported."""
    began = time.monotonic()
    done = doctor(
        cluster, f'[ "$SLURMD_NODENAME" = n1 ] && exec sleep 36; exec {DOCTOR}', ROLLOUT_SLURM__FOLDER=str(tmp_path)
    )
    assert done.returncode == 1 and "n1 did not come within 30 s" in done.stdout, done.stdout
    assert time.monotonic() - began < 60
