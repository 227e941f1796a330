"""The policy's servers as a person sees them: `rollout policy`, `rollout serve`, `rollout watch`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from pipeline import inspect
from pipeline.backends import Backend, Backends, Load, View, state_of
from pipeline.queue import Queue
from workers.view import seconds

COLUMNS = ("backend", "state", "version", "calls", "tokens", "tokens/s", "wait", "lease", "address", "why")


async def look(queue: Queue) -> dict[str, Any]:
    """The policy as it is now, for machines; `others`: the servers of policies of another name, where there are any."""
    view = await Backends(queue).view()
    others = {}
    for name in queue.config.policies:
        found = described(await Backends(queue, name).view(), 0)["backends"]
        if found:
            others[name] = found
    return {**described(view, await inspect.begun(queue, view.policy.lane)), "others": others}


def described(view: View, begun: int) -> dict[str, Any]:
    """What there is, for machines. `begun`: rollouts of the run's lane that are begun and not acked.

    `tokens`: work in flight on all workers; `rate`: tokens of work per second, None unknown; `wait`: seconds until a
    call that comes now is worked on; `lease`: seconds left, None without one.
    """
    policy = view.policy
    best = max((load.rate for load in view.loads.values()), default=0.0)
    backends = []
    for backend in view.backends:
        state, why = state_of(backend, policy)
        load = view.loads.get(backend.id, Load())
        rate = load.rate or best
        about = dataclasses.asdict(backend)
        del about["ends"]
        about |= {"state": state, "why": why, "calls": load.calls, "tokens": round(load.tokens)}
        about |= {"rate": round(load.rate, 1) or None, "wait": round(load.tokens / rate, 1) if rate else None}
        about["lease"] = None if math.isinf(backend.ends) else round(backend.ends - view.now, 1)
        backends.append(about)
    admission = {"lane": policy.lane, "begun": begun, "bound": policy.bound} if policy.bound is not None else None
    return {"policy": dataclasses.asdict(policy), "admission": admission, "workers": view.workers, "backends": backends}


def registered(backend: Backend) -> dict[str, Any]:
    """What was registered, for machines: JSON knows no infinity."""
    return {**dataclasses.asdict(backend), "ends": None if math.isinf(backend.ends) else backend.ends}


def registered_said(backend: Backend) -> str:
    """The same in a line."""
    version = "not known" if backend.version is None else backend.version
    return f"{backend.id}: {backend.model or 'model not known'} at {backend.url}, version {version}"


def headline(found: dict[str, Any]) -> str:
    """The policy itself in a line."""
    policy, admission = found["policy"], found["admission"]
    if policy["version"] is None:
        parts = ["no trainer has named a version: every server is used, whatever weights it has"]
    else:
        parts = [f"version {policy['version']}", f"{policy['updates']} updates in this run"]
    if policy["paused"]:
        parts.append(f"paused ({policy['mode']}): {policy['paused']}")
    if admission:
        parts.append(f"{admission['begun']} of {admission['bound']} rollouts of lane {admission['lane']} begun")
    return "; ".join(parts)


def row(backend: dict[str, Any]) -> tuple[Any, ...]:
    wait, lease = backend["wait"], backend["lease"]
    return (
        backend["id"],
        backend["state"],
        backend["version"],
        backend["calls"],
        backend["tokens"],
        backend["rate"],
        "" if wait is None else seconds(wait),
        "none" if lease is None else seconds(lease),
        backend["url"],
        backend["why"],
    )
