"""The `local` driver: a private folder. It isolates nothing and says so."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import HandlerError
from workers.sandbox import processes
from workers.sandbox.box import Allow, Spec
from workers.sandbox.boxes import environment, layout
from workers.sandbox.boxes.kept import check_network
from workers.sandbox.boxes.limits import Cgroup, Limits
from workers.sandbox.boxes.watchdog import Watchdog
from workers.sandbox.processes import MARK, Process

log = logging.getLogger(__name__)

_warned = False


class Local:
    """Boxes are folders under `root`."""

    name = "local"

    def __init__(self, config: Config, root: Path) -> None:
        layout.make_root(root)
        Limits.of(config.sandbox, Spec())
        self._config = config
        self._root = root
        self._watchdog = Watchdog()

    async def create(self, spec: Spec, name: str) -> LocalBox:
        _warn()
        if spec.image:
            raise HandlerError(
                f"the task wants the image {spec.image!r}; the local driver has none: set sandbox.driver to "
                "apptainer, or drop `image`"
            )
        if isinstance(spec.network, Allow):
            raise HandlerError("the task wants a network of chosen hosts; the local driver isolates nothing")
        if os.path.isabs(spec.workdir) and not os.path.isdir(spec.workdir):
            raise HandlerError(f"this machine has no folder {spec.workdir!r} to start in: correct `workdir`")
        check_network(self._config, spec)
        environment.asked(spec.env)
        Limits.of(self._config.sandbox, spec).check_files(spec)
        await asyncio.to_thread(processes.kill_all, str(layout.folder_of(self._root, name)))
        folder = await layout.build_whole(self._root, name, spec)
        box = LocalBox(self._config, spec, name, folder, self._watchdog)
        try:
            os.makedirs(box.workdir, exist_ok=True)
        except OSError:
            await asyncio.to_thread(layout.remove, folder)
            raise HandlerError(f"the sandbox has no folder {box.workdir!r} to start in: correct `workdir`") from None
        self._watchdog.watch(box)
        return box


class LocalBox:
    """A folder; its processes are those that carry its mark, and their descendants."""

    def __init__(self, config: Config, spec: Spec, name: str, folder: Path, watchdog: Watchdog) -> None:
        self.name = name
        self.pid: int | None = None
        self.group: Cgroup | None = None
        self.folder = folder
        self.home = str(folder / "home")
        self.workdir = os.path.join(self.home, spec.workdir) if spec.workdir else self.home
        self.sockets = folder / "run"
        self.sockets_inside = str(self.sockets)
        self.notes: list[str] = []
        self.limits = Limits.of(config.sandbox, spec)
        self._env = environment.asked(spec.env)
        self._watchdog = watchdog

    def command(self, argv: Sequence[str]) -> list[str]:
        return list(argv)

    def environment(self) -> dict[str, str]:
        own = {"PATH": os.environ.get("PATH", environment.PATH), "TMPDIR": str(self.folder / "tmp"), "USER": "agent"}
        return {**environment.plain(self.home), **own, **self._env, MARK: str(self.folder)}

    def processes(self) -> list[Process]:
        return processes.find(str(self.folder))

    def alive(self) -> bool:
        return self.folder.is_dir()

    async def kill(self) -> None:
        """End everything that carries the mark. Twice: a process that is just being replaced by `exec` shows none."""
        for _ in range(2):
            await asyncio.to_thread(processes.kill_all, str(self.folder))

    async def restart(self) -> None:
        await self.kill()

    async def discard(self) -> None:
        self._watchdog.forget(self)
        await self.kill()
        await asyncio.to_thread(layout.remove, self.folder)


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "the local sandbox isolates NOTHING: what the policy runs has all of this user's rights and network"
        )
