"""The policy as an attempt sees it: token in, token out, nothing re-tokenised, every reply checked.

One `VllmPolicy` serves a worker process, over one pool of servers and one HTTP session; `bound` gives each attempt its
own view. A call that a server did not answer is repeated on another one; a slow call is not.
"""

from __future__ import annotations

import asyncio
import copy
import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

import aiohttp

from pipeline.backends import Backends
from pipeline.config import TRAINED, Config
from pipeline.errors import PolicyReplyError
from pipeline.interfaces import Completion, Message, Parsed
from pipeline.queue import Queue
from workers.policy import families, reply
from workers.policy.backend import Call, Clock, Server
from workers.policy.fleet import Patience
from workers.policy.pool import MOST_ERRORS, Pool
from workers.policy.rendering import Rendering
from workers.policy.reply import Repeat
from workers.policy.sampling import settled
from workers.policy.spoken import Spoken
from workers.policy.tokenizer import Tokenizer
from workers.policy.tokens import Tokens
from workers.policy.versions import Versions

MOST_TOKENS = 1024
"""Sampled tokens of one call where nobody says how many."""

_UNFIT = re.compile(r"[^A-Za-z0-9._-]")


class VllmPolicy:
    """The policy behind a pool, or behind one `url` (several: comma-separated) without a registry.

    `tokenizer`: folder or a loaded one; "" takes the one that a server's registration names (see `ready`). `context`:
    tokens of prompt and completion that a rollout may have. `policy_wait`: seconds a call waits for a usable server.
    `request_timeout`: seconds one call may take. `defaults`: sampling settings where the task gives none.
    """

    def __init__(
        self,
        url: str | Pool,
        model: str,
        tokenizer: str | Tokenizer,
        renderer: str = families.AUTO,
        *,
        context: int = 32_768,
        policy_wait: float = 900.0,
        request_timeout: float = 3600.0,
        defaults: dict[str, Any] | None = None,
        session: aiohttp.ClientSession | None = None,
        clock: Clock | None = None,
    ) -> None:
        patience = Patience(wait=policy_wait, request=request_timeout)
        self.pool = Pool(urls_of(url), model=model, patience=patience, session=session) if isinstance(url, str) else url
        self.model = model
        self.defaults = {"max_tokens": MOST_TOKENS, **(defaults or {})}
        self.clock = clock
        self.name = ""
        self.priority: int | None = None
        self._context = context
        self._tokens = Tokens(tokenizer, renderer, self.pool.fleet)
        self._versions = Versions(self.pool.fleet)
        self._calls = 0
        self._sticky, self._cached = "", 0
        self._spoken = Spoken()

    def bound(self, clock: Clock | None = None, name: str = "", priority: int | None = None) -> VllmPolicy:
        """A view for one attempt: `clock` is its own, `name` begins its request ids, `priority` goes to the server.

        `name` must be one attempt's alone (rollout id and attempt); without it the ids are random. A lower `priority`
        goes first. A view stays with one server while that is nearly as good as the best: it has the prefix.
        """
        view = copy.copy(self)
        view.name = _UNFIT.sub("-", name)[:100]
        view.clock, view.priority, view._calls = clock, priority, 0
        view._sticky, view._cached = "", 0
        view._spoken = Spoken()
        return view

    async def close(self) -> None:
        """End what is open. The policy can't be used afterwards."""
        await self.pool.close()

    @property
    def tokenizer_folder(self) -> str:
        """Where the tokenizer was read from; "" as long as it is not known."""
        return self._tokens.folder

    # -- tokens ------------------------------------------------------------------------------------------------------

    async def ready(self) -> None:
        """Return when the tokenizer is known (the configuration's, else that of a server), and a server's window.

        Waits as a call does, and raises PolicyError as it does.
        """
        self.pool.start()
        if self._tokens.rendering is None or not self._tokens.asked:
            await self._tokens.wait(self.clock)

    @property
    def rendering(self) -> Rendering:
        """The token side. Raises PolicyError before `ready`, where the configuration names no tokenizer."""
        return self._tokens.known()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.rendering.tokenizer

    @property
    def context(self) -> int:
        """Tokens of prompt and completion together: what the configuration allows, and what the widest server takes."""
        windows = [server.window for server in self.pool.fleet.servers.values()]
        return min(self._context, max(windows)) if windows and all(windows) else self._context

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """See Rendering.render."""
        ids = self.rendering.render(messages, tools)
        if self.pool.fleet.chats:
            self._spoken.note(ids, *self.rendering.plain(messages, tools))
        return ids

    def parse(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """See Rendering.parse."""
        return self.rendering.parse(ids, prompt_ids, tools)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        before: Sequence[Message] = (),
    ) -> list[int] | None:
        """See Rendering.bridge."""
        ids = self.rendering.bridge(prompt_ids, completion_ids, new, tools, before)
        if ids is not None and before and self.pool.fleet.chats:
            said = self.rendering.plain([*before, *new], tools)
            self._spoken.note(ids, *said, len(prompt_ids) + len(completion_ids))
        return ids

    def text(self, ids: Sequence[int]) -> str:
        """See Rendering.text."""
        return self.rendering.text(ids)

    # -- calls -------------------------------------------------------------------------------------------------------

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        """Sample one action after `prompt_ids`.

        Raises ContextFull when no token fits, TaskError for a request that can never work, PolicyError (retryable) when
        no server was usable within `policy_wait`, two of them failed with it, or a reply does not fit together.
        """
        if self._tokens.rendering is None:
            await self.ready()
        settings = settled(sampling, self.defaults, len(prompt_ids), self._context)
        call = Call(
            prompt=len(prompt_ids), most=settings["max_tokens"], clock=self.clock, sticky=self._sticky,
            cached=min(self._cached, len(prompt_ids)), said=self._spoken.of(prompt_ids),
        )  # fmt: skip
        while True:
            server = await self.pool.admit(call)
            try:
                done = await self._ask(call, server, prompt_ids, settings)
            except Repeat as fault:
                self.pool.failed(server, call, fault)
                continue
            except PolicyReplyError as error:
                if call.errors + 1 >= MOST_ERRORS or not self.pool.has_other(server, call):
                    raise
                self.pool.failed(server, call, Repeat("error", str(error)))
                continue
            self._sticky, self._cached = server.id, len(prompt_ids) + len(done.ids)
            return done

    async def _ask(self, call: Call, server: Server, prompt_ids: Sequence[int], settings: dict[str, Any]) -> Completion:
        """One HTTP call. Raises Repeat when another server may do it."""
        self._calls += 1
        request_id = f"{self.name}-{self._calls}" if self.name else uuid.uuid4().hex
        if server.window:
            settings = {**settings, "max_tokens": min(settings["max_tokens"], server.window - len(prompt_ids))}
        if settings.get("min_tokens", 0) > settings["max_tokens"]:  # less is left than the task wants at least
            settings = {**settings, "min_tokens": settings["max_tokens"]}
        params = {"stop_token_ids": list(self.rendering.stop_ids), **settings}
        sampled: int | None = None
        try:
            dispatched = await self._versions.at_dispatch(call, server)
            started, began = time.time(), time.monotonic()
            body = await server.ask(
                call, request_id, server.about.model or self.model, prompt_ids, params, self.priority,
                self.name or request_id, self.pool.fleet.patience.request,
            )  # fmt: skip
            seconds = time.monotonic() - began
            kept = call.said.kept if call.said is not None else 0
            answer = reply.read(body, request_id, server.endpoint, prompt_ids, settings["max_tokens"], kept)
            versions = await self._versions.spans(call, server, answer, dispatched)
            sampled = len(answer.ids)
            if answer.finish_reason != "abort":
                self.pool.fleet.lengths.add(sampled)
        except asyncio.CancelledError:
            self.pool.abort(server, request_id)
            raise
        finally:
            self.pool.done(server, call, sampled)
        self.pool.fleet.counts["prompt tokens"] += len(prompt_ids)
        self.pool.fleet.counts["sampled tokens"] += sampled
        return Completion(
            ids=answer.ids,
            logprobs=answer.logprobs,
            versions=versions,
            finish_reason=answer.finish_reason,
            sampling=settings,
            started=started,
            seconds=seconds,
            prompt_ids=answer.prompt,
            endpoint="chat" if server.endpoint == "chat" else "",
        )


def urls_of(text: str) -> list[str]:
    """The URLs in policy.url."""
    return [url.strip() for url in text.split(",") if url.strip()]


def open_policy(config: Config, queue: Queue | None = None, worker: str = "", name: str = TRAINED) -> VllmPolicy:
    """The policy of this `name`; `queue` and `worker`: servers come from the registry too, under this worker's name.

    Raises ConfigError when its tokenizer or renderer can't be had, or policy.url is no URL.
    """
    chosen, limits = config.policy_of(name), config.limits
    backends = Backends(Queue(queue.redis, config), name) if queue is not None else None
    patience = Patience(
        wait=limits.policy_wait, request=chosen.request_timeout, probe_every=chosen.probe_every,
        probe_timeout=chosen.probe_timeout, lease=chosen.backend_lease,
    )  # fmt: skip
    pool = Pool(
        urls_of(chosen.url), model=chosen.model, patience=patience, backends=backends, worker=worker, policy=name
    )
    return VllmPolicy(
        pool,
        chosen.model,
        str(config.path_of(chosen.tokenizer)) if chosen.tokenizer else "",
        chosen.renderer,
        context=chosen.context,
        defaults={"max_tokens": chosen.max_tokens, "temperature": chosen.temperature, "top_p": chosen.top_p},
    )
