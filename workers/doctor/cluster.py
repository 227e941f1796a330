"""`rollout doctor --cluster`: the nodes of one Slurm job find each other, try all ways between them, and one reports.

Every task of the step does the same: it listens at the address that it would publish, leaves a note, waits for the
others' notes, calls each of them, looks around at home, and leaves its report. The lowest rank that came tells it all.
"""

from __future__ import annotations

import asyncio
import logging
import re
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline import server
from pipeline.config import Config
from pipeline.connection import connect
from pipeline.errors import ConfigError, LineError
from pipeline.queue import Queue
from workers.doctor.matrix import Seen
from workers.doctor.meeting import InFolder, InRedis, Meeting, Place
from workers.doctor.node import SANDBOX_SECONDS, SEEN_SECONDS, Listener, at_home, call, hello, same_folder

log = logging.getLogger(__name__)

ARRIVE_SECONDS = 30.0
"""For all nodes to come; who has not by then is named."""
REPORT_SECONDS = SANDBOX_SECONDS + 15.0
LEAVE_SECONDS = REPORT_SECONDS + SEEN_SECONDS
LOOK_SECONDS = 0.2
HOW = "srun -N{nodes} --ntasks-per-node=1 rollout doctor --cluster"


@dataclass(frozen=True)
class Step:
    """This task's place in its Slurm step. `names`: one a rank, in their order; `run`: the same for all of them."""

    rank: int
    names: list[str]
    run: str


def step(environ: Mapping[str, str], hostnames: Callable[[str], list[str]]) -> Step | None:
    """The step that this process is a task of; None in a job of several nodes, outside of a step over them all.

    `hostnames` takes Slurm's short list of nodes apart. Raises ConfigError: no job, or one of a single node.
    """
    job = environ.get("SLURM_JOB_ID", "")
    if not job:
        raise ConfigError(f"--cluster tries the ways between nodes from inside a job: {HOW.format(nodes=4)}")
    nodes = int(environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES") or 1)
    count = int(environ.get("SLURM_STEP_NUM_TASKS") or 0)
    if nodes < 2 and count < 2:
        raise ConfigError(f"job {job} has one node: nothing lies between nodes there; try {HOW.format(nodes=2)}")
    if int(environ.get("SLURM_STEP_NUM_NODES") or 0) < nodes or count < 2:
        return None
    layout = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
    hosts = hostnames(environ.get("SLURM_STEP_NODELIST", ""))
    each = tasks_per_node(layout)
    if sum(each) != count or len(each) != len(hosts):
        names = [f"rank {rank}" for rank in range(count)]
    else:
        names = [host for host, tasks in zip(hosts, each, strict=True) for _ in range(tasks)]
    twice = {name for name, times in Counter(names).items() if times > 1}
    names = [f"{name}#{rank}" if name in twice else name for rank, name in enumerate(names)]
    run = "-".join((job, environ.get("SLURM_STEP_ID", "0"), environ.get("SLURM_RESTART_COUNT", "0")))
    return Step(int(environ["SLURM_PROCID"]), names, run)


def tasks_per_node(text: str) -> list[int]:
    """Slurm's "2(x3),1" as [2, 2, 2, 1]."""
    found = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(tasks) for tasks, times in found for _ in range(int(times or 1))]


def hostnames(text: str) -> list[str]:
    """ "n[1-3]" as n1, n2, n3, by Slurm itself; empty where it does not say."""
    try:
        command = ["scontrol", "show", "hostnames", text]
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("scontrol does not name the nodes: %s", error)
        return []
    return done.stdout.split() if done.returncode == 0 else []


def by_srun(environ: Mapping[str, str], arguments: list[str]) -> int:
    """The same command as one task a node of this job; its exit code. Raises ConfigError without srun."""
    nodes = environ.get("SLURM_JOB_NUM_NODES") or environ.get("SLURM_NNODES", "1")
    spread = ["-N", nodes, "-n", nodes, "--ntasks-per-node=1", "--overlap", "--kill-on-bad-exit=0"]
    command = ["srun", *spread, sys.executable, "-P", "-m", "workers.cli", *arguments]
    try:
        return subprocess.run(command, check=False, stdin=subprocess.DEVNULL).returncode
    except OSError as error:
        raise ConfigError(f"srun can't be started here ({error.strerror}): {HOW.format(nodes=nodes)}") from None


async def examine(config: Config, here: Step) -> Seen | None:
    """Take part; all that was seen for the one who reports, None for the others. At most four minutes.

    Raises ConfigError where the nodes have no place to meet, and LineError where none answers from here.
    """
    config = server.located(config)
    client = connect(config) if config.redis.url.startswith("redis") else None  # a Unix socket is nobody else's
    queue = None if client is None else Queue(client, config)
    places: list[Place] = [] if queue is None else [InRedis(queue, here.run)]
    shared = InFolder(config.path_of(config.slurm.folder).absolute(), here.run) if config.slurm.folder else None
    places += [shared] if shared is not None else []
    if not places:
        raise ConfigError(
            "the nodes have no place to meet: set slurm.folder to a folder on the shared file system, or redis.url to "
            "a Redis that all of them reach"
        )
    listener = Listener(shared.path if shared is not None else None)
    try:
        return await _Part(config, here, queue, Meeting(places), listener).take()
    finally:
        await listener.close()
        if client is not None:
            await client.aclose()


class _Part:
    """One task's run through it all."""

    def __init__(self, config: Config, here: Step, queue: Queue | None, meeting: Meeting, listener: Listener) -> None:
        self._config, self._here, self._queue = config, here, queue
        self._meeting, self._listener = meeting, listener
        self._rank = str(here.rank)

    async def take(self) -> Seen | None:
        home = asyncio.create_task(at_home(self._config, self._queue))
        await self._meeting.put(f"hello-{self._rank}", await self._open())
        if not self._meeting.places:
            home.cancel()
            whys = "; ".join(f"{place}: {why}" for place, why in self._meeting.silent.items())
            raise LineError(f"{self._here.names[self._here.rank]} can leave no note for the other nodes: {whys}")
        hellos = await self._notes("hello", ARRIVE_SECONDS, len(self._here.names))
        first = min(hellos, key=int, default=self._rank)
        others = {rank: peer for rank, peer in hellos.items() if rank != self._rank and peer["address"]}
        calls = await asyncio.gather(*(call(peer) for peer in others.values()))
        told = {rank: asdict(called) for rank, called in zip(others, calls, strict=True)}
        folder = asyncio.create_task(self._folder(others if first == self._rank else {}))
        await self._meeting.put(f"report-{self._rank}", {"calls": told, **await home})
        if first != self._rank:
            reached = first in told and not told[first]["error"]
            await self._until_told(self._here.names[int(first)], others[first] if reached else None)
            return None
        found = await self._notes("report", REPORT_SECONDS, len(hellos))
        seen = Seen(
            self._here.names, hellos, found, folder=await folder, silent=self._meeting.silent, waited=ARRIVE_SECONDS
        )
        await self._meeting.clear()
        return seen

    async def _open(self) -> dict[str, Any]:
        """This node's hello, with its listener open where that is possible."""
        about = await asyncio.to_thread(hello, self._config, self._here.names[self._here.rank])
        if about["address"]:
            try:
                await self._listener.open(about["address"])
            except OSError as error:
                wrong = f"nothing can listen on {about['address']}: {error.strerror or error}"
                about |= {"wrong": wrong, "address": ""}
        return about | {"port": self._listener.port, "nonce": self._listener.nonce}

    async def _notes(self, kind: str, seconds: float, wanted: int) -> dict[str, dict[str, Any]]:
        """Rank -> its note of this kind, once all are there or the time is over."""
        until, found = time.monotonic() + seconds, {}
        while True:
            notes = await self._meeting.notes()
            ranks = sorted(int(name.partition("-")[2]) for name in notes if name.startswith(f"{kind}-"))
            found = {str(rank): notes[f"{kind}-{rank}"] for rank in ranks}
            if len(found) >= wanted or time.monotonic() > until or not self._meeting.places:
                return found
            await asyncio.sleep(LOOK_SECONDS)

    async def _folder(self, others: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """By way of the folder itself; nobody to ask, or no folder: nothing is found out."""
        place = next((place for place in self._meeting.places if isinstance(place, InFolder)), None)
        return await same_folder(others, place) if place is not None and others else {}

    async def _until_told(self, name: str, first: dict[str, Any] | None) -> None:
        """Listen on until the one who reports has taken the notes away: it, and late comers, may still ask.

        `first`: that one, where it can be called; one that answers no more has ended. Raises LineError when it ended,
        or took too long, before it told anything: then nobody does.
        """
        until = time.monotonic() + LEAVE_SECONDS
        over = False
        while f"hello-{self._rank}" in await self._meeting.notes():
            if over:
                await self._meeting.clear()
                raise LineError(
                    f"{name}, which was to report for all nodes, ended before it did: look at it, and try again"
                )
            over = time.monotonic() > until or (first is not None and bool((await call(first)).error))
            if not over:  # else look once more: it may have taken the notes away in this moment
                await asyncio.sleep(5 * LOOK_SECONDS)
