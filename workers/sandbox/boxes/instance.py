"""A keeper that is an Apptainer instance, started through spython: a daemon, which does not end with this process."""

from __future__ import annotations

import asyncio
import secrets
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import SandboxError
from workers.sandbox import processes
from workers.sandbox.boxes.keeper import Handle, last_lines

STOP_SECONDS = 10.0
ENVIRONMENT_SECONDS = 30.0
START = "#!/bin/sh\nexit 0\n"
"""An instance runs this first; its own first process stays. Images that Apptainer did not build have none."""


class Instance:
    """A running instance; `pid` is its first process, as seen from this machine."""

    def __init__(self, name: str, pid: int, env: Mapping[str, str]) -> None:
        self.name = name
        self.pid = pid
        self._env = env
        self._handle = Handle(pid)

    @classmethod
    async def start(
        cls, image: str, options: Sequence[str], folder: Path, env: Mapping[str, str], seconds: float
    ) -> Instance:
        """Start one for the box in `folder`, whose mark `env` carries. Raises SandboxError."""
        script = folder / "start"
        script.write_text(START, "utf-8")
        script.chmod(0o755)
        name = f"rollout-{folder.name}-{secrets.token_hex(3)}"  # a killed one is in the list for a moment
        pid_file = folder / "instance.pid"
        pid_file.unlink(missing_ok=True)
        options = [*options, "--bind", f"{script}:/.singularity.d/actions/start:ro", "--pid-file", str(pid_file)]
        env = {**env, "HOME": str(folder)}  # the list of instances is a folder in the home: each box has its own
        made = asyncio.ensure_future(asyncio.to_thread(_start, image, name, options, env, pid_file))
        try:
            async with asyncio.timeout(seconds):
                pid = await asyncio.shield(made)
        except BaseException as error:
            # spython knows no time limit: what it waits for is ended
            await asyncio.shield(asyncio.to_thread(processes.kill_all, str(folder)))
            await asyncio.wait([made])
            if isinstance(error, TimeoutError):
                raise SandboxError(f"the instance {name} was not ready within {seconds:g} s") from None
            raise
        return cls(name, pid, env)

    def alive(self) -> bool:
        """Whether its first process still runs."""
        return self._handle.alive()

    async def stop(self) -> None:
        """End it. Killing its first process takes 3 ms, where `instance stop` waits for a parent to reap."""
        if not await self._handle.kill(STOP_SECONDS):
            raise SandboxError(f"the instance {self.name} (process {self.pid}) did not end in {STOP_SECONDS:.0f} s")

    async def environment(self) -> bytes:
        """What a process in the instance has, as the kernel writes it down. Raises SandboxError."""
        argv = ["apptainer", "-q", "exec", f"instance://{self.name}", "/bin/cat", "/proc/self/environ"]
        return await asyncio.to_thread(_run, argv, self._env, ENVIRONMENT_SECONDS)


def _start(image: str, name: str, options: Sequence[str], env: Mapping[str, str], pid_file: Path) -> int:
    """Start an instance; its pid. spython prints what went wrong instead of raising it."""
    from spython.main import Client

    try:
        instance: Any = Client.instance(image, name=name, start=False, quiet=True)
        instance.start(image=image, name=name, options=list(options), singularity_options=["-q"], environ=dict(env))
        if not pid_file.is_file():  # once more, to hear why
            _run(instance.cmd, env, ENVIRONMENT_SECONDS)
        return int(pid_file.read_text())
    except (SystemExit, OSError, ValueError) as error:
        raise SandboxError(f"the instance {name} did not start: {error}") from error


def _run(argv: Sequence[str], env: Mapping[str, str], seconds: float) -> bytes:
    """What a program writes. Its errors go to a file: a daemon would keep a pipe open. Raises SandboxError."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        try:
            code = subprocess.run(
                argv, stdin=subprocess.DEVNULL, stdout=output, stderr=errors, env=dict(env), cwd="/", timeout=seconds,
                check=False,
            ).returncode  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            raise SandboxError(f"{argv[0]} failed: {error}") from error
        if code != 0:
            raise SandboxError(f"{' '.join(argv[:4])} ended with {code}{last_lines(errors)}")
        output.seek(0)
        return output.read()
