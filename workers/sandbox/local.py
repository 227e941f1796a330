"""The `local` driver: a private folder and a bash in it. It isolates nothing and says so.

`prepare` makes the folder, `open` starts bash in the process that opens it; what outlives that process is the folder
alone, until `discard`. Layout: `<root>/<name>/home` (HOME), `tmp` (TMPDIR) and `private` (command files).
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import shutil
import stat
import tempfile
from pathlib import Path, PurePosixPath
from typing import Any

from pipeline.errors import HandlerError, SandboxError, SandboxGone
from pipeline.interfaces import Output
from workers.sandbox import processes
from workers.sandbox.shell import Shell

log = logging.getLogger(__name__)

KNOWN = ("files",)
"""Keys of a spec: `files` maps a path inside the home to its text (or bytes)."""

_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_warned = False


class Local:
    """Sandboxes are folders under `root`; `command_timeout`: seconds one command may take unless the call says less."""

    def __init__(self, root: Path, command_timeout: float) -> None:
        self.root = root.expanduser().absolute()
        self.command_timeout = command_timeout

    async def prepare(self, spec: dict[str, Any], name: str) -> dict[str, Any]:
        _warn()
        files = _files(spec)
        return await asyncio.to_thread(self._prepare, files, name)

    async def open(self, reference: dict[str, Any]) -> LocalSession:
        folder = self._folder(reference)
        if not (folder / "home").is_dir():
            raise SandboxGone(f"the sandbox {folder} does not exist any more")
        session = LocalSession(folder, self.command_timeout)
        await session.start()
        return session

    async def discard(self, reference: dict[str, Any]) -> None:
        await asyncio.to_thread(self._discard, self._folder(reference))

    async def owned(self) -> list[dict[str, Any]]:
        if not self.root.is_dir():
            return []
        return [_reference(entry, _name(entry)) for entry in sorted(self.root.iterdir()) if (entry / "home").is_dir()]

    def _prepare(self, files: dict[PurePosixPath, bytes], name: str) -> dict[str, Any]:
        folder = self.root / _safe(name)
        try:
            self._make_root()
            self._discard(folder)  # the same attempt asked twice: what its first call left is not gone on with
            part = Path(tempfile.mkdtemp(prefix=".part-", dir=self.root))
            for inside in ("home", "tmp", "private"):
                (part / inside).mkdir(mode=0o700)
            for path, data in files.items():
                target = part / "home" / path
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(data)
            (part / "name").write_text(name, "utf-8")
            os.rename(part, folder)
        except OSError as error:
            raise SandboxError(f"the sandbox folder {folder} can't be made: {error}") from error
        return _reference(folder, name)

    def _make_root(self) -> None:
        """The root is this user's alone: in a shared /tmp somebody else may have put something there before."""
        self.root.mkdir(mode=0o700, parents=True, exist_ok=True)
        about = self.root.lstat()
        if not stat.S_ISDIR(about.st_mode) or about.st_uid != os.getuid() or about.st_mode & 0o077:
            raise SandboxError(
                f"sandbox.root {self.root} must be a folder of this user alone: chmod 700, or set another"
            )

    def _folder(self, reference: dict[str, Any]) -> Path:
        """The reference's folder. Raises SandboxError for one that is not directly under the root."""
        folder = Path(str(reference.get("path", "")))
        if reference.get("driver") != "local" or folder.parent != self.root or folder.name.startswith("."):
            raise SandboxError(f"{reference!r:.200} names no sandbox under {self.root}")
        return folder

    def _discard(self, folder: Path) -> None:
        processes.kill_all(str(folder))
        shutil.rmtree(folder, onerror=_make_removable)
        if folder.exists():
            raise SandboxError(f"the sandbox folder {folder} can't be removed whole")


class LocalSession:
    """A bash in a sandbox's folder; one attempt uses it at a time."""

    def __init__(self, folder: Path, command_timeout: float) -> None:
        self._home = folder / "home"
        self._timeout = command_timeout
        self._shell = Shell(self._home, folder / "private", _environment(folder), mark=str(folder))

    async def start(self) -> None:
        try:
            await self._shell.start()
        except BaseException:
            await self._shell.close()
            raise

    async def bash(self, command: str, timeout: float | None = None) -> Output:
        """Run a command; `timeout` (seconds) can shorten the configured limit, not lengthen it."""
        return await self._shell.run(command, self._timeout if timeout is None else min(timeout, self._timeout))

    async def read(self, path: str) -> bytes:
        """Bytes of a file; a relative path starts at the home. Raises OSError."""
        return await asyncio.to_thread((self._home / path).read_bytes)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole; missing folders are made. Raises OSError."""
        await asyncio.to_thread(_write, self._home / path, data)

    async def close(self) -> None:
        """End the shell and all that it started; the folder stays."""
        await self._shell.close()


def _reference(folder: Path, name: str) -> dict[str, Any]:
    return {"driver": "local", "name": name, "path": str(folder)}


def _name(folder: Path) -> str:
    """The name that the sandbox was prepared under; empty where it is being removed."""
    try:
        return (folder / "name").read_text("utf-8")
    except OSError:
        return ""


def _safe(name: str) -> str:
    """A folder name that is one name's alone, whatever characters that holds."""
    if re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,150}", name):
        return name
    plain = re.sub(r"[^A-Za-z0-9_-]", "-", name)[:100]
    return f"s{plain}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"


def _files(spec: dict[str, Any]) -> dict[PurePosixPath, bytes]:
    unknown = sorted(spec.keys() - set(KNOWN))
    if unknown:
        raise HandlerError(
            f"the sandbox wants {unknown[0]!r}, which the local driver does not know ({', '.join(KNOWN)})"
        )
    files: dict[PurePosixPath, bytes] = {}
    for name, content in dict(spec.get("files") or {}).items():
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or not path.parts:
            raise HandlerError(f"the sandbox's file {name!r} must be a relative path inside the home")
        files[path] = content if isinstance(content, bytes) else str(content).encode()
    return files


def _environment(folder: Path) -> dict[str, str]:
    """All that a command sees of the environment: nothing of the worker's but the search path."""
    return {
        "PATH": os.environ.get("PATH", _PATH),
        "HOME": str(folder / "home"),
        "TMPDIR": str(folder / "tmp"),
        "USER": "agent",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "MANPAGER": "cat",
        "SYSTEMD_PAGER": "",
        "GIT_TERMINAL_PROMPT": "0",
        "DEBIAN_FRONTEND": "noninteractive",
        "PS1": "",
        "PS2": "",
    }


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _make_removable(function: Any, path: str, error: Any) -> None:
    """A command may have taken the write bit off a folder; what is gone already is no error."""
    if not os.path.lexists(path):
        return
    for place in (os.path.dirname(path), path):
        if not os.path.islink(place):
            os.chmod(place, 0o700)
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)


def _warn() -> None:
    global _warned
    if not _warned:
        _warned = True
        log.warning(
            "the local sandbox isolates NOTHING: what the policy runs has all of this user's rights and network"
        )
