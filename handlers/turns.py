"""The usual agent loop on tokens: the policy speaks, its tool calls run in the sandbox, and it reads what came of them.

A family derives from `Turns` and writes `prompt` and `eval`; one that acts in a sandbox sets `tools = ("bash",)` and
`sandbox = {}`. A method marked with `handlers.tools.tool` is a tool too. Sampled ids are never tokenised again: each
turn's ids are the ones before plus what is new. Only where the format can't go on so, or the conversation is compacted,
a new sequence begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from handlers.tools import TOOLS, Over, answer, answer_own
from pipeline.errors import ContextFull, PolicyError
from pipeline.interfaces import AgentHandler, Completion, Context, Message, Parsed, Policy, ToolCall

MOST_ABORTS = 100
"""A reply that was aborted (the weights changed) is gone on with; this often in one turn is a fault of the server."""

KEPT_TURNS = (4, 2, 1, 0)
"""Newest turns that a compaction leaves whole: as many as leave the prompt below half of what starts one."""


class Turns(AgentHandler):
    """Plays a conversation until the policy calls no tool, its turns are over, or its window is full."""

    tools: ClassVar[tuple[str, ...]] = ()
    """Names out of `handlers.tools.TOOLS` (bash, ipython, read_file, write_file, edit_file), and of methods that are
    marked with `handlers.tools.tool`."""

    compact_at: ClassVar[float | None] = None
    """Share of the window at which `compact` shortens the conversation and a new sequence begins; None = never."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        own = [name for name in dir(cls) if hasattr(getattr(cls, name), "wanted") and name not in TOOLS]
        unknown = sorted(set(cls.tools) - TOOLS.keys() - set(own))
        if unknown:
            raise TypeError(f"{cls.__name__}.tools names {unknown[0]!r}; there are: {', '.join([*TOOLS, *own])}")
        if set(cls.tools) & TOOLS.keys() and (cls.sandbox is None or cls.eval_sandbox == "only"):
            raise TypeError(f"{cls.__name__} has tools but no sandbox to use them in: set `sandbox = {{}}`")
        if cls.compact_at is not None and not 0 < cls.compact_at <= 1:
            raise TypeError(f"{cls.__name__}.compact_at is {cls.compact_at!r}: a share of the window, above 0, up to 1")

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
        await ctx.policy.ready()
        talk = Talk(ctx, self.messages(ctx), self._offered(), self.compact_at)
        if not talk.open():
            return
        for turn in range(1, ctx.max_turns + 1):
            said = await talk.act()
            if said is None:
                return
            ctx.state["answer"] = said.message.get("content", "")
            if not said.calls:
                return
            results: list[Message] = []
            for call in said.calls:
                results.append(await self.use(ctx, call))
                if isinstance(results[-1]["content"], Over):
                    return
            if turn == ctx.max_turns:
                ctx.trajectory.truncated = "turns"
            elif not talk.hear(results) and not await self._compacted(ctx, talk):
                return

    async def use(self, ctx: Context, call: ToolCall) -> Message:
        """Run one tool call; whatever is wrong with it is said to the policy."""
        if call.name in self.tools and call.name not in TOOLS:
            text = await answer_own(getattr(self, call.name), ctx, call)
        else:
            text = await answer(ctx.sandbox, call, self.tools)
        return {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text}

    async def compact(self, ctx: Context, messages: list[Message]) -> list[Message]:
        """A shorter conversation that says the same; it is rendered as the prompt of a new sequence.

        This one keeps every message, but of all turns except the newest it replaces what the tools said by a note of
        its length, and drops the reasoning. If the result is not shorter than `compact_at` of the window, the rollout
        ends there, truncated.
        """
        enough = ctx.policy.context * (self.compact_at or 1) / 2
        shorter = messages
        for kept in KEPT_TURNS:
            shorter = shortened(messages, kept)
            if len(ctx.policy.render(shorter, self._offered())) <= enough:
                break
        return shorter

    async def _compacted(self, ctx: Context, talk: Talk) -> bool:
        return self.compact_at is not None and talk.open(await self.compact(ctx, list(talk.messages)))

    def _offered(self) -> list[dict[str, Any]]:
        return [TOOLS[name] if name in TOOLS else getattr(self, name).schema for name in self.tools]


class Talk:
    """One conversation as it grows: messages beside the trajectory's tokens.

    `compact_at`: share of the window that it may fill before it has to be opened again with fewer messages.
    """

    def __init__(
        self,
        ctx: Context,
        messages: list[Message],
        tools: Sequence[dict[str, Any]],
        compact_at: float | None = None,
    ) -> None:
        self.messages = list(messages)
        self._compacts = compact_at is not None
        self._ctx, self._tools = ctx, tools
        self._policy: Policy = ctx.policy
        self._room = int(self._policy.context * (compact_at or 1))
        self._before = 0
        self._reason = ""

    def open(self, compacted: list[Message] | None = None) -> bool:
        """Put the prompt into the trajectory, the `compacted` one into a new sequence.

        False, and the trajectory is truncated, when it leaves no room: for a single token, or for a compacted one below
        the size that would have it compacted again.
        """
        self.messages = self.messages if compacted is None else compacted
        ids = self._policy.render(self.messages, self._tools)
        if len(ids) >= (self._policy.context if compacted is None else self._room):
            self._ctx.trajectory.truncated = "context"
            return False
        self._ctx.trajectory.begin()
        self._ctx.trajectory.prompt(ids)
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
        self.messages.append(said.message)
        if self._reason == "length" and not said.calls:
            trajectory.truncated = "context" if len(trajectory.ids) >= self._policy.context else "length"
        ctx.log.debug("turn %d: %d tokens, %s", trajectory.actions, len(trajectory.ids) - self._before, self._reason)
        return said

    async def _sample(self) -> str:
        """Sample one action, going on with what an aborted call had sampled already; the last finish reason."""
        trajectory, sampling = self._ctx.trajectory, self._ctx.sampling
        for _ in range(MOST_ABORTS):
            done = await self._policy.generate(trajectory.ids, sampling)
            if done.prompt_ids is not None:
                trajectory.reread(done.prompt_ids, **_told(done))
                self._before = len(trajectory.ids)
            if done.ids:
                _add(self._ctx, done)
            if done.finish_reason != "abort":
                return done.finish_reason
            left = done.sampling.get("max_tokens", math.inf) - len(done.ids)
            if left < 1:
                return "length"
            sampling = {**sampling, **({"max_tokens": left} if left < math.inf else {})}
            if "min_tokens" in sampling:
                sampling["min_tokens"] = max(0, sampling["min_tokens"] - len(done.ids))
            if isinstance(sampling.get("seed"), int):
                sampling["seed"] += 1  # the same one would draw the rest by the numbers that drew the beginning
        raise PolicyError(f"the policy's server aborted one reply {MOST_ABORTS} times")

    def hear(self, results: list[Message]) -> bool:
        """Add the tools' messages and hand the turn back. False when there is no room for them.

        The trajectory is truncated then, unless the conversation may be compacted.
        """
        trajectory, before = self._ctx.trajectory, list(self.messages)
        self.messages.extend(results)
        old = trajectory.ids.tolist()
        new = self._policy.bridge(old[: self._before], old[self._before :], results, self._tools, before)
        goes_on = new is not None and new[: len(old)] == old
        ids = new if new is not None and goes_on else self._policy.render(self.messages, self._tools)
        if len(ids) >= self._room:
            trajectory.truncated = None if self._compacts else "context"
            return False
        if goes_on:
            trajectory.observation(ids[len(old) :])
        else:
            trajectory.begin()
            trajectory.prompt(ids)
        return True


def as_messages(prompt: str | list[Message]) -> list[Message]:
    """A prompt as messages; text alone is the user's."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)


def shortened(messages: list[Message], kept: int) -> list[Message]:
    """Copies; in all turns but the newest `kept`, notes stand for what the tools said, and no reasoning."""
    turns = [at for at, message in enumerate(messages) if message.get("role") == "assistant"]
    newest = turns[-kept:] if kept else []
    border = newest[0] if newest else len(messages)
    return [*map(_noted, messages[:border]), *messages[border:]]


def _noted(message: Message) -> Message:
    if message.get("role") == "tool":
        text = message.get("content", "")
        note = f"[{len(text)} characters were here; they were left out to save room]"
        return {**message, "content": min(text, note, key=len)}
    if message.get("role") == "assistant" and "reasoning_content" in message:
        return {**message, "reasoning_content": ""}
    return message


def _add(ctx: Context, done: Completion) -> None:
    ctx.trajectory.action(
        done.ids,
        done.logprobs,
        done.versions,
        finish_reason=done.finish_reason,
        started=done.started,
        seconds=done.seconds,
        sampling=done.sampling,
        **_told(done),
    )


def _told(done: Completion) -> dict[str, Any]:
    """What a turn says of the server's endpoint, where that is not the usual one."""
    return {"extra": {"endpoint": done.endpoint}} if done.endpoint else {}
