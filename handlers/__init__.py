"""Task families, found by name: `load("math")`, or a user's own as `load("module:Class", path=folder)`.

Handlers import `pipeline` only; their heavy libraries are imported inside the methods that need them.
"""

from __future__ import annotations

import difflib
import functools
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from pipeline.errors import HandlerError, TaskError, UnknownHandler
from pipeline.interfaces import AgentHandler

BUILT_IN = {
    "echo": "handlers.echo:Echo",
    "math": "handlers.math:Math",
    "stem": "handlers.stem:Stem",
    "reason": "handlers.reason:Reason",
    "code": "handlers.code:Code",
    "sql": "handlers.sql:Sql",
    "swe": "handlers.swe:Swe",
    "web": "handlers.web:Web",
    "judge": "handlers.judge:Judge",
}
"""Name -> where it is."""


def load(name: str, path: str | Path | None = None) -> AgentHandler:
    """An instance of the handler called `name`: a built-in one, else `module:Class`.

    `path` is a folder that is put first on the import path. Raises UnknownHandler, which lists the known names and
    where was looked, and HandlerError when the module does not import or the class is no AgentHandler.
    """
    cls = _class_of(name, None if path is None else str(path))
    try:
        return cls()
    except Exception as error:
        raise HandlerError(f"handler {name!r}: {cls.__name__}() raised {type(error).__name__}: {error}") from error


def check_task(handler: AgentHandler, data: Any) -> Any:
    """`data` as the handler's own Task model, or as the dict it is where it has none.

    Raises TaskError, which names each wrong field, the value found and what is wanted.
    """
    if not isinstance(data, dict):
        raise TaskError(f"the task's data is a {type(data).__name__}, wanted a map of fields")
    model = handler.Task
    if model is None:
        return data
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise TaskError(f"{type(handler).__name__}: {_explain(error, model)}") from None


def digest(handler: AgentHandler) -> str:
    """12 hex digits over the handler's source: the same code has the same digest.

    That is the file of its class; of a package's `__init__.py` all files below; of a built-in one all of `handlers`.
    """
    return _digest(type(handler))


def digest_of(name: str, path: str | Path | None = None) -> str:
    """`digest` of the handler called `name`."""
    return _digest(_class_of(name, None if path is None else str(path)))


def name_of(function: Callable[..., Any]) -> str:
    """`module:function`, by which another process finds it. Raises TypeError where none could."""
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", "")
    if not inspect.isfunction(function) or "." in name or "<" in name or module == "__main__":
        raise TypeError(f"{function!r:.200} can't be called in a child process: it must be a function of a module")
    return f"{module}:{name}"


def function_of(name: str, path: str | Path | None = None) -> Callable[..., Any]:
    """The function that `name_of` named. Raises HandlerError, UnknownHandler."""
    if path is not None:
        _look_in(Path(path))
    module, _, function = name.partition(":")
    found: Callable[..., Any] = getattr(_import(name, module, None if path is None else str(path)), function)
    return found


def _digest(cls: type[AgentHandler]) -> str:
    source = inspect.getsourcefile(cls)
    if source is None:
        raise HandlerError(f"{cls.__name__} has no source file, so its version can't be told")
    return _file_digest(source)


@functools.lru_cache
def _file_digest(source: str) -> str:
    """Read once: what runs is the code that was imported, whatever the file says later."""
    file, ours = Path(source).resolve(), Path(__file__).resolve().parent
    folder = ours if file.is_relative_to(ours) else file.parent if file.name == "__init__.py" else None
    files = [file]
    if folder is not None:
        files = sorted(item for item in folder.rglob("*") if item.is_file() and item.suffix != ".pyc")
    return hashlib.sha256(b"\0".join(item.read_bytes() for item in files)).hexdigest()[:12]


@functools.lru_cache
def _class_of(name: str, path: str | None) -> type[AgentHandler]:
    """The class that `name` stands for, looked up once."""
    if path is not None:
        _look_in(Path(path))
    module_name, colon, class_name = BUILT_IN.get(name, name).partition(":")
    if not colon or not module_name or not class_name:
        raise UnknownHandler(_unknown(name, path, "it is no built-in name, and not of the form module:Class"))
    cls = _find_class(name, module_name, class_name, path)
    if not (isinstance(cls, type) and issubclass(cls, AgentHandler)):
        raise HandlerError(f"handler {name!r}: {class_name} is a {type(cls).__name__}, not a subclass of AgentHandler")
    return cls


def _look_in(folder: Path) -> None:
    """First on the import path, as the folder of a script that is run."""
    place = str(folder.resolve())
    if place not in sys.path:
        sys.path.insert(0, place)
        importlib.invalidate_caches()


def _find_class(name: str, module_name: str, class_name: str, path: str | None) -> Any:
    module = _import(name, module_name, path)
    if not hasattr(module, class_name):
        offered = [key for key, value in vars(module).items() if _is_own_handler(value, module_name)]
        raise UnknownHandler(
            f"handler {name!r}: module {module_name} ({module.__file__}) has no {class_name} "
            f"(its handlers: {', '.join(sorted(offered)) or 'none'})"
        )
    return getattr(module, class_name)


def _import(name: str, module_name: str, path: str | None) -> Any:
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise UnknownHandler(_unknown(name, path, f"there is no module {error.name}")) from None
        raise HandlerError(
            f"handler {name!r}: module {module_name} needs {error.name}, which is not installed"
        ) from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        raise HandlerError(
            f"handler {name!r}: module {module_name} does not import: {type(error).__name__}: {error}"
        ) from error


def _is_own_handler(value: Any, module_name: str) -> bool:
    return isinstance(value, type) and issubclass(value, AgentHandler) and value.__module__ == module_name


def _unknown(name: str, path: str | None, why: str) -> str:
    near = difflib.get_close_matches(name, BUILT_IN, n=1)
    guess = f" (did you mean {near[0]}?)" if near else ""
    looked = f"in {Path(path).resolve()} and on Python's path" if path is not None else "on Python's path"
    return f"unknown handler {name!r}{guess}: {why}; known: {', '.join(BUILT_IN)}, or module:Class, looked for {looked}"


def _explain(error: ValidationError, model: type[BaseModel]) -> str:
    return "; ".join(_one(item, model) for item in error.errors(include_url=False))


def _one(item: Any, model: type[BaseModel]) -> str:
    field = ".".join(map(str, item["loc"]))
    if item["type"] == "value_error":  # a validator's own sentence
        said = str(item["ctx"]["error"])
        return f"field {field!r}: {said}" if field else said
    if item["type"] == "missing":
        return f"field {field!r} is missing"
    if item["type"] == "extra_forbidden":
        return f"field {field!r} is unknown (known: {', '.join(model.model_fields)})"
    return f"field {field!r} is {item['input']!r:.80}: {item['msg'][0].lower()}{item['msg'][1:]}"
