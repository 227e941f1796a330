"""INIT: the repository of a task as the policy gets it, at the base commit and without any history that shows the fix.

What is done stands in `prepare.sh`: a new .git takes the place of the old one. It holds one pack of the commits that
lead to the base commit, one branch and nothing else, so no other branch, tag, remote, reflog, stash, note, worktree,
replacement or loose object can be there, whatever the image had. Doing it again gives the same.
"""

from __future__ import annotations

from typing import NamedTuple

from handlers.swe.scripts import run_script
from handlers.swe.task import SweTask
from pipeline.errors import SandboxError, TaskError
from pipeline.interfaces import Sandbox


class Prepared(NamedTuple):
    """`start`: the commit that the policy starts from: the base commit, or one more on top with what the image changed
    in tracked files. `git`: the image's git. `history`: commits that can be reached."""

    start: str
    git: str
    history: int


async def prepare(sandbox: Sandbox, task: SweTask) -> Prepared:
    """Put the repository at `task.workdir` at `task.base_commit`, clean.

    Tracked files that the image holds otherwise than its commit (where that is the base commit) stay as they are and
    become part of `start`; untracked ones (the *.egg-info of an editable installation) stay too, and are written into
    .git/info/exclude, so that they never look like the policy's work. Submodules keep their files and lose their
    history. All conversions of the repository's attributes (line ends, filters) are off. Raises TaskError where there
    is no git, no repository or no such commit, SandboxError for what the machine did not do.
    """
    said = await run_script(sandbox, "prepare.sh", task.workdir, task.base_commit)
    if said.code == 0 and "start" in said.values:
        return Prepared(said.values["start"], said.values["git"], int(said.values["history"]))
    if "wrong" in said.values:
        raise TaskError(f"{task.instance_id}: {said.values['wrong']}")
    if said.code is None:
        raise SandboxError(
            f"{task.instance_id}: the repository was not prepared within sandbox.command_timeout: raise it"
        )
    raise SandboxError(f"{task.instance_id}: {said.values.get('broken') or said.text[-500:] or 'git said nothing'}")
