"""What the client for TRL reads of a GRPOTrainer (1.16.0): its model, its sampling, the order of its prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pipeline.adapters.rows import AdapterError

WHOLE = ("NO", "MULTI_CPU", "MULTI_GPU")
"""Kinds of training (accelerate's DistributedType) in which each process holds the whole model."""

NEUTRAL = {"top_k": 0, "min_p": None, "repetition_penalty": 1.0}
"""Values of the trainer's settings that leave the distribution as it is; others are passed on."""


def model_of(trainer: Any) -> Any:
    """The trainer's bare model. Raises AdapterError for one that can't be pushed."""
    spread = trainer.accelerator.distributed_type
    if str(getattr(spread, "value", spread)) not in WHOLE:
        raise AdapterError(
            f"the trainer's model is spread over processes ({spread}), and LineRollouts saves what rank 0 holds: train "
            "data parallel, or move the weights yourself (docs/client.md, form external)"
        )
    model = trainer.accelerator.unwrap_model(trainer.model)
    if hasattr(model, "peft_config"):
        raise AdapterError(
            "the trainer's model has a PEFT adapter: the policy servers load whole weights, and its folder would hold "
            "the adapter alone. Train the whole model"
        )
    return model


def gathered(prompts: list[Any]) -> list[list[Any]]:
    """The prompts of all processes, by rank; one may have fewer than another."""
    import torch.distributed

    by_rank: list[list[Any]] = [[] for _ in range(torch.distributed.get_world_size())]
    torch.distributed.all_gather_object(by_rank, prompts)
    return by_rank


def distinct(prompts: Sequence[Any], samples: int) -> list[Any]:
    """One of each `samples` equal prompts that follow on one another. Raises AdapterError where they do not."""
    firsts = list(prompts[::samples])
    if (
        not prompts
        or len(prompts) % samples
        or any(prompt != firsts[at // samples] for at, prompt in enumerate(prompts))
    ):
        raise AdapterError(
            f"TRL gave {len(prompts)} prompts that are not {samples} equal ones at a time (num_generations): this "
            "version of TRL orders them in another way than 1.16.0"
        )
    return firsts


def sampling(args: Any) -> dict[str, Any]:
    """What the trainer says about sampling: its loss divides by this temperature, so the rollouts must have it."""
    cut = {name: getattr(args, name) for name, neutral in NEUTRAL.items() if getattr(args, name) != neutral}
    return {"temperature": args.temperature, "top_p": args.top_p, **cut}
