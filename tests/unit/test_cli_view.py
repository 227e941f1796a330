"""What people see of a trajectory: the loss mask decides the colour, and foreign text stays text."""

from __future__ import annotations

from collections.abc import Sequence

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


def swapped() -> Trajectory:
    """The weights change after the second sampled token."""
    builder = TrajectoryBuilder()
    builder.prompt([1])
    builder.action([2, 3, 4], [-0.05, -0.5, -6.0], [(4, 0, 2), (5, 2, 3)])
    return builder.build()


def words(ids: list[int]) -> str:
    return "".join(chr(ord("a") + id) for id in ids)


def test_spans_follow_the_mask() -> None:
    first, second = view.spans(trajectory(), words)  # type: ignore[arg-type]
    assert first == [
        ("prompt", False, "bc", 0, 2, None),
        ("action", True, "def", 2, 5, 0),
        ("observation", False, "g", 5, 6, None),
        ("action", True, "h", 6, 7, 0),
    ]
    assert second == [("prompt", False, "i", 0, 1, None)]


def test_spans_are_cut_where_other_weights_went_on() -> None:
    (sequence,) = view.spans(swapped(), words)  # type: ignore[arg-type]
    assert [(span.text, span.version) for span in sequence] == [("b", None), ("cd", 4), ("e", 5)]
    assert view.coloured(swapped(), words).plain == "b⟦cd⟧⟪weights 5⟫⟦e⟧"  # type: ignore[arg-type]
    assert view.weights(swapped()) == {4: 2, 5: 1}


def test_tokens_that_make_one_character_together_stay_together() -> None:
    data = {1: b"a", 2: b"\xd7", 3: b"\xa9", 4: b"b", 5: b"\xff"}

    def decode(ids: Sequence[int]) -> str:
        return b"".join(data[id] for id in ids).decode("utf-8", "replace")

    assert list(view.pieces([1, 2, 3, 4, 5], decode)) == [
        (0, 1, "a"), (1, 3, "\u05e9"), (3, 4, "b"), (4, 5, "\ufffd"),
    ]  # fmt: skip


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
    text = page(found, lambda ids: "<script>" * len(ids))
    assert "<script>" not in text and text.count("&lt;script&gt;") == 8 + 1 and "&lt;b&gt;.0" in text


def test_the_page_shows_each_sampled_token_with_its_logprob_and_weights() -> None:
    text = page(Dossier(about={"id": "a.0"}, attempts=[], trajectory=swapped()), words)  # type: ignore[arg-type]
    assert '<span class="p0" title="id 2, logprob -0.050, weights 4">c</span>' in text
    assert '<span class="weights">weights 5</span><span class="p4" title="id 4, logprob -6.000, weights 5">e' in text


def test_durations() -> None:
    assert [view.seconds(value) for value in (None, 0.5, 12.0, 120.0, 7200.0)] == [
        "",
        "0.50 s",
        "12.0 s",
        "2.0 min",
        "2.0 h",
    ]
