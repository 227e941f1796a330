"""The `apptainer` driver: images, rootless. The image is never written: what is changed lies in the box's overlay."""

from __future__ import annotations

import contextlib
import logging
import re
import shutil
from pathlib import Path
from typing import Literal

from pipeline.config import Config
from pipeline.errors import HandlerError, SandboxError
from workers.sandbox.box import Allow, Spec
from workers.sandbox.boxes import aids, environment, layout, machine, overlay
from workers.sandbox.boxes.instance import Instance
from workers.sandbox.boxes.keeper import COMMAND, Keeper
from workers.sandbox.boxes.kept import FirstProcess, KeptBox, KeptDriver, Setting
from workers.sandbox.images import Image, folders_under, hold, resolve
from workers.sandbox.network.loopback import lease

log = logging.getLogger(__name__)

Way = Literal["exec", "instance"]

_NO_NETWORK = r"network namespace|--network|cni|netns"
_LACKS = (
    (r"no such file or directory.*bash|bash.*no such file|\"?/bin/bash\"?.*not found", "the image has no /bin/bash"),
    (
        r"subuid|subgid|newuidmap|newgidmap",
        "this user has no range of subordinate ids: a line in /etc/subuid and /etc/subgid, and newuidmap set-uid",
    ),
    (
        r"user namespace|CLONE_NEWUSER|max_user_namespaces|unshare failed",
        "this machine gives no user namespaces: sysctl user.max_user_namespaces, kernel.unprivileged_userns_clone, "
        "kernel.apparmor_restrict_unprivileged_userns",
    ),
    (
        r"/dev/fuse|fuse: device not found|squashfuse",
        "/dev/fuse can't be used here: chmod 666 /dev/fuse, or unpack the image",
    ),
    (_NO_NETWORK, "this machine gives no network namespaces"),
    (r"overlay", "this machine mounts no overlay: a kernel of 5.11 or newer, or fuse-overlayfs, is needed"),
    (r"requesting capability set", "`root default capabilities = no` is missing in /etc/apptainer/apptainer.conf"),
    (r"no space left", "the disk is full"),
)  # fmt: skip
"""What Apptainer's own words mean for whoever runs the site."""


class Apptainer(KeptDriver):
    """Boxes under `root`. `way`: `exec` keeps one `apptainer exec` alive, `instance` starts instances through spython.

    An instance is a daemon: after this process's death only the sweep ends it. A kept exec ends with this process, and
    has an overlay that we mount (see `overlay`); an instance has Apptainer's.
    """

    name = "apptainer"

    def __init__(self, config: Config, root: Path, way: Way = "exec") -> None:
        super().__init__(config, root)
        self.way: Way = way
        self._network = True
        self._unshare: list[str] | None = None
        self._mounted = False

    async def _start(self, spec: Spec, name: str) -> ApptainerBox:
        program = shutil.which("apptainer")
        if program is None:
            raise SandboxError("apptainer is not installed here: install it, or set sandbox.driver to another")
        held = await self._aids(), await resolve(self._config, spec.image or self._config.sandbox.image)
        while True:
            unshare, network = await self._namespace(), self._network
            try:
                box = await self._try(spec, name, program, unshare, *held)
                self._mounted |= bool(unshare)
                return box
            except SandboxError as error:
                # where it was mounted once, something else is wrong now: a full disk
                if unshare and not self._mounted and overlay.REFUSED in str(error):
                    self._do_without_overlay(str(error))
                elif network and spec.network == "none" and re.search(_NO_NETWORK, str(error), re.IGNORECASE):
                    self._do_without_network(str(error))
                else:
                    raise

    async def _namespace(self) -> list[str]:
        """What starts Apptainer in a namespace where the overlay is mounted; nothing where it mounts its own."""
        async with self._gathering:
            if self._unshare is None:
                self._unshare = await overlay.unshare() if self.way == "exec" else []
        return self._unshare

    def _do_without_overlay(self, why: str) -> None:
        if self._unshare:
            log.warning(
                "this machine does not mount our own overlay, so sandboxes have Apptainer's, where a folder of the "
                "image that was removed can't be made again (Input/output error): %s", why,
            )  # fmt: skip
        self._unshare = []

    def _do_without_network(self, why: str) -> None:
        if self._network:
            log.warning(
                "this machine gives no network namespaces: sandboxes use its network, each told an address of its own "
                "in 127.0.0.0/8 (ROLLOUT_LOOPBACK): %s", why,
            )  # fmt: skip
        self._network = False

    async def _try(
        self, spec: Spec, name: str, program: str, unshare: list[str], aid: Path, image: Image
    ) -> ApptainerBox:
        if not self._network and isinstance(spec.network, Allow):
            raise SandboxError("this machine gives no network namespaces, so no sandbox may have chosen hosts alone")
        with contextlib.ExitStack() as held:
            held.enter_context(hold(image))
            address = "" if self._network else _leased(held)
            setting = await self._setting(spec, name)
            start = self.way, program, unshare
            return await self._started(ApptainerBox(setting, start, image, aid, address, held.pop_all()))


class ApptainerBox(KeptBox):
    """Inside the agent is root, with the rights of root in a container of Docker's."""

    home = "/root"

    def __init__(
        self,
        setting: Setting,
        start: tuple[Way, str, list[str]],
        image: Image,
        aid: Path,
        loopback: str,
        held: contextlib.ExitStack,
    ) -> None:
        """`start`: the way, Apptainer's path, and what starts it in a namespace with our overlay (empty: in none).

        `loopback`: the box's own address where it can't have a network of its own; `held`: closed by `discard`.
        """
        super().__init__(setting)
        self._way, self._program, self._unshare = start
        self._image, self._aid, self._loopback, self._held = image, aid, loopback, held

    @property
    def own_network(self) -> bool:
        return self.spec.network != "host" and not self._loopback

    async def _start_keeper(self) -> Keeper | Instance:
        env = environment.launcher(str(self.folder))
        seconds = self._config.sandbox.start_timeout
        try:
            if self._way == "instance":
                return await Instance.start(str(self._image.path), self._options(), self.folder, env, seconds)
            over = self.folder / "over"
            image = over / "root" if self._unshare else self._image.path
            argv = [self._program, "-q", "exec", "--no-init", "--pwd", "/", *self._options(), str(image), *COMMAND]
            if self._unshare:
                argv = overlay.launch(self._unshare, over, self._image.path, argv)
            return await Keeper.start(argv, env, self.said, seconds)
        except SandboxError as error:
            raise _explained(error) from error

    def _options(self) -> list[str]:
        folder = self.folder
        (folder / "hosts").write_text(machine.HOSTS, "utf-8")
        temporary = folder / "tmp" / "tmp", folder / "tmp" / "var_tmp"  # what Apptainer calls them
        if self.pid is None:
            for place in temporary:
                place.mkdir()
                place.chmod(0o1777)
        for inside, outside in zip((self.home, "/tmp", "/var/tmp"), (folder / "home", *temporary), strict=True):
            layout.make_below(outside, folders_under(self._image, inside))
        binds = [f"{self.sockets}:{self.sockets_inside}", f"{folder / 'hosts'}:/etc/hosts:ro"]
        binds += [f"{self._aid}:{aids.INSIDE}:ro", *self._image.binds]
        options = ["--containall", "--cleanenv", "--no-eval", "--uts", "--hostname", "sandbox"]
        options += ["--no-mount", "bind-paths,sys", "--workdir", str(folder / "tmp")]
        options += ["--home", f"{folder / 'home'}:{self.home}", *(item for bind in binds for item in ("--bind", bind))]
        options += ["--net", "--network", "none"] if self.own_network else []
        if not self._unshare:
            return [*options, "--fakeroot", "--overlay", str(folder / "over")]
        if self.pid is None:
            overlay.prepare(folder / "over", self._image.path, [self.home], binds)
        return [*options, "--writable", "--keep-privs"]

    async def _prepare(self) -> None:
        """Settings of the kernel can't be written inside, although the agent may own them as root of this machine.

        Set-uid programs work, as in Docker: of an image that is written Apptainer takes that away.
        """
        mounts = [(["-o", "bind,ro,nosuid,nodev", "/proc/sys", "/proc/sys"], "/proc/sys can't be made read-only")]
        if self._unshare:
            mounts.append((["-o", "remount,bind,suid,nodev", "none", "/"], "set-uid programs can't be allowed"))
        for argv, wrong in mounts:
            await self._run_inside([*self._join(), *aids.call("mount"), "-n", *argv], wrong)

    def _inner(self) -> list[str]:
        return aids.as_agent()

    def environment(self) -> dict[str, str]:
        own = {"ROLLOUT_LOOPBACK": self._loopback} if self._loopback else {}
        return {**super().environment(), **own}

    async def _image_environment(self, keeper: FirstProcess) -> dict[str, str]:
        return environment.of_image(await keeper.environment())

    async def discard(self) -> None:
        try:
            await super().discard()
        finally:
            self._held.close()


def _leased(held: contextlib.ExitStack) -> str:
    """A loopback address that is given back when `held` is closed."""
    loopback = lease()
    held.callback(loopback.release)
    return loopback.address


def _explained(error: SandboxError) -> SandboxError | HandlerError:
    text = str(error)
    for pattern, meaning in _LACKS:
        if re.search(pattern, text, re.IGNORECASE):
            kind = HandlerError if "bash" in meaning else SandboxError
            return kind(f"{meaning}; {text}")
    return error
