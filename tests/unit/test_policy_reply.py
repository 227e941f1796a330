"""Replies of a policy server: what does not fit together is refused, and the error names both counts (H02)."""

from __future__ import annotations

from typing import Any

import orjson
import pytest

from pipeline.errors import ContextFull, PolicyReplyError, TaskError
from workers.policy import reply


def body(
    ids: list[int], values: list[float] | None, claimed: int | None = None, versions: Any = (), **choice: Any
) -> bytes:
    content = values and [{"token_id": t, "logprob": v} for t, v in zip([*ids, *[0] * 9], values, strict=False)]
    spans = [{"version": "default", "start": 0, "end": len(ids)}] if versions == () else versions
    inner = {"token_ids": ids, "logprobs": content and {"content": content}, "finish_reason": "stop"}
    claimed = len(ids) if claimed is None else claimed
    return orjson.dumps({
        "choices": [{**inner, "weight_versions": spans, **choice}],
        "usage": {"completion_tokens": claimed},
    })  # fmt: skip


@pytest.mark.parametrize(
    ("ids", "logprobs", "both"),
    [(6, 6, ("9 completion tokens", "6 ids")), (9, 8, ("9 ids", "8 logprobs")), (9, None, ("9 ids", "0 logprobs"))],
)
def test_counts_that_differ_are_refused_and_named(ids: int, logprobs: int | None, both: tuple[str, str]) -> None:
    data = body([7] * ids, None if logprobs is None else [-0.5] * logprobs, claimed=9)
    with pytest.raises(PolicyReplyError) as caught:
        reply.read(data, "r1")
    assert all(part in str(caught.value) for part in both)


def test_a_whole_reply_is_read() -> None:
    spans = [{"version": "step-2", "start": 0, "end": 1}, {"version": "step-3", "start": 1, "end": 3}]
    answer = reply.read(body([1, 2, 6], [-0.7, -0.2, -4.6], versions=spans), "r1")
    assert answer == reply.Reply([1, 2, 6], [-0.7, -0.2, -4.6], [(2, 0, 1), (3, 1, 3)], "stop")


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"<html>", "is not the one of"),
        (b'{"choices": []}', "is not the one of"),
        (body([1], [-9999.0]), "no finite evidence"),
        (body([1], [-0.1], finish_reason="error"), "finish_reason is 'error'"),
        (body([1, 2], [-0.1, -0.1], versions=[{"version": "1", "start": 0, "end": 1}]), "cover 1 of 2 ids"),
        (body([1, 2], [-0.1, -0.1], versions=[{"version": "1", "start": 1, "end": 2}]), "expected from 0"),
        (body([1], [-0.1], versions=[{"version": "final", "start": 0, "end": 1}]), "ends in no number"),
        (
            body([1], [-0.1], logprobs={"content": [{"token_id": 2, "logprob": -0.1}]}),
            "is of token 2, the id there is 1",
        ),
        (body([1], [-0.1], logprobs={"content": [{"token_id": 1, "logprob": None}]}), "logprob 0 of 1"),
    ],
)
def test_a_reply_that_breaks_the_contract_is_refused(data: bytes, words: str) -> None:
    with pytest.raises(PolicyReplyError, match=words):
        reply.read(data, "r1")


def test_an_empty_abort_and_a_reply_without_labels_are_fine() -> None:
    assert reply.read(body([], [], versions=[], finish_reason="abort", logprobs={"content": []}), "r").ids == []
    assert reply.read(body([1], [-0.1], versions=None), "r").versions is None


def completion(ids: list[int], tokens: list[Any], values: list[Any], **choice: Any) -> bytes:
    logprobs = {"tokens": tokens, "token_logprobs": values, "text_offset": [], "top_logprobs": []}
    about = {"token_ids": ids, "logprobs": logprobs, "finish_reason": "stop", "text": "x", **choice}
    return orjson.dumps({"choices": [about], "usage": {"completion_tokens": len(ids)}})


def test_the_other_path_is_read_with_the_same_care() -> None:
    good = completion([5, 6], ["token_id:5", "token_id:6"], [-0.1, -0.2], prompt_token_ids=[1, 2])
    assert reply.read(good, "r", "completions", [1, 2]) == reply.Reply([5, 6], [-0.1, -0.2], None, "stop")
    for body_, words in (
        (completion([5, 6], ["token_id:5"], [-0.1]), "2 ids came with 1 logprobs"),
        (completion([5], ["token_id:6"], [-0.1]), "is of token 6, the id there is 5"),
        (completion([5], ["token_id:5"], [None]), "logprob 0 of 1"),
        (completion([5], ["token_id:5"], [-0.1], token_ids=None), "token_ids is a NoneType"),
        (completion([5], ["token_id:5"], [-0.1], logprobs=None), "0 logprobs"),
    ):
        with pytest.raises(PolicyReplyError, match=words):
            reply.read(body_, "r", "completions", [1, 2])
    with pytest.raises(PolicyReplyError, match="3 prompt ids were sent, the server read 2 others"):
        reply.read(good, "r", "completions", [1, 2, 3])


@pytest.mark.parametrize(
    ("status", "said", "case"),
    [
        (429, "busy", "overload"), (503, "busy", "overload"), (502, "gateway", "dead"),
        (500, "EngineCore encountered an issue", "dead"), (500, "list index out of range", "error"),
        (403, "Scale-out endpoints are disabled", "misfit"), (404, "The model `x` does not exist", "misfit"),
    ],
)  # fmt: skip
def test_faults_are_told_apart(status: int, said: str, case: str) -> None:
    found = reply.failure(status, orjson.dumps({"error": {"message": said}}))
    assert isinstance(found, reply.Repeat) and found.case == case and said in str(found)


def test_what_no_other_server_would_take_either_is_not_repeated() -> None:
    long = reply.failure(400, b'{"error": {"message": "This model\'s maximum context length is 64 tokens."}}')
    assert isinstance(long, ContextFull)
    assert isinstance(reply.failure(400, b'{"error": "no such field"}'), TaskError)


@pytest.mark.parametrize(("label", "number"), [("default", 0), ("step-12", 12), ("12", 12), (7, 7)])
def test_labels_are_numbers(label: object, number: int) -> None:
    assert reply.version_number(label) == number
