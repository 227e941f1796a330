"""The conservation audit: reads the whole line, changes nothing, and says what should not be.

It may run while the line works: one rollout's hash and sets are compared in one step of the server (`lua/audit.lua`),
pairs of keys in a transaction. What it finds is therefore wrong, and not only in motion.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pipeline.audit_files import audit_files
from pipeline.audit_reads import lossy_text, portions, read_pages, read_together
from pipeline.envelope import WORKING
from pipeline.queue import Queue

MOST = 100
"""Findings that are listed; the rest is counted."""

STAGES = (*(stage.value for stage in WORKING), "done")
SINGLE = {
    "schema", "seq", "due", "places", "workers", "beats", "counts", "tick", "blind", "backends", "policy", "versions",
    "loads", "closing", "paused", "spare", "files", "trash",
}  # fmt: skip
FAMILIES = {
    "r", "a", "p", "t", "g", "m", "ready", "place", "lease", "delayed", "groups", "own", "died", "credit", "claim",
    "bell", "dead", "letter", "gone", "started", "backend", "raise", "other", "doctor", "turn", "client",
}  # fmt: skip
EXPIRING = {"died", "claim", "letter", "gone", "raise", "doctor", "client"}


@dataclass
class Found:
    """What a scan of the keys saw. It is not one moment: each suspect is looked at again, in one step."""

    ids: set[str] = field(default_factory=set)
    payloads: list[tuple[str, str]] = field(default_factory=list)
    groups: set[str] = field(default_factory=set)
    lanes: set[str] = field(default_factory=set)
    owners: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    expiring: list[str] = field(default_factory=list)
    backends: set[tuple[str, str]] = field(default_factory=set)
    """(policy, id); "" is the trained one."""
    policies: set[str] = field(default_factory=set)


async def audit(queue: Queue) -> list[str]:
    """Every finding as a sentence, at most MOST of them; empty for a sound line. Raises RedisUnavailable."""
    found = await _scan(queue)
    found.lanes |= set(queue.config.line.lanes)
    await _members(queue, found)
    findings = list(found.wrong)
    for check in (_rollouts, _owners, _payloads, _groups, _complete, _spare, _lanes, _counters, _backends, _lives):
        findings.extend(await check(queue, found))
    findings.extend(await audit_files(queue))
    if len(findings) > MOST:
        findings[MOST:] = [f"and {len(findings) - MOST} findings more"]
    return findings


async def _scan(queue: Queue) -> Found:
    found = Found()
    cursor: Any = b"0"
    while True:
        cursor, keys = await queue.execute("SCAN", cursor, "MATCH", f"{queue.prefix}:*", "COUNT", 1000)
        for key in keys:
            _sort(found, lossy_text(key)[len(queue.prefix) + 1 :])
        if int(cursor) == 0:
            return found


def _sort(found: Found, name: str) -> None:
    kind, _, rest = name.partition(":")
    if (kind in SINGLE and not rest) or (kind in FAMILIES and rest):
        if kind in ("r", "a"):
            found.ids.add(rest)
        elif kind == "p":
            id, _, token = rest.rpartition(":")
            found.payloads.append((id, token))
        elif kind in ("t", "g", "m"):
            found.groups.add(rest)
        elif kind == "own":
            found.owners.append(rest)
        elif kind == "ready":
            found.lanes.add(rest.partition(":")[2])
        elif kind in ("place", "started"):
            found.lanes.add(rest)
        elif kind == "backend":
            found.backends.add(("", rest))
        elif kind == "other":
            policy, _, inner = rest.partition(":")
            found.policies.add(policy)
            if inner.startswith("backend:"):
                found.backends.add((policy, inner.removeprefix("backend:")))
            elif inner not in ("backends", "policy", "loads"):
                found.wrong.append(f"key {name} is of no kind that this line knows")
        if kind in EXPIRING:
            found.expiring.append(name)
    else:
        found.wrong.append(f"key {name} is of no kind that this line knows")


async def _members(queue: Queue, found: Found) -> None:
    """Ids that stand in a set, whether or not they have a hash."""
    names: list[tuple[str, ...]] = [("ready", stage, lane) for stage in STAGES for lane in sorted(found.lanes)]
    names += [("place", lane) for lane in sorted(found.lanes)]
    names += [(state, stage) for state in ("lease", "delayed") for stage in STAGES] + [("due",)]
    for name in names:
        async for page in read_pages(queue, "ZSCAN", queue.key(*name)):
            found.ids.update(page[::2])
    for lane in sorted(found.lanes):
        async for page in read_pages(queue, "SSCAN", queue.key("started", lane)):
            found.ids.update(page)


async def _rollouts(queue: Queue, found: Found) -> list[str]:
    """Each rollout in exactly one set, the one that its hash names; its owner, payload and group there."""
    lanes = sorted(found.lanes)
    findings: list[str] = []
    for page in portions(sorted(found.ids)):
        flat = await queue.outlast(
            lambda page=page: queue.pipe.script("audit", queue.prefix, len(lanes), *lanes, *page)  # type: ignore[misc]
        )
        findings.extend(
            f"rollout {lossy_text(id)} {lossy_text(what)}" for id, what in zip(flat[::2], flat[1::2], strict=True)
        )
    return findings


async def _owners(queue: Queue, found: Found) -> list[str]:
    """What a worker holds names that worker."""
    findings = []
    for owner in found.owners:
        own = queue.key("own", owner)
        async for ids in read_pages(queue, "SSCAN", own):
            replies = await read_together(
                queue, [(("SISMEMBER", own, id), ("HMGET", queue.key("r", id), "owner", "state")) for id in ids]
            )
            for id, (there, (named, state)) in zip(ids, replies, strict=True):
                if there and (lossy_text(named or b"") != owner or state != b"leased"):
                    says = f"{lossy_text(named or b'nobody')} ({lossy_text(state or b'gone')})"
                    findings.append(f"worker {owner} is said to own {id}, whose hash names {says}")
    return findings


async def _payloads(queue: Queue, found: Found) -> list[str]:
    """A payload that does not expire is the one that its rollout names."""
    looks = [
        (("TTL", queue.key("p", id, token)), ("HGET", queue.key("r", id), "payload")) for id, token in found.payloads
    ]
    replies = await read_together(queue, looks)
    return [
        f"payload p:{id}:{token} has neither an expiry nor an owner"
        for (id, token), (life, named) in zip(found.payloads, replies, strict=True)
        if life == -1 and lossy_text(named or b"") != token
    ]


async def _groups(queue: Queue, found: Found) -> list[str]:
    """Task, hash and members of a group belong together; the hash counts the members."""
    groups = sorted(found.groups)
    looks = [
        (
            ("TTL", queue.key("t", name)),
            ("HMGET", queue.key("g", name), "left", "samples", "done"),
            ("SCARD", queue.key("m", name)),
        )
        for name in groups
    ]
    findings = []
    for name, (life, (left, samples, done), members) in zip(groups, await read_together(queue, looks), strict=True):
        if samples is None:
            if life == -1:
                findings.append(f"task t:{name} has neither an expiry nor a group")
            if members:
                findings.append(f"m:{name} has {members} members but no group")
            continue
        if life == -2:
            findings.append(f"group {name} has no task")
        if int(left) != members:
            findings.append(f"group {name} counts {int(left)} rollouts left but has {members} members")
        if int(done) > int(samples):
            findings.append(f"group {name} counts {int(done)} of {int(samples)} samples done")
    return findings


async def _complete(queue: Queue, found: Found) -> list[str]:
    """What stands as a complete group is one."""
    findings = []
    for lane in sorted(found.lanes):
        ready = queue.key("groups", lane)
        async for page in read_pages(queue, "ZSCAN", ready):
            names = page[::2]
            about = ("done", "samples", "closed", "rest")
            looks = [(("ZSCORE", ready, name), ("HMGET", queue.key("g", name), *about)) for name in names]
            for name, (there, (done, samples, closed, rest)) in zip(
                names, await read_together(queue, looks), strict=True
            ):
                parted = closed and rest == b"later"
                if there is not None and samples is not None and done != samples and not parted:
                    findings.append(f"group {name} stands as complete with {int(done)} of {int(samples)} samples done")
    return findings


async def _spare(queue: Queue, found: Found) -> list[str]:
    """The members that begun groups will not need are counted by lane: as many as the groups say, in one step."""
    names = sorted(found.groups)
    look = (("HGETALL", queue.key("spare")), *(("HMGET", queue.key("g", name), "lane", "spare") for name in names))
    ((counted, *groups),) = await read_together(queue, [look])
    pairs = counted.items() if isinstance(counted, dict) else zip(counted[::2], counted[1::2], strict=True)
    wanted = {lossy_text(lane): int(count) for lane, count in pairs}
    summed: Counter[str] = Counter()
    for lane, spare in groups:
        summed[lossy_text(lane or b"")] += int(spare or 0)
    return [
        f"lane {lane} counts {wanted.get(lane, 0)} spare members, its groups {summed[lane]}"
        for lane in sorted(wanted.keys() | summed.keys())
        if wanted.get(lane, 0) != summed[lane]
    ]


async def _lanes(queue: Queue, found: Found) -> list[str]:
    """A lane that no worker claims from."""
    unknown = sorted(found.lanes - set(queue.config.line.lanes))
    sizes = [sum([int(await queue.execute("ZCARD", name)) for name in _waiting(queue, [lane])]) for lane in unknown]
    return [
        f"lane {lane} holds {size} rollouts, but line.lanes does not name it: nobody claims them"
        for lane, size in zip(unknown, sizes, strict=True)
        if size
    ]


def _waiting(queue: Queue, lanes: list[str]) -> list[str]:
    """The sets in which rollouts of these lanes wait."""
    ready = [queue.key("ready", stage, lane) for stage in STAGES for lane in lanes]
    return ready + [queue.key("place", lane) for lane in lanes]


async def _counters(queue: Queue, found: Found) -> list[str]:
    """enqueued = live + acked, and live = what stands in the sets, all read in one step."""
    sets = _waiting(queue, sorted(found.lanes))
    sets += [queue.key(state, stage) for state in ("lease", "delayed") for stage in STAGES]
    commands = [("HMGET", queue.key("counts"), "enqueued", "live", "acked"), *(("ZCARD", name) for name in sets)]
    ((numbers, *sizes),) = await read_together(queue, [tuple(commands)])
    enqueued, live, acked = (int(number or 0) for number in numbers)
    findings = []
    if enqueued != live + acked:
        findings.append(f"{enqueued} rollouts were enqueued, but {live} live and {acked} acked make {live + acked}")
    if live != sum(sizes):
        findings.append(f"{live} rollouts are counted as live, but {sum(sizes)} stand in the sets")
    return findings


async def _backends(queue: Queue, found: Found) -> list[str]:
    """A policy server and its place in the list belong together."""

    def key(policy: str, *parts: str) -> str:
        return queue.key("other", policy, *parts) if policy else queue.key(*parts)

    for policy in ("", *found.policies):
        async for page in read_pages(queue, "ZSCAN", key(policy, "backends")):
            found.backends.update((policy, id) for id in page[::2])
    ids = sorted(found.backends)
    looks = [(("ZSCORE", key(p, "backends"), id), ("HGET", key(p, "backend", id), "url")) for p, id in ids]
    findings = []
    for (_, id), (place, url) in zip(ids, await read_together(queue, looks), strict=True):
        if place is not None and not url:
            findings.append(f"policy server {id} is listed but has no URL")
        if place is None and url is not None:
            findings.append(f"policy server {id} has a hash but is not listed: its lease can't run out")
    return findings


async def _lives(queue: Queue, found: Found) -> list[str]:
    """What is kept for a time has an end."""
    lives = await asyncio.gather(*(queue.execute("TTL", queue.key(name)) for name in found.expiring))
    return [
        f"key {name} should expire and has no end"
        for name, life in zip(found.expiring, lives, strict=True)
        if life == -1
    ]
