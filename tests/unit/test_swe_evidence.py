"""What evidence shows of what a policy's code wrote, and which of its files may work on pytest."""

from __future__ import annotations

import pytest

from handlers.swe.evaluate import LONGEST, _evaluated, _plain
from tests.unit.test_swe_diff import HUNK, changed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m\r\n\tend", "red\n\tend"),
        ("a\x1b]0;evil\x07\0b", "a\ufffd]0;evil\ufffd\ufffdb"),
        ("ä\u202eb", "ä\ufffdb"),
        ("\udcff", "\ufffd"),
    ],
)
def test_control_characters_do_not_reach_a_persons_terminal(text: str, shown: str) -> None:
    assert _plain(text) == shown


def test_long_names_are_cut_in_the_middle() -> None:
    cut = _plain("begin" + "x" * 9000 + "end", LONGEST)
    assert cut.startswith("begin") and cut.endswith("end") and len(cut) == LONGEST + 3


@pytest.mark.parametrize(
    ("line", "trusted"),
    [
        (b"import pytest", True), (b"    from _pytest import main", True), (b"def pytest_configure(config):", True),
        (b"sys.meta_path.append(finder)", True), (b"# as pytest does", False), (b"x = 1", False),
    ],
)  # fmt: skip
def test_files_where_the_right_patch_works_on_pytest_may_do_so(line: bytes, trusted: bool) -> None:
    gold = changed("a.py", HUNK.replace(b"+b", b"+" + line)).decode()
    found = _evaluated(changed("a.py") + changed("b.py"), [], gold)
    assert found["changed"] == (["b.py"] if trusted else ["a.py", "b.py"]) and found["wrong"] == ""
