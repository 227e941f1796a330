"""One policy server's control side: what it is, its pause, its weights; and the probe that asks whether it generates.

vLLM's control paths (`/pause`, `/collective_rpc`, ...) exist only in its dev mode (`VLLM_SERVER_DEV_MODE=1`).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from pipeline import chat
from pipeline.engine_calls import EngineCalls, EngineError, error_text
from pipeline.errors import PolicyReplyError

LOAD_SECONDS = 600.0
"""For weights to be read from disk and loaded."""

PROMPT = (1,)
"""A probe's prompt: an id that every vocabulary has."""

PROGRESS = ("vllm:generation_tokens_total", "vllm:prompt_tokens_total")
QUEUED = ("vllm:num_requests_running", "vllm:num_requests_waiting")
NO_DEV_MODE = "it has no control side: start vLLM with VLLM_SERVER_DEV_MODE=1"

UNTOLD = "default"
"""The label of weights that nobody has named: those that a server started with."""

MOST_VERSION = 2**53
"""Redis compares versions as floats, which are exact up to here."""

_NUMBER = re.compile(r"([0-9]+)$")
_SAMPLE = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{.*\})? (\S+)", re.MULTILINE)


class About(NamedTuple):
    """What a server says of itself. `root`: where its weights and tokenizer came from; `window`: tokens of prompt and
    completion, 0 unknown; `version`: of its weights, None where it tells none; `dev_mode`: whether it has a control
    side."""

    model: str
    root: str
    window: int
    version: int | None
    dev_mode: bool


class Probe(NamedTuple):
    """One token was generated, on `endpoint` ("generate", "completions" or "chat"), within `seconds`.

    `version`: of the weights that sampled it; None where the server tells none."""

    endpoint: str
    version: int | None
    seconds: float


class Engine(EngineCalls):
    """The server at `url`: `async with Engine(url) as engine`, or `await engine.close()` (see EngineCalls).

    Each call raises EngineError.
    """

    async def about(self, model: str = "") -> About:
        """What it serves. Raises EngineError (misfit) where it lists models, and none is called `model`."""
        status, body = await self._send("GET", "/v1/models")
        listed = self._field(body, "data") if status == 200 else []
        if status not in (200, 404):
            raise self._failure(status, body, "/v1/models")
        found = [item for item in listed if isinstance(item, dict) and model in ("", item.get("id"))]
        if listed and not found:
            names = ", ".join(str(item.get("id")) for item in listed if isinstance(item, dict))
            raise EngineError("misfit", f"{self.url} serves no model called {model!r} (it serves: {names})")
        first: Mapping[str, Any] = found[0] if found else {}
        status, _ = await self._send("GET", "/is_paused")
        return About(
            model=str(first.get("id") or model),
            root=str(first.get("root") or ""),
            window=int(first.get("max_model_len") or 0),
            version=await self.version(),
            dev_mode=status == 200,
        )

    async def version(self) -> int | None:
        """Number of its weights by its own label; None where it tells none."""
        label = await self.label()
        return None if label is None else self._number(label)

    async def label(self) -> str | None:
        """Its own label of its weights, UNTOLD where nobody has told it any; None where it tells none."""
        status, body = await self._send("GET", "/weight_info")
        if status == 404:
            return None
        if status != 200:
            raise self._failure(status, body, "/weight_info")
        return str(self._field(body, "weight_version"))

    async def probe(self, model: str = "", endpoint: str = "", *, priority: int | None = None) -> Probe:
        """Generate one token. `endpoint`: "generate", "completions", "chat", or "" to find out which of the first two.

        `priority` is sent only where given: lower goes first on servers that schedule by priority.
        """
        about: dict[str, Any] = {"stream": False}
        if model:
            about["model"] = model
        if priority is not None:
            about["priority"] = priority
        if endpoint == "chat":
            return await self._probe_chat(about)
        if endpoint != "completions":
            try:
                return await self._probe_generate(about)
            except EngineError as error:
                if endpoint or error.fault != "misfit":
                    raise
                lacking = error
            try:
                return await self._probe_completions(about)
            except EngineError as error:
                if error.fault != "misfit":
                    raise
                raise EngineError("misfit", f"{lacking}; {error}") from None
        return await self._probe_completions(about)

    async def _probe_generate(self, about: Mapping[str, Any]) -> Probe:
        params = {"max_tokens": 1, "temperature": 1.0, "logprobs": 0}
        asked = {**about, "token_ids": PROMPT, "sampling_params": params}
        path, began = "/inference/v1/generate", time.monotonic()
        choice = self._choice(await self._ask(path, asked, lacking="start vLLM with --enable-scale-out"), path)
        seconds = time.monotonic() - began
        spans = choice.get("weight_versions")
        if not spans:  # a server that labels no spans, or a reply that was aborted before its first token
            return Probe("generate", await self.version(), seconds)
        try:
            return Probe("generate", self._number(spans[-1]["version"]), seconds)
        except (KeyError, TypeError, IndexError):
            raise EngineError("misfit", f"{self.url}{path}: weight_versions is {str(spans)[:80]}") from None

    async def _probe_completions(self, about: Mapping[str, Any]) -> Probe:
        asked = {**about, "prompt": PROMPT, "max_tokens": 1, "temperature": 1.0, "logprobs": 0}
        asked |= {"return_token_ids": True, "return_tokens_as_token_ids": True}
        path, began = "/v1/completions", time.monotonic()
        self._choice(await self._ask(path, asked, lacking="token ids can't be had from it"), path)
        return Probe("completions", await self.version(), time.monotonic() - began)

    async def _probe_chat(self, about: Mapping[str, Any]) -> Probe:
        began = time.monotonic()
        body = await self._ask(chat.PATH, {**about, **chat.probe()}, lacking="it has no chat completions")
        try:
            told = chat.told(json.loads(body))
        except (ValueError, KeyError, IndexError, TypeError, AttributeError):
            raise EngineError("misfit", f"{self.url}{chat.PATH} answers {error_text(body)[:100]}") from None
        if told.prompt is None or told.ids is None:
            raise EngineError("misfit", f"{self.url}{chat.PATH} does not say which ids it read and sampled")
        if told.prompt[: len(chat.PROBED)] != list(chat.PROBED):
            raise EngineError(
                "misfit",
                f"{self.url}{chat.PATH} takes no required_prefix_token_ids: it would tokenise anew what was sampled "
                "(NeMo RL's own server takes them, a plain vLLM with NeMo RL's prefix plugin; kind openai needs none)",
            )
        return Probe("chat", await self.version(), time.monotonic() - began)

    async def _ask(self, path: str, asked: Mapping[str, Any], lacking: str) -> bytes:
        status, body = await self._send("POST", path, asked)
        if status in (403, 404):
            raise EngineError("misfit", f"{self.url}{path}: HTTP {status}: {error_text(body)} ({lacking})")
        if status != 200:
            raise await self._judged(status, body, path)
        return body

    def _choice(self, body: bytes, path: str) -> dict[str, Any]:
        choices = self._field(body, "choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not isinstance(choice.get("token_ids"), list):
            raise EngineError("misfit", f"{self.url}{path} answers without token_ids: it is no token interface")
        return choice

    async def pause(self, mode: str = "keep", *, timeout: float | None = None) -> None:
        """Start no token any more: `keep` freezes what runs, `abort` ends it, `wait` returns when it is over."""
        await self._control("/pause", params={"mode": mode}, timeout=timeout)

    async def resume(self, *, timeout: float | None = None) -> None:
        """Go on; safe where it was not paused."""
        await self._control("/resume", timeout=timeout)

    async def is_paused(self) -> bool:
        status, body = await self._send("GET", "/is_paused")
        if status == 404:
            raise EngineError("misfit", f"{self.url}/is_paused: {NO_DEV_MODE}")
        if status != 200:
            raise self._failure(status, body, "/is_paused")
        return bool(self._field(body, "is_paused"))

    async def load(self, path: str, *, timeout: float = LOAD_SECONDS) -> None:
        """Load the weights in this folder, as the server's machine sees it. The label stays: see `relabel`."""
        asked = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        await self._control("/collective_rpc", asked, timeout=timeout)

    async def relabel(self, version: int, *, timeout: float | None = None) -> None:
        """Tokens sampled from now on are of this version."""
        await self._control("/update_weight_version", {"new_version": str(version)}, timeout=timeout)

    async def reset_cache(self, *, timeout: float | None = None) -> None:
        """Forget every computed prefix, those of running requests too: it belongs to the old weights."""
        path = "/reset_prefix_cache"
        body = await self._control(path, params={"reset_running_requests": "true"}, timeout=timeout)
        if self._field(body, "success") is False:
            raise EngineError("refused", f"{self.url}{path}: its prefix cache is in use and was not reset")

    async def generated(self) -> int:
        """Tokens that it has worked on since it started, prompts' and sampled ones: any progress moves this number."""
        return round(await self._metric(PROGRESS))

    async def queued(self) -> int:
        """Requests that it has now, running or waiting, whoever sent them."""
        return round(await self._metric(QUEUED))

    async def _metric(self, names: tuple[str, ...]) -> float:
        status, body = await self._send("GET", "/metrics")
        if status != 200:
            raise self._failure(status, body, "/metrics")
        samples = [(name, value) for name, value in _SAMPLE.findall(body.decode("utf-8", "replace")) if name in names]
        if not samples:
            raise EngineError("misfit", f"{self.url}/metrics has no {names[0]}")
        return sum(float(value) for _, value in samples)

    async def _control(
        self,
        path: str,
        asked: Mapping[str, Any] | None = None,
        *,
        params: Mapping[str, str] | None = None,
        timeout: float | None = None,
    ) -> bytes:
        status, body = await self._send("POST", path, asked, params=params, timeout=timeout)
        if status == 404:
            raise EngineError("misfit", f"{self.url}{path}: {NO_DEV_MODE}")
        if status != 200:
            raise await self._judged(status, body, path)
        return body

    def _number(self, label: Any) -> int:
        try:
            return version_number(label)
        except PolicyReplyError as error:
            raise EngineError("misfit", f"{self.url}: {error}") from None


def version_number(label: Any) -> int:
    """The rising integer in an engine's label: "default" is 0, "step-12" and "12" are 12. Raises PolicyReplyError."""
    text = str(label)
    found = _NUMBER.search(text)
    if found and len(found[1]) <= 16 and int(found[1]) <= MOST_VERSION:
        return int(found[1])
    if text == UNTOLD:
        return 0
    raise PolicyReplyError(
        f"weight version {text[:80]!r} ends in no number up to {MOST_VERSION}: give versions such as 12 or step-12"
    )
