"""`rollout watch`: the line as it moves, twice a second."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any

from redis.exceptions import RedisError
from rich.console import Group as Stack
from rich.live import Live
from rich.table import Table
from rich.text import Text

from pipeline import inspect, wire
from pipeline.connection import explain
from pipeline.errors import EnvelopeError, RedisUnavailable
from pipeline.queue import Queue
from workers import view, view_policy

EVERY = 0.5
"""Seconds between two looks."""

SPAN = 10
"""Looks over which a rate is taken."""

LATEST = 12


async def snapshot(queue: Queue) -> dict[str, Any]:
    """One look: stages, counts, workers, and the rewards of finished rollouts that wait to be popped."""
    stages, counts, workers, rewards, policy = await asyncio.gather(
        inspect.depth(queue), inspect.counts(queue), inspect.workers(queue), _latest(queue), view_policy.look(queue)
    )
    return {
        "line": queue.config.line.name,
        "time": time.time(),
        "stages": stages,
        "counts": counts,
        "workers": workers,
        "policy": policy,
        "latest": rewards,
    }


async def _latest(queue: Queue) -> list[dict[str, Any]]:
    """The youngest groups' finished rollouts, a few of each lane."""
    found: list[dict[str, Any]] = []
    for lane in queue.config.line.lanes:
        ids = await queue.execute("ZREVRANGE", queue.key("ready", "done", lane), 0, LATEST - 1)
        rows = await asyncio.gather(
            *(queue.execute("HMGET", queue.key("r", id.decode()), "outcome", "result", "ended") for id in ids)
        )
        for id, (outcome, result, ended) in zip(ids, rows, strict=True):
            if outcome:
                found.append(
                    {
                        "id": id.decode(),
                        "outcome": outcome.decode(),
                        "reward": _reward(result),
                        "ended": int(ended or 0) / 1000,
                    }
                )
    return sorted(found, key=lambda item: item["ended"], reverse=True)[:LATEST]


def _reward(result: bytes | None) -> float | None:
    try:
        return float(wire.unpack(result)["reward"]) if result else None
    except (EnvelopeError, KeyError, TypeError):
        return None


async def watch(opened: Callable[[], AbstractAsyncContextManager[Queue]], *, once: bool, as_json: bool) -> None:
    """Show the line until interrupted; `opened` goes to its Redis.

    A Redis that goes away after the first look is waited for. Raises RedisUnavailable, RedisError: at the first look.
    """
    console = view.console()
    async with opened() as queue:
        first = await snapshot(queue)
    if once:
        if as_json:
            print(json.dumps(first))  # noqa: T201
        else:
            console.print(render([first]))
        return
    with Live(render([first]), console=console, auto_refresh=False, screen=console.is_terminal) as live:
        await follow(opened, first, lambda shown: live.update(shown, refresh=True))


async def follow(
    opened: Callable[[], AbstractAsyncContextManager[Queue]], first: dict[str, Any], show: Callable[[Stack], None]
) -> None:
    """Look twice a second, for ever; while Redis is away the last look stays on the screen, below what is wrong."""
    history, heard = [first], time.monotonic()
    while True:
        try:
            async with opened() as queue:
                while True:
                    await asyncio.sleep(EVERY)
                    history = [*history[-SPAN:], await snapshot(queue)]
                    heard = time.monotonic()
                    show(render(history))
        except (RedisUnavailable, RedisError) as error:
            why = str(error) if isinstance(error, RedisUnavailable) else explain(error, "")
        show(Stack(away(time.monotonic() - heard, why), Text(), render(history)))
        await asyncio.sleep(EVERY)


def away(silent: float, why: str) -> Text:
    """What stands above the last look while there is no Redis."""
    return Text(f"no Redis for {silent:.0f} s: {why}", style="bold red")


def rate(history: list[dict[str, Any]], name: str) -> float | None:
    """Per second, over the looks at hand; None for a single one."""
    first, last = history[0], history[-1]
    span = last["time"] - first["time"]
    if span <= 0:
        return None
    moved = last["counts"].get(name, 0) - first["counts"].get(name, 0)
    return float(moved / span)


def render(history: list[dict[str, Any]]) -> Stack:
    """The whole screen."""
    last = history[-1]
    counts = last["counts"]
    head = f"line {last['line']}   {time.strftime('%H:%M:%S', time.localtime(last['time']))}   " + "  ".join(
        f"{name} {counts.get(name, 0)}" for name in ("enqueued", "live", "scored", "failed", "cancelled", "acked")
    )
    parts: list[Table | Text] = [_stages(history), *_pauses(last), _workers(last), _policy(last), _rewards(last)]
    return Stack(Text(head, style="bold"), *(part for shown in parts for part in (Text(), shown)))


def _stages(history: list[dict[str, Any]]) -> Table:
    made = _table("stage", "ready", "for a place", "for weights", "oldest", "leased", "delayed", "dead", "per s")
    for stage, item in history[-1]["stages"].items():
        speed = rate(history, "acked" if stage == "done" else f"committed:{stage}")
        ready = "  ".join(f"{lane} {count}" for lane, count in item["ready"].items())
        age = view.seconds(item["age"]) if any(item["ready"].values()) else ""
        made.add_row(
            stage,
            ready,
            str(sum(item["place"].values()) or ""),
            str(sum(item["weights"].values()) or ""),
            age,
            str(item["leased"]),
            str(item["delayed"]),
            str(item["dead"]),
            "" if speed is None else f"{speed:.1f}",
        )
    return made


def _pauses(last: dict[str, Any]) -> list[Text]:
    return [Text(why, style="bold yellow") for item in last["stages"].values() for why in item["paused"].values()]


def _workers(last: dict[str, Any]) -> Table:
    made = _table("worker", "stage", "busy", "sandboxes", "last beat", "state")
    for item in sorted(last["workers"], key=lambda item: (item["stage"], item["worker"]))[:20]:
        state = "stopping" if item.get("stopping") else item.get("paused") or "serving"
        made.add_row(
            item["worker"],
            item["stage"],
            f"{item['running']}/{item['slots']}",
            view.sandboxes(item),
            view.seconds(item["silent"]),
            state,
        )
    if not last["workers"]:
        made.add_row("no live worker", "", "", "", "", "start one: rollout work STAGE")
    return made


def _policy(last: dict[str, Any]) -> Text:
    """The weights in force, and how many servers are in which state."""
    states = Counter(backend["state"] for backend in last["policy"]["backends"])
    servers = ", ".join(f"{count} {state}" for state, count in sorted(states.items())) or "none is registered"
    calls = sum(backend["calls"] for backend in last["policy"]["backends"])
    return Text(f"policy: {view_policy.headline(last['policy'])}\nservers: {servers}; {calls} calls in flight")


def _rewards(last: dict[str, Any]) -> Text:
    said = [f"{item['reward']:g}" if item["reward"] is not None else item["outcome"] for item in last["latest"]]
    return Text("latest rewards, waiting to be popped: " + (" ".join(said) or "none"))


def _table(*columns: str) -> Table:
    made = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        made.add_column(column)
    return made
