"""What a policy server answered, checked: ids, logprobs and counts must fit together, or the reply is refused whole."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import orjson

from pipeline import chat
from pipeline.engine import UNTOLD, version_number
from pipeline.engine_calls import error_text
from pipeline.errors import ContextFull, PolicyReplyError, TaskError

REASONS = ("stop", "length", "abort")
NO_EVIDENCE = -9999.0
"""vLLM's stand-in for a probability of zero: such a token was not sampled from the distribution it reports."""

MOST_LOGPROB = 1e-3
"""A logprob above zero, but for rounding, is none."""

ID_END = 2**32

Case = Literal["refused", "lost", "dead", "hang", "overload", "error", "misfit", "behind"]
"""refused: no connection. lost: the connection broke before the reply was there. dead: the engine behind the server is
gone. hang: no sign of life. overload: it sends us away for now. error: any other fault of its own. misfit: it lacks the
path or the model. behind: its weights are older than those in force."""

_OVERLONG = re.compile(r"maximum (context|model) length|max_model_len|longer than the maximum", re.IGNORECASE)
"""In a 400: the prompt does not fit the server's window."""


class Repeat(Exception):
    """A server gave this call no reply that counts: another one may. `case` tells the faults apart (see Case).

    `version`: of its weights, where it is behind.
    """

    def __init__(self, case: Case, why: str, version: int | None = None) -> None:
        super().__init__(why)
        self.case: Case = case
        self.version = version


class Reply(NamedTuple):
    """One sampled action. `versions` is None where the server does not label spans; `untold`: some of them bear the
    label of a server to which nobody has told a version; `prompt`: what a server read that renders messages itself."""

    ids: list[int]
    logprobs: list[float]
    versions: list[tuple[int, int, int]] | None
    finish_reason: str
    untold: bool = False
    prompt: list[int] | None = None


def read(
    body: bytes,
    request_id: str,
    endpoint: str = "generate",
    prompt: Sequence[int] = (),
    most: float = math.inf,
    kept: int = 0,
) -> Reply:
    """The checked reply of `/inference/v1/generate`, `/v1/completions` or chat completions (pipeline.chat).

    `prompt`: what was sent; a server that repeats it must have read the same. A chat must repeat it, and must have read
    the first `kept` ids of it: what it rendered behind them is its own. `most`: tokens that were asked for at most.
    Raises PolicyReplyError, which names what does not fit.
    """
    try:
        answer = orjson.loads(body)
        choice = answer["choices"][0]
        reason = choice["finish_reason"]
        claimed = (answer.get("usage") or {}).get("completion_tokens")
        if endpoint == "chat":
            echoed, ids, evidence = chat.told(answer)
            reason = "stop" if reason == "tool_calls" else reason
        else:
            echoed, ids = choice.get("prompt_token_ids"), choice["token_ids"]
            evidence = _evidence(choice["logprobs"], endpoint)
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise PolicyReplyError(
            f"request {request_id}: the reply is not the one of the {endpoint} endpoint: {error!r}"
        ) from None
    if not isinstance(ids, list):
        raise PolicyReplyError(f"request {request_id}: token_ids is a {type(ids).__name__}, wanted a list")
    wrong = [item for item in ids if type(item) is not int or not 0 <= item < ID_END]
    if wrong:
        raise PolicyReplyError(f"request {request_id}: {str(wrong[0])[:80]} is no token id")
    if len(ids) > most:
        raise PolicyReplyError(f"request {request_id}: {len(ids)} tokens came, {most} were asked for at most")
    if endpoint == "chat":
        _check_prompt(request_id, echoed, prompt, kept)
        if reason == "abort":
            raise PolicyReplyError(f"request {request_id}: it was aborted; chat completions can't go on inside a reply")
    elif echoed is not None and len(prompt) and echoed != list(prompt):
        raise PolicyReplyError(
            f"request {request_id}: {len(prompt)} prompt ids were sent, the server read {len(echoed)} others"
        )
    if evidence is None:
        raise PolicyReplyError(f"request {request_id}: {len(ids)} ids came with 0 logprobs")
    if claimed is not None and claimed != len(ids):
        raise PolicyReplyError(
            f"request {request_id}: the server counts {claimed} completion tokens but sent {len(ids)} ids"
        )
    if len(evidence) != len(ids):
        raise PolicyReplyError(f"request {request_id}: {len(ids)} ids came with {len(evidence)} logprobs")
    if reason not in REASONS:
        raise PolicyReplyError(f"request {request_id}: finish_reason is {reason!r}, wanted one of {', '.join(REASONS)}")
    if not ids and reason != "abort":
        raise PolicyReplyError(f"request {request_id}: no token came, and finish_reason is {reason!r}")
    versions = _versions(choice, len(ids), request_id)
    untold = versions is not None and any(str(span["version"]) == UNTOLD for span in choice["weight_versions"])
    other = echoed if endpoint == "chat" and echoed != list(prompt) else None
    return Reply(ids, _logprobs(ids, evidence, request_id), versions, reason, untold, other)


def _check_prompt(request_id: str, read: Any, sent: Sequence[int], kept: int) -> None:
    """What was read and sampled before must be in the prompt as it is, id by id."""
    if not isinstance(read, list) or not read or any(type(item) is not int or not 0 <= item < ID_END for item in read):
        raise PolicyReplyError(f"request {request_id}: the server does not say which prompt ids it read")
    wanted = list(sent[:kept])
    if read[:kept] != wanted:
        at = next((at for at, (a, b) in enumerate(zip(read, wanted, strict=False)) if a != b), min(len(read), kept))
        raise PolicyReplyError(
            f"request {request_id}: the server did not keep the {kept} ids of the turns before: at {at} it read "
            f"{read[at : at + 8]}, the trajectory has {wanted[at : at + 8]}; it tokenises anew what was sampled"
        )


def _evidence(logprobs: Any, endpoint: str) -> list[Any] | None:
    """(token, logprob) for each sampled token, as the endpoint tells them; None where there are none."""
    if not isinstance(logprobs, dict):
        return None
    if endpoint == "generate":
        content = logprobs.get("content")
        if not isinstance(content, list):
            return None
        return [(item.get("token_id"), item.get("logprob")) if isinstance(item, dict) else item for item in content]
    tokens, values = logprobs.get("tokens"), logprobs.get("token_logprobs")
    if not isinstance(tokens, list) or not isinstance(values, list):
        return None
    named = [token[9:] if str(token).startswith("token_id:") else token for token in tokens]
    return list(zip(named, values, strict=False))


def _logprobs(ids: Sequence[int], evidence: Sequence[Any], request_id: str) -> list[float]:
    values: list[float] = []
    for at, (token, item) in enumerate(zip(ids, evidence, strict=True)):
        try:
            about, value = item
            value = float(value)
        except (TypeError, ValueError):
            raise PolicyReplyError(f"request {request_id}: logprob {at} of {len(ids)} is {str(item)[:80]}") from None
        if about is not None and about != token and str(about) != str(token):
            raise PolicyReplyError(f"request {request_id}: logprob {at} is of token {about}, the id there is {token}")
        if not NO_EVIDENCE < value <= MOST_LOGPROB:
            raise PolicyReplyError(
                f"request {request_id}: logprob {at} of {len(ids)} is {value}, no finite evidence of a chance"
            )
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
        if type(start) is not int or type(end) is not int or start != at or end <= start:
            raise PolicyReplyError(
                f"request {request_id}: weight version {version} covers {start}:{end}, expected from {at}"
            )
        at = end
    if at != count:
        raise PolicyReplyError(f"request {request_id}: weight versions cover {at} of {count} ids")
    return runs


def failure(status: int, body: bytes) -> Exception:
    """What a status other than 200 means for the call: Repeat, ContextFull or TaskError."""
    message = error_text(body)
    said = f"HTTP {status}: {message}"
    if status in (429, 503):
        return Repeat("overload", said)
    if status in (502, 504) or (status == 500 and ("EngineCore" in message or "EngineDead" in message)):
        return Repeat("dead", said)
    if status in (400, 413, 422):
        if _OVERLONG.search(message):
            return ContextFull(f"the server says: {message}")
        return TaskError(f"the policy server refuses this request for good: {message}")
    if status == 403:
        return Repeat("misfit", f"{said} (start vLLM with --enable-scale-out)")
    return Repeat("misfit" if status in (401, 404, 405) else "error", said)
