"""The endpoint that takes messages and a prefix of ids: what is asked, what a reply must say, what is kept of it."""

from __future__ import annotations

from array import array
from typing import Any

import orjson
import pytest

from pipeline import chat
from pipeline.builder import TrajectoryBuilder
from pipeline.errors import PolicyReplyError, TrajectoryError
from workers.policy import reply, request
from workers.policy.rendering import Rendering
from workers.policy.spoken import Said, Spoken
from workers.policy.tokenizer import Tokenizer

PROMPT = [5, 6, 7, 8]


def vllm_form(prompt: Any = PROMPT, ids: Any = (1, 2), **about: Any) -> dict[str, Any]:
    content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in ids]
    choice = {"message": {"content": "x"}, "token_ids": list(ids), "logprobs": {"content": content}}
    return {
        "choices": [{**choice, "finish_reason": "stop", **about}],
        "prompt_token_ids": prompt,
        "usage": {"completion_tokens": len(ids)},
    }


def gym_form(prompt: Any = PROMPT, ids: Any = (1, 2), logprobs: Any = (-0.5, -0.5)) -> dict[str, Any]:
    message = {"prompt_token_ids": prompt, "generation_token_ids": list(ids), "generation_log_probs": list(logprobs)}
    return {"choices": [{"message": message, "finish_reason": "tool_calls"}]}


def read(answer: dict[str, Any], kept: int = 3) -> reply.Reply:
    return reply.read(orjson.dumps(answer), "r", "chat", PROMPT, 10, kept)


@pytest.mark.parametrize("form", [vllm_form, gym_form])
def test_both_forms_are_read(form: Any) -> None:
    got = read(form())
    assert (got.ids, got.logprobs, got.finish_reason, got.versions) == ([1, 2], [-0.5, -0.5], "stop", None)
    assert got.prompt is None  # it read what it was asked with


def test_what_stands_behind_the_kept_ids_is_the_server_s() -> None:
    assert read(vllm_form([5, 6, 7, 9, 9])).prompt == [5, 6, 7, 9, 9]
    assert read(vllm_form([3]), kept=0).prompt == [3]


@pytest.mark.parametrize(
    ("answer", "wrong"),
    [
        (vllm_form([5, 6, 4, 8]), r"did not keep the 3 ids .* at 2 it read \[4, 8\], the trajectory has \[7\]"),
        (vllm_form([5, 6]), r"did not keep the 3 ids .* at 2 it read \[\], the trajectory has \[7\]"),
        (vllm_form(None), "does not say which prompt ids"),
        (vllm_form(["5"]), "does not say which prompt ids"),
        (vllm_form([]), "does not say which prompt ids"),
        (vllm_form(finish_reason="abort"), "was aborted"),
        (vllm_form(token_ids=None), "token_ids is a NoneType"),
        (vllm_form(logprobs=None), "2 ids came with 0 logprobs"),
        (vllm_form(token_ids=[1, 3]), "logprob 1 is of token 2, the id there is 3"),
        (gym_form(logprobs=[-0.5]), "2 ids came with 1 logprobs"),
        ({"choices": []}, "not the one of the chat endpoint"),
    ],
)
def test_a_reply_that_does_not_fit_is_refused(answer: dict[str, Any], wrong: str) -> None:
    with pytest.raises(PolicyReplyError, match=wrong):
        read(answer)


def test_a_request_has_the_messages_and_the_ids_that_must_stay() -> None:
    said = Said([{"role": "user", "content": "hi"}], [{"type": "function"}], 3)
    body: Any = request.body("chat", "r", "m", array("I", PROMPT), {"max_tokens": 4, "temperature": 1.0}, None, said)
    asked = orjson.loads(body)
    assert (asked["messages"], asked["tools"], asked["tool_choice"]) == (said.messages, said.tools, "none")
    assert asked["required_prefix_token_ids"] == [5, 6, 7]
    assert (asked["return_token_ids"], asked["logprobs"], asked["max_tokens"]) == (True, True, 4)
    first: Any = request.body("chat", "r", "m", PROMPT, {}, None, said._replace(kept=0, tools=[]))
    assert not {"required_prefix_token_ids", "tools", "tool_choice"} & orjson.loads(first).keys()


def test_only_the_newest_rendering_is_known() -> None:
    spoken = Spoken()
    assert spoken.of([1, 2]) is None
    spoken.note([1, 2], [{"role": "user"}], [], 1)
    assert spoken.of(array("I", [1, 2])) == Said([{"role": "user"}], [], 1)
    assert spoken.of([1, 3]) is None
    spoken.note([4], [], [])
    assert spoken.of([1, 2]) is None


def test_what_is_sent_spells_no_control_token(tokens: Tokenizer) -> None:
    function = {"name": "say", "arguments": {"text": "<|im_end|>"}}
    messages: Any = [
        {"role": "user", "content": "a<|im_end|>b"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]},
    ]
    plain, _ = Rendering(tokens).plain(messages, ())
    assert plain[0]["content"] == "a< |im_end|>b"
    assert plain[1]["tool_calls"][0]["function"] == {"name": "say", "arguments": '{"text": "< |im_end|>"}'}
    assert messages[0]["content"] == "a<|im_end|>b"


def test_the_trajectory_takes_what_the_server_read() -> None:
    builder = TrajectoryBuilder()
    builder.prompt([1, 2])
    builder.reread([7, 8, 9], extra={"endpoint": "chat"})
    builder.action([3], [-1.0], [(0, 0, 1)])
    builder.observation([4])
    builder.observation([5])
    with pytest.raises(TrajectoryError, match="other ids than the 4"):
        builder.reread([7, 8, 9, 9, 6])
    builder.reread([7, 8, 9, 3, 6, 6, 6])
    (sequence,) = builder.build().sequences
    assert sequence.token_ids.tolist() == [7, 8, 9, 3, 6, 6, 6]
    assert sequence.loss_mask.tolist() == [0, 0, 0, 1, 0, 0, 0]
    assert [(turn.kind, turn.start, turn.end) for turn in sequence.turns] == [
        ("prompt", 0, 3),
        ("action", 3, 4),
        ("observation", 4, 7),
    ]
    assert sequence.turns[0].extra == {"endpoint": "chat"}


def test_a_probe_proves_the_prefix() -> None:
    asked = chat.probe()
    assert asked["required_prefix_token_ids"] == list(chat.PROBED)
    assert [message["role"] for message in asked["messages"]].index("assistant") == 1
