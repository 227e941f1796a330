"""A family's own tools: what the policy is told of them, how a call is checked, how one ends the rollout."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from handlers.tools import Over, answer_own, tool
from handlers.turns import Turns
from pipeline.interfaces import Context, ToolCall
from tests.unit import formats
from tests.unit.test_turns import Player
from workers.policy.tokenizer import load

CALL = '<tool_call>\n{"name": "%s", "arguments": {%s}}\n</tool_call>'


class Shop(Turns):
    """Sells things by a tool of its own."""

    tools = ("buy", "submit")

    @tool("Buy something.", name="What.", count="How many.")
    async def buy(self, ctx: Context, name: str, count: int = 1) -> str:
        if name == "moon":
            raise ValueError("the moon is not for sale")
        if name == "fire":
            raise RuntimeError("burnt down")
        ctx.state.setdefault("bought", []).extend([name] * count)
        return f"{count} {name}"

    @tool("Tell something.", schema="How.", json="What.", copy="Whether to keep it.")
    async def tell(self, ctx: Context, schema: str, json: str = "{}", copy: bool = False) -> str:
        return f"{schema} {json} {copy}"

    @tool("Hand in your work.")
    async def submit(self, ctx: Context) -> str:
        return Over("done")

    def prompt(self, task: Any) -> str:
        return "go"

    async def eval(self, ctx: Context) -> float:
        return 1.0


def context() -> Context:
    log = logging.LoggerAdapter(logging.getLogger("test"))
    return Context(id="g.0", group="g", sample=0, lane="train", attempt=1, task={}, log=log)


def test_the_policy_is_told_what_the_signature_says() -> None:
    (buy, submit) = Shop()._offered()
    assert buy["function"] == {
        "name": "buy",
        "description": "Buy something.",
        "parameters": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "description": "What."},
                "count": {"type": "integer", "description": "How many."},
            },
            "required": ["name"],
        },
    }
    assert submit["function"]["parameters"] == {"type": "object", "properties": {}, "required": []}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"name": "tea"}, "1 tea"),
        ({"name": "tea", "count": 2, "more": "?"}, "2 tea"),
        ({"name": "moon"}, "Error: the moon is not for sale."),
        ({}, "Error: nothing was run: buy wants `name`."),
        ({"name": 3, "count": "x"}, "Error: nothing was run: `name` of buy is 3: input should be a valid string; "
         "`count` of buy is 'x': input should be a valid integer, unable to parse string as an integer."),
        (None, "Error: nothing was run: no JSON. Call again in the right form."),
    ],
)  # fmt: skip
async def test_a_call_is_checked_and_answered(arguments: dict[str, Any] | None, said: str) -> None:
    call = ToolCall("1", "buy", arguments, "no JSON" if arguments is None else None)
    assert await answer_own(Shop().buy, context(), call) == said


async def test_a_parameter_may_have_any_name() -> None:
    call = ToolCall("1", "tell", {"schema": "so", "copy": True})
    assert await answer_own(Shop().tell, context(), call) == "so {} True"


async def test_other_errors_are_the_handlers_own() -> None:
    with pytest.raises(RuntimeError, match="burnt down"):
        await answer_own(Shop().buy, context(), ToolCall("1", "buy", {"name": "fire"}))


async def test_a_tool_ends_the_rollout() -> None:
    """What was called after it in the same turn is not run, and the policy hears nothing more."""
    calls = CALL % ("submit", "") + CALL % ("buy", '"name": "tea"')
    player = Player(load(formats.folder()), CALL % ("buy", '"name": "milk"'), calls)
    ctx = context()
    ctx._policy = player
    await Shop().run(ctx)
    assert ctx.state["bought"] == ["milk"] and ctx.trajectory.truncated is None
    (sequence,) = ctx.trajectory.build().sequences
    assert [turn.kind for turn in sequence.turns] == ["prompt", "action", "observation", "action"]


def test_a_tool_that_does_not_fit_is_told_at_import() -> None:
    with pytest.raises(TypeError, match=r"must be `async def f\(self, ctx, ...\)`.*it has \['a'\], told are \[\]"):

        @tool("?")
        async def f(self: Any, ctx: Context, a: str) -> str:
            return a

    with pytest.raises(TypeError, match="a must be annotated as str, int, float or bool"):

        @tool("?", a="?")
        async def g(self: Any, ctx: Context, a: list[str]) -> str:
            return a[0]

    with pytest.raises(TypeError, match="tools names 'sell'; there are: bash, .*, buy, submit, tell"):

        class Wrong(Shop):
            tools = ("sell",)

    with pytest.raises(TypeError, match="no sandbox to use them in"):

        class Only(Turns):
            tools = ("bash",)
            sandbox = {}  # noqa: RUF012
            eval_sandbox = "only"
