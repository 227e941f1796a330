"""The artefact of a rollout: all that the policy changed in the repository, as the bytes of one git diff.

`take` gets it out of the sandbox: it compares the folder's files with the commit that the policy started from, whatever
it did with git meanwhile. The bytes travel as a file, never through a terminal.
"""

from __future__ import annotations

from typing import NamedTuple

from handlers.swe.diff import paths_of, split, without
from handlers.swe.scripts import run_script
from pipeline.interfaces import Sandbox

__all__ = ["Patch", "paths_of", "split", "take", "without"]

MOST = 4 << 20
"""Bytes of a patch; one that is larger is taken as none."""

FRESH_SECONDS = 3.0

FRESH = "POSIXLY_CORRECT=1\n\\exit 0"
"""Ends the policy's shell; the next command gets a new one. In POSIX mode no function of the policy's is `exit`."""


class Patch(NamedTuple):
    """`data`: the diff, empty where `why` says that there is none to be had. `files`: the paths in it. `whole`: the
    diff of files of settings with all their lines. `nested`: git repositories within the repository,
    which are not in it."""

    data: bytes
    files: tuple[str, ...] = ()
    why: str = ""
    whole: bytes = b""
    nested: tuple[str, ...] = ()


async def take(sandbox: Sandbox, workdir: str, start: str, git: str = "/usr/bin/git") -> Patch:
    """What differs between the commit `start` and the files at `workdir`, with `git`, the image's own.

    New files are in it unless the repository ignores them (then only where they were added to its index or committed);
    so are deletions, modes, symbolic links and binary files. What is in no file any more (a commit on a branch that is
    not checked out) is not. A repository that the policy broke gives an empty patch with `why`. Raises SandboxError.
    """
    await sandbox.bash(FRESH, FRESH_SECONDS)
    said = await run_script(sandbox, "capture.sh", workdir, start, git, str(MOST))
    out = said.values.get("out", "")
    if said.code != 0 or not out:
        late = "the patch could not be taken in time: the folder holds too much"
        why = late if said.code is None else f"the patch could not be taken: {said.text[-300:]}"
        return Patch(b"", why=said.values.get("why", why))
    try:
        data = await sandbox.read(out, 0, MOST)
        whole = await sandbox.read(f"{out}.whole", 0, MOST)
        nested = (await sandbox.read(f"{out}.nested", 0, 10_000)).decode("utf-8", "replace").split("\n")
        files = tuple(paths_of(data))
    except (OSError, ValueError) as error:
        return Patch(b"", why=f"the patch could not be taken: {error}")
    return Patch(data, files, "", whole, tuple(name for name in nested if name))
