"""The environment of what runs inside: a short list of our own, what the image says, what the task asks for."""

from __future__ import annotations

import os
from collections.abc import Mapping

from pipeline.errors import HandlerError
from workers.sandbox.processes import MARK

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_LEFT_OUT = ("APPTAINER", "SINGULARITY")
_NOT_PASSED = frozenset(
    {"PROMPT_COMMAND", "PS1", "PS2", "PWD", "OLDPWD", "SHLVL", "_", "HOME", "USER_PATH", "SANDBOX_ID"}
)


def plain(home: str) -> dict[str, str]:
    """What every sandbox has: no pagers, no questions, no prompt."""
    return {
        "PATH": PATH,
        "HOME": home,
        "TMPDIR": "/tmp",
        "USER": "root",
        "LOGNAME": "root",
        "SHELL": "/bin/bash",
        "LANG": "C.UTF-8",
        "TERM": "dumb",
        "PAGER": "cat",
        "GIT_PAGER": "cat",
        "MANPAGER": "cat",
        "SYSTEMD_PAGER": "",
        "GIT_TERMINAL_PROMPT": "0",
        "DEBIAN_FRONTEND": "noninteractive",
        "PS1": "",
        "PS2": "",
    }


def of_image(block: bytes) -> dict[str, str]:
    """The image's own variables, out of a process's; without what the container program adds."""
    pairs = [os.fsdecode(item).partition("=") for item in block.split(b"\0") if b"=" in item]
    found = {name: value for name, _, value in pairs if not name.startswith(_LEFT_OUT) and name not in _NOT_PASSED}
    if found.get("LANG") == "C":
        del found["LANG"]  # what it sets where the image says nothing
    if found.get("LD_LIBRARY_PATH") == "/.singularity.d/libs":
        del found["LD_LIBRARY_PATH"]
    return found


def asked(env: Mapping[str, str]) -> dict[str, str]:
    """The task's variables, checked. Raises HandlerError for a name or value that no process can have."""
    for name, value in env.items():
        if not name or "=" in name or "\0" in name + value:
            raise HandlerError(f"the sandbox's variable {name!r} can't be set: an empty name, a = or a zero byte in it")
    return dict(env)


def launcher(mark: str) -> dict[str, str]:
    """All that the program which starts a sandbox gets: none of the worker's variables can reach it."""
    return {"PATH": PATH, "HOME": "/", "USER": "root", "LANG": "C.UTF-8", MARK: mark}
