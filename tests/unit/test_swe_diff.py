"""Git diffs as bytes: split by file, joined again, and without what nobody shall evaluate."""

from __future__ import annotations

from typing import Any

import pytest

from handlers.swe.diff import check, paths_of, split, without
from handlers.swe.left_out import choose

HUNK = b"@@ -1 +1 @@\n-a\n+b\n"


def changed(path: str, hunk: bytes = HUNK) -> bytes:
    name = path.encode("utf-8", "surrogateescape")
    return b"diff --git a/%s b/%s\nindex 1..2 100644\n--- a/%s\n+++ b/%s\n%s" % (name, name, name, name, hunk)


def added(path: str, text: bytes = b"x = 1\n") -> bytes:
    name, lines = path.encode(), text.splitlines(keepends=True)
    body = b"@@ -0,0 +1,%d @@\n" % len(lines) + b"".join(b"+" + line for line in lines)
    return b"diff --git a/%s b/%s\nnew file mode 100644\n--- /dev/null\n+++ b/%s\n%s" % (name, name, name, body)


ODD = {
    "spaces": (b"diff --git a/a b b/a b\nold mode 100644\nnew mode 100755\n", ("a b",)),
    "empty": (b"diff --git a/x/__init__.py b/x/__init__.py\nnew file mode 100644\nindex 0..e\n", ("x/__init__.py",)),
    "quoted": (b'diff --git "a/\\303\\244\\t\\"q" "b/\\303\\244\\t\\"q"\nold mode 1\nnew mode 2\n', ('ä\t"q',)),
    "no utf-8": (b'diff --git "a/\\377" "b/\\377"\n--- "a/\\377"\n+++ "b/\\377"\n' + HUNK, ("\udcff",)),
    "tab after the name": (b"diff --git a/a b b/a b\n--- a/a b\t\n+++ b/a b\t\n" + HUNK, ("a b",)),
    "deleted": (b"diff --git a/x b/x\ndeleted file mode 100644\n--- a/x\n+++ /dev/null\n@@ -1 +0,0 @@\n-a\n", ("x",)),
    "renamed": (b"diff --git a/x b/y\nsimilarity index 100%\nrename from x\nrename to y\n", ("y", "x")),
    "binary": (b"diff --git a/p.png b/p.png\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZ\n\n", ("p.png",)),
    "a header in the text": (changed("x", b"@@ -1,2 +1,2 @@\n -- a/evil\n+++ b/evil\n--- a/evil\n"), ("x",)),
    "carriage returns": (changed("x", b"@@ -1 +1 @@\n-a\r\n+b\r\n\\ No newline at end of file\n"), ("x",)),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_each_part_knows_its_paths(name: str) -> None:
    data, paths = ODD[name]
    (part,) = split(data)
    assert part.paths == paths and part.data == data and part.path == paths[0]
    assert part.deleted == (name == "deleted") and part.new == (name == "empty")


def test_a_diff_is_the_sum_of_its_parts() -> None:
    diff = b"".join(data for data, _ in ODD.values())
    assert b"".join(part.data for part in split(diff)) == diff
    assert len(split(diff)) == len(ODD) and split(b"") == [] and split(b"\n") == []
    assert paths_of(diff)[:2] == ["a b", "x/__init__.py"]


@pytest.mark.parametrize("wrong", [b"hello", b"--- a/x\n+++ b/x\n" + HUNK, b"diff --git x y\nold mode 1\n"])
def test_what_is_no_git_diff_says_so(wrong: bytes) -> None:
    with pytest.raises(ValueError, match="this is no git diff|names no file"):
        split(wrong)


def test_files_are_left_out_by_name_or_by_rule() -> None:
    diff = changed("a") + changed("b") + changed("c/a")
    assert without(diff, ["a"]) == (changed("b") + changed("c/a"), ["a"])
    assert without(diff, lambda path: path.endswith("a")) == (changed("b"), ["a", "c/a"])
    renamed = ODD["renamed"][0]
    assert without(renamed, ["x"]) == (b"", ["x", "y"])


def left_out(*parts: bytes, whole: bytes = b"", tests: tuple[str, ...] = (), gold: bytes = b"") -> list[str]:
    chosen: dict[str, Any] = choose(b"".join(parts), whole, tests, gold.decode())
    assert split(chosen["patch"]) == [part for part in split(b"".join(parts)) if part.path not in chosen["left_out"]]
    return list(chosen["left_out"])


@pytest.mark.parametrize(
    "path",
    [
        "conftest.py", "src/deep/conftest.py", "sitecustomize.py", "src/usercustomize.py", "evil.pth", "pytest.ini",
        "tests/.pytest.ini", "tox.ini", "noxfile.py", "pytest.py", "src/pytest.py", "src/pytest/__init__.py",
        "_pytest/runner.py", "lib/pluggy/__init__.py", "pluggy.cpython-311-x86_64-linux-gnu.so",
        "jest.config.js", "web/.mocharc.json",
        "src/evil.dist-info/entry_points.txt", "evil.egg-info/entry_points.txt",
    ],
)  # fmt: skip
def test_what_steers_the_tests_is_left_out_new_or_changed(path: str) -> None:
    assert left_out(changed(path), changed("src/a.py")) == [path]
    assert left_out(added(path), added("src/a.py")) == [path]


@pytest.mark.parametrize("path", ["src/contest.py", "pytest_helper.py", "src/json.py", "docs/pytest.rst", "test.py"])
def test_the_product_is_kept(path: str) -> None:
    assert left_out(added(path)) == []


def test_a_new_module_at_the_root_must_not_stand_before_pythons_own() -> None:
    assert left_out(added("json.py"), added("ast/__init__.py"), added("src/ast.py")) == ["ast/__init__.py", "json.py"]
    assert left_out(changed("json.py"), added("test/__init__.py")) == []


def test_hidden_tests_are_left_out_even_where_gold_changes_them() -> None:
    assert left_out(changed("tests/a.py"), tests=("tests/a.py",)) == ["tests/a.py"]
    assert left_out(changed("tests/a.py"), tests=("tests/a.py",), gold=changed("tests/a.py")) == ["tests/a.py"]


def test_a_part_that_holds_another_files_change_is_refused() -> None:
    """As a git of the policy's own could write it: git applies the second file's change too."""
    first = changed("a.py", b"@@ -1 +1 @@\n-a\n+b\n")
    plain = b"--- /dev/null\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n"
    binary = (
        b"diff --git a/b b/b\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZ<x--- \n\nliteral 0\nHcmV?d00001\n\n"
    )
    for good in (first, changed("a") + added("b"), ODD["renamed"][0], binary.replace(b"--- ", b"")):
        check(good)
    head = b"diff --git a/a b/a\nindex 1..2 100644\n"
    for bad in (
        first + plain, first + b"\n" + plain, binary.replace(b"--- ", b"") + plain, head + plain + plain,
        first + b"rename from a\nrename to conftest.py\n", head + b"odd\n" + plain,
        changed("a.py", b"@@ -1,9 +1 @@\n-a\n+b\n"), changed("a.py", b"@@ -x +1 @@\n-a\n+b\n"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match="the diff of "):
            check(bad)


def test_all_in_a_folder_of_hidden_tests_is_left_out() -> None:
    helpers = changed("tests/utils.py"), changed("tests/a/base.py"), added("tests/data/x.json"), added("tests")
    tests = ("tests/a/b/test_x.py", "lib/m/tests/test_y.py", "src/test_z.py", "testing/test_q.py")
    beside = changed("src/tests.py"), changed("lib/m/y.py"), changed("lib/tests/z.py"), added("src/new.py")
    assert left_out(*helpers, *beside, tests=tests) == [
        "tests",
        "tests/a/base.py",
        "tests/data/x.json",
        "tests/utils.py",
    ]
    assert left_out(changed("lib/m/tests/util.py"), changed("testing/x.py"), tests=tests) == [
        "lib/m/tests/util.py", "testing/x.py",
    ]  # fmt: skip
    assert left_out(changed("a/testing/x.py"), tests=("a/testing/test_x.py",)) == []
    assert left_out(changed("tests/utils.py"), tests=tests, gold=changed("tests/utils.py")) == []


@pytest.mark.parametrize(
    "path",
    ["a/test_b.py", "a/b_test.go", "a/b.test.tsx", "a/b.spec.js", "a/b_spec.rb", "a/BTest.java", ".cargo/config.toml"],
)
def test_files_named_like_tests_are_left_out_unless_gold_has_them(path: str) -> None:
    assert left_out(added(path), changed("a/b.py")) == left_out(changed(path)) == [path]
    assert left_out(changed(path), gold=changed(path)) == []


def test_what_gold_changes_is_the_product() -> None:
    assert left_out(changed("tox.ini"), changed("conftest.py"), gold=changed("tox.ini")) == ["conftest.py"]
    gold = changed("src/_pytest/fixtures.py")
    assert left_out(changed("src/_pytest/runner.py"), added("_pytest/x.py"), gold=gold) == ["_pytest/x.py"]


@pytest.mark.parametrize(
    ("name", "hunk", "out"),
    [
        ("setup.cfg", b" [metadata]\n-name = a\n+name = b\n [tool:pytest]\n addopts = -q\n", False),
        ("setup.cfg", b" [metadata]\n name = a\n [tool:pytest]\n-addopts = -q\n+addopts = --co\n", True),
        ("setup.cfg", b" [metadata]\n+[pytest]\n+addopts = -p x\n", True),
        ("setup.cfg", b" [metadata]\n+broken\n", True),
        ("setup.cfg", b" [metadata]\n+[tool:pytest]#]\n+addopts = -p x\n", True),
        ("setup.cfg", b" [metadata]\n name = a\n+ \x0c[tool:pytest]\n+addopts = -p x\n", True),
        ("setup.cfg", b" [metadata]\n+[tox:tox]\n", True),
        ("package.json", b' {"name": "a",\n-"version": "1",\n+"version": "2",\n "jest": {"a": 1}}\n', False),
        ("package.json", b' {"name": "a",\n+"scripts": {"test": "echo ok"},\n "jest": {"a": 1}}\n', True),
        ("package.json", b' {"name": "a",\n "jest": {"a": 1,\n+"runner": "./mine"\n }}\n', True),
        ("sub/pyproject.toml", b' [project]\n-name = "a"\n+name = "b"\n', False),
        ("sub/pyproject.toml", b" [tool.pytest.ini_options]\n+addopts = '--co'\n", True),
        ("sub/pyproject.toml", b" [project]\n+[tool]\n+pytest.ini_options.addopts = '--co'\n", True),
        ("sub/pyproject.toml", b" [project\n", True),
        ("sub/pyproject.toml", b"+a = " + b"[" * 5000 + b"\n", True),
    ],
)
def test_settings_are_left_out_where_they_say_something_else_about_pytest(name: str, hunk: bytes, out: bool) -> None:
    part = changed(name, b"@@ -1,3 +1,3 @@\n" + hunk)
    assert left_out(part, whole=part) == ([name] if out else [])
    assert left_out(part, whole=part, gold=part) == []


def test_settings_that_gold_changes_too_may_say_no_more_about_tests_than_gold() -> None:
    mine = changed("setup.cfg", b"@@ -1,1 +1,3 @@\n [metadata]\n+[tool:pytest]\n+addopts = -p x\n")
    plain, about = (changed("setup.cfg", b"@@ -1 +1 @@\n-a\n+%s\n" % line) for line in (b"b", b"[tool:pytest]"))
    assert left_out(mine, whole=mine, gold=plain) == ["setup.cfg"]
    assert left_out(mine, whole=mine, gold=about) == left_out(plain, whole=plain, gold=plain) == []


def test_settings_that_are_shown_as_binary_or_in_pieces_are_left_out() -> None:
    binary = b"diff --git a/setup.cfg b/setup.cfg\nindex 1..2 100644\nGIT binary patch\nliteral 1\nIcmZ\n\n"
    pieces = changed("setup.cfg", b"@@ -1 +1 @@\n-a=1\n+a=2\n@@ -9 +9 @@\n-a=1\n+a=2\n")
    link = b"diff --git a/pyproject.toml b/pyproject.toml\nnew file mode 120000\nindex 0..1\n--- /dev/null\n"
    link += b"+++ b/pyproject.toml\n@@ -0,0 +1 @@\n+a=1\n\\ No newline at end of file\n"
    assert left_out(link, whole=link) == ["pyproject.toml"]
    mode = b"diff --git a/setup.cfg b/setup.cfg\nold mode 100644\nnew mode 100755\n"
    assert left_out(binary, whole=binary) == left_out(pieces, whole=pieces) == ["setup.cfg"]
    assert left_out(mode, whole=mode) == []
