"""What a policy server answered, checked: ids, logprobs and counts must fit together, or the reply is refused whole."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import orjson

from pipeline.errors import ContextFull, PolicyError, PolicyReplyError, TaskError

REASONS = ("stop", "length", "abort")
NO_EVIDENCE = -9999.0
"""vLLM's stand-in for a probability of zero: such a token was not sampled from the distribution it reports."""

_OVERLONG = re.compile(r"maximum (context|model) length|max_model_len|longer than the maximum", re.IGNORECASE)
_NUMBER = re.compile(r"(\d+)$")


class Unavailable(Exception):
    """No backend took the call: it may be repeated."""


class Reply(NamedTuple):
    """One sampled action. `versions` is None where the server does not label spans."""

    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, int]] | None
    finish_reason: str


def read(body: bytes, request_id: str) -> Reply:
    """The checked reply of `/inference/v1/generate`. Raises PolicyReplyError, which names what does not fit."""
    try:
        answer = orjson.loads(body)
        choice = answer["choices"][0]
        ids = choice["token_ids"]
        logprobs = choice["logprobs"]
        reason = choice["finish_reason"]
        claimed = (answer.get("usage") or {}).get("completion_tokens")
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise PolicyReplyError(
            f"request {request_id}: the reply is not the one of /inference/v1/generate: {error!r}"
        ) from None
    if not isinstance(ids, list):
        raise PolicyReplyError(f"request {request_id}: token_ids is a {type(ids).__name__}, wanted a list")
    content = (logprobs or {}).get("content") if isinstance(logprobs, dict | None) else None
    if content is None:
        raise PolicyReplyError(f"request {request_id}: {len(ids)} ids came with 0 logprobs")
    if claimed is not None and claimed != len(ids):
        raise PolicyReplyError(
            f"request {request_id}: the server counts {claimed} completion tokens but sent {len(ids)} ids"
        )
    if len(content) != len(ids):
        raise PolicyReplyError(f"request {request_id}: {len(ids)} ids came with {len(content)} logprobs")
    if reason not in REASONS:
        raise PolicyReplyError(f"request {request_id}: finish_reason is {reason!r}, wanted one of {', '.join(REASONS)}")
    return Reply(ids, _logprobs(ids, content, request_id), _versions(choice, len(ids), request_id), reason)


def _logprobs(ids: Sequence[int], content: Sequence[Any], request_id: str) -> list[float]:
    values: list[float] = []
    for at, (token, item) in enumerate(zip(ids, content, strict=True)):
        try:
            about, value = item.get("token_id", token), float(item["logprob"])
        except (AttributeError, KeyError, TypeError, ValueError):
            raise PolicyReplyError(f"request {request_id}: logprob {at} of {len(ids)} is {str(item)[:80]}") from None
        if about != token:
            raise PolicyReplyError(f"request {request_id}: logprob {at} is of token {about}, the id there is {token}")
        if not math.isfinite(value) or value <= NO_EVIDENCE:
            raise PolicyReplyError(f"request {request_id}: logprob {at} of {len(ids)} is {value}, no finite evidence")
        values.append(value)
    return values


def _versions(choice: dict[str, Any], count: int, request_id: str) -> list[tuple[int, int, int]] | None:
    spans = choice.get("weight_versions")
    if spans is None:
        return None
    try:
        runs = [(version_number(span["version"]), span["start"], span["end"]) for span in spans]
    except (KeyError, TypeError) as error:
        raise PolicyReplyError(f"request {request_id}: weight_versions can't be read: {error!r}") from None
    at = 0
    for version, start, end in runs:
        if start != at or end <= start:
            raise PolicyReplyError(
                f"request {request_id}: weight version {version} covers {start}:{end}, expected from {at}"
            )
        at = end
    if at != count:
        raise PolicyReplyError(f"request {request_id}: weight versions cover {at} of {count} ids")
    return runs


def version_number(label: Any) -> int:
    """The rising integer in an engine's label: "default" is 0, "step-12" and "12" are 12. Raises PolicyReplyError."""
    text = str(label)
    found = _NUMBER.search(text)
    if found:
        return int(found[1])
    if text == "default":
        return 0
    raise PolicyReplyError(f"weight version {text!r} ends in no number: give versions such as 12 or step-12")


def error_text(body: bytes) -> str:
    """The server's own sentence in an error reply, at most 500 characters."""
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body.decode("utf-8", "replace")[:500]
    found = parsed.get("error", parsed) if isinstance(parsed, dict) else parsed
    if isinstance(found, dict):
        found = found.get("message") or found.get("detail") or found
    return str(found)[:500]


def is_overlong(message: str) -> bool:
    """Whether a 400 says that the prompt does not fit the server's window."""
    return bool(_OVERLONG.search(message))


def failure(status: int, body: bytes, url: str) -> Exception:
    """The error that a status other than 200 means for the rollout."""
    message = error_text(body)
    if status in (429, 502, 503, 504):
        return Unavailable(f"HTTP {status}: {message}")
    if status in (400, 413, 422):
        if is_overlong(message):
            return ContextFull(f"the server says: {message}")
        return TaskError(f"the policy server refuses this request for good: {message}")
    if status == 403:
        return PolicyError(f"{url}: HTTP 403: {message} (start vLLM with --enable-scale-out)")
    return PolicyError(f"{url}: HTTP {status}: {message}")
