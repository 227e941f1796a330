"""GRPO with TRL, on rollouts that the line plays: this is the trainer. Run it where torch and TRL are installed.

    python train.py --model MODEL --config config.yaml --out FOLDER

The line must be up: Redis, the workers, and a policy server that serves MODEL (run.py starts all of them).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from datasets import Dataset
from record import Record
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback
from trl import GRPOConfig, GRPOTrainer

from pipeline import Task
from pipeline.adapters.trl import rollout_reward
from pipeline.adapters.trl_rollout import LineRollouts
from pipeline.config import load

WORDS = ("apple", "bridge", "candle", "desert", "engine", "forest", "garden", "harbour")


def task_of(word: str) -> Task:
    """What the line is to play for a prompt of the data set."""
    return Task(handler="family:Capitals", data={"word": word})


def main() -> None:
    args = arguments()
    config = GRPOConfig(
        output_dir=str(args.out / "trainer"), max_steps=args.steps, seed=args.seed, learning_rate=args.learning_rate,
        num_generations=16, per_device_train_batch_size=args.batch, temperature=1.0, weight_decay=0.0,
        save_strategy="no", logging_strategy="no", report_to="none", disable_tqdm=True, bf16=args.dtype == "bfloat16",
        use_cpu=not torch.cuda.is_available(),
    )  # fmt: skip
    record = Record(args.out, config)
    about = {"weights": args.out / "weights", "config": load(args.config), "compared": args.compared, "told": record}
    with LineRollouts(task_of, **about) as rollouts:
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(args.model, dtype=getattr(torch, args.dtype)),
            processing_class=AutoTokenizer.from_pretrained(args.model),
            reward_funcs=rollout_reward,
            rollout_func=rollouts,
            train_dataset=Dataset.from_list([{"prompt": word} for word in WORDS]),
            args=config,
        )
        trainer.remove_callback(PrinterCallback)  # the record says what there is to say
        trainer.train()
    record.close()


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="GRPO with TRL, on rollouts that the line plays.")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to train")
    parser.add_argument("--config", type=Path, required=True, help="settings of the line")
    parser.add_argument("--out", type=Path, required=True, help="folder for weights, steps.jsonl, training.png")
    parser.add_argument("--steps", type=int, default=40, help="optimiser steps")
    parser.add_argument("--batch", type=int, default=32, help="rollouts of one step of one process")
    parser.add_argument("--learning-rate", type=float, default=1.5e-2, help="for the tiny model; others: 1e-6")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the weights")
    parser.add_argument("--compared", type=int, help="rollouts of a step whose logprob gap is computed (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="of the trainer; the policy server draws its own lots")
    return parser.parse_args()


if __name__ == "__main__":
    main()
