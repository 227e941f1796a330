"""How `rollout task validate` looks: a line for each task as it is found, why a task is not ok, and the sum."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.text import Text

from workers import view
from workers.evidence import clean
from workers.validate import Verdict

WIDEST = 48
"""Characters of an id in its column."""

LOG_LINES = 12

STYLES = {"ok": "green", "no gold": "yellow", "unsteady": "yellow"}


class Live:
    """Prints verdicts as they come; on a terminal a bar below them says how far it is."""

    def __init__(self, ids: Sequence[str]) -> None:
        self._console = view.console()
        self._width = min(WIDEST, max([4, *map(len, ids)]))
        columns = (TextColumn("tasks"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=self._console, transient=True, disable=not self._console.is_terminal)
        self._task = self._bar.add_task("tasks", total=len(ids))

    def __enter__(self) -> Self:
        head = f"{'task':{self._width}}  {'gold':>6}  {'empty':>6}  {'eval':>8}  verdict"
        self._print(Text(head, style="bold"))
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def found(self, verdict: Verdict) -> None:
        """One more is known."""
        id = verdict.id if len(verdict.id) <= self._width else f"{verdict.id[: self._width - 1]}…"
        gold, empty = (f"{value:g}" if value is not None else "-" for value in (verdict.gold, verdict.empty))
        line = Text(f"{id:{self._width}}  {gold:>6}  {empty:>6}  {view.seconds(verdict.seconds):>8}  ")
        line.append(verdict.verdict, style=STYLES.get(verdict.verdict, "bold red"))
        line.append(f": {clean(verdict.why)}" if verdict.why else "")
        self._print(line)
        if verdict.verdict != "ok":
            for text in clean(verdict.log.rstrip()).splitlines()[-LOG_LINES:]:
                self._print(Text(f"    | {text}", style="dim"))
        self._bar.advance(self._task)

    def _print(self, text: Text) -> None:
        self._console.print(text, soft_wrap=True)


def counted(verdicts: Sequence[Verdict]) -> dict[str, int]:
    """How many of each kind, those that are ok first."""
    counts = Counter(str(verdict.verdict) for verdict in verdicts)
    return {"ok": counts.pop("ok", 0), **dict(sorted(counts.items()))}


def summed_up(verdicts: Sequence[Verdict], total: int, took: float) -> str:
    """One line."""
    counts = ", ".join(f"{count} {kind}" for kind, count in counted(verdicts).items())
    left = f"; {total - len(verdicts)} were not looked at" if len(verdicts) < total else ""
    return f"{total} tasks in {view.seconds(took)}: {counts}{left}"
