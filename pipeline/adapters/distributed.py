"""Several trainer processes (torch.distributed), one line: rank 0 pops and hands on, and each rank takes its part.

torch is imported inside `on_rank_zero`; the rest is plain arithmetic.
"""

from __future__ import annotations

import logging
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pipeline.errors import ServiceError

if TYPE_CHECKING:
    from pipeline.adapters.rows import Row
    from pipeline.results import Group

T = TypeVar("T")

log = logging.getLogger(__name__)

WORD_EVERY = 20.0
"""Seconds after which rank 0 tells the others that it is still waiting. It must be well below the process group's
time-out."""


def on_rank_zero(fetch: Callable[[], T], group: Any = None, *, word_every: float = WORD_EVERY) -> T:
    """What `fetch` returns on rank 0, on every rank of `group` (torch.distributed; None: the default one).

    All ranks call it at the same point. `fetch` runs on rank 0 alone, on a thread of its own: so that the calling
    thread can tell the others every `word_every` seconds that rank 0 still waits, and a long wait is never taken for a
    dead process. What it raises is raised on every rank. Where a rank dies, the others raise ServiceError: with gloo at
    once (rank 0 when it next tells them something), with nccl after the time-out that `init_process_group(timeout=...)`
    set; so they do where a rank comes later than that. Objects travel pickled, with nccl
    through the GPU's memory: a gloo group (`new_group(backend="gloo")`) keeps that off it.
    """
    import torch.distributed as dist

    first = dist.get_rank(group) == 0
    source = dist.get_global_rank(group, 0) if group is not None else 0
    if first:
        return _hand_on(fetch, lambda told: _tell(dist, source, group, told), word_every)
    told: T = _wait(dist, source, group)
    return told


def _hand_on(fetch: Callable[[], T], tell: Callable[[tuple[str, Any]], None], word_every: float) -> T:
    """Rank 0's side."""
    result: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            result.append(fetch())
        except BaseException as error:  # it is raised on every rank, by whoever called
            errors.append(error)

    thread = threading.Thread(target=run, name="rank-0-fetch", daemon=True)
    thread.start()
    while True:
        thread.join(word_every)
        if not thread.is_alive():
            break
        tell(("waits", None))
    if errors:
        tell(("error", _sendable(errors[0])))
        raise errors[0]
    try:
        tell(("result", result[0]))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        refusal = ServiceError(f"what rank 0 fetched can't be sent to the other ranks: {error}")
        tell(("error", refusal))
        raise refusal from error
    return result[0]


def _tell(dist: Any, source: int, group: Any, told: tuple[str, Any]) -> None:
    try:
        dist.broadcast_object_list([told], src=source, group=group)
    except RecursionError as error:
        raise TypeError(f"it is nested too deeply: {error}") from error
    except RuntimeError as error:
        raise ServiceError(
            f"another rank did not take what rank 0 told it: it has died, or it came later than the process group's "
            f"time-out ({error})"
        ) from error


def _wait(dist: Any, source: int, group: Any) -> Any:
    """The other ranks' side."""
    began = time.monotonic()
    while True:
        box: list[Any] = [None]
        try:
            dist.broadcast_object_list(box, src=source, group=group)
        except RuntimeError as error:
            raise ServiceError(
                f"rank 0, which pops for all, was not heard of after {time.monotonic() - began:.0f} s: it has died, or "
                f"the process group's time-out is over ({error})"
            ) from error
        kind, told = box[0]
        if kind == "result":
            return told
        if kind == "error":
            raise told
        log.info("rank 0 has been waiting for the line for %.0f s", time.monotonic() - began)


def _sendable(error: BaseException) -> BaseException:
    """The exception itself where it survives the journey, else its text."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception may refuse in any way: its text is what the others get then
        return ServiceError(f"on rank 0: {type(error).__name__}: {error}")
    return error


def balanced(sizes: Sequence[int], parts: int, *, equal: bool = False) -> list[list[int]]:
    """Indices of `sizes`, dealt out to `parts` so that the sums come out alike; each part in its own order.

    The largest first, each to the part that has least (Graham, "Bounds on Multiprocessing Timing Anomalies", 1969).
    `equal`: each part gets the same number of them; raises ValueError where that does not come out even.
    """
    if parts < 1:
        raise ValueError(f"{parts} parts: at least 1 is wanted")
    if equal and len(sizes) % parts:
        raise ValueError(f"{len(sizes)} do not come out even over {parts} ranks: pop a multiple, or say equal=False")
    most = len(sizes) // parts if equal else len(sizes)
    dealt: list[list[int]] = [[] for _ in range(parts)]
    sums = [0] * parts
    for index in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        open_ = [part for part in range(parts) if len(dealt[part]) < most]
        least = min(open_, key=lambda part: (sums[part], len(dealt[part]), part))
        dealt[least].append(index)
        sums[least] += sizes[index]
    return [sorted(part) for part in dealt]


def shard(groups: Sequence[Group], rank: int, world: int, *, equal: bool = False) -> list[Group]:
    """This rank's groups, whole, so that each rank has about as many tokens; the same on every rank that asks.

    `equal`: each rank gets as many groups; raises ValueError where that does not come out even.
    """
    sizes = [sum(_tokens(rollout.trajectory) for rollout in group.rollouts) for group in groups]
    return [groups[index] for index in balanced(sizes, world, equal=equal)[rank]]


def shard_rows(rows: Sequence[Row], rank: int, world: int, *, equal: bool = False) -> list[Row]:
    """This rank's rows (pipeline.adapters.rows) the same way: a group may be spread over ranks, so compute advantages
    before."""
    return [rows[index] for index in balanced([len(row.sequence) for row in rows], world, equal=equal)[rank]]


def _tokens(trajectory: Any) -> int:
    return 0 if trajectory is None else sum(len(sequence) for sequence in trajectory.sequences)
