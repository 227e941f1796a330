"""A private Slurm of several nodes on this machine (`.ci/slurm-local.sh`), and what a test does to it.

Fixtures, in conftest.py: `cluster` (4 nodes) and `cluster8` (8 nodes). They start once a run; every test gets them
empty, and SLURM_CONF points there in the test's own environment: `rollout slurm ...` and sbatch need nothing else.

    job = cluster.submit("sleep 60", "--array=1-4", "--partition=low", "--requeue")   # text of a script, or a file
    cluster.until_running(job, 4)              # until so many of its tasks run; a task's id is "12_3", a job's "12"
    cluster.rows(job)                          # list of Row(id, job, name, state, reason, node, partition, restarts)
    cluster.down_node("n2")                    # the node fails: its jobs are requeued at once (the fast way)
    cluster.kill_node("n2")                    # sudden death of slurmd and of all that runs there; noticed at once
    cluster.kill_slurmd("n2")                  # slurmd alone dies: its jobs run on there, and once more elsewhere
    cluster.start_node("n2")                   # back again, after any of the three
    cluster.requeue("12_3"); cluster.cancel("12", "--signal=TERM", "--batch")
    cluster.preempt("n3", seconds=5)           # a job of partition main takes the node: what is in `low` there goes
    cluster.call("scontrol", "show", "job", "12")
    cluster.processes("n2")                    # living processes of this Slurm, or of one of its nodes
    cluster.log("12_3")                        # what a job wrote, unless it has an --output of its own

Partitions: `main` (the default) preempts `low`. Times are short: a requeued job runs again after 5 to 8 s; whatever is
cancelled, preempted or requeued has 5 s between SIGTERM and SIGKILL. Every node claims 16 cores, 64 GB and one GPU,
whatever the machine has; a task goes to the node with the fewest. Jobs get the test's environment, as sbatch does it.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / ".ci" / "slurm-local.sh"
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "OUT_OF_MEMORY")
COLUMNS = ("arrayjobid", "arraytaskid", "jobid", "name", "state", "reason", "nodelist", "partition", "restartcnt")
SETTINGS = {
    "SLURM_LOCAL_CPUS": "16",
    "SLURM_LOCAL_MEM": "65536",
    "SLURM_LOCAL_GPUS": "1",
    "SLURM_LOCAL_REQUEUE_WAIT": "5",
    "SLURM_LOCAL_GRACE": "0",
}


@dataclass(frozen=True)
class Row:
    """One task of a job, as squeue knows it."""

    id: str  # "12_3", or "12" for a job that is no array
    job: str  # "12"
    name: str
    state: str  # PENDING, RUNNING, COMPLETING, ...
    reason: str
    node: str
    partition: str
    restarts: int

    @property
    def over(self) -> bool:
        """Whether it has ended for good."""
        return self.state in ENDED


class Cluster:
    """One Slurm of `size` nodes, n1 and so on, in a temporary folder of its own."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.nodes = [f"n{number}" for number in range(1, size + 1)]
        self.folder = Path(tempfile.mkdtemp(prefix="sl-", dir="/tmp"))  # a short path: it holds sockets
        self.conf = str(self.folder / "slurm.conf")

    # --- the cluster itself

    def start(self) -> None:
        """Bring it up. Raises RuntimeError with what the script said."""
        for last in (False, False, True):
            port = str(random.randrange(20_000, 30_000, 10))  # below the ports that the kernel gives away by itself
            done = self._script("start", str(self.size), SLURM_LOCAL_PORT=port)
            if done.returncode == 0:
                return
            self._script("stop")  # another cluster may have taken a port at the same moment
            if last:
                raise RuntimeError(f"slurm-local.sh start {self.size}:\n{done.stdout}\n{done.stderr}")

    def reset(self) -> None:
        """End all jobs, bring all nodes back, and wait until every node is idle."""
        self.call("scancel", "--quiet", "--me", check=False)
        self.until(lambda: all(row.over for row in self.rows()), 30.0, "that all jobs end")
        for node in self.nodes:
            self.start_node(node)
        self.until(lambda: set(self.states().values()) == {"idle"}, 60.0, "that all nodes are idle")
        self.end(self.processes(jobs=True))

    def stop(self) -> list[str]:
        """End everything and remove the folder; returns the command lines of processes that it had to kill."""
        self._script("stop")
        end = time.monotonic() + 5.0
        while (left := self.processes()) and time.monotonic() < end:
            time.sleep(0.1)
        lines = self.end(left)
        shutil.rmtree(self.folder, ignore_errors=True)
        return lines

    def states(self) -> dict[str, str]:
        """State of each node: idle, mixed, allocated, down, drained, ...; `*` behind it: it does not answer."""
        lines = self.call("sinfo", "-h", "-N", "-p", "main", "-o", "%N %T").splitlines()
        return dict(line.split() for line in lines)

    def call(self, *command: str, check: bool = True, seconds: float = 30.0) -> str:
        """One of Slurm's own commands; returns what it wrote. Raises RuntimeError when it fails and `check`."""
        done = subprocess.run(command, capture_output=True, text=True, env=self.env(), timeout=seconds)
        if check and done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stdout}{done.stderr}")
        return done.stdout

    def env(self, **more: str) -> dict[str, str]:
        """This process's environment with this Slurm in it, and none of another."""
        kept = {name: value for name, value in os.environ.items() if not re.match(r"(SLURM|SBATCH)", name)}
        return {**kept, "SLURM_CONF": self.conf, **more}

    # --- jobs

    def submit(self, script: str | Path, *options: str, cwd: str | Path | None = None, **variables: str) -> str:
        """sbatch a file, or the text of a script; returns the job's id. `variables` are added to the environment."""
        output = [] if any(option.startswith("--output") for option in options) else [f"--output={self.folder}/out-%j"]
        command = ["sbatch", "--parsable", *output, *options]
        text = None
        if isinstance(script, Path):
            command.append(str(script))
        else:
            text = script if script.startswith("#!") else f"#!/bin/bash\n{script}\n"
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env=self.env(**variables), cwd=cwd or self.folder,
            timeout=30,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)}: exit {done.returncode}: {done.stderr}")
        return done.stdout.strip().split(";")[0]

    def rows(self, job: str = "", *, name: str = "") -> list[Row]:
        """The tasks that Slurm still knows, ended ones too; those of a job, of a task, or of a job's name."""
        form = ",".join(f"{column}:|" for column in COLUMNS)
        rows = [_row(line) for line in self.call("squeue", "-h", "-r", "-t", "all", "-O", form).splitlines()]
        return [row for row in rows if job in ("", row.id, row.job) and name in ("", row.name)]

    def cancel(self, job: str, *options: str) -> None:
        """scancel; with options such as --signal=TERM --batch."""
        self.call("scancel", *options, job)

    def requeue(self, job: str) -> None:
        """scontrol requeue: it ends now, and runs again on whatever node is free."""
        self.call("scontrol", "requeue", job)

    def preempt(self, node: str, seconds: float = 5.0) -> str:
        """A job of partition main that wants the whole node for so long: what is in `low` there is requeued."""
        return self.submit(f"sleep {seconds}", "-p", "main", "-w", node, "--exclusive", "--job-name=preempts")

    def log(self, task: str) -> str:
        """What a job wrote so far, requeued runs included; of a job without an --output of its own."""
        number = _number(self.call("scontrol", "show", "job", task), r"^JobId=(\d+)")
        path = self.folder / f"out-{number}"
        return path.read_text("utf-8", "replace") if path.exists() else ""

    # --- nodes

    def down_node(self, node: str, reason: str = "test") -> None:
        """The node fails, as Slurm sees it: its jobs end, and those with --requeue wait for another."""
        self.call("scontrol", "update", f"NodeName={node}", "State=DOWN", f"Reason={reason}")

    def kill_node(self, node: str, *, noticed: bool = True) -> None:
        """Its sudden death: SIGKILL to slurmd and to all that runs there. Slurm by itself notices it after 28 s.

        A node that comes back before that may keep its jobs "running" in Slurm's books: start it later, or `noticed`.
        """
        self._script("kill-node", node, check=True)
        self.end(self.processes(node))
        if noticed:
            self.down_node(node)

    def kill_slurmd(self, node: str, *, noticed: bool = True) -> None:
        """SIGKILL to slurmd alone: jobs run on there while Slurm takes the node for dead, and starts them elsewhere."""
        self._script("kill-slurmd", node, check=True)
        if noticed:
            self.down_node(node)

    def start_node(self, node: str) -> None:
        """Bring it back, whatever was done to it."""
        self._script("start-node", node, check=True)
        if not self.states().get(node, "").startswith(("idle", "mixed", "allocated", "completing")):
            with contextlib.suppress(RuntimeError):  # it came back by itself meanwhile
                self.call("scontrol", "update", f"NodeName={node}", "State=RESUME")

    # --- processes

    def processes(self, node: str = "", *, jobs: bool = False) -> list[psutil.Process]:
        """Living processes with this SLURM_CONF; with `jobs` or of one node, without Slurm's own daemons."""
        found = []
        for process in psutil.process_iter(["status"]):
            with contextlib.suppress(psutil.Error, OSError):
                environ = process.environ()
                if process.info["status"] == psutil.STATUS_ZOMBIE or environ.get("SLURM_CONF") != self.conf:
                    continue
                if (node or jobs) and environ.get("SLURMD_NODENAME", "") not in ({node} if node else set(self.nodes)):
                    continue
                found.append(process)
        return found

    @staticmethod
    def end(processes: Iterable[psutil.Process]) -> list[str]:
        """SIGKILL to these; returns their command lines."""
        lines = []
        for process in processes:
            with contextlib.suppress(psutil.Error):
                lines.append(" ".join(process.cmdline()))
                process.send_signal(signal.SIGKILL)
                process.wait(5)
        return lines

    # --- waiting

    def until(self, true: Callable[[], object], seconds: float = 60.0, what: str = "it") -> None:
        """Wait for something to become true. Raises AssertionError, with Slurm's own view, when it does not."""
        end = time.monotonic() + seconds
        while not true():
            if time.monotonic() > end:
                seen = "\n".join(map(str, self.rows()))
                raise AssertionError(f"waited {seconds:g} s for {what}\nnodes: {self.states()}\n{seen}")
            time.sleep(0.1)

    def until_running(self, job: str, count: int = 1, seconds: float = 60.0) -> list[Row]:
        """Wait until so many tasks of the job run; returns them."""
        return self.until_state(job, "RUNNING", count=count, seconds=seconds)

    def until_state(self, job: str, *states: str, count: int = 1, seconds: float = 60.0) -> list[Row]:
        """Wait until so many tasks of the job are in one of these states; returns them."""

        def there() -> list[Row]:
            return [row for row in self.rows(job) if row.state in states]

        self.until(lambda: len(there()) >= count, seconds, f"{count} tasks of {job} in {', '.join(states)}")
        return there()

    def _script(self, *words: str, check: bool = False, **variables: str) -> subprocess.CompletedProcess[str]:
        env = self.env(SLURM_LOCAL_DIR=str(self.folder), **SETTINGS, **variables)
        done = subprocess.run(["bash", str(SCRIPT), *words], capture_output=True, text=True, env=env, timeout=90)
        if check and done.returncode:
            raise RuntimeError(f"slurm-local.sh {' '.join(words)}: {done.stdout}{done.stderr}")
        return done


def _row(line: str) -> Row:
    array, task, job, name, state, reason, node, partition, restarts = line.split("|")[: len(COLUMNS)]
    inside = task not in ("N/A", "")
    return Row(f"{array}_{task}" if inside else job, array, name, state, reason, node, partition, int(restarts or 0))


def _number(text: str, pattern: str) -> str:
    found = re.search(pattern, text, re.MULTILINE)
    return found.group(1) if found else ""
