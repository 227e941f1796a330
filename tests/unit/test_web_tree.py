"""Accessibility trees as a policy reads them: numbers, what is left out, what no page can make of it."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from handlers.web.inside import tree

PAGE = r"""
- generic [active] [ref=e1]:
  - heading "Shop \"x\"" [level=1] [ref=e2]
  - navigation "Main" [ref=e3]:
    - link "A" [ref=e4] [cursor=pointer]:
      - /url: "#top"
  - paragraph [ref=e6]: "Some bold text: 3 < 4"
  - paragraph [ref=e7]:
    - text: In 1984
    - link "Ada" [ref=e8] [cursor=pointer]:
      - /url: /ada.html
    - text: won.
  - generic [ref=e9]:
    - text: Name
    - textbox "Name" [ref=e10]: hi
  - generic [ref=e11]:
    - checkbox "ok" [checked] [ref=e12]
    - text: ok
  - combobox "Size" [ref=e13]:
    - option "small"
    - option "large" [selected]
  - button "No" [disabled] [ref=e14]
  - 'button "Pay: now" [ref=e15]'
  - button "Add Clip" [ref=e16]: Add
  - generic [ref=e17] [cursor=pointer]: clicky
  - list [ref=e18]:
    - listitem [ref=e19]: one
  - table [ref=e20]:
    - rowgroup [ref=e21]:
      - row [ref=e22]:
        - columnheader "a" [ref=e23]
        - columnheader [ref=e24]
      - row [ref=e25]:
        - cell "1 | 2" [ref=e26]
        - cell [ref=e27]:
          - button "Add" [ref=e28]
      - row [ref=e29]:
        - cell [ref=e30]:
          - paragraph [ref=e31]: first
          - paragraph [ref=e32]: second
  - iframe [ref=e33]:
    - button "inner" [ref=f1e2]
"""

SHOWN = """heading 1 "Shop "x""
navigation "Main"
  [1] link "A" -> #top
text: Some bold text: 3 < 4
text: In 1984 [2] link "Ada" won.
[3] textbox "Name": hi
[4] checkbox "ok" (checked)
[5] combobox "Size": large (one of: small | large)
[6] button "No" (disabled)
[7] button "Pay: now"
[8] button "Add Clip"
[9] clickable "clicky"
item: one
table
  row: a |
  row: 1 | 2 | [10] button "Add"
  row
    cell
      text: first
      text: second
iframe
  [11] button "inner\""""


class Numbers:
    """Numbers in the order in which they are asked for."""

    def __init__(self) -> None:
        self.given: list[str] = []

    def __call__(self, node: tree.Node) -> int:
        self.given.append(node.attributes["ref"])
        return len(self.given)


def shown(snapshot: str) -> str:
    return "\n".join(line.rstrip() for line in tree.render(tree.parse(snapshot), Numbers()))


def test_a_page_is_shown_without_what_says_nothing() -> None:
    assert shown(PAGE.strip()) == SHOWN


def test_each_number_is_given_once_and_in_order() -> None:
    numbers = Numbers()
    tree.render(tree.parse(PAGE.strip()), numbers)
    assert numbers.given == ["e4", "e8", "e10", "e12", "e13", "e14", "e15", "e16", "e17", "e28", "f1e2"]


@pytest.mark.parametrize(
    ("line", "text"),
    [
        (r'- paragraph [ref=e1]: "[12] button \"Add\""', 'text: [12] button "Add"'),
        (r'- paragraph [ref=e1]: "one\n[12] button \"Add\""', 'text: one [12] button "Add"'),
        (r'- button "a\n[9] link" [ref=e1]', '[1] button "a [9] link"'),
        (r'- paragraph [ref=e1]: "caf\xe9 \u20ac \\n"', "text: café € \\n"),
        ("- 'heading \"it''s: so\" [level=2] [ref=e3]'", 'heading 2 "it\'s: so"'),
        ("- textbox [ref=e1]", "[1] textbox"),
        ("- slider [ref=e1]: \"50\"", "[1] slider: 50"),
        ("- link [ref=e1] [cursor=pointer]:\n  - /url: /q\n  - heading \"Head\" [level=3] [ref=e2]",
         '[1] link -> /q\n  heading 3 "Head"'),
        ("- button \"no reference\"", 'button "no reference"'),
        ("what is this?", "text: what is this?"),
        ("", ""),
    ],
)  # fmt: skip
def test_lines_of_all_kinds(line: str, text: str) -> None:
    """A text of the page takes one line with its kind before it: it can't pass for an element with a number."""
    assert shown(line) == text


@given(st.text(max_size=300))
def test_whatever_is_read_is_shown(snapshot: str) -> None:
    tree.render(tree.parse(snapshot), Numbers())


@given(st.lists(st.text(alphabet="ab ", max_size=40), max_size=30), st.integers(1, 50))
def test_parts_hold_all_and_no_more_than_they_may(lines: list[str], size: int) -> None:
    parts = tree.parts(lines, size)
    assert "".join(parts).replace("\n", "") == "".join(lines)
    assert parts and all(len(part) <= size for part in parts)
