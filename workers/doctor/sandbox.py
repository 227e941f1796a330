"""What `rollout doctor` finds out about sandboxes: each ability of the site, tried, with the mend where it lacks."""

from __future__ import annotations

import asyncio
import os
import pwd
import shutil
import tempfile
from pathlib import Path

from pipeline.config import Config
from pipeline.errors import LineError
from workers.doctor import Finding

TRY_SECONDS = 4.0
FEW_GB = 5.0
OVERLAY = (
    'mkdir -p "$1/lower" "$1/upper" "$1/work" "$1/m" && '
    'mount -t overlay overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work,userxattr" "$1/m"'
)
AGAIN = """
at=$(stat -c %d /)
for folder in /srv /mnt /media /var/log; do
    [ -d "$folder" ] && [ ! -L "$folder" ] && [ "$(stat -c %d "$folder")" = "$at" ] || continue
    rm -rf "$folder" && mkdir "$folder" && rmdir "$folder"
    exit
done
"""
"""Removes a folder of the image, if it is one, and makes it again."""


async def findings(config: Config) -> list[Finding]:
    """All findings about sandboxes. Takes a second where all is well, ten at the most where not, and leaves nothing."""
    from workers.sandbox.host import sandbox_root

    checks = [_as_root(), _room("sandbox disk", sandbox_root(config), "sandbox.root"), _cgroups()]
    if config.sandbox.driver == "local":
        local = Finding("sandbox", "warn", "local isolates nothing", "use it for tests and for code that you trust")
        return [
            local,
            _room("sandbox disk", sandbox_root(config), "sandbox.root"),
            *await asyncio.gather(_whole(config), _others(config)),
        ]
    with tempfile.TemporaryDirectory(prefix="rollout-doctor-") as folder:
        tried = [_user_namespaces(), _network(), _bubblewrap(config)]
        if config.sandbox.driver == "apptainer":
            tried += [_apptainer(), _overlay(folder)]
        checks += await asyncio.gather(*tried)
    checks.append(_programs())
    if config.sandbox.driver == "apptainer":
        checks += [_fuse(), _subordinate_ids(), _images(config)]
    return [*checks, await _whole(config)]


async def _whole(config: Config) -> Finding:
    """Start a sandbox as a rollout would, where its image is there already."""
    name = config.sandbox.driver
    if name == "apptainer" and config.sandbox.image != "host":
        image = await _image(config)
        if image is not None:
            return image
    wrong, refused = await _tried(config)
    if wrong:
        return Finding("sandbox", "fail", f"{name} does not work: {wrong}", "mend what is said above, or below")
    if refused:
        return Finding(
            "sandbox", "warn",
            f"{name} works, but a folder of the image that was removed can't be made again in it ({refused}): "
            "git checkouts, builds and package managers fail by that",
            "sandbox.root on a local ext4 or xfs, and a kernel of 5.11 or newer, whose overlay keeps user attributes",
        )  # fmt: skip
    return Finding("sandbox", "ok", f"{name} started a sandbox and ran a command in it")


async def _others(config: Config) -> Finding:
    """What the drivers that isolate would say here, in one line."""
    names = ("bubblewrap", "apptainer")
    with tempfile.TemporaryDirectory(prefix="rollout-doctor-") as folder:
        changes = {"sandbox.image": "host", "images.cache": folder}
        tried = await asyncio.gather(*(_tried(config.changed({**changes, "sandbox.driver": name})) for name in names))
        told = [wrong for wrong, _ in tried]
    sound = [name for name, wrong in zip(names, told, strict=True) if not wrong]
    text = "; ".join(
        f"{name} {f'does not: {wrong}' if wrong else 'works'}" for name, wrong in zip(names, told, strict=True)
    )
    if sound:
        return Finding("other drivers", "ok", f"{text} (set sandbox.driver to {' or '.join(sound)})")
    return Finding("other drivers", "warn", text, "rollout doctor --set sandbox.driver=bubblewrap looks closer")


async def _image(config: Config) -> Finding | None:
    """What is told of an image that is not at hand: it is not built or pulled here. None for one that is there."""
    from workers.sandbox.images import resolve
    from workers.sandbox.images.recipes import names
    from workers.sandbox.images.resolve import pullable

    name = config.sandbox.image
    if name in names() or pullable(name) or config.path_of(name).is_file():
        return Finding("sandbox", "ok", f"{config.sandbox.driver} was not tried: the image {name} may be large")
    try:
        await resolve(config, name)  # a folder, a name of the cache, or nothing that is known
    except LineError as error:
        return Finding("sandbox", "fail", f"sandbox.image: {error}", "set sandbox.image to an image that is there")
    return None


async def _tried(config: Config) -> tuple[str, str]:
    """Start a sandbox and run commands in it: what went wrong, and what a folder made again met; empty where nothing.

    It lies where those of rollouts do, for what an overlay can do depends on the disk.
    """
    from workers.sandbox.box import Spec
    from workers.sandbox.boxes import make_driver

    refused = 0, ""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=_disk(config)) as folder:
        try:
            async with asyncio.timeout(TRY_SECONDS):
                box = await make_driver(config, Path(folder)).create(Spec(), "doctor")
            try:
                code, text = await _run(box.command(["/bin/bash", "-c", "echo sound"]), env=box.environment())
                if config.sandbox.driver == "apptainer":
                    refused = await _run(box.command(["/bin/bash", "-c", AGAIN]), env=box.environment())
            finally:
                await box.discard()
        except (LineError, OSError, TimeoutError) as error:
            return str(error) or f"it was not ready within {TRY_SECONDS:g} s", ""
    wrong = "" if (code, text) == (0, "sound") else f"bash said {text!r:.200}; does the image have /bin/bash?"
    return wrong, refused[1] if refused[0] else ""


def _disk(config: Config) -> Path | None:
    """The folder that the site set for sandboxes, where it can be used; None: the temporary directory."""
    folder = config.path_of(config.sandbox.root) if config.sandbox.root else None
    return folder if folder is not None and os.path.isdir(folder) and os.access(folder, os.W_OK | os.X_OK) else None


def _as_root() -> Finding:
    if os.geteuid() == 0:
        return Finding(
            "sandbox user", "warn",
            "the worker runs as root: uid 0 inside is this machine's, held by namespaces and dropped rights alone",
            "run workers as a plain user",
        )  # fmt: skip
    return Finding("sandbox user", "ok", f"uid {os.geteuid()}: root inside has this user's rights outside, no more")


async def _user_namespaces() -> Finding:
    code, text = await _run(["unshare", "--user", "--map-root-user", "true"])
    if code == 0:
        return Finding("user namespaces", "ok", "this user may make them")
    return Finding(
        "user namespaces", "fail", f"this user may not make them: {text}",
        "ask for sysctl user.max_user_namespaces > 0, kernel.unprivileged_userns_clone = 1 and "
        "kernel.apparmor_restrict_unprivileged_userns = 0, as far as they exist",
    )  # fmt: skip


async def _network() -> Finding:
    code, text = await _run(["unshare", "--user", "--map-root-user", "--net", "true"])
    if code == 0:
        return Finding("network namespaces", "ok", "a sandbox has no network unless its task asks for one")
    return Finding(
        "network namespaces", "warn", f"not given here, so sandboxes use this machine's network: {text}",
        "ask for sysctl user.max_net_namespaces > 0, or run code that you trust with the network",
    )  # fmt: skip


async def _overlay(folder: str) -> Finding:
    argv = ["unshare", "--user", "--map-root-user", "--mount", "/bin/sh", "-c", OVERLAY, "sh", folder]
    code, text = await _run(argv)
    if code == 0:
        return Finding("overlay", "ok", "the kernel mounts overlays for this user: fast")
    if shutil.which("fuse-overlayfs"):
        return Finding("overlay", "warn", "by fuse-overlayfs alone, which is slower", "a kernel of 5.11 or newer")
    return Finding("overlay", "fail", f"none: {text}", "a kernel of 5.11 or newer, or install fuse-overlayfs")


def _fuse() -> Finding:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        return Finding(
            "fuse", "warn", f"/dev/fuse can't be opened ({error.strerror}): SIF images can't be mounted, only unpacked",
            "chmod 666 /dev/fuse",
        )  # fmt: skip
    if not shutil.which("squashfuse") and not shutil.which("squashfuse_ll"):
        return Finding(
            "fuse", "warn", "no squashfuse: SIF images can't be mounted, only unpacked", "install squashfuse"
        )
    return Finding("fuse", "ok", "/dev/fuse and squashfuse: SIF images can be mounted")


def _subordinate_ids() -> Finding:
    program = shutil.which("newuidmap")
    if program is None:
        return Finding("subordinate ids", "warn", "no newuidmap: inside there is one user only", "install uidmap")
    if not _has_range():
        return Finding(
            "subordinate ids", "warn", "this user has no range in /etc/subuid and /etc/subgid: one user only inside",
            "ask for a line in both, as by usermod --add-subuids 100000-165535 --add-subgids 100000-165535",
        )  # fmt: skip
    return Finding("subordinate ids", "ok", "this user has ranges: packages that make users can be installed inside")


def _cgroups() -> Finding:
    from workers.sandbox.boxes.limits import find_hierarchy, nproc_counts_sandbox

    hierarchy = find_hierarchy(look_only=True)
    if hierarchy is not None:
        held = ", ".join(sorted(hierarchy.folders))
        return Finding("limits", "ok", f"by cgroups version {hierarchy.version}: {held}")
    counted = "counted by the kernel" if nproc_counts_sandbox() else "counted by the watchdog alone"
    return Finding(
        "limits", "warn", f"no cgroup is delegated: memory and disk are held by the watchdog, processes are {counted}",
        "systemd-run --user --scope -p Delegate=yes, or ask for delegation; nothing, where the job's own limit will do",
    )  # fmt: skip


def _programs() -> Finding:
    missing = [name for name in ("nsenter", "prlimit", "setpriv", "unshare", "du") if shutil.which(name) is None]
    if missing:
        return Finding("programs", "fail", f"missing: {', '.join(missing)}", "install util-linux and coreutils")
    return Finding("programs", "ok", "nsenter, prlimit, setpriv and unshare are here")


async def _bubblewrap(config: Config) -> Finding:
    grade = "fail" if config.sandbox.driver == "bubblewrap" else "warn"
    if shutil.which("bwrap") is None:
        return Finding("bubblewrap", grade, "bwrap is not installed", "install bubblewrap")
    _, text = await _run(["bwrap", "--version"])
    return Finding("bubblewrap", "ok", text)


async def _apptainer() -> Finding:
    if shutil.which("apptainer") is None:
        return Finding("apptainer", "fail", "apptainer is not installed", "install it (make system does on Debian)")
    _, text = await _run(["apptainer", "--version"])
    return Finding("apptainer", "ok", text)


def _images(config: Config) -> Finding:
    from workers.sandbox.images.cache import cache_folder

    return _room("image cache", cache_folder(config), "images.cache")


def _has_range() -> bool:
    """Whether this user stands in /etc/subuid and /etc/subgid, by name or by number."""
    try:
        names = {str(os.geteuid()), pwd.getpwuid(os.geteuid()).pw_name}
        tables = [Path("/etc", name).read_text().splitlines() for name in ("subuid", "subgid")]
    except (OSError, KeyError):
        return False
    return all(any(line.split(":")[0] in names for line in table) for table in tables)


def _room(name: str, folder: Path, setting: str) -> Finding:
    """Is there a local disk with room? The nearest folder that is seen stands for one that is not made yet."""
    from workers.sandbox.images.files import SHARED_DISKS, filesystem

    # not Path.exists, which raises where a folder may not be entered
    place = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not place.is_dir() or not os.access(place, os.W_OK | os.X_OK, effective_ids=True):
        why = "this user may not write to it" if place.is_dir() else "it is no folder"
        text = f"{setting}: {folder} can't be used" + (f", for {place}: {why}" if place != folder else f": {why}")
        return Finding(name, "fail", text, f"set {setting} to another folder")
    free = shutil.disk_usage(place).free / 1e9
    kind = filesystem(place)
    if kind.startswith(SHARED_DISKS):
        return Finding(
            name, "warn", f"{folder} lies on {kind}, which other machines share", f"set {setting} to a local disk"
        )
    if free < FEW_GB:
        return Finding(name, "warn", f"{free:.1f} GB are free at {folder}", f"free some, or set {setting}")
    return Finding(name, "ok", f"{free:.0f} GB are free at {folder} ({kind})")


async def _run(argv: list[str], env: dict[str, str] | None = None) -> tuple[int, str]:
    """Exit code and what was written, as one line; a program that is missing or too slow is 127."""
    from workers.sandbox import programs

    try:
        code, said = await programs.run(argv, seconds=TRY_SECONDS, env=env)
    except TimeoutError as error:
        return 127, str(error)
    except OSError as error:
        return 127, f"{argv[0]}: {error.strerror}"
    return code, " ".join(said.split())[:200]
