"""Which chat format a model speaks: by its name, or by what its folder says.

The proof is the folder's own chat template: a renderer of the library is taken for a model that was not named only if
it renders OPENINGS and HISTORIES as that template does. Models of one family differ in small things
(how reasoning is opened, whether old reasoning stays, how a call is spelled), and a wrong one trains on a format that
nobody serves. Where none fits, the generic renderer plays the template itself.
"""

from __future__ import annotations

import copy
import difflib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.errors import ConfigError, LineError
from workers.policy import chat_template
from workers.policy.chat_template import ChatTemplate, Templated
from workers.policy.tokenizer import Tokenizer

log = logging.getLogger(__name__)

AUTO, GENERIC = "auto", "default"

_TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": 'Look "it" up.',
        "parameters": {
            "type": "object",
            "properties": {
                "word": {"type": "string", "description": "The word."},
                "most": {"type": "number", "description": "Lines at most."},
                "exact": {"type": "boolean"},
                "also": {"type": "array", "items": {"type": "string"}},
            },
            "required": ["word"],
        },
    },
}
_CALL = {
    "id": "call_9_0",
    "type": "function",
    "function": {"name": "look_up", "arguments": {"word": "né <b>", "most": 3, "exact": True, "also": ["a", {"b": 1}]}},
}
_SYSTEM = {"role": "system", "content": "You are terse."}
_USER = {"role": "user", "content": "What is 2 + 2?"}
_SAID = {"role": "assistant", "content": "It is 4."}
_CALLED = {"role": "assistant", "content": "I look.", "tool_calls": [_CALL]}
_HEARD = {"role": "tool", "tool_call_id": "call_9_0", "name": "look_up", "content": "one\ntwo"}
_THOUGHT = {"role": "assistant", "content": "It is 4.", "reasoning_content": "Two and two."}

Probe = tuple[list[dict[str, Any]], list[dict[str, Any]] | None]

OPENINGS: tuple[Probe, ...] = (([_USER], None), ([_SYSTEM, _USER], None), ([_SYSTEM, _USER], [_TOOL]))
"""Conversations as they begin, each with its tools."""

HISTORIES: tuple[Probe, ...] = (
    ([_USER, _SAID, _USER], None),
    ([_USER, _CALLED, _HEARD], [_TOOL]),
    ([_SYSTEM, _USER, {**_CALLED, "content": ""}, _HEARD, _SAID, _USER], [_TOOL]),
    ([_USER, {**_CALLED, "reasoning_content": "I wonder."}, _HEARD], [_TOOL]),
    ([_USER, _THOUGHT, _USER], None),
)
"""Conversations under way: what is rendered where a sequence begins anew."""

_NEEDS = {"gpt-oss": "<|channel|>"}
"""Renderers that load more than the tokenizer when they are made: not tried without this control token."""

_PLAYED: dict[str, Any] = {"date_string": "26 Jul 2024"}
"""What the library's Llama 3 renderer takes for today."""


class Candidate(NamedTuple):
    """A renderer of the library, as it is for one model ("" = for any)."""

    renderer: str
    model: str


Made = tuple[Candidate, Any]


def choose(tokenizer: Tokenizer, wanted: str = AUTO) -> Any:
    """The renderer for a tokenizer. `wanted`: "auto", a renderer's name, or a model's such as "Qwen/Qwen3-8B".

    Raises ConfigError: a name that there is not, one that does not fit the tokenizer, or nothing to decide by.
    """
    place = _folder(tokenizer)
    template = chat_template.read(place) if place else None
    if wanted == GENERIC:
        return _generic(tokenizer, template)
    hints = _names(place) if place else []
    candidates = list(_candidates(wanted, hints))
    made = [(candidate, renderer) for candidate in candidates if (renderer := _made(tokenizer, candidate))]
    proven = _proven(tokenizer, template, made, hints)
    if wanted != AUTO:
        return _as_wanted(tokenizer, wanted, candidates, made, proven, template)
    if template is None:
        return _guessed(tokenizer, made)
    if not proven:
        return _generic(tokenizer, template)
    log.info("policy.renderer: %s: it renders as the chat template in %s does", proven[0][0].renderer, place)
    return proven[0][1]


def _proven(
    tokenizer: Tokenizer, template: ChatTemplate | None, made: Sequence[Made], hints: Sequence[str]
) -> list[Made]:
    """Those that render as the template does. A model that the folder names may differ in HISTORIES.

    There the library's authors differ from some templates on purpose, so that what was sampled is rendered as it was.
    """
    if template is None:
        return []
    played = Templated(tokenizer, template)
    whole = [one for one in made if fits(one[1], played)]
    return whole or [one for one in made if one[0].model in hints and fits(one[1], played, OPENINGS)]


def names() -> list[str]:
    """Every renderer's name."""
    from renderers.base import MODEL_RENDERER_MAP

    return [AUTO, GENERIC, *sorted(set(MODEL_RENDERER_MAP.values()))]


def fits(renderer: Any, tokenizer: Templated, probes: Sequence[Probe] = (*OPENINGS, *HISTORIES)) -> bool:
    """Whether a renderer gives the text and the control tokens that the folder's template gives, in every probe.

    Ids may differ inside a text: renderers encode it in pieces. A conversation that both refuse says nothing; one that
    only one of them takes says that they differ.
    """
    for messages, tools in probes:
        theirs: list[int] | None
        try:
            theirs = tokenizer.apply_chat_template(messages, tools=tools, add_generation_prompt=True, **_PLAYED)
        except LineError:
            theirs = None
        try:
            ours = list(renderer.render_ids(_spelled(messages), tools=tools, add_generation_prompt=True))
        except (ValueError, TypeError, KeyError, AttributeError, IndexError, AssertionError, RuntimeError):
            ours = None
        if _seen(tokenizer, ours) != _seen(tokenizer, theirs):
            return False
    return True


def _seen(tokenizer: Tokenizer, ids: list[int] | None) -> Any:
    return ids and (tokenizer.decode(ids), [token for token in ids if token in tokenizer.control])


def _spelled(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """With the arguments of calls as JSON text, which is how `Rendering` hands them on; templates want the map."""
    spelled = copy.deepcopy(messages)
    for call in (call for message in spelled for call in message.get("tool_calls", ())):
        call["function"]["arguments"] = json.dumps(call["function"]["arguments"], ensure_ascii=False)
    return spelled


def _as_wanted(
    tokenizer: Tokenizer,
    wanted: str,
    candidates: Sequence[Candidate],
    made: Sequence[Made],
    proven: Sequence[Made],
    template: ChatTemplate | None,
) -> Any:
    """The renderer that was asked for; the log says so if the model's folder contradicts it."""
    if not made:
        _make(tokenizer, candidates[0])  # raises, and says what is missing
    if template is not None and not proven:
        log.warning(
            "policy.renderer is %r, but the chat template in %s renders differently: is this the format that the model "
            "speaks? (%r compares, %r plays that template)", wanted, template.place, AUTO, GENERIC,
        )  # fmt: skip
    return (proven or made)[0][1]


def _guessed(tokenizer: Tokenizer, made: Sequence[Made]) -> Any:
    """A folder without a template contradicts nothing: the first renderer whose control tokens it has."""
    if not made:
        raise ConfigError(
            f"policy.renderer: {tokenizer.name_or_path or 'the tokenizer'} has neither a chat template nor the control "
            f"tokens of a known family: add its chat_template.jinja, or name one of {', '.join(names())}"
        )
    candidate, renderer = made[0]
    log.info(
        "policy.renderer: %s has no chat template; %s is taken, whose control tokens it has (name another if that is "
        "wrong)", tokenizer.name_or_path or "the tokenizer", candidate.renderer,
    )  # fmt: skip
    return renderer


def _generic(tokenizer: Tokenizer, template: ChatTemplate | None) -> Any:
    from workers.policy.generic import GenericRenderer

    place = _folder(tokenizer)
    if template is None or place is None:
        raise ConfigError(
            f"policy.renderer: {tokenizer.name_or_path or 'the tokenizer'} has no chat template to play: add its "
            f"chat_template.jinja, or name one of {', '.join(names())}"
        )
    renderer = GenericRenderer(Templated(tokenizer, template), place)
    calls = f"tool calls are read as {renderer.calls}" if renderer.calls else "tool calls are NOT read"
    log.warning(
        "policy.renderer: no renderer of the library does what the chat template in %s does, so that template is "
        "played. Its price: a conversation is rendered anew each turn, and goes on in its sequence only where that "
        "repeats what was sampled to the letter; elsewhere a turn begins a sequence of its own, and the trainer pays "
        "for the whole prefix again; %s", place, calls,
    )  # fmt: skip
    return renderer


def _candidates(wanted: str, hints: list[str]) -> Iterator[Candidate]:
    """The library's renderers, one for each model that it knows: those that the folder names come first."""
    from renderers.base import MODEL_RENDERER_MAP

    if wanted in MODEL_RENDERER_MAP:
        yield Candidate(MODEL_RENDERER_MAP[wanted], wanted)
        return
    check(wanted)
    hinted = [Candidate(MODEL_RENDERER_MAP[model], model) for model in hints]
    plain = [Candidate(renderer, "") for renderer in dict.fromkeys(MODEL_RENDERER_MAP.values())]
    others = [Candidate(renderer, model) for model, renderer in MODEL_RENDERER_MAP.items() if model not in hints]
    yield from (one for one in (*hinted, *plain, *others) if wanted in (AUTO, one.renderer))


def check(wanted: str) -> None:
    """Raises ConfigError where policy.renderer names nothing that is known."""
    from renderers.base import MODEL_RENDERER_MAP

    if wanted not in MODEL_RENDERER_MAP and wanted not in names():
        close = difflib.get_close_matches(wanted, [*names(), *MODEL_RENDERER_MAP], 3, 0.5)
        perhaps = f" (did you mean {' or '.join(close)}?)" if close else ""
        raise ConfigError(
            f"policy.renderer: {wanted!r} is no renderer and no model that is known{perhaps}; there are: "
            f"{', '.join(names())}, or a model's name such as Qwen/Qwen3-8B"
        )


def _make(tokenizer: Tokenizer, candidate: Candidate) -> Any:
    """A renderer of the library; some look at the model's name, so it is told. Raises ConfigError."""
    from renderers import create_renderer
    from renderers.configs import config_from_name

    needed = _NEEDS.get(candidate.renderer)
    if needed and tokenizer.convert_tokens_to_ids(needed) is None:
        raise ConfigError(f"policy.renderer: {candidate.renderer!r} needs {needed}, which the tokenizer has not")
    named = copy.copy(tokenizer)
    named.name_or_path = candidate.model or tokenizer.name_or_path
    try:
        return create_renderer(named, config_from_name(candidate.renderer))
    except (AssertionError, ValueError, TypeError, KeyError, AttributeError, RuntimeError, ImportError) as error:
        why = (str(error) or type(error).__name__).splitlines()[0][:200]
        raise ConfigError(
            f"policy.renderer: {candidate.renderer!r} does not fit the tokenizer in {tokenizer.name_or_path}: {why}"
        ) from error


def _made(tokenizer: Tokenizer, candidate: Candidate) -> Any | None:
    try:
        return _make(tokenizer, candidate)
    except ConfigError:
        return None


def _folder(tokenizer: Tokenizer) -> Path | None:
    if not tokenizer.name_or_path:
        return None
    place = Path(tokenizer.name_or_path)
    return place if place.is_dir() else place.parent


def _names(folder: Path) -> list[str]:
    """Known models that the folder names: in its files, or in its own path (a plain copy, or a hub's cache)."""
    from renderers.base import MODEL_RENDERER_MAP

    said = {
        str(chat_template.settings(folder / file).get(key, ""))
        for file, key in (("config.json", "_name_or_path"), ("tokenizer_config.json", "name_or_path"))
    }
    parts = [part.removeprefix("models--").replace("--", "/") for part in folder.resolve().parts]
    words = {name.rpartition("/")[2].lower() for name in [*said, *parts] if name}
    return [model for model in MODEL_RENDERER_MAP if model.rpartition("/")[2].lower() in words]
