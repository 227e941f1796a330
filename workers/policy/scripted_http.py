"""The scripted policy server's HTTP face: the part of vLLM's interface that the line uses, with its shapes and errors.

Tests change what goes wrong while it runs: `POST /scripted/faults {"spec": "500:0.1"}` for single calls,
`POST /scripted/state {"hang": true}` for the server as a whole (see scripted_faults).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import orjson
from aiohttp import web

from pipeline import chat
from workers.policy import scripted_chat, scripted_shapes as shapes
from workers.policy.scripted_control import Control
from workers.policy.scripted_engine import Engine, EngineDead, Outcome
from workers.policy.scripted_faults import STATES, Faults
from workers.policy.scripted_shapes import Refused, as_json, body_of, error
from workers.policy.scripted_speech import NAME

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Face(Control):
    """Routes over one engine. `window`: most tokens of prompt and completion. `dev_mode`: it has a control side;
    `scale_out`: it has the token path; `only_chat`: it has chat completions alone. `on_exit` ends the process, where it
    is one of its own."""

    def __init__(
        self,
        engine: Engine,
        *,
        model: str,
        window: int,
        faults: Faults,
        dev_mode: bool = True,
        scale_out: bool = True,
        only_chat: bool = False,
        on_exit: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(engine)
        self.model, self.window, self.faults = model, window, faults
        self.dev_mode, self.scale_out, self.only_chat = dev_mode, scale_out, only_chat
        self.size = engine.speech.rendering.tokenizer.size
        self._on_exit = on_exit
        self._thawed = asyncio.Event()
        self._thawed.set()
        self._number = 0

    def app(self) -> web.Application:
        app = web.Application(client_max_size=256 * 1024 * 1024, middlewares=[self._whole])
        app.on_response_prepare.append(_sign)
        scaled, dev = self._scaled, self._dev
        app.add_routes([
            web.post("/inference/v1/generate", scaled(self.generate)),
            web.post("/inference/v1/abort_requests", scaled(self.abort_scaled_out)),
            web.post("/v1/completions", self.completions),
            web.post(chat.PATH, self.chat),
            web.post("/abort_requests", dev(self.abort)),
            web.post("/pause", dev(self.pause)),
            web.post("/resume", dev(self.resume)),
            web.get("/is_paused", dev(self.is_paused)),
            web.post("/collective_rpc", dev(self.collective_rpc)),
            web.post("/update_weight_version", dev(self.relabel)),
            web.get("/weight_info", dev(self.weight_info)),
            web.post("/reset_prefix_cache", dev(self.reset_prefix_cache)),
            web.get("/health", self.health),
            web.get("/load", self.load),
            web.get("/metrics", self.metrics),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
            web.post("/scripted/faults", self.set_faults),
            web.post("/scripted/state", self.set_state),
        ])  # fmt: skip
        return app

    @web.middleware
    async def _whole(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """What the server as a whole does: it hangs, all but its health; refusals become vLLM's errors."""
        free = request.path == "/health" or request.path.startswith("/scripted/")
        if self.only_chat and request.path != chat.PATH and not request.path.startswith("/scripted/"):
            return web.Response(status=404, body=b'{"detail":"Not Found"}', content_type="application/json")
        if not free:
            await self._thawed.wait()
        try:
            answer = await handler(request)
        except (orjson.JSONDecodeError, Refused) as refusal:
            answer = error(getattr(refusal, "status", 400), str(refusal))
        except EngineDead as death:
            answer = error(500, str(death))
        if not free:
            await self._thawed.wait()
        return answer

    def _scaled(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if not self.scale_out:
                why = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out"
                raise Refused(why, 403)
            return await handler(request)

        return guarded

    def _dev(self, handler: Handler) -> Handler:
        async def guarded(request: web.Request) -> web.StreamResponse:
            if not self.dev_mode:
                return web.Response(status=404, body=b'{"detail":"Not Found"}', content_type="application/json")
            return await handler(request)

        return guarded

    # -- calls -------------------------------------------------------------------------------------------------------

    async def generate(self, request: web.Request) -> web.StreamResponse:
        asked = await body_of(request)
        ids, params = shapes.checked(
            asked, "token_ids", asked.get("sampling_params") or {}, self.model, self.size, self.window
        )
        call_id, priority = self._call_id(request, asked), _priority(asked)
        del asked
        full = f"generate-tokens-{call_id}"
        fault, broken = await self._fault(request, call_id)
        if broken is not None:
            return broken
        outcome = await self._run(full, call_id, ids, params, priority)
        return as_json(shapes.generate_answer(full, self.model, len(ids), outcome, fault))

    async def completions(self, request: web.Request) -> web.StreamResponse:
        asked = await body_of(request)
        ids, params = shapes.checked(
            asked, "prompt", shapes.completion_params(asked), self.model, self.size, self.window
        )
        call_id = self._call_id(request, asked)
        _, broken = await self._fault(request, call_id)
        if broken is not None:
            return broken
        outcome = await self._run(f"cmpl-{call_id}-0", call_id, ids, params, _priority(asked))
        text = self.engine.speech.rendering.text(outcome.ids)
        return as_json(shapes.completion_answer(f"cmpl-{call_id}", self.model, ids, outcome, text, asked))

    async def chat(self, request: web.Request) -> web.StreamResponse:
        asked = await body_of(request)
        call_id = self._call_id(request, asked)
        fault, broken = await self._fault(request, call_id)
        if broken is not None:
            return broken
        asked["prompt"] = scripted_chat.prompt(self.engine.speech.rendering, asked, fault)
        ids, params = shapes.checked(
            asked, "prompt", shapes.completion_params(asked), self.model, self.size, self.window
        )
        outcome = await self._run(f"chatcmpl-{call_id}", call_id, ids, params, _priority(asked))
        text = self.engine.speech.rendering.text(outcome.ids)
        return as_json(scripted_chat.answer(f"chatcmpl-{call_id}", self.model, ids, outcome, text, asked, fault))

    async def _run(self, full: str, call_id: str, ids: Any, params: dict[str, Any], priority: int) -> Outcome:
        if full in self.engine.calls:
            raise Refused(f"Request id {call_id} already running")
        free = self.window - len(ids)
        wanted = min(params.get("max_tokens") or free, free)
        stop = params.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        return await self.engine.run(full, ids, wanted, params.get("seed", call_id), priority, stop)

    def _call_id(self, request: web.Request, asked: dict[str, Any]) -> str:
        self._number += 1
        return request.headers.get("X-Request-Id") or str(asked.get("request_id") or f"scripted-{self._number}")

    async def _fault(self, request: web.Request, call_id: str) -> tuple[str, web.StreamResponse | None]:
        """This call's fault, and the answer where it breaks the call as a whole."""
        fault = self.faults.draw(self.engine.speech.lot("fault", call_id))
        if fault in ("500", "503", "429"):
            return fault, error(int(fault), f"a fault was asked for ({NAME})")
        if fault == "hang":
            await asyncio.Event().wait()
        if fault in ("drop", "refuse") and request.transport is not None:
            request.transport.abort()
            return fault, web.Response(status=500)
        if fault == "not_json":
            return fault, web.Response(body=b"<html>gateway</html>", content_type="application/json")
        return fault, None

    # -- looks -------------------------------------------------------------------------------------------------------

    async def health(self, request: web.Request) -> web.Response:
        return web.Response(status=503 if self.engine.dead else 200)

    async def load(self, request: web.Request) -> web.Response:
        return as_json({"server_load": len(self.engine.calls)})

    async def models(self, request: web.Request) -> web.Response:
        root = self.engine.speech.rendering.tokenizer.name_or_path
        about = {"id": self.model, "object": "model", "owned_by": NAME, "root": root, "max_model_len": self.window}
        return as_json({"object": "list", "data": [about]})

    async def version(self, request: web.Request) -> web.Response:
        return as_json({"version": NAME})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(text=shapes.metrics(self.engine, self.model))

    # -- for tests ---------------------------------------------------------------------------------------------------

    async def set_faults(self, request: web.Request) -> web.Response:
        try:
            self.faults.set(str((await body_of(request)).get("spec", "")))
        except ValueError as wrong:
            raise Refused(str(wrong)) from None
        return as_json({"spec": self.faults.spec})

    async def set_state(self, request: web.Request) -> web.Response:
        asked = await body_of(request)
        unknown = sorted(asked.keys() - {*STATES, "exit"})
        if unknown:
            raise Refused(f"state {unknown[0]!r} is unknown (known: {', '.join(STATES)}, exit)")
        if "hang" in asked:
            self.hang(bool(asked["hang"]))
        if "dead" in asked:
            self.engine.die(bool(asked["dead"]))
        if asked.get("exit"):
            self._on_exit()
        return as_json({"hang": self.engine.hangs, "dead": self.engine.dead})

    def hang(self, yes: bool = True) -> None:
        """Nothing but `/health` is answered any more, calls in flight included; False: all goes on."""
        self.engine.hang(yes)
        if yes:
            self._thawed.clear()
        else:
            self._thawed.set()


def _priority(asked: dict[str, Any]) -> int:
    priority = asked.get("priority", 0)
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise Refused("priority must be an integer")
    return priority


async def _sign(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = f"rollout-line {NAME}"
