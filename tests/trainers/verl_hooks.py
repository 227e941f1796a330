"""The trainer of docs/trainers.md, section verl, under verl's own class; prints what the engines and the line hear.

python verl_hooks.py
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pipeline
from pipeline import config

PAGE = Path(__file__).parents[2] / "docs" / "trainers.md"


class Heard:
    """Takes every call, and writes it down."""

    def __init__(self, name: str, heard: list[str]) -> None:
        self._name, self._heard = name, heard

    def __getattr__(self, verb: str) -> Any:
        def said(*args: Any, **named: Any) -> None:
            self._heard.append(" ".join([self._name, verb, *map(str, args), *map(str, named.values())]))

        return said


def main() -> None:
    heard: list[str] = []
    pipeline.SyncRolloutClient = lambda config: Heard("line", heard)  # type: ignore[assignment, misc]
    config.load = lambda path: None  # type: ignore[assignment, return-value]
    (block,) = re.findall(r"```python\n(# line_trainer\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    exec(block, {})
    from verl.trainer.ppo.v1 import get_trainer_cls

    trainer = object.__new__(get_trainer_cls("sync"))
    vars(trainer).update(
        global_steps=0, timing_raw={}, curr_step_profile=False, checkpoint_manager=Heard("engines", heard),
        llm_server_manager=SimpleNamespace(get_addresses=lambda: ["a:1", "b:2"]),
    )  # fmt: skip
    trainer.on_init_end()
    trainer.global_steps = 1
    trainer.on_sample_end()
    trainer.on_step_end()
    sys.stdout.write(f"\n{json.dumps(heard)}\n")


if __name__ == "__main__":
    main()
