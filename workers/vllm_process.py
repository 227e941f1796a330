"""vLLM's process group: it ends whole, and with the process that started it.

It hangs on a lifeline: a pipe whose other end only its starter holds. When that closes, by whatever death, the group is
killed: no engine keeps a GPU that nobody serves from.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Sequence
from typing import IO

END_SECONDS = 20.0
"""For vLLM to end by itself after SIGTERM."""

TAIL = 30
"""Lines of its output that are kept."""

# The reader of the lifeline is a member of the group that it kills; vLLM itself becomes the group's leader.
_ON_LIFELINE = """
exec 3<&0 </dev/null
{ trap '' HUP INT TERM; read -r line <&3; kill -s KILL 0; } >/dev/null 2>&1 &
exec 3<&-
exec "$@"
"""


class Process:
    """vLLM's process group; its output goes to stderr, and the last lines are kept."""

    def __init__(self, command: Sequence[str]) -> None:
        reader, self._lifeline = os.pipe()
        try:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", _ON_LIFELINE, "rollout-serve", *command],
                env={**os.environ, "VLLM_SERVER_DEV_MODE": "1"},
                start_new_session=True,
                stdin=reader,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
            )
        finally:
            os.close(reader)
        self.ended = asyncio.ensure_future(asyncio.to_thread(self._process.wait))
        self._tail: deque[str] = deque(maxlen=TAIL)
        threading.Thread(target=self._pass_on, args=(self._process.stdout,), daemon=True).start()

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def tail(self) -> str:
        return "\n".join(self._tail) or "(nothing)"

    def _pass_on(self, output: IO[bytes]) -> None:
        for line in output:
            self._tail.append(line.decode("utf-8", "replace").rstrip())
            with contextlib.suppress(OSError):  # nobody reads our stderr: vLLM must not stand still for that
                sys.stderr.buffer.write(line)
                sys.stderr.buffer.flush()

    def kill(self) -> None:
        """End the whole group at once; safe twice."""
        if self._lifeline >= 0:
            os.close(self._lifeline)
            self._lifeline = -1

    async def stop(self) -> None:
        """Ask it to end, and see to it that nothing of it is left. Safe twice."""
        if self.code is None and self._lifeline >= 0:
            self._process.send_signal(signal.SIGTERM)
            await asyncio.wait({self.ended}, timeout=END_SECONDS)
        self.kill()
        await self.ended
