"""The batch script of each kind of job, as a pure function of the settings. Nothing is read or written here.

The files in sbatch/ are what this prints for the default settings (`make docs` writes them; a test compares).
Passwords never stand in a script, in its arguments or in its environment: Slurm stores all of these.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

from pipeline.config import Config
from pipeline.config_slurm import KINDS, VllmJobsConfig

STAGES = ("init", "run", "eval")
"""The kinds whose jobs are workers of a stage."""

LONGEST_ARRAY = 1000
"""Tasks of one array at most: Slurm's MaxArraySize is 1001 unless the site says otherwise."""

SUBMIT_FOLDER = "${SLURM_SUBMIT_DIR:-$PWD}"

VARIABLES = {
    "LINE_FOLDER": ("", "the line's folder, which all nodes see; empty: slurm.folder of the settings"),
    "LINE_CONFIG": ("${ROLLOUT_CONFIG:-}", "the settings' file; empty: config.yaml in LINE_HOME, if there is one"),
    "LINE_HOME": (SUBMIT_FOLDER, "where relative paths of the settings start"),
    "LINE_PROGRAM": ("rollout", "the program, or its path"),
    "LINE_SLOTS": ("", "rollouts of one worker at a time; empty: workers.STAGE.slots of the settings"),
}
"""Every variable that the scripts read, apart from Slurm's own: its default (as the shell reads it), and what it is."""

ABOUT = {
    "redis": (
        "The line's Redis: one server at a time, its data in the line's folder. A second job waits for the first one.",
    ),
    "init": ("INIT workers: sandboxes come up here.",),
    "run": ("RUN workers: the agent loop; they wait for the policy most of their time.",),
    "eval": ("EVAL workers: scoring, on CPUs.",),
    "maint": ("The upkeep of the line, and of the jobs that `rollout slurm up` submitted: it replaces what ends.",),
    "vllm": (
        "Policy servers: vLLM, one a task, each registers itself in the line.",
        "What follows the script's name goes to `rollout serve`:",
        "  sbatch sbatch/vllm.sbatch MODEL",
        "  sbatch --gres=gpu:8 sbatch/vllm.sbatch MODEL -- --tensor-parallel-size 8",
    ),
}
MORE = (
    "  sbatch --array=1-{jobs} sbatch/{kind}.sbatch    more tasks: a larger array; fewer: scancel some, nothing is lost"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """What a script knows of where it runs; all empty: it is for anybody, and takes this from its environment.

    `tag` ends the name of every job of the line; paths are absolute; `variables` are exported (ROLLOUT_...).
    """

    tag: str = ""
    folder: str = ""
    config: str = ""
    home: str = ""
    program: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)


def job_name(line: str, kind: str, tag: str = "") -> str:
    """LINE-KIND-TAG."""
    return "-".join(filter(None, (line, kind, tag)))


def text(config: Config, kind: str, place: Place | None = None) -> str:
    """The batch script for jobs of this kind (one of KINDS)."""
    place = place or Place()
    lines = [
        "#!/bin/bash",
        *(f"# {line}" for line in _about(config, kind, place)),
        *(f"#SBATCH {line}" for line in directives(config, kind, place)),
        "set -euo pipefail",
        *_declared(kind, place),
        'cd "$LINE_HOME"',
        "export PYTHONSAFEPATH=1  # nothing of the current folder is imported by accident",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(place.variables.items())),
        '[ -z "$LINE_FOLDER" ] || export ROLLOUT_SLURM__FOLDER="$LINE_FOLDER"',
        '[ -z "$LINE_CONFIG" ] || export ROLLOUT_CONFIG="$LINE_CONFIG"',
        *_setup(config),
        'command -v "$LINE_PROGRAM" >/dev/null ||',
        '    { echo "no program $LINE_PROGRAM on this node: put it on PATH, or set LINE_PROGRAM" >&2; exit 1; }',
        *_program(config, kind),
    ]
    return "\n".join(lines) + "\n"


def directives(config: Config, kind: str, place: Place) -> list[str]:
    """sbatch's options of a script, one a line."""
    slurm, jobs = config.slurm, config.slurm.jobs(kind)
    task = "%j" if kind == "redis" else "%A_%a"
    partition = jobs.partition or slurm.partition
    logs = f"{place.folder}/logs/".replace("%", "%%") if place.folder else ""
    return [
        f"--job-name={job_name(config.line.name, kind, place.tag)}",
        *([] if kind == "redis" else [f"--array=1-{min(max(jobs.jobs, 1), LONGEST_ARRAY)}"]),
        "--ntasks=1",
        f"--cpus-per-task={jobs.cpus}",
        f"--mem={jobs.memory_mb}M",
        *([f"--gres=gpu:{jobs.gpus}"] if jobs.gpus else []),
        f"--time={jobs.time}",
        *([f"--partition={partition}"] if partition else []),
        *([f"--account={slurm.account}"] if slurm.account else []),
        f"--signal=B:TERM@{slurm.signal}",
        "--requeue",
        "--open-mode=append",
        f"--output={_quoted(f'{logs}%x-{task}.out')}",
        *slurm.options,
        *jobs.options,
    ]


def _about(config: Config, kind: str, place: Place) -> list[str]:
    if place.folder:  # submitted by `rollout slurm up`, not by hand
        return [ABOUT[kind][0]]
    more = [MORE.format(jobs=config.slurm.jobs(kind).jobs * 2, kind=kind)] if kind in STAGES else []
    return [*ABOUT[kind], *more]


def _declared(kind: str, place: Place) -> list[str]:
    """Each variable that the script reads, once, with its default."""
    own = {
        "LINE_FOLDER": place.folder,
        "LINE_CONFIG": place.config,
        "LINE_HOME": place.home,
        "LINE_PROGRAM": place.program,
    }
    lines = ["# What this script reads of its environment, with the defaults:"]
    for name, (default, what) in VARIABLES.items():
        if name != "LINE_SLOTS" or kind in STAGES:
            value = shlex.quote(own[name]) if own.get(name) else default
            lines.append(f"{name}=${{{name}:-{value}}}  # {what}")
    return lines


def _setup(config: Config) -> list[str]:
    """The site's own lines; what module systems bring along often reads variables that are not set."""
    lines = config.slurm.setup
    return ["set +u", *lines, "set -u"] if lines else []


def setup_lines(script: str) -> range:
    """The numbers, from 1, of a script's lines that slurm.setup gave."""
    lines = script.splitlines()
    if "set +u" not in lines:
        return range(0)
    return range(lines.index("set +u") + 2, len(lines) - lines[::-1].index("set -u"))


def _program(config: Config, kind: str) -> list[str]:
    """`exec`: the program takes the shell's place, so Slurm's early signal reaches the program itself."""
    told = f"# Slurm sends SIGTERM to this very process {config.slurm.signal} s (at times 60 s more) before its limit."
    if kind == "redis":
        return [told, 'exec "$LINE_PROGRAM" redis start --foreground --publish']
    if kind == "maint":
        return [told, 'exec "$LINE_PROGRAM" work maint']
    if kind == "vllm":
        return [*_model(config.slurm.vllm), told, 'exec "$LINE_PROGRAM" serve "$@"']
    return [told, f'exec "$LINE_PROGRAM" work {kind} ${{LINE_SLOTS:+--slots "$LINE_SLOTS"}}']


def _model(vllm: VllmJobsConfig) -> list[str]:
    if not vllm.model:
        return [
            '[ $# -gt 0 ] || { echo "which model? sbatch sbatch/vllm.sbatch MODEL [-- VLLM ARGS...]" >&2; exit 1; }'
        ]
    words = [vllm.model, *(["--", *vllm.arguments] if vllm.arguments else [])]
    return [f"[ $# -gt 0 ] || set -- {shlex.join(words)}"]


def _quoted(path: str) -> str:
    """As sbatch reads its options in a script: a text with blanks stands in double quotes."""
    return f'"{path}"' if any(letter.isspace() or letter in "'\\" for letter in path) else path


def pages() -> dict[str, str]:
    """File name and text of each script in sbatch/."""
    return {f"{kind}.sbatch": text(Config(), kind) for kind in KINDS}
