"""The generic renderer: the model folder's own chat template for a family that `renderers` does not know.

It renders as the model's makers mean it. What it can't do is to go on behind sampled tokens by itself: that is left to
`rendering.Rendering`, which compares whole renderings. Tool calls are read where their form is one of those below.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from renderers import parsing
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer
from renderers.reasoning import prompt_ends_in_reasoning

from pipeline.errors import TaskError
from workers.policy.chat_template import Templated, settings

Reader = Callable[..., Any]

_REPLY = "A reply of nobody."


class GenericRenderer(DefaultRenderer):  # type: ignore[misc]
    """A renderer over `tokenizer.apply_chat_template`. `calls` names the form of its tool calls; "" = none is read."""

    def __init__(self, tokenizer: Templated, folder: Path) -> None:
        super().__init__(tokenizer, DefaultRendererConfig())
        self._ends = _ends(tokenizer, folder)
        self.calls, self._reader = _reader(tokenizer)

    @property
    def supports_tools(self) -> bool:
        return self._reader is not None

    def get_stop_token_ids(self) -> list[int]:
        return list(self._ends)

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> Any:
        if self._reader is None:
            return super().parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)
        stops = set(self._ends)
        thinks = prompt_ends_in_reasoning(self._tokenizer, prompt_ids, stop_ids=stops)
        return self._reader(self._tokenizer, token_ids, stops, thinks, tools)


def _ends(tokenizer: Templated, folder: Path) -> list[int]:
    """Ids that end a turn: what the template puts behind a reply, and what the model's own files call its end."""
    found: list[Any] = []
    try:
        asked = [{"role": "user", "content": "x"}, {"role": "assistant", "content": _REPLY}]
        behind = tokenizer.encode(tokenizer.template.render(asked).rpartition(_REPLY)[2])
        found.extend([token for token in behind if token in tokenizer.control][:1])
    except TaskError:  # a template that takes no such conversation: the files alone say it
        pass
    for name in ("generation_config.json", "config.json"):
        ends = settings(folder / name).get("eos_token_id")
        found.extend(ends if isinstance(ends, list) else [] if ends is None else [ends])
    named = tokenizer.template.special.get("eos_token")
    found.append(tokenizer.convert_tokens_to_ids(named) if named else tokenizer.eos_token_id)
    return [token for token in dict.fromkeys(found) if isinstance(token, int)]


def _reader(tokenizer: Templated) -> tuple[str, Reader | None]:
    """The library's parser for the form that the template describes, if its marks are tokens; with its name."""
    source = "\n".join(tokenizer.template.sources.values())

    def ids(*marks: str) -> list[int] | None:
        """Ids of marks that the template uses."""
        known = [tokenizer.convert_tokens_to_ids(mark) for mark in marks]
        return None if None in known or marks[0] not in source else known

    call = ids("<tool_call>", "</tool_call>")
    pairs = ids("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
    parts = ("calls▁begin", "calls▁end", "call▁begin", "call▁end", "sep")
    deepseek = ids(*(f"<｜tool▁{part}｜>" for part in parts))  # noqa: RUF001
    if call and "<function=" in source:
        return "<function=name> inside <tool_call>", _xml(tokenizer, call)
    if call and pairs:
        return "<arg_key> inside <tool_call>", _pairs(tokenizer, call, pairs)
    if call and "arguments" in source:
        return "JSON inside <tool_call>", _json(tokenizer, call)
    if deepseek:
        return "DeepSeek's", _deepseek(deepseek)
    if ids("<|start_header_id|>", "<|eot_id|>") and "parameters" in source:
        return "Llama 3's JSON", lambda tokens, said, stops, thinks, tools: parsing.parse_llama_3(
            tokens, said, stop_ids=stops
        )
    return "", None


def _thinking(tokenizer: Templated) -> dict[str, int]:
    """Ids of the marks around reasoning; -1, which is no id, where the model has none."""
    found = {"think_id": "<think>", "think_end_id": "</think>"}
    known = {name: tokenizer.convert_tokens_to_ids(mark) for name, mark in found.items()}
    return {name: -1 if token is None else token for name, token in known.items()}


def _xml(tokenizer: Templated, call: Sequence[int]) -> Reader:
    marks = {"tool_call_id": call[0], "tool_call_end_id": call[1], **_thinking(tokenizer)}
    return lambda tokens, said, stops, thinks, tools: parsing.parse_qwen35(
        tokens, said, stop_ids=stops, prefilled_thinking=thinks, tools=tools, **marks
    )


def _pairs(tokenizer: Templated, call: Sequence[int], pairs: Sequence[int]) -> Reader:
    names = ("arg_key_id", "arg_key_end_id", "arg_value_id", "arg_value_end_id")
    marks = {"tool_call_id": call[0], "tool_call_end_id": call[1], **_thinking(tokenizer)}
    marks |= dict(zip(names, pairs, strict=True))
    return lambda tokens, said, stops, thinks, tools: parsing.parse_glm(
        tokens, said, stop_ids=stops, prefilled_thinking=thinks, tools=tools, **marks
    )


def _json(tokenizer: Templated, call: Sequence[int]) -> Reader:
    end = tokenizer.convert_tokens_to_ids("</think>")
    return lambda tokens, said, stops, thinks, tools: parsing.parse_qwen3(
        tokens, said, stop_ids=stops, prefilled_thinking=thinks, reasoning_end_id=end,
        tool_call_id=call[0], tool_call_end_id=call[1],
    )  # fmt: skip


def _deepseek(marks: Sequence[int]) -> Reader:
    names = ("tool_calls_begin_id", "tool_calls_end_id", "tool_call_begin_id", "tool_call_end_id", "tool_sep_id")
    known = dict(zip(names, marks, strict=True))
    return lambda tokens, said, stops, thinks, tools: parsing.parse_deepseek_v3(
        tokens, said, stop_ids=stops, prefilled_thinking=thinks, **known
    )
