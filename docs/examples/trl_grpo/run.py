"""The whole example on one machine: a private Redis, vLLM, one worker process a stage, and the trainer.

    python run.py --model MODEL --vllm PATH/TO/vllm --trainer PATH/TO/python --out FOLDER

Run it with the Python of the line. All processes belong to this one: they end with it, however it ends. A worker that
is killed is started anew, as Slurm does. On a cluster the same commands stand in job scripts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from pipeline import server
from pipeline.config import load

HERE = Path(__file__).resolve().parent
LINE = Path(server.__file__).parents[1]
"""Where the line's packages lie, for a trainer in another virtual environment."""
STAGES = ("init", "run", "eval")
RESTARTS = 5
"""Workers that are started anew before the run is given up: one that can't work would be started for ever."""
LOOK_SECONDS = 0.2
END_SECONDS = 15.0

ROLLOUT = (sys.executable, "-P", "-m", "workers.cli", "--config", str(HERE / "config.yaml"))
# vLLM on a CPU: float32, so that its logprobs can be compared with the trainer's to the last digit that counts.
VLLM = (
    "--dtype", "float32", "--max-model-len", "2048", "--max-num-seqs", "64", "--max-num-batched-tokens", "4096",
    "--num-gpu-blocks-override", "256", "--enforce-eager", "--no-enable-chunked-prefill",
)  # fmt: skip
QUIET = {
    "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1", "TQDM_DISABLE": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1",
    "TRL_EXPERIMENTAL_SILENCE": "1",
}  # fmt: skip

# The group ends when its standard input closes, and that closes when we die.
TIED = """
exec 3<&0 </dev/null
{ trap '' HUP INT TERM; read -r line <&3; kill -s KILL 0; } >/dev/null 2>&1 &
exec 3<&-
exec "$@"
"""


class Process:
    """A command whose life hangs on ours. Its output goes to `log`; None: to our own terminal."""

    def __init__(self, name: str, command: tuple[str, ...], log: Path | None, environment: dict[str, str]) -> None:
        self.name, self.log, self._again = name, log, (command, environment)
        output = log.open("ab") if log else None
        self._process = subprocess.Popen(
            ["sh", "-c", TIED, name, *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
        if output:
            output.close()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def code(self) -> int | None:
        """Exit code; None while it runs."""
        return self._process.poll()

    def anew(self) -> Process:
        """The same command again, after this one ended."""
        self.end()
        command, environment = self._again
        return Process(self.name, command, self.log, environment)

    def tail(self) -> str:
        return self.log.read_text(errors="replace")[-2000:] if self.log else "(its output is above)"

    def ask(self) -> None:
        if self.code is None:
            self._process.terminate()

    def end(self) -> None:
        """Wait a while for its end, then take its whole group away. Safe twice."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(END_SECONDS)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def main() -> int:
    args = arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    sys.stdout.write(f"Redis, the policy server, {len(STAGES)} workers and the trainer start; their logs: {args.out}\n")
    sys.stdout.flush()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
    with server.start(fraction=load(HERE / "config.yaml").redis.maxmemory_fraction) as redis:
        settings = {"ROLLOUT_REDIS__URL": redis.url, "ROLLOUT_REDIS__PASSWORD_FILE": redis.password_file}
        if args.policy:
            settings |= {"ROLLOUT_POLICY__URL": args.policy, "ROLLOUT_POLICY__TOKENIZER": str(args.model.resolve())}
        processes = Processes(args, {**os.environ, **QUIET, **settings})
        try:
            return processes.until_the_trainer_ends()
        finally:
            processes.end()


def stop(number: int, _: object) -> None:
    """Leave through the `finally` clauses."""
    sys.exit(128 + number)


class Processes:
    """The processes by name; `processes.json` in the output folder tells their pids."""

    def __init__(self, args: argparse.Namespace, environment: dict[str, str]) -> None:
        self._out: Path = args.out
        self._restarts = 0
        packages = os.pathsep.join(filter(None, [str(LINE), environment.get("PYTHONPATH")]))
        self._all = {} if args.policy else {"vllm": self._start("vllm", serve(args), environment)}
        for stage in STAGES:
            self._all[stage] = self._start(stage, (*ROLLOUT, "work", stage), environment)
        self._all["trainer"] = self._start("trainer", train(args), {**environment, "PYTHONPATH": packages})
        self._tell()

    def until_the_trainer_ends(self) -> int:
        """Its exit code; 1 when something that it needs can't go on."""
        trainer = self._all["trainer"]
        while trainer.code is None:
            time.sleep(LOOK_SECONDS)
            for name, process in list(self._all.items()):
                if process.code is None or process is trainer:
                    continue
                if name not in STAGES or self._restarts >= RESTARTS:
                    sys.stderr.write(f"{name} ended with exit code {process.code}:\n{process.tail()}\n")
                    return 1
                sys.stderr.write(f"worker {name} ended with exit code {process.code}; it is started anew\n")
                self._restarts += 1
                self._all[name] = process.anew()
                self._tell()
        return trainer.code

    def _start(self, name: str, command: tuple[str, ...], environment: dict[str, str]) -> Process:
        return Process(name, command, None if name == "trainer" else self._out / f"{name}.log", environment)

    def _tell(self) -> None:
        file = self._out / "processes.json"
        file.with_suffix(".new").write_text(json.dumps({name: process.pid for name, process in self._all.items()}))
        os.replace(file.with_suffix(".new"), file)

    def end(self) -> None:
        """The trainer first: it gives back what it holds."""
        for process in reversed(self._all.values()):
            process.ask()
        for process in reversed(self._all.values()):
            process.end()


def serve(args: argparse.Namespace) -> tuple[str, ...]:
    return (*ROLLOUT, "serve", str(args.model), "--vllm", str(args.vllm), "--", *VLLM)


def train(args: argparse.Namespace) -> tuple[str, ...]:
    config = str(HERE / "config.yaml")
    given = ("--model", str(args.model), "--config", config, "--out", str(args.out))
    return (str(args.trainer), str(args.script), *given, *args.more)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", type=Path, required=True, help="folder of the model to train")
    engine = parser.add_mutually_exclusive_group(required=True)
    engine.add_argument("--vllm", type=Path, help="the vllm program; it is started")
    engine.add_argument("--policy", metavar="URL", help="a policy server that serves MODEL already")
    parser.add_argument("--trainer", type=Path, required=True, help="a Python that has torch and TRL")
    parser.add_argument("--out", type=Path, required=True, help="folder for logs, weights, steps.jsonl, training.png")
    parser.add_argument("--script", type=Path, default=HERE / "train.py", help="what the trainer runs")
    parser.add_argument("more", nargs="*", metavar="-- TRAIN.PY'S OPTIONS", help="such as -- --steps 20")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
