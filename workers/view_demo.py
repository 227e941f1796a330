"""What the demo shows: a table of its groups, and one trajectory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from pipeline.results import Group, Rollout
from workers import view
from workers.demo import Outcome
from workers.policy.scripted_speech import NAME

STAGES = ("init", "run", "eval")


def show(outcome: Outcome, *, scripted: bool) -> None:
    """The demo's result for people."""
    console = view.console()
    rows = [_row(group) for group in outcome.groups]
    view.show_table(
        ("group", "rewards", "mean", "failed", "tokens", "sampled", *(f"{name} s" for name in STAGES)), rows
    )
    totals = summary(outcome)
    counted = ", ".join(f"{totals[name]} {name}" for name in ("groups", "rollouts", "scored", "failed"))
    took, start = view.seconds(outcome.seconds), view.seconds(outcome.started)
    console.print(f"{counted}, in {took} (after {start} to start the processes)", markup=False)
    _failures(outcome, console)
    _one(outcome)
    if scripted and totals["scored"]:
        console.print(
            f"The replies came from a {NAME}. It looks the answers up, and gets some wrong on purpose.", markup=False
        )
    if outcome.kept:
        console.print(f"Kept: {outcome.kept} (logs, settings, tokenizer, the server's data)", markup=False)


def _failures(outcome: Outcome, console: Any) -> None:
    """Why rollouts failed, the commonest first, and how to see more."""
    failed = [rollout for group in outcome.groups for rollout in group.rollouts if rollout.failure is not None]
    whys = Counter((item.failure.kind, item.failure.stage, item.failure.why) for item in failed if item.failure)
    for (kind, stage, why), count in whys.most_common(3):
        console.print(f"{count} failed in {stage} ({kind}): {why[:500]}", markup=False)
    if failed:
        console.print(
            f"`rollout try {failed[0].handler}` plays one in this process and shows the traceback", markup=False
        )


def summary(outcome: Outcome) -> dict[str, Any]:
    """The one line of --json."""
    rollouts = [rollout for group in outcome.groups for rollout in group.rollouts]
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    return {
        "groups": len(outcome.groups),
        "rollouts": len(rollouts),
        "scored": sum(rollout.outcome == "scored" for rollout in rollouts),
        "failed": sum(rollout.outcome == "failed" for rollout in rollouts),
        "seconds": round(outcome.seconds, 3),
        "mean_reward": round(sum(rewards) / len(rewards), 4) if rewards else None,
        "tokens": sum(len(rollout.trajectory) for rollout in rollouts if rollout.trajectory),
    }


def _row(group: Group) -> list[str]:
    rewards = " ".join(f"{rollout.reward:g}" if rollout.reward is not None else "-" for rollout in group.rollouts)
    failed = sum(rollout.outcome == "failed" for rollout in group.rollouts)
    trajectories = [rollout.trajectory for rollout in group.rollouts if rollout.trajectory]
    return [
        group.id, rewards, f"{group.mean:.2f}" if group.mean is not None else "", str(failed or ""),
        str(sum(map(len, trajectories))), str(sum(item.sampled for item in trajectories)),
        *(f"{stage_seconds(group.rollouts, name):.3f}" for name in STAGES),
    ]  # fmt: skip


def stage_seconds(rollouts: Sequence[Rollout], stage: str) -> float:
    """Mean seconds of work in a stage."""
    spent = [item["seconds"] for rollout in rollouts for item in rollout.attempts if item.get("stage") == stage]
    return sum(spent) / len(spent) if spent else 0.0


def _one(outcome: Outcome) -> None:
    """One trajectory with its tokens: a scored one with a full reward, if there is one."""
    rollouts = [rollout for group in outcome.groups for rollout in group.rollouts if rollout.trajectory]
    if not rollouts:
        return
    chosen = max(rollouts, key=lambda rollout: rollout.reward if rollout.reward is not None else -1.0)
    console = view.console()
    reward = f"reward {chosen.reward:g}" if chosen.reward is not None else chosen.outcome
    console.print(f"\nOne of them, {chosen.id}, {reward}. {view.LEGEND}", markup=False, style="bold")
    if chosen.trajectory is not None:
        made_up = chosen.handler == "echo"  # its ids are no tokens of any tokenizer
        decode = None if made_up else view.tokenizer_of(outcome.tokenizer)
        console.print(view.coloured(chosen.trajectory, decode), soft_wrap=True)
