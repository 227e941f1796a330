"""A small image out of this machine's own programs, built in seconds without a network, as a folder and as a SIF."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

PROGRAMS = """
bash sh env true echo cat ls sleep mkdir rm rmdir mv cp ln chmod id head tail wc tr sort uniq cut stty date touch tee
pwd uname mktemp readlink base64 sha256sum tar gzip find grep sed mawk awk ps kill nproc python3 python3.11
"""
FOLDERS = "dev etc home mnt opt proc root run srv sys tmp usr/bin usr/sbin usr/lib usr/lib64 var/tmp"
LIBRARIES = "gcc_s stdc++ rt dl pthread util m"
"""What wheels expect of a machine."""
LINKS = ("bin", "sbin", "lib", "lib64")
SKIPPED = shutil.ignore_patterns("__pycache__", "test", "tests", "config-*", "idlelib", "dist-packages", "lib2to3")


def make(folder: Path) -> tuple[Path, Path]:
    """An unpacked image and a SIF of it, both new in `folder`."""
    root = folder / "image"
    for name in FOLDERS.split():
        (root / name).mkdir(parents=True)
    for name in LINKS:
        (root / name).symlink_to(f"usr/{name}")
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\n")
    python = Path("/usr/lib/python3.11")
    shutil.copytree(python, root / "usr/lib/python3.11", ignore=SKIPPED, symlinks=True)
    found = [path for path in (shutil.which(name, path="/usr/bin:/bin") for name in PROGRAMS.split()) if path]
    found += [str(path) for name in LIBRARIES.split() for path in Path("/usr/lib").glob(f"*/lib{name}.so.[0-9]")]
    for path in {*found, *_libraries([*found, *map(str, python.glob("lib-dynload/*.so"))])}:
        place = root / path.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            shutil.copy(path, place)
    sif = folder / "image.sif"
    command = ["apptainer", "-q", "build", "--mksquashfs-args", "-comp zstd -Xcompression-level 3", str(sif), str(root)]
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, env={**os.environ, "APPTAINER_TMPDIR": str(folder)})
    return root, sif


def _libraries(programs: Iterable[str]) -> set[str]:
    """Shared libraries and loader that these programs are linked with."""
    said = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=False).stdout
    return set(re.findall(r"(/\S+) \(0x", said))
