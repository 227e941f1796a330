"""The tools of one box under the names of `pipeline.interfaces.Sandbox`: what the sandbox host calls for a worker."""

from __future__ import annotations

from pipeline.config import SandboxConfig
from pipeline.interfaces import Cell, Output
from workers.sandbox.box import Box
from workers.sandbox.tools.files import MB, Files
from workers.sandbox.tools.inside import Inside
from workers.sandbox.tools.kernel import Kernel
from workers.sandbox.tools.plain import with_notes
from workers.sandbox.tools.shell import Shell


class Session:
    """Bash, IPython and files of one box. Bash calls wait for each other, and so do cells; files go beside them."""

    def __init__(self, box: Box, config: SandboxConfig) -> None:
        self._config = config
        self._inside = Inside(box)
        self._shell = Shell(self._inside, config.start_timeout, config.output_bytes // 2)
        self._files = Files(self._inside, config.transfer_mb * MB, config.command_timeout)
        self._kernel = Kernel(self._inside, self._files, config.start_timeout, config.output_bytes // 2)

    async def start(self) -> None:
        """Start the shell. Raises SandboxError when it does not answer."""
        await self._shell.start()

    async def fresh(self) -> None:
        """A new stage begins: shell and kernel are new at their next use. Files and background processes stay."""
        await self.close()

    async def close(self) -> None:
        """End shell and kernel; the box stays its owner's. Safe twice."""
        try:
            await self._kernel.close()
        finally:
            await self._shell.close()

    async def bash(self, command: str, timeout: float | None = None) -> Output:
        """Run a command in the persistent shell; `timeout` (s) can shorten the site's limit, not lengthen it."""
        limit = self._limit(timeout)
        output = await self._shell.run(command, limit)
        return output._replace(text=self._noted(output.text, limit if output.timed_out else None))

    async def ipython(self, code: str, timeout: float | None = None) -> Cell:
        """Run a cell in the persistent kernel; `timeout` (s) can shorten the site's limit, not lengthen it."""
        limit = self._limit(timeout)
        cell = await self._kernel.run(code, limit)
        return cell._replace(text=self._noted(cell.text, limit if cell.timed_out else None))

    async def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a file from `start`, at most `size`. Raises OSError (with its errno), ValueError above the limit."""
        return await self._files.read(path, start, size)

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole; missing folders are made. Raises OSError, ValueError above the size limit."""
        await self._files.write(path, data)

    async def edit(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which must stand exactly once in the file. Raises OSError, ValueError with the count."""
        await self._files.edit(path, old, new)

    async def upload(self, path: str, tar: bytes) -> None:
        """Unpack a tar archive into the folder `path`. Raises OSError, ValueError."""
        await self._files.upload(path, tar)

    async def download(self, path: str) -> bytes:
        """A file or a folder as a tar archive. Raises OSError, ValueError above the size limit."""
        return await self._files.download(path)

    def _noted(self, text: str, over: float | None) -> str:
        """What the policy reads: the output, and what happened besides. `over`: seconds after which it was ended."""
        late = [] if over is None else [f"timed out after {over:g} s"]
        return with_notes(text, [*late, *self._inside.take_notes()])

    def _limit(self, timeout: float | None) -> float:
        return self._config.command_timeout if timeout is None else min(timeout, self._config.command_timeout)
