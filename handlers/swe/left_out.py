"""What of a policy's patch is never evaluated: hidden tests' files, and files that steer the test run, not the product.

Pure functions over bytes, for a child process: what a policy wrote is parsed here.
"""

from __future__ import annotations

import configparser
import json
import re
import sys
import tomllib
from collections.abc import Collection, Sequence
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
        "tox.toml",
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

SETTINGS = frozenset({"setup.cfg", "pyproject.toml", "package.json"})
"""Left out where their section about a test runner changes, else kept; `capture.sh` has these names too."""

RUNS_TESTS = ("scripts", "jest", "vitest", "mocha", "ava", "tap", "karma", "nyc", "c8")
"""Keys of package.json that say how tests are run."""

FOLDERS = frozenset({"test", "tests", "__tests__", "spec", "specs"})
"""Where one of these holds a hidden test, all that is in it belongs to the tests: helpers, data, base classes."""

NAMED_LIKE_TESTS = re.compile(
    r"test_.*\.py|.*_test\.(py|go|rb|exs?|cc|cpp)|.*_spec\.rb|.*[.-](test|spec)\.[cm]?[jt]sx?|.*Tests?\.(java|kt|php|cs)"
)

_NOT_SHADOWING = frozenset({"test"})


def choose(patch: bytes, whole: bytes, tests: Sequence[str], gold: str) -> dict[str, Any]:
    """`patch`: the part that is evaluated; `left_out`: paths that are not, sorted.

    `whole` is the diff of settings with all their lines, `tests` the paths of the hidden tests' patch. A file that the
    gold patch changes is left out only if it is one of the tests' own, or settings that say something about tests which
    the gold patch doesn't; and where the gold patch works on a package
    called like a runner, that package is the product. Raises ValueError where `patch` is no git diff.
    """
    gold_parts = split(gold.encode("utf-8", "surrogateescape"))
    resettled = {part.path: says for part in split(whole) if (says := _resettles(part)) is not False}
    of_gold = {
        path
        for part in gold_parts
        for path in part.paths
        if not resettled.get(path) or re.search(rb"pytest|tox|\b(scripts|jest|vitest|mocha|ava|tap|karma)\b", part.data)
    }
    products = {prefix for path in of_gold for prefix in _runners(path)}
    hidden = set(tests)
    folders = tuple(sorted({folder for path in tests if (folder := _folder(path))}))
    kept: list[bytes] = []
    left_out: set[str] = set()
    for part in split(patch):
        if any(
            path in hidden
            or (path not in of_gold and (f"{path}/".startswith(folders) or _named_like_a_test(path)))
            or _steers(part, path, of_gold, products, resettled)
            for path in part.paths
        ):
            left_out.update(part.paths)
        else:
            kept.append(part.data)
    return {"patch": b"".join(kept), "left_out": sorted(left_out)}


def _folder(test: str) -> str:
    """The outermost folder of tests that a hidden test lies in, with its slash; "" where it lies beside the product."""
    parts = PurePosixPath(test).parts[:-1]
    for at, name in enumerate(parts):
        if name in FOLDERS or (at == 0 and name == "testing"):
            return "/".join(parts[: at + 1]) + "/"
    return ""


def _named_like_a_test(path: str) -> bool:
    return NAMED_LIKE_TESTS.fullmatch(PurePosixPath(path).name) is not None


def _steers(part: Part, path: str, of_gold: set[str], products: set[str], resettled: Collection[str]) -> bool:
    if path in of_gold:
        return False
    name = PurePosixPath(path).name
    if name in STEERING or name.startswith(STEERING_BEGINNINGS) or name.endswith(".pth") or path in resettled:
        return True
    if path.endswith((".cargo/config.toml", ".cargo/config")):
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


def _resettles(part: Part) -> bool | None:
    """Whether a file of settings says something else about tests than before; None for one that can't be read."""
    name = PurePosixPath(part.path).name
    if name not in SETTINGS:
        return False
    if re.search(rb"^(new file mode|new mode|index \S+) 120000", part.data, re.MULTILINE):
        return True  # a link: what it says stands elsewhere
    sides = _sides(part.data)
    before, after = (_about_tests(name, text) for text in sides) if sides else (None, None)
    return None if before is None or after is None else bool(before != after)


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


def _about_tests(name: str, text: str) -> Any:
    """What a file of settings says about its test runner; None where it can't be read."""
    try:
        if name == "setup.cfg":
            configparser.RawConfigParser(strict=False).read_string(text)
            return _sections(text)
        data = tomllib.loads(text).get("tool", {}) if name == "pyproject.toml" else json.loads(text or "{}")
        keys = ("pytest", "tox") if name == "pyproject.toml" else RUNS_TESTS
        return {key: data[key] for key in keys if key in data} if isinstance(data, dict) else {}
    except (configparser.Error, ValueError, RecursionError):
        return None


def _sections(text: str) -> list[str]:
    """Sections of an INI file whose heads name pytest or tox, as they stand there.

    The readers of such files differ in what is a head (spaces, comments, line ends), so whatever could be one is.
    """
    found: list[str] = []
    wanted = False
    for line in text.splitlines(keepends=True):
        if line.lstrip().startswith("["):
            wanted = "pytest" in line or "tox" in line
        if wanted and line.strip():
            found.append(line)
    return found
