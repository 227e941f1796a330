"""The tabs of a browser: which one is seen, when it has settled, and all that happens in them by itself, in words."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from playwright.async_api import Dialog, Download, Frame, Page, Request, Response

SETTLE_SECONDS = 6.0

QUIET_MS = 80
"""So long nothing must change in a page until it counts as settled."""

QUIET = """ms => new Promise(done => {
    let timer = setTimeout(done, ms);
    const again = () => { clearTimeout(timer); timer = setTimeout(done, ms); };
    new MutationObserver(again).observe(document,
        {subtree: true, childList: true, attributes: true, characterData: true});
    setTimeout(done, 20 * ms);
})"""

SHOWN_BYTES = 500
"""Of a downloaded file."""


class Tabs:
    """All tabs; the newest one is seen. `notes`: what happened beside a call; `visited`: addresses, in order."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.visited: list[str] = []
        self.lost = False
        """Whether the browser has ended, or its only page has crashed."""
        self.open: list[Page] = []
        self._busy: dict[Page, set[Request]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._came = asyncio.Event()

    @property
    def page(self) -> Page:
        """The tab that is seen."""
        return self.open[-1]

    def watch(self, page: Page) -> None:
        """Take a new tab."""
        if self.open:
            self.notes.append("a new tab was opened, and you see it: back() closes it and shows the one before")
        self.open.append(page)
        self._came.set()
        self._busy[page] = set()
        page.on("request", lambda request: self._started(page, request))
        page.on("requestfinished", lambda request: self._ended(page, request))
        page.on("requestfailed", lambda request: self._ended(page, request))
        page.on("response", lambda response: self._answered(page, response))
        page.on("framenavigated", lambda frame: self._went(page, frame))
        page.on("dialog", lambda dialog: self._later(self._answer(dialog)))
        page.on("download", lambda download: self._later(self._save(download)))
        page.on("filechooser", lambda _: self.notes.append("the page asks for a file: there is none to give"))
        page.on("close", self._closed)
        page.on("crash", lambda _: self.lose())

    def lose(self) -> None:
        """The browser is gone."""
        self.lost = True

    def end(self) -> None:
        """Nothing more is waited for."""
        for task in set(self._tasks):
            task.cancel()

    async def settle(self) -> None:
        """Wait until the page has loaded and nothing changes any more, for SETTLE_SECONDS at most."""
        until = time.monotonic() + SETTLE_SECONDS
        while (left := until - time.monotonic()) > 0 and not self.lost:
            await asyncio.sleep(0)  # what has just happened is heard of first
            if self._tasks:
                await asyncio.wait(set(self._tasks), timeout=left)
            elif await self._quiet(left):
                return
            else:
                await asyncio.sleep(0.02)
        if not self.lost:
            self.notes.append(f"the page was still loading after {SETTLE_SECONDS:g} s: read() shows it again")

    async def another(self, count: int, seconds: float) -> None:
        """Wait until there are more than `count` tabs, for `seconds` at most."""
        self._came.clear()
        if len(self.open) <= count:
            with contextlib.suppress(asyncio.TimeoutError):  # none came: the page shows what is there
                await asyncio.wait_for(self._came.wait(), seconds)

    async def _quiet(self, left: float) -> bool:
        """Whether the page asked for nothing and changed nothing for QUIET_MS."""
        page = self.page
        if self._busy[page]:
            return False
        with contextlib.suppress(Exception):  # the page went on to another one, which is waited for next
            await asyncio.wait_for(page.evaluate(QUIET, QUIET_MS), left)
            return page is self.page and not self._busy[page] and not self._tasks
        return False

    def _started(self, page: Page, request: Request) -> None:
        if request.resource_type not in ("eventsource", "websocket", "ping"):
            self._busy[page].add(request)

    def _ended(self, page: Page, request: Request) -> None:
        self._busy[page].discard(request)

    def _answered(self, page: Page, response: Response) -> None:
        if response.request.resource_type in ("fetch", "xhr"):  # its end never comes where nobody reads its body
            self._busy[page].discard(response.request)
        if response.status >= 400 and response.request.is_navigation_request() and response.frame == page.main_frame:
            said = f"{response.status} {response.status_text}".rstrip()
            self.notes.append(f"the server answered {response.url} with {said}")

    def _went(self, page: Page, frame: Frame) -> None:
        if frame == page.main_frame:
            self.visited.append(frame.url)

    def _closed(self, page: Page) -> None:
        if page in self.open and len(self.open) > 1:
            self.open.remove(page)
            self.notes.append("the tab was closed, and you see the one before")
        elif page in self.open:
            self.lose()

    def _later(self, work: Any) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, dialog: Dialog) -> None:
        what = f"the page showed a message ({dialog.type}): {dialog.message!r:.300}"
        self.notes.append(what if dialog.type == "alert" else f"{what}; it was answered with OK")
        with contextlib.suppress(Exception):  # the page that asked may be gone
            await dialog.accept(dialog.default_value or None)

    async def _save(self, download: Download) -> None:
        name = re.sub(r"[^\w.-]", "_", download.suggested_filename)[-100:] or "file"
        place = Path.home() / "downloads" / name
        try:
            await download.save_as(place)
        except Exception as error:
            self.notes.append(f"the download of {name} failed: {error!s:.200}")
            return
        with place.open("rb") as file:
            begin = file.read(SHOWN_BYTES)
        shown = "" if b"\0" in begin else f"; it begins: {begin.decode('utf-8', 'replace')!r}"
        self.notes.append(f"the file downloads/{name} ({place.stat().st_size} bytes) was downloaded{shown}")
