"""Limits of a box: by a cgroup where this user may make one, by rlimits and the watchdog where not."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pipeline.config import SandboxConfig
from pipeline.errors import ConfigError, HandlerError
from workers.sandbox.box import Spec

MB = 1 << 20

LEAST = {"memory_mb": 32, "processes": 16}
"""Below that not even bash, a pipe and the file tools run side by side (they need 8 processes), or one Python."""

REMOVE_SECONDS = 5.0

CPU_PERIOD = 100_000
"""Microseconds over which a cgroup's share of the cores is counted: the kernel's own default."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What one box may use: bytes of memory and disk, processes with threads, cores (0 = no limit)."""

    memory: int
    processes: int
    disk: int
    cpus: float

    @classmethod
    def of(cls, site: SandboxConfig, spec: Spec) -> Limits:
        """The site's limits, lowered where the task asks for less.

        Raises HandlerError for a task's limit that is too small for a sandbox, and ConfigError for a site's.
        """
        for name, least in LEAST.items():
            if getattr(site, name) < least:
                raise ConfigError(f"sandbox.{name} is {getattr(site, name)}: a sandbox needs {least} at the least")
            asked = getattr(spec, name)
            if asked is not None and asked < least:
                raise HandlerError(
                    f"the handler's `sandbox` asks for {name} = {asked}: a sandbox needs {least} at the least"
                )
        cpus = min((value for value in (site.cpus, spec.cpus or 0.0) if value), default=0.0)
        return cls(
            memory=min(site.memory_mb, spec.memory_mb or site.memory_mb) * MB,
            processes=min(site.processes, spec.processes or site.processes),
            disk=min(site.disk_mb, spec.disk_mb or site.disk_mb) * MB,
            cpus=cpus,
        )

    def check_files(self, spec: Spec) -> None:
        """Raises HandlerError for files that are larger than the disk limit."""
        size = sum(
            len(text if isinstance(text, bytes) else text.encode("utf-8", "replace")) for text in spec.files.values()
        )
        if size > self.disk:
            raise HandlerError(
                f"the handler's `sandbox` has `files` of {megabytes(size)} MB where disk_mb is {megabytes(self.disk)}: "
                "make them smaller, or raise disk_mb (there, or sandbox.disk_mb)"
            )

    def told(self) -> str:
        """The end of a sentence about what these limits may have caused."""
        return f" (limits of this sandbox: memory_mb {megabytes(self.memory)}, processes {self.processes})"


@dataclass(frozen=True, slots=True)
class Hierarchy:
    """Where this process may make cgroups: `version` 2 with one folder for all, or 1 with one a controller."""

    version: int
    folders: dict[str, Path]
    """Controller (memory, pids, cpu) -> our own cgroup's folder, in which children are made."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """One box's cgroup: its folders, one in version 2. Whoever writes itself into `entries` is limited."""

    version: int
    folders: dict[str, Path]

    @property
    def entries(self) -> list[Path]:
        return [folder / "cgroup.procs" for folder in dict.fromkeys(self.folders.values())]

    def add(self, pid: int) -> None:
        """Put a process in. Raises OSError."""
        for entry in self.entries:
            entry.write_text(str(pid))

    def kills(self) -> int:
        """How many processes the kernel has killed here for memory."""
        name = "memory.events" if self.version == 2 else "memory.oom_control"
        with contextlib.suppress(OSError, KeyError):
            for line in (self.folders["memory"] / name).read_text().splitlines():
                if line.startswith("oom_kill "):
                    return int(line.split()[1])
        return 0

    def refusals(self) -> int:
        """How often a process could not be started here."""
        with contextlib.suppress(OSError, KeyError):
            for line in (self.folders["pids"] / "pids.events").read_text().splitlines():
                if line.startswith("max "):
                    return int(line.split()[1])
        return 0

    def drain(self) -> None:
        """Wait until what was killed here has made room for new processes; for a few seconds at most."""
        until = time.monotonic() + REMOVE_SECONDS
        while self._crowded() and time.monotonic() < until:
            time.sleep(0.005)

    def _crowded(self) -> bool:
        try:
            now, most = ((self.folders["pids"] / f"pids.{name}").read_text() for name in ("current", "max"))
            return int(now) * 2 > int(most)
        except (OSError, KeyError, ValueError):
            return False

    def remove(self) -> None:
        """Remove the folders. Raises OSError when something still runs in them."""
        for folder in dict.fromkeys(self.folders.values()):
            remove_cgroup(folder)


def remove_cgroup(folder: Path) -> None:
    """Remove a cgroup; what is in it has been killed, and the kernel may need a moment. Raises OSError."""
    until = time.monotonic() + REMOVE_SECONDS
    while True:
        try:
            folder.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > until:
                raise
        time.sleep(0.01)


def find_hierarchy(
    proc: Path = Path("/proc/self"), root: Path = Path("/sys/fs/cgroup"), *, look_only: bool = False
) -> Hierarchy | None:
    """The cgroups that this process may make; None where it may make none that limits memory.

    In version 2 this process then moves to a child of its own, unless it only looks.
    """
    own = dict(_own(proc))
    if "" in own and (root / "cgroup.controllers").is_file():
        return _unified(root / own[""].lstrip("/"), look_only)
    folders: dict[str, Path] = {}
    for controller in ("memory", "pids", "cpu"):
        folder = root / controller / own.get(controller, "").lstrip("/")
        if controller in own and os.access(folder, os.W_OK) and os.access(folder / "cgroup.procs", os.W_OK):
            folders[controller] = folder
    return Hierarchy(1, folders) if "memory" in folders else None


def make_cgroup(hierarchy: Hierarchy, name: str, limits: Limits) -> Cgroup | None:
    """Make the cgroup called `name`; None where the kernel refuses a limit (then rlimits and the watchdog serve)."""
    group = Cgroup(hierarchy.version, {key: folder / name for key, folder in hierarchy.folders.items()})
    try:
        for folder in dict.fromkeys(group.folders.values()):
            folder.mkdir(exist_ok=True)
        for controller, file, value in _values(hierarchy.version, limits):
            if controller in group.folders:
                (group.folders[controller] / file).write_text(value)
    except OSError:
        with contextlib.suppress(OSError):
            group.remove()
        return None
    _swap_too(group, limits)
    return group


def megabytes(size: int) -> int:
    """Bytes as MB (2^20), rounded up."""
    return -(-size // MB)


def prefix(limits: Limits, group: Cgroup | None, *, count_processes: bool, beside: int = 0) -> list[str]:
    """What stands before a command line so that it, and what it starts, is limited: no cost but 1-2 ms.

    `count_processes`: RLIMIT_NPROC counts this user's processes in the sandbox's user namespace alone; `beside` of
    those are the driver's own.
    """
    prlimit = shutil.which("prlimit") or "prlimit"
    argv = [prlimit, "--core=0", f"--fsize={limits.disk}"]
    if group is None:
        argv.append(f"--data={limits.memory}")
        if count_processes:
            argv.append(f"--nproc={limits.processes + beside}")
    argv.append("--")
    if group is None:
        return argv
    enter = "".join(f'echo 0 > "${number}" && ' for number in range(1, len(group.entries) + 1))
    shift = f"shift {len(group.entries)} && "
    return ["/bin/sh", "-c", f'{enter}{shift}exec "$@"', "sh", *map(str, group.entries), *argv]


def nproc_counts_sandbox() -> bool:
    """Whether RLIMIT_NPROC is counted per user namespace here (Linux 5.14) and holds for this user (not root)."""
    release = os.uname().release.split("-")[0].split(".")
    numbers = tuple(int(part) for part in release[:2] if part.isdigit())
    return os.geteuid() != 0 and numbers >= (5, 14)


def _own(proc: Path) -> Iterator[tuple[str, str]]:
    """(controller, own cgroup's path); the controller of version 2 is the empty text."""
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _unified(folder: Path, look_only: bool) -> Hierarchy | None:
    """Version 2: ours where it was delegated. Its processes move to a leaf, else it may have no children."""
    if not os.access(folder, os.W_OK) or not os.access(folder / "cgroup.procs", os.W_OK):
        return None
    try:
        there = set((folder / "cgroup.controllers").read_text().split()) & {"memory", "pids", "cpu"}
        if "memory" not in there:
            return None
        if look_only:
            return Hierarchy(2, dict.fromkeys(sorted(there), folder))
        wanted = " ".join(f"+{controller}" for controller in sorted(there))
        try:
            (folder / "cgroup.subtree_control").write_text(wanted)
        except OSError:
            _move_to_leaf(folder)
            (folder / "cgroup.subtree_control").write_text(wanted)
    except OSError:
        return None
    return Hierarchy(2, dict.fromkeys(sorted(there), folder))


def _move_to_leaf(folder: Path) -> None:
    """Put this process into a child cgroup. Raises OSError when others are in ours: those are not moved."""
    inside = {int(word) for word in (folder / "cgroup.procs").read_text().split()}
    if inside != {os.getpid()}:
        raise PermissionError(f"{folder} holds other processes than this one")
    leaf = folder / "rollout-host"
    leaf.mkdir(exist_ok=True)
    (leaf / "cgroup.procs").write_text(str(os.getpid()))


def _values(version: int, limits: Limits) -> Iterator[tuple[str, str, str]]:
    """(controller, file, text) of each limit."""
    quota = int(limits.cpus * CPU_PERIOD)
    if version == 2:
        yield "memory", "memory.max", str(limits.memory)
    else:
        yield "memory", "memory.limit_in_bytes", str(limits.memory)
    yield "pids", "pids.max", str(limits.processes)
    if quota and version == 2:
        yield "cpu", "cpu.max", f"{quota} {CPU_PERIOD}"
    elif quota:
        yield "cpu", "cpu.cfs_quota_us", str(quota)


def _swap_too(group: Cgroup, limits: Limits) -> None:
    """No going around the limit through swap; a kernel that does not count swap has no such file."""
    name, value = (
        ("memory.swap.max", "0") if group.version == 2 else ("memory.memsw.limit_in_bytes", str(limits.memory))
    )
    with contextlib.suppress(OSError):
        (group.folders["memory"] / name).write_text(value)
