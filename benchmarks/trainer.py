"""What a trainer gets out of the line: long trajectories as numpy arrays, a policy that is busy, batches in time.

    python benchmarks/trainer.py [--json FILE] [--short] [--only PART]...

handover: 256 trajectories of 32k tokens lie done; a fresh process pops them. decoupled: the same rollouts, of stated
log-normal times, in a coupled loop (rollouts inside the training loop) and decoupled; both on the same line. early: the
same groups, waited for whole, and closed as soon as enough are scored.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from dataclasses import asdict, replace
from typing import Any

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))

import trainer_loops as loops
from harness import bench, machine, median, write
from trainer_handover import SAMPLES, fill, read

PLAN = loops.Plan()
SHORT = replace(
    PLAN, times=replace(PLAN.times, call=0.05, tool=0.02), step=0.3, groups=2, samples=4, slots=4, coupled=2, warm=1,
    decoupled=2, early=1, extra=1,
)  # fmt: skip


CLIENTS = ("async", "sync")


async def handover(short: bool) -> dict[str, Any]:
    """Each way several times, in fresh processes; the best is told, and the median beside it. `handover_256_s` and
    `handover_peak_ratio` are the worse client's."""
    groups, tokens, turns, times = (2, 4096, 8, 1) if short else (32, 32_768, 24, 5)
    with bench() as line:
        await fill(line, groups, tokens, turns)
        told = {way: [read(line, way, groups) for _ in range(times)] for way in (*CLIENTS, "padded", "flat")}
    figures: dict[str, Any] = {}
    for way, runs in told.items():
        best = min(run["seconds"] for run in runs)
        figures |= {
            f"handover_{way}_s": best, f"handover_{way}_median_s": median([run["seconds"] for run in runs]),
            f"handover_{way}_cpu_s": min(run["cpu"] for run in runs),
            f"handover_{way}_peak_ratio": max(run["peak_ratio"] for run in runs),
        }  # fmt: skip
    return {
        "handover_256_s": max(figures[f"handover_{way}_s"] for way in CLIENTS),
        "handover_peak_ratio": max(figures[f"handover_{way}_peak_ratio"] for way in CLIENTS),
        "handover_rollouts": groups * SAMPLES, "handover_tokens": tokens, "handover_turns": turns,
        "handover_bytes": told["async"][0]["bytes"], "handover_runs": times, **figures,
    }  # fmt: skip


def stated(plan: loops.Plan) -> dict[str, Any]:
    """The model of times that the loops are played with."""
    sizes = {name: value for name, value in asdict(plan).items() if name != "times"}
    return {
        **{f"plan_{name}": value for name, value in (sizes | asdict(plan.times)).items()},
        **{f"plan_{name}": value for name, value in plan.described().items()},
    }


async def decoupled(plan: loops.Plan) -> dict[str, Any]:
    with bench() as line:
        one = await loops.coupled(line, plan)
    with bench() as line:
        other = await loops.decoupled(line, plan)
    return {
        "decoupled_ratio": other["steps_per_hour"] / one["steps_per_hour"],
        "policy_utilisation_coupled": one["utilisation"], "policy_utilisation_decoupled": other["utilisation"],
        **{f"coupled_{name}": value for name, value in one.items() if name != "utilisation"},
        **{f"decoupled_{name}": value for name, value in other.items() if name != "utilisation"},
        **stated(plan),
    }  # fmt: skip


async def early(plan: loops.Plan) -> dict[str, Any]:
    with bench() as line:
        told = await loops.early(line, plan)
    return {f"early_close_{name}": value for name, value in told.items()} | stated(plan)


async def measure(part: str, short: bool, staleness: int) -> dict[str, Any]:
    if part == "handover":
        return await handover(short)
    plan = replace(SHORT if short else PLAN, staleness=staleness)
    return await (decoupled if part == "decoupled" else early)(plan)


PARTS = ("handover", "decoupled", "early")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", help="write the figures to this file, one flat object")
    parser.add_argument("--short", action="store_true", help="small sizes: does it run at all?")
    parser.add_argument("--only", action="append", choices=PARTS, help="measure only this part (repeatable)")
    parser.add_argument("--staleness", type=int, default=PLAN.staleness, help="updates that the decoupled loop allows")
    options = parser.parse_args()
    figures: dict[str, Any] = machine()
    for part in options.only or PARTS:
        sys.stderr.write(f"{part} ...\n")
        figures |= asyncio.run(measure(part, options.short, options.staleness))
    write(figures, options.json)


if __name__ == "__main__":
    main()
