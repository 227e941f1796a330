"""The agent loop on tokens, with a real renderer, a policy that says what the test wrote, and a sandbox of notes."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest

from handlers.tools import TOOLS
from handlers.turns import Turns, shortened
from pipeline.errors import ContextFull, PolicyError
from pipeline.interfaces import Completion, Context, Message, Output
from tests.unit import formats
from workers.policy.rendering import Rendering
from workers.policy.tokenizer import Tokenizer, load

CALL = '<tool_call>\n{"name": "bash", "arguments": {"command": "%s"}}\n</tool_call>'


class Player(Rendering):
    """A policy that says what it was given, turn by turn, and keeps every prompt it saw."""

    def __init__(self, tokenizer: Tokenizer, *says: Any, context: int = 10_000, renderer: str = "qwen3") -> None:
        super().__init__(tokenizer, renderer)
        self.context = context
        self.says = list(says)
        self.prompts: list[list[int]] = []

    def ids(self, text: str, close: bool = True) -> list[int]:
        return [*self.tokenizer.encode(text), *([self.stop_ids[0]] if close else [])]

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        if len(prompt_ids) >= self.context:
            raise ContextFull("full")
        self.prompts.append(list(prompt_ids))
        said = self.says.pop(0)
        ids, reason = said if isinstance(said, tuple) else (said, "stop")
        if isinstance(ids, str):
            ids = self.ids(ids, reason == "stop")
        logprobs = [-(at + 1) / 8 for at in range(len(ids))]
        versions = [(3, 0, len(ids))] if ids else []
        return Completion(ids=ids, logprobs=logprobs, versions=versions, finish_reason=reason, sampling=sampling)


class Notes:
    """A sandbox that writes down what it was asked."""

    def __init__(self, output: str = "done", exit_code: int = 0) -> None:
        self.commands: list[str] = []
        self.output = Output(output, exit_code)

    async def bash(self, command: str, timeout: float | None = None) -> Output:
        self.commands.append(command)
        return self.output

    async def read(self, path: str) -> bytes:
        return b""

    async def write(self, path: str, data: bytes) -> None:
        return None


class Agent(Turns):
    tools = ("bash",)
    sandbox = {}  # noqa: RUF012

    def prompt(self, task: Any) -> str | list[Message]:
        return str(task["question"])

    async def eval(self, ctx: Context) -> float:
        return 1.0


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load(formats.folder())


async def play(
    player: Player, sandbox: Notes | None = None, max_turns: int = 10, agent: Turns | None = None, **sampling: Any
) -> Context:
    ctx = Context(
        id="g.0", group="g", sample=0, lane="train", attempt=1, task={"question": "go"}, sampling=sampling,
        log=logging.LoggerAdapter(logging.getLogger("test")), sandbox=sandbox or Notes(), max_turns=max_turns,
    )  # fmt: skip
    ctx._policy = player
    await (agent or Agent()).run(ctx)
    return ctx


async def test_one_answer(tokenizer: Tokenizer) -> None:
    player = Player(tokenizer, "It is 42.")
    ctx = await play(player)
    (sequence,) = ctx.trajectory.build().sequences
    assert ctx.answer == "It is 42." and ctx.trajectory.truncated is None
    assert [turn.kind for turn in sequence.turns] == ["prompt", "action"]
    assert sequence.token_ids.tolist()[: len(player.prompts[0])] == player.prompts[0]
    assert int(sequence.loss_mask.sum()) == len(player.ids("It is 42."))


async def test_sampled_ids_are_never_tokenised_again(tokenizer: Tokenizer) -> None:
    """H01 and H03: the second prompt begins with the first and exactly what was sampled, closing id and all."""
    player = Player(tokenizer, "", "fine")
    convert = tokenizer.convert_tokens_to_ids
    call = player.ids(CALL % "ls")
    odd = [convert("d"), convert("e"), *call]
    player.says[0] = odd
    assert tokenizer.encode("de") == [convert("de")]
    sandbox = Notes("a.txt")
    ctx = await play(player, sandbox)
    first, second = player.prompts
    assert second[: len(first) + len(odd)] == [*first, *odd] and sandbox.commands == ["ls"]
    (sequence,) = ctx.trajectory.build().sequences
    action = sequence.turns[1]
    assert sequence.token_ids[action.start : action.end].tolist() == odd
    assert sequence.logprobs[action.start : action.end].tolist() == [-(at + 1) / 8 for at in range(len(odd))]
    assert sequence.loss_mask[action.start : action.end].all()
    assert [turn.kind for turn in sequence.turns] == ["prompt", "action", "observation", "action"]
    assert not sequence.loss_mask[: action.start].any() and not sequence.loss_mask[action.end : len(second)].any()
    assert "a.txt" in player.text(second)


async def test_broken_arguments_run_nothing_and_are_told(tokenizer: Tokenizer) -> None:
    """H04."""
    broken = '<tool_call>\n{"name": "bash", "arguments": {"command": "touch made_by_h04\n</tool_call>'
    player = Player(tokenizer, broken, CALL % "ls", "fine")
    sandbox = Notes()
    ctx = await play(player, sandbox)
    assert sandbox.commands == ["ls"] and ctx.answer == "fine"
    assert "nothing was run: the call is no valid JSON" in player.text(player.prompts[1])
    (sequence,) = ctx.trajectory.build().sequences
    assert sequence.token_ids[sequence.turns[1].start : sequence.turns[1].end].tolist() == player.ids(broken)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        ('{"name": "rm", "arguments": {}}', "there is no tool 'rm'; there are: bash"),
        ('{"name": "bash", "arguments": {"cmd": "ls"}}', "bash wants `command`"),
        ('{"name": "bash", "arguments": {"command": 3}}', "bash wants `command`"),
        ('{"name": "bash", "arguments": {"command": "ls", "timeout": -1}}', "`timeout` is a number of seconds"),
        ('{"name": "bash", "arguments": {"command": "ls", "timeout": NaN}}', "`timeout` is a number of seconds"),
    ],
)
async def test_a_call_that_can_not_run_is_told(tokenizer: Tokenizer, call: str, words: str) -> None:
    player = Player(tokenizer, f"<tool_call>\n{call}\n</tool_call>", "fine")
    sandbox = Notes()
    await play(player, sandbox)
    assert words in player.text(player.prompts[1]) and not sandbox.commands


async def test_two_calls_in_one_turn_run_in_order(tokenizer: Tokenizer) -> None:
    sandbox = Notes("boom", exit_code=2)
    player = Player(tokenizer, (CALL % "one") + "\n" + (CALL % "two"), "fine")
    await play(player, sandbox)
    assert sandbox.commands == ["one", "two"]
    assert player.text(player.prompts[1]).count("boom\n[exit code 2]") == 2


async def test_output_that_does_not_fit_ends_the_rollout_as_truncated(tokenizer: Tokenizer) -> None:
    """H05 (b)."""
    opening = len(Player(tokenizer).render([{"role": "user", "content": "go"}], [TOOLS["bash"]]))
    player = Player(tokenizer, CALL % "ls", context=opening + 64)
    ctx = await play(player, Notes("x " * 100))
    trajectory = ctx.trajectory.build()
    assert ctx.trajectory.truncated == "context" and len(trajectory) <= player.context and len(player.prompts) == 1


async def test_a_prompt_that_does_not_fit_is_truncated_without_a_call(tokenizer: Tokenizer) -> None:
    player = Player(tokenizer, context=8)
    ctx = await play(player)
    assert ctx.trajectory.truncated == "context" and not player.prompts and len(ctx.trajectory.build()) == 0


async def test_a_reply_cut_by_length_invents_no_closing_id(tokenizer: Tokenizer) -> None:
    """H03 (b)."""
    player = Player(tokenizer, ("It is fort", "length"))
    ctx = await play(player)
    (sequence,) = ctx.trajectory.build().sequences
    assert ctx.trajectory.truncated == "length" and ctx.answer == "It is fort"
    assert sequence.token_ids[sequence.loss_mask == 1].tolist() == player.ids("It is fort", close=False)


async def test_a_cut_call_goes_on_behind_a_close_that_nobody_sampled(tokenizer: Tokenizer) -> None:
    player = Player(tokenizer, ('<tool_call>\n{"name": "bash", "argum', "length"), "fine")
    ctx = await play(player)
    (sequence,) = ctx.trajectory.build().sequences
    close = sequence.turns[1].end
    assert sequence.token_ids[close] == player.stop_ids[0] and sequence.loss_mask[close] == 0
    assert ctx.answer == "fine" and ctx.trajectory.truncated is None


async def test_ids_sampled_behind_the_close_begin_a_new_sequence(tokenizer: Tokenizer) -> None:
    player = Player(tokenizer, "", "fine")
    player.says[0] = [*player.ids(CALL % "ls"), *player.ids("tail", close=False)]
    ctx = await play(player)
    first, second = ctx.trajectory.build().sequences
    assert first.token_ids[first.loss_mask == 1].tolist()[-len(player.ids("tail", False)) :] == player.ids(
        "tail", False
    )
    assert second.turns[0].kind == "prompt" and second.token_ids.tolist()[: len(player.prompts[1])] == player.prompts[1]
    assert "ls" in player.text(player.prompts[1]) and "done" in player.text(player.prompts[1])


async def test_turns_that_are_over_are_truncated_after_the_last_command(tokenizer: Tokenizer) -> None:
    sandbox = Notes()
    ctx = await play(Player(tokenizer, CALL % "one", CALL % "two"), sandbox, max_turns=2)
    assert ctx.trajectory.truncated == "turns" and sandbox.commands == ["one", "two"]
    assert ctx.trajectory.actions == 2


async def test_an_aborted_reply_is_gone_on_with(tokenizer: Tokenizer) -> None:
    player = Player(tokenizer, ("It is ", "abort"), ([], "abort"), "42.")
    ctx = await play(player, max_tokens=50)
    assert ctx.answer == "It is 42."
    assert player.prompts[1] == player.prompts[2] == [*player.prompts[0], *player.ids("It is ", close=False)]
    actions = [turn for turn in ctx.trajectory.build().sequences[0].turns if turn.kind == "action"]
    assert [turn.finish_reason for turn in actions] == ["abort", "stop"]
    assert actions[1].sampling == {"max_tokens": 50 - len(player.ids("It is ", close=False))}


async def test_what_is_left_of_min_tokens_shrinks_with_max_tokens(tokenizer: Tokenizer) -> None:
    player = Player(tokenizer, ("It is ", "abort"), "42.")
    ctx = await play(player, max_tokens=50, min_tokens=50)
    left = 50 - len(player.ids("It is ", close=False))
    assert ctx.trajectory.build().sequences[0].turns[2].sampling == {"max_tokens": left, "min_tokens": left}


async def test_the_rest_of_an_aborted_reply_has_another_seed(tokenizer: Tokenizer) -> None:
    ctx = await play(Player(tokenizer, ("It is ", "abort"), "42."), max_tokens=50, seed=7)
    actions = [turn for turn in ctx.trajectory.build().sequences[0].turns if turn.kind == "action"]
    assert [turn.sampling["seed"] for turn in actions if turn.sampling] == [7, 8]


async def test_endless_aborts_are_the_servers_fault(tokenizer: Tokenizer) -> None:
    with pytest.raises(PolicyError, match="aborted one reply 100 times"):
        await play(Player(tokenizer, *[([], "abort")] * 101))


def test_a_family_that_can_not_work_is_told_when_it_is_written() -> None:
    with pytest.raises(TypeError, match="has tools but no sandbox"):
        type("Bad", (Turns,), {"tools": ("bash",)})
    with pytest.raises(TypeError, match="names 'bahs'; there are: bash"):
        type("Bad", (Turns,), {"tools": ("bahs",), "sandbox": {}})
    with pytest.raises(TypeError, match=r"compact_at is 1\.5: a share of the window"):
        type("Bad", (Turns,), {"compact_at": 1.5})


async def test_a_policy_is_waited_for_before_anything_is_rendered(tokenizer: Tokenizer) -> None:
    class Late(Player):
        context = None  # type: ignore[assignment]

        async def ready(self) -> None:
            self.context = 10_000

    player = Late(tokenizer, "fine")
    player.context = None  # type: ignore[assignment]
    assert (await play(player)).answer == "fine"


async def test_a_stop_text_ends_a_turn_whose_close_nobody_sampled(tokenizer: Tokenizer) -> None:
    player = Player(tokenizer, "", "fine")
    player.says[0] = said = player.ids(CALL % "ls", close=False)
    sandbox = Notes()
    ctx = await play(player, sandbox, stop=["</tool_call>"])
    (sequence,) = ctx.trajectory.build().sequences
    close = sequence.turns[1].end
    assert sandbox.commands == ["ls"] and ctx.trajectory.truncated is None
    assert sequence.token_ids[sequence.turns[1].start : close].tolist() == said
    assert sequence.token_ids[close] == player.stop_ids[0] and sequence.loss_mask[close] == 0


class Compacting(Agent):
    compact_at = 0.5


def sized(tokenizer: Tokenizer, room: int) -> int:
    """A window of which half holds the opening and `room` tokens."""
    return 2 * (len(Player(tokenizer).render([{"role": "user", "content": "go"}], [TOOLS["bash"]])) + room)


async def test_compaction_begins_a_new_sequence_that_holds_what_is_new(tokenizer: Tokenizer) -> None:
    player = Player(tokenizer, CALL % "one", CALL % "two", "fine", context=sized(tokenizer, 400))
    ctx = await play(player, Notes("word " * 300), agent=Compacting())
    first, second = ctx.trajectory.build().sequences
    assert ctx.answer == "fine" and ctx.trajectory.truncated is None
    assert [len(first.turns), len(second.turns)] == [4, 2] and second.turns[0].kind == "prompt"
    assert player.prompts[2] == second.token_ids[: second.turns[0].end].tolist()
    assert len(player.prompts[2]) < player.context / 2
    said = player.text(player.prompts[2])
    assert "[1500 characters were here; they were left out to save room]" in said
    assert "one" in said and "two" in said and "go<|im_end|>" in said


async def test_compaction_that_saves_too_little_truncates(tokenizer: Tokenizer) -> None:
    class Idle(Compacting):
        async def compact(self, ctx: Context, messages: list[Message]) -> list[Message]:
            return messages

    player = Player(tokenizer, CALL % "one", context=sized(tokenizer, 100))
    ctx = await play(player, Notes("word " * 150), agent=Idle())
    assert ctx.trajectory.truncated == "context" and len(player.prompts) == 1
    assert len(ctx.trajectory.build().sequences) == 1


async def test_compaction_may_be_the_handlers_own(tokenizer: Tokenizer) -> None:
    class Summing(Compacting):
        async def compact(self, ctx: Context, messages: list[Message]) -> list[Message]:
            return [messages[0], {"role": "user", "content": f"{len(messages)} messages came to nothing"}]

    player = Player(tokenizer, CALL % "one", "fine", context=sized(tokenizer, 100))
    ctx = await play(player, Notes("word " * 150), agent=Summing())
    assert "3 messages came to nothing" in player.text(player.prompts[1]) and ctx.answer == "fine"


def test_older_outputs_are_noted_and_the_newest_turns_stay() -> None:
    def turn(at: int) -> list[Message]:
        return [
            {"role": "assistant", "content": f"I {at}", "reasoning_content": "hm"},
            {"role": "tool", "tool_call_id": "c", "content": "x" * 100 * at},
            {"role": "tool", "tool_call_id": "d", "content": "ok"},
        ]

    opening: list[Message] = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    messages = [*opening, *turn(1), *turn(2), *turn(3)]
    made = shortened(messages, 1)
    assert made[:2] == opening and made[8:] == messages[8:] and len(made) == len(messages)
    assert [made[at]["content"] for at in (3, 4, 6)] == [
        "[100 characters were here; they were left out to save room]", "ok",
        "[200 characters were here; they were left out to save room]",
    ]  # fmt: skip
    assert [made[at]["reasoning_content"] for at in (2, 5, 8)] == ["", "", "hm"]
    assert shortened(messages, 9) == messages
    assert "300 characters" in shortened(messages, 0)[9]["content"]
