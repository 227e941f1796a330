"""What the notes of all nodes mean: findings with mends, and the table of who reaches whom. Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from workers.doctor import Finding
from workers.doctor.node import NO_FOLDER, NO_REDIS
from workers.sandbox.images.files import SHARED_DISKS

CLOCK_SECONDS = 5.0
LATE_SECONDS = 5.0
NAMED = 8
"""Nodes that a sentence names; the others are counted."""
WIDEST = 16
"""Nodes of which a table is drawn."""


@dataclass
class Seen:
    """All that the nodes said. `names`: every node that was expected, by rank; the maps are by rank too.

    `hellos`: what a node is; `reports`: its `calls` (rank -> ms, error) and what it found at home; `folder`: s until
    a node saw a change in slurm.folder, or why it did not; `silent`: a meeting place that failed the one who reports.
    """

    names: list[str]
    hellos: dict[str, dict[str, Any]]
    reports: dict[str, dict[str, Any]]
    folder: dict[str, Any] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    waited: float = 30.0

    def name(self, rank: str) -> str:
        return self.names[int(rank)]

    def of(self, part: str) -> dict[str, dict[str, Any]]:
        """What each node that reported found at home."""
        return {rank: report[part] for rank, report in sorted(self.reports.items(), key=lambda item: int(item[0]))}


def findings(seen: Seen) -> list[Finding]:
    """In the order in which things are needed."""
    checks: list[Callable[[Seen], list[Finding]]] = [
        _nodes, _addresses, _reach, _redis, _clocks, _versions, _folder, _sandboxes, _temporary,
    ]  # fmt: skip
    return [finding for check in checks for finding in check(seen)]


def reach(seen: Seen) -> dict[str, dict[str, Any]]:
    """Node -> node -> ms of a round trip, or why it was not reached."""
    return {
        seen.name(rank): {seen.name(to): call["error"] or call["ms"] for to, call in report["calls"].items()}
        for rank, report in seen.reports.items()
    }


def table(seen: Seen) -> tuple[list[str], list[list[str]]]:
    """Columns and rows of "who (row) reaches whom (column)", in ms; "-" for oneself, "?" for who did not come."""
    ranks = [str(rank) for rank in range(len(seen.names))]
    rows = []
    for rank in ranks:
        calls = seen.reports.get(rank, {}).get("calls", {})
        cells = []
        for to in ranks:
            call = calls.get(to)
            cells.append("-" if to == rank else "?" if call is None else "no" if call["error"] else f"{call['ms']:.2f}")
        rows.append([seen.name(rank), seen.hellos.get(rank, {}).get("address", ""), *cells])
    return ["from / to (ms)", "address", *seen.names], rows


def named(nodes: Iterable[str]) -> str:
    """n1, n2 and 5 more."""
    found = list(nodes)
    more = f" and {len(found) - NAMED} more" if len(found) > NAMED else ""
    return ", ".join(found[:NAMED]) + more


def grouped(said: dict[str, str], everybody: int) -> str:
    """Nodes that say the same, together: "every node: ..." or "n1, n2: ...; n3: ..."."""
    by_text: dict[str, list[str]] = {}
    for node, text in said.items():
        by_text.setdefault(text, []).append(node)
    return "; ".join(
        f"{'every node' if len(nodes) == everybody else named(nodes)}: {text}" for text, nodes in by_text.items()
    )


def _span(values: Sequence[float], unit: str) -> str:
    low, high = min(values), max(values)
    return f"{low:.3g} {unit}" if f"{low:.3g}" == f"{high:.3g}" else f"{low:.3g} to {high:.3g} {unit}"


def _nodes(seen: Seen) -> list[Finding]:
    ranks = [str(rank) for rank in range(len(seen.names))]
    absent = [seen.name(rank) for rank in ranks if rank not in seen.hellos]
    mute = [seen.name(rank) for rank in seen.hellos if rank not in seen.reports]
    found = []
    if absent:
        found.append(
            Finding(
                "nodes", "fail", f"{named(absent)} did not come within {seen.waited:g} s",
                f"srun -w {absent[0]} rollout doctor: does it start there, and does it see Redis or slurm.folder?",
            )
        )  # fmt: skip
    if mute:
        found.append(
            Finding(
                "nodes", "fail", f"{named(mute)} came, and then said nothing more",
                f"look at its log, or try srun -w {mute[0]} rollout doctor",
            )
        )  # fmt: skip
    for place, why in seen.silent.items():
        found.append(Finding("meeting", "warn", f"not all notes could go by {place}: {why}", "see redis, slurm.folder"))
    if not absent and not mute:
        found.insert(0, Finding("nodes", "ok", f"{len(ranks)} of {len(ranks)} came: {named(seen.names)}"))
    return found


def _addresses(seen: Seen) -> list[Finding]:
    wrong = {seen.name(rank): hello["wrong"] for rank, hello in seen.hellos.items() if hello["wrong"]}
    if wrong:
        text = grouped(wrong, len(seen.hellos))
        return [Finding("addresses", "fail", text, "set network.interface to what all nodes have: ib0, or 10.1.0.0/16")]
    if len({hello["machine"] for hello in seen.hellos.values()}) < 2:
        return [Finding("addresses", "ok", "all these nodes are one machine")]
    by_address: dict[str, list[str]] = {}
    for rank, hello in seen.hellos.items():
        by_address.setdefault(hello["address"], []).append(seen.name(rank))
    mend = "set network.interface to the network that the nodes share (its name: ib0; or in CIDR: 10.1.0.0/16)"
    own = [
        node
        for address, nodes in by_address.items()
        if address.startswith("127.") or address == "::1"
        for node in nodes
    ]
    if own:
        text = f"{named(own)} would publish a loopback address, by which every other node means itself"
        return [Finding("addresses", "fail", text, mend)]
    twice = {address: nodes for address, nodes in by_address.items() if len(nodes) > 1}
    if twice:
        text = "; ".join(f"{named(nodes)} all publish {address}" for address, nodes in twice.items())
        return [Finding("addresses", "fail", f"{text}: an address that each node has for itself, as a bridge's", mend)]
    return [Finding("addresses", "ok", f"{len(by_address)} different ones")]


def _reach(seen: Seen) -> list[Finding]:
    lost = {
        (rank, to): call["error"]
        for rank, report in seen.reports.items() for to, call in report["calls"].items() if call["error"]
    }  # fmt: skip
    ways = [call["ms"] for report in seen.reports.values() for call in report["calls"].values() if not call["error"]]
    if lost:
        mend = (
            "let the nodes open TCP connections to each other, on all ports above 1023 (sandboxes, policy servers), or "
            "set network.interface to the network on which they may"
        )
        return [Finding("reach", "fail", ". ".join(_cut_off(seen, lost)), mend)]
    return [Finding("reach", "ok", f"all {len(ways)} ways between nodes work, {_span(ways, 'ms')}")] if ways else []


def _cut_off(seen: Seen, lost: dict[tuple[str, str], str]) -> list[str]:
    """The calls that failed, with as few sentences as will do: who reaches nobody, who is reached by nobody or few."""
    said = []
    for rank, report in seen.reports.items():
        mine = {seen.name(to): lost[rank, to] for to in report["calls"] if (rank, to) in lost}
        if len(mine) == len(report["calls"]) > 1:
            said.append(f"{seen.name(rank)} reaches no other node ({grouped(mine, 0)})")
            lost = {way: why for way, why in lost.items() if way[0] != rank}
    for to in sorted({to for _, to in lost}, key=int):
        callers = {seen.name(rank): why for (rank, target), why in lost.items() if target == to}
        able = [seen.name(rank) for rank, report in seen.reports.items() if to in report["calls"]]
        able = [name for name in able if name not in callers]
        but = f", but from {named(able)}" if able else ""
        said.append(f"{seen.name(to)} can't be reached from {grouped(callers, 0)}{but}")
    return said


def _redis(seen: Seen) -> list[Finding]:
    told = seen.of("redis")
    wrong = {seen.name(rank): item["error"] for rank, item in told.items() if item["error"]}
    if wrong and set(wrong.values()) == {NO_REDIS}:
        mend = "rollout slurm up starts one; or set redis.url. Then look again, who reaches it"
        return [Finding("redis", "warn", f"{NO_REDIS}: the nodes met in slurm.folder alone", mend)]
    if wrong:
        return [
            Finding(
                "redis", "fail", grouped(wrong, len(told)),
                "redis.url must be an address that all nodes reach; network.interface says which one Redis publishes",
            )
        ]  # fmt: skip
    return (
        [Finding("redis", "ok", f"every node reaches it, {_span([item['ms'] for item in told.values()], 'ms')}")]
        if told
        else []
    )


def _clocks(seen: Seen) -> list[Finding]:
    ahead = {seen.name(rank): item["clock"] for rank, item in seen.of("redis").items() if not item["error"]}
    off = {
        node: f"{abs(by):.1f} s {'ahead of' if by > 0 else 'behind'} Redis's"
        for node, by in ahead.items()
        if abs(by) > CLOCK_SECONDS
    }
    if off:
        return [
            Finding(
                "clocks", "warn",
                f"{grouped(off, len(ahead))}. Leases go by Redis's clock alone, so nothing is lost by that; ages and "
                "times in logs are wrong by as much, and munge refuses jobs from 300 s on",
                "run chrony or ntpd on the nodes",
            )
        ]  # fmt: skip
    return [Finding("clocks", "ok", f"at most {max(map(abs, ahead.values())):.2g} s from Redis's")] if ahead else []


def _versions(seen: Seen) -> list[Finding]:
    told = {
        seen.name(rank): f"rollout-line {hello['package']} (schema {hello['schema']}), Python {hello['python']}"
        for rank, hello in seen.hellos.items()
    }
    text = grouped(told, len(told))
    if len(set(told.values())) > 1:
        return [
            Finding(
                "versions", "warn", text, "one environment on the shared file system for all; or finish the upgrade"
            )
        ]
    return [Finding("versions", "ok", text)]


def _folder(seen: Seen) -> list[Finding]:
    name, told = "slurm.folder", seen.of("folder")
    wrong = {seen.name(rank): item["error"] for rank, item in told.items() if item["error"]}
    if wrong and set(wrong.values()) == {NO_FOLDER}:
        return [
            Finding(name, "warn", f"{NO_FOLDER}: Redis can't publish its address", "set slurm.folder to a shared one")
        ]
    lost = {seen.name(rank): late for rank, late in seen.folder.items() if isinstance(late, str)}
    if wrong or lost:
        return [
            Finding(
                name, "fail", grouped({**lost, **wrong}, len(told)),
                "a folder on a file system that all nodes mount, which this user may write to",
            )
        ]  # fmt: skip
    kinds = sorted({item["kind"] for item in told.values()})
    text = f"every node writes to it ({', '.join(kinds)})"
    seconds = [late for late in seen.folder.values() if not isinstance(late, str)]
    if not told or not seconds:
        return [Finding(name, "ok", text)] if told else []
    text += f"; a change is seen elsewhere within {max(0.01, *seconds):.2f} s"
    if max(seconds) > LATE_SECONDS:
        return [
            Finding(
                name, "warn", f"{text}: so long, workers ask a Redis that has moved at its old address",
                "mount it with a shorter attribute cache (NFS: actimeo=3)",
            )
        ]  # fmt: skip
    return [Finding(name, "ok", text)]


def _sandboxes(seen: Seen) -> list[Finding]:
    told = seen.of("sandbox")
    wrong = {seen.name(rank): item["error"] for rank, item in told.items() if item["error"]}
    if wrong:
        first = next(iter(wrong))
        return [Finding("sandbox", "fail", grouped(wrong, len(told)), f"srun -w {first} rollout doctor looks closer")]
    return (
        [
            Finding(
                "sandbox", "ok", f"every node starts one, in {_span([item['seconds'] for item in told.values()], 's')}"
            )
        ]
        if told
        else []
    )


def _temporary(seen: Seen) -> list[Finding]:
    name, told = "temporary files", seen.of("temporary")
    wrong = {seen.name(rank): item["error"] for rank, item in told.items() if item["error"]}
    if wrong:
        return [Finding(name, "fail", grouped(wrong, len(told)), "set TMPDIR to a folder on a local disk")]
    shared = {
        seen.name(rank): f"{item['path']} lies on {item['kind']}, which other nodes share"
        for rank, item in told.items() if item["kind"].startswith(SHARED_DISKS)
    }  # fmt: skip
    if shared:
        return [
            Finding(
                name, "warn", grouped(shared, len(told)), "set TMPDIR, and sandbox.root, to folders on a local disk"
            )
        ]
    places = {seen.name(rank): f"{item['path']} ({item['kind']})" for rank, item in told.items()}
    return [Finding(name, "ok", grouped(places, len(told)))] if told else []
