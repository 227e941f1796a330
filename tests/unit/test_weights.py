"""The policy's state in Redis: pauses under a lease, versions that rise, staleness in updates. No servers here."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from pipeline.backends import Backend, Backends, View
from pipeline.errors import ConfigError, PolicyError
from pipeline.queue import Queue
from pipeline.results import Rollout
from pipeline.staleness import with_staleness
from pipeline.trajectory import Sequence as Tokens, Trajectory, Turn, VersionRun
from pipeline.weights import Weights


@pytest.fixture
def backends(queue: Queue) -> Backends:
    return Backends(queue)


async def in_force(backends: Backends, *versions: int) -> None:
    await backends.start(versions[0], "")
    for version in versions[1:]:
        await backends.pause("t", 60.0, "weights", "keep", version)
        assert await backends.commit("t", version, "")


async def silence(queue: Queue) -> None:
    """The pause's lease runs out."""
    await queue.execute("HSET", queue.key("policy"), "pause_until", 1)


def sampled(*versions: int, outcome: str = "scored") -> Rollout:
    """A rollout with one token of each of these versions."""
    size = len(versions)
    tokens = Tokens(
        token_ids=np.arange(size, dtype=np.uint32), loss_mask=np.ones(size, np.uint8),
        logprobs=np.zeros(size, np.float32),
        versions=tuple(VersionRun(version, at, at + 1) for at, version in enumerate(versions)),
        turns=(Turn(kind="action", start=0, end=size),),
    )  # fmt: skip
    trajectory = Trajectory(sequences=(tokens,))
    return Rollout(id="r", group="g", sample=0, samples=1, lane="train", outcome=outcome, trajectory=trajectory)  # type: ignore[arg-type]


# -- pauses ----------------------------------------------------------------------------------------------------------


async def test_a_pause_names_its_owner_and_another_must_wait(backends: Backends) -> None:
    assert await backends.pause("a", 60.0, "weights 5", "keep") == 1
    assert await backends.pause("a", 60.0, "weights 6", "wait") == 1, "its own second pause is the same one"
    with pytest.raises(PolicyError, match="a has paused the policy"):
        await backends.pause("b", 60.0, "weights", "keep")
    state = (await backends.view()).policy
    assert (state.paused, state.mode, state.pause_owner, state.pauses) == ("weights 6", "wait", "a", 1)
    assert [await backends.lift("b"), await backends.lift("a"), await backends.lift("a")] == [False, True, False]
    assert await backends.pause("b", 60.0, "weights", "keep") == 2
    assert await backends.lift(), "a person ends anybody's"


async def test_a_pause_ends_with_its_lease(queue: Queue, backends: Backends) -> None:
    await in_force(backends, 4)
    await backends.pause("a", 60.0, "weights", "keep", 5)
    assert await queue.verb("policy_keep", "a", 60_000) == 1
    await silence(queue)
    assert (await backends.view()).policy.paused == ""
    assert await queue.verb("policy_keep", "a", 60_000) == 0
    assert not await backends.commit("a", 5, "/w/5")
    assert (await backends.view()).policy.version == 4


async def test_a_pause_without_a_lease_holds(queue: Queue, backends: Backends) -> None:
    await backends.pause("a person", 0.0, "maintenance", "keep")
    assert (await backends.view()).policy.paused == "maintenance"
    assert await queue.execute("HEXISTS", queue.key("policy"), "pause_until") == 0


async def test_a_commit_is_one_update_however_often_it_is_sent(queue: Queue, backends: Backends) -> None:
    await in_force(backends, 4)
    await backends.pause("a", 60.0, "weights", "keep", 9)
    assert [await backends.commit("a", 9, "/w/9") for _ in range(2)] == [True, True]
    state = (await backends.view()).policy
    assert (state.version, state.path, state.updates, state.ordinal, state.paused) == (9, "/w/9", 1, 2, "")
    assert await queue.execute("ZRANGE", queue.key("versions"), 0, -1) == [b"4", b"9"]


async def test_versions_only_rise_but_a_run_starts_anywhere(backends: Backends) -> None:
    await in_force(backends, 4, 9)
    for version in (9, 3):
        with pytest.raises(PolicyError, match=f"weights {version} can't follow weights 9"):
            await backends.pause("a", 60.0, "weights", "keep", version)
    await in_force(backends, 3)
    state = (await backends.view()).policy
    assert (state.version, state.ordinal, state.updates) == (3, 3, 0)


async def test_a_start_that_moves_weights_leaves_no_server_a_version(backends: Backends) -> None:
    await backends.add(Backend(id="a", url="http://h:1", version=3))
    await backends.start(3, "/w/3", moves=True)
    assert (await backends.view()).backends[0].version is None


async def test_only_the_newest_thousand_versions_are_kept(queue: Queue, backends: Backends) -> None:
    await queue.execute("ZADD", queue.key("versions"), *[part for n in range(1, 1001) for part in (n, n)])
    await queue.execute("HSET", queue.key("policy"), "ordinal", 1000)
    await in_force(backends, 2000)
    assert await queue.execute("ZCARD", queue.key("versions")) == 1000
    assert await queue.execute("ZRANGE", queue.key("versions"), 0, 0) == [b"2"]


async def test_a_worker_says_which_pause_it_knows(backends: Backends) -> None:
    await backends.exchange("w", {}, 0)
    number = await backends.pause("a", 60.0, "weights", "keep")
    view: View = await backends.exchange("w", {}, 0)
    assert view.policy.pauses == number
    assert (await backends.view()).seen == {"w": 0}
    await backends.exchange("w", {}, view.policy.pauses)
    assert (await backends.view()).seen == {"w": number}


async def test_one_process_at_a_time_changes_a_server(backends: Backends) -> None:
    assert [await backends.raising("a", who, 30.0) for who in ("x", "x", "y")] == [True, True, False]
    await backends.raised("a", "y")
    assert not await backends.raising("a", "y", 30.0)
    assert [await backends.still_raising("a", who, 30.0) for who in ("x", "y")] == [True, False]
    assert not await backends.still_raising("b", "x", 30.0), "one that has run out can't be renewed"
    await backends.raised("a", "x")
    assert await backends.raising("a", "y", 30.0)


@pytest.mark.parametrize(
    ("call", "sentence"),
    [
        ({"version": -1, "path": "/w"}, "no version of weights"),
        ({"version": True, "path": "/w"}, "no version of weights"),
        ({"version": 1}, "either a path"),
        ({"version": 1, "path": "/w", "mode": "kept"}, "mode 'kept' is unknown"),
    ],
)
async def test_a_wrong_update_is_a_sentence(backends: Backends, call: dict, sentence: str) -> None:  # type: ignore[type-arg]
    with pytest.raises(ConfigError, match=sentence):
        await Weights(backends, "t").update(**call)


async def test_an_update_without_servers_is_refused_and_a_start_waits_for_them(
    backends: Backends, tmp_path: Path
) -> None:
    weights = Weights(backends, "t")
    (tmp_path / "model.safetensors").touch()
    assert (await weights.start(1, path=tmp_path)).updated == ()
    with pytest.raises(PolicyError, match=r"no policy server took weights 2 \(none is registered\); the old ones stay"):
        await weights.update(2, path=tmp_path)
    state = (await backends.view()).policy
    assert (state.version, state.path, state.paused) == (1, str(tmp_path), "")


async def test_a_resume_without_a_pause_is_refused(backends: Backends) -> None:
    with pytest.raises(PolicyError, match="call `pause` first"):
        await Weights(backends, "t").resume(3)
    with pytest.raises(PolicyError, match="is not paused"):
        await Weights(backends, "t").adopt()


# -- staleness -------------------------------------------------------------------------------------------------------


async def aged(queue: Queue, *rollouts: Rollout, lane: str = "train") -> list[tuple[int | None, bool]]:
    found: Sequence[Rollout] = await with_staleness(queue, rollouts, lane)
    return [(rollout.staleness, rollout.stale) for rollout in found]


async def test_staleness_counts_updates_since_the_oldest_token(queue: Queue, backends: Backends) -> None:
    await in_force(backends, 10, 20, 30)
    rollouts = [sampled(30), sampled(20, 30), sampled(30, 10), sampled(5), sampled()]
    assert await aged(queue, *rollouts) == [(0, False), (1, False), (2, False), (3, False), (None, False)]
    assert rollouts[1].versions == (20, 30)


async def test_without_versions_nobody_knows_it(queue: Queue) -> None:
    assert await aged(queue, sampled(0)) == [(None, False)]


async def test_the_limit_is_the_runs_and_of_its_lane(queue: Queue, backends: Backends) -> None:
    await backends.start(1, "", max_staleness=0, lane="train")
    await backends.pause("t", 60.0, "weights", "keep", 2)
    await backends.commit("t", 2, "")
    assert await aged(queue, sampled(1), sampled(2), sampled(1, outcome="failed")) == [
        (1, True),
        (0, False),
        (1, False),
    ]
    assert await aged(queue, sampled(1), lane="eval") == [(1, False)]


async def test_without_a_run_the_configuration_limits(queue: Queue, backends: Backends) -> None:
    queue.config = queue.config.changed({"policy.max_staleness": 0})
    await in_force(backends, 1, 2)
    assert await aged(queue, sampled(1), lane="eval") == [(1, True)]


async def test_after_a_return_to_lower_versions_the_later_ones_are_old(queue: Queue, backends: Backends) -> None:
    await in_force(backends, 1, 2, 3)
    await backends.start(2, "")
    assert await aged(queue, sampled(3), sampled(2)) == [(1, False), (0, False)]
