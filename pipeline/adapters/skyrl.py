"""SkyRL: rollouts as the `GeneratorOutput` of a GeneratorInterface (skyrl/train/generators/base.py, read at 0.4.0).

`check` holds an output against what SkyRL's trainer asks of it, without SkyRL.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from pipeline.adapters.rows import AdapterError, Many, Row, mean_rewards, places, tokens
from pipeline.results import Rollout

STOPS = {"scored": "stop", "failed": "abort", "cancelled": "abort"}
PER_ROW = (
    "prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs", "trajectory_ids",
    "is_last_step",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class TrajectoryID:
    """As SkyRL's: the prompt's id and which sample of it this is. Give SkyRL's own through `ids`."""

    instance_id: str
    repetition_id: int

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


def generator_output(
    rollouts: Iterable[Rollout], *, filler: int, many: Many = "refuse", ids: SequenceOf[Any] | None = None
) -> dict[str, Any]:
    """The output for rollouts that stand in the order of GeneratorInput.prompts; `ids` are its trajectory_ids.

    many "refuse": a row a rollout, and k > 1 sequences raise AdapterError. "split" is SkyRL's step-wise form
    (generator.step_wise_trajectories): a row a sequence, those of a rollout in succession, `is_last_step` on the last,
    which alone carries the reward; SkyRL gives all of them the advantage of the last.

    A rollout without a reward is a row of `filler` with loss mask 0, stop reason "abort" and its group's mean as
    reward, so that the mean stays what it is. A truncated one keeps its reward, with stop reason "length".
    Raises AdapterError too when `ids` are not as many as the rollouts.
    """
    found = list(rollouts)
    named = [TrajectoryID(item.group, item.sample) for item in found] if ids is None else list(ids)
    if len(named) != len(found):
        raise AdapterError(f"there are {len(found)} rollouts for {len(named)} trajectory ids: they must match in order")
    means = mean_rewards(found)
    output: dict[str, Any] = {name: [] for name in PER_ROW}
    for rollout, id in zip(found, named, strict=True):
        rows = places(rollout, many)
        for at, row in enumerate(rows):
            for name, value in _row(rollout, row, filler, means, last=at == len(rows) - 1).items():
                output[name].append(value)
            output["trajectory_ids"].append(id)
    if many == "refuse":
        output["is_last_step"] = None
    output["rollout_metrics"] = _metrics(found)
    return output


def _row(rollout: Rollout, row: Row | None, filler: int, means: dict[str, float], *, last: bool) -> dict[str, Any]:
    cut = tokens(row, filler)
    reward = means[rollout.group] if rollout.reward is None else float(rollout.reward)
    return {
        "prompt_token_ids": cut.prompt,
        "response_ids": cut.response,
        "rewards": reward if last else 0.0,
        "loss_masks": cut.mask,
        "stop_reasons": "length" if rollout.outcome == "scored" and rollout.truncated else STOPS[rollout.outcome],
        "rollout_logprobs": cut.logprobs,
        "is_last_step": last,
    }


def _metrics(rollouts: list[Rollout]) -> dict[str, float]:
    """Numbers for SkyRL's log: outcomes, and the oldest staleness."""
    counts = {f"line/{outcome}": float(sum(item.outcome == outcome for item in rollouts)) for outcome in STOPS}
    truncated = sum(item.outcome == "scored" and item.truncated is not None for item in rollouts)
    stalest = max((item.staleness for item in rollouts if item.staleness is not None), default=0)
    return counts | {"line/truncated": float(truncated), "line/staleness_max": float(stalest)}


def check(output: dict[str, Any], num_prompts: int, *, step_wise: bool = False) -> None:
    """Raise AdapterError unless SkyRL's validate_generator_output (0.4.0) would let `output` pass.

    An output in which every row is masked passes, as it does there with a warning. Routed experts and images, which
    `generator_output` never fills, are not looked at.
    """
    rows = len(output["response_ids"])
    if rows == 0:
        raise AdapterError("the output has no row")
    if not step_wise and rows != num_prompts:
        raise AdapterError(f"the output has {rows} rows for {num_prompts} prompts")
    for name in PER_ROW:
        if output.get(name) is not None and len(output[name]) != rows:
            raise AdapterError(f"{name} has {len(output[name])} entries for {rows} rows")
    for at in range(rows):
        _check_row(output, at)
    lists = {isinstance(reward, list) for reward in output["rewards"]}
    if len(lists) > 1:
        raise AdapterError("rewards mix numbers and lists: all rows must have the one or the other")
    if step_wise:
        _check_steps(output, rows)


def _check_row(output: dict[str, Any], at: int) -> None:
    size = len(output["response_ids"][at])
    for name in ("loss_masks", "rollout_logprobs", "rewards"):
        values = output[name][at] if output.get(name) else None
        if isinstance(values, list) and len(values) != size:
            raise AdapterError(f"{name} of row {at} has {len(values)} entries for {size} response ids")


def _check_steps(output: dict[str, Any], rows: int) -> None:
    last, ids = output.get("is_last_step"), output.get("trajectory_ids")
    if last is None or ids is None:
        raise AdapterError("a step-wise output needs is_last_step and trajectory_ids")
    names = [id.to_string() if hasattr(id, "to_string") else str(id) for id in ids]
    seen: set[str] = set()
    for at, name in enumerate(names):
        ends = at + 1 == rows or names[at + 1] != name
        if name in seen:
            raise AdapterError(f"row {at}: trajectory {name} goes on after another one; its rows must be adjacent")
        if bool(last[at]) is not ends:
            raise AdapterError(f"row {at} of trajectory {name}: is_last_step is {last[at]}, expected {ends}")
        if ends:
            seen.add(name)
