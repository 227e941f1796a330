"""What the processes of a box use, and which of them to kill first."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from workers.sandbox import processes
from workers.sandbox.processes import Process


@dataclass(slots=True)
class Usage:
    """Processes of one box with the bytes of memory of each, and their threads together."""

    processes: list[Process]
    bytes_of: dict[int, int]
    threads: int

    @classmethod
    def of(cls, found: list[Process]) -> Usage:
        used = {item.pid: processes.use(item.pid) for item in found}
        resident = {pid: use.resident for pid, use in used.items()}
        return cls(found, resident, sum(use.threads for use in used.values()))

    def memory(self, limit: int) -> int:
        """Bytes together. What is shared is counted once, which costs time, only where it could matter."""
        if sum(self.bytes_of.values()) > limit:
            for pid, resident in self.bytes_of.items():
                share = processes.proportional(pid)
                self.bytes_of[pid] = resident if share is None else share
        return sum(self.bytes_of.values())


def main_of(found: Iterable[Process]) -> Process | None:
    """The oldest process: the shell, to which everything else is a loss that it can tell of."""
    return min(found, key=lambda item: (item.born, item.pid), default=None)


def without_main(found: Iterable[Process]) -> list[Process]:
    """All but the oldest process."""
    found = list(found)
    main = main_of(found)
    return [item for item in found if item is not main]


def largest(usage: Usage) -> list[Process]:
    """The subtree that uses most memory, cut as small as it still holds most of it; the main process comes last."""
    children: dict[int, list[Process]] = {}
    known = {item.pid for item in usage.processes}
    for item in usage.processes:
        children.setdefault(item.parent if item.parent in known else 0, []).append(item)
    main = main_of(usage.processes)
    tops = [item for item in children.get(0, []) if item is not main]
    if main is not None:
        tops += children.pop(main.pid, [])
    if not tops:
        return list(usage.processes)
    whole = {item.pid: subtree(item, children) for item in usage.processes}
    size = {pid: sum(usage.bytes_of[item.pid] for item in tree) for pid, tree in whole.items()}
    top = max(tops, key=lambda item: size[item.pid])
    if main is not None and usage.bytes_of[main.pid] > size[top.pid]:
        return [main]
    while below := children.get(top.pid):
        child = max(below, key=lambda item: size[item.pid])
        if size[child.pid] * 2 < size[top.pid]:
            break
        top = child
    return whole[top.pid]


def subtree(top: Process, children: dict[int, list[Process]]) -> list[Process]:
    """A process and all below it."""
    found = [top]
    for item in found:
        found += children.get(item.pid, [])
    return found
