"""Runs one program on many tests, inside a sandbox: `python3 runner.py check|run JOB RESULTS`.

Needs Python 3.6 and its standard library. `check` says whether this sandbox will do, before any program has run in it.
Each test has a process of its own, with a session, limits, an empty folder and unnamed files for its input and output;
all that it started is killed before the next one. Expected outputs are not here: who compares sits outside. Results are
records with a keyed digest, so that a program that writes into the file of results is found out. The key is out of
reach: the job's file is gone before the first program runs, and this process can't be read by its children.
"""
# ruff: noqa: UP006, UP035, UP045, SIM115 - Python 3.6 has these names only; the file of results stays open

import contextlib
import ctypes
import gzip
import hashlib
import hmac
import json
import math
import os
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
import traceback
from typing import IO, Any, Dict, List, NamedTuple, Optional, Tuple

PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 4, 36
MB = 1 << 20
STACK = 64 * MB
LOOK = 0.2  # s between two looks at how much a running program has written
CLEAR = 10.0  # s in which what a program left must be gone
SHOWN = 1000  # bytes of the output of a program that ended wrongly
TAIL = 2000  # bytes of stderr
COMPILE_CPU, COMPILE_WALL, COMPILE_OUTPUT, COMPILE_MEMORY = 30.0, 61.0, MB, 2048 * MB
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


class Left(Exception):
    """Processes of a program could not be ended."""


class Ran(NamedTuple):
    """How one process ended: `how` is ended, exit, signal, cpu, wall, output or silent; seconds of wall and of CPU."""

    how: str
    code: int
    seconds: float
    cpu: float
    output: bytes
    stderr: bytes


class Results:
    """The file of results. It is written anew where a program has taken it away."""

    def __init__(self, path: str, key: bytes) -> None:
        self._path, self._key, self._count = path, key, 0
        self._file = open(path, "w+b")

    def add(self, **record: Any) -> None:
        data = json.dumps(record, ensure_ascii=False).encode("utf-8")
        numbered = struct.pack(">Q", self._count) + data
        self._count += 1
        if not self._is_there():
            self._restore()
        self._file.write(struct.pack(">I", len(data)) + hmac.new(self._key, numbered, hashlib.sha256).digest() + data)
        self._file.flush()

    def _is_there(self) -> bool:
        try:
            return os.stat(self._path).st_ino == os.fstat(self._file.fileno()).st_ino
        except OSError:
            return False

    def _restore(self) -> None:
        old, part = self._file, self._path + ".part"
        make_folder(os.path.dirname(self._path))
        self._file = open(part, "w+b")
        old.seek(0)
        shutil.copyfileobj(old, self._file)
        old.close()
        self._file.flush()
        os.rename(part, self._path)


class Program:
    """The program's files as they were at first, put into a new folder for each run, and the commands with `{folder}`.

    They are kept in memory: what a program does to its own files does not reach its next test.
    """

    def __init__(self, job: Dict[str, Any], root: str) -> None:
        self.files = {name: (0o600, text.encode("utf-8")) for name, text in job["files"].items()}
        self.compile: List[str] = list(job["compile"])
        self.run: List[str] = list(job["run"])
        self.call: List[str] = list(job["call"])
        self._job, self._root = job, root

    def missing(self) -> str:
        """The first program of the commands that this sandbox does not have."""
        asked = [argv[0] for argv in (self.compile, self.run, self.call) if argv]
        return next((name for name in asked if "{" not in name and shutil.which(name) is None), "")

    def build(self) -> Ran:
        """Run the compiler; what it made belongs to the files from now on."""
        folder = self.folder()
        try:
            limits = COMPILE_CPU, COMPILE_WALL, COMPILE_OUTPUT, COMPILE_MEMORY
            ran = execute(_filled(self.compile, folder), folder, b"", *limits)
            self.files = {
                name: (stat.S_IMODE(os.stat(os.path.join(folder, name)).st_mode), _bytes(os.path.join(folder, name)))
                for name in os.listdir(folder)
                if os.path.isfile(os.path.join(folder, name))
            }
            return ran
        finally:
            shutil.rmtree(os.path.dirname(folder), ignore_errors=True)

    def test(self, test: Dict[str, str]) -> Ran:
        """Run it on one test; `output` is what it printed, or the JSON text of what its function returned."""
        folder = self.folder()
        empty = os.path.join(os.path.dirname(folder), "empty")
        os.mkdir(empty)
        seconds = self._job["seconds"]
        limits = seconds, 2 * seconds + 1, self._job["output"], self._job["memory"]
        try:
            if not test["fn"]:
                return execute(_filled(self.run, folder), empty, test["input"].encode("utf-8"), *limits)
            with open(os.path.join(folder, "call.json"), "w", encoding="utf-8") as file:
                json.dump({"fn": test["fn"], "arguments": json.loads(test["input"])}, file)
            return execute(_filled(self.call, folder), empty, b"", *limits, returns=True)
        finally:
            shutil.rmtree(os.path.dirname(folder), ignore_errors=True)

    def folder(self) -> str:
        """A new folder with the files, inside a new one that nothing else is in."""
        make_folder(self._root)
        folder = os.path.join(tempfile.mkdtemp(prefix="t-", dir=self._root), "program")
        os.mkdir(folder)
        for name, (mode, data) in self.files.items():
            with open(os.path.join(folder, name), "wb") as file:
                file.write(data)
            os.chmod(os.path.join(folder, name), mode)
        return folder


def execute(
    argv: List[str],
    cwd: str,
    given: bytes,
    seconds: float,
    wall: float,
    most: int,
    memory: int,
    returns: bool = False,
) -> Ran:
    """Run one process and end all that it started. `returns`: its result is what it wrote to a file of its own.

    Raises Left when something of it can't be ended, OSError when nothing can be started.
    """
    with contextlib.ExitStack() as stack:
        stdin, stdout, stderr, result = [stack.enter_context(tempfile.TemporaryFile(dir=cwd)) for _ in range(4)]
        stdin.write(given)
        stdin.seek(0)
        if returns:
            os.set_inheritable(result.fileno(), True)
            argv = [*argv, str(result.fileno())]
        output = result if returns else stdout
        began = time.monotonic()
        process = subprocess.Popen(
            argv, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, env=_environment(cwd),
            close_fds=False,  # Python's own are closed on exec; to list the others, /proc/self/fd can't be read here
            preexec_fn=lambda: _limit(seconds, most, memory),  # noqa: PLW1509 - there is one thread
        )  # fmt: skip
        status, cpu = wait(process.pid, began + wall, output.fileno(), most)
        took = time.monotonic() - began
        cpu += clear()
        process.returncode = 0  # it is reaped already: Popen must not look for it
        size = os.fstat(output.fileno()).st_size
        code = -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)
        how = "ended"
        if cpu > seconds or code == -signal.SIGXCPU:
            how = "cpu"
        elif took > wall:
            how = "wall"
        elif size > most:
            how = "output"
        elif code:
            how = "signal" if code < 0 else "exit"
        elif returns and not size:
            how = "silent"
        return Ran(how, code, took, cpu, _part(output, most if how == "ended" else SHOWN), _tail(stderr))


def wait(pid: int, until: float, written: int, most: int) -> Tuple[int, float]:
    """Its status and the CPU seconds of all that was reaped, when it has ended or was ended for time or output."""
    cpu, killed = 0.0, False
    while True:
        got, status, usage = os.wait4(-1, os.WNOHANG)
        if got:
            cpu += usage.ru_utime + usage.ru_stime
            if got == pid:
                return status, cpu
            continue
        left = until - time.monotonic()
        if not killed and (left <= 0 or os.fstat(written).st_size > most):
            os.kill(pid, signal.SIGKILL)
            killed = True
        signal.sigtimedwait([signal.SIGCHLD], LOOK if killed else max(0.001, min(LOOK, left)))


def clear() -> float:
    """End every descendant of this process; the CPU seconds of those. Raises Left.

    All orphans come here (this process is their subreaper), so no child means that nothing is left.
    """
    cpu, until = 0.0, time.monotonic() + CLEAR
    while True:
        try:
            got, _, usage = os.wait4(-1, os.WNOHANG)
        except ChildProcessError:
            return cpu
        if got:
            cpu += usage.ru_utime + usage.ru_stime
            continue
        if time.monotonic() > until:
            raise Left(f"processes of the program can't be ended: {descendants()}")
        for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped ones start no others meanwhile
            for pid in descendants():
                try:
                    os.kill(pid, number)
                except ProcessLookupError:
                    continue
        signal.sigtimedwait([signal.SIGCHLD], 0.05)


def descendants() -> List[int]:
    """Pids of all that comes from this process."""
    children: Dict[int, List[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                about = _bytes(f"/proc/{name}/stat")
            except OSError:
                continue
            children.setdefault(int(about.rpartition(b")")[2].split()[1]), []).append(int(name))
    found: List[int] = []
    todo = [os.getpid()]
    while todo:
        mine = children.get(todo.pop(), [])
        found += mine
        todo += mine
    return found


def make_folder(path: str) -> None:
    """Make it, where a program has removed it."""
    os.makedirs(path, exist_ok=True)


def _limit(seconds: float, most: int, memory: int) -> None:
    os.setsid()
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    whole = math.ceil(1.25 * seconds)  # the kernel counts in whole seconds, and some count too fast
    _lower(resource.RLIMIT_CPU, whole, whole + 1)
    _lower(resource.RLIMIT_CORE, 0)
    _lower(resource.RLIMIT_FSIZE, most + 16 * MB)
    _lower(resource.RLIMIT_STACK, STACK)
    if memory:
        _lower(resource.RLIMIT_DATA, memory)


def _lower(which: int, soft: int, hard: Optional[int] = None) -> None:
    most = resource.getrlimit(which)[1]
    wanted = soft if hard is None else hard
    hard = wanted if most == resource.RLIM_INFINITY else min(wanted, most)
    resource.setrlimit(which, (min(soft, hard), hard))


def _environment(cwd: str) -> Dict[str, str]:
    own = {"HOME": cwd, "TMPDIR": cwd, "LANG": "C.UTF-8", "PYTHONHASHSEED": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    own.update({"PYTHONIOENCODING": "utf-8"}, **dict.fromkeys(ONE_THREAD, "1"))
    return dict(os.environ, **own)


def _filled(argv: List[str], folder: str) -> List[str]:
    return [word.replace("{folder}", folder) for word in argv]


def _bytes(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _part(file: "IO[bytes]", most: int) -> bytes:
    file.seek(0)
    return file.read(most)


def _tail(file: "IO[bytes]") -> bytes:
    file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL))
    return file.read(TAIL)


def _text(data: bytes) -> str:
    return data.decode("utf-8", "backslashreplace")


def _told(ran: Ran) -> Dict[str, Any]:
    return {
        "how": ran.how,
        "code": ran.code,
        "seconds": round(ran.seconds, 3),
        "cpu": round(ran.cpu, 3),
        "output": _text(ran.output),
        "stderr": _text(ran.stderr),
    }


def run(job: Dict[str, Any], program: Program, results: Results) -> str:
    """Why it is over: done, failed (a test ended wrongly, and one is enough), time, unbuilt, spoilt."""
    began = time.monotonic()
    if program.compile:
        built = program.build()
        if built.how != "ended":
            results.add(kind="unbuilt", **_told(built))
            return "unbuilt"
    for number, test in enumerate(job["tests"]):
        if job["total"] and time.monotonic() - began > job["total"]:
            return "time"
        try:
            ran = program.test(test)
        except OSError as error:
            results.add(kind="spoilt" if number else "broken", why=str(error))
            return "spoilt"
        results.add(kind="test", **_told(ran))
        if ran.how != "ended" and job["stop"]:
            return "failed"
    return "done"


def check(program: Program, results_path: str) -> None:
    """Exit with a sentence where this sandbox can't be worked in. What fails after this is the program's doing."""
    missing = program.missing()
    if missing:
        sys.exit(f"there is no {missing} in the sandbox")
    with open(results_path, "wb"):
        pass
    shutil.rmtree(os.path.dirname(program.folder()))
    subprocess.check_call(["true"], preexec_fn=lambda: _limit(1.0, MB, 0))


def main() -> None:
    act, job_path, results_path = sys.argv[1], *map(os.path.abspath, sys.argv[2:4])
    with gzip.open(job_path, "rb") as file:
        job = json.loads(file.read().decode("utf-8"))
    libc = ctypes.CDLL(None, use_errno=True)
    for option, value in ((PR_SET_DUMPABLE, 0), (PR_SET_CHILD_SUBREAPER, 1)):
        if libc.prctl(option, value, 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}) was refused")
    program = Program(job, os.path.join(os.path.dirname(results_path), "tests"))
    if act == "check":
        return check(program, results_path)
    os.unlink(job_path)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGCHLD])
    results = Results(results_path, bytes.fromhex(job.pop("secret")))
    try:
        why = run(job, program, results)
    except Left as error:
        results.add(kind="broken", why=str(error))
        why = "left"
    except Exception:  # whatever it is, it is told: silence would be taken for the program's doing
        results.add(kind="broken", why=traceback.format_exc()[-1000:])
        why = "broken"
    results.add(kind="end", why=why)
    return None


if __name__ == "__main__":
    main()
