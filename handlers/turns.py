"""The usual agent loop on tokens: the policy speaks, its tool calls run in the sandbox, and it reads what came of them.

A family derives from `Turns` and writes `prompt` and `eval`; one that acts in a sandbox sets `tools = ("bash",)` and
`sandbox = {}`. Sampled ids are never tokenised again: each turn's ids are the ones before plus what is new.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from handlers.tools import TOOLS, answer
from pipeline.errors import ContextFull, PolicyError
from pipeline.interfaces import AgentHandler, Completion, Context, Message, Parsed, Policy, ToolCall

MOST_ABORTS = 100
"""A reply that was aborted (the weights changed) is gone on with; this often in one turn is a fault of the server."""


class Turns(AgentHandler):
    """Plays a conversation until the policy calls no tool, its turns are over, or its window is full."""

    tools: ClassVar[tuple[str, ...]] = ()
    """Names out of `handlers.tools.TOOLS`: bash, ipython, read_file, write_file, edit_file."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        unknown = sorted(set(cls.tools) - TOOLS.keys())
        if unknown:
            raise TypeError(f"{cls.__name__}.tools names {unknown[0]!r}; there are: {', '.join(TOOLS)}")
        if cls.tools and cls.sandbox is None:
            raise TypeError(f"{cls.__name__} has tools but no sandbox to use them in: set `sandbox = {{}}`")

    def prompt(self, task: Any) -> str | list[Message]:
        """What the policy is asked: one user message's text, or whole messages."""
        raise TypeError(f"{type(self).__name__} defines no `prompt`: return the text for the policy, or messages")

    def messages(self, ctx: Context) -> list[Message]:
        """The conversation's beginning. Override it where the prompt needs more than the task."""
        return as_messages(self.prompt(ctx.task))

    def question(self, task: Any) -> str:
        """The last user message's text: what a scripted policy knows the task by."""
        asked = [item for item in as_messages(self.prompt(task)) if item.get("role") == "user"]
        return asked[-1].get("content", "").strip() if asked else ""

    async def run(self, ctx: Context) -> None:
        talk = Talk(ctx, self.messages(ctx), [TOOLS[name] for name in self.tools])
        if not talk.open():
            return
        for turn in range(1, ctx.max_turns + 1):
            said = await talk.act()
            if said is None:
                return
            ctx.state["answer"] = said.message.get("content", "")
            if not said.calls:
                return
            results = [await self.use(ctx, call) for call in said.calls]
            if turn == ctx.max_turns:
                ctx.trajectory.truncated = "turns"
            elif not talk.hear(results):
                return

    async def use(self, ctx: Context, call: ToolCall) -> Message:
        """Run one tool call; whatever is wrong with it is said to the policy."""
        text = await answer(ctx.sandbox, call, self.tools)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}


class Talk:
    """One conversation as it grows: messages beside the trajectory's tokens."""

    def __init__(self, ctx: Context, messages: list[Message], tools: Sequence[dict[str, Any]]) -> None:
        self._ctx, self._messages, self._tools = ctx, messages, tools
        self._policy: Policy = ctx.policy
        self._before = 0
        self._reason = ""

    def open(self) -> bool:
        """Put the prompt into the trajectory; False when it does not leave room for a single token."""
        return self._put("prompt", self._policy.render(self._messages, self._tools))

    def _put(self, kind: str, ids: Sequence[int]) -> bool:
        trajectory = self._ctx.trajectory
        if len(trajectory.ids) + len(ids) >= self._policy.context:
            trajectory.truncated = "context"
            return False
        if kind == "prompt":
            trajectory.prompt(ids)
        else:
            trajectory.observation(ids)
        return True

    async def act(self) -> Parsed | None:
        """Let the policy speak. None when its window held no token any more."""
        ctx, trajectory = self._ctx, self._ctx.trajectory
        self._before = len(trajectory.ids)
        try:
            self._reason = await self._sample()
        except ContextFull:
            trajectory.truncated = "context"
            if len(trajectory.ids) == self._before:
                return None
            self._reason = "length"
        said = self._policy.parse(trajectory.ids[self._before :], trajectory.ids[: self._before], self._tools)
        self._messages.append(said.message)
        if self._reason == "length" and not said.calls:
            trajectory.truncated = "context" if len(trajectory.ids) >= self._policy.context else "length"
        ctx.log.debug("turn %d: %d tokens, %s", trajectory.actions, len(trajectory.ids) - self._before, self._reason)
        return said

    async def _sample(self) -> str:
        """Sample one action, going on with what an aborted call had sampled already; the last finish reason."""
        trajectory, sampling = self._ctx.trajectory, self._ctx.sampling
        for _ in range(MOST_ABORTS):
            done = await self._policy.generate(trajectory.ids, sampling)
            if done.ids:
                _add(self._ctx, done)
            if done.finish_reason != "abort":
                return done.finish_reason
            left = done.sampling.get("max_tokens", math.inf) - len(done.ids)
            if left < 1:
                return "length"
            sampling = {**sampling, **({"max_tokens": left} if left < math.inf else {})}
        raise PolicyError(f"the policy's server aborted one reply {MOST_ABORTS} times")

    def hear(self, results: list[Message]) -> bool:
        """Add the tools' messages and hand the turn back; False when the window is full."""
        trajectory = self._ctx.trajectory
        self._messages.extend(results)
        old = trajectory.ids.tolist()
        new = self._policy.bridge(old[: self._before], old[self._before :], results, self._tools)
        if new is not None and new[: len(old)] == old:
            return self._put("observation", new[len(old) :])
        anew = self._policy.render(self._messages, self._tools)
        if len(anew) >= self._policy.context:
            trajectory.truncated = "context"
            return False
        trajectory.begin()
        return self._put("prompt", anew)


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """A prompt as messages; text alone is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def _add(ctx: Context, done: Completion) -> None:
    ctx.trajectory.action(
        done.ids,
        done.logprobs,
        done.versions,
        finish_reason=done.finish_reason,
        started=done.started,
        seconds=done.seconds,
        sampling=done.sampling,
    )
