"""The scripted policy's HTTP face: the part of vLLM's interface that the line uses, with its shapes and its errors.

Faults are for tests: `500:0.1,hang:0.05,drop*2` means one call in ten answered with 500, one in twenty never, and the
next two cut off. They can be changed while it runs with `POST /scripted/faults`.
"""

from __future__ import annotations

import asyncio
import random
import time
from typing import Any

import numpy as np
import orjson
from aiohttp import web

from workers.policy.scripted_engine import MODES, Engine, Outcome
from workers.policy.scripted_speech import NAME

FAULTS = ("500", "503", "429", "hang", "drop", "refuse", "short_logprobs", "short_ids", "no_logprobs", "no_versions",
          "nan_logprob", "not_json")  # fmt: skip
KNOWN = frozenset({
    "max_tokens", "temperature", "top_p", "top_k", "min_p", "min_tokens", "logprobs", "stop_token_ids", "ignore_eos",
    "n", "seed", "structured_outputs", "repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias",
})  # fmt: skip


class Faults:
    """Which call meets which fault."""

    def __init__(self, spec: str = "") -> None:
        self.set(spec)

    def set(self, spec: str) -> None:
        """Raises ValueError for a name or a number that means nothing."""
        self.spec, self._chances, self._counts = spec, [], {}
        for item in filter(None, (part.strip() for part in spec.split(","))):
            name, mark, number = item.replace("*", ":*").partition(":")
            if name not in FAULTS:
                raise ValueError(f"fault {name!r} is unknown (known: {', '.join(FAULTS)})")
            if number.startswith("*"):
                self._counts[name] = int(number[1:])
            else:
                self._chances.append((name, float(number) if mark else 1.0))

    spec: str
    _chances: list[tuple[str, float]]
    _counts: dict[str, int]

    def draw(self, chance: random.Random) -> str:
        """The name of this call's fault, empty for none."""
        for name, left in self._counts.items():
            if left:
                self._counts[name] = left - 1
                return name
        return next((name for name, share in self._chances if chance.random() < share), "")


class Face:
    """Routes over one engine. `size` is the vocabulary's, `window` the most tokens of prompt and completion."""

    def __init__(self, engine: Engine, *, model: str, window: int, faults: Faults) -> None:
        self.engine, self.model, self.window, self.faults = engine, model, window, faults
        self.size = engine.speech.rendering.tokenizer.size
        self._number = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 * 1024 * 1024)
        app.on_response_prepare.append(_sign)
        app.add_routes([
            web.post("/inference/v1/generate", self.generate),
            web.post("/inference/v1/abort_requests", self.abort_scaled_out),
            web.post("/abort_requests", self.abort),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/update_weight_version", self.relabel),
            web.get("/weight_info", self.weight_info),
            web.get("/health", self.health),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
            web.post("/scripted/faults", self.set_faults),
        ])  # fmt: skip
        return app

    async def generate(self, request: web.Request) -> web.StreamResponse:
        self._number += 1
        try:
            asked = orjson.loads(await request.read())
            ids, params = self._checked(asked)
        except (orjson.JSONDecodeError, _Refused) as error:
            return _error(getattr(error, "status", 400), str(error))
        call_id = request.headers.get("X-Request-Id") or str(asked.get("request_id") or f"scripted-{self._number}")
        seed = params.get("seed", call_id)
        fault = self.faults.draw(self.engine.speech.chance(ids[:0], "fault", call_id))
        del asked
        broken = await self._broken(request, fault)
        if broken is not None:
            return broken
        full = f"generate-tokens-{call_id}"
        if full in self.engine.calls:
            return _error(400, f"Request id {call_id} already running")
        free = self.window - len(ids)
        wanted = params.get("max_tokens") or free
        outcome = await self.engine.run(full, ids, min(wanted, free), seed)
        return _json(self._answer(full, len(ids), outcome, fault))

    def _checked(self, asked: Any) -> tuple[np.ndarray[Any, np.dtype[np.uint32]], dict[str, Any]]:
        """The prompt and its sampling settings. Raises _Refused with the status and a sentence like vLLM's."""
        if not isinstance(asked, dict):
            raise _Refused("the body is no JSON object")
        if asked.get("model") not in (None, self.model):
            raise _Refused(f"The model `{asked['model']}` does not exist.", 404)
        if asked.get("stream"):
            raise _Refused(f"stream is not offered by this server ({NAME})")
        params = asked.get("sampling_params") or {}
        _check_params(params)
        listed = asked.get("token_ids")
        if not isinstance(listed, list) or not listed:
            raise _Refused("token_ids must be a list with at least one id")
        try:
            ids = np.array(listed, dtype=np.int64)
        except (TypeError, ValueError, OverflowError):
            raise _Refused("token_ids must be integers") from None
        worst = int(ids.max()) if int(ids.min()) >= 0 else int(ids.min())
        if not 0 <= worst < self.size:
            raise _Refused(f"Token id {worst} is out of vocabulary")
        if len(ids) >= self.window:
            raise _Refused(
                f"This model's maximum context length is {self.window} tokens. However, your request has {len(ids)} "
                "input tokens. Please reduce the length of the input messages."
            )
        return ids.astype(np.uint32), params

    async def _broken(self, request: web.Request, fault: str) -> web.StreamResponse | None:
        """The answer of a call that meets a fault of the server as a whole."""
        if fault in ("500", "503", "429"):
            return _error(int(fault), f"a fault was asked for ({NAME})")
        if fault == "hang":
            await asyncio.Event().wait()
        if fault in ("drop", "refuse") and request.transport is not None:
            request.transport.abort()
            return web.Response(status=500)
        if fault == "not_json":
            return web.Response(body=b"<html>gateway</html>", content_type="application/json")
        return None

    def _answer(self, full: str, prompt_size: int, outcome: Outcome, fault: str) -> dict[str, Any]:
        ids, logprobs = outcome.ids, list(outcome.logprobs)
        content: list[dict[str, Any]] | None = [
            {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
            for token, value in zip(ids, logprobs, strict=True)
        ]
        versions: Any = [{"version": label, "start": start, "end": end} for label, start, end in outcome.versions]
        if fault == "no_logprobs":
            content = None
        elif fault == "short_logprobs" and content:
            content = content[:-1]
        elif fault == "nan_logprob" and content:
            content[-1]["logprob"] = -9999.0
        if fault == "no_versions":
            versions = None
        sent = ids[:-1] if fault == "short_ids" else ids
        if fault == "short_ids" and content:
            content = content[:-1]
        return {
            "request_id": full, "model": self.model, "created": int(time.time()),
            "usage": {"prompt_tokens": prompt_size, "total_tokens": prompt_size + len(ids),
                      "completion_tokens": len(ids), "prompt_tokens_details": None},
            "prompt_logprobs": None, "prompt_token_ids": None, "kv_transfer_params": None, "output_mode": "tokens",
            "choices": [{"index": 0, "finish_reason": outcome.reason, "stop_reason": None, "token_ids": sent,
                         "routed_experts": None, "sampling_mask": None, "weight_versions": versions,
                         "logprobs": None if content is None else {"content": content}}],
        }  # fmt: skip

    async def abort(self, request: web.Request) -> web.Response:
        ids = await self._ids_of(request)
        self.engine.abort(ids)
        return _json({"status": "aborted", "aborted": len(ids)})

    async def abort_scaled_out(self, request: web.Request) -> web.Response:
        self.engine.abort(await self._ids_of(request))
        return web.Response()

    async def _ids_of(self, request: web.Request) -> list[str]:
        body = await _body(request)
        return list(map(str, body["request_ids"])) if "request_ids" in body else list(self.engine.calls)

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in MODES:
            return _error(400, f"mode {mode!r} is none of {', '.join(MODES)}")
        await self.engine.pause(mode)
        return _json({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.engine.resume()
        return _json({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return _json({"is_paused": self.engine.paused})

    async def relabel(self, request: web.Request) -> web.Response:
        label = (await _body(request)).get("new_version")
        if label is None:
            return _error(400, "new_version is missing")
        self.engine.relabel(str(label))
        return _json({"success": True, "new_version": str(label)})

    async def weight_info(self, request: web.Request) -> web.Response:
        return _json({"weight_version": self.engine.label})

    async def health(self, request: web.Request) -> web.Response:
        return web.Response()

    async def load(self, request: web.Request) -> web.Response:
        return _json({"server_load": len(self.engine.calls)})

    async def models(self, request: web.Request) -> web.Response:
        about = {"id": self.model, "object": "model", "owned_by": NAME, "max_model_len": self.window}
        return _json({"object": "list", "data": [about]})

    async def version(self, request: web.Request) -> web.Response:
        return _json({"version": NAME})

    async def set_faults(self, request: web.Request) -> web.Response:
        try:
            self.faults.set(str((await _body(request)).get("spec", "")))
        except ValueError as error:
            return _error(400, str(error))
        return _json({"spec": self.faults.spec})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=_metrics(self.engine, self.model))


class _Refused(Exception):
    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def _check_params(params: Any) -> None:
    if not isinstance(params, dict):
        raise _Refused("sampling_params must be an object")
    unknown = sorted(params.keys() - KNOWN)
    if unknown:
        raise _Refused(f"sampling_params has no field {unknown[0]!r}")
    wanted = params.get("max_tokens", 1)
    if isinstance(wanted, bool) or not isinstance(wanted, int) or wanted < 1:
        raise _Refused(f"max_tokens must be at least 1, got {wanted}.")
    heat = params.get("temperature", 1.0)
    if not isinstance(heat, int | float) or heat < 0:
        raise _Refused(f"temperature must be non-negative, got {heat}.")
    if params.get("n", 1) != 1:
        raise _Refused(f"n is 1 on this server ({NAME})")


async def _body(request: web.Request) -> dict[str, Any]:
    data = await request.read()
    parsed = orjson.loads(data) if data else {}
    return parsed if isinstance(parsed, dict) else {}


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = f"rollout-line {NAME}"


def _json(value: Any) -> web.Response:
    return web.Response(body=orjson.dumps(value), content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    kind = {400: "BadRequestError", 404: "NotFoundError"}.get(status, "InternalServerError")
    body = {"error": {"message": message, "type": kind, "param": None, "code": status}}
    return web.Response(status=status, body=orjson.dumps(body), content_type="application/json")


def _metrics(engine: Engine, model: str) -> str:
    """Prometheus text with vLLM's names, for what this server has."""
    label = f'engine="0",model_name="{model}"'
    values = {
        "num_requests_running": len(engine.calls),
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
        "prompt_tokens_total": engine.counts["prompt"],
        "generation_tokens_total": engine.counts["generated"],
        "num_preemptions_total": 0,
    }
    lines = [f"vllm:{name}{{{label}}} {value}" for name, value in values.items()]
    for reason in ("stop", "length", "abort"):
        count = engine.counts[f"finished {reason}"]
        lines.append(f'vllm:request_success_total{{{label},finished_reason="{reason}"}} {count}')
    return "\n".join([f"# {NAME}", *lines, ""])
