"""Real verl on a real line: Redis, three worker processes, a scripted policy, and verl's own agent-loop workers.

`verl_play.py` runs in `.venv-trainers` and hands back what verl made of the rollouts, beside the rollouts themselves.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.audit import audit
from pipeline.client import RolloutClient
from pipeline.config import Config
from pipeline.envelope import Task
from tests.trainers import trainers
from workers import demo

HERE = Path(__file__).parent
SCRIPT = HERE / "verl_play.py"
HANDLER = "trainer_handlers:Talks"
SAMPLES = 4
PROMPT, RESPONSE = 256, 512
MODEL = {
    "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 8, "intermediate_size": 8,
    "num_hidden_layers": 1, "num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 4096,
}  # fmt: skip

CASES: dict[str, dict[str, Any]] = {
    "v0": {"version": "v0", "plays": [["1", "0", "cut", "fail"], ["1", "1", "0", "0"]]},
    "v1": {"version": "v1", "plays": [["1", "0", "fail", "two"], ["none", "fail", "none", "none"]]},
    "none scored": {"version": "v0", "plays": [["none", "fail", "none", "none"]]},
    "two in v0": {"version": "v0", "plays": [["1", "two", "0", "0"]]},
    "long": {"version": "v0", "plays": [["1", "0", "1", "0"]], "response": 24},
    "late": {"version": "v0", "plays": [["1", "1", "1", "1"]], "loop": {"handler": HANDLER, "timeout": 0.01}},
}
"""How the samples of each row end, one row an inner list (`trainer_handlers.Talks`)."""


@pytest.fixture(scope="module")
def site() -> Iterator[tuple[Config, Path]]:
    """The line's processes, and the folder with its settings."""
    trainers.require()
    config = Config().changed({"handlers.path": str(HERE), "retry.backoff": 0.05})
    task = Task(handler=HANDLER, data={"question": "Which files are there?", "plays": ["1"]})
    with demo.running(demo.Plan(config=config, handler=HANDLER, tasks=[task], samples=1)) as (config, _, folder):
        (folder / "tokenizer" / "config.json").write_text(json.dumps(MODEL))
        yield config, folder


@pytest.fixture(scope="module")
def made(site: tuple[Config, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What verl made of each case, all in one process: to import verl takes ten seconds."""
    _, folder = site
    about = {
        "settings": str(folder / "config.yaml"), "model": str(folder / "tokenizer"), "samples": SAMPLES,
        "response": RESPONSE, "loop": {"handler": HANDLER, "timeout": 60},
    }  # fmt: skip
    works = {
        name: {**about, **case, "rows": [row(at, each) for at, each in enumerate(case["plays"])]}
        for name, case in CASES.items()
    }
    out = tmp_path_factory.mktemp("verl")
    (out / "works.json").write_text(json.dumps(works))
    trainers.run(SCRIPT, str(out / "works.json"), str(out / "made.json"), timeout=300)
    found: dict[str, Any] = json.loads((out / "made.json").read_text())
    return found


def row(at: int, plays: list[str]) -> dict[str, Any]:
    """As verl's dataset hands it on."""
    return {
        "uid": f"prompt-{at}", "data_source": "talks", "extra_info": {"index": at}, "plays": plays,
        "reward_model": {"style": "rule", "ground_truth": ""},
        "raw_prompt": [{"role": "user", "content": f"Which files are in folder {at}?"}],
    }  # fmt: skip


def test_v0_pads_our_rollouts_and_computes_their_advantages(made: dict[str, Any]) -> None:
    """Rewards 1, 0, 1 truncated and one failed: the mean that verl computes is 2/3, and the failed row is no signal."""
    made = made["v0"]
    assert "error" not in made, made.get("error")
    assert made["dtypes"] == {
        **dict.fromkeys(("prompts", "responses", "response_mask", "input_ids", "attention_mask"), "torch.int64"),
        "position_ids": "torch.int64", "rollout_log_probs": "torch.float32", "rm_scores": "torch.float32",
    }  # fmt: skip
    for at, id in enumerate(made["rollout_id"]):
        rollout = made["rollouts"][id]
        assert rollout["prompt"] == made["uid"][at] and rollout["samples"] == SAMPLES
        if rollout["outcome"] == "scored":
            compare(made, at, rollout)
        else:
            assert (sum(made["response_mask"][at]), made["failed"][at]) == (0, 1.0)
            assert set(made["rollout_log_probs"][at]) == {0.0} and set(made["advantages"][at]) == {0.0}
    first = made["uid"].index("prompt-0")
    rewards = [sum(made["rm_scores"][first + at]) for at in range(SAMPLES)]
    assert np.mean(rewards) == pytest.approx(2 / 3) and sorted(rewards)[:2] == pytest.approx([0.0, 2 / 3])
    signs = {made["rollout_id"][at]: np.sign(sum(values)) for at, values in enumerate(made["advantages"])}
    for id, rollout in made["rollouts"].items():
        assert signs[id] == {1.0: 1, 0.0: -1, None: 0}[rollout["reward"]]
    assert made["truncated"].count(1.0) == 1 and len({item["group"] for item in made["rollouts"].values()}) == 2


def compare(made: dict[str, Any], at: int, rollout: dict[str, Any]) -> None:
    """One padded row against the sequence that the line handed over."""
    (sequence,) = rollout["sequences"]
    ids, mask, cut = sequence["ids"], sequence["mask"], sequence["mask"].index(1)
    size = len(ids) - cut
    assert 0 < size < RESPONSE and 0 in mask[cut:], "two actions, and what the tool said between them"
    assert made["prompts"][at][PROMPT - cut :] == ids[:cut] and made["responses"][at][:size] == ids[cut:]
    assert made["input_ids"][at][PROMPT - cut : PROMPT + size] == ids
    assert made["attention_mask"][at] == [0] * (PROMPT - cut) + [1] * len(ids) + [0] * (RESPONSE - size)
    assert made["position_ids"][at][PROMPT - cut : PROMPT + size] == list(range(len(ids)))
    assert made["response_mask"][at] == mask[cut:] + [0] * (RESPONSE - size)
    expected = np.float32(sequence["logprobs"][cut:] + [0.0] * (RESPONSE - size))
    assert np.array_equal(np.float32(made["rollout_log_probs"][at]), expected)
    assert [where for where, value in enumerate(made["rm_scores"][at]) if value] in ([], [size - 1])
    assert sum(made["rm_scores"][at]) == rollout["reward"]
    assert (made["min_global_steps"][at], made["max_global_steps"][at]) == (
        min(sequence["versions"]), max(sequence["versions"]),
    )  # fmt: skip
    assert made["__num_turns__"][at] == 4 and made["failed"][at] == 0.0


def test_v1_leaves_failed_sessions_out_and_takes_several_sequences(made: dict[str, Any]) -> None:
    made = made["v1"]
    assert "error" not in made, made.get("error")
    assert (made["tags"]["prompt-0"]["status"], made["tags"]["prompt-1"]["status"]) == ("finished", "failure")
    ids = {key: item["extra_fields"]["rollout_id"] for key, item in made["stored"].items()}
    by_id = {id: made["rollouts"][id] for id in ids.values()}
    assert {item["outcome"] for item in by_id.values()} == {"scored"} and len(by_id) == 3 and len(ids) == 4
    for key, stored in made["stored"].items():
        sequence = by_id[ids[key]]["sequences"][int(key.split("_")[2])]
        cut = sequence["mask"].index(1)
        assert stored["prompts"] + stored["responses"] == sequence["ids"] == stored["input_ids"]
        assert stored["response_mask"] == stored["loss_mask"] == sequence["mask"][cut:]
        assert np.array_equal(np.float32(stored["rollout_log_probs"]), np.float32(sequence["logprobs"][cut:]))
        assert stored["rm_scores"] == [0.0] * (len(stored["responses"]) - 1) + [by_id[ids[key]]["reward"]]
        assert stored["tag"]["min_global_steps"] == min(sequence["versions"])
        advantage = {round(value, 4) for value, kept in zip(
            made["advantages"][key], stored["response_mask"], strict=False) if kept}  # fmt: skip
        assert advantage == ({0.5773} if by_id[ids[key]]["reward"] else {-1.1547}), "mean 2/3, of three sessions"
    (sampling,) = {json.dumps(item["sampling"]) for item in made["rollouts"].values()}
    assert json.loads(sampling) == {"temperature": 0.7, "top_p": 1.0}


def test_where_nothing_was_scored_no_row_is_trained_on(made: dict[str, Any]) -> None:
    none = made["none scored"]
    assert "error" not in none, none.get("error")
    assert none["failed"] == [1.0] * SAMPLES and not np.any(none["response_mask"])
    assert not np.any(none["rm_scores"]) and not np.any(none["advantages"])


def test_a_response_beyond_verls_limit_is_cut_and_says_so(made: dict[str, Any]) -> None:
    long = made["long"]
    assert "error" not in long, long.get("error")
    for at, id in enumerate(long["rollout_id"]):
        (sequence,) = long["rollouts"][id]["sequences"]
        cut = sequence["mask"].index(1)
        assert long["responses"][at] == sequence["ids"][cut : cut + 24] and len(sequence["ids"]) > cut + 24
    assert long["truncated"] == [1.0] * SAMPLES


def test_errors_are_sentences_with_the_rollouts_id(made: dict[str, Any]) -> None:
    two, late = made["two in v0"], made["late"]
    (id,) = (id for id, rollout in two["rollouts"].items() if len(rollout["sequences"]) == 2)
    assert two["error"].startswith(f"AdapterError: rollout {id} has 2 sequences")
    assert re.match(r"Incomplete: rollout prompt-0-\w+\.\d did not end within \d+ s: .", late["error"])


async def test_everything_is_acked(made: dict[str, Any], site: tuple[Config, Path]) -> None:
    """Also what failed, was refused, or came too late."""
    async with RolloutClient(config=site[0]) as client:
        assert await audit(client.queue) == []
        assert int((await client.status())["counts"]["live"]) == 0
