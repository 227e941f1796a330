"""What `rollout doctor` finds out about the policy: each server is asked for a token, the tokenizer is read."""

from __future__ import annotations

import asyncio
from pathlib import Path

from pipeline import server
from pipeline.backends import Backend, Backends, View, backend_id, state_of
from pipeline.config import Config
from pipeline.connection import connect
from pipeline.engine import Engine
from pipeline.engine_calls import EngineError
from pipeline.errors import LineError
from pipeline.queue import Queue
from workers.doctor import Finding

TIMEOUT = 5.0
START = "rollout serve MODEL, or rollout policy add URL, or set policy.url"


async def findings(config: Config) -> list[Finding]:
    """All findings about the policy; none of them changes anything. Takes TIMEOUT seconds at the most a server."""
    from workers.policy.client import urls_of

    view = await _registry(config)
    known = {backend.id: backend for backend in view.backends}
    for url in urls_of(config.policy.url):
        known.setdefault(backend_id(url), Backend(id=backend_id(url), url=url.rstrip("/")))
    if not known:
        return [Finding("policy", "warn", "no policy server is known: only handlers without a policy run", START)]
    asked = await asyncio.gather(*(_ask(config, backend, view) for backend in known.values()))
    return [*_tokenizer(config, list(known.values())), *(item for found in asked for item in found)]


async def _registry(config: Config) -> View:
    """What the line knows; nothing where there is no Redis (another check says so)."""
    config = server.located(config)
    if not config.redis.url:
        return View()
    client = connect(config)
    try:
        return await Backends(Queue(client, config)).view()
    except LineError:
        return View()
    finally:
        await client.aclose()


async def _ask(config: Config, backend: Backend, view: View) -> list[Finding]:
    state, why = state_of(backend, view.policy)
    async with Engine(backend.url, timeout=TIMEOUT) as engine:
        try:
            about = await engine.about(backend.model or config.policy.model)
            if state == "paused" or (about.dev_mode and await engine.is_paused()):
                return [Finding("policy", "warn", f"{backend.id} is paused: {why or 'somebody has paused it'}",
                                "the trainer resumes it, or rollout policy resume")]  # fmt: skip
            probe = await engine.probe(backend.model or config.policy.model, backend.endpoint)
        except EngineError as error:
            mend = "look at its log, start it, or correct policy.url"
            return [Finding("policy", "fail", f"{backend.id}: {error}", mend)]
    version = "" if probe.version is None else f", weights' version {probe.version}"
    found = [Finding("policy", "ok", f"{backend.id} generates, {probe.seconds * 1000:.0f} ms a token{version}")]
    if state not in ("ready", "paused"):
        found.append(Finding("policy", "warn", f"{backend.id} gets no calls, {state}: {why}", "rollout policy ls"))
    if probe.endpoint == "completions":
        text = f"{backend.id} has no /inference/v1/generate: the version of a reply is the one at dispatch"
        found.append(Finding("policy", "warn", text, "start vLLM with --enable-scale-out"))
    if probe.endpoint == "chat":
        text = f"{backend.id} takes messages: the version of a reply is the one at dispatch, its prefix is checked"
        found.append(Finding("policy", "ok", text))
    if not about.dev_mode and backend.kind == "vllm":
        found.append(Finding("policy", "warn", f"{backend.id} can't be paused or given weights by the line",
                             "start vLLM with VLLM_SERVER_DEV_MODE=1"))  # fmt: skip
    if 0 < about.window < config.policy.context:
        found.append(Finding("policy", "warn", f"{backend.id} takes {about.window} tokens, policy.context is "
                             f"{config.policy.context}", "its calls are bounded by its own window"))  # fmt: skip
    return found


def _tokenizer(config: Config, backends: list[Backend]) -> list[Finding]:
    """Whether text can be turned into tokens, and by which chat format."""
    from workers.policy.rendering import Rendering

    named = [config.path_of(config.policy.tokenizer)] if config.policy.tokenizer else []
    folder = next(iter([*named, *(Path(item.tokenizer) for item in backends if item.tokenizer)]), None)
    if folder is None:
        return [Finding("tokenizer", "warn", "none is known: no server names one", "set policy.tokenizer")]
    try:
        rendering = Rendering(str(folder), config.policy.renderer)
    except LineError as error:
        return [Finding("tokenizer", "fail", str(error), "correct policy.tokenizer or policy.renderer")]
    return [Finding("tokenizer", "ok", f"{folder}, chat format {rendering.renderer}")]
