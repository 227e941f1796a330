"""What one call asks the engine for: the task's sampling settings, checked, within what the window still holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import ContextFull, TaskError

OURS = frozenset({"n", "logprobs", "prompt_logprobs", "stream", "detokenize", "output_kind"})
"""Settings that the client gives itself."""

KNOWN = frozenset({
    "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty",
    "repetition_penalty", "seed", "stop", "stop_token_ids", "include_stop_str_in_output", "ignore_eos", "bad_words",
    "allowed_token_ids", "logit_bias", "structured_outputs", "skip_special_tokens", "extra_args",
})  # fmt: skip
"""Of vLLM's SamplingParams (0.32), those that make sense here. vLLM passes over a name that it does not know, so with a
misspelt `temperature` the policy would be sampled in another way than was asked for."""


def settled(sampling: Mapping[str, Any], defaults: Mapping[str, Any], prompt: int, window: int) -> dict[str, Any]:
    """The settings of a call after `prompt` tokens; `max_tokens` is at least 1 and never beyond the window.

    Raises TaskError for a setting that is unknown or wrong, ContextFull when no token fits.
    """
    settings = {**defaults, **sampling}
    ours = sorted(OURS & settings.keys())
    if ours:
        raise TaskError(f"sampling.{ours[0]} can't be set: one action is sampled, with its logprobs")
    unknown = sorted(settings.keys() - KNOWN)
    if unknown:
        raise TaskError(f"sampling.{unknown[0]} is no setting (there are: {', '.join(sorted(KNOWN))})")
    for name, least in (("max_tokens", 1), ("min_tokens", 0)):
        asked = settings.get(name, least)
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < least:
            raise TaskError(f"sampling.{name} is {asked!r}, wanted a whole number of at least {least}")
    free = window - prompt
    if free < 1:
        raise ContextFull(f"the prompt has {prompt} tokens, the window {window}: none is left")
    settings["max_tokens"] = min(settings["max_tokens"], free)
    return settings
