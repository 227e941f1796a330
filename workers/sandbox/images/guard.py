"""A child process around one build step, run by its path: it ends with its parent, and takes all it started along.

    python guard.py run ARGV...             any command
    python guard.py build IMAGE SOURCE ...  spython's build: Apptainer's options follow
    python guard.py pull FILE URL           spython's pull

What spython lacks is added here and by whoever starts this: the exit code of Apptainer is this process's (spython's
build drops it), all output goes to this process's stdout and stderr, a time-out kills the process group.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import sys
from typing import Any, NoReturn

PR_SET_PDEATHSIG = 1


def main(argv: list[str]) -> int:
    parent, verb, *rest = argv
    _end_with(int(parent))
    if verb == "run":
        return subprocess.call(rest)
    return _spython(verb, rest)


def _end_with(parent: int) -> None:
    """This process leads a group of its own; when its parent dies the group is killed."""

    def end(*_: Any) -> NoReturn:
        os.killpg(0, signal.SIGKILL)
        raise SystemExit(1)

    signal.signal(signal.SIGTERM, end)
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        end()


def _spython(verb: str, rest: list[str]) -> int:
    from spython.main import get_client

    client: Any = get_client(quiet=True)
    client.quiet = True  # the argument alone does not reach the commands
    run, codes = client._run_command, []

    def checked(command: list[str], **named: Any) -> Any:
        """spython says `singularity`, which not every site has; quiet, it forgets the message, its build the code."""
        command = [shutil.which("apptainer") or command[0], *command[1:]]
        result = run(command, **{**named, "return_result": True, "quiet": True})
        codes.append(result["return_code"])
        said = result["message"]
        sys.stdout.write(said if isinstance(said, str) else "\n".join(said))
        return result

    client._run_command = checked
    if verb == "build":
        image, source, *options = rest
        client.build(recipe=source, image=image, options=options, sudo=False)
    else:
        file, url = rest
        client.pull(image=url, name=file)
    return max(codes, default=1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
