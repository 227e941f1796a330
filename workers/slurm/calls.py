"""Slurm's own commands, as functions; what they refuse becomes a sentence. Nothing here decides anything."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.errors import LineError
from workers.slurm.rows import FORMAT, Row, parse
from workers.slurm.text import LONGEST_ARRAY

LONGEST = 90.0
"""Seconds that one command may take; Slurm's own give up on a silent controller after some ten."""

AT_ONCE = 200
"""Ids in one scancel."""

AWAY = re.compile(
    r"Unable to contact slurm controller|Socket timed out|Connection refused|Connection timed out|Zero Bytes were"
    r"|Unable to establish|Transport endpoint|Communication connection|standby mode|temporarily unable",
    re.IGNORECASE,
)
"""What the commands say when the controller does not answer; some of it leaves open whether a job was submitted."""

SIZES = re.compile(r"node configuration|Memory specification|Invalid generic resource", re.IGNORECASE)
"""What sbatch says to sizes that no node has."""

ALREADY = re.compile(r"Invalid job id|already complet|Job/step already|not pending nor running", re.IGNORECASE)
"""What scancel says of a job that has ended meanwhile."""

HINTS = (
    ("QOS", "a limit or a name of the site: slurm.options, slurm.KIND.jobs"),
    ("account", "slurm.account names it (SBATCH_ACCOUNT is not read)"),
    ("partition", "slurm.partition or slurm.KIND.partition names it (`sinfo -s` shows those there are)"),
    ("node configuration", "no node has what slurm.KIND asks for (cpus, memory_mb, gpus, options)"),
    ("Memory specification", "no node has so much memory: slurm.KIND.memory_mb"),
    ("time limit", "slurm.KIND.time is longer than the partition allows"),
    ("unrecognized option", "sbatch knows no such option: slurm.options, slurm.KIND.options"),
    ("Invalid generic resource", "this cluster counts GPUs otherwise: slurm.KIND.gpus 0, and its own word in options"),
    ("job array", "this cluster takes no array so large"),
)
"""Words of sbatch, and the setting that they are about."""

PASSED = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "HOME", "USER", "LOGNAME", "SHELL", "LANG", "LC_ALL", "TZ"),
    *("BASH_ENV", "MODULEPATH", "MODULESHOME", "LMOD_CMD", "LMOD_DIR", "LMOD_PKG"),
)
"""What a job gets of the environment that `rollout slurm up` was typed in. Slurm stores what it gets: no token of the
shell is among it, and no setting of one node's (TMPDIR, XDG_RUNTIME_DIR). `slurm.setup` exports the rest."""

_SLURMS = re.compile(r"^(SLURM|SLURMD|SBATCH|SALLOC|SRUN|SQUEUE|SCANCEL|SCONTROL|SINFO)_")


class SlurmError(LineError):
    """Slurm refused something, or is not here."""

    kind = "slurm"


class SlurmRefused(SlurmError):
    """A command was answered with a no."""


class SlurmAway(SlurmError):
    """Slurm's controller does not answer; whether what was asked for happened is not known."""


def clean(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment for Slurm's commands: without the variables that change what they do or show.

    A keeper runs inside a job, whose SLURM_... would leak into the jobs that it submits; a user's SQUEUE_FORMAT would
    change what is parsed. SLURM_CONF alone says where Slurm is.
    """
    return {name: value for name, value in environ.items() if name == "SLURM_CONF" or not _SLURMS.match(name)}


def passed(environ: Mapping[str, str]) -> dict[str, str]:
    """What the jobs get of an environment."""
    return {name: environ[name] for name in PASSED if name in environ}


def require() -> None:
    """Raises SlurmError where Slurm's commands are not on PATH."""
    for program in ("sbatch", "squeue", "scancel"):
        if shutil.which(program) is None:
            raise SlurmError(
                f"no {program} on PATH: type this where Slurm's commands are (a login node), or load Slurm's module"
            )


def rows(tag: str) -> list[Row]:
    """Every task of the line that Slurm knows, those that ended some minutes ago too. Raises SlurmError, SlurmAway."""
    told = _call("squeue", "--noheader", "--array", "--states=all", f"--user={os.getuid()}", f"--format={FORMAT}")
    return parse(told.splitlines(), tag)


def rows_if_known(tag: str) -> list[Row]:
    """`rows`, or none while Slurm's controller is away. Raises SlurmError."""
    try:
        return rows(tag)
    except SlurmAway:  # whoever asks waits for it later
        return []


def submit(kind: str, text: str, count: int, environment: Mapping[str, str], folder: Path) -> list[str]:
    """Submit so many tasks of a script; the ids of the jobs (one an array). Raises SlurmError, SlurmAway.

    `environment` is all that the jobs get of ours.
    """
    export = f"--export={','.join(sorted(environment)) or 'NONE'}"
    jobs = []
    while count > 0:
        size = min(count, LONGEST_ARRAY)
        array = [] if kind == "redis" else [f"--array=1-{size}"]
        try:
            told = _call(
                "sbatch", "--parsable", export, *array, text=text, environ=environment, folder=folder, kind=kind
            )
        except SlurmRefused as error:
            raise SlurmError(f"{error}{_sizes(str(error), text)}") from None
        jobs.append(told.strip().splitlines()[-1].partition(";")[0])
        count -= size
    return jobs


def cancel(ids: Sequence[str]) -> None:
    """scancel: Slurm sends SIGTERM, and SIGKILL after its KillWait. Raises SlurmError, SlurmAway."""
    _cancel(ids)


def drain(ids: Sequence[str]) -> None:
    """SIGTERM to each task's own program, which ends by itself within limits.grace. Raises SlurmError, SlurmAway."""
    _cancel(ids, "--signal=TERM", "--batch")


def _cancel(ids: Sequence[str], *options: str) -> None:
    for start in range(0, len(ids), AT_ONCE):
        _call("scancel", *options, *ids[start : start + AT_ONCE])


def _call(
    program: str,
    *arguments: str,
    text: str | None = None,
    environ: Mapping[str, str] | None = None,
    folder: Path | None = None,
    kind: str = "",
) -> str:
    """What a command wrote to stdout. Raises SlurmError, SlurmAway."""
    env = clean(os.environ if environ is None else {**_slurm_conf(), **environ})
    try:
        done = subprocess.run(
            [program, *arguments], input=text, capture_output=True, text=True, errors="replace", timeout=LONGEST,
            check=False, env=env, cwd=folder, stdin=subprocess.DEVNULL if text is None else None,
        )  # fmt: skip
    except FileNotFoundError:
        require()
        raise SlurmError(f"{program} is not on the PATH that the jobs get: {env.get('PATH', '(none)')}") from None
    except subprocess.TimeoutExpired:
        raise SlurmAway(f"{program} did not answer within {LONGEST:g} s: Slurm's controller is away or busy") from None
    if done.returncode == 0:
        return done.stdout
    said = _said(done.stderr or done.stdout)
    if program == "scancel" and _all_already(done.stderr):
        return done.stdout
    if AWAY.search(said):
        raise SlurmAway(f"Slurm's controller does not answer: {said}")
    raise SlurmRefused(f"{program} refused{f' the {kind} jobs' if kind else ''}: {said}{_hint(said, kind)}")


def together(refused: Mapping[str, str]) -> list[str]:
    """The sentences by kind that sbatch was refused with; one for kinds that were refused for the same reason."""
    same: dict[str, list[str]] = {}
    for kind, sentence in refused.items():
        common = sentence.replace(f"the {kind} jobs", "the KIND jobs").replace(f"slurm.{kind}.", "slurm.KIND.")
        same.setdefault(common, []).append(kind)
    return [
        refused[kinds[0]] if len(kinds) == 1 else sentence.replace("the KIND jobs", f"the {', '.join(kinds)} jobs")
        for sentence, kinds in same.items()
    ]


def _slurm_conf() -> dict[str, str]:
    return {"SLURM_CONF": os.environ["SLURM_CONF"]} if "SLURM_CONF" in os.environ else {}


def _said(text: str) -> str:
    """The lines of an error, without the program's name, in one."""
    lines = [re.sub(r"^\w+: (error: )?", "", line).strip() for line in text.splitlines()]
    return "; ".join(dict.fromkeys(line for line in lines if line and not line.startswith("Try "))) or "no word"


def _all_already(text: str) -> bool:
    lines = [line for line in text.splitlines() if line.strip()]
    return bool(lines) and all(ALREADY.search(line) for line in lines)


def _sizes(said: str, script: str) -> str:
    """What a script asks for, and what the largest nodes have, where sbatch refused it for its size."""
    if not SIZES.search(said):
        return ""
    asked = dict(re.findall(r"^#SBATCH --(cpus-per-task|mem|gres|partition)=(\S+)$", script, re.MULTILINE))
    gpus = f", {asked['gres']}" if "gres" in asked else ""
    about = f". It asks for {asked.get('cpus-per-task', '?')} cores, {asked.get('mem', '?').rstrip('M')} MB{gpus}"
    where = [f"--partition={asked['partition']}"] if "partition" in asked else []
    try:
        told = _call("sinfo", "--noheader", "--exact", *where, "--format=%c %m")
    except SlurmError:  # what was asked for says enough
        return about
    nodes = [(int(cores), int(memory)) for cores, memory in re.findall(r"^(\d+)\+? +(\d+)\+?\s*$", told, re.MULTILINE)]
    return f"{about}; the largest node has {max(nodes)[0]} cores and {max(nodes)[1]} MB" if nodes else about


def _hint(said: str, kind: str) -> str:
    found = next((hint for word, hint in HINTS if word.lower() in said.lower()), "")
    return f" ({found.replace('KIND', kind)})" if found and kind else ""
