"""What a trainer's checkpoint keeps of a stream: a small map for JSON."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Self

from pipeline.errors import ConfigError
from pipeline.feed import Feed, Spot

FORM = 1
"""The map's form; a state of another one is refused."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamState:
    """`cursor`: the next spot to be fed, None when all tasks of `epochs` were. `in_flight`: fed, and not trained on.
    `trained`: ids of groups that were trained on and may be in the line still. `early`: ids of groups that were popped,
    and whose turn to be fed is still to come. `length`: tasks of an epoch, None for an iterator, of which `read` were
    taken."""

    name: str
    seed: int | None
    samples: int
    length: int | None
    epochs: int | None
    cursor: Spot | None
    in_flight: Iterable[Spot]
    trained: Iterable[str]
    early: Iterable[str]
    read: int

    def to_map(self) -> dict[str, Any]:
        return {
            "form": FORM, "name": self.name, "seed": self.seed, "samples": self.samples, "length": self.length,
            "epochs": self.epochs, "cursor": None if self.cursor is None else list(self.cursor[:2]), "read": self.read,
            "in_flight": [list(spot) for spot in sorted(self.in_flight)],
            "trained": sorted(self.trained), "early": sorted(self.early),
        }  # fmt: skip

    @classmethod
    def of(cls, state: dict[str, Any]) -> Self:
        """Read a map that `to_map` made. Raises ConfigError for any other."""
        if not isinstance(state, dict) or state.get("form") != FORM:
            form = state.get("form") if isinstance(state, dict) else type(state).__name__
            raise ConfigError(f"this is no state of a stream that this version reads: its form is {form!r}, not {FORM}")
        try:
            cursor, length, epochs = state["cursor"], state["length"], state["epochs"]
            if cursor is None and None not in (length, epochs):
                cursor = (epochs, 0)  # more epochs may be asked for now
            return cls(
                name=str(state["name"]), seed=state["seed"], samples=int(state["samples"]), length=length,
                epochs=epochs, cursor=None if cursor is None else Spot(int(cursor[0]), int(cursor[1])),
                in_flight=[Spot(*map(int, spot)) for spot in state["in_flight"]],
                trained=list(map(str, state["trained"])), early=list(map(str, state["early"])), read=int(state["read"]),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ConfigError(f"the state of the stream is damaged: {type(error).__name__}: {error}") from None

    def check(self, feed: Feed, samples: int) -> None:
        """Raise ConfigError where it belongs to other tasks, or to groups of another size."""
        for what, then, now in (
            ("the number of tasks", self.length, feed.length), ("seed", self.seed, feed.seed),
            ("samples", self.samples, samples),
        ):  # fmt: skip
            if then != now:
                raise ConfigError(
                    f"the checkpoint's stream does not fit this one: {what} was {then} and is {now}. Make the stream "
                    "as it was, or begin a new one without the state"
                )
