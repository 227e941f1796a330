"""Programs of this machine that run inside any sandbox with their own loader and libraries: setpriv and mount.

Whoever joins a user namespace has all of its capabilities. With CAP_SYS_ADMIN the agent could make read-only folders of
this machine writable again, so each command drops it first; an image need not have a program for that.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from pipeline.errors import SandboxError
from workers.sandbox.boxes.environment import PATH

INSIDE = "/.rollout"
"""Where the folder is bound, read-only."""

FOLDER = ".aids"
PROGRAMS = ("setpriv", "mount")
LDD_SECONDS = 10.0

KEPT = (
    "chown", "dac_override", "fowner", "fsetid", "kill", "setgid", "setuid", "setpcap", "net_bind_service", "net_raw",
    "sys_chroot", "mknod", "audit_write", "setfcap",
)  # fmt: skip
"""Capabilities of the agent inside: those that Docker gives; enough to install packages and to change owners."""


def gather(root: Path) -> Path:
    """Copy the programs to a folder under `root`, unless they are there. Raises SandboxError."""
    folder = root / FOLDER
    if folder.is_dir():
        return folder
    try:
        part = Path(tempfile.mkdtemp(prefix=".part-", dir=root))
        try:
            part.chmod(0o755)
            for program in PROGRAMS:
                _copy(program, part)
            os.rename(part, folder)
        except BaseException:
            shutil.rmtree(part)
            raise
    except (OSError, subprocess.SubprocessError) as error:
        raise SandboxError(f"{', '.join(PROGRAMS)} can't be copied to {folder}: {error}") from error
    return folder


def _copy(program: str, part: Path) -> None:
    path = shutil.which(program, path=PATH)
    if path is None:
        raise SandboxError(f"{program} (util-linux) is not installed here, and sandboxes need it")
    shutil.copyfile(path, part / program)
    (part / program).chmod(0o755)  # `mount` is set-uid, which is no good to anybody inside
    for library in _libraries(path):
        name = "loader" if os.path.basename(library).startswith("ld-") else os.path.basename(library)
        if not (part / name).exists():
            shutil.copy(library, part / name)


def call(program: str) -> list[str]:
    """The start of a command line, as seen inside, that runs one of the programs."""
    return [f"{INSIDE}/loader", "--library-path", INSIDE, f"{INSIDE}/{program}"]


def as_agent() -> list[str]:
    """What stands before a command that runs inside with the agent's rights."""
    kept = ",".join(f"+{name}" for name in KEPT)
    return [*call("setpriv"), f"--bounding-set=-all,{kept}", "--inh-caps=-all", "--"]


def _libraries(program: str) -> list[str]:
    """Paths of the loader and the libraries that a program is linked with."""
    answer = subprocess.run(["ldd", program], capture_output=True, text=True, timeout=LDD_SECONDS, check=True)
    words = [line.replace("=>", " ").split() for line in answer.stdout.splitlines()]
    return [next(word for word in line if word.startswith("/")) for line in words if any(w[0] == "/" for w in line)]
