"""What of a policy's patch is never evaluated: hidden tests' files, and files that steer the test run, not the product.

Pure functions over bytes, for a child process: what a policy wrote is parsed here.
"""

from __future__ import annotations

import configparser
import sys
import tomllib
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any

from handlers.swe.diff import Part, split

STEERING = frozenset(
    {
        "conftest.py",
        "sitecustomize.py",
        "usercustomize.py",
        "pytest.ini",
        ".pytest.ini",
        "pytest.toml",
        ".pytest.toml",
        "tox.ini",
        "noxfile.py",
    }
)
"""Files that a test runner or Python itself obeys, wherever they lie."""

STEERING_BEGINNINGS = (
    "jest.config.",
    "vitest.config.",
    "karma.conf.",
    ".mocharc.",
    "phpunit.xml",
    ".rspec",
)
"""How such files of other languages' runners are called."""

RUNNERS = frozenset({"pytest", "_pytest", "pluggy"})
"""Names that no module or package of the patch may have: it could stand before the real one."""

SETTINGS = frozenset({"setup.cfg", "pyproject.toml"})
"""Left out where their section about pytest changes, else kept."""

_NOT_SHADOWING = frozenset({"test"})


def choose(patch: bytes, whole: bytes, tests: Sequence[str], gold: str) -> dict[str, Any]:
    """`patch`: the part that is evaluated; `left_out`: paths that are not, sorted.

    `whole` is the diff of settings with all their lines, `tests` the paths of the hidden tests' patch. A file that the
    gold patch changes is left out only if it is one of the tests' own; and where the gold patch works on a package
    called like a runner, that package is the product. Raises ValueError where `patch` is no git diff.
    """
    of_gold = {path for part in split(gold.encode("utf-8", "surrogateescape")) for path in part.paths}
    products = {prefix for path in of_gold for prefix in _runners(path)}
    hidden = set(tests)
    resettled = {part.path for part in split(whole) if _resettles(part)}
    kept: list[bytes] = []
    left_out: set[str] = set()
    for part in split(patch):
        if any(path in hidden or _steers(part, path, of_gold, products, resettled) for path in part.paths):
            left_out.update(part.paths)
        else:
            kept.append(part.data)
    return {"patch": b"".join(kept), "left_out": sorted(left_out)}


def _steers(part: Part, path: str, of_gold: set[str], products: set[str], resettled: set[str]) -> bool:
    if path in of_gold:
        return False
    name = PurePosixPath(path).name
    if name in STEERING or name.startswith(STEERING_BEGINNINGS) or name.endswith(".pth") or path in resettled:
        return True
    if any(folder.endswith((".dist-info", ".egg-info")) for folder in PurePosixPath(path).parts):
        return True  # its entry points could load a plugin
    if any(prefix not in products for prefix in _runners(path)):
        return True
    return part.new and _shadows(path)


def _runners(path: str) -> list[str]:
    """The path's beginnings that end with a package or module called like a runner."""
    parts = PurePosixPath(path).parts
    stems = [*parts[:-1], parts[-1].partition(".")[0] if parts[-1].endswith((".py", ".so")) else ""]
    return ["/".join(parts[: at + 1]) for at, stem in enumerate(stems) if stem in RUNNERS]


def _shadows(path: str) -> bool:
    """Whether a new file at the root would stand before a module of Python's own."""
    parts = PurePosixPath(path).parts
    is_package = len(parts) == 2 and parts[1] == "__init__.py"
    is_module = len(parts) == 1 and path.endswith((".py", ".so"))
    name = parts[0].partition(".")[0]
    return (is_package or is_module) and name in sys.stdlib_module_names - _NOT_SHADOWING


def _resettles(part: Part) -> bool:
    """Whether a file of settings says something else about pytest than before; one that can't be read does."""
    name = PurePosixPath(part.path).name
    if name not in SETTINGS:
        return False
    sides = _sides(part.data)
    if sides is None:
        return True
    before, after = (_about_pytest(name, text) for text in sides)
    return after is None or before != after


def _sides(data: bytes) -> tuple[str, str] | None:
    """The text before and after, out of a diff with all its lines; None where it shows no text, or not all of it."""
    lines = data.split(b"\n")
    hunks = [at for at, line in enumerate(lines) if line.startswith(b"@@")]
    if len(hunks) > 1 or any(line.startswith(b"GIT binary patch") for line in lines):
        return None
    body = lines[hunks[0] + 1 :] if hunks else []
    sides = (b"\n".join(line[1:] for line in body if line[:1] in (b" ", sign)) for sign in (b"-", b"+"))
    before, after = (side.decode("utf-8", "replace") for side in sides)
    return before, after


def _about_pytest(name: str, text: str) -> Any:
    """What a file of settings says about pytest; None where it can't be read."""
    try:
        if name == "pyproject.toml":
            tool = tomllib.loads(text).get("tool", {})
            return tool.get("pytest", {}) if isinstance(tool, dict) else {}
        parser = configparser.RawConfigParser(strict=False)
        parser.optionxform = str  # type: ignore[assignment,method-assign]
        parser.read_string(text)
        return {each: dict(parser.items(each)) for each in ("tool:pytest", "pytest") if parser.has_section(each)}
    except (configparser.Error, ValueError, RecursionError):
        return None
