"""`rollout pop`: finished rollouts as JSON lines, acknowledged once they are written."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from typing import Any

import click

from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.errors import Incomplete
from pipeline.results import Rollout
from workers import interrupt
from workers.cli.base import Command, check_lane, complain, located, settings

PAGE = 200
"""Rollouts, or groups, that --all takes in one go."""
LISTED = 20
"""Rollouts that are named when less came than was asked for."""


@click.command(cls=Command)
@click.argument("n", required=False, type=click.IntRange(min=1))
@click.option("--all", "everything", is_flag=True, help="All that have ended by now, instead of N; waits for nothing.")
@click.option("--lane", default="train", show_default=True)
@click.option(
    "--timeout",
    default=60.0,
    show_default=True,
    type=click.FloatRange(min=0),
    metavar="S",
    help="Seconds to wait for all N; 0 takes what is there.",
)
@click.option("--groups", is_flag=True, help="N whole groups instead of N rollouts (still one rollout a line).")
@click.option("--arrays", is_flag=True, help="Ids, mask and logprobs as lists instead of their lengths.")
@click.option("--no-ack", is_flag=True, help="Only look: they go back to the line.")
@click.option("--json", "as_json", is_flag=True, help="For machines (always so).")
@click.pass_context
def pop(
    ctx: click.Context, n: int | None, everything: bool, lane: str, timeout: float, groups: bool, arrays: bool,
    no_ack: bool, as_json: bool,
) -> None:  # fmt: skip
    """Take N finished rollouts (default: 1), oldest group first, and print each as a JSON line.

    Each is acknowledged after its line was written; one whose line was not goes back to the line. Exit 1 when less
    than N came in time: what came is printed and acknowledged all the same.
    """
    del as_json
    if everything and n is not None:
        raise click.UsageError("say N or --all")
    settings(ctx).logs()
    config = located(settings(ctx).config())
    check_lane(config, lane)
    wanted = None if everything else n or 1
    ctx.exit(interrupt.run(_pop(config, wanted, lane, 0.0 if everything else timeout, groups, arrays, no_ack)))


async def _pop(
    config: Config, n: int | None, lane: str, timeout: float, groups: bool, arrays: bool, no_ack: bool
) -> int:
    """The exit code. Without `n`, page after page of what is there."""
    async with RolloutClient(config=config) as client:
        pop: Any = client.pop_groups if groups else client.pop
        while True:
            missing = None
            try:
                popped = await pop(n or PAGE, timeout, lane)
            except Incomplete as error:
                popped, missing = error.batch, _told(error, lane)
            for rollout in _each(popped):
                sys.stdout.write(json.dumps(record(rollout, arrays), ensure_ascii=False) + "\n")
                sys.stdout.flush()
                if not no_ack:
                    await client.ack(rollout)
            if n is not None or missing:
                break
    if n is None or not missing:
        return 0
    complain(missing)
    return 1


def _told(error: Incomplete, lane: str) -> str:
    """n of m and the reasons, then each missing rollout on a line."""
    named = list(error.missing.items())
    more = f"\n  ... and {len(named) - LISTED} more" if len(named) > LISTED else ""
    return str(error) + "".join(f"\n  {id}: {why}" for id, why in named[:LISTED]) + more


def _each(popped: Any) -> Iterable[Rollout]:
    for item in popped:
        if isinstance(item, Rollout):
            yield item
        else:
            yield from item.rollouts


def record(rollout: Rollout, arrays: bool) -> dict[str, Any]:
    """A rollout as JSON types. Without `arrays` the token arrays are told by their lengths."""
    failure = rollout.failure
    return {
        "id": rollout.id, "group": rollout.group, "sample": rollout.sample, "samples": rollout.samples,
        "lane": rollout.lane, "handler": rollout.handler, "outcome": rollout.outcome, "reward": rollout.reward,
        "parts": rollout.parts, "evidence": _plain(rollout.evidence), "truncated": rollout.truncated,
        "failure": {name: getattr(failure, name) for name in failure.__slots__} if failure else None,
        "retry_of": rollout.retry_of, "losses": rollout.losses, "attempts": rollout.attempts,
        "seconds": rollout.seconds, "worked": rollout.worked, "sampled": rollout.sampled, "late": rollout.late,
        "state": _plain(rollout.state),
        "trajectory": trajectory_record(rollout.trajectory, arrays),
    }  # fmt: skip


def trajectory_record(trajectory: Any, arrays: bool) -> dict[str, Any] | None:
    if trajectory is None:
        return None
    sequences = [
        {
            "token_ids": _array(item.token_ids, arrays), "loss_mask": _array(item.loss_mask, arrays),
            "logprobs": _array(item.logprobs, arrays), "versions": [list(run) for run in item.versions],
            "turns": [
                {
                    "kind": turn.kind, "start": turn.start, "end": turn.end, "finish_reason": turn.finish_reason,
                    "seconds": turn.seconds, "reward": turn.reward,
                }
                for turn in item.turns
            ],
        }
        for item in trajectory.sequences
    ]  # fmt: skip
    return {"tokens": len(trajectory), "sampled": trajectory.sampled, "turns": trajectory.turns, "sequences": sequences}


def _array(values: Any, arrays: bool) -> Any:
    return values.tolist() if arrays else len(values)


def _plain(value: Any) -> Any:
    """msgpack types as JSON types: bytes by their length."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return (
        value
        if isinstance(value, str | int | float | bool | type(None))
        else f"<{type(value).__name__} of {len(value)}>"
    )
