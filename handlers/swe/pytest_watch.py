"""Goes into a sandbox beside `pytest_report`: whether pytest's functions are still what they were. PYTEST_DONT_REWRITE

For Python 3.6 and pytest 5 and later, without dependencies; it is uploaded under a random name.
"""

import os
import sys
import types
from typing import Any

import pluggy
import pytest

START = os.getcwd()
PACKAGES = ("_pytest", "pluggy", "pytest", "json")
MODULES = ("unittest.case", "builtins", "ast", "io", "pathlib", "_frozen_importlib", "_frozen_importlib_external")
"""Whose functions must stay what they were."""

TESTING = ("testing", "_testing", "mock")
"""Parts of the names of installed modules that tests compare with: numpy.testing, unittest.mock and their like."""


class Watch:
    """Functions and classes as they were before any code of the repository ran. `first_change` says what is new."""

    def __init__(self) -> None:
        files = [str(module.__file__) for module in (pytest, pluggy)]
        self._own = [os.path.dirname(os.path.dirname(os.path.abspath(file))) for file in files]
        self._own += [place for place in sys.path if os.path.basename(place) in ("site-packages", "dist-packages")]
        self.finders = list(sys.meta_path)
        self._held = []  # type: list[Any]
        self._codes = []  # type: list[Any]
        self._installed = {}  # type: dict[Any, Any]
        self._manager, self._caller = None, None  # type: Any, Any
        for name, module in sorted(sys.modules.items()):
            if module is not None and (name in MODULES or name.split(".")[0] in PACKAGES):
                self._held.append((sys.modules, name, module, "sys.modules"))
                self.add(name, vars(module))

    def add(self, place: str, held: Any) -> None:
        """`held`: what a module or class holds by name, as it is now and later."""
        for name, value in list(held.items()):
            if name != "_" and (callable(value) or isinstance(value, KEPT)):
                self._held.append((held, name, value, place))
            inner = value
            while code_of(inner) is not None:
                self._codes.append((inner, code_of(inner), "%s.%s" % (place, name)))  # noqa: UP031 (Python 3.6)
                inner = getattr(inner, "__wrapped__", None)
            if isinstance(value, type) and value.__module__ == place:
                self.add("%s.%s" % (place, name), vars(value))  # noqa: UP031 (Python 3.6)

    def settle(self, manager: Any) -> None:
        """All plugins are there, and nothing of the repository is: what is installed by now is known for good."""
        self._manager, self._caller = manager, getattr(manager, "_inner_hookexec", None)
        for module in list(sys.modules.values()):
            if isinstance(module, types.ModuleType) and self._is_ours(vars(module).get("__file__")):
                for value in list(vars(module).values()):
                    for inner in list(vars(value).values()) if isinstance(value, type) else [value]:
                        if code_of(inner) is not None:
                            self._know(code_of(inner))

    def knows(self, code: Any) -> bool:
        return id(code) in self._installed

    def _know(self, code: Any) -> None:
        if id(code) not in self._installed:
            self._installed[id(code)] = code
            for inner in code.co_consts:
                if isinstance(inner, types.CodeType):
                    self._know(inner)

    def first_change(self) -> str:
        for held, name, value, place in self._held:
            if held.get(name) is not value and not self._is_own(held.get(name)):
                return "%s.%s" % (place, name)  # noqa: UP031 (Python 3.6)
        if getattr(self._manager, "_inner_hookexec", None) is not self._caller:
            return "what calls pytest's hooks"
        for value, code, place in self._codes:
            if code_of(value) is not code:
                return str(place)
        return ""

    def _is_own(self, value: Any) -> bool:
        """Whether it comes from where pytest and its plugins lie: these do replace parts of it.

        What a function says of its file can be made up, so its code must be what stands in that file.
        """
        if isinstance(value, type):
            parts = [part for each in value.__mro__ if each.__module__ != "builtins" for part in vars(each).values()]
            codes = [code_of(part) for part in parts if code_of(part) is not None]
        else:
            codes = [code for code in [code_of(value)] if code is not None]
        return bool(codes) and all(self._is_installed(code) for code in codes)

    def _is_installed(self, code: Any) -> bool:
        if id(code) not in self._installed and self._is_ours(code.co_filename):
            try:
                with open(code.co_filename, "rb") as file:
                    whole = compile(file.read(), code.co_filename, "exec", dont_inherit=True)
            except (OSError, SyntaxError, ValueError):
                return False
            if code in _codes_in(whole):
                self._installed[id(code)] = code
        return id(code) in self._installed

    def _is_ours(self, file: Any) -> bool:
        place = os.path.abspath(file) if isinstance(file, str) else "/"
        below = START + os.sep
        return any(place.startswith(own + os.sep) for own in self._own) and (
            not place.startswith(below) or any((own + os.sep).startswith(below) for own in self._own)
        )

    def testing(self) -> Any:
        """(Name, function) of installed modules that tests compare with."""
        for name, module in list(sys.modules.items()):
            about = vars(module) if isinstance(module, types.ModuleType) else {}
            if set(TESTING) & set(name.split(".")) and self._is_ours(about.get("__file__")):
                for key, value in list(about.items()):
                    for inner in list(vars(value).values()) if isinstance(value, type) else [value]:
                        if code_of(inner) is not None:
                            yield "%s.%s" % (name, key), inner  # noqa: UP031 (Python 3.6)


KEPT = (staticmethod, classmethod, property, types.ModuleType)


def code_of(value: Any) -> Any:
    if isinstance(value, (staticmethod, classmethod)):
        value = value.__func__
    elif isinstance(value, property):
        value = value.fget
    return value.__code__ if isinstance(value, types.FunctionType) else None


def _codes_in(code: Any) -> Any:
    found = [code]
    for each in found:
        found.extend(inner for inner in each.co_consts if isinstance(inner, types.CodeType))
    return found
