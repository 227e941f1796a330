"""What can go wrong with the scripted policy server, for tests: faults of single calls, and states of the server.

Faults: `500:0.1,hang:0.05,drop*2` means one call in ten answered with 500, one in twenty never, and the next two cut
off. States (`hang`, `dead`) hold until they are taken back. Both can be changed over HTTP while it runs.
"""

from __future__ import annotations

import random

FAULTS = ("500", "503", "429", "hang", "drop", "refuse", "short_logprobs", "short_ids", "no_logprobs", "no_versions",
          "nan_logprob", "not_json", "retokenise", "no_prefix", "no_prompt_ids")  # fmt: skip
STATES = ("hang", "dead")
"""hang: `/health` says 200 and everything else hangs, calls in flight too. dead: the engine is gone, calls get 500 and
`/health` says 503."""

DEATH = "EngineCore encountered an issue. See stack trace (above) for the root cause."


class Faults:
    """Which call meets which fault."""

    def __init__(self, spec: str = "") -> None:
        self.set(spec)

    spec: str
    _chances: list[tuple[str, float]]
    _counts: dict[str, int]

    def set(self, spec: str) -> None:
        """Raises ValueError for a name or a number that means nothing."""
        self.spec, self._chances, self._counts = spec, [], {}
        for item in filter(None, (part.strip() for part in spec.split(","))):
            name, mark, number = item.replace("*", ":*").partition(":")
            if name not in FAULTS:
                raise ValueError(f"fault {name!r} is unknown (known: {', '.join(FAULTS)})")
            if number.startswith("*"):
                self._counts[name] = int(number[1:])
            else:
                self._chances.append((name, float(number) if mark else 1.0))

    def draw(self, chance: random.Random) -> str:
        """The name of this call's fault, empty for none."""
        for name, left in self._counts.items():
            if left:
                self._counts[name] = left - 1
                return name
        return next((name for name, share in self._chances if chance.random() < share), "")
