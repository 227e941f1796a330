"""TRL's `rollout_func`, played by the line: a thin client for GRPOTrainer(rollout_func=...), in the trainer's process.

    with LineRollouts(task_of, weights="/shared/run-7") as rollouts:
        trainer = GRPOTrainer(model=..., reward_funcs=rollout_reward, rollout_func=rollouts, ...)
        trainer.train()

Each call pushes the trainer's weights to the policy servers, enqueues the step's prompts, and waits for the groups. It
was written for TRL 1.16.0, where `prompts` holds each prompt num_generations times, one after another.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from pipeline.adapters.distributed import on_rank_zero
from pipeline.adapters.logprob_gap import Gap, logprob_gap
from pipeline.adapters.rows import AdapterError
from pipeline.adapters.trl import rollout_rows
from pipeline.adapters.trl_trainer import distinct, gathered, model_of, sampling
from pipeline.config import Config
from pipeline.envelope import Task
from pipeline.errors import Incomplete, PolicyError
from pipeline.groups import EVAL_LANE
from pipeline.results import Group, Rollout
from pipeline.sync_client import SyncRolloutClient

log = logging.getLogger(__name__)

TaskOf = Callable[[Any], Task]
"""The task of a prompt, as it stands in the trainer's dataset (text, or messages)."""

LOOK_SECONDS = 0.5
FIRST_WORD, AGAIN = 8.0, 60.0
"""Seconds without a policy server after which that is said, and between two words of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """One call: the rollouts of one optimiser step, or of a part of an evaluation.

    `version`: the weights that were pushed, the trainer's step. `reward`: mean over the scored rollouts. `tokens`:
    how many were sampled. `staleness`: the largest, in updates. `gap`: trainer's against rollouts' logprobs, over the
    tokens that `version` sampled. `push_seconds`: saving and loading the weights; `seconds`: from then on to
    the rows.
    """

    version: int
    training: bool
    reward: float
    scored: int
    failed: int
    tokens: int
    staleness: int
    gap: Gap
    push_seconds: float
    seconds: float


class LineRollouts:
    """`rollout_func` for a GRPOTrainer. Use it as a context manager around `trainer.train()`.

    `task_of`: the task of a prompt; its id is given here. `weights`: a folder of this run's own that every policy
    server can read; the weights of a step lie there until the next step's are in force. `timeout`: seconds for the
    groups of one step, and for the first policy server; None waits for ever (with a warning where nothing can come).
    `compared`: rollouts of each call whose logprobs are recomputed for the gap, None = all, 0 = none. `told` hears of
    each call.

    The rollouts of a step are acked when the next step asks for its own, or when the block ends without an error: the
    optimiser has used them by then. A trainer that dies has them given back; they are thrown away when it starts anew,
    because TRL plays the step's prompts again.

    Of several processes (torchrun, accelerate launch: data parallel, each with the whole model) rank 0 speaks with the
    line for all, and calls `told`; a group may be spread over processes.
    """

    def __init__(
        self,
        task_of: TaskOf,
        *,
        weights: str | os.PathLike[str],
        url: str | None = None,
        config: Config | None = None,
        timeout: float | None = 1800.0,
        lane: str = "train",
        compared: int | None = None,
        told: Callable[[Played], object] | None = None,
    ) -> None:
        self._task_of = task_of
        self._weights = Path(weights).absolute()
        self._timeout = timeout
        self._lane = lane
        self._compared = compared
        self._told = told
        self._name = uuid.uuid4().hex[:8]
        self._calls = 0
        self._version: int | None = None
        self._held: list[Group] = []
        self._client = SyncRolloutClient(url, config=config) if os.environ.get("RANK", "0") == "0" else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._ack()
        finally:
            self.close()

    def close(self) -> None:
        """Give back what the optimiser has not used, and disconnect. Safe twice."""
        if self._client is not None:
            self._client.close()

    def __call__(self, prompts: list[Any], trainer: Any) -> dict[str, list[Any]]:
        """The rows of these prompts, in their order.

        Raises AdapterError (what this trainer needs is not here, or not one rollout was scored), Incomplete after
        `timeout` (each missing rollout with the reason), PolicyError when no server took the weights. Of several
        processes each raises what rank 0 met.
        """
        model = model_of(trainer)
        if trainer.accelerator.num_processes == 1:
            return self._rows(prompts, trainer, model)
        rank = trainer.accelerator.process_index
        by_rank = gathered(prompts)
        everyone = [prompt for part in by_rank for prompt in part]
        rows = on_rank_zero(lambda: self._rows(everyone, trainer, model))
        start = sum(len(part) for part in by_rank[:rank])
        own = slice(start, start + len(prompts))
        return {name: values[own] for name, values in rows.items()}

    def _rows(self, prompts: list[Any], trainer: Any, model: Any) -> dict[str, list[Any]]:
        """The rows of all processes' prompts."""
        training = bool(trainer.model.training)
        samples = trainer.num_generations if training else trainer.num_generations_eval
        questions = distinct(prompts, samples)
        self._ack()
        began = time.monotonic()
        self._push(model, int(trainer.state.global_step))
        pushed = time.monotonic()
        groups = self._play(questions, samples, self._lane if training else EVAL_LANE, sampling(trainer.args))
        rows = rollout_rows(groups, filler=trainer.processing_class.pad_token_id, samples=samples)
        played = self._played(groups, trainer, model, training, pushed - began, time.monotonic() - pushed)
        if self._told is not None:
            self._told(played)
        return rows

    def _ack(self) -> None:
        """The optimiser has used what was handed out last."""
        held, self._held = self._held, []
        if held:
            self._line.ack(held)

    @property
    def _line(self) -> SyncRolloutClient:
        if self._client is None:
            raise RuntimeError("rank 0 alone speaks with the line")
        return self._client

    # -- weights -----------------------------------------------------------------------------------------------------

    def _push(self, model: Any, version: int) -> None:
        """Put these weights into force, where they are not yet."""
        if version == self._version:
            return
        if self._version is None:
            self._await_server()
        folder = self._save(model, version)
        if self._version is None:
            update = self._line.start_run(version, path=folder, max_staleness=0, lane=self._lane)
        else:
            update = self._line.update_weights(version, path=folder)
        self._version = version
        for id, why in update.ejected.items():
            log.warning("policy server %s did not take the weights of step %d: %s", id, version, why)
        for old in self._weights.glob("step-*"):
            if old != folder:
                shutil.rmtree(old, ignore_errors=True)

    def _await_server(self) -> None:
        """The line may come up after the trainer. Raises PolicyError when no server has registered in time."""
        began = time.monotonic()
        due = began + FIRST_WORD
        while not self._line.policy().backends:
            now = time.monotonic()
            if self._timeout is not None and now - began > self._timeout:
                raise PolicyError(
                    f"no policy server has registered within {self._timeout:g} s: start one with `rollout serve`, or "
                    "say where one is with `rollout policy add URL`"
                )
            if now > due:
                due = now + AGAIN
                log.warning("the trainer waits for a policy server: none has registered for %.0f s", now - began)
            time.sleep(LOOK_SECONDS)

    def _save(self, model: Any, version: int) -> Path:
        """A server that comes late may read the folder at any time: it gets its name when it is whole."""
        folder, unfinished = self._weights / f"step-{version}", self._weights / f"unfinished-{version}"
        for left in self._weights.glob("unfinished-*"):  # a trainer was killed while it saved
            shutil.rmtree(left, ignore_errors=True)
        try:
            model.save_pretrained(unfinished)
        except BaseException as error:
            shutil.rmtree(unfinished, ignore_errors=True)  # a full disk is full for others too
            error.add_note(f"the weights of step {version} were being saved to {folder}")
            raise
        shutil.rmtree(folder, ignore_errors=True)
        unfinished.rename(folder)
        return folder

    # -- rollouts ----------------------------------------------------------------------------------------------------

    def _play(self, prompts: Sequence[Any], samples: int, lane: str, usual: dict[str, Any]) -> list[Group]:
        """A whole group for each prompt, in their order. `usual`: sampling, where the task says nothing else."""
        self._calls += 1
        tasks = []
        for at, prompt in enumerate(prompts):
            task = self._task_of(prompt)
            tasks.append(replace(task, id=f"trl-{self._name}-{self._calls}-{at}", sampling={**usual, **task.sampling}))
        if lane == EVAL_LANE:  # by their ids, and acked: others may evaluate in that lane
            groups = [*self._line.evaluate(tasks, samples=samples, timeout=self._timeout, lane=lane).groups]
        else:
            self._line.enqueue(tasks, samples=samples, lane=lane, wait=self._timeout or 0.0)
            wanted = [str(task.id) for task in tasks]
            found = self._pop(wanted, lane)
            groups = self._held = [found[id] for id in wanted]
        _refuse_none_scored(groups)
        return groups

    def _pop(self, wanted: Sequence[str], lane: str) -> dict[str, Group]:
        """These groups, leased; whatever else the lane holds is of a trainer that died, and is thrown away."""
        found: dict[str, Group] = {}
        until = None if self._timeout is None else time.monotonic() + self._timeout
        while missing := [id for id in wanted if id not in found]:
            left = None if until is None else max(0.0, until - time.monotonic())
            try:
                popped = self._line.pop_groups(len(missing), timeout=left, lane=lane)
            except Incomplete as error:
                error.add_note(f"{len(missing)} of this step's {len(wanted)} groups are not there; what came goes back")
                raise
            strange = [group for group in popped if group.id not in missing]
            found |= {group.id: group for group in popped if group.id in missing}
            if strange:
                names = ", ".join(group.id for group in strange[:3])
                log.warning("%d groups that this run did not ask for are thrown away: %s", len(strange), names)
                self._line.ack(strange, drop=True)
        return found

    def _played(
        self, groups: Sequence[Group], trainer: Any, model: Any, training: bool, push_seconds: float, seconds: float
    ) -> Played:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
        version = int(self._version or 0)
        return Played(
            version=version, training=training, reward=sum(rewards) / len(rewards), scored=len(rewards),
            failed=len(rollouts) - len(rewards), tokens=sum(rollout.sampled for rollout in rollouts),
            staleness=max(rollout.staleness or 0 for rollout in rollouts),
            gap=logprob_gap(
                model, rollouts[: self._compared], version, temperature=float(trainer.args.temperature)
            ),
            push_seconds=push_seconds, seconds=seconds,
        )  # fmt: skip


def _refuse_none_scored(groups: Sequence[Group]) -> None:
    """Raise AdapterError when there is nothing to train on at all: the line is broken, not the policy."""
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    if any(rollout.outcome == "scored" for rollout in rollouts):
        return
    (why, count), *_ = Counter(map(_why, rollouts)).most_common(1)
    raise AdapterError(f"not one of the step's {len(rollouts)} rollouts was scored; {count} of them: {why}")


def _why(rollout: Rollout) -> str:
    failure = rollout.failure
    return f"{failure.kind} in {failure.stage}: {failure.why}" if failure else rollout.outcome
