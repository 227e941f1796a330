"""The queue's verbs: groups that close before all their members have ended, and lanes that are paused."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pipeline.audit import audit
from pipeline.backends import Backends
from pipeline.inspect import begun, depth, where
from pipeline.leases import Claim, Popped
from pipeline.queue import Queue
from tests import line


async def start(queue: Queue, group: str, count: int) -> list[Claim]:
    """All members of the group in RUN's hands, in order."""
    for claim in await queue.claim("init", count, "w"):
        assert await line.pass_on(queue, claim, "init") == "OK"
    claims = await queue.claim("run", count, "w")
    assert {claim.id.partition(".")[0] for claim in claims} == {group}
    return claims


async def score(queue: Queue, *claims: Claim) -> None:
    """Through RUN and EVAL."""
    for claim in claims:
        assert await line.pass_on(queue, claim, "run") == "OK"
        (last,) = await queue.claim("eval", 1, "w")
        assert await line.pass_on(queue, last, "eval") == "OK"


async def popped(queue: Queue) -> dict[str, list[Popped]]:
    return dict(await queue.pop_groups("train", 9, "t", 60))


async def outcomes(queue: Queue, *ids: str) -> list[tuple[str, str]]:
    return [(await line.field(queue, id, "outcome"), await line.field(queue, id, "kind")) for id in ids]


async def clean(queue: Queue) -> None:
    assert await audit(queue) == []
    assert await line.leftovers(queue) == []


async def test_with_the_wanted_number_scored_those_that_wait_are_cancelled_and_those_in_work_told(queue: Queue) -> None:
    await line.put(queue, "g", 5, asked=2, wanted=2)
    claims = await start(queue, "g", 3)  # two still wait at INIT
    await score(queue, *claims[:2])

    assert await outcomes(queue, "g.3", "g.4") == [("cancelled", "closed")] * 2
    assert await queue.beat("w", None, [("run", claims[2].id, claims[2].token)]) == [
        "its group had its 2 scored members without it"
    ]
    assert await popped(queue) == {}, "one has not ended: its worker must be heard first"
    assert await line.give_up(queue, claims[2], "run", "back") == "CANCELLED"
    ((group, members),) = (await popped(queue)).items()
    assert group == "g" and len(members) == 5
    assert await outcomes(queue, "g.0", "g.2") == [("scored", ""), ("cancelled", "closed")]
    assert await line.field(queue, "g.2", "late") == ""
    await queue.take(members)
    await clean(queue)


async def test_a_worker_that_dies_over_a_cut_rollout_ends_it(queue: Queue) -> None:
    await line.put(queue, "g", 2, asked=1, wanted=1)
    claims = await start(queue, "g", 2)
    await score(queue, claims[0])
    await queue.tick()
    await line.silence(queue, "run", claims[1].id)
    await queue.tick()
    assert await outcomes(queue, claims[1].id) == [("cancelled", "closed")]
    assert len((await popped(queue))["g"]) == 2


async def test_failures_do_not_count_and_a_group_without_enough_ends_with_its_last(queue: Queue) -> None:
    await line.put(queue, "g", 3, asked=2, wanted=2)
    claims = await start(queue, "g", 3)
    await line.give_up(queue, claims[0], "run", "fatal")
    await line.give_up(queue, claims[1], "run", "fatal")
    await score(queue, claims[2])
    assert len((await popped(queue))["g"]) == 3
    assert (await queue.execute("HGET", queue.key("g", "g"), "closed")) is None


async def test_the_last_member_of_all_closes_nothing(queue: Queue) -> None:
    await line.put(queue, "g", 2, asked=2, wanted=2)
    await score(queue, *await start(queue, "g", 2))
    assert (await queue.execute("HGET", queue.key("g", "g"), "closed")) is None
    assert len((await popped(queue))["g"]) == 2


async def test_the_rest_goes_on_and_comes_later_marked(queue: Queue) -> None:
    await line.put(queue, "g", 4, asked=2, wanted=2, rest="later")
    claims = await start(queue, "g", 4)
    await score(queue, *claims[:2])
    first = (await popped(queue))["g"]
    assert {item.id for item in first} == {claims[0].id, claims[1].id}
    await score(queue, claims[2])
    assert await popped(queue) == {}, "the rest comes as one"
    await queue.take(first)
    assert await audit(queue) == []
    await score(queue, claims[3])
    second = (await popped(queue))["g"]
    assert {item.id for item in second} == {claims[2].id, claims[3].id}
    assert [await line.field(queue, item.id, "late") for item in (*second,)] == ["1", "1"]
    await queue.take(second)
    await clean(queue)


async def test_a_first_part_that_is_given_back_comes_again(queue: Queue) -> None:
    await line.put(queue, "g", 3, asked=2, wanted=2, rest="later")
    claims = await start(queue, "g", 3)
    await score(queue, *claims[:2])
    first = (await popped(queue))["g"]
    await queue.hand_back(first)
    again = (await popped(queue))["g"]
    assert {item.id for item in again} == {item.id for item in first}
    await queue.tick()
    await line.silence(queue, "done", *(item.id for item in again))
    await score(queue, claims[2])  # it ended before anybody had the first part: it belongs to it
    await queue.tick()
    assert len((await popped(queue))["g"]) == 3
    assert await line.field(queue, claims[2].id, "late") == ""


async def test_a_deadline_counts_from_the_first_start_and_closes_with_what_there_is(queue: Queue) -> None:
    await line.put(queue, "g", 3, life=500.0)
    await line.put(queue, "waits", 2, life=500.0)
    claims = await start(queue, "g", 3)
    await score(queue, claims[0])
    await queue.tick()
    assert await queue.execute("ZRANGE", queue.key("closing"), 0, -1) == [b"g"]
    await queue.execute("ZADD", queue.key("closing"), 1, "g")
    await queue.tick()
    assert (await queue.execute("HGET", queue.key("g", "g"), "closed")) == b"deadline"
    for claim in claims[1:]:
        assert await line.give_up(queue, claim, "run", "back") == "CANCELLED"
    assert await outcomes(queue, *(claim.id for claim in claims)) == [("scored", "")] + [("cancelled", "closed")] * 2
    assert len((await popped(queue))["g"]) == 3
    assert await line.state(queue, "waits.0") == ("init", "ready")


async def test_a_group_that_ended_in_time_has_no_deadline_any_more(queue: Queue) -> None:
    await line.put(queue, "g", 1, life=500.0)
    await score(queue, *await start(queue, "g", 1))
    assert await queue.execute("ZCARD", queue.key("closing")) == 0


async def bounded(queue: Queue, batch: int) -> None:
    await Backends(queue).start(1, "", batch=batch, max_staleness=0, lane="train")


async def test_spare_members_take_no_place_of_others_under_a_bound(queue: Queue) -> None:
    """Groups of 2 + 2 with a batch of 4: two groups begin at once, as without the spare ones."""
    await bounded(queue, 4)
    for name in ("a", "b", "c"):
        await line.put(queue, name, 4, asked=2, wanted=2)
    claims = await queue.claim("init", 99, "w")
    assert sorted({claim.id[0] for claim in claims}) == ["a", "b"] and len(claims) == 8
    assert await begun(queue, "train") == 4
    for claim in claims:
        await line.pass_on(queue, claim, "init")
    runs = {claim.id: claim for claim in await queue.claim("run", 99, "w")}
    await line.give_up(queue, runs["a.0"], "run", "fatal")  # a spare one takes its place: nothing is free
    assert await begun(queue, "train") == 4 and await queue.claim("init", 99, "w") == []
    await score(queue, runs["a.1"], runs["a.2"])
    await line.give_up(queue, runs["a.3"], "run", "back")
    assert await begun(queue, "train") == 4 and await queue.claim("init", 99, "w") == []
    assert await audit(queue) == []
    groups = await popped(queue)
    await queue.take(groups["a"])
    assert await begun(queue, "train") == 2
    assert await queue.claim("init", 99, "w") == [], "two are popped: nothing more before the update"


async def test_what_goes_on_past_the_close_is_not_spare(queue: Queue) -> None:
    await bounded(queue, 2)
    await line.put(queue, "a", 4, asked=2, wanted=2, rest="later")
    claims = await start(queue, "a", 4)
    assert await begun(queue, "train") == 2
    await score(queue, *claims[:2])
    assert await begun(queue, "train") == 4
    assert await audit(queue) == []


async def test_a_rest_that_waits_behind_a_held_first_part_keeps_nothing_from_beginning(queue: Queue) -> None:
    """The trainer holds the first part and waits for another group: the rest, not yet to be had, takes no place."""
    await bounded(queue, 2)
    await line.put(queue, "a", 4, asked=2, wanted=2, rest="later")
    await line.put(queue, "b", 2)
    claims = await start(queue, "a", 4)
    await score(queue, *claims[:2])
    first = (await popped(queue))["a"]
    await score(queue, *claims[2:])
    assert await popped(queue) == {} and await begun(queue, "train") == 2
    await queue.execute("HINCRBY", queue.key("policy"), "updates", 1)
    assert {claim.id for claim in await queue.claim("init", 99, "w")} == {"b.0", "b.1"}
    await queue.take(first)
    await queue.take((await popped(queue))["a"])
    assert await queue.execute("HGET", queue.key("policy"), "popped") == b"4"
    assert await audit(queue) == []


async def test_of_two_words_that_end_a_rollout_the_first_counts(queue: Queue) -> None:
    """Cut by the close and then cancelled by hand, by hand and then cut, and cut before its deadline passed."""
    await line.put(queue, "g", 4, asked=1, wanted=1)
    one, by_hand, cut, overdue = await start(queue, "g", 4)
    await queue.cancel([by_hand.id], "by hand")
    await score(queue, one)
    await queue.cancel([cut.id], "by hand")
    await queue.execute("HSET", queue.key("r", overdue.id), "deadline", 1)
    await queue.execute("ZADD", queue.key("due"), 1, overdue.id)
    await queue.tick()
    for claim in (by_hand, cut, overdue):
        assert await line.give_up(queue, claim, "run", "back") == "CANCELLED"
    closed, why = ("cancelled", "closed"), "its group had its 1 scored members without it"
    assert await outcomes(queue, by_hand.id, cut.id, overdue.id) == [("cancelled", "cancelled"), closed, closed]
    assert [await line.field(queue, item.id, "why") for item in (by_hand, cut, overdue)] == ["by hand", why, why]


async def test_the_rest_of_a_group_that_the_server_lost_is_late_again(queue: Queue) -> None:
    """Members 0 and 1 were popped before the server came back empty; the client enqueues the others again."""
    await line.put(queue, "g", 4, asked=2, wanted=2, life=500.0, rest="later", only=(2, 3), closed="usable")
    claims = await start(queue, "g", 2)
    assert await queue.execute("ZCARD", queue.key("closing")) == 0, "it has closed already"
    await score(queue, claims[0])
    assert await popped(queue) == {}
    await score(queue, claims[1])
    rest = (await popped(queue))["g"]
    assert [await line.field(queue, item.id, "late") for item in rest] == ["1", "1"]
    await queue.take(rest)
    await clean(queue)


async def test_of_a_paused_lane_nothing_new_begins_and_begun_groups_end(queue: Queue) -> None:
    await line.put(queue, "a", 3)
    await line.put(queue, "b", 2)
    await line.put(queue, "e", 1, lane="eval")
    first = await line.one(queue)
    await queue.pause_lane("train", "the cluster is wanted")
    claims = await queue.claim("init", 99, "w")
    assert first.id.startswith("a.")
    assert sorted(claim.id for claim in claims) == sorted({"a.0", "a.1", "a.2", "e.0"} - {first.id})
    assert "paused for 0 s (the cluster is wanted)" in (await where(queue, ["b.0"]))["b.0"].why
    assert "rollout run resume" in (await depth(queue))["init"]["paused"]["train"]
    await queue.resume_lane("train")
    assert len(await queue.claim("init", 99, "w")) == 2
    assert (await depth(queue))["init"]["paused"] == {}


@pytest.mark.parametrize("rest", ["cancel", "later"])
async def test_enqueue_sent_again_changes_nothing(queue: Queue, rest: str) -> None:
    await line.put(queue, "g", 3, asked=2, wanted=2, rest=rest)
    await line.put(queue, "g", 3, asked=2, wanted=2, rest=rest)
    assert await line.count(queue, "enqueued") == 3


async def test_a_group_that_is_enqueued_again_with_more_samples_closes_as_it_was_last_asked_to(queue: Queue) -> None:
    await bounded(queue, 9)
    await line.put(queue, "g", 3, asked=2, wanted=2, life=500.0)
    claims = await start(queue, "g", 3)
    await score(queue, claims[0])
    assert await begun(queue, "train") == 2
    await line.put(queue, "g", 4, asked=4)
    assert await begun(queue, "train") == 4 and await queue.execute("ZCARD", queue.key("closing")) == 0
    await score(queue, claims[1], claims[2])
    assert await popped(queue) == {}, "it waits for all four now"
    await line.put(queue, "g", 6, asked=5, wanted=5)
    claims = await start(queue, "g", 3)
    await score(queue, claims[0])
    assert await popped(queue) == {}
    await score(queue, claims[1])
    assert await line.give_up(queue, claims[2], "run", "back") == "CANCELLED"
    members = (await popped(queue))["g"]
    assert (
        sorted(await outcomes(queue, *(item.id for item in members)))
        == [("cancelled", "closed")] + [("scored", "")] * 5
    )
    await queue.take(members)
    await clean(queue)


async def test_whatever_happens_in_whatever_order_each_member_ends_once(queue: Queue) -> None:
    """Random work on groups that close in every way: the line stays sound, and all of it comes out exactly once."""
    chance = random.Random(7)
    await bounded(queue, 6)
    await queue.execute("HSET", queue.key("policy"), "max_staleness", 1)
    ids: list[str] = []
    for name in range(12):
        asked = chance.randint(1, 3)
        extra = chance.randint(0, 2)
        about: dict[str, Any] = {"wanted": chance.choice([0, asked]), "rest": chance.choice(["cancel", "later"])}
        life = chance.choice([0.0, 500.0])
        ids += await line.put(queue, f"g{name}", asked + extra, asked=asked, life=life, **about)
    held: dict[str, list[Claim]] = {"init": [], "run": [], "eval": []}
    taken: list[str] = []
    for turn in range(3000):
        if len(taken) == len(ids):
            break
        stage = chance.choice(list(held))
        act = chance.choice(["claim", "claim", "pass", "pass", "fail", "lose", "close", "pop", "pop"])
        if act == "claim":
            held[stage] += await queue.claim(stage, 2, "w")
        elif act in ("pass", "fail", "lose") and held[stage]:
            claim = held[stage].pop(chance.randrange(len(held[stage])))
            if act == "pass":
                await line.pass_on(queue, claim, stage)
            elif act == "fail":
                await line.give_up(queue, claim, stage, chance.choice(["fatal", "back", "loss"]))
            else:
                await queue.tick()
                await line.silence(queue, stage, claim.id)
                await queue.tick()
        elif act == "close":
            for group in await queue.execute("ZRANGE", queue.key("closing"), 0, 0):
                await queue.execute("ZADD", queue.key("closing"), "XX", 1, group)
            await queue.tick()
        elif act == "pop":
            for _, members in await queue.pop_groups("train", 1, "t", 60):
                if chance.random() < 0.3:
                    await queue.hand_back(members)
                    continue
                assert await queue.take(members, drop=chance.random() < 0.2) == ["OK"] * len(members)
                taken += [member.id for member in members]
            if chance.random() < 0.3:  # an update admits more
                await queue.execute("HINCRBY", queue.key("policy"), "updates", 1)
        if turn % 20 == 0:
            assert await audit(queue) == []
    assert sorted(taken) == sorted(ids)
    await clean(queue)
    assert await queue.execute("HGET", queue.key("spare"), "train") in (None, b"0")
