"""Runs this package's shell scripts in a sandbox, in a bash of their own, and reads what they say in `key=value`."""

from __future__ import annotations

import functools
import shlex
from pathlib import Path
from typing import NamedTuple

from pipeline.interfaces import Output, Sandbox

KEYS = ("start", "git", "history", "out", "why", "wrong", "broken")


class Said(NamedTuple):
    """How a script ended: its exit code (None: out of time), the values that it printed, and its whole output."""

    code: int | None
    values: dict[str, str]
    text: str


async def run_script(sandbox: Sandbox, name: str, *arguments: str) -> Said:
    """Run a script of this folder within the site's limit of one command. Raises SandboxError."""
    words = ["bash", "--noprofile", "--norc", "-c", _text(name), name, *arguments]
    return read(await sandbox.bash(shlex.join(words)))


def read(output: Output) -> Said:
    """What a script said."""
    pairs = [line.partition("=") for line in output.text.splitlines()]
    values = {key: value for key, sign, value in pairs if sign and key in KEYS}
    return Said(output.exit_code, values, output.text)


@functools.cache
def _text(name: str) -> str:
    return (Path(__file__).parent / name).read_text("utf-8")
