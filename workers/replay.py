"""Goes on with a RUN attempt that was lost: the policy's turns come from the sandbox's journal as long as they fit.

Every turn travels to the host with the action that it leads to (`RemoteSandbox.note_turn`). The next attempt runs the
handler from its beginning: its calls of the policy are answered with the recorded turns, its actions with the host's
stored results, and where the records end the real ones go on. A handler that asks another thing than before can't be
replayed; it starts over at INIT, whatever it makes of the error.
"""

from __future__ import annotations

import json
import zlib
from collections import deque
from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pipeline import wire
from pipeline.errors import LineError, SandboxGone
from pipeline.interfaces import Completion


@runtime_checkable
class Journaled(Protocol):
    """A sandbox whose host keeps a journal."""

    turns: list[bytes]

    def note_turn(self, turn: bytes) -> None: ...


class Replay:
    """A policy that plays recorded turns first and records the new ones. All but `generate` is the inner policy's."""

    def __init__(self, inner: Any, sandbox: Journaled) -> None:
        self._inner = inner
        self._sandbox = sandbox
        self._left: dict[tuple[int, ...], deque[dict[str, Any]]] = {}
        """What was asked -> its turns, in the order of the calls: of calls side by side, any may have ended first."""
        for turn in sorted(map(wire.unpack, sandbox.turns), key=lambda turn: turn["call"]):
            self._left.setdefault(tuple(turn["mark"]), deque()).append(turn)
        self._call = 0
        self.replayed = 0
        self.broken: LineError | None = None
        """Why this attempt can't go on, once that is certain."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        """The recorded turn, else a sampled one. Raises SandboxGone when something else is asked than before."""
        self._call += 1
        call, mark = self._call, _mark(prompt_ids, sampling)
        if self._left:
            return self._recorded(mark)
        done: Completion = await self._inner.generate(prompt_ids, sampling)
        self._sandbox.note_turn(_turn(call, mark, done))
        return done

    def _recorded(self, mark: tuple[int, ...]) -> Completion:
        if mark not in self._left and self.broken is None:
            self.broken = SandboxGone(
                f"turn {self.replayed + 1} asks the policy another thing than the attempt before: the handler can't be "
                "replayed (set `resumable = False`), it starts over"
            )
        if self.broken is not None:
            raise self.broken
        turns = self._left[mark]
        turn = turns.popleft()
        if not turns:
            del self._left[mark]
        self.replayed += 1
        return _completion(turn)


def _mark(prompt_ids: Sequence[int], sampling: dict[str, Any]) -> tuple[int, ...]:
    """Length and CRC-32 of the prompt, and of how it is sampled: tells another call, not a forged one."""
    ids = np.asarray(prompt_ids, dtype="<u4")
    how = json.dumps(sampling, sort_keys=True, default=str)
    return len(ids), zlib.crc32(ids.tobytes()), zlib.crc32(how.encode())


def _turn(call: int, mark: tuple[int, ...], done: Completion) -> bytes:
    return wire.pack({
        "call": call, "mark": list(mark),
        "ids": np.asarray(done.ids, dtype="<u4"), "logprobs": np.asarray(done.logprobs, dtype="<f8"),
        "versions": [list(item) for item in done.versions], "finish_reason": done.finish_reason,
        "sampling": done.sampling, "started": done.started, "seconds": done.seconds, "endpoint": done.endpoint,
        "prompt_ids": None if done.prompt_ids is None else np.asarray(done.prompt_ids, dtype="<u4"),
    })  # fmt: skip


def _completion(recorded: dict[str, Any]) -> Completion:
    return Completion(
        ids=recorded["ids"].tolist(), logprobs=recorded["logprobs"].tolist(),
        versions=[(int(version), int(start), int(end)) for version, start, end in recorded["versions"]],
        finish_reason=recorded["finish_reason"], sampling=dict(recorded["sampling"]), started=recorded["started"],
        seconds=recorded["seconds"], endpoint=recorded.get("endpoint", ""),
        prompt_ids=None if recorded.get("prompt_ids") is None else recorded["prompt_ids"].tolist(),
    )  # fmt: skip
