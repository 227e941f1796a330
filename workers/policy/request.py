"""What a call says to a policy server: on the two paths that take token ids, and on the one that takes messages."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np
import orjson

from pipeline import chat
from workers.policy.spoken import Said

PATHS = {"generate": "/inference/v1/generate", "completions": "/v1/completions", "chat": chat.PATH}
"""By endpoint. The second is the fall-back for servers without the first; the third takes no ids (pipeline.chat)."""

SLICE = 4096
"""Ids encoded at a time: about 0.05 ms and 25 KB."""


def body(
    endpoint: str,
    request_id: str,
    model: str,
    ids: Sequence[int],
    params: Mapping[str, Any],
    priority: int | None,
    said: Said | None = None,
) -> bytes | AsyncIterator[bytes]:
    """The request as JSON; a long one is encoded slice by slice while the socket takes it, so that none lies around.

    `said`: what `ids` were rendered from, as the endpoint "chat" needs it; of the ids it gets those that must stay.
    """
    about: dict[str, Any] = {"model": model, "stream": False}
    if priority is not None:
        about["priority"] = priority
    if endpoint == "chat":
        assert said is not None
        return orjson.dumps({**about, **chat.asked(said.messages, said.tools, ids[: said.kept], params)})
    if endpoint == "generate":
        about |= {"request_id": request_id, "sampling_params": {**params, "logprobs": 0}}
        field = b"token_ids"
    else:
        about |= {**params, "logprobs": 0, "return_token_ids": True, "return_tokens_as_token_ids": True}
        field = b"prompt"
    head = orjson.dumps(about)[:-1] + b',"' + field + b'":['
    if len(ids) <= SLICE:
        return head + _encoded(ids) + b"]}"
    return _sliced(head, ids)


async def _sliced(head: bytes, ids: Sequence[int]) -> AsyncIterator[bytes]:
    yield head
    for start in range(0, len(ids), SLICE):
        text = _encoded(ids[start : start + SLICE])
        yield text if start == 0 else b"," + text
    yield b"]}"


def _encoded(ids: Sequence[int]) -> bytes:
    return orjson.dumps(np.array(ids, dtype=np.uint32), option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]


def engine_id(endpoint: str, request_id: str) -> str:
    """The id under which the engine itself knows the call: an abort must give this one."""
    if endpoint == "chat":
        return f"chatcmpl-{request_id}"
    return f"generate-tokens-{request_id}" if endpoint == "generate" else f"cmpl-{request_id}-0"
