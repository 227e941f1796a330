"""The registry of policy servers: leases, owners, shares of the load, and which of them get calls."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from pipeline.backends import SHARE_SECONDS, Backend, Backends, Load, PolicyState, backend_id, state_of
from pipeline.errors import ConfigError
from pipeline.queue import Queue

ONE = Backend(id="one", url="http://node1:8000", model="m", tokenizer="/m", endpoint="generate", window=4096, version=3)


@pytest.fixture
def backends(queue: Queue) -> Backends:
    return Backends(queue)


async def over(queue: Queue, id: str) -> None:
    """Let a lease run out."""
    await queue.execute("ZADD", queue.key("backends"), "XX", 1, id)


async def only(backends: Backends) -> Backend:
    (found,) = (await backends.view()).backends
    return found


async def test_a_backend_comes_back_as_it_was_put(backends: Backends) -> None:
    odd = Backend(id="[::1]:80", url="http://[::1]:80", kind="openai", version=None, drained=True, why="é \ud83d it")
    await backends.add(ONE)
    await backends.add(odd)
    first, second = (await backends.view()).backends
    assert second == ONE and math.isinf(second.ends)
    assert first == replace(odd, why=first.why)


async def test_a_lease_is_its_owners_and_runs_out(queue: Queue, backends: Backends) -> None:
    await backends.add(replace(ONE, owner="me"), 30)
    found = await only(backends)
    assert found.owner == "me" and 25 < found.ends - (await backends.view()).now <= 30
    assert await backends.renew("one", "me", 60)
    assert (await only(backends)).ends > found.ends + 25
    assert not await backends.renew("one", "you", 60)
    with pytest.raises(ConfigError, match="registered already, by me, which keeps its lease"):
        await backends.add(replace(ONE, owner="you"), 30)
    with pytest.raises(ConfigError, match="registered already, by me"):
        await backends.add(ONE)
    assert not await backends.remove("one", "you")
    await over(queue, "one")
    assert (await backends.view()).backends == ()
    assert not await backends.renew("one", "me", 60)
    await backends.add(replace(ONE, owner="you", version=None), 30)
    assert (await only(backends)).owner == "you" and (await only(backends)).version is None
    assert await backends.remove("one", "you") and not await backends.remove("one")


async def test_what_ran_out_leaves_nothing_to_the_next(queue: Queue, backends: Backends) -> None:
    await backends.add(replace(ONE, owner="me", drained=True, why="it hung"), 30)
    await over(queue, "one")
    await backends.add(Backend(id="one", url="http://node2:1", owner="you"), 30)
    assert await only(backends) == Backend(
        id="one", url="http://node2:1", owner="you", ends=(await only(backends)).ends
    )


async def test_one_registered_by_hand_is_taken_over_by_nobody(backends: Backends) -> None:
    await backends.add(ONE)
    with pytest.raises(ConfigError, match="by hand: `rollout policy rm` strikes it off"):
        await backends.add(replace(ONE, owner="me"), 30)
    await backends.add(replace(ONE, window=1))
    assert (await only(backends)).window == 1


async def test_notes(backends: Backends) -> None:
    await backends.add(ONE)
    assert await backends.note("one", version=None, drained=True, why="behind", endpoint="completions")
    assert await only(backends) == replace(ONE, version=None, drained=True, why="behind", endpoint="completions")
    assert await backends.note("one", version=0, drained=False, why="")
    assert await only(backends) == replace(ONE, version=0, endpoint="completions")
    assert not await backends.note("two", why="x")
    assert len((await backends.view()).backends) == 1
    with pytest.raises(TypeError, match="no field 'owner'"):
        await backends.note("one", owner="me")


@pytest.mark.parametrize("url", ["node:80", "ftp://node:80", "http://", "http://node:http", ""])
async def test_a_wrong_url_or_kind_is_refused(backends: Backends, url: str) -> None:
    with pytest.raises(ConfigError, match="is no URL of a policy server"):
        await backends.add(replace(ONE, url=url))
    with pytest.raises(ConfigError, match=r"kind 'sglang' .* \(known: vllm, openai, nemo-rl\)"):
        await backends.add(replace(ONE, kind="sglang"))


def test_ids() -> None:
    urls = ("http://node1:8000/", "https://h", "http://h", "http://[::1]:9")
    assert [backend_id(url) for url in urls] == ["node1:8000", "h:443", "h:80", "::1:9"]


async def test_a_worker_sees_the_load_of_the_others(queue: Queue, backends: Backends) -> None:
    assert (await backends.exchange("w1", {"one": Load(100, 2, 50.5)})).loads == {}
    view = await backends.exchange("w2", {"one": Load(10, 1), "two": Load(5, 1, 2)})
    assert view.loads == {"one": Load(100, 2, 50.5)} and view.workers == ("w1",)
    assert (await backends.view()).loads == {"one": Load(110, 3, 50.5), "two": Load(5, 1, 2)}
    await backends.leave("w2")
    assert (await backends.view()).workers == ("w1",)
    at = (await backends.view()).now
    ((_, share),) = (await queue.execute("HGETALL", queue.key("loads"))).items()
    until = int(share.split()[0]) / 1000
    assert SHARE_SECONDS - 1 < until - at <= SHARE_SECONDS
    await queue.execute("HSET", queue.key("loads"), "w1", share.replace(share.split()[0], b"1"))
    assert (await backends.view()).workers == ()
    assert not await queue.execute("EXISTS", queue.key("loads"))


@pytest.mark.parametrize(
    ("backend", "policy", "state"),
    [
        ({}, {}, "ready"),
        ({"version": None}, {}, "ready"),
        ({}, {"version": 3}, "ready"),
        ({}, {"version": 4}, "behind"),
        ({"version": None}, {"version": 3}, "behind"),
        ({"version": None, "why": "it did not load"}, {"version": 3}, "behind"),
        ({"why": "it hangs"}, {"version": 3}, "down"),
        ({"why": "it hangs"}, {"paused": "new weights"}, "down"),
        ({"version": None}, {"version": 3, "paused": "new weights"}, "paused"),
        ({"drained": True, "why": "it hangs"}, {"version": 4, "paused": "x"}, "drained"),
    ],
)
def test_calls_go_to_what_is_ready(backend: dict[str, Any], policy: dict[str, Any], state: str) -> None:
    found, why = state_of(replace(ONE, **backend), PolicyState(**policy))
    assert found == state and bool(why) == (state != "ready")


def test_the_bound_on_what_is_begun() -> None:
    assert PolicyState().bound is None
    assert PolicyState(batch=8, max_staleness=0).bound == 8
    assert PolicyState(batch=8, max_staleness=2, updates=5, popped=40).bound == 24
