"""Calls one function of a program with a test's arguments: `python3 caller.py FD`. Python 3.6, standard library only.

Beside it lie `main.py` (the program) and `call.json` (`fn`, `arguments`: a list, or a map by name). What the function
returned is written to the file FD as JSON; where nothing is written, the function did not return.
"""
# ruff: noqa: UP035 - a name that Python 3.6 has

import importlib
import json
import os
import sys
import types
from typing import Any, Callable

STARS = ("typing", "collections", "itertools", "functools", "math", "heapq", "bisect", "operator", "string")
"""Starter code uses names out of these without importing them."""

NAMES = ("typing", "collections", "itertools", "functools", "math", "heapq", "bisect", "string", "re", "random", "copy",
         "sys", "os", "time", "datetime", "json", "statistics", "fractions", "decimal", "array")  # fmt: skip


def main() -> None:
    folder, result = os.path.dirname(os.path.abspath(__file__)), int(sys.argv[1])
    with open(os.path.join(folder, "call.json"), encoding="utf-8") as file:
        call = json.load(file)
    with open(os.path.join(folder, "main.py"), encoding="utf-8") as file:
        source = file.read()
    module = types.ModuleType("solution")
    sys.modules["solution"] = module
    for name in STARS:
        exec(f"from {name} import *", module.__dict__)
    module.__dict__.update({name: importlib.import_module(name) for name in NAMES if name in source})
    exec(compile(source, "main.py", "exec"), module.__dict__)
    function, given = find(module, call["fn"]), call["arguments"]
    value = function(**given) if isinstance(given, dict) else function(*given)
    if hasattr(sys, "set_int_max_str_digits"):
        sys.set_int_max_str_digits(0)
    left = json.dumps(value, default=plain).encode("ascii")
    while left:
        left = left[os.write(result, left) :]
    sys.stderr.flush()
    os._exit(0)  # what the program left running, or has registered for the end, decides nothing any more


def find(module: types.ModuleType, name: str) -> Callable[..., Any]:
    """The function, or the method of a new `Solution`."""
    cls = getattr(module, "Solution", None)
    if isinstance(cls, type) and hasattr(cls, name):
        return getattr(cls(), name)  # type: ignore[no-any-return]
    function = getattr(module, name, None)
    if not callable(function):
        sys.exit(f"the program has no function {name!r}, and no class Solution that has it")
    return function  # type: ignore[no-any-return]


def plain(value: Any) -> Any:
    """What JSON knows of a value that it does not know: sequences and numbers, no sets (they have no order)."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__iter__") and not isinstance(value, (set, frozenset, bytes, bytearray)):
        return list(value)
    raise TypeError(f"the function returned a {type(value).__name__}, which is no JSON value")


if __name__ == "__main__":
    main()
