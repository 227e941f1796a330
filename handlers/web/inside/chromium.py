"""The processes behind a browser: Chromium and Playwright's driver, the site's server; started, found, ended."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.async_api import Browser, BrowserContext, Playwright, ViewportSize

PROGRAMS = (
    "/usr/lib/chromium/chromium-headless-shell",
    "/usr/lib/chromium/chromium",
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
)
"""The first that is there. The headless shell takes a third of the CPU time and less memory than the whole browser;
Debian's starter scripts come after the programs themselves: they want files in /etc that not every sandbox has."""

FLAGS = ("--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu")
"""Chromium's own sandbox needs what a user namespace does not give; /dev/shm is small; there is no graphics card."""

VIEWPORT: ViewportSize = {"width": 1280, "height": 720}

SERVER_SECONDS = 10.0
STOP_SECONDS = 2.0

MOST_TEMPORARY = 50
"""Bytes of the temporary folder's path; only the driver `local` has a longer one."""


class Missing(Exception):
    """This sandbox has no browser to drive."""


class Chromium:
    """One browser with one context. `site`: the host name that leads to the server on `port`; others lead nowhere."""

    context: BrowserContext

    def __init__(self, site: str, port: int) -> None:
        self._rules = f"--host-resolver-rules=MAP {site} 127.0.0.1:{port}, MAP * ~NOTFOUND"
        self._playwright: Playwright | None = None
        self._browser: Browser | None = None

    async def start(self) -> None:
        """Start it. Raises Missing where there is none, RuntimeError with the reason where it does not start."""
        program = next(filter(None, map(shutil.which, PROGRAMS)), None)
        if program is None:
            raise Missing(f"this sandbox has no Chromium (looked for {', '.join(PROGRAMS)})")
        try:
            from playwright.async_api import async_playwright
        except ImportError as error:
            raise Missing(f"the Python of this sandbox, {sys.executable}, can't import Playwright: {error}") from None
        self._playwright = await async_playwright().start()
        try:
            self._browser = await self._playwright.chromium.launch(
                executable_path=program, args=[*FLAGS, self._rules], env=_environment(), handle_sigint=False,
                handle_sigterm=False, handle_sighup=False,
            )  # fmt: skip
        except Exception as error:
            raise RuntimeError(f"{program} does not start: {_said_last(str(error))}") from None
        self.context = await self._browser.new_context(
            viewport=VIEWPORT, locale="en-US", timezone_id="UTC", reduced_motion="reduce"
        )

    @property
    def alive(self) -> bool:
        """Whether it still answers for itself; one that hangs does, too."""
        return self._browser is not None and self._browser.is_connected()

    async def kill(self) -> None:
        """End it the hard way: one that hangs hears nothing."""
        for pid in _below(os.getpid()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._playwright is not None:
            with contextlib.suppress(Exception):  # its driver has just been killed
                await asyncio.wait_for(self._playwright.stop(), STOP_SECONDS)


async def serve(folder: Path) -> int:
    """The port of the server of `folder`/site, which is started where none runs. Raises Missing when none comes up."""
    port_file = folder / "port"
    if port_file.exists() and await _listens(int(port_file.read_text())):
        return int(port_file.read_text())
    port_file.unlink(missing_ok=True)
    log = folder / "server.log"
    script = Path(__file__).with_name("server.py")
    with log.open("wb") as output:
        server = subprocess.Popen(
            [sys.executable, script, folder / "site", folder / "sent.json", port_file],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True,
        )  # fmt: skip
    until = time.monotonic() + SERVER_SECONDS
    while not port_file.exists():
        if server.poll() is not None or time.monotonic() > until:
            raise Missing(f"the site's server did not start: {log.read_text(errors='replace')[-500:] or 'no reason'}")
        await asyncio.sleep(0.01)
    return int(port_file.read_text())


async def _listens(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def _environment() -> dict[str, str | float | bool]:
    """Chromium puts a socket, whose path may have 107 bytes, two names below the temporary folder."""
    long = len(os.environ.get("TMPDIR", "")) > MOST_TEMPORARY
    return {**os.environ, **({"TMPDIR": "/tmp"} if long else {})}


def _said_last(log: str) -> str:
    """Why a browser did not start, out of what it wrote: the line that ended it, else the beginning."""
    fatal = re.findall(r"FATAL.*", log)
    return (fatal[-1] if fatal else " ".join(log.split()))[:400]


def _below(root: int) -> list[int]:
    """Browsers and Playwright's driver among the descendants of `root`."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    found, border = [], [root]
    while border:
        parent = border.pop()
        children = [pid for pid, ppid in parents.items() if ppid == parent]
        border += children
        for pid in children:
            with contextlib.suppress(OSError):
                if re.match(r"node$|chrom|google-chrome|headless", Path(os.readlink(f"/proc/{pid}/exe")).name):
                    found.append(pid)
    return found
