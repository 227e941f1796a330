"""Messages to ids and back, through `renderers`: what the policy reads, what it said, and how a rollout goes on.

No chat template of our own. Every text that the policy did not sample is guarded: it can't spell a control token.
"""

from __future__ import annotations

import bisect
import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from pipeline.errors import TaskError
from pipeline.interfaces import Message, Parsed, ToolCall
from workers.policy import families
from workers.policy.tokenizer import BREAK, Tokenizer, load

_NAME = re.compile(r'"name"\s*:\s*"([^"\\]{1,64})"')
_THINKS = ("<think>", "</think>")
_UNREADABLE = (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError)
_WHY = {
    "invalid_json": "the call is no valid JSON",
    "unclosed_block": "the call was not closed",
    "missing_name": "the call names no tool",
    "malformed_structure": "the call has the wrong shape",
    "unknown_tool": "there is no such tool",
}


class Rendering:
    """The token side of a policy. `tokenizer`: folder, file or a loaded one. `renderer`: see `families.choose`."""

    def __init__(self, tokenizer: str | Tokenizer, renderer: str = families.AUTO) -> None:
        self.tokenizer = tokenizer if isinstance(tokenizer, Tokenizer) else load(tokenizer)
        self._renderer = families.choose(self.tokenizer, renderer)
        self.renderer: str = self._renderer.config.name
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self._bare = self.renderer == "llama-3" or getattr(self._renderer, "calls", "").startswith("Llama")

    async def ready(self) -> None:
        """Return when the policy can render; here it always can."""

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a conversation that ends where the policy speaks. Raises TaskError where the format refuses it."""
        guarded, offered = self._guarded(messages), self._offered(tools)
        try:
            return list(self._renderer.render_ids(guarded, tools=offered, add_generation_prompt=True))
        except (ValueError, TypeError, KeyError) as error:
            raise TaskError(
                f"the chat format {self.renderer} can't take this conversation: {_first_line(error)}"
            ) from error

    def parse(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Read sampled ids. Whatever the policy said comes back as a message; a broken call carries an `error`."""
        sampled, prompt = _listed(ids), _listed(prompt_ids)
        try:
            found = self._renderer.parse_response(sampled, tools=list(tools) or None, prompt_ids=prompt)
        except _UNREADABLE as error:  # numbers too long, nesting too deep: still only model output
            text = self.tokenizer.decode([i for i in sampled if i not in self.stop_ids])
            call = ToolCall(_call_id(prompt, 0), "", None, f"the call can't be read: {_first_line(error)}")
            return Parsed({"role": "assistant", "content": text}, [call])
        calls = [_tool_call(_call_id(prompt, at), item) for at, item in enumerate(found.tool_calls)]
        message: Message = {"role": "assistant", "content": found.content or ""}
        if found.reasoning_content is not None:
            message["reasoning_content"] = found.reasoning_content
        if self._bare and tools and not calls:
            bare = _bare_call(_call_id(prompt, 0), message["content"])
            calls = [bare] if bare else []
            message["content"] = "" if bare and bare.arguments is not None else message["content"]
        good = [_as_said(call) for call in calls if call.arguments is not None]
        if good:
            message["tool_calls"] = good
        broken = [item for item, call in zip(found.tool_calls, calls, strict=False) if call.arguments is None]
        message["content"] = "\n".join(
            filter(None, [message["content"], *(self._as_it_was(sampled, it) for it in broken)])
        )
        return Parsed(message, calls)

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        before: Sequence[Message] = (),
    ) -> list[int] | None:
        """Ids of prompt + completion + `new` messages up to where the policy speaks; None: render anew.

        `before` are the messages of prompt and completion. Where they are given, a format that can't go on by itself
        goes on as far as rendering everything anew would say the same (`_extended`).
        """
        prompt, completion = _listed(prompt_ids), _listed(completion_ids)
        bridged = self._renderer.bridge_to_next_turn(prompt, completion, self._guarded(new), tools=self._offered(tools))
        if bridged is not None:
            return list(bridged.token_ids)
        return self._extended([*prompt, *completion], before, new, tools) if before else None

    def _extended(
        self, old: list[int], before: Sequence[Message], new: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> list[int] | None:
        """`old` and what the rendering of the whole conversation has behind it, if that begins with the text of `old`.

        The sampled ids stay, and what follows them is tokenised as in the whole: the policy reads what it would read
        anyway. The new messages must not reach into the part that `old` stands for.
        """
        whole = self.render([*before, *new], tools)
        at = self._end_of_text(old, whole)
        if at is None:
            return None
        others: list[Message] = [{**message, "content": f"{message.get('content', '')}."} for message in new]
        return [*old, *whole[at:]] if self.render([*before, *others], tools)[:at] == whole[:at] else None

    def _end_of_text(self, old: list[int], whole: list[int]) -> int | None:
        """How many ids of `whole` spell the text that `old` spells; None where it does not begin with that."""
        same = next(
            (at for at, (a, b) in enumerate(zip(old, whole, strict=False)) if a != b), min(len(old), len(whole))
        )
        start = max(0, same - 1)  # both begin with the same id, so a decoder that drops a first blank drops it in both
        text, decode = self.tokenizer.decode(old[start:]), self.tokenizer.decode
        first = bisect.bisect_left(range(start, len(whole)), len(text), key=lambda at: len(decode(whole[start:at])))
        nearby = range(start + first, min(start + first + 4, len(whole)))  # halves of a character decode to nothing new
        return next((at for at in nearby if decode(whole[start:at]) == text), None)

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text, control tokens included: for people, never to be encoded again."""
        return self.tokenizer.decode(_listed(ids))

    def spoken(self, message: Message) -> list[int]:
        """Ids, up to the end of its turn, that a policy would sample to say `message` where no one has drifted."""
        asked: list[Message] = [{"role": "user", "content": "x"}]
        said = self._renderer.render(self._guarded([*asked, message]))
        if said.sampled_mask:
            about = zip(said.token_ids, said.message_indices, said.sampled_mask, strict=True)
            return [token for token, index, sampled in about if index == 1 and sampled]
        prompt, whole = self.render(asked), list(said.token_ids)  # this renderer does not say which are sampled
        start = next((at for at, (a, b) in enumerate(zip(prompt, whole, strict=False)) if a != b), len(prompt))
        end = max(
            (at + 1 for at, token in enumerate(whole) if token in self.stop_ids and at >= start), default=len(whole)
        )
        return whole[start:end]

    def _guarded(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        """Copies whose texts can't spell a control token; the marks of thinking in an old turn are the renderer's."""
        return [self._guarded_one(message) for message in messages]

    def _guarded_one(self, message: Message) -> dict[str, Any]:
        guard = self.tokenizer.guard
        thinks = message.get("role") == "assistant" and "reasoning_content" not in message
        made: dict[str, Any] = {}
        for field, value in message.items():
            if field == "content" and thinks and isinstance(value, str):
                made[field] = guard(_whole(value), _THINKS)
            elif field == "tool_calls" and isinstance(value, list):
                made[field] = [_guarded_call(call, guard) for call in value]
            else:
                made[field] = _deep(value, guard)
        return made

    def plain(
        self, messages: Sequence[Message], tools: Sequence[dict[str, Any]]
    ) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Messages and tools for a server that renders them itself: in what spells a control token stands a blank.

        It can't be told to leave such a text alone. Arguments of calls are JSON texts, as chat completions want them.
        """
        guarded, offered = self._guarded(messages), self._offered(tools) or []
        return [_blanked(message) for message in guarded], [_blanked(tool) for tool in offered]

    def _offered(self, tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]] | None:
        return [_deep(tool, self.tokenizer.guard) for tool in tools] or None

    def _as_it_was(self, sampled: list[int], item: Any) -> str:
        """The text of a broken call, its marks included where the parser says where it stands."""
        return self.tokenizer.decode(sampled[slice(*item.token_span)]) if item.token_span else str(item.raw)


def _deep(value: Any, guard: Callable[[str], str]) -> Any:
    """A copy with every text in it guarded."""
    if isinstance(value, str):
        return guard(_whole(value))
    if isinstance(value, dict):
        return {_deep(key, guard): _deep(inner, guard) for key, inner in value.items()}
    return [_deep(inner, guard) for inner in value] if isinstance(value, list | tuple) else value


def _blanked(value: Any) -> Any:
    """A copy in which the breaks of the guard are blanks, which another tokenizer takes too."""
    return _deep(value, lambda text: text.replace(BREAK, " "))


def _guarded_call(call: dict[str, Any], guard: Callable[[str], str]) -> dict[str, Any]:
    function = dict(call.get("function") or call)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    function["arguments"] = guard(_whole(text))
    function["name"] = guard(str(function.get("name", "")))
    return {**_deep({key: value for key, value in call.items() if key != "function"}, guard), "function": function}


def _tool_call(call_id: str, item: Any) -> ToolCall:
    """A renderer's parse as ours: arguments are a map, or None with a sentence that says why."""
    if item.status != "ok":
        found = _NAME.search(item.raw)
        why = _WHY.get(str(item.status), str(item.status))
        if item.status == "invalid_json" and isinstance(item.arguments, dict):  # of a format with one mark per value
            why = "a value that is not text has to be JSON"
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


def _bare_call(call_id: str, content: str) -> ToolCall | None:
    """A call without marks around it: a text that begins as one is one, also where it is broken or cut."""
    text = content.removeprefix("<|python_tag|>").strip()
    if not re.match(r'\{\s*"name"', text):
        return None
    found = _NAME.search(text)
    name = found[1] if found else ""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        return ToolCall(call_id, name, None, f"the call is no valid JSON: {_first_line(error)}")
    arguments = said.get("parameters", said.get("arguments", {}))
    if not name or not isinstance(arguments, dict):
        return ToolCall(call_id, name, None, "the call has the wrong shape")
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
