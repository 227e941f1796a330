"""The `bubblewrap` driver: this machine's /usr, read-only, in namespaces of its own. No image, nothing to prepare."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from pipeline.errors import HandlerError, SandboxError
from workers.sandbox.box import Spec
from workers.sandbox.boxes import aids, environment, layout, machine
from workers.sandbox.boxes.keeper import COMMAND, Keeper
from workers.sandbox.boxes.kept import KeptBox, KeptDriver, Setting


class Bubblewrap(KeptDriver):
    """Boxes under `root`."""

    name = "bubblewrap"

    async def _start(self, spec: Spec, name: str) -> BubblewrapBox:
        if spec.image:
            raise HandlerError(
                f"the task wants the image {spec.image!r}; bubblewrap has none: set sandbox.driver to apptainer, "
                "or drop `image`"
            )
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxError("bwrap is not installed here: install bubblewrap, or set sandbox.driver to another")
        aid = await self._aids()
        return await self._started(BubblewrapBox(await self._setting(spec, name), program, aid))


class BubblewrapBox(KeptBox):
    """Inside, the agent is root without any capability: it can change nothing of this machine's."""

    home = "/home/agent"

    def __init__(self, setting: Setting, program: str, aid: Path) -> None:
        super().__init__(setting)
        self._program, self._aid = program, aid

    async def _start_keeper(self) -> Keeper:
        env = environment.launcher(str(self.folder))
        return await Keeper.start(self._launch(), env, self.said, self._config.sandbox.start_timeout)

    def _launch(self) -> list[str]:
        interpreter = _interpreter()
        argv = [self._program, "--unshare-all", "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv"]
        argv += ["--uid", "0", "--gid", "0", "--hostname", "sandbox"]
        if not self.own_network:
            argv += ["--share-net", "--ro-bind-try", "/etc/resolv.conf", "/etc/resolv.conf"]
        argv += _system()
        # As root of this machine the agent could write there although it has no capabilities: the owner may.
        argv += ["--proc", "/proc", "--ro-bind", "/proc/sys", "/proc/sys", "--dev", "/dev"]
        argv += ["--bind", str(self.folder / "tmp"), "/tmp", "--bind", str(self.folder / "tmp"), "/var/tmp"]
        argv += ["--bind", str(self.folder / "home"), self.home]
        argv += ["--bind", str(self.sockets), self.sockets_inside]
        argv += ["--bind", str(self.folder / "over"), "/dev/shm"]
        argv += ["--ro-bind", str(self._aid), aids.INSIDE]
        for inside, outside in (("/tmp", "tmp"), ("/var/tmp", "tmp"), (self.home, "home")):
            below = [Path(place) for _, place in interpreter if Path(place).is_relative_to(inside)]
            layout.make_below(self.folder / outside, [str(place.relative_to(inside)) for place in below])
        for prefix, place in interpreter:
            argv += ["--ro-bind", prefix, place]
        argv += self._accounts()
        argv += ["--remount-ro", "/dev", "--remount-ro", "/"]  # memory there would count for nobody
        return [*argv, "--chdir", self.home, "--", *COMMAND]

    def _inner(self) -> list[str]:
        # Who joins a user namespace has all its capabilities at first, and could make /usr writable again.
        return [*aids.call("setpriv"), "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs", "--"]

    def _accounts(self) -> list[str]:
        folder = self.folder / "etc"
        folder.mkdir(mode=0o700, exist_ok=True)
        argv = []
        for name, text in machine.accounts(self.home).items():
            (folder / name).write_text(text, "utf-8")
            argv += ["--ro-bind", str(folder / name), f"/etc/{name}"]
        return argv


def _system() -> list[str]:
    """This machine's programs, read-only, as its own root shows them (merged /usr or not)."""
    argv = ["--ro-bind", "/usr", "/usr"]
    for name in machine.MERGED:
        path = Path("/", name)
        if path.is_symlink():
            argv += ["--symlink", os.readlink(path), str(path)]
        elif path.is_dir():
            argv += ["--ro-bind", str(path), str(path)]
    for name in machine.FROM_ETC:
        argv += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    return argv


def _interpreter() -> list[tuple[str, str]]:
    """The running Python with its packages, where it lies outside /usr: an IPython kernel is started from it.

    (folder of this machine, where it is seen inside).
    """
    return [
        (prefix, place)
        for prefix in dict.fromkeys((sys.base_prefix, sys.prefix))
        for place in dict.fromkeys((prefix, os.path.realpath(prefix)))
        if not Path(place).is_relative_to("/usr")
    ]
