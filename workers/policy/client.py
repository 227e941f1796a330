"""Client of vLLM's `/inference/v1/generate`: token in, token out, nothing re-tokenised, every reply checked.

One `VllmPolicy` serves a worker process and its one HTTP session; `bound` gives each attempt its own view. The prompt
is streamed out in slices, so that a thousand open calls hold no JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import logging
import random
import re
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import aiohttp
import numpy as np
import orjson

from pipeline.config import Config
from pipeline.errors import ConfigError, ContextFull, PolicyError, TaskError
from pipeline.interfaces import Completion
from workers.policy import reply
from workers.policy.rendering import Rendering
from workers.policy.tokenizer import Tokenizer

log = logging.getLogger(__name__)

SLICE = 4096
"""Ids encoded at a time: about 0.05 ms and 25 KB."""

SAY_EVERY = 30.0
"""Seconds between two log lines that say that no backend answers."""

ABORT_SECONDS = 2.0
HEALTH_SECONDS = 5.0
CONNECT_SECONDS = 10.0
BACKOFF = (0.1, 2.0)
"""First and longest pause between two tries, in seconds."""

_OURS = frozenset({"n", "logprobs", "prompt_logprobs", "stream", "detokenize", "output_kind"})
"""Sampling settings that this client gives itself."""


class Clock(Protocol):
    """Counts an attempt's working time; it stands still inside `paused`."""

    def paused(self, reason: str) -> AbstractContextManager[Any]: ...


class VllmPolicy(Rendering):
    """The policy behind `url`. `context`: tokens of prompt and completion together that the server takes.

    `policy_wait`: seconds a call waits for a usable backend. `request_timeout`: seconds one call may take. `defaults`:
    sampling settings where the task gives none. `version`: the weights' number where the server tells none.
    """

    def __init__(
        self,
        url: str,
        model: str,
        tokenizer: str | Tokenizer,
        renderer: str = "qwen3",
        *,
        context: int = 32_768,
        policy_wait: float = 900.0,
        request_timeout: float = 3600.0,
        defaults: dict[str, Any] | None = None,
        session: aiohttp.ClientSession | None = None,
        clock: Clock | None = None,
    ) -> None:
        super().__init__(tokenizer, renderer)
        self.url, self.model, self.context = url.rstrip("/"), model, context
        self.policy_wait, self.request_timeout = policy_wait, request_timeout
        self.defaults = {"max_tokens": 1024, **(defaults or {})}
        self.clock = clock
        self.name = ""
        self._calls = 0
        self._shared = _Shared(session)

    def bound(self, clock: Clock | None = None, name: str = "") -> VllmPolicy:
        """A view for one attempt, sharing session and tokenizer: `clock` is its own, `name` begins its request ids.

        `name` must be one attempt's alone (rollout id and attempt); without it the ids are random.
        """
        view = copy.copy(self)
        view.name = re.sub(r"[^A-Za-z0-9._-]", "-", name)[:100]
        view.clock, view._calls = clock, 0
        return view

    @property
    def version(self) -> int:
        """Number of the weights, used only where the server tells none."""
        return self._shared.version

    @version.setter
    def version(self, value: int) -> None:
        self._shared.version = value

    async def close(self) -> None:
        """End what is open. The policy can't be used afterwards."""
        await self._shared.close()

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        """Sample one action after `prompt_ids`.

        Raises ContextFull when no token fits, TaskError for a request that can never work, PolicyError (retryable) when
        no backend answered within `policy_wait`, the server failed or its reply does not fit together.
        """
        settings = self._settings(sampling, len(prompt_ids))
        failed_at: float | None = None
        tries = 0
        while True:
            try:
                return await self._call(prompt_ids, settings)
            except reply.Unavailable as error:
                failed_at = time.monotonic() if failed_at is None else failed_at
                await self._wait(failed_at, tries, str(error))
                tries += 1

    def _settings(self, sampling: dict[str, Any], prompt_size: int) -> dict[str, Any]:
        """What this one call asks for; the token budget is what the window still holds."""
        settings = {**self.defaults, **sampling}
        wrong = sorted(_OURS & settings.keys())
        if wrong:
            raise TaskError(f"sampling.{wrong[0]} can't be set: one action is sampled, with its logprobs")
        asked = settings["max_tokens"]
        if isinstance(asked, bool) or not isinstance(asked, int) or asked < 1:
            raise TaskError(f"sampling.max_tokens is {asked!r}, wanted a whole number of at least 1")
        free = self.context - prompt_size
        if free < 1:
            raise ContextFull(f"the prompt has {prompt_size} tokens, the window {self.context}: none is left")
        settings["max_tokens"] = min(asked, free)
        return settings

    def _request_id(self) -> str:
        self._calls += 1
        return f"{self.name}-{self._calls}" if self.name else uuid.uuid4().hex

    async def _call(self, prompt_ids: Sequence[int], settings: dict[str, Any]) -> Completion:
        dispatched = await self._version_at_dispatch()
        request_id = self._request_id()
        started, began = time.time(), time.monotonic()
        try:
            status, body = await self._post(request_id, prompt_ids, settings)
        except asyncio.CancelledError:
            self._shared.spawn(self._abort(request_id))
            raise
        if status != 200:
            raise reply.failure(status, body, self.url)
        answer = reply.read(body, request_id)
        self._shared.labels = answer.versions is not None
        count = len(answer.ids)
        versions = answer.versions if answer.versions is not None else [(dispatched, 0, count)] if count else []
        return Completion(
            ids=answer.ids,
            logprobs=answer.logprobs,
            versions=versions,
            finish_reason=answer.finish_reason,
            sampling={key: value for key, value in settings.items() if key != "stop_token_ids"},
            started=started,
            seconds=time.monotonic() - began,
        )

    async def _post(self, request_id: str, ids: Sequence[int], settings: dict[str, Any]) -> tuple[int, bytes]:
        """Status and body of the HTTP call. Raises reply.Unavailable and PolicyError; a cancel closes the socket."""
        params = {"stop_token_ids": list(self.stop_ids), **settings, "logprobs": 0}
        about = {"request_id": request_id, "model": self.model, "stream": False, "sampling_params": params}
        headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
        url = f"{self.url}/inference/v1/generate"
        timeout = aiohttp.ClientTimeout(total=self.request_timeout, sock_connect=CONNECT_SECONDS)
        try:
            session = self._shared.open()
            async with session.post(url, data=_body(about, ids), headers=headers, timeout=timeout) as answer:
                return answer.status, await answer.read()
        except aiohttp.InvalidURL as error:
            raise PolicyError(f"policy.url is {self.url!r}, no URL: {error}") from None
        except aiohttp.ConnectionTimeoutError as error:
            raise reply.Unavailable(f"no connection within {CONNECT_SECONDS} s") from error
        except TimeoutError as error:
            raise PolicyError(
                f"request {request_id}: no reply within {self.request_timeout} s (request_timeout)"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise reply.Unavailable(f"{type(error).__name__}: {error}") from error

    async def _version_at_dispatch(self) -> int:
        """The version before the call goes out, for servers whose replies do not label spans."""
        if self._shared.labels:
            return self.version
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            async with self._shared.open().get(f"{self.url}/weight_info", timeout=timeout) as answer:
                if answer.status == 200:
                    self.version = reply.version_number(orjson.loads(await answer.read())["weight_version"])
        except (aiohttp.ClientError, OSError, ValueError, KeyError, TypeError, TimeoutError) as error:
            log.debug("the server tells no weight version (%r): %d is taken", error, self.version)
        return self.version

    async def _wait(self, failed_at: float, tries: int, why: str) -> None:
        """Return when a backend looks usable again; raise PolicyError when `policy_wait` is over."""
        self._shared.say_unreachable(self.url, why, self.policy_wait)
        pause = self.clock.paused(f"no backend at {self.url}") if self.clock else contextlib.nullcontext()
        with pause:
            while True:
                left = self.policy_wait - (time.monotonic() - failed_at)
                if left <= 0:
                    raise PolicyError(f"no usable backend at {self.url} for {self.policy_wait} s (policy_wait): {why}")
                first, longest = BACKOFF
                await asyncio.sleep(min(left, longest, first * 2 ** min(tries, 10)) * random.uniform(0.5, 1.0))
                if await self._healthy():
                    return
                tries += 1

    async def _healthy(self) -> bool:
        try:
            timeout = aiohttp.ClientTimeout(total=HEALTH_SECONDS)
            async with self._shared.open().get(f"{self.url}/health", timeout=timeout) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def _abort(self, request_id: str) -> None:
        """Tell the engine too: best effort, since the closed socket already ends the request."""
        body = {"request_ids": [f"generate-tokens-{request_id}"]}
        try:
            timeout = aiohttp.ClientTimeout(total=ABORT_SECONDS)
            url = f"{self.url}/inference/v1/abort_requests"
            async with self._shared.open().post(url, json=body, timeout=timeout) as answer:
                await answer.read()
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            log.debug("request %s: the abort was not answered: %r", request_id, error)


def open_policy(config: Config) -> VllmPolicy:
    """The policy that the config names. Raises ConfigError when its tokenizer or renderer can't be had."""
    if not config.policy.tokenizer:
        raise ConfigError("policy.tokenizer is empty: give the folder of the served model's tokenizer.json")
    chosen = config.policy
    return VllmPolicy(
        chosen.url,
        chosen.model,
        str(config.path_of(chosen.tokenizer)),
        chosen.renderer,
        context=chosen.context,
        policy_wait=config.limits.policy_wait,
        request_timeout=chosen.request_timeout,
        defaults={"max_tokens": chosen.max_tokens, "temperature": chosen.temperature, "top_p": chosen.top_p},
    )


class _Shared:
    """What all views of one policy hold together: the session, the weights' version, calls on their way out."""

    def __init__(self, session: aiohttp.ClientSession | None) -> None:
        self._session = session
        self._owned = session is None
        self._tasks: set[asyncio.Task[None]] = set()
        self._said = float("-inf")
        self.version = 0
        self.labels = False

    def open(self) -> aiohttp.ClientSession:
        """The process's session, made in the running loop; proxies of the environment are ignored."""
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=20)
            self._session = aiohttp.ClientSession(connector=connector, trust_env=False, auto_decompress=True)
        return self._session

    def say_unreachable(self, url: str, why: str, patience: float) -> None:
        """Log that calls wait: once for all of them, and again every SAY_EVERY seconds."""
        if time.monotonic() - self._said >= SAY_EVERY:
            self._said = time.monotonic()
            log.warning(
                "no usable backend at %s: %s; calls wait for one, %g s at most (limits.policy_wait)", url, why, patience
            )

    def spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=ABORT_SECONDS)
        if self._session is not None and self._owned:
            await self._session.close()


async def _body(about: dict[str, Any], ids: Sequence[int]) -> AsyncIterator[bytes]:
    """The request as JSON, `token_ids` encoded slice by slice while the socket takes them."""
    yield orjson.dumps(about)[:-1] + b',"token_ids":['
    for start in range(0, len(ids), SLICE):
        part = np.array(ids[start : start + SLICE], dtype=np.uint32)
        text = orjson.dumps(part, option=orjson.OPT_SERIALIZE_NUMPY)[1:-1]
        yield text if start == 0 else b"," + text
    yield b"]}"
