"""Chat completions that take a prefix of ids: how NeMo RL's engines let an agent play that is not their own.

The server renders the messages by its chat template, and puts `required_prefix_token_ids` in the place of what it made
of them up to the last assistant's end token. Its reply says which prompt it read. Sources: NVIDIA-NeMo/RL at 00cf6b43,
nemo_rl/models/generation/vllm/vllm_worker_async.py (`_replace_prefix_tokens`); its plugin for a vLLM of its own,
tools/external_rollout_vllm; vLLM's chat completions with `return_token_ids`; for the fields on the message NeMo Gym's
`TokenIDLogProbMixin`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

PATH = "/v1/chat/completions"

PROBED = (1, 1, 1)
"""A prefix that no chat template makes: a server that reads it takes prefixes."""

MESSAGES = ("user", "assistant", "user")
"""Roles of a probe's messages: a prefix has its place before the last one."""


class Told(NamedTuple):
    """What a reply says. Each is None where it does not say it; `evidence`: (token, logprob) by sampled token."""

    prompt: list[int] | None
    ids: list[int] | None
    evidence: list[tuple[Any, Any]] | None


def asked(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    prefix: Sequence[int],
    params: Mapping[str, Any],
) -> dict[str, Any]:
    """The body of a request. The reply is not to be parsed for tool calls: they are read out of its ids."""
    body: dict[str, Any] = {**params, "messages": list(messages), "stream": False, "logprobs": True}
    body |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
    if tools:
        body |= {"tools": list(tools), "tool_choice": "none"}
    if len(prefix):
        body["required_prefix_token_ids"] = array("I", prefix).tolist()
    return body


def probe() -> dict[str, Any]:
    """A request for one token, with a prefix. NeMo RL refuses a temperature and a top_p that are not its own, which
    are 1.0 in all of its recipes for RL."""
    messages = [{"role": role, "content": "."} for role in MESSAGES]
    return asked(messages, (), PROBED, {"max_tokens": 1, "temperature": 1.0, "top_p": 1.0})


def told(answer: Any) -> Told:
    """Read a reply, in NeMo Gym's form (ids on the message) or vLLM's. Raises KeyError, IndexError, TypeError,
    AttributeError for what is no chat completion."""
    choice = answer["choices"][0]
    message = choice.get("message") or {}
    if message.get("generation_token_ids") is not None:
        ids, values = message["generation_token_ids"], message.get("generation_log_probs")
        evidence = None if values is None else [(None, value) for value in values]
        return Told(message.get("prompt_token_ids"), ids, evidence)
    content = (choice.get("logprobs") or {}).get("content")
    evidence = None if content is None else [(_id(item["token"]), item["logprob"]) for item in content]
    return Told(answer.get("prompt_token_ids"), choice.get("token_ids"), evidence)


def _id(token: Any) -> Any:
    """vLLM names a token by its id on request; a server that does not says its text, which proves nothing."""
    return token[9:] if isinstance(token, str) and token.startswith("token_id:") else None
