"""The scripted policy server's control side: what vLLM offers in its dev mode, and the abort of calls."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from workers.policy.scripted_engine import MODES, Engine
from workers.policy.scripted_shapes import Refused, as_json, body_of, error
from workers.policy.scripted_speech import NAME


class Control:
    """The handlers of the control paths, over one engine."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def abort(self, request: web.Request) -> web.Response:
        ids = await self._ids_of(request)
        self.engine.abort(ids)
        return as_json({"status": "aborted", "aborted": len(ids)})

    async def abort_scaled_out(self, request: web.Request) -> web.Response:
        self.engine.abort(await self._ids_of(request))
        return web.Response()

    async def _ids_of(self, request: web.Request) -> list[str]:
        body = await body_of(request)
        return list(map(str, body["request_ids"])) if "request_ids" in body else list(self.engine.calls)

    async def pause(self, request: web.Request) -> web.Response:
        mode = request.query.get("mode", "abort")
        if mode not in MODES:
            raise Refused(f"mode {mode!r} is none of {', '.join(MODES)}")
        await self.engine.pause(mode)
        return as_json({"status": "paused"})

    async def resume(self, request: web.Request) -> web.Response:
        self.engine.resume()
        return as_json({"status": "resumed"})

    async def is_paused(self, request: web.Request) -> web.Response:
        return as_json({"is_paused": self.engine.paused})

    async def collective_rpc(self, request: web.Request) -> web.Response:
        """`reload_weights` alone: the folder must be there; that it was given is remembered in `engine.loaded`."""
        body = await body_of(request)
        if body.get("method") != "reload_weights":
            return error(500, f"method {body.get('method')!r} is not offered by this server ({NAME})")
        path = str(body.get("kwargs", {}).get("weights_path", ""))
        if not Path(path).is_dir():
            return error(500, f"weights_path {path!r} is no folder")
        self.engine.loaded.append(path)
        return as_json({"results": [None]})

    async def relabel(self, request: web.Request) -> web.Response:
        label = (await body_of(request)).get("new_version")
        if label is None:
            raise Refused("new_version is missing")
        self.engine.relabel(str(label))
        return as_json({"success": True, "new_version": str(label)})

    async def weight_info(self, request: web.Request) -> web.Response:
        return as_json({"weight_version": self.engine.label})

    async def reset_prefix_cache(self, request: web.Request) -> web.Response:
        """Without `reset_running_requests=true` it fails while calls hold their prefixes, as vLLM's does."""
        free = not self.engine.calls or request.query.get("reset_running_requests") == "true"
        if free:
            self.engine.reset_cache()
        return as_json({"success": free})
