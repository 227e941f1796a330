"""`slurm.json` in the line's folder: how many jobs of each kind are wanted, and what is known of those that go.

Written by `rollout slurm up`, `scale`, `down` and the keeper, under the lock of whoever submits, by atomic rename; for
its user alone. It holds each kind's script as `up` made it, so whatever is submitted later is the same.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.whole_file import write_whole

NAME = "slurm.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of job: how many tasks are wanted, and their script."""

    jobs: int
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """A kind whose tasks end at once: nothing of it is submitted before `until`. Times in Unix seconds."""

    count: int
    at: float
    until: float
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """The whole file.

    `tag` ends the name of each of the line's jobs. `overlap`, `patience` in seconds: how long before its end a task is
    replaced, and how long a task may take to go before it is cancelled. `environment` is what jobs are submitted with.
    `draining`: tasks that were told to go, and when; `completing`: since when one has been seen to end; `seen`: tasks
    whose quick end has been counted; `young`: jobs, and their kind, that have not worked for a while yet (Slurm may
    forget one that ends at once). `before`: tasks that had ended when `up` was said last; `sizes`: the settings'
    numbers of jobs then. `changes` counts up, scale and down. Times are Unix seconds of whoever wrote them.
    """

    line: str
    folder: str
    tag: str
    overlap: float
    patience: float
    environment: dict[str, str] = field(default_factory=dict)
    kinds: dict[str, Kind] = field(default_factory=dict)
    draining: dict[str, float] = field(default_factory=dict)
    completing: dict[str, float] = field(default_factory=dict)
    struck: dict[str, Strike] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    young: dict[str, str] = field(default_factory=dict)
    before: list[str] = field(default_factory=list)
    sizes: dict[str, int] = field(default_factory=dict)
    changes: int = 0

    def wanted(self, kind: str) -> int:
        """Tasks of a kind that should be there."""
        return self.kinds[kind].jobs if kind in self.kinds else 0

    def sized(self, sizes: dict[str, int]) -> State:
        """With other sizes of some kinds; what these were struck for is forgotten: a person wants them now."""
        kinds = {kind: replace(item, jobs=sizes.get(kind, item.jobs)) for kind, item in self.kinds.items()}
        struck = {kind: item for kind, item in self.struck.items() if kind not in sizes}
        return replace(self, kinds=kinds, struck=struck, changes=self.changes + 1)


def tag_of(folder: Path) -> str:
    """8 hex digits of a folder's path."""
    return hashlib.sha256(os.fsencode(os.path.realpath(folder))).hexdigest()[:8]


def tag_for(folder: Path, known: State | None) -> str:
    """The tag of the line in a folder: the one of its file, unless the file was copied from another folder."""
    if known is None:
        return tag_of(folder)
    try:
        same = Path(known.folder).samefile(folder)
    except OSError:
        same = False
    return known.tag if same else tag_of(folder)


def read(folder: Path) -> State | None:
    """None where `rollout slurm up` was never said. Raises ConfigError: it can't be read, or is none of ours."""
    path = folder / NAME
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
        return _parsed(told)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"{path} does not say which jobs are wanted ({error!r}): remove it, then `rollout slurm up`; jobs that are "
            "there keep their name, and are found again"
        ) from None


def _parsed(told: dict[str, Any]) -> State:
    known = {name: told[name] for name in State.__dataclass_fields__ if name in told}  # others are a newer version's
    known["kinds"] = {kind: Kind(**item) for kind, item in known["kinds"].items()}
    known["struck"] = {kind: Strike(**item) for kind, item in known["struck"].items()}
    return State(**known)


def write(folder: Path, state: State) -> None:
    """Put it in the place of the one before. Raises ConfigError."""
    path = folder / NAME
    try:
        write_whole(path, json.dumps(asdict(state), indent=1) + "\n")
    except OSError as error:
        raise ConfigError(f"{path} can't be written: {error.strerror}") from None
