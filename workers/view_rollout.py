"""How one rollout looks to people: its facts, its attempts, its tokens."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from rich.text import Text

from pipeline.backends import Backends
from pipeline.queue import Queue
from pipeline.trajectory import Trajectory
from workers import view, view_reward
from workers.dossier import Dossier
from workers.evidence import clean, scalar

FACTS = (
    "handler", "group", "lane", "outcome", "truncated", "kind", "why", "at", "host", "exit", "losses", "worked",
    "seconds", "retry_of", "requeued", "cancel", "late", "reward",
)  # fmt: skip

NAMES = {"worked": "worked", "seconds": "took"}
"""Facts that are seconds, and how they are named."""


async def tokenizer(queue: Queue) -> str:
    """The policy's tokenizer: policy.tokenizer, else the one that a registered server names; "" where none is here."""
    config = queue.config
    if config.policy.tokenizer:
        return str(config.path_of(config.policy.tokenizer))
    named = (backend.tokenizer for backend in (await Backends(queue).view()).backends)
    return next((folder for folder in named if folder and Path(folder).exists()), "")


def show(found: Dossier, decode: view.Decode | None) -> None:
    console = view.console()
    console.print(Text(found.about["id"], style="bold"), Text(found.about.get("now", "")))
    for name in FACTS:
        value = found.about.get(name)
        if value not in (None, "", {}, [], "0") and (value != 0 or name == "reward"):
            console.print(Text(f"  {NAMES.get(name, name):10} "), Text(_short(_said(name, value))), sep="")
    evidence = found.evidence
    if found.about.get("parts") or evidence:
        console.print(view_reward.text(found.about.get("parts") or {}, evidence), soft_wrap=True)
    if found.artifacts:
        console.print("  artifacts", style="bold")
        for path in found.artifacts:
            console.print(Text(f"    {path}"), soft_wrap=True)
    if found.about.get("task"):
        console.print("\ntask", style="bold")
        for name, value in view_reward.task_fields(found.about["task"]):
            console.print(Text(f"  {name:10} {value}"), soft_wrap=True)
    if found.attempts:
        console.print()
        _attempts(found)
    if found.log:
        console.print("\nthe end of its log:", style="bold")
        console.print(Text(clean(found.log.rstrip())))
    if found.trajectory is not None:
        console.print(f"\ntrajectory: {view.size_said(found.trajectory)}. {view.LEGEND}", style="bold", markup=False)
        if by := view.weights_said(found.trajectory):
            console.print(f"weights: {by}", markup=False)
        if chats := chats_said(found.trajectory):
            console.print(chats, markup=False)
        console.print(view.coloured(found.trajectory, decode), soft_wrap=True)
        if decode is None:
            console.print(
                "(ids, not text: no server names a tokenizer on this disk; set policy.tokenizer to see the words)",
                markup=False,
            )


def chats_said(trajectory: Trajectory) -> str:
    """Which turns came from a server that takes messages and not ids; "" where none did."""
    actions = [turn for sequence in trajectory.sequences for turn in sequence.turns if turn.kind == "action"]
    count = sum(turn.extra.get("endpoint") == "chat" for turn in actions)
    if not count:
        return ""
    return f"endpoint: chat in {count} of {len(actions)} turns (it rendered the messages; its prefix was checked)"


def _said(name: str, value: Any) -> str:
    if name in NAMES:
        return view.seconds(value)
    if name == "reward":
        return scalar(value)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


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
