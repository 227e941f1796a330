"""The browser as the handler uses it: one call does one thing, and says what is to be seen then.

Each call of `act` writes what came of it to a file, which the handler reads. Whatever the page or the policy does wrong
is a sentence in it; a browser that hangs or is lost is ended, and a new one opened.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import re
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from handlers.web.inside import chromium, tree
from handlers.web.inside.addresses import whole
from handlers.web.inside.tabs import Tabs

if TYPE_CHECKING:
    from playwright.async_api import Locator, Page

HERE = Path.home() / ".web"
"""Where the site lies, and what is said about it."""

WHOLE_SECONDS = 45.0
"""For one call with all its waits; after it the browser counts as hung."""

OPEN_SECONDS = 15.0
ACTION_SECONDS = 5.0
SNAPSHOT_SECONDS = 8.0
ANSWER_SECONDS = 2.0

MOST_CHARACTERS = 400_000
"""Of one snapshot; a page that is larger is cut."""

SHOWN = 500
"""Characters of an address, or a title."""

NOTES = 12
"""Things that happened beside one call, and are told."""

UNREAD = "e => e.value === '' && ['date', 'time', 'datetime-local', 'month', 'week'].includes(e.type)"
"""Whether a field for dates has dropped what was written into it."""

REASONS = (
    ("intercepts pointer events", "something else lies over it"),
    ("element is not enabled", "it is disabled"),
    ("not editable", "it can't be written to"),
    ("element is not visible", "it is not visible"),
    ("outside of the viewport", "it is outside of what can be scrolled to"),
    ("Cannot type text into", "it takes a number"),
)


class Refused(Exception):
    """A call that can't be done; the sentence is for the policy."""


class Web:
    """What is kept between calls: server, browser, tabs, and which number means which element.

    `site`: host name of the pages; `start`: the first address.
    """

    def __init__(self, site: str, start: str) -> None:
        self._site, self._start = site, start
        self._chromium: chromium.Chromium | None = None
        self._tabs = Tabs()
        self._numbers: dict[tuple[str, ...], int] = {}
        self._elements: dict[int, tuple[str, str]] = {}
        """Number -> (Playwright's reference, role) in the observation that was told last."""
        self._next = 1
        self._shots = 0

    @property
    def page(self) -> Page:
        """The tab that is seen."""
        return self._tabs.page

    async def act(self, asked: dict[str, Any]) -> dict[str, Any]:
        """Do one thing; what there is to tell of it. `asked`: as in `act` below.

        Raises Missing where there is no browser, RuntimeError where none starts.
        """
        self._next, self._shots = max(self._next, asked["next"]), max(self._shots, asked["shots"])
        if self._chromium is None and asked["calls"] == 1:
            await self._begin()
        self._tabs.notes.clear()
        self._tabs.visited.clear()
        try:
            if self._chromium is None:  # the rollout had one before
                told = await self._anew("was lost", "its kernel was ended")
            else:
                told = await asyncio.wait_for(self._act(asked["do"], asked["with"]), WHOLE_SECONDS)
        except Refused as error:
            told = {"refused": str(error)}
        except Exception as error:  # Playwright raises its own kinds for a browser that is gone or hangs
            gone = self._tabs.lost or "closed" in str(error) or "crash" in str(error).lower()
            what = "crashed" if gone else "did not answer any more (the page hangs)"
            told = await self._anew(what, f"{type(error).__name__}: {error}"[:500])
        notes = self._tabs.notes[:NOTES]
        return {**told, "notes": notes, "visited": list(self._tabs.visited), "next": self._next}

    async def _anew(self, what: str, trouble: str) -> dict[str, Any]:
        """Show the start page in a new browser. `what` became of the old one, for the policy; `trouble`: for a log."""
        before = [*self._tabs.notes, f"the browser {what}: a new one was started, with no cookies, at the start page"]
        self._tabs.end()
        if self._chromium is not None:
            await self._chromium.kill()
        await self._begin()
        self._tabs.notes += before
        try:
            await asyncio.wait_for(self._open(self._start), WHOLE_SECONDS)
            await self._tabs.settle()
            return {"restarted": trouble, **await self._tree_of(1)}
        except Exception:
            self._tabs.notes.append("the start page can't be shown either: open another one")
            return {"restarted": trouble, "text": "", "url": self._start, "title": ""}

    async def _begin(self) -> None:
        """Start the server, if it does not run, and a browser with one empty page."""
        started = chromium.Chromium(self._site, await chromium.serve(HERE))
        await started.start()
        tabs = self._tabs = Tabs()
        self._elements = {}
        started.context.on("page", tabs.watch)
        started.context.on("close", lambda _: tabs.lose())
        await started.context.new_page()
        self._chromium = started

    async def _act(self, do: str, given: dict[str, Any]) -> dict[str, Any]:
        self._check_alive()
        verbs: dict[str, Callable[..., Awaitable[None]]] = {
            "open": self._open, "click": self._click, "type": self._type, "back": self._back, "look": self._nothing,
        }  # fmt: skip
        if do == "screenshot":
            return {"shot": await self._screenshot(), **await self._tree_of(1)}
        given = {name: value.encode("utf-8", "replace").decode() if isinstance(value, str) else value
                 for name, value in given.items()}  # fmt: skip
        part = int(given.pop("part", 1))
        await verbs[do](**given)
        while True:
            await self._tabs.settle()
            self._check_alive()
            page, told = self.page, await self._tree_of(part)
            if page is self.page:
                return told

    def _check_alive(self) -> None:
        if self._tabs.lost or self._chromium is None or not self._chromium.alive:
            raise RuntimeError("the browser is closed")

    async def _nothing(self) -> None:
        """What `look` does: the page is only shown."""

    async def _open(self, url: str) -> None:
        try:
            address = whole(url.strip(), self.page.url, self._root)
        except ValueError as error:
            raise Refused(str(error)) from None
        try:
            await self._goto(address)
        except Exception as error:
            said = str(error)
            if "Download is starting" in said:
                return
            if "Timeout" in said:
                await self._stop_loading()
                raise Refused(f"{address} did not answer within {OPEN_SECONDS:g} s") from None
            found = re.search(r"net::(ERR_\w+)", said)
            if found is None:
                await self._answers()
                raise Refused(f"{address} can't be opened: {said.splitlines()[0]:.300}") from None
            with contextlib.suppress(Exception):  # Chromium's own page about it comes a moment later
                await self.page.wait_for_url("chrome-error://**", wait_until="commit", timeout=ANSWER_SECONDS * 1000)
            reach = f"this browser reaches {self._root} alone"
            raise Refused(f"{address} can't be opened: {found[1]} ({reach}); back() shows the page before") from None

    async def _goto(self, address: str) -> None:
        """Go there, again where Chromium's own page about the address before cuts in."""
        while True:
            try:
                await self.page.goto(address, wait_until="commit", timeout=OPEN_SECONDS * 1000)
                return
            except Exception as error:
                if "interrupted by another navigation" not in str(error):
                    raise

    @property
    def _root(self) -> str:
        return f"http://{self._site}/"

    async def _stop_loading(self) -> None:
        session = await self.page.context.new_cdp_session(self.page)
        await session.send("Page.stopLoading")
        await session.detach()

    async def _click(self, element: int) -> None:
        role, found = await self._find(element)
        opens = await found.evaluate("e => e.closest('[target=_blank]') !== null")
        before = len(self._tabs.open)
        await self._done(f"element {element} ({role}) was not clicked", found.click(timeout=ACTION_SECONDS * 1000))
        if opens:  # Playwright tells of a tab when its first page has answered
            await self._tabs.another(before, ACTION_SECONDS)

    async def _type(self, element: int, text: str, submit: bool) -> None:
        role, found = await self._find(element)
        failed = f"nothing was typed into element {element} ({role})"
        if role in ("checkbox", "radio", "switch", "button", "link"):
            raise Refused(f"{failed}: click it instead")
        limit = ACTION_SECONDS * 1000
        if await found.evaluate("e => e.tagName") == "SELECT":
            await self._choose(failed, found, text)
        else:
            await self._done(failed, found.fill(text, timeout=limit))
            if text and await found.evaluate(UNREAD):
                raise Refused(f"{failed}: {text!r:.100} has the wrong form (a date is YYYY-MM-DD, a time HH:MM)")
        if submit:
            await self._done(failed, found.press("Enter", timeout=limit, no_wait_after=True))

    async def _choose(self, failed: str, found: Locator, text: str) -> None:
        options = await found.evaluate("e => [...e.options].map(option => option.label.trim())")
        if text.strip() not in options:
            raise Refused(f"{failed}: it has no option {text!r:.100}")
        await self._done(failed, found.select_option(label=text.strip(), timeout=ACTION_SECONDS * 1000))

    async def _find(self, element: int) -> tuple[str, Locator]:
        """Role and place of a numbered element. Raises Refused when it is not there."""
        if element not in self._elements:
            raise Refused(f"there is no element {element} on this page (a new page has new numbers; read() shows them)")
        reference, role = self._elements[element]
        found = self.page.locator(f"aria-ref={reference}")
        if not await found.count():
            raise Refused(f"element {element} ({role}) is gone from the page: read() shows what is there now")
        return role, found

    async def _done(self, failed: str, doing: Awaitable[Any]) -> None:
        """Wait for an action on an element. Raises Refused with the reason in words."""
        try:
            await doing
        except Exception as error:
            said = str(error)
            reason = next((words for sign, words in REASONS if sign in said), "")
            await self._answers()  # a page that hangs takes no click either
            raise Refused(f"{failed}: {reason or 'it does not take that'}") from None

    async def _answers(self) -> None:
        """Raises what is wrong with a page that answers nothing any more, or is gone."""
        self._check_alive()
        await asyncio.wait_for(self.page.evaluate("1"), ANSWER_SECONDS)

    async def _back(self) -> None:
        session = await self.page.context.new_cdp_session(self.page)
        history = await session.send("Page.getNavigationHistory")
        await session.detach()
        at = history["currentIndex"]
        if at > 0 and history["entries"][at - 1]["url"].startswith("http"):
            with contextlib.suppress(Exception):  # a page that does not come in time is shown as far as it is there
                await self.page.go_back(wait_until="commit", timeout=OPEN_SECONDS * 1000)
        elif len(self._tabs.open) > 1:
            await self.page.close()
        else:
            raise Refused("there is no page before this one")

    async def _screenshot(self) -> dict[str, Any]:
        self._shots += 1
        path = Path("screenshots", f"{self._shots}.png")
        place = Path.home() / path
        place.parent.mkdir(exist_ok=True)
        data = await self.page.screenshot(path=place, timeout=SNAPSHOT_SECONDS * 1000, animations="disabled")
        size = f"{chromium.VIEWPORT['width']} x {chromium.VIEWPORT['height']}"
        digest = hashlib.sha256(data).hexdigest()
        return {"path": str(path), "sha256": digest, "bytes": len(data), "size": size, "url": self.page.url}

    async def _tree_of(self, part: int) -> dict[str, Any]:
        """The page as text, its `part`, and what is beside it; from now on its numbers are in force."""
        page = self.page
        snapshot = await page.aria_snapshot(mode="ai", timeout=SNAPSHOT_SECONDS * 1000)
        born, title = await page.evaluate("() => [String(performance.timeOrigin), document.title]")
        if len(snapshot) > MOST_CHARACTERS:
            begin = snapshot[:MOST_CHARACTERS]
            snapshot = begin.rpartition("\n")[0] or begin  # one line may be all there is
            self._tabs.notes.append("the page is too large: its end is left out")
        self._elements = {}

        def number(node: tree.Node) -> int:
            reference = node.attributes["ref"]
            key = (born, reference, node.role, node.name)
            if key not in self._numbers:
                self._numbers[key], self._next = self._next, self._next + 1
            self._elements[self._numbers[key]] = (reference, node.role)
            return self._numbers[key]

        shown = tree.parts(tree.render(tree.parse(snapshot), number), tree.PART)
        if not 1 <= part <= len(shown):
            raise Refused(f"this page has {len(shown)} part{'s' * (len(shown) > 1)}, no part {part}")
        return {
            "text": shown[part - 1],
            "part": part,
            "parts": len(shown),
            "url": page.url[:SHOWN],
            "title": title[:SHOWN],
        }


_web: Web | None = None
"""The kernel's one browser."""


async def act(order: str) -> None:
    """One call; what came of it is written to said.json.

    `order` is JSON: `do` a verb `with` its arguments; `site` and `start`; `calls` of this rollout with this one,
    `next` free number, `shots` so far.
    """
    global _web
    asked = json.loads(order)
    if _web is None:
        _web = Web(asked["site"], asked["start"])
    try:
        said = await _web.act(asked)
    except chromium.Missing as error:
        said = {"missing": str(error)}
    fresh = HERE / "said.json.new"
    fresh.write_text(json.dumps(said), "utf-8")
    os.replace(fresh, HERE / "said.json")
