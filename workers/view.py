"""How results look to people: tables, progress, and token text coloured by who wrote it. Everything goes to stdout.

Sampled tokens (loss mask 1) are green, the prompt is dim, observations are cyan: the same in `demo`, `try` and `show`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from pipeline.trajectory import Sequence as Sequence_, Trajectory

Decode = Callable[[Sequence[int]], str]

STYLES = {"prompt": "dim", "observation": "cyan", "action": "bold green"}
LEGEND = "prompt (dim), observation (cyan): not trained on; sampled by the policy (green): loss mask 1"
WIDE = 200
SHOWN_IDS = 24
"""How many ids of a turn are listed where no tokenizer turns them into text."""


def console(*, err: bool = False) -> Console:
    """A console on this moment's stdout; where that is no terminal it is wide enough to cut nothing."""
    made = Console(file=sys.stderr if err else sys.stdout, highlight=False, soft_wrap=False)
    if not made.is_terminal:
        made.width = WIDE
    return made


def show_table(columns: Sequence[str], rows: Sequence[Sequence[str]], none: str = "nothing", title: str = "") -> None:
    if not rows:
        console().print(none, markup=False)
        return
    made = Table(box=None, pad_edge=False, header_style="bold", title=title or None, title_justify="left")
    for at, column in enumerate(columns):
        numbers = all(_number(row[at]) for row in rows)
        made.add_column(column, justify="right" if numbers else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    to = console()
    if to.is_terminal:
        to.print(made)
        return
    with to.capture() as captured:  # without the spaces that fill the last column
        to.print(made)
    to.file.write("".join(f"{line.rstrip()}\n" for line in captured.get().splitlines()))


def _number(text: str) -> bool:
    return not text or text.replace(".", "", 1).replace("-", "", 1).replace(" s", "").isdigit()


class Progress:
    """A bar on stderr where that is a terminal, else a line now and then."""

    def __init__(self, total: int, what: str) -> None:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn, TimeElapsedColumn

        self._console = console(err=True)
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[about]}"),
        )
        self._bar = Bar(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task(what, total=total, about="")
        self._total, self._what, self._said = total, what, 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def at(self, done: int, about: dict[str, int]) -> None:
        """`done` of the total are over; `about` is shown behind the bar."""
        words = " ".join(f"{count} {name}" for name, count in sorted(about.items()) if count)
        self._bar.update(self._task, completed=done, about=words)
        if not self._console.is_terminal and done * 4 // max(1, self._total) > self._said:
            self._said = done * 4 // max(1, self._total)
            self._console.print(f"{done} of {self._total} {self._what} {words}", markup=False)


class Span(NamedTuple):
    """A stretch of a turn, tokens `start:end` of its sequence: `text` is decoded, or names ids without a tokenizer.

    `version`: of the weights that sampled it; None where nobody did.
    """

    kind: str
    sampled: bool
    text: str
    start: int
    end: int
    version: int | None = None


def spans(trajectory: Trajectory, decode: Decode | None) -> Iterator[list[Span]]:
    """One list for each sequence. The loss mask decides what counts as sampled, the turns only name it."""
    for sequence in trajectory.sequences:
        found = []
        for turn in sequence.turns:
            for first, last, sampled in _runs(sequence.loss_mask[turn.start : turn.end]):
                for start, end, version in _by_version(sequence, turn.start + first, turn.start + last, sampled):
                    ids = sequence.token_ids[start:end].tolist()
                    text = decode(ids) if decode else listed(ids)
                    found.append(Span(turn.kind, sampled, text, start, end, version))
        yield found


def _by_version(sequence: Sequence_, start: int, end: int, sampled: bool) -> Iterator[tuple[int, int, int | None]]:
    """Tokens `start:end`, cut where other weights went on."""
    if not sampled:
        yield start, end, None
        return
    for run in sequence.versions:
        if run.start < end and run.end > start:
            yield max(run.start, start), min(run.end, end), run.version


def weights(trajectory: Trajectory) -> dict[int, int]:
    """How many tokens each version of the weights sampled, oldest version first."""
    counts: dict[int, int] = {}
    for sequence in trajectory.sequences:
        for run in sequence.versions:
            counts[run.version] = counts.get(run.version, 0) + run.end - run.start
    return dict(sorted(counts.items()))


def size_said(trajectory: Trajectory) -> str:
    return f"{len(trajectory)} tokens, {trajectory.sampled} sampled in {trajectory.turns} turns"


def weights_said(trajectory: Trajectory) -> str:
    """The same in words; "" for version 0 alone: no trainer has changed the weights."""
    counts = weights(trajectory)
    if not any(counts):
        return ""
    return ", ".join(f"version {version} sampled {count} tokens" for version, count in counts.items())


def pieces(ids: Sequence[int], decode: Decode) -> Iterator[tuple[int, int, str]]:
    """(start, end, text) token by token; tokens that make a character only together stay together."""
    start, before = 0, ""
    known: list[int] = []
    for at in range(1, len(ids) + 1):
        group = list(ids[start:at])
        text = decode([*known, *group])[len(before) :]
        if text.endswith("\ufffd") and at - start < 4 and at < len(ids):
            continue
        yield start, at, text
        start, known, before = at, group, decode(group)


def _runs(mask: Any) -> Iterator[tuple[int, int, bool]]:
    """(start, end, sampled) over a mask, gapless."""
    start = 0
    for at in range(1, len(mask) + 1):
        if at == len(mask) or mask[at] != mask[start]:
            yield start, at, bool(mask[start])
            start = at


def listed(ids: Sequence[int]) -> str:
    more = f" ... {len(ids) - SHOWN_IDS} more" if len(ids) > SHOWN_IDS else ""
    return f"[{' '.join(map(str, ids[:SHOWN_IDS]))}{more}]\n"


def coloured(trajectory: Trajectory, decode: Decode | None) -> Text:
    """The whole trajectory as text in colours. Without a terminal the sampled parts stand between marks."""
    text = Text()
    plain = not console().is_terminal
    last: int | None = None
    for number, sequence in enumerate(spans(trajectory, decode)):
        if number:
            text.append(f"\n--- sequence {number + 1}: the history was rendered anew ---\n", style="yellow")
        for span in sequence:
            if span.version is not None:
                if last is not None and span.version != last:
                    text.append(f"⟪weights {span.version}⟫", style="yellow")
                last = span.version
            body = f"⟦{span.text}⟧" if plain and span.sampled else span.text
            text.append(body, style=STYLES["action"] if span.sampled else STYLES.get(span.kind, "cyan"))
    return text


def tokenizer_of(folder: str) -> Decode | None:
    """The decoder of a tokenizer's folder; None when none is named. Raises ConfigError."""
    if not folder:
        return None
    from workers.policy.tokenizer import load

    loaded = load(folder)
    return lambda ids: loaded.decode(list(ids))


def sandboxes(worker: dict[str, Any]) -> str:
    """Of what a worker says of itself: live sandboxes of how many; empty where it hosts none."""
    return f"{worker['sandboxes']}/{worker['max_live']}" if "max_live" in worker else ""


def seconds(value: float | None) -> str:
    """A duration for people."""
    if value is None:
        return ""
    if value < 100:
        return f"{value:.2f} s" if value < 10 else f"{value:.1f} s"
    return f"{value / 60:.1f} min" if value < 6000 else f"{value / 3600:.1f} h"
