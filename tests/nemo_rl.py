"""What NeMo RL makes of an answer to `/run`, with its assertion (nemo_rl/environments/nemo_gym.py at 00420a15)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

Call = tuple[list[int], list[int], list[float]]
"""(prompt ids that are new, generated ids, their logprobs)"""


def calls_of(output: Sequence[Mapping[str, Any]]) -> list[Call]:
    """The model calls in output items: each prompt begins with all tokens of the calls before."""
    seen: list[int] = []
    calls: list[Call] = []
    for item in output:
        generated = item.get("generation_token_ids")
        if not generated:
            continue
        prompt, logprobs = item["prompt_token_ids"], item["generation_log_probs"]
        assert prompt[: len(seen)] == seen, "non-contiguous messages"
        assert len(logprobs) == len(generated)
        calls.append((prompt[len(seen) :], generated, logprobs))
        seen = [*prompt, *generated]
    return calls
