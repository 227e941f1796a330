"""One step of a build as a child process: time limit, output kept, nothing of the worker's environment."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from pipeline.errors import SandboxError

log = logging.getLogger(__name__)
SECONDS = 3600.0
"""Longest time of one step; an attempt that waits for it has its own limit (`limits.init`)."""
TAIL = 1500
"""Characters of a failed step's output that are shown."""
GUARD = Path(__file__).with_name("guard.py")
ONLINE = ("http_proxy", "https_proxy", "no_proxy", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE")
REGISTRY = ("DOCKER_USERNAME", "DOCKER_PASSWORD", "DOCKER_HOST")
"""Of the site's, for steps that use the network: how it goes out, and who it is at a registry (APPTAINER_...)."""
_ERROR = re.compile(r"^(?:E|ERROR|FATAL|fatal|error): *(?P<why>.+)$", re.MULTILINE)
_NOISE = re.compile(r"^WARNING: Skipping mount .*\n?", re.MULTILINE)
_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def environment(scratch: Path, *, registry: bool = False) -> dict[str, str]:
    """Of the worker's variables only those by which a build reaches the network. `scratch`: room on local disk."""
    online = {name for word in ONLINE for name in (word, word.upper())}
    if registry:
        online |= {f"{maker}_{name}" for maker in ("APPTAINER", "SINGULARITY") for name in REGISTRY}
    return {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": os.environ.get("HOME", "/"),
        "LANG": "C.UTF-8",
        "TMPDIR": str(scratch),
        "APPTAINER_TMPDIR": str(scratch),
        "APPTAINER_CACHEDIR": str(scratch / "blobs"),
        **{name: os.environ[name] for name in online if name in os.environ},
    }


def need(program: str, mend: str) -> str:
    """The program's path. Raises SandboxError with the mend."""
    path = shutil.which(program)
    if path is None:
        raise SandboxError(f"{program} is not on PATH: {mend}")
    return path


def apptainer() -> str:
    """Apptainer's path. Raises SandboxError."""
    return need("apptainer", "install Apptainer (`make system` does on Debian), or use sandbox.driver bubblewrap")


async def step(
    what: str,
    command: Sequence[str],
    *,
    scratch: Path,
    lock: int,
    registry: bool = False,
    mend: str = "",
    seconds: float = SECONDS,
) -> str:
    """Run one step (see `guard.py` for `command`); its output. `what` begins an error's sentence, `mend` ends it.

    `lock` is inherited, so that it is held as long as anything of this step lives. Raises SandboxError: it failed
    (with the end of its output), or took longer than `seconds`.
    """
    log.info("%s ...", what)
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-I", str(GUARD), str(os.getpid()), *command,
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env=environment(scratch, registry=registry), pass_fds=(lock,), start_new_session=True, cwd="/",
    )  # fmt: skip
    try:
        out, _ = await asyncio.wait_for(process.communicate(), seconds)
    except TimeoutError:
        raise SandboxError(
            f"{what} took longer than {seconds:g} s and was ended: is the disk or the network slow?"
        ) from None
    finally:
        await _end(process)
    text = _COLOURS.sub("", out.decode("utf-8", "replace")).strip()
    if process.returncode:
        raise SandboxError(f"{what} failed (exit code {process.returncode}): {_said(text)}{mend}")
    log.info("%s: done, %.1f s", what, time.monotonic() - began)
    return text


def _said(text: str) -> str:
    """A failed step's output: the first line that says it is an error, else its last, then the end of all of it."""
    text = _NOISE.sub("", text).strip()
    error = _ERROR.search(text)
    why = error["why"] if error else text.rpartition("\n")[2]
    return f"{why}\nIts output ended so:\n{text[-TAIL:]}" if "\n" in text else text[-TAIL:]


async def _end(process: asyncio.subprocess.Process) -> None:
    """Kill the step's whole group. Its leader is reaped after it, so the number can't be another's yet."""
    if process.returncode is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await asyncio.shield(process.wait())
