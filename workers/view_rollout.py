"""How one rollout looks to people: its facts, its attempts, its tokens."""

from __future__ import annotations

import json
import time

from rich.text import Text

from pipeline.config import Config
from workers import view
from workers.dossier import Dossier

FACTS = (
    "handler", "group", "lane", "outcome", "reward", "parts", "evidence", "truncated", "kind", "why", "at", "host",
    "exit", "losses", "worked", "seconds", "retry_of", "requeued", "cancel", "task",
)  # fmt: skip


def decoder(config: Config, folder: str) -> view.Decode | None:
    """Text of ids, by policy.tokenizer where that is set."""
    return view.tokenizer_of(str(config.path_of(folder))) if folder else None


def show(found: Dossier, decode: view.Decode | None) -> None:
    console = view.console()
    console.print(Text(found.about["id"], style="bold"), Text(found.about.get("now", "")))
    for name in FACTS:
        value = found.about.get(name)
        if value not in (None, "", {}, [], 0, "0"):
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            console.print(Text(f"  {name:10} "), Text(_short(text)), sep="")
    if found.attempts:
        console.print()
        _attempts(found)
    if found.about.get("log"):
        console.print("\nthe end of its log:", style="bold")
        console.print(Text(found.about["log"].rstrip()))
    if found.trajectory is not None:
        tokens = f"{len(found.trajectory)} tokens, {found.trajectory.sampled} sampled in {found.trajectory.turns} turns"
        console.print(f"\ntrajectory: {tokens}. {view.LEGEND}", style="bold", markup=False)
        counts = view.weights(found.trajectory)
        if len(counts) > 1 or any(counts):  # version 0 alone: no trainer has changed the weights
            by = ", ".join(f"version {version} sampled {count} tokens" for version, count in counts.items())
            console.print(f"weights: {by}", markup=False)
        console.print(view.coloured(found.trajectory, decode), soft_wrap=True)
        if decode is None:
            console.print("(ids, not text: set policy.tokenizer to see the words)", markup=False)


def _short(text: str, most: int = 2000) -> str:
    return text if len(text) <= most else f"{text[:most]} ... ({len(text)} characters)"


def _attempts(found: Dossier) -> None:
    rows = [
        [
            str(item.get("stage", "")), str(item.get("attempt", "")), str(item.get("worker", "")),
            str(item.get("host", "")),
            time.strftime("%H:%M:%S", time.localtime(item.get("started", 0))), view.seconds(item.get("seconds")),
            str(item.get("outcome", "")), _short(str(item.get("error", "")).partition("\n")[0], 160),
        ]
        for item in found.attempts
    ]  # fmt: skip
    view.show_table(("stage", "attempt", "worker", "host", "at", "took", "outcome", "error"), rows)
