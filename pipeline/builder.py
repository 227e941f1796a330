"""Grows a trajectory turn by turn; every invariant is checked when a turn is added."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence as SequenceOf
from typing import Any

import numpy as np

from pipeline.errors import TrajectoryError
from pipeline.trajectory import Sequence, Trajectory, Turn, TurnKind, VersionRun


class TrajectoryBuilder:
    """Grows a trajectory turn by turn, in compact arrays (9 bytes a token).

    `ids` is the current sequence's tokens: exactly what the next model call's prompt must be.
    """

    def __init__(self) -> None:
        self._done: list[Sequence] = []
        self.truncated: str | None = None
        self._reset()

    def _reset(self) -> None:
        self.ids: array[int] = array("I")
        self._mask = bytearray()
        self._logprobs: array[float] = array("f")
        self._versions: list[VersionRun] = []
        self._turns: list[Turn] = []

    @classmethod
    def of(cls, trajectory: Trajectory) -> TrajectoryBuilder:
        """A builder that already holds a finished trajectory (what EVAL sees)."""
        builder = cls()
        builder._done = list(trajectory.sequences)
        return builder

    def begin(self) -> None:
        """Start a new sequence; the current one, if it holds anything, is closed as it is."""
        if self._turns:
            self._done.append(self._sequence())
        self._reset()

    @property
    def actions(self) -> int:
        """Actions so far, over all sequences."""
        done = sum(turn.kind == "action" for sequence in self._done for turn in sequence.turns)
        return done + sum(turn.kind == "action" for turn in self._turns)

    @property
    def sampled(self) -> int:
        """Tokens that the policy sampled so far, over all sequences."""
        return sum(int(sequence.loss_mask.sum()) for sequence in self._done) + sum(self._mask)

    def prompt(self, ids: SequenceOf[int], **about: Any) -> None:
        """Add tokens before the first action: mask 0, logprob 0.0."""
        self._unsampled("prompt", ids, about)

    def observation(self, ids: SequenceOf[int], **about: Any) -> None:
        """Add tokens after an action that the policy did not sample: mask 0, logprob 0.0."""
        self._unsampled("observation", ids, about)

    def reread(self, ids: SequenceOf[int], **about: Any) -> None:
        """The server rendered what stands behind the last action itself: the whole sequence is `ids`.

        The newest prompt or observation becomes what it read. Raises TrajectoryError, and changes nothing, where `ids`
        do not begin with all tokens up to the end of the last action.
        """
        kept = max((turn.end for turn in self._turns if turn.kind == "action"), default=0)
        if not _same(self.ids[:kept], ids[:kept]):
            raise TrajectoryError(f"the server read other ids than the {kept} that were read and sampled before")
        while self._turns and self._turns[-1].start >= kept and self._turns[-1].kind != "action":
            self._turns.pop()
        for kind in (self.ids, self._mask, self._logprobs):
            del kind[kept:]
        (self.observation if kept else self.prompt)(ids[kept:], **about)

    def action(
        self,
        ids: SequenceOf[int],
        logprobs: SequenceOf[float],
        versions: Iterable[tuple[int, int, int]],
        *,
        prompt_ids: SequenceOf[int] | None = None,
        **about: Any,
    ) -> None:
        """Add sampled tokens: mask 1.

        `versions` are (version, start, end) over `ids`, gapless from 0 to len(ids). `prompt_ids`, where given, must be
        exactly the tokens already here. `about` goes to the Turn (finish_reason, started, seconds, sampling, reward).
        Raises TrajectoryError; nothing is added then.
        """
        if len(ids) != len(logprobs):
            raise TrajectoryError(f"the policy sent {len(ids)} ids and {len(logprobs)} logprobs for one action")
        if prompt_ids is not None and not _same(self.ids, prompt_ids):
            raise TrajectoryError(f"the prompt of {len(prompt_ids)} ids is not the sequence's {len(self.ids)} ids")
        finite = np.isfinite(np.asarray(logprobs, dtype=np.float32))
        if not bool(finite.all()):
            bad = int(np.argmin(finite))
            raise TrajectoryError(f"logprob {bad} of {len(logprobs)} is {logprobs[bad]}, no finite float32")
        at, runs = 0, []
        for version, start, end in versions:
            if start != at or end <= start:
                raise TrajectoryError(f"weight version {version} covers {start}:{end}, expected a run from {at}")
            runs.append(VersionRun(version, len(self.ids) + start, len(self.ids) + end))
            at = end
        if at != len(ids):
            raise TrajectoryError(f"weight versions cover {at} of {len(ids)} sampled ids")
        self._add("action", ids, 1, logprobs, about)
        self._versions.extend(runs)

    def _unsampled(self, kind: TurnKind, ids: SequenceOf[int], about: dict[str, Any]) -> None:
        self._add(kind, ids, 0, array("f", bytes(4 * len(ids))), about)

    def _add(
        self, kind: TurnKind, ids: SequenceOf[int], mask: int, logprobs: SequenceOf[float], about: dict[str, Any]
    ) -> None:
        start = len(self.ids)
        try:
            fresh = array("I", ids)
        except (TypeError, OverflowError) as error:
            raise TrajectoryError(f"{kind} ids are no token ids (unsigned 32 bit): {error}") from error
        self.ids.extend(fresh)
        self._mask.extend(bytes([mask]) * len(fresh))
        self._logprobs.extend(array("f", logprobs))
        self._turns.append(Turn(kind=kind, start=start, end=start + len(fresh), **about))

    def _sequence(self) -> Sequence:
        sequence = Sequence(
            token_ids=np.array(self.ids, dtype=np.uint32),
            loss_mask=np.frombuffer(bytes(self._mask), dtype=np.uint8),
            logprobs=np.array(self._logprobs, dtype=np.float32),
            versions=tuple(_merged(self._versions)),
            turns=tuple(self._turns),
        )
        sequence.check()
        return sequence

    def build(self) -> Trajectory:
        """The trajectory so far. Raises TrajectoryError when an invariant does not hold."""
        current = [self._sequence()] if self._turns else []
        return Trajectory(sequences=(*self._done, *current))


def _merged(runs: Iterable[VersionRun]) -> Iterator[VersionRun]:
    last: VersionRun | None = None
    for run in runs:
        if last and last.version == run.version and last.end == run.start:
            last = last._replace(end=run.end)
            continue
        if last:
            yield last
        last = run
    if last:
        yield last


def _same(ids: array[int], other: SequenceOf[int]) -> bool:
    return ids is other or (len(ids) == len(other) and ids == array("I", other))
