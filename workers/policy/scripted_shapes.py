"""What the scripted policy server takes and answers: vLLM's shapes, its checks and its errors, on both token paths."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson
from aiohttp import web

from workers.policy.sampling import KNOWN
from workers.policy.scripted_engine import Engine, Outcome
from workers.policy.scripted_speech import NAME

COMPLETION_TOKENS = 16
"""What `/v1/completions` gives where nobody says how many."""


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def checked(
    asked: Any, field: str, params: Any, model: str, size: int, window: int
) -> tuple[npt.NDArray[np.uint32], dict[str, Any]]:
    """The prompt, which stands in `field`, and its sampling settings. Raises Refused with a sentence like vLLM's.

    `size`: of the vocabulary; `window`: most tokens of prompt and completion.
    """
    if asked.get("model") not in (None, model):
        raise Refused(f"The model `{asked['model']}` does not exist.", 404)
    if asked.get("stream"):
        raise Refused(f"stream is not offered by this server ({NAME})")
    _check_params(params)
    listed = asked.get(field)
    if not isinstance(listed, list) or not listed:
        raise Refused(f"{field} must be a list with at least one id")
    try:
        ids = np.array(listed, dtype=np.int64)
    except (TypeError, ValueError, OverflowError):
        raise Refused(f"{field} must be integers") from None
    worst = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
    if not 0 <= worst < size:
        raise Refused(f"Token id {worst} is out of vocabulary")
    if len(ids) >= window:
        raise Refused(
            f"This model's maximum context length is {window} tokens. However, your request has {len(ids)} "
            "input tokens. Please reduce the length of the input messages."
        )
    return ids.astype(np.uint32), dict(params)


def _check_params(params: Any) -> None:
    if not isinstance(params, dict):
        raise Refused("sampling_params must be an object")
    wanted = params.get("max_tokens", 1)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise Refused(f"max_tokens must be at least 1, got {wanted}.")
    heat = params.get("temperature", 1.0)
    if not isinstance(heat, int | float) or heat < 0:
        raise Refused(f"temperature must be non-negative, got {heat}.")
    if params.get("n", 1) != 1:
        raise Refused(f"n is 1 on this server ({NAME})")


def completion_params(asked: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling settings in a body of `/v1/completions`, where they stand beside everything else."""
    return {"max_tokens": COMPLETION_TOKENS, **{key: asked[key] for key in asked.keys() & KNOWN}}


def usage(prompt_size: int, outcome: Outcome) -> dict[str, Any]:
    count = len(outcome.ids)
    return {
        "prompt_tokens": prompt_size, "total_tokens": prompt_size + count, "completion_tokens": count,
        "prompt_tokens_details": {
            "cached_tokens": outcome.cached, "created_cache_tokens": None, "multimodal_tokens": None,
        },
        "completion_tokens_details": None,
    }  # fmt: skip


def generate_answer(call_id: str, model: str, prompt_size: int, outcome: Outcome, fault: str) -> dict[str, Any]:
    """The reply of `/inference/v1/generate`, spoilt as `fault` says."""
    ids = outcome.ids
    content: list[dict[str, Any]] | None = [
        {"token_id": token, "logprob": value, "rank": 1,
         "top_logprobs": [{"token_id": token, "logprob": value, "rank": 1}]}
        for token, value in zip(ids, outcome.logprobs, strict=True)
    ]  # fmt: skip
    versions: Any = [{"version": label, "start": start, "end": end} for label, start, end in outcome.versions]
    if fault == "no_logprobs":
        content = None
    elif fault in ("short_logprobs", "short_ids") and content:
        content = content[:-1]
    elif fault == "nan_logprob" and content:
        content[-1]["logprob"] = -9999.0
    if fault == "no_versions":
        versions = None
    return {
        "request_id": call_id, "model": model, "created": int(time.time()), "usage": usage(prompt_size, outcome),
        "prompt_logprobs": None, "prompt_token_id_logprobs": None, "prompt_token_ids": None, "mm_placeholders": None,
        "metrics": None, "kv_transfer_params": None, "ec_transfer_params": None, "output_mode": "tokens",
        "choices": [{"index": 0, "finish_reason": outcome.reason, "stop_reason": None,
                     "token_ids": ids[:-1] if fault == "short_ids" else ids,
                     "routed_experts": None, "sampling_mask": None, "weight_versions": versions,
                     "logprobs": None if content is None else {"content": content}}],
    }  # fmt: skip


def completion_answer(
    call_id: str, model: str, prompt: npt.NDArray[np.uint32], outcome: Outcome, text: str, asked: Mapping[str, Any]
) -> dict[str, Any]:
    """The reply of `/v1/completions`: token ids where they were asked for, and no versions."""
    named = [f"token_id:{token}" for token in outcome.ids]
    logprobs = {
        "text_offset": [0] * len(named), "token_logprobs": outcome.logprobs, "tokens": named,
        "top_logprobs": [{name: value} for name, value in zip(named, outcome.logprobs, strict=True)],
    }  # fmt: skip
    told = bool(asked.get("return_token_ids"))
    choice = {
        "index": 0, "text": text, "logprobs": logprobs if asked.get("logprobs") is not None else None,
        "finish_reason": outcome.reason, "stop_reason": None, "token_ids": outcome.ids if told else None,
        "prompt_logprobs": None, "prompt_token_ids": prompt.tolist() if told else None, "routed_experts": None,
    }  # fmt: skip
    return {
        "id": call_id, "object": "text_completion", "created": int(time.time()), "model": model, "choices": [choice],
        "service_tier": None, "system_fingerprint": None, "usage": usage(len(prompt), outcome),
        "kv_transfer_params": None, "metrics": None,
    }  # fmt: skip


def as_json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def error(status: int, message: str) -> web.Response:
    """An error as vLLM's token paths answer it."""
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def metrics(engine: Engine, model: str) -> str:
    """Prometheus text with vLLM's names, for what this server has."""
    label = f'engine="0",model_name="{model}"'
    values = {
        "num_requests_running": engine.running,
        "num_requests_waiting": len(engine.calls) - engine.running,
        "kv_cache_usage_perc": 0,
        "prompt_tokens_total": engine.counts["prompt"],
        "prompt_tokens_cached_total": engine.counts["cached"],
        "generation_tokens_total": engine.counts["generated"],
        "num_preemptions_total": 0,
    }
    lines = [f"vllm:{name}{{{label}}} {value}" for name, value in values.items()]
    for reason in ("stop", "length", "abort"):
        count = engine.counts[f"finished {reason}"]
        lines.append(f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {count}')
    return "\n".join([f"# {NAME}", *lines, ""])


async def body_of(request: web.Request) -> dict[str, Any]:
    """The JSON object that was sent, {} for an empty body. Raises Refused, and JSONDecodeError for what is no JSON."""
    data = await request.read()
    parsed = orjson.loads(data) if data else {}
    if not isinstance(parsed, dict):
        raise Refused("the body is no JSON object")
    return parsed
