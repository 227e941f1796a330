"""Why a pop could not be filled: each missing rollout with a sentence, and the reasons counted."""

from __future__ import annotations

from pipeline.envelope import WORKING
from pipeline.inspect import page, where
from pipeline.queue import Queue

LISTED = 500
"""Rollouts that are looked up, and named, at most."""


async def why_missing(queue: Queue, lane: str, ids: list[str]) -> dict[str, str]:
    """Each id with where it is and why it waits; without ids (another process enqueued) whatever is in the line."""
    if ids:
        found = await where(queue, ids[:LISTED])
        return {id: found[id].why if id in found else "the server has no record of it" for id in ids[:LISTED]}
    listed: list[str] = []
    for stage in WORKING:
        for state in ("ready", "place", "leased", "delayed"):
            if state == "place" and stage is not WORKING[0]:
                continue
            listed += [row["id"] for row in await page(queue, stage.value, state, lane, 0, LISTED)]
    return {id: item.why for id, item in (await where(queue, listed)).items() if item.fields["lane"] == lane}


def summed_up(missing: dict[str, str], lane: str) -> str:
    """The reasons of `why_missing` in one sentence, the commonest first."""
    if not missing:
        return f"nothing more is in flight in lane {lane!r}"
    reasons: dict[str, int] = {}
    for why in missing.values():
        short = why.partition(" s in ")[2] or why
        reasons[short] = reasons.get(short, 0) + 1
    shown = "; ".join(f"{count} {why}" for why, count in sorted(reasons.items(), key=lambda item: -item[1])[:4])
    return f"{len(missing)} outstanding: {shown}"
