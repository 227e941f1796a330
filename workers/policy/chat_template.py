"""A model folder's own chat template (Jinja), rendered as the model's makers mean it, in a sandbox.

The template comes with the model, so it is code of strangers: it sees the messages and nothing else.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, TaskError
from workers.policy.tokenizer import Tokenizer

_SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class ChatTemplate:
    """Messages to text. `sources`: name -> Jinja source; "tool_use" is taken where there are tools, else "default"."""

    def __init__(self, sources: dict[str, str], special: dict[str, str], place: str) -> None:
        self.sources, self.special, self.place = sources, special, place

    def check(self) -> None:
        """Raises ConfigError where a source is no Jinja."""
        from jinja2 import TemplateSyntaxError

        for source in self.sources.values():
            try:
                _compiled(source)
            except TemplateSyntaxError as error:
                raise ConfigError(f"the chat template in {self.place} can't be read: {error}") from error

    def render(self, messages: Sequence[Any], tools: Sequence[Any] | None = None, **named: Any) -> str:
        """The text. Raises TaskError where the template refuses this conversation."""
        from jinja2 import TemplateError

        name = "tool_use" if tools and "tool_use" in self.sources else "default"
        about = {"documents": None, **self.special, **named}
        try:
            template = _compiled(self.sources[name])
            return str(template.render(messages=list(messages), tools=list(tools) if tools else None, **about))
        except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise TaskError(f"the chat template in {self.place} refuses the conversation: {error}") from error


def read(folder: Path) -> ChatTemplate | None:
    """The folder's template: chat_template.jinja, else the one in tokenizer_config.json; None where there is none.

    Raises ConfigError where it can't be read.
    """
    about = settings(folder / "tokenizer_config.json")
    file = folder / "chat_template.jinja"
    found = file.read_text(encoding="utf-8") if file.is_file() else about.get("chat_template")
    if isinstance(found, list):
        sources = {str(item["name"]): str(item["template"]) for item in found}
    else:
        sources = {"default": found} if found else {}
    for other in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        sources[other.stem] = other.read_text(encoding="utf-8")
    if "default" not in sources:
        return None
    texts = {name: _text(about.get(name)) for name in _SPECIAL}
    template = ChatTemplate(sources, {name: text for name, text in texts.items() if text is not None}, str(folder))
    template.check()
    return template


def settings(file: Path) -> dict[str, Any]:
    """A JSON file of the model's folder; empty where there is none. Raises ConfigError."""
    if not file.is_file():
        return {}
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} can't be read: {error}") from error
    return found if isinstance(found, dict) else {}


class Templated(Tokenizer):
    """A tokenizer with `apply_chat_template`, which is what the generic renderer asks for."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate) -> None:
        super().__init__(tokenizer.raw, tokenizer.name_or_path)
        self.template = template

    def apply_chat_template(
        self, messages: Sequence[Any], *, tokenize: bool = True, return_dict: bool = False, **named: Any
    ) -> list[int]:
        try:
            return self.encode(self.template.render(messages, **named))
        except TaskError:
            spelled = _spelled(messages)
            if spelled is None:
                raise
            return self.encode(self.template.render(spelled, **named))


def _spelled(messages: Sequence[Any]) -> list[Any] | None:
    """With the arguments of calls as JSON text, for templates that take no map; None where there is no map."""
    if not any(isinstance(_function(call).get("arguments"), dict) for item in messages for call in _calls(item)):
        return None
    spelled = copy.deepcopy(list(messages))
    for function in (_function(call) for item in spelled for call in _calls(item)):
        if isinstance(function.get("arguments"), dict):
            function["arguments"] = json.dumps(function["arguments"], ensure_ascii=False)
    return spelled


def _calls(message: Any) -> Sequence[Any]:
    return message.get("tool_calls") or ()


def _function(call: Any) -> Any:
    return call.get("function") or call


def _text(token: Any) -> str | None:
    """A special token stands there as text or as {"content": text}."""
    found = token.get("content") if isinstance(token, dict) else token
    return found if isinstance(found, str) else None


@functools.lru_cache(maxsize=64)
def _compiled(source: str) -> Any:
    return _environment().from_string(source)


@functools.lru_cache(maxsize=1)
def _environment() -> Any:
    from jinja2 import TemplateError, nodes
    from jinja2.ext import Extension
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %}` marks what an assistant said; the marks say nothing here."""

        tags = {"generation"}  # noqa: RUF012

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **how: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **how)

    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = tojson
    made.globals["raise_exception"] = refuse
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return made
