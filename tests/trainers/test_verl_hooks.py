"""verl's own engines: its trainer tells the line when they have new weights, and when they sleep (docs/trainers.md)."""

from __future__ import annotations

import json
from pathlib import Path

from tests.trainers import trainers


def test_the_trainer_of_the_docs_tells_the_line_in_the_right_order() -> None:
    said = trainers.run(Path(__file__).with_name("verl_hooks.py"), timeout=120)
    assert json.loads(said.splitlines()[-1]) == [
        "engines update_weights 0",
        "line register_backend http://a:1 openai 0",
        "line register_backend http://b:2 openai 0",
        "line start_run 0",
        "line pause wait",
        "engines sleep_replicas",
        "engines update_weights 1",
        "line resume 1",
    ]
