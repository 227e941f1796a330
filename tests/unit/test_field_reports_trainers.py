"""Field reports H01, H03, H06 and H08 as each trainer gets them: ids, logprobs and versions of the reports, handed on.

What they say of the engine's side is in test_field_reports_tokens.py; H07 is in tests/integration/test_client.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pipeline.adapters import gym, prime_rl, skyrl, slime, trl, verl
from pipeline.adapters.padded import flat, padded
from pipeline.adapters.rows import mean_rewards, usable_rows
from pipeline.builder import TrajectoryBuilder
from pipeline.results import Failed, Group, Rollout
from tests.nemo_rl import calls_of

SYSTEM, ASKED, TOLD = [7, 1, 4, 2, 5], [7, 2, 6, 5, 8], [9, 3, 6, 5, 8]
"""A system turn that INIT put in front (H03 c), the question, and what a tool said: all of it unsampled."""
FIRST, SECOND = ([1, 2, 6], [-0.1, -0.3, -4.6]), ([2, 6], [-0.7, -0.2])
"""The closing id 6 is sampled, and unlikely (H03 a); [1, 2] would be 3 if somebody read the text anew (H01)."""
IDS = [*SYSTEM, *ASKED, *FIRST[0], *TOLD, *SECOND[0]]
PROMPT = len(SYSTEM) + len(ASKED)
MASK = [1, 1, 1, 0, 0, 0, 0, 0, 1, 1]
LOGPROBS = np.array([*FIRST[1], 0, 0, 0, 0, 0, *SECOND[1]], np.float32).tolist()
VERSIONS = [4, 4, 4, -1, -1, -1, -1, -1, 5, 5]
"""The weights changed between the two calls (H06)."""


def scored() -> Rollout:
    builder = TrajectoryBuilder()
    builder.prompt(SYSTEM)
    builder.prompt(ASKED)
    builder.action(*FIRST, [(4, 0, 3)], finish_reason="stop")
    builder.observation(TOLD)
    builder.action(*SECOND, [(5, 0, 2)], finish_reason="stop")
    return Rollout(
        id="g.0", group="g", sample=0, samples=4, lane="train", outcome="scored", reward=1.0, trajectory=builder.build()
    )


def one(values: dict[str, Any], *names: str) -> tuple[Any, ...]:
    """Of the only row of a batch."""
    return tuple(np.asarray(values[name][0]).tolist() for name in names)


def of_gym(rollout: Rollout) -> tuple[Any, ...]:
    answer = gym.answer({"responses_create_params": {}}, rollout)
    ids: list[int] = []
    mask: list[int] = []
    logprobs: list[float] = []
    for seen, said, chances in calls_of(answer["response"]["output"]):
        ids += [*seen, *said]
        mask += [0] * len(seen) + [1] * len(said)
        logprobs += [0.0] * len(seen) + chances
    return ids, mask[PROMPT:], logprobs[PROMPT:]


def of_verl(rollout: Rollout) -> tuple[Any, ...]:
    [made] = verl.agent_loop_output(rollout)
    return made["prompt_ids"] + made["response_ids"], made["response_mask"], made["response_logprobs"]


def of_trl(rollout: Rollout) -> tuple[Any, ...]:
    prompt, response, mask, logprobs = one(
        trl.rollout_rows([Group("g", (rollout,))], filler=0), "prompt_ids", "completion_ids", "env_mask", "logprobs"
    )
    return prompt + response, mask, logprobs


def of_slime(rollout: Rollout) -> tuple[Any, ...]:
    [[made]] = slime.to_samples([Group("g", (rollout,))])
    return made["tokens"], made["loss_mask"], made["rollout_log_probs"]


def of_skyrl(rollout: Rollout) -> tuple[Any, ...]:
    names = ("prompt_token_ids", "response_ids", "loss_masks", "rollout_logprobs")
    prompt, response, mask, logprobs = one(skyrl.generator_output([rollout], filler=0), *names)
    return prompt + response, mask, logprobs


def of_prime_rl(rollout: Rollout) -> tuple[Any, ...]:
    [made] = prime_rl.training_samples([Group("g", (rollout,))])
    return made["token_ids"], [int(item) for item in made["mask"][PROMPT:]], made["logprobs"][PROMPT:]


def of_padded(rollout: Rollout) -> tuple[Any, ...]:
    made = vars_of(padded(usable_rows([Group("g", (rollout,))]), pad=0))
    ids, mask, logprobs = one(made, "input_ids", "response_mask", "logprobs")
    return ids, [int(item) for item in mask], logprobs


def of_flat(rollout: Rollout) -> tuple[Any, ...]:
    made = flat(usable_rows([Group("g", (rollout,))]))
    mask = made.loss_mask.astype(int).tolist()
    assert not any(mask[:PROMPT])
    return made.token_ids.tolist(), mask[PROMPT:], made.logprobs[PROMPT:].tolist()


def vars_of(batch: Any) -> dict[str, Any]:
    return {name: getattr(batch, name) for name in type(batch).__slots__}


@pytest.mark.parametrize("handed_on", [of_verl, of_trl, of_gym, of_slime, of_skyrl, of_prime_rl, of_padded, of_flat])
def test_ids_mask_and_logprobs_are_those_that_were_sampled(handed_on: Callable[[Rollout], tuple[Any, ...]]) -> None:
    """H01, H03: the closing id keeps its logprob and mask 1; headers, system, user and tool have mask 0."""
    assert handed_on(scored()) == (IDS, MASK, LOGPROBS)


def test_the_oldest_and_the_newest_weights_are_told() -> None:
    """H06: 4 sampled the first reply, 5 the second."""
    rollout = scored()
    group = Group("g", (rollout,))
    [made] = verl.agent_loop_output(rollout)
    assert (made["extra_fields"]["min_global_steps"], made["extra_fields"]["max_global_steps"]) == (4, 5)
    assert slime.to_samples([group])[0][0]["weight_versions"] == ["4", "5"]
    rows = trl.rollout_rows([group], filler=0)
    assert (rows["version_min"], rows["version_max"]) == ([4], [5])
    assert padded(usable_rows([group]), pad=0).versions.tolist() == [VERSIONS]
    assert gym.answer({"responses_create_params": {}}, rollout)["rollout"]["versions"] == [4, 5]


def test_a_fault_of_the_infrastructure_changes_no_mean() -> None:
    """H08: true rewards 1, 0, 1 and a fourth that met a dead server: 2/3 wherever a contract wants a number."""
    first = scored()
    rewards = [1.0, 0.0, 1.0]
    members = [
        Rollout(**{**vars_of(first), "id": f"g.{at}", "sample": at, "reward": value})
        for at, value in enumerate(rewards)
    ]
    failed = Failed(kind="policy", stage="run", why="no usable policy server")
    members.append(Rollout(id="g.3", group="g", sample=3, samples=4, lane="train", outcome="failed", failure=failed))
    group = Group("g", tuple(members), wanted=4)
    assert group.mean == pytest.approx(2 / 3) and mean_rewards(members)["g"] == group.mean
    assert trl.rollout_rows([group], filler=0)["reward"] == [*rewards, None]
    assert np.mean(skyrl.generator_output(members, filler=0)["rewards"]) == pytest.approx(2 / 3)
    assert np.mean([sample["reward"] for sample in slime.to_samples([group])[0]]) == pytest.approx(2 / 3)
    advantages = [sample["advantages"][-1] for sample in prime_rl.training_samples([group])]
    assert advantages == pytest.approx([1 / 3, -2 / 3, 1 / 3])
    assert padded(usable_rows([group]), pad=0).facts.rewards.tolist() == rewards
    assert gym.status_of(members[3]) == 503
