"""What people see of a trajectory: the loss mask decides the colour, and foreign text stays text."""

from __future__ import annotations

import numpy as np

from pipeline.builder import TrajectoryBuilder
from pipeline.trajectory import Trajectory
from workers import view
from workers.dossier import Dossier
from workers.view_html import page


def trajectory() -> Trajectory:
    builder = TrajectoryBuilder()
    builder.prompt([1, 2])
    builder.action([3, 4, 5], [-0.1, -0.2, -0.3], [(0, 0, 3)])
    builder.observation([6])
    builder.action([7], [-0.4], [(0, 0, 1)])
    builder.begin()
    builder.prompt([8])
    return builder.build()


def words(ids: list[int]) -> str:
    return "".join(chr(ord("a") + id) for id in ids)


def test_spans_follow_the_mask() -> None:
    first, second = view.spans(trajectory(), words)  # type: ignore[arg-type]
    assert first == [
        ("prompt", False, "bc"),
        ("action", True, "def"),
        ("observation", False, "g"),
        ("action", True, "h"),
    ]
    assert second == [("prompt", False, "i")]


def test_a_mask_with_a_hole_is_split() -> None:
    assert list(view._runs(np.array([1, 1, 0, 1], dtype=np.uint8))) == [(0, 2, True), (2, 3, False), (3, 4, True)]
    assert list(view._runs(np.array([], dtype=np.uint8))) == []


def test_without_a_tokenizer_the_ids_are_listed_and_cut() -> None:
    assert view.listed([1, 2]) == "[1 2]\n"
    assert view.listed(range(100)).endswith("23 ... 76 more]\n")


def test_sampled_text_is_marked_where_there_is_no_colour() -> None:
    text = view.coloured(trajectory(), words)  # type: ignore[arg-type]
    assert text.plain.startswith("bc⟦def⟧g⟦h⟧")


def test_the_page_escapes_what_the_model_said() -> None:
    found = Dossier(about={"id": "<b>.0", "why": "<script>x</script>"}, attempts=[], trajectory=trajectory())
    text = page(found, lambda ids: f"<script>{len(ids)}</script>")
    assert "<script>" not in text and "&lt;script&gt;3&lt;/script&gt;" in text and "&lt;b&gt;.0" in text
    assert text.count('class="sampled"') == 1 + 2


def test_durations() -> None:
    assert [view.seconds(value) for value in (None, 0.5, 12.0, 120.0, 7200.0)] == [
        "",
        "0.50 s",
        "12.0 s",
        "2.0 min",
        "2.0 h",
    ]
