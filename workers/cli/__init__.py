"""The `rollout` command. `app` puts it together; each other module holds the commands of one kind.

Nothing of ours is imported before it is certain that `pipeline`, `workers` and `handlers` are ours: their names are
generic, and another package of the same name would otherwise answer in strange ways.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

PACKAGES = ("pipeline", "workers", "handlers")


def main() -> None:
    """Entry of the console script."""
    hidden = hiding()
    if hidden:
        print(f"Error: {hidden}", file=sys.stderr)
        sys.exit(1)
    try:  # from a shared file system this may take seconds
        from workers.cli.app import rollout
        from workers.cli.base import Settings
    except KeyboardInterrupt:
        print("\nError: interrupted", file=sys.stderr)
        sys.exit(130)  # as base.INTERRUPTED, which may not be there yet

    rollout(prog_name="rollout", obj=Settings(own_process=True))


def hiding() -> str:
    """A sentence about a package of another project that Python would import in place of ours; empty if there is none.

    It is looked for, not imported: it may be broken.
    """
    home = Path(__file__).resolve().parents[2]
    for name in PACKAGES:
        found = _place(name)
        if found != home / name:
            where = f"(at {found}) hides ours" if found else "is not installed, but should lie"
            start = "another package named" if found else "the package"
            return (
                f"{start} '{name}' {where} (in {home / name}): take its folder out of PYTHONPATH and of the current "
                "folder, or give the workers a virtual environment of their own"
            )
    return ""


def _place(name: str) -> Path | None:
    """The folder (or file) that `import name` would take."""
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None:
        return None
    folders = list(spec.submodule_search_locations or [])
    place = folders[0] if folders else spec.origin
    return Path(place).resolve() if place else None
