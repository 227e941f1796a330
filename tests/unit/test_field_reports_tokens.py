"""Field reports H01 to H05: what others lost or falsified between the engine's ids and the trainer's.

H01 to H03 and H05 use the reports' own toy tokenizer and their fake model server: it answers from a script, behind
HTTP, and keeps every prompt. The real client asks it.
"""

from __future__ import annotations

import asyncio
import logging
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from handlers.turns import Talk, Turns
from pipeline import wire
from pipeline.engine import PROMPT
from pipeline.errors import PolicyReplyError, Retryable
from pipeline.interfaces import Context, Message, Output, ToolCall
from pipeline.trajectory import Trajectory
from tests.unit import formats
from tests.unit.test_turns import Player
from workers.policy.client import VllmPolicy
from workers.policy.rendering import Rendering

TURN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>{{ '\n' }}{% endfor %}"
HELD: Message = {"role": "tool", "tool_call_id": "c", "name": "bash", "content": "b a"}


@pytest.fixture
def toy(tmp_path: Path) -> str:
    """1=a, 2=b, 3=ab, 4=space, 5=newline, 6=end of turn, 7=user, 8=assistant, 9=tool, 10=system; header, text, 6, 5."""
    from tokenizers import Tokenizer, decoders, models

    vocabulary = {"?": 0, "a": 1, "b": 2, "ab": 3, " ": 4, "\n": 5}
    raw = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    raw.decoder = decoders.Fuse()
    raw.add_special_tokens(["<end>", "<user>", "<assistant>", "<tool>", "<system>"])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "chat_template.jinja").write_text(TURN + "{{ '<assistant>' if add_generation_prompt else '' }}")
    return str(tmp_path)


@dataclass
class Fake:
    """The reports' fake model server. `script`: replies as (ids, logprobs or None, finish reason, tokens claimed)."""

    url: str = ""
    script: list[tuple[list[int], list[float] | None, str, int]] = field(default_factory=list)
    prompts: list[list[int]] = field(default_factory=list)
    wanted: list[int] = field(default_factory=list)

    def say(
        self, ids: list[int], logprobs: list[float] | None, reason: str = "stop", claimed: int | None = None
    ) -> None:
        self.script.append((ids, logprobs, reason, len(ids) if claimed is None else claimed))

    async def generate(self, request: web.Request) -> web.Response:
        asked = await request.json()
        reply: tuple[list[int], list[float] | None, str, int] = ([1], [-0.1], "length", 1)
        if asked["token_ids"] != list(PROMPT):  # the client's one-token probe
            self.prompts.append(asked["token_ids"])
            self.wanted.append(asked["sampling_params"]["max_tokens"])
            reply = self.script.pop(0)
        ids, logprobs, reason, claimed = reply
        content = logprobs and [
            {"token_id": t, "logprob": v} for t, v in zip(ids[: len(logprobs)], logprobs, strict=True)
        ]
        choice = {
            "index": 0, "token_ids": ids, "finish_reason": reason, "logprobs": content and {"content": content},
            "weight_versions": [{"version": "default", "start": 0, "end": len(ids)}],
        }  # fmt: skip
        return web.json_response({"choices": [choice], "usage": {"completion_tokens": claimed}})


@pytest.fixture
async def fake() -> AsyncIterator[Fake]:
    made = Fake()
    app = web.Application()
    app.add_routes([web.post("/inference/v1/generate", made.generate), web.get("/health", _healthy)])
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    made.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield made
    await runner.cleanup()


async def _healthy(_: web.Request) -> web.Response:
    return web.Response()


@pytest.fixture
async def policy(toy: str, fake: Fake) -> AsyncIterator[VllmPolicy]:
    made = VllmPolicy(fake.url, "policy", toy, context=64, policy_wait=10.0, defaults={"max_tokens": 32})
    yield made
    await made.close()


def attempt(policy: Any, sandbox: Any = None) -> Context:
    made = Context(
        id="g.0", group="g", sample=0, lane="train", attempt=1, task={}, sandbox=sandbox,
        log=logging.LoggerAdapter(logging.getLogger("test")), max_turns=10,
    )  # fmt: skip
    made._policy = policy
    return made


def through_the_queue(ctx: Context) -> Trajectory:
    return Trajectory.from_wire(wire.expand(wire.compress(ctx.trajectory.build().to_wire())))


def floats(values: list[float]) -> list[float]:
    return [float(value) for value in np.array(values, dtype=np.float32)]


async def test_H01_assistant_turn_is_not_tokenised_a_second_time(policy: VllmPolicy, fake: Fake) -> None:
    fake.say([1, 2, 6], [-0.7, -0.2, -0.1])
    fake.say([3, 6], [-0.3, -0.4])
    ctx = attempt(policy)
    talk = Talk(ctx, [{"role": "user", "content": "a b"}], [])
    assert talk.open() and await talk.act() and talk.hear([HELD]) and await talk.act()
    first, second = fake.prompts
    assert first == [7, 1, 4, 2, 6, 5, 8]
    assert second == [*first, 1, 2, 6, 5, 9, 2, 4, 1, 6, 5, 8]
    for trajectory in (ctx.trajectory.build(), through_the_queue(ctx)):
        (sequence,) = trajectory.sequences
        action = slice(len(first), len(first) + 3)
        assert sequence.token_ids[action].tolist() == [1, 2, 6] and sequence.loss_mask[action].all()
        assert sequence.logprobs[action].tolist() == floats([-0.7, -0.2, -0.1])


@pytest.mark.parametrize(
    ("ids", "logprobs", "both"),
    [
        ([1] * 6, [-0.1] * 6, ("9 completion tokens", "6 ids")),
        ([1] * 9, [-0.1] * 8, ("9 ids", "8 logprobs")),
        ([1] * 9, None, ("9 ids", "0 logprobs")),
    ],
)
async def test_H02_reply_with_fewer_ids_than_were_generated_is_refused(
    policy: VllmPolicy, fake: Fake, ids: list[int], logprobs: list[float] | None, both: tuple[str, str]
) -> None:
    fake.say(ids, logprobs, claimed=9)
    ctx = attempt(policy)
    talk = Talk(ctx, [{"role": "user", "content": "a"}], [])
    assert talk.open()
    with pytest.raises(PolicyReplyError) as caught:
        await talk.act()
    assert all(part in str(caught.value) for part in both) and isinstance(caught.value, Retryable)
    assert ctx.trajectory.actions == 0 and ctx.trajectory.build().sampled == 0


async def test_H03a_sampled_end_of_turn_keeps_its_logprob(policy: VllmPolicy, fake: Fake) -> None:
    fake.say([1, 2, 6], [-0.1, -0.3, -4.6])
    ctx = attempt(policy)
    await Asked().run(ctx)
    (sequence,) = ctx.trajectory.build().sequences
    assert sequence.token_ids[sequence.loss_mask == 1].tolist() == [1, 2, 6]
    assert sequence.logprobs[sequence.loss_mask == 1].tolist() == floats([-0.1, -0.3, -4.6])


async def test_H03b_cut_reply_is_given_no_end_that_counts_as_sampled(policy: VllmPolicy, fake: Fake) -> None:
    fake.say([1, 2], [-0.1, -0.3], "length")
    fake.say([1, 6], [-0.1, -0.2])
    ctx = attempt(policy)
    talk = Talk(ctx, [{"role": "user", "content": "a"}], [])
    assert talk.open() and await talk.act()
    (sequence,) = ctx.trajectory.build().sequences
    assert sequence.token_ids[sequence.loss_mask == 1].tolist() == [1, 2] and ctx.trajectory.truncated == "length"
    assert talk.hear([HELD]) and await talk.act()
    (sequence,) = ctx.trajectory.build().sequences
    close = sequence.turns[1].end
    assert sequence.token_ids[close] == 6 and sequence.loss_mask[close] == 0
    assert sequence.token_ids[sequence.loss_mask == 1].tolist() == [1, 2, 1, 6]


async def test_H03c_system_turn_of_init_shifts_no_mask(policy: VllmPolicy, fake: Fake) -> None:
    fake.say([1, 2, 6], [-0.1, -0.3, -4.6])
    ctx = attempt(policy)
    handler = Warned()
    await handler.init(ctx)
    await handler.run(ctx)
    (sequence,) = ctx.trajectory.build().sequences
    assert sequence.token_ids.tolist() == [10, 2, 1, 6, 5, 7, 1, 6, 5, 8, 1, 2, 6]
    assert len(sequence.token_ids) == len(sequence.loss_mask) == len(sequence.logprobs)
    assert sequence.loss_mask.tolist() == [0] * 10 + [1] * 3 and sequence.logprobs[:10].tolist() == [0.0] * 10


class Asked(Turns):
    def prompt(self, task: Any) -> str:
        return "a"


class Warned(Asked):
    async def init(self, ctx: Context) -> None:
        ctx.state["system"] = "ba"

    def messages(self, ctx: Context) -> list[Message]:
        return [{"role": "system", "content": ctx.state["system"]}, *super().messages(ctx)]


class Shell:
    """A real bash, in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    async def bash(self, command: str, timeout: float | None = None) -> Output:
        ran = await asyncio.create_subprocess_exec("bash", "-c", command, cwd=self.folder, stdout=PIPE)
        printed, _ = await ran.communicate()
        return Output(printed.decode(), ran.returncode)


class Agent(Asked):
    tools = ("bash",)
    sandbox = {}  # noqa: RUF012

    def __init__(self) -> None:
        self.used: list[tuple[ToolCall, Message]] = []

    async def use(self, ctx: Context, call: ToolCall) -> Message:
        self.used.append((call, await super().use(ctx, call)))
        return self.used[-1][1]


BROKEN = {
    "qwen3": '<tool_call>\n{"name": "bash", "arguments": {"command": "touch made_by_h04\n</tool_call>',
    "llama-3": '{"name": "bash", "parameters": {"command": "touch made_by_h04',
    "qwen3.5": "<tool_call>\n<function=bash>\n<parameter=command>\ntouch made_by_h04",
    "glm-4.5": "<tool_call>bash\n<arg_key>command</arg_key>\n<arg_value>touch made_by_h04</tool_call>",
    "minimax-m2": '<minimax:tool_call>\n<invoke name="bash">\n<parameter name="command">touch made_by_h04',
}


@pytest.mark.parametrize("renderer", BROKEN)
async def test_H04_broken_tool_call_is_answered_and_stays(tmp_path: Path, renderer: str) -> None:
    rendering = Rendering(formats.folder(), renderer)
    call = {"name": "bash", "arguments": {"command": "echo right > made_by_turn_2"}}
    right = rendering.spoken(
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": call}]}
    )
    player = Player(rendering.tokenizer, BROKEN[renderer], (right, "stop"), "fine", renderer=renderer)
    thinks = player.text(player.render([{"role": "user", "content": "a"}])).endswith("<think>\n")
    player.says[0] = first = player.ids(("</think>" if thinks else "") + BROKEN[renderer])
    handler, ctx = Agent(), attempt(player, Shell(tmp_path))
    await handler.run(ctx)
    (broken, told), (good, _) = handler.used
    assert broken.arguments is None or not broken.arguments
    assert told["tool_call_id"] == broken.id and "nothing was run" in told["content"]
    assert good.arguments == call["arguments"]
    assert [file.name for file in tmp_path.iterdir()] == ["made_by_turn_2"]
    sequence = ctx.trajectory.build().sequences[0]
    assert sequence.token_ids[sequence.turns[1].start : sequence.turns[1].end].tolist() == first
    assert sequence.loss_mask[sequence.turns[1].start : sequence.turns[1].end].all()


async def test_H05a_budget_is_what_the_window_still_holds(policy: VllmPolicy, fake: Fake) -> None:
    fake.say([1, 6], [-0.1, -0.2])
    await policy.generate([1] * 40, {"max_tokens": 32})
    assert fake.wanted == [24]


async def test_H05b_context_limit_in_a_later_turn_truncates_and_raises_nothing(policy: VllmPolicy, fake: Fake) -> None:
    fake.say([1, 2, 6], [-0.1, -0.3, -4.6])
    ctx = attempt(policy)
    talk = Talk(ctx, [{"role": "user", "content": "a b"}], [])
    assert talk.open() and await talk.act()
    assert not talk.hear([{**HELD, "content": "a " * 35}])
    assert ctx.trajectory.truncated == "context" and len(ctx.trajectory.build()) <= 64
    assert len(fake.prompts) == 1 and min(fake.wanted) >= 1
