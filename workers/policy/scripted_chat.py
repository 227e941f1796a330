"""The scripted policy server's chat completions, as NeMo RL's engines offer them: messages and a prefix of ids go in.

What its template makes of the messages up to the last assistant's end token is replaced by the prefix, as in NeMo RL at
00cf6b43 (`_replace_prefix_tokens`); temperature and top_p must be its own, 1.0, as there.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from workers.policy.rendering import Rendering
from workers.policy.scripted_engine import Outcome
from workers.policy.scripted_shapes import Refused, usage

HEAT = ("temperature", "top_p")


def prompt(rendering: Rendering, asked: Mapping[str, Any], fault: str = "") -> list[int]:
    """The ids that the engine reads. Faults: "retokenise", the prefix is made text and read anew; "no_prefix".

    Raises Refused for a request that NeMo RL refuses.
    """
    wrong = next((name for name in HEAT if asked.get(name) != 1.0), "")
    if wrong:
        raise Refused(f"AssertionError: {wrong} is {asked.get(wrong)}", 500)
    messages, tools = asked.get("messages"), asked.get("tools") or []
    if not isinstance(messages, list) or not messages:
        raise Refused("messages must be a list with at least one message")
    whole = rendering.render(messages, tools)
    prefix = asked.get("required_prefix_token_ids")
    if not prefix or fault == "no_prefix":
        return whole
    if fault == "retokenise":
        prefix = rendering.tokenizer.encode(rendering.text(prefix))
    end = rendering.tokenizer.eos_token_id
    last = max((at for at, message in enumerate(messages) if message.get("role") == "assistant"), default=-1)
    before = rendering.render(messages[: last + 1], tools) if last >= 0 else []
    turns = sum(token == end for token in before)
    ends = [at for at, token in enumerate(whole) if token == end]
    if not 0 < turns <= len(ends):
        raise Refused("No EOS token ID found in the chat-templated messages!", 500)
    kept = prefix[:-1] if prefix[-1] == end else prefix
    return [*kept, *whole[ends[turns - 1] :]]


def answer(
    call_id: str,
    model: str,
    read: npt.NDArray[np.uint32],
    outcome: Outcome,
    text: str,
    asked: Mapping[str, Any],
    fault: str,
) -> dict[str, Any]:
    """The reply: what was read and sampled where `return_token_ids` asks for it, spoilt as `fault` says."""
    told = bool(asked.get("return_token_ids"))
    named = bool(asked.get("return_tokens_as_token_ids"))
    content: list[dict[str, Any]] | None = [
        {"token": f"token_id:{token}" if named else "?", "logprob": value, "bytes": [], "top_logprobs": []}
        for token, value in zip(outcome.ids, outcome.logprobs, strict=True)
    ]
    ids = outcome.ids
    if fault == "no_logprobs" or not asked.get("logprobs"):
        content = None
    elif fault == "short_logprobs" and content:
        content = content[:-1]
    elif fault == "nan_logprob" and content:
        content[-1]["logprob"] = -9999.0
    elif fault == "short_ids":
        ids, content = ids[:-1], content and content[:-1]
    message: dict[str, Any] = {"role": "assistant", "content": text}
    message |= dict.fromkeys(("refusal", "annotations", "audio", "function_call", "reasoning"))
    choice = {
        "index": 0, "message": message, "stop_reason": None, "routed_experts": None,
        "logprobs": None if content is None else {"content": content}, "finish_reason": outcome.reason,
        "token_ids": ids if told else None,
    }  # fmt: skip
    used = usage(len(read), outcome)
    used["prompt_tokens_details"]["created_cache_tokens"] = 0
    return {
        "id": call_id, "object": "chat.completion", "created": int(time.time()), "model": model, "choices": [choice],
        "usage": used, "prompt_logprobs": None, "prompt_text": None, "service_tier": None, "metrics": None,
        "kv_transfer_params": None,
        "prompt_token_ids": read.tolist() if told and fault != "no_prompt_ids" else None,
    }  # fmt: skip
