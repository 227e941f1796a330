"""An agent loop for verl that plays each session through the line. Only verl's own processes import this module.

In the file that `actor_rollout_ref.rollout.agent.agent_loop_config_path` names:

    - name: rollout_line
      _target_: pipeline.adapters.verl_loop.RolloutLineAgentLoop
      settings: /shared/run-7/config.yaml     # of the line; ROLLOUT_* variables hold too
      lane: train
      timeout: 3600                           # seconds for one rollout

and `rollout.agent.default_agent_loop=rollout_line`, or a column `agent_name` in the dataset. docs/trainers.md says what
becomes of failed, truncated and k > 1 rollouts. Read and run at verl 0.9.1 (verl/experimental/agent_loop/agent_loop.py,
verl/trainer/ppo/v1/agent_loop_tq.py).
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from pipeline.adapters.rows import AdapterError, tokens, usable, why_unusable
from pipeline.adapters.sessions import Session, Sessions
from pipeline.adapters.verl import agent_loop_output
from pipeline.adapters.verl_rows import sampling_of, task_of
from pipeline.client import RolloutClient
from pipeline.config import Config, DatasetConfig, load
from pipeline.datasets import mapping_of

log = logging.getLogger(__name__)


class RolloutLineAgentLoop(AgentLoopBase):  # type: ignore[misc]  # verl has no types
    """One session of verl is one rollout of the line; the sessions of a prompt are one group.

    `settings`: the line's configuration file, as `rollout --config` takes it; `url`: of its Redis, where it is not in
    there. `lane`: where the rollouts go; nothing else may pop there. `timeout`: seconds for one rollout. `handler`,
    `dataset`: how a row of verl's dataset becomes a task, where its columns don't say it (docs/datasets.md). `parts`:
    named parts of the reward that verl's metrics show.
    """

    def __init__(
        self,
        *args: Any,
        settings: str | None = None,
        url: str | None = None,
        lane: str = "train",
        timeout: float | None = 3600.0,
        handler: str | None = None,
        dataset: str | None = None,
        parts: Sequence[str] = (),
        **verls: Any,
    ) -> None:
        super().__init__(*args, **verls)
        self._settings, self._url, self._lane, self._timeout = settings, url, lane, timeout
        self._handler, self._dataset, self._parts = handler, dataset, tuple(map(str, parts))

    async def run(self, sampling_params: dict[str, Any], **row: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Play one session. For verl's V1 trainer a list: one output a sequence, none where it can't be trained on.

        Raises AdapterError where not one session of the prompt can be trained on (V1), for k > 1 sequences (V0), and
        for a prompt longer than verl's limit; Incomplete after `timeout`, which says where the rollout is; TaskError
        for a row that is no task.
        """
        line = await _line_of(self._settings, self._url, self._lane, self._timeout)
        task = task_of(row, handler=self._handler, dataset=_mapping(line.config, self._dataset))
        task = replace(task, sampling={**sampling_of(sampling_params), **task.sampling})
        session = await line.sessions.play(str(row.get("uid") or uuid.uuid4().hex), task)
        try:
            if "session_id" in row:
                return await self._outputs(session)
            return await self._output(session)
        finally:
            await line.sessions.done(session.rollout)

    async def _outputs(self, session: Session) -> list[AgentLoopOutput]:
        """For V1, which counts the sessions that are there: a failed one is left out, as long as there is another."""
        rollout = session.rollout
        if not usable(rollout) and await session.scored():
            log.warning("rollout %s is left out of its group: %s", rollout.id, why_unusable(rollout))
            return []
        return self._made(session)

    async def _output(self, session: Session) -> AgentLoopOutput:
        """For V0, which wants one row a session: in a failed one's place a row of mask 0 with its group's mean."""
        if not usable(session.rollout):
            return await self._stand_in(session)
        made = self._made(session)
        if len(made) > 1:
            raise AdapterError(
                f"rollout {session.rollout.id} has {len(made)} sequences, and verl's older trainer takes one: say "
                "trainer.use_v1=True, or use a chat format that goes on behind what was sampled"
            )
        return made[0]

    def _made(self, session: Session) -> list[AgentLoopOutput]:
        """Raises AdapterError where it can't be trained on."""
        rollout, limits = session.rollout, self.rollout_config
        made = agent_loop_output(
            rollout, prompt_length=limits.prompt_length, response_length=limits.response_length, parts=self._parts
        )
        for fields in made:
            fields["extra_fields"]["reward_extra_info"]["failed"] = 0.0
        return [AgentLoopOutput(**fields) for fields in made]

    async def _stand_in(self, session: Session) -> AgentLoopOutput:
        """The mean of the group's scored members: its advantage is 0 and the group's mean stays what it is."""
        others = await session.scored()
        mean = sum(item.reward for item in others) / len(others) if others else 0.0
        pad = self.tokenizer.pad_token_id
        empty = tokens(None, int(pad if pad is not None else self.tokenizer.eos_token_id or 0))
        log.warning("rollout %s is not trained on: %s", session.rollout.id, why_unusable(session.rollout))
        return AgentLoopOutput(
            prompt_ids=empty.prompt,
            response_ids=empty.response,
            response_mask=empty.mask,
            response_logprobs=empty.logprobs,
            reward_score=mean,
            num_turns=0,
            metrics={},
            extra_fields={
                "min_global_steps": min((item.versions[0] for item in others), default=0),
                "max_global_steps": max((item.versions[1] for item in others), default=0),
                "rollout_id": session.rollout.id,
                "reward_extra_info": {
                    "score": mean, "truncated": 0.0, **dict.fromkeys(self._parts, float("nan")), "failed": 1.0,
                },
            },
        )  # fmt: skip


def _mapping(config: Config, name: str | None) -> DatasetConfig | None:
    return mapping_of(config, name) if name else None


class _Line:
    """This process's client, for all sessions of one kind."""

    def __init__(self, config: Config, lane: str, timeout: float | None) -> None:
        self.config = config
        self.client = RolloutClient(config=config)
        self.sessions = Sessions(self.client, lane, timeout)
        self.opened = asyncio.create_task(self.client.open(), name="open-rollout-line")

    async def close(self) -> None:
        await self.sessions.close()
        await self.client.close()


_lines: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[Any, ...], _Line]] = WeakKeyDictionary()
"""verl makes an agent loop for every session; the client is the process's, and lives as long as its event loop."""


async def _line_of(settings: str | None, url: str | None, lane: str, timeout: float | None) -> _Line:
    lines = _lines.setdefault(asyncio.get_running_loop(), {})
    key = (settings, url, lane, timeout)
    if key not in lines:
        config = load(Path(settings) if settings else None)
        if url:
            config = config.changed({"redis.url": url, "redis.address_file": ""})
        lines[key] = _Line(config, lane, timeout)
    line = lines[key]
    try:
        await asyncio.shield(line.opened)
    except Exception:
        if lines.get(key) is line:  # the next session tries again
            del lines[key]
            await line.client.close()
        raise
    return line


async def close() -> None:
    """Close this loop's clients. verl ends its processes without a word, and their leases run out; tests call this."""
    for line in _lines.pop(asyncio.get_running_loop(), {}).values():
        await line.close()
