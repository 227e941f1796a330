"""What `rollout try` shows after the turns: the reward with its parts, or what the user's code raised."""

from __future__ import annotations

import traceback
from typing import Any

from rich.text import Text

from pipeline.envelope import Task
from workers import view, view_reward
from workers.policy.scripted_speech import NAME
from workers.trial import Trial, users_traceback


def show(trial: Trial, task: Task, *, whole: bool, scripted: str) -> None:
    """`whole`: the whole traceback. Turns of a policy were printed as they came.

    `scripted`: "right" where a scripted policy spoke that knew the answer, "other" where it did not, "" for a model.
    """
    console = view.console()
    if scripted and trial.spoke:
        knows = "here it always knows the answer" if scripted == "right" else "it knew no right answer (`gold`)"
        console.print(f"(the replies come from a {NAME}; {knows})", markup=False)
    if trial.payload.trajectory and not trial.spoke:
        console.print(view.coloured(trial.payload.trajectory, None), soft_wrap=True)
    if trial.failed is not None:
        error = trial.error or trial.failed
        text = "".join(traceback.format_exception(error)) if whole else users_traceback(trial.failed)
        if text:
            view.console(err=True).print(Text(text.rstrip()))
        view.console(err=True).print(
            Text(f"failed, kind {trial.failed.kind}: {trial.failed}", style="bold red"), soft_wrap=True
        )
        if evidence := getattr(trial.failed, "evidence", {}):
            console.print(view_reward.text({}, evidence), soft_wrap=True)
        return
    facts = record(trial, task)
    console.print(Text(f"\nreward {facts['reward']:g}", style="bold"))
    if facts["parts"] or facts["evidence"]:
        console.print(view_reward.text(facts["parts"], facts["evidence"]), soft_wrap=True)
    if facts["truncated"]:
        console.print(Text(f"  {'truncated':10} {facts['truncated']}"))
    spent = ", ".join(f"{stage} {view.seconds(value)}" for stage, value in trial.seconds.items())
    console.print(Text(f"  {'tokens':10} {facts['tokens']}, {facts['sampled']} sampled in {facts['turns']} turns"))
    console.print(Text(f"  {'took':10} {spent}"))


def record(trial: Trial, task: Task) -> dict[str, Any]:
    """For --json."""
    trajectory, reward = trial.payload.trajectory, trial.reward
    return {
        "handler": task.handler,
        "outcome": "failed" if trial.failed else "scored",
        "reward": reward.value if reward else None,
        "parts": reward.parts if reward else {},
        "evidence": reward.evidence if reward else getattr(trial.failed, "evidence", {}),
        "truncated": trial.payload.truncated,
        "tokens": len(trajectory) if trajectory else 0,
        "sampled": trajectory.sampled if trajectory else 0,
        "turns": trajectory.turns if trajectory else 0,
        "seconds": trial.seconds,
        "kind": trial.failed.kind if trial.failed else None,
        "why": str(trial.failed) if trial.failed else None,
    }
