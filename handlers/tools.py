"""The tools that a policy may be given, and how a call becomes a message: bash, IPython and files in its sandbox, and
a family's own, which are methods marked with `tool`.

Whatever is wrong with a call is said to the policy and ends nothing; what is wrong with the sandbox is raised.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar, get_type_hints

from pydantic import BaseModel, Field, ValidationError, create_model

from pipeline.interfaces import Context, Sandbox, ToolCall

Method = TypeVar("Method", bound=Callable[..., Awaitable[str]])

READ_BYTES = 16_000
"""Of a file, shown at once; `start` shows the rest."""


JSON_TYPES = {str: "string", int: "integer", float: "number", bool: "boolean"}
"""What a parameter of a tool may be, and its name in JSON Schema."""


OWN = "own_"


class WrongCall(ValueError):
    """The policy's arguments don't fit; the sentence is for it."""


class Over(str):
    """What a tool returns to end the rollout: the policy has handed in its work, and hears nothing more."""


def tool(about: str, /, **parameters: str) -> Callable[[Method], Method]:
    """Marks a method `async def name(self, ctx, ...) -> str` of a `Turns` as a tool of that name.

    `about` and, by name, what each parameter is are for the policy. A parameter is a str, int, float or bool; one with
    a default may be left out. What the method returns is the tool's message; a ValueError or OSError that it raises is
    said to the policy, any other error ends the rollout. Raises TypeError for a signature that does not fit.
    """

    def mark(method: Method) -> Method:
        name, hints = method.__name__, get_type_hints(method)
        fields = list(inspect.signature(method).parameters.values())[2:]
        waits = inspect.iscoroutinefunction(method)
        if not waits or {item.name for item in fields} != parameters.keys():
            raise TypeError(
                f"the tool {name!r} must be `async def {name}(self, ctx, ...)`, and @tool must say what each of its "
                f"parameters is: it has {[item.name for item in fields]}, told are {list(parameters)}"
            )
        for item in fields:
            if hints.get(item.name) not in JSON_TYPES:
                raise TypeError(f"the tool {name!r}: {item.name} must be annotated as str, int, float or bool")
        required = [item.name for item in fields if item.default is item.empty]
        schema = {item.name: {"type": JSON_TYPES[hints[item.name]], "description": parameters[item.name]}
                  for item in fields}  # fmt: skip
        # Under names that no attribute of a model has: a parameter may well be called `json` or `schema`.
        wanted: dict[str, Any] = {
            f"{OWN}{item.name}": (
                hints[item.name],
                Field(... if item.default is item.empty else item.default, alias=item.name),
            )
            for item in fields
        }
        method.schema = _tool(name, about, required, **schema)  # type: ignore[attr-defined]
        method.wanted = create_model(name, **wanted)  # type: ignore[attr-defined]
        return method

    return mark


async def answer_own(method: Callable[..., Awaitable[str]], ctx: Context, call: ToolCall) -> str:
    """The text of the message of a family's own tool; `method` is bound. Raises what is no fault of the call."""
    if call.arguments is None:
        return f"Error: nothing was run: {call.error}. Call again in the right form."
    wanted: type[BaseModel] = method.wanted  # type: ignore[attr-defined]
    try:
        arguments = wanted.model_validate(call.arguments)
    except ValidationError as error:
        return f"Error: nothing was run: {'; '.join(_wrong(call.name, item) for item in error.errors())}."
    try:
        return await method(ctx, **{name.removeprefix(OWN): value for name, value in arguments})
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"Error: {why}."


def _wrong(name: str, item: Any) -> str:
    field = ".".join(map(str, item["loc"]))
    if item["type"] == "missing":
        return f"{name} wants `{field}`"
    return f"`{field}` of {name} is {item['input']!r:.80}: {item['msg'][0].lower()}{item['msg'][1:]}"


def _tool(name: str, about: str, required: Sequence[str], /, **parameters: dict[str, str]) -> dict[str, Any]:
    schema = {"type": "object", "properties": parameters, "required": list(required)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


def _text(about: str) -> dict[str, str]:
    return {"type": "string", "description": about}


def _number(about: str) -> dict[str, str]:
    return {"type": "number", "description": about}


TOOLS: dict[str, dict[str, Any]] = {
    "bash": _tool(
        "bash",
        "Run a command in a persistent bash shell. Folder and variables are kept between calls.",
        ["command"],
        command=_text("The command."),
        timeout=_number("Seconds until it is stopped."),
    ),
    "ipython": _tool(
        "ipython",
        "Run Python code in a persistent IPython session. Variables and imports are kept between calls.",
        ["code"],
        code=_text("The code of one cell."),
        timeout=_number("Seconds until it is stopped."),
    ),
    "read_file": _tool(
        "read_file",
        f"Show a file, at most {READ_BYTES} bytes of it.",
        ["path"],
        path=_text("The file."),
        start=_number("Byte to begin at."),
    ),
    "write_file": _tool(
        "write_file",
        "Write a file whole; missing folders are made.",
        ["path", "content"],
        path=_text("The file."),
        content=_text("All that it shall hold."),
    ),
    "edit_file": _tool(
        "edit_file",
        "Replace a piece of text that stands exactly once in a file.",
        ["path", "old", "new"],
        path=_text("The file."),
        old=_text("The text that is there, exactly, with its blanks and line ends."),
        new=_text("The text in its place."),
    ),
}
"""Name -> what the policy is told of it (OpenAI's form)."""


async def answer(sandbox: Sandbox | None, call: ToolCall, tools: Sequence[str]) -> str:
    """The text of the tool's message. Raises SandboxError when the sandbox itself fails."""
    if call.arguments is None:
        return f"Error: nothing was run: {call.error}. Call again in the right form."
    if call.name not in tools or sandbox is None:
        return f"Error: there is no tool {call.name!r}; there are: {', '.join(tools) or 'none'}."
    try:
        return await _RUN[call.name](sandbox, call.arguments)
    except WrongCall as error:
        return f"Error: nothing was run: {error}."
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return f"Error: {why}."


async def _bash(sandbox: Sandbox, arguments: dict[str, Any]) -> str:
    output = await sandbox.bash(_words(arguments, "command", "bash"), _seconds(arguments))
    told = output.exit_code == 0 or output.timed_out  # the text says it in brackets
    return output.text if told else f"{output.text}\n[exit code {output.exit_code}]"


async def _ipython(sandbox: Sandbox, arguments: dict[str, Any]) -> str:
    return (await sandbox.ipython(_words(arguments, "code", "ipython"), _seconds(arguments))).text


async def _read(sandbox: Sandbox, arguments: dict[str, Any]) -> str:
    start = arguments.get("start", 0)
    if isinstance(start, bool) or not isinstance(start, int | float) or not 0 <= start < 2**63:
        raise WrongCall("`start` is a number of bytes, 0 or more")
    data = await sandbox.read(_words(arguments, "path", "read_file"), int(start), READ_BYTES + 1)
    more = f"\n[it goes on at byte {int(start) + READ_BYTES}]" if len(data) > READ_BYTES else ""
    return data[:READ_BYTES].decode("utf-8", "replace") + more


async def _write(sandbox: Sandbox, arguments: dict[str, Any]) -> str:
    data = _words(arguments, "content", "write_file", empty=True).encode("utf-8", "replace")
    await sandbox.write(_words(arguments, "path", "write_file"), data)
    return f"[{len(data)} bytes written]"


async def _edit(sandbox: Sandbox, arguments: dict[str, Any]) -> str:
    path, old = _words(arguments, "path", "edit_file"), _words(arguments, "old", "edit_file")
    await sandbox.edit(path, old, _words(arguments, "new", "edit_file", empty=True))
    return "[done]"


_RUN: dict[str, Callable[[Sandbox, dict[str, Any]], Awaitable[str]]] = {
    "bash": _bash, "ipython": _ipython, "read_file": _read, "write_file": _write, "edit_file": _edit,
}  # fmt: skip


def _words(arguments: dict[str, Any], name: str, tool: str, *, empty: bool = False) -> str:
    value = arguments.get(name)
    if not isinstance(value, str) or not (empty or value.strip()):
        raise WrongCall(f"{tool} wants `{name}`, a text{'' if empty else ' that is not empty'}")
    return value


def _seconds(arguments: dict[str, Any]) -> float | None:
    timeout = arguments.get("timeout")
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0:
        raise WrongCall("`timeout` is a number of seconds above 0")
    return float(timeout)
