"""The scripted policy server answers as vLLM does: same status, same fields, same types, for all that the line asks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import aiohttp
import orjson
import pytest

from pipeline import chat
from pipeline.engine import PROMPT as PROBE
from tests.vllm.servers import MODEL, MODELS, WINDOW, Served
from workers.policy import scripted
from workers.policy.backend import FIRST
from workers.policy.scripted import Options

PROMPT = [1, 4093, 198, 12, 34, 56]
SAME = MODELS / "smollm2"
"""The weights that the server has already."""

GENERATE, COMPLETIONS = "/inference/v1/generate", "/v1/completions"

UNREAD = frozenset({"param", "created", "parent", "permission", "system_fingerprint", "ec_transfer_params"})
"""Fields that nothing in the line reads, and the scripted server may leave out."""


class Asked(NamedTuple):
    """One request, the same to both servers; `body` None is a GET."""

    path: str
    body: Any = None
    headers: dict[str, str] | None = None


def generate(*, ids: Any = PROMPT, headers: dict[str, str] | None = None, model: str = MODEL, **params: Any) -> Asked:
    sampling = {"max_tokens": 4, "temperature": 1.0, "logprobs": 0, **params}
    body = {"request_id": "r-1", "model": model, "stream": False, "token_ids": ids, "sampling_params": sampling}
    return Asked(GENERATE, body, headers)


def complete(**about: Any) -> Asked:
    asked = {"model": MODEL, "prompt": PROMPT, "max_tokens": 4, "temperature": 1.0, "logprobs": 0}
    return Asked(COMPLETIONS, {**asked, "return_token_ids": True, "return_tokens_as_token_ids": True, **about})


def chatted(**about: Any) -> Asked:
    asked = chat.asked([{"role": "user", "content": "hi"}], (), (), {"max_tokens": 4, "temperature": 1.0, "top_p": 1.0})
    return Asked(chat.PATH, {"model": MODEL, **asked, **about})


REQUESTS: dict[str, Asked] = {
    "generate": generate(),
    "generate with a priority": Asked(GENERATE, {**generate().body, "priority": -3}),
    "the priority of a probe": Asked(GENERATE, {**generate(ids=PROBE).body, "priority": FIRST}),
    "generate until a stop token": generate(stop_token_ids=[2], max_tokens=2),
    "id in the header": generate(headers={"X-Request-Id": "h-1", "X-Session-ID": "s-1"}),
    "no ids": generate(ids=[]),
    "an id out of the vocabulary": generate(ids=[10_000_000]),
    "more than the window": generate(ids=[10] * (WINDOW + 10)),
    "all of the window": generate(ids=[10] * WINDOW),
    "no tokens wanted": generate(max_tokens=0),
    "negative temperature": generate(temperature=-1.0),
    "ids that are text": generate(ids=["a"]),
    "another model": generate(model="another"),
    "completions": complete(),
    "completions, more than the window": complete(prompt=[10] * (WINDOW + 10)),
    "completions, another model": complete(model="another"),
    "chat": chatted(),
    "chat, another model": chatted(model="another"),
    "chat, more than the window": chatted(messages=[{"role": "user", "content": "ab " * 2 * WINDOW}]),
    "chat, no messages": chatted(messages=[]),
    "models": Asked("/v1/models"),
    "health": Asked("/health"),
    "load": Asked("/load"),
    "version": Asked("/version"),
    "weight info": Asked("/weight_info"),
    "paused": Asked("/is_paused"),
    "pause": Asked("/pause?mode=keep", {}),
    "resume": Asked("/resume", {}),
    "an unknown pause": Asked("/pause?mode=zzz", {}),
    "a version": Asked("/update_weight_version", {"new_version": "default"}),
    "no version": Asked("/update_weight_version", {}),
    "a fresh cache": Asked("/reset_prefix_cache?reset_running_requests=true", {}),
    "weights": Asked("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(SAME)}}),
    "abort": Asked("/abort_requests", {"request_ids": ["generate-tokens-x"]}),
    "abort, scaled out": Asked("/inference/v1/abort_requests", {"request_ids": ["generate-tokens-x"]}),
}  # fmt: skip


@pytest.fixture
async def fake() -> AsyncIterator[str]:
    """URL of a scripted server with the real one's tokenizer, name and window."""
    options = Options(tokenizer=str(SAME), model=MODEL, max_model_len=WINDOW)
    running = await scripted.start(options)
    yield running.url
    await running.stop()


async def answered(session: aiohttp.ClientSession, url: str, asked: Asked) -> tuple[int, Any]:
    """Status, and JSON or text."""
    method = "GET" if asked.body is None else "POST"
    async with session.request(method, url + asked.path, json=asked.body, headers=asked.headers) as reply:
        body = await reply.read()
    try:
        return reply.status, orjson.loads(body)
    except orjson.JSONDecodeError:
        return reply.status, body.decode()


def _named(value: dict[str, Any]) -> dict[str, Any]:
    """What the line may read; keys such as "token_id:517" without their number."""
    return {key.partition(":")[0]: item for key, item in value.items() if key not in UNREAD}


def differences(real: Any, fake: Any, at: str = "") -> list[str]:
    """Where two replies have other fields or types. Texts and numbers may differ; of lists the first items count."""
    if isinstance(real, dict) and isinstance(fake, dict):
        real, fake = _named(real), _named(fake)
        found = [f"{at}.{key} is missing" for key in real.keys() - fake.keys()]
        found += [f"{at}.{key} is none of vLLM's" for key in fake.keys() - real.keys()]
        return sorted(found) + [
            each for key in real.keys() & fake.keys() for each in differences(real[key], fake[key], f"{at}.{key}")
        ]
    if isinstance(real, list) and isinstance(fake, list):
        return differences(real[0], fake[0], f"{at}[0]") if real and fake else []
    kinds = [_kind(value) for value in (real, fake)]
    return [] if kinds[0] == kinds[1] else [f"{at} is {kinds[1]}, vLLM's {kinds[0]}"]


def _kind(value: Any) -> str:
    return "number" if isinstance(value, float | int) and not isinstance(value, bool) else type(value).__name__


async def test_replies_have_vllms_shape(smollm2: Served, fake: str) -> None:
    found = {}
    # A connection of its own for each request: vLLM closes one on which it failed.
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session:
        for name, asked in REQUESTS.items():
            (status, real), (fake_status, scripted_one) = await asyncio.gather(
                answered(session, smollm2.url, asked), answered(session, fake, asked)
            )
            wrong = differences(real, scripted_one)
            if status != fake_status:
                wrong.insert(0, f"status {fake_status}, vLLM's {status} {str(real)[:300]}")
            if wrong:
                found[name] = wrong
    assert not found, "\n".join(f"{name}: {'; '.join(wrong)}" for name, wrong in found.items())
