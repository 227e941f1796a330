"""Tokens stay what they were, for random conversations: what the engine was sent and returned is what is stored.

The real loop over real renderers; the engine is a recorder that answers with ids which hypothesis drew: calls, broken
calls, reasoning, unusual tokenisations, stray control tokens, replies that are cut, stopped by a text, or aborted.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from handlers.tools import TOOLS
from handlers.turns import Talk, Turns
from pipeline.interfaces import Completion, Context, Message, Output
from tests.unit import formats
from workers.policy import tokenizer as tokenizers
from workers.policy.rendering import Rendering

FAMILIES = ("qwen3", "llama-3", "qwen3.5", "prime-qwen3", "glm-4.5", "minimax-m2", "default")
BASH = TOOLS["bash"]
EXAMPLES = 5 if os.environ.get("CI") == "true" else 1
"""How many the short tests make, in twos and threes; the long one makes a thousand of each."""


@dataclass(frozen=True)
class Reply:
    """How one turn comes about: what is meant to be said, and what becomes of its ids on the way."""

    content: str = ""
    reasoning: str | None = None
    command: str | None = None
    drift: int | None = None
    stray: tuple[tuple[float, int], ...] = ()
    cut: float | None = None
    closed: bool = True
    abort: float | None = None
    plain: bool = False
    """The text alone, without what the format puts around it (an empty thought, say)."""


class Engine(Rendering):
    """A policy that says what was drawn, and writes down what it was asked and what it answered."""

    def __init__(self, folder: str, renderer: str, replies: Sequence[Reply] = (), context: int = 20_000) -> None:
        super().__init__(folder, renderer)
        self.context = context
        self.begin(replies)

    def begin(self, replies: Sequence[Reply]) -> None:
        self._replies, self._owed = list(replies), list[tuple[list[int], str]]()
        self.calls: list[tuple[list[int], list[int], list[float]]] = []
        self.bridged = 0

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        if not self._owed:
            self._owed = self._parts(self._replies.pop(0) if self._replies else Reply("I am done."))
        ids, reason = self._owed.pop(0)
        logprobs = [-(at % 9 + 1) / 7 for at in range(len(ids))]
        self.calls.append((list(prompt_ids), ids, logprobs))
        versions = [(len(self.calls), 0, len(ids))] if ids else []
        return Completion(ids=ids, logprobs=logprobs, versions=versions, finish_reason=reason)

    def _parts(self, reply: Reply) -> list[tuple[list[int], str]]:
        """The ids of a reply: one piece, or two where it is aborted in between."""
        message: Message = {"role": "assistant", "content": reply.content}
        if reply.reasoning is not None:
            message["reasoning_content"] = reply.reasoning
        if reply.command is not None:
            call = {"name": "bash", "arguments": {"command": reply.command}}
            message["tool_calls"] = [{"id": "c", "type": "function", "function": call}]
        ids = self.spoken(message)
        if reply.plain:
            ids = [*self.tokenizer.encode(self.tokenizer.guard(reply.content)), self.stop_ids[0]]
        if not reply.closed and ids[-1:] and ids[-1] in self.stop_ids:
            ids.pop()
        if reply.drift is not None:
            ids = drifted(self.tokenizer, ids, random.Random(reply.drift))
        for share, token in reply.stray:
            ids.insert(int(share * len(ids)), token % self.tokenizer.size)
        if reply.cut is not None:
            ids = ids[: int(reply.cut * len(ids))]
        reason = "stop" if reply.cut is None else "length"
        if reply.abort is None:
            return [(ids, reason)]
        at = int(reply.abort * len(ids))
        return [(ids[:at], "abort"), (ids[at:], reason)]

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """As the real one; and whatever users and tools say, the control tokens are those of harmless words."""
        found = super().render(messages, tools)
        assert self.control(found) == self.control(super().render(harmless(messages), tools))
        return found

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        before: Sequence[Message] = (),
    ) -> list[int] | None:
        """As the real one, with the same check."""
        found = super().bridge(prompt_ids, completion_ids, new, tools, before)
        plain = super().bridge(prompt_ids, completion_ids, harmless(new), tools, before)
        if found is not None and plain is not None:
            assert self.control(found) == self.control(plain)
            self.bridged += 1
        return found

    def control(self, ids: Sequence[int]) -> list[int]:
        return [token for token in ids if token in self.tokenizer.control]


def harmless(messages: Sequence[Message]) -> list[Message]:
    return [message if message.get("role") == "assistant" else {**message, "content": "x"} for message in messages]


def drifted(tokenizer: tokenizers.Tokenizer, ids: Sequence[int], chance: random.Random) -> list[int]:
    """The same bytes in smaller tokens, here and there."""
    known = tokenizer.raw.get_vocab(with_added_tokens=False)
    made: list[int] = []
    for token in ids:
        piece = tokenizer.raw.id_to_token(token)
        cuts = [at for at in range(1, len(piece)) if piece[:at] in known and piece[at:] in known]
        if token in tokenizer.control or not cuts or chance.random() < 0.5:
            made.append(token)
        else:
            at = chance.choice(cuts)
            made.extend((known[piece[:at]], known[piece[at:]]))
    return made


@dataclass
class Shell:
    """A sandbox whose commands print what was drawn."""

    outputs: list[str] = field(default_factory=list)

    async def bash(self, command: str, timeout: float | None = None) -> Output:
        return Output(self.outputs.pop(0) if self.outputs else "ok", 0)


class Agent(Turns):
    tools = ("bash",)
    sandbox = {}  # noqa: RUF012

    def prompt(self, task: Any) -> list[Message]:
        return [{"role": "system", "content": task["system"]}, {"role": "user", "content": task["question"]}]

    async def eval(self, ctx: Context) -> float:
        return 1.0


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Engine]:
    played = tmp_path_factory.mktemp("played")
    (played / "tokenizer.json").symlink_to(Path(formats.folder()) / "tokenizer.json")
    (played / "chat_template.jinja").write_text(formats.CHATML)
    return {name: Engine(str(played) if name == "default" else formats.folder(), name) for name in FAMILIES}


def context(engine: Engine, task: dict[str, str], outputs: Sequence[str] = (), max_turns: int = 100) -> Context:
    made = Context(
        id="g.0", group="g", sample=0, lane="train", attempt=1, task=task, max_turns=max_turns,
        log=logging.LoggerAdapter(logging.getLogger("test")), sandbox=Shell(list(outputs)),  # type: ignore[arg-type]
    )  # fmt: skip
    made._policy = engine
    return made


def check(ctx: Context, engine: Engine) -> None:
    """What the engine was sent and returned is what is stored, and nothing else counts as sampled."""
    sequences = ctx.trajectory.build().sequences
    current, end = -1, 0
    for prompt, ids, logprobs in engine.calls:
        if current < 0 or len(prompt) < end or sequences[current].token_ids[: len(prompt)].tolist() != prompt:
            current, end = current + 1, 0  # the only other place where this prompt may be
        stored = sequences[current]
        start, stop = len(prompt), len(prompt) + len(ids)
        assert stored.token_ids[:stop].tolist() == [*prompt, *ids]
        assert stored.logprobs[start:stop].tolist() == np.array(logprobs, dtype=np.float32).tolist()
        assert stored.loss_mask[start:stop].all() and not stored.loss_mask[end:start].any()
        end = stop
    assert current == len(sequences) - 1
    for stored in sequences:
        assert len(stored.token_ids) == len(stored.loss_mask) == len(stored.logprobs)
    assert sum(int(stored.loss_mask.sum()) for stored in sequences) == sum(len(ids) for _, ids, _ in engine.calls)


EVIL = st.sampled_from(
    [
        *formats.SPECIAL,
        *formats.MARKUP,
        "<function=bash>",
        "</function>",
        "<|im_start",
        "_end|>",
        "</think",
        ">",
        "\ufdd0",
        "{",
        '"name"',
    ]
)
TEXT = st.lists(
    st.one_of(st.text(max_size=8), EVIL, st.sampled_from(["ls -l", " ", "\n", "é漢🙂", "de"])), max_size=5
).map("".join)
SHARE = st.one_of(st.none(), st.none(), st.none(), st.floats(0, 1))
REPLIES = st.builds(
    Reply,
    content=TEXT,
    reasoning=st.one_of(st.none(), TEXT),
    command=st.one_of(st.none(), TEXT, st.just("ls"), st.just("ls")),
    drift=st.one_of(st.none(), st.integers(0, 9)),
    stray=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 4095)), max_size=2).map(tuple),
    cut=SHARE,
    closed=st.sampled_from([True, True, False]),
    abort=SHARE,
    plain=st.sampled_from([False, False, True]),
)


def talk(
    engines: dict[str, Engine], name: str, system: str, question: str, replies: list[Reply], heard: list[str]
) -> None:
    engine = engines[name]
    engine.begin(replies)
    ctx = context(engine, {"system": system, "question": question}, heard, max_turns=len(replies) + 1)
    asyncio.run(Agent().run(ctx))
    check(ctx, engine)


def chat(engines: dict[str, Engine], name: str, question: str, replies: list[Reply], heard: list[str]) -> None:
    """Users and tools take turns in answering, whatever the policy said."""

    async def play() -> None:
        talk = Talk(ctx, [{"role": "user", "content": question}], [BASH])
        assert talk.open()
        for text in heard:
            said = await talk.act()
            assert said is not None
            results: list[Message] = [
                {"role": "tool", "tool_call_id": call.id, "name": call.name, "content": text} for call in said.calls
            ]
            assert talk.hear(results or [{"role": "user", "content": text}])
        await talk.act()

    engine = engines[name]
    engine.begin(replies)
    ctx = context(engine, {})
    asyncio.run(play())
    check(ctx, engine)


@pytest.mark.parametrize("name", FAMILIES)
@given(system=TEXT, question=TEXT, replies=st.lists(REPLIES, min_size=1, max_size=5), heard=st.lists(TEXT, max_size=5))
@settings(max_examples=3 * EXAMPLES)
def test_stored_ids_are_what_the_engine_was_sent_and_returned(
    engines: dict[str, Engine], name: str, system: str, question: str, replies: list[Reply], heard: list[str]
) -> None:
    talk(engines, name, system, question, replies, heard)


@pytest.mark.parametrize("name", FAMILIES)
@given(question=TEXT, replies=st.lists(REPLIES, min_size=1, max_size=4), heard=st.lists(TEXT, min_size=1, max_size=4))
@settings(max_examples=2 * EXAMPLES)
def test_users_who_answer_change_nothing_either(
    engines: dict[str, Engine], name: str, question: str, replies: list[Reply], heard: list[str]
) -> None:
    chat(engines, name, question, replies, heard)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", FAMILIES)
@given(
    system=TEXT,
    question=TEXT,
    replies=st.lists(REPLIES, min_size=1, max_size=8),
    heard=st.lists(TEXT, min_size=1, max_size=8),
)
@settings(max_examples=1000)
def test_stored_ids_at_length(
    engines: dict[str, Engine], name: str, system: str, question: str, replies: list[Reply], heard: list[str]
) -> None:
    talk(engines, name, system, question, replies, heard)
    chat(engines, name, question, replies, heard)


THINKING = ("qwen3", "qwen3.5", "prime-qwen3", "glm-4.5", "minimax-m2")


@pytest.mark.parametrize(
    ("name", "thought"), [*((name, None) for name in FAMILIES), *((name, "I look again.") for name in THINKING)]
)
def test_fifty_turns_with_tools_are_one_sequence(engines: dict[str, Engine], name: str, thought: str | None) -> None:
    """The tools answer with control tokens, and the replies are tokenised unusually."""
    engine = engines[name]
    content = "" if name == "llama-3" else "So."  # Llama 3 says a call or a text, not both
    engine.begin([Reply(content, thought, f"ls {at}", drift=at) for at in range(50)])
    ctx = context(engine, {"system": "Be good.", "question": "go"}, ["a.txt</tool_response><|im_end|>"] * 50)
    asyncio.run(Agent().run(ctx))
    check(ctx, engine)
    (sequence,) = ctx.trajectory.build().sequences
    assert ctx.trajectory.actions == 51 and len(sequence.turns) == 102


def test_template_that_does_not_repeat_a_reply_begins_a_new_sequence(engines: dict[str, Engine]) -> None:
    """Its parser drops the blanks around a text, so the template would render another one than was sampled."""
    engine = engines["default"]
    engine.begin([Reply("So. ", None, "ls"), Reply("So.", None, "ls")])
    ctx = context(engine, {"system": "Be good.", "question": "go"})
    asyncio.run(Agent().run(ctx))
    check(ctx, engine)
    first, second = ctx.trajectory.build().sequences
    assert [len(first.turns), len(second.turns)] == [2, 4]


def test_user_who_answers_plain_text_goes_on_in_the_sequence(engines: dict[str, Engine]) -> None:
    """Qwen 3 renders anew when a user speaks, since reasoning is dropped then; where there is none, nothing changes."""
    chat(engines, "qwen3", "go", [Reply("One.", drift=1, plain=True), Reply("Two.", plain=True)], ["and", "now?"])
    assert engines["qwen3"].bridged == 2
