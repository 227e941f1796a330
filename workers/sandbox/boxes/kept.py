"""A box with a keeper: what bubblewrap and Apptainer have in common."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import secrets
import shutil
import signal
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar
from weakref import WeakValueDictionary

from pipeline.config import Config
from pipeline.errors import HandlerError, SandboxError
from workers.sandbox import processes, programs
from workers.sandbox.box import Allow, Spec
from workers.sandbox.boxes import aids, environment, layout
from workers.sandbox.boxes.limits import (
    Cgroup,
    Limits,
    find_hierarchy,
    make_cgroup,
    nproc_counts_sandbox,
    prefix,
)
from workers.sandbox.boxes.watchdog import Watchdog
from workers.sandbox.descent import near
from workers.sandbox.processes import Process

if TYPE_CHECKING:
    from workers.sandbox.network.gate import Gate

log = logging.getLogger(__name__)

KEEPER = "keeper"
"""File in the box's folder that says which process is its keeper: whoever sweeps after us ends exactly that one."""

SOCKETS_INSIDE = "/run/rollout"
STEP_SECONDS = 10.0

_OF_LIMITS = re.compile(
    r"resource temporarily unavailable|cannot fork|cannot allocate memory|out of memory", re.IGNORECASE
)
"""What programs say where a limit of the sandbox stopped them."""
_KILLED = (-signal.SIGKILL, 128 + signal.SIGKILL)


class FirstProcess(Protocol):
    """The keeper, however it was started."""

    pid: int

    def alive(self) -> bool: ...

    async def stop(self) -> None: ...

    async def environment(self) -> bytes: ...


@dataclass(frozen=True, slots=True)
class Setting:
    """What a driver gives each of its boxes."""

    config: Config
    spec: Spec
    name: str
    folder: Path
    env: dict[str, str]
    limits: Limits
    group: Cgroup | None
    watchdog: Watchdog


class KeptBox(ABC):
    """A live sandbox with namespaces of its own."""

    home: str

    def __init__(self, setting: Setting) -> None:
        self.name = setting.name
        self.folder = setting.folder
        self.sockets = self.folder / "run"
        self.sockets_inside = SOCKETS_INSIDE
        self.said = self.folder / "said"
        self.pid: int | None = None
        self.notes: list[str] = []
        self.spec = setting.spec
        self.limits = setting.limits
        self.group = setting.group
        self.workdir = os.path.join(self.home, self.spec.workdir) if self.spec.workdir else self.home
        self._config = setting.config
        self._watchdog = setting.watchdog
        self._env = setting.env
        self._base: dict[str, str] = {}
        self._keeper: FirstProcess | None = None
        self._gate: Gate | None = None
        self._counted = self.group is None and nproc_counts_sandbox()
        self._beside = 0

    @abstractmethod
    async def _start_keeper(self) -> FirstProcess:
        """Start the keeper. Raises SandboxError."""

    async def _prepare(self) -> None:
        """What is done inside before the agent may act."""
        return

    def _inner(self) -> list[str]:
        """What runs inside before each command."""
        return []

    async def _image_environment(self, keeper: FirstProcess) -> dict[str, str]:
        """Variables that the image brings. Raises SandboxError."""
        return {}

    @property
    def own_network(self) -> bool:
        """False where the sandbox uses this machine's network."""
        return self.spec.network != "host"

    async def start(self) -> None:
        """Start the keeper; the files are there. Raises SandboxError, HandlerError."""
        try:
            keeper = self._keeper = await self._start_keeper()
            self.pid = keeper.pid
            self._beside = processes.beside(keeper.pid) if self._counted else 0
            (self.folder / KEEPER).write_text(processes.identity(keeper.pid), "utf-8")
            if self.group is not None:
                self.group.add(keeper.pid)
            await self._prepare()
            self._base = await self._image_environment(keeper)
            if isinstance(self.spec.network, Allow):
                from workers.sandbox.network.gate import open_gate

                self._gate = await open_gate(keeper.pid, self.spec.network.allow)
            await self._check_workdir()
        except OSError as error:
            raise SandboxError(f"the sandbox {self.name} did not start well: {error}") from error

    async def _check_workdir(self) -> None:
        """A relative folder is made; an absolute one must be there. Raises HandlerError."""
        if not self.spec.workdir:
            return
        test = "test -d" if os.path.isabs(self.spec.workdir) else "mkdir -p --"
        argv = self.command(["/bin/sh", "-c", f'{test} "$1"', "sh", self.workdir])
        missing = f"the sandbox has no folder {self.workdir!r} to start in"
        try:
            await self._run_inside(argv, missing)
        except _Refused:
            raise HandlerError(f"{missing}: correct `workdir`") from None

    async def _run_inside(self, argv: Sequence[str], what: str) -> None:
        """Run a command line of ours to its end. Raises SandboxError that begins with `what`, OSError."""
        code, said = await programs.run(argv, seconds=STEP_SECONDS, env=self.environment())
        if code in _KILLED or (code != 0 and _OF_LIMITS.search(said)):
            raise SandboxError(f"{what}: {said[-300:] or 'the program was killed'}{self.limits.told()}")
        if code != 0:
            raise _Refused(f"{what}: {said[-300:]}")

    def _join(self) -> list[str]:
        """What stands before a command that runs inside with all rights there."""
        nsenter = shutil.which("nsenter", path=environment.PATH)
        if nsenter is None:
            raise SandboxError("nsenter (util-linux) is not installed here, and sandboxes need it")
        if self._keeper is None or not self._keeper.alive():  # its pid may be another process's by now
            raise SandboxError(f"the sandbox {self.name} does not run any more: it must be restarted")
        network = ["-n"] if self.own_network else []
        join = [nsenter, "-t", str(self._keeper.pid), "-U", "-m", "-p", "-i", "-u", *network]
        return [*self._prefix(), *join, "--preserve-credentials", "--"]

    def command(self, argv: Sequence[str]) -> list[str]:
        return [*self._join(), *self._inner(), *argv]

    def environment(self) -> dict[str, str]:
        gate = self._gate.environment() if self._gate is not None else {}
        found = {**environment.plain(self.home), **self._base, **gate, **self._env}
        for name in ("LD_PRELOAD", "LD_AUDIT"):
            found.pop(name, None)  # loaded into what still has all rights: the agent could replace the file
        return found

    def processes(self) -> list[Process]:
        return processes.inside(self._keeper.pid) if self._keeper is not None and self.alive() else []

    def alive(self) -> bool:
        return self._keeper is not None and self._keeper.alive()

    async def kill(self) -> None:
        """End everything inside; the files stay, and `restart` goes on with them."""
        gate, self._gate = self._gate, None
        if gate is not None:
            await gate.close()
        if self._keeper is not None:
            await self._keeper.stop()
        if self.group is not None:
            await asyncio.to_thread(self.group.drain)

    async def restart(self) -> None:
        await self.kill()
        await self.start()

    async def discard(self) -> None:
        self._watchdog.forget(self)
        await self.kill()
        await asyncio.to_thread(self._remove)

    def _remove(self) -> None:
        processes.kill_all(str(self.folder), among=near)  # all inside have ended with the keeper; this is about helpers
        if self.group is not None:  # before the folder: what says to a sweep which cgroups are this box's lies in it
            try:
                self.group.remove()
            except OSError as error:
                raise SandboxError(f"the cgroup of the sandbox {self.name} can't be removed: {error}") from error
        layout.remove(self.folder)

    def _prefix(self) -> list[str]:
        return prefix(self.limits, self.group, count_processes=self._counted, beside=self._beside)


class _Refused(SandboxError):
    """A command of ours ran inside and failed by itself, not by a limit."""


Made = TypeVar("Made", bound=KeptBox)


class KeptDriver(ABC):
    """Makes boxes under `root`, which is one host process's alone."""

    name: str

    def __init__(self, config: Config, root: Path) -> None:
        layout.make_root(root)
        Limits.of(config.sandbox, Spec())  # a site's limits that no sandbox can live with are told at once
        self._config = config
        self._root = root
        self._hierarchy = find_hierarchy()
        self._watchdog = Watchdog()
        self._boxes: WeakValueDictionary[str, KeptBox] = WeakValueDictionary()
        self._gathering = asyncio.Lock()

    @abstractmethod
    async def _start(self, spec: Spec, name: str) -> KeptBox:
        """Make and start a box. Raises SandboxError, HandlerError."""

    async def create(self, spec: Spec, name: str) -> KeptBox:
        check_network(self._config, spec)
        earlier = self._boxes.get(name)
        if earlier is not None:
            await earlier.discard()
        box = await self._start(spec, name)
        self._boxes[name] = box
        self._watchdog.watch(box)
        return box

    async def _aids(self) -> Path:
        """The folder of `aids`. Raises SandboxError."""
        async with self._gathering:
            return await asyncio.to_thread(aids.gather, self._root)

    async def _setting(self, spec: Spec, name: str) -> Setting:
        """Make the folder, and the cgroup where there are cgroups."""
        env, limits = environment.asked(spec.env), Limits.of(self._config.sandbox, spec)
        limits.check_files(spec)
        folder = await layout.build_whole(self._root, name, spec)
        group = None
        if self._hierarchy is not None:
            group = make_cgroup(self._hierarchy, f"rollout-{folder.name}-{secrets.token_hex(4)}", limits)
        if group is not None:
            (folder / "cgroups").write_text("\n".join(str(item.parent) for item in group.entries), "utf-8")
        return Setting(self._config, spec, name, folder, env, limits, group, self._watchdog)

    async def _started(self, box: Made) -> Made:
        """Start the box; one that does not start leaves nothing."""
        try:
            await box.start()
        except BaseException:
            await asyncio.shield(box.discard())
            raise
        return box


def check_network(config: Config, spec: Spec) -> None:
    """Raises HandlerError where the site does not give its own network."""
    if spec.network == "host" and not config.sandbox.host_network:
        raise HandlerError(
            'the task asks for network "host", which this site does not give: set sandbox.host_network, or ask for '
            '{"allow": [hosts]}'
        )
