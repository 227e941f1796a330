"""Messages to ids and back, through `renderers`: what the policy reads, what it said, and how a rollout goes on.

No chat template of our own. Every text that the policy did not sample is guarded: it can't spell a control token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from pipeline.errors import ConfigError
from pipeline.interfaces import Message, Parsed, ToolCall
from workers.policy.tokenizer import Tokenizer, load

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')
_WHY = {
    "invalid_json": "the call is no valid JSON",
    "unclosed_block": "the call was not closed with </tool_call>",
    "missing_name": "the call names no tool",
    "malformed_structure": "the call has the wrong shape",
    "unknown_tool": "there is no such tool",
}


class Rendering:
    """The token side of a policy. `tokenizer` is a folder, a file or a loaded Tokenizer; `renderer` a name."""

    def __init__(self, tokenizer: str | Tokenizer, renderer: str = "qwen3") -> None:
        self.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else load(tokenizer)
        self._renderer = _renderer(self.tokenizer, renderer)
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a conversation that ends where the policy speaks."""
        guarded = [self._guarded(message) for message in messages]
        return list(self._renderer.render_ids(guarded, tools=list(tools) or None, add_generation_prompt=True))

    def parse(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Read sampled ids. Whatever the policy said comes back as a message; a broken call carries an `error`."""
        sampled, prompt = _listed(ids), _listed(prompt_ids)
        try:
            found = self._renderer.parse_response(sampled, tools=list(tools) or None, prompt_ids=prompt)
        except (ValueError, RecursionError) as error:  # numbers too long, nesting too deep: still only model output
            text = self.tokenizer.decode([i for i in sampled if i not in self.stop_ids])
            call = ToolCall(_call_id(prompt, 0), "", None, f"the call can't be read: {_first_line(error)}")
            return Parsed({"role": "assistant", "content": text}, [call])
        calls = [_tool_call(_call_id(prompt, at), item) for at, item in enumerate(found.tool_calls)]
        message: Message = {"role": "assistant", "content": found.content or ""}
        if found.reasoning_content is not None:
            message["reasoning_content"] = found.reasoning_content
        good = [_as_said(call) for call in calls if call.arguments is not None]
        if good:
            message["tool_calls"] = good
        broken = [item.raw for item, call in zip(found.tool_calls, calls, strict=True) if call.arguments is None]
        message["content"] += "".join(f"\n<tool_call>\n{raw}\n</tool_call>" for raw in broken)
        return Parsed(message, calls)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
    ) -> list[int] | None:
        """Ids of prompt + completion + `new` messages up to where the policy speaks; None: render anew."""
        guarded = [self._guarded(message) for message in new]
        prompt, completion = _listed(prompt_ids), _listed(completion_ids)
        bridged = self._renderer.bridge_to_next_turn(prompt, completion, guarded, tools=list(tools) or None)
        return None if bridged is None else list(bridged.token_ids)

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text, control tokens included: for people, never to be encoded again."""
        return self.tokenizer.decode(_listed(ids))

    def spoken(self, message: Message) -> list[int]:
        """Ids, up to the end of its turn, that a policy would sample to say `message` where no one has drifted."""
        conversation = [{"role": "user", "content": "x"}, self._guarded(message)]
        said = self._renderer.render(conversation)
        about = zip(said.token_ids, said.message_indices, said.sampled_mask, strict=True)
        return [token for token, index, sampled in about if index == 1 and sampled]

    def _guarded(self, message: Message) -> dict[str, Any]:
        """A copy whose texts can't spell a control token; `</think>` in an old turn of the policy is the renderer's."""
        guard = self.tokenizer.guard
        copy: dict[str, Any] = dict(message)
        for field in ("content", "reasoning_content"):
            text = copy.get(field)
            thinks = message.get("role") == "assistant" and field == "content" and "reasoning_content" not in message
            if isinstance(text, str) and not (thinks and "</think>" in text):
                copy[field] = guard(_whole(text))
        if copy.get("tool_calls"):
            copy["tool_calls"] = [_guarded_call(call, guard) for call in copy["tool_calls"]]
        return copy


def _renderer(tokenizer: Tokenizer, name: str) -> Any:
    from renderers import create_renderer
    from renderers.configs import _config_class_for

    try:
        config = _config_class_for(name)()
    except (KeyError, ValueError) as error:
        raise ConfigError(f"policy.renderer: {name!r} is no renderer: {_first_line(error)}") from None
    try:
        return create_renderer(tokenizer, config)
    except (AssertionError, ValueError) as error:
        raise ConfigError(
            f"policy.renderer: {name!r} does not fit the tokenizer in {tokenizer.name_or_path}: {_first_line(error)}"
        ) from error


def _guarded_call(call: dict[str, Any], guard: Any) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function["arguments"] = guard(_whole(text))
    function["name"] = guard(str(function.get("name", "")))
    return {**call, "function": function}


def _tool_call(call_id: str, item: Any) -> ToolCall:
    """A renderer's parse as ours: arguments are a map, or None with a sentence that says why."""
    if item.status != "ok":
        found = _NAME.search(item.raw)
        why = _WHY.get(str(item.status), str(item.status))
        return ToolCall(call_id, item.name or (found[1] if found else ""), None, why)
    name, arguments = item.name, item.arguments
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return ToolCall(call_id, str(name), None, f"the arguments are no valid JSON: {_first_line(error)}")
    if not isinstance(name, str) or not isinstance(arguments, dict):
        kind = type(arguments).__name__
        return ToolCall(call_id, str(name), None, f"the arguments are a {kind}, wanted an object with named values")
    return ToolCall(call_id, name, arguments)


def _as_said(call: ToolCall) -> dict[str, Any]:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _call_id(prompt_ids: Sequence[int], at: int) -> str:
    """Unique in a rollout, and the same each time: prompts only grow."""
    return f"call_{len(prompt_ids)}_{at}"


def _listed(ids: Sequence[int]) -> list[int]:
    return ids if isinstance(ids, list) else list(ids)


def _whole(text: str) -> str:
    """Lone surrogates, which JSON can spell and no encoder takes, become the replacement character."""
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:200]
