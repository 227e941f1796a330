"""What the training run shows while it runs: a line in the terminal, steps.jsonl, and a picture that is drawn anew."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path
from statistics import mean
from typing import Any

from matplotlib.figure import Figure
from trl import GRPOConfig

from pipeline.adapters.trl_rollout import Played

DRAW_SECONDS = 2.0
"""Between two pictures: one takes a third of a second."""

INK, GRID = "#333333", "#dddddd"
BOUND = 0.02
"""A mean gap above this says that trainer and server do not hold the same weights."""


class Record:
    """Hears of each step. `out` gets settings.json, steps.jsonl and training.png."""

    def __init__(self, out: Path, config: GRPOConfig) -> None:
        out.mkdir(parents=True, exist_ok=True)
        names = ("learning_rate", "num_generations", "per_device_train_batch_size", "seed")
        (out / "settings.json").write_text(json.dumps({name: getattr(config, name) for name in names}))
        self._wanted = config.max_steps
        self._picture = out / "training.png"
        self._file = (out / "steps.jsonl").open("w")
        self._steps: list[dict[str, Any]] = []
        self._began = time.monotonic()
        self._drawn = 0.0

    def __call__(self, played: Played) -> None:
        if not played.training:
            return
        step = {
            "step": played.version, "reward": played.reward, "staleness": played.staleness, "scored": played.scored,
            "failed": played.failed, "tokens": played.tokens,
            "gap": number(played.gap.mean), "gap_largest": number(played.gap.largest),
            "gap_tokens": played.gap.tokens, "push_s": round(played.push_seconds, 3),
            "rollouts_s": round(played.seconds, 3), "at_s": round(time.monotonic() - self._began, 3),
        }  # fmt: skip
        self._steps.append(step)
        self._file.write(json.dumps(step) + "\n")
        self._file.flush()
        self._say(step)
        if time.monotonic() - self._drawn > DRAW_SECONDS:
            draw(self._steps, self._picture)
            self._drawn = time.monotonic()

    def close(self) -> None:
        """The last picture, and the run in one sentence."""
        draw(self._steps, self._picture)
        self._file.close()
        rewards, gaps = [step["reward"] for step in self._steps], [step["gap"] for step in self._steps]
        _print(
            f"reward {rewards[0]:.3f} to {rewards[-1]:.3f} in {len(rewards)} steps; logprob gap {mean(gaps):.1e} on "
            f"average, {max(gaps):.1e} in the worst step; see {self._picture}"
        )

    def _say(self, step: dict[str, Any]) -> None:
        bar = "#" * round(20 * step["reward"])
        _print(
            f"step {step['step'] + 1:3d}/{self._wanted}  reward {step['reward']:.3f} |{bar:<20}|  staleness "
            f"{step['staleness']}  logprob gap {step['gap']:.1e}  {step['at_s']:6.1f} s"
        )


def number(value: float | None) -> float:
    """Not a number where there was nothing to compare; the picture has a hole there."""
    return math.nan if value is None else value


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def draw(steps: list[dict[str, Any]], file: Path) -> None:
    """Reward, gap and staleness over the steps, as a PNG that is whole whenever somebody looks."""
    at = [step["step"] for step in steps]
    figure = Figure(figsize=(7.2, 6.0), dpi=110, layout="constrained")
    reward, gap, stale = figure.subplots(3, 1, sharex=True, height_ratios=(3, 1.6, 0.8))
    reward.plot(at, [step["reward"] for step in steps], color="#2266aa", linewidth=2)
    reward.set(ylim=(0, 1.02), ylabel="mean reward")
    reward.set_title("GRPO on rollouts of the line", loc="left", fontsize=11, color=INK)
    gap.plot(at, [step["gap"] for step in steps], color="#bb5511", label="mean")
    largest = [step["gap_largest"] for step in steps]
    gap.plot(at, largest, color="#bb5511", linewidth=0.8, alpha=0.5, label="largest")
    gap.axhline(BOUND, color="#aa2222", linewidth=1, linestyle="--", label=f"bound of the mean, {BOUND:g}")
    gap.set(yscale="log", ylabel="logprob gap (nats)")
    gap.legend(fontsize=8, frameon=False, ncols=3, loc="center right")
    stale.step(at, [step["staleness"] for step in steps], where="mid", color="#557733")
    stale.set(ylim=(-0.2, max(2, *(step["staleness"] + 1 for step in steps))), ylabel="staleness", xlabel="step")
    stale.yaxis.get_major_locator().set_params(integer=True)
    for axes in (reward, gap, stale):
        axes.grid(color=GRID, linewidth=0.6)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(colors=INK, labelsize=9)
    unfinished = file.with_suffix(".new")
    figure.savefig(unfinished, format="png")
    os.replace(unfinished, file)
