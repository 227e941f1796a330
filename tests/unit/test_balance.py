"""Which server takes a call: shortest expected wait, stickiness within twice that, and how fast a server is."""

from __future__ import annotations

import heapq
import math
from collections import deque
from typing import Any

import pytest
from hypothesis import given, strategies as st

from workers.policy.balance import FIRST_GUESS, Lengths, Mark, Offer, Share, choose, work

CALL: dict[str, Any] = {"prompt": 1000, "expected": 100.0}


def test_the_shortest_wait_wins_and_not_the_fewest_tokens() -> None:
    offers = [Offer("slow", 300, 100), Offer("fast", 1000, 1000)]
    assert choose(offers, **CALL) == "fast"
    assert choose([*offers, Offer("idle", 0, 400)], **CALL) == "idle"


def test_an_unknown_rate_counts_as_the_best_known_one() -> None:
    assert choose([Offer("known", 0, 1000), Offer("new", 100, 0)], **CALL) == "known"
    assert choose([Offer("known", 200, 1000), Offer("new", 100, 0)], **CALL) == "new"
    assert choose([Offer("a", 5, 0), Offer("b", 4, 0)], **CALL) == "b", "nothing is known: the fewest tokens"


def test_a_rollout_stays_where_its_prefix_is_within_twice_the_best_wait() -> None:
    best, near, far = Offer("best", 0, 100), Offer("mine", 250, 100), Offer("mine", 400, 100)
    assert choose([best, near], **CALL, sticky="mine", cached=900) == "mine"  # 250 + 10 + 100 against 200
    assert choose([best, far], **CALL, sticky="mine", cached=900) == "best"
    assert choose([best, near], **CALL, sticky="gone", cached=900) == "best"


def test_a_cached_prefix_is_no_work() -> None:
    assert work(1000, 100) == 200 and work(-5, 100) == 100
    same = [Offer("a", 0, 100), Offer("b", 0, 100)]
    assert choose(same, prompt=10_000, expected=10, sticky="b", cached=10_000) == "b"


def test_silence_lowers_what_a_server_is_believed_to_do() -> None:
    assert choose([Offer("silent", 0, 1000, ceiling=10), Offer("b", 300, 100)], **CALL) == "b"
    assert choose([Offer("silent", 0, 0, ceiling=0.0), Offer("b", 300, 100)], **CALL) == "b"


@given(
    st.lists(st.tuples(st.floats(0, 1e7), st.floats(0, 1e5), st.floats(0, 1e5)), min_size=1, max_size=20),
    st.integers(0, 20),
    st.integers(0, 100_000),
)
def test_whatever_is_offered_one_of_them_is_chosen(
    rows: list[tuple[float, float, float]], sticky: int, prompt: int
) -> None:
    offers = [Offer(str(at), *row) for at, row in enumerate(rows)]
    chosen = choose(offers, prompt=prompt, expected=1.0, sticky=str(sticky), cached=prompt // 2)
    assert chosen in {offer.id for offer in offers}


def test_the_mean_length_forgets_its_first_guess_at_once() -> None:
    lengths = Lengths()
    assert lengths.mean == FIRST_GUESS
    lengths.add(10)
    assert lengths.mean == 10
    for _ in range(1000):
        lengths.add(30)
    assert lengths.mean == pytest.approx(30, abs=0.1)


def test_the_rate_is_the_work_that_is_done_in_a_busy_second() -> None:
    """Sixteen at a time, each a second long, of 50 sampled and 500 prompt tokens: 16 x 100 tokens of work a second."""
    share, running = Share(), deque[Mark]()
    for step in range(400):
        now = step / 16
        if len(running) == 16:
            share.end(running.popleft(), now, 50)
        running.append(share.begin(500, 1024, now))
    assert share.rate == pytest.approx(1600, rel=0.05)
    assert share.ceiling(50.0, now + 1.5) > 1600 > share.ceiling(50.0, now + 2.5), "a reply takes a second"


def test_a_burst_does_not_make_a_slow_server_look_fast() -> None:
    """Sixty-four at once on sixteen slots: the first sixteen have not waited, and the others have yet to."""
    share = Share()
    marks = [share.begin(0, 1024, 0.0) for _ in range(64)]
    for mark in marks[:16]:
        share.end(mark, 3.0, 100)
    assert share.rate == pytest.approx(16 * 100 / 3.0, rel=0.3)


def test_an_idle_slow_server_is_no_match_for_a_busy_fast_one() -> None:
    """Where nothing waits, a reply takes its length at the server's pace, however little is in flight."""
    slow, fast = Share(), Share()
    for share, pace in ((slow, 0.1), (fast, 0.02)):
        share.end(share.begin(0, 1024, 0.0), 100 * pace, 100)
        assert share.pace == pytest.approx(pace)
    offers = [Offer("slow", 0, 400, pace=slow.pace), Offer("fast", 900, 800, pace=fast.pace)]
    assert choose(offers, prompt=0, expected=100.0, sticky="slow") == "fast"


def test_the_best_pace_is_forgotten_when_it_is_not_reached_again() -> None:
    share = Share()
    share.end(share.begin(0, 1024, 0.0), 1.0, 100)
    for _ in range(100):
        share.end(share.begin(0, 1024, 0.0), 5.0, 100)
    assert 0.03 < share.pace <= 0.05


def test_what_ended_without_a_reply_tells_nothing_of_the_rate() -> None:
    share = Share()
    first, second = share.begin(0, 1024, 0.0), share.begin(0, 1024, 0.0)
    share.end(first, 1.0, 100)
    share.end(second, 9.0, None)
    assert share.rate == pytest.approx(100.0)


def test_a_pause_is_no_busy_time() -> None:
    share = Share()
    mark = share.begin(0, 1024, 0.0)
    share.pause(50.0, 51.0)
    share.end(mark, 52.0, 100)
    assert share.rate == pytest.approx(50.0)


def test_a_share_counts_prompts_budgets_and_calls() -> None:
    share = Share()
    first, second = share.begin(1000, 10, 0.0), share.begin(0, 1000, 1.0)
    assert share.tokens(100.0) == 100 + 200
    assert share.tokens(10_000.0) == 100 + 1010, "no more than is allowed"
    share.end(first, 2.0, 10)
    assert (share.calls, share.tokens(100.0)) == (1, pytest.approx(100.0))
    share.end(second, 2.0, None)
    assert share.calls == 0 and share.prompt == 0.0 and share.allowed == 0


def test_the_ceiling_falls_while_a_server_is_silent() -> None:
    share = Share()
    assert share.ceiling(100.0, 50.0) == math.inf
    share.begin(0, 1000, 50.0)
    assert share.ceiling(100.0, 50.0) == math.inf
    assert share.ceiling(100.0, 51.0) == 100.0
    assert share.ceiling(100.0, 60.0) == 10.0


def served(paces: dict[str, tuple[float, float, float]], seconds: float, rollouts: int = 32) -> dict[str, list[float]]:
    """When each server's calls began: `rollouts` that ask again as soon as they are answered, 30 tokens a reply.

    `paces`: a time, and what a reply takes until then and after it (seconds), with up to eight of them at once.
    """
    shares = {name: Share() for name in paces}
    began: dict[str, list[float]] = {name: [] for name in paces}
    events = [(0.0, number, "", None) for number in range(rollouts)]
    while events:
        now, number, name, mark = heapq.heappop(events)
        if mark is not None:
            shares[name].end(mark, now, 30)
        if now > seconds:
            continue
        offers = [
            Offer(id, share.tokens(30), share.rate * share.spare, share.ceiling(30, now), share.pace, share.doubt(now))
            for id, share in shares.items()
        ]
        to = choose(offers, prompt=100, expected=30.0, sticky=name, cached=100)
        until, before, after = paces[to]
        began[to].append(now)
        mark = shares[to].begin(0, 1024, now)
        crowd = max(1.0, shares[to].calls / 8)
        heapq.heappush(events, (now + (before if now < until else after) * crowd, number, to, mark))
    return began


def test_a_server_that_was_slow_at_first_gets_its_share_of_calls_later() -> None:
    began = served({"a": (0.0, 0.1, 0.1), "b": (1.0, 8.0, 0.1)}, 120.0)
    late = {name: sum(at > 90 for at in times) for name, times in began.items()}
    assert late["b"] > 0.25 * sum(late.values()), late


def test_a_slow_server_is_tried_now_and_then_and_no_more() -> None:
    began = served({"a": (0.0, 0.1, 0.1), "b": (0.0, 3.0, 3.0)}, 120.0)
    assert 1 < len(began["b"]) < 0.02 * len(began["a"]), {name: len(times) for name, times in began.items()}
