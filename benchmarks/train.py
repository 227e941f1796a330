"""A real training run on rollouts of the line: the example in docs/examples/trl_grpo, and its figures.

    python benchmarks/train.py [--json FILE] [-- OPTIONS OF TRAIN.PY]

It needs the environments of `make test-vllm` and `make test-trainers`. The picture results/train/training.png is drawn
anew while it runs. Exit code 1 when the reward did not rise from 0.1 or less to 0.9 or more within 80 steps, or when
the trainer's logprobs lie further than 0.02 on average, or 0.1 in one step, from those of the rollouts. A run with
options of its own (a shorter one) is shown, and neither judged nor written.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

from harness import machine, write

ROOT = Path(__file__).parents[1]
OUT = ROOT / "benchmarks" / "results" / "train"
VLLM, TRAINERS = ROOT / ".venv-vllm", ROOT / ".venv-trainers"
MODEL = VLLM / "models" / "tiny"

FIRST, LAST, STEPS, GAP_MEAN, GAP_WORST = 0.1, 0.9, 80, 0.02, 0.1


def run(more: list[str]) -> int:
    """The example's exit code."""
    shutil.rmtree(OUT, ignore_errors=True)
    command = [
        sys.executable, str(ROOT / "docs/examples/trl_grpo/run.py"), "--model", str(MODEL), "--vllm",
        str(VLLM / "bin/vllm"), "--trainer", str(TRAINERS / "bin/python"), "--out", str(OUT), "--", *more,
    ]  # fmt: skip
    process = subprocess.Popen(command, cwd=ROOT)
    try:
        return process.wait()
    except KeyboardInterrupt:  # it has heard of it too, and ends its processes
        return process.wait()


def figures(seconds: float) -> dict[str, Any]:
    steps = [json.loads(line) for line in (OUT / "steps.jsonl").read_text().splitlines()]
    gaps = [step["gap"] for step in steps]
    rewards = [step["reward"] for step in steps]
    return {
        **machine(), "model": MODEL.name, **json.loads((OUT / "settings.json").read_text()),
        "first_reward": rewards[0], "last_reward": rewards[-1], "steps": len(steps),
        "steps_to_0.9": next((at + 1 for at, reward in enumerate(rewards) if reward >= LAST), None),
        "rollouts": sum(step["scored"] for step in steps), "failed": sum(step["failed"] for step in steps),
        "staleness_worst": max(step["staleness"] for step in steps),
        "logprob_gap_mean": sum(gaps) / len(gaps), "logprob_gap_worst": max(gaps),
        "train_s": steps[-1]["at_s"] - steps[0]["at_s"], "all_s": seconds,
    }  # fmt: skip


def short_of(found: dict[str, Any]) -> list[str]:
    """What of the promise does not hold, a sentence each."""
    most = {"first_reward": FIRST, "steps": STEPS, "logprob_gap_mean": GAP_MEAN, "logprob_gap_worst": GAP_WORST}
    wrong = [
        f"{name} is {found[name]:g}, wanted at most {limit:g}"
        for name, limit in most.items()
        if not found[name] <= limit  # nan, where nothing was compared, does not hold either
    ]
    if found["last_reward"] < LAST:
        wrong.append(f"last_reward is {found['last_reward']:g} after {found['steps']} steps, wanted at least {LAST:g}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="A real training run on rollouts of the line.")
    parser.add_argument("--json", metavar="FILE", help="write the figures there")
    parser.add_argument("more", nargs="*", metavar="-- OPTIONS OF TRAIN.PY", help="such as -- --steps 20")
    args = parser.parse_args()
    began = time.monotonic()
    code = run(args.more)
    if code:
        return code
    found = figures(time.monotonic() - began)
    write(found, None if args.more else args.json)
    wrong = [] if args.more else short_of(found)
    sys.stderr.write("".join(f"{sentence}\n" for sentence in wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
