"""verl's own agent-loop workers on a line that plays: `verl_play.py WORKS.json OUT.json`. No Ray; `.venv-trainers`.

WORKS: one work a name: `settings` (the line's configuration), `model` (a folder with a config and a tokenizer), `rows`
(of the dataset), `samples`, `response` (tokens, at most), `version` ("v0" or "v1"), `loop` (further keys of the agent
loop's entry). OUT, for each name: what verl made of it, or the `error`; `rollouts`: what the line handed over,
by rollout id.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import verl
import yaml
from hydra import compose, initialize_config_dir
from tensordict import NonTensorData
from verl import DataProto
from verl.experimental.agent_loop.agent_loop import AgentLoopWorker
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.v1 import agent_loop_tq
from verl.trainer.ppo.v1.utils import compute_advantage_for_multi_trajectories

from pipeline.adapters import sessions, verl_loop

PROMPT = 256


def configured(work: dict[str, Any], folder: Path) -> Any:
    """verl's own settings for PPO, with the line's agent loop in them."""
    loop = folder / "loop.yaml"
    target = f"{verl_loop.__name__}.{verl_loop.RolloutLineAgentLoop.__name__}"
    entry = {"name": "rollout_line", "_target_": target, "settings": work["settings"], **work["loop"]}
    loop.write_text(yaml.safe_dump([entry]))
    with initialize_config_dir(str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None):
        return compose("ppo_trainer", overrides=[
            f"actor_rollout_ref.model.path={work['model']}", "actor_rollout_ref.rollout.name=vllm",
            f"actor_rollout_ref.rollout.n={work['samples']}", f"data.max_prompt_length={PROMPT}",
            f"data.max_response_length={work['response']}",
            "actor_rollout_ref.rollout.calculate_log_probs=True",
            "actor_rollout_ref.rollout.agent.default_agent_loop=rollout_line",
            f"actor_rollout_ref.rollout.agent.agent_loop_config_path={loop}",
        ])  # fmt: skip


seen: dict[str, Any] = {}
"""What the line has handed over, by rollout id."""


class Watching(sessions.Sessions):
    """Writes down what it hands over."""

    async def play(self, prompt: str, task: Any) -> sessions.Session:
        session = await super().play(prompt, task)
        rollout = session.rollout
        found = rollout.trajectory.sequences if rollout.trajectory else ()
        seen[rollout.id] = {
            "outcome": rollout.outcome, "reward": rollout.reward, "truncated": rollout.truncated, "prompt": prompt,
            "sampling": task.sampling, "samples": rollout.samples, "group": rollout.group,
            "sequences": [
                {
                    "ids": item.token_ids.tolist(), "mask": item.loss_mask.tolist(),
                    "logprobs": item.logprobs.tolist(), "versions": [run.version for run in item.versions],
                }
                for item in found
            ],
        }  # fmt: skip
        return session


async def by_v0(config: Any, work: dict[str, Any]) -> dict[str, Any]:
    """`AgentLoopWorker.generate_sequences`: padded rows, then GRPO's advantage."""
    worker = AgentLoopWorker(config, None)
    prompts = DataProto.from_dict(
        tensors={"dummy_tensor": torch.zeros(len(work["rows"]), 1, dtype=torch.uint8)},
        non_tensors={name: _objects([row[name] for row in work["rows"]]) for name in work["rows"][0]},
    ).repeat(repeat_times=work["samples"], interleave=True)
    made = await worker.generate_sequences(prompts)
    advantages, _ = core_algos.compute_grpo_outcome_advantage(
        made.batch["rm_scores"], made.batch["response_mask"], made.non_tensor_batch["uid"]
    )
    out = {name: tensor.tolist() for name, tensor in made.batch.items()}
    named = ("rollout_id", "uid", "min_global_steps", "max_global_steps", "failed", "truncated", "__num_turns__")
    out |= {name: made.non_tensor_batch[name].tolist() for name in named}
    return {**out, "advantages": advantages.tolist(), "dtypes": {k: str(v.dtype) for k, v in made.batch.items()}}


async def by_v1(config: Any, work: dict[str, Any]) -> dict[str, Any]:
    """`AgentLoopWorkerTQ._run_prompt`: unpadded rows into its queue, here a dict; then V1's own advantages."""
    stored: dict[str, dict[str, Any]] = {}
    tags: dict[str, dict[str, Any]] = {}

    class Store:
        @staticmethod
        async def async_kv_put(key: str, partition_id: str, tag: dict[str, Any]) -> None:
            tags.setdefault(key, {}).update(tag)

        @staticmethod
        async def async_kv_batch_put(keys: list[str], fields: Any, tags: list[dict[str, Any]], **_: Any) -> None:
            for at, key in enumerate(keys):
                stored[key] = {name: _plain(fields[name][at]) for name in fields.keys()} | {"tag": tags[at]}  # noqa: SIM118

    agent_loop_tq.tq = Store
    kind = agent_loop_tq.AgentLoopWorkerTQ.__ray_metadata__.modified_class.__mro__[1]
    worker = kind.__new__(kind)  # its own __init__ asks for Ray
    AgentLoopWorker.__init__(worker, config, None)
    sampling = {"temperature": 0.7, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, "logprobs": True}
    about = {"step": 5, "sample_index": 0, "rollout_n": 0, "validate": False}
    await asyncio.gather(*(
        worker._run_prompt({**row, "agent_name": "rollout_line", "global_steps": 5, "index": at}, sampling, about)
        for at, row in enumerate(work["rows"])
    ))  # fmt: skip
    out = {"tags": tags, "stored": stored}
    return {**out, "advantages": _advantages(stored) if stored else {}}


def _advantages(stored: dict[str, dict[str, Any]]) -> dict[str, list[float]]:
    keys = list(stored)

    def padded(name: str, kind: torch.dtype) -> torch.Tensor:
        rows = [torch.tensor(stored[key][name], dtype=kind) for key in keys]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    mask, scores = padded("response_mask", torch.int64), padded("rm_scores", torch.float32)
    data = DataProto.from_dict(
        tensors={"response_mask": mask, "token_level_rewards": scores, "token_level_scores": scores},
        non_tensors={"uid": _objects([key.split("_")[0] for key in keys])},
    )
    found = compute_advantage_for_multi_trajectories(data, keys, core_algos.AdvantageEstimator.GRPO)
    return dict(zip(keys, found.batch["advantages"].tolist(), strict=True))


def _objects(values: list[Any]) -> Any:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def _plain(value: Any) -> Any:
    value = value.data if isinstance(value, NonTensorData) else value
    return value.tolist() if isinstance(value, torch.Tensor) else value


async def main(works: dict[str, Any], folder: Path) -> dict[str, Any]:
    verl_loop.Sessions = Watching  # type: ignore[misc]
    out = {}
    for name, work in works.items():
        seen.clear()
        try:
            made = await {"v0": by_v0, "v1": by_v1}[work["version"]](configured(work, folder), work)
        except Exception as error:
            made = {"error": f"{type(error).__name__}: {error}"}
        finally:
            await verl_loop.close()
        out[name] = {**made, "rollouts": dict(seen)}
    return out


if __name__ == "__main__":
    given, target = Path(sys.argv[1]), Path(sys.argv[2])
    result = asyncio.run(main(json.loads(given.read_text()), target.parent))
    target.write_text(json.dumps(result, default=str))
