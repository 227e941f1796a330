"""The browser of the web family in a real sandbox: what a policy is told of pages, and of all that goes wrong there."""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

import handlers
from handlers.tools import answer_own
from handlers.web import LIBRARY, Web
from pipeline.config import Config
from pipeline.errors import HandlerError, TaskError
from pipeline.interfaces import Context, ToolCall
from tests.integration.browser import require_browser
from tests.services import require
from workers.sandbox.host import Host

HEAD = "<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><body>"
PAGES = {
    "index.html": """<h1>Edges</h1><a href="/two.html">two</a> <a href="/two.html" target=_blank>new tab</a>
<button onclick="alert('careful')">Alert</button> <button onclick="document.title = confirm('sure?')">Confirm</button>
<button onclick="for (;;);">Hang</button> <button disabled>Off</button>
<button onclick="this.remove()">Vanish</button> <label>Word <input id=word></label>
<form action="/found.html"><label>Find <input type=search name=q></label></form>
<label>Day <input type=date></label> <label>Size <select><option>small<option>large</select></label>
<a href="/data.csv" download>data</a> <a href="http://elsewhere.test/">elsewhere</a> <a href="/none.html">broken</a>
<div style="position: relative">
<button>Covered</button><div style="position: absolute; inset: 0; background: white">cover</div></div>""",
    "two.html": "<h1>Second</h1><button onclick='window.close()'>Close</button>",
    "found.html": "<h1>Found</h1>",
    "long.html": "".join(f"<p>{number} {'word ' * 40}</p>" for number in range(100)) + "<button>Last</button>",
    "late.html": """<p id=p>soon</p>
<script>setTimeout(() => fetch('/two.html').then(() => p.textContent = 'now'), 30)</script>""",
    "line.html": "<p>" + "x" * 500_000,
    "data.csv": "a,b\n1,2\n",
}

SLOW = """
usual = Site.do_GET
def do_GET(self):
    import time
    time.sleep(60 if self.path.startswith("/slow") else 0)
    usual(self)
Site.do_GET = do_GET
if __name__ =="""


class Edges(Web):
    """A site of odd pages; some of them never answer. Limits are short."""

    def sandbox_for(self, task: Web.Task) -> dict[str, Any]:
        asked = super().sandbox_for(task)
        files = asked["files"]
        changes = {"OPEN_SECONDS = 15.0": "OPEN_SECONDS = 1.0", "ACTION_SECONDS = 5.0": "ACTION_SECONDS = 1.0",
                   "ANSWER_SECONDS = 2.0": "ANSWER_SECONDS = 0.5"}  # fmt: skip
        for old, new in changes.items():
            assert old.encode() in files[f"{LIBRARY}/browser.py"]
            files[f"{LIBRARY}/browser.py"] = files[f"{LIBRARY}/browser.py"].replace(old.encode(), new.encode())
        files[f"{LIBRARY}/server.py"] = files[f"{LIBRARY}/server.py"].replace(b"\nif __name__ ==", SLOW.encode())
        return asked


class Seat:
    """A policy's place before the browser."""

    def __init__(self, handler: Web, ctx: Context) -> None:
        self.handler, self.ctx = handler, ctx

    async def __call__(self, name: str, **arguments: Any) -> str:
        return await answer_own(getattr(self.handler, name), self.ctx, ToolCall("1", name, arguments))

    def number(self, text: str, what: str) -> int:
        """The number before `what` in an observation."""
        before = text[: text.index(what)]
        return int(before[before.rindex("[") + 1 : before.rindex("]")])


@contextlib.asynccontextmanager
async def seated(handler: Web, data: dict[str, Any], tmp_path: Path, **changes: Any) -> AsyncIterator[Seat]:
    """A sandbox of bubblewrap with the task's site, and the browser in it."""
    require("bwrap")
    host = await Host.open(Config().changed({"sandbox.driver": "bubblewrap", **changes}), "")
    try:
        task = handlers.check_task(handler, data)
        live = await host.stock.prepare(handler.sandbox_for(task), id="g.0", token="x", lane="")
        log = logging.LoggerAdapter(logging.getLogger("test"))
        ctx = Context(
            id="g.0", group="g", sample=0, lane="train", attempt=1, task=task, sandbox=live.session, log=log,
            state={"web": {"next": 1, "shots": 0, "calls": 0, "restarts": 0}, "visited": [], "screenshots": []},
            _artifacts=tmp_path / "artifacts",
        )  # fmt: skip
        yield Seat(handler, ctx)
    finally:
        await host.close()


@pytest.fixture
async def edges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Seat]:
    require_browser()
    folder = tmp_path / "sites" / "edges"
    folder.mkdir(parents=True)
    for name, text in PAGES.items():
        (folder / name).write_text((HEAD.format(title=name) if name.endswith("html") else "") + text)
    monkeypatch.setattr(Edges, "sites", tmp_path / "sites")
    async with seated(Edges(), {"site": "edges", "question": "?", "answer": "x"}, tmp_path) as seat:
        yield seat


async def test_whatever_a_page_does_is_told_and_ends_nothing(edges: Seat, tmp_path: Path) -> None:
    """One browser for all of it: a start costs a second."""
    home = await edges("open", url="http://edges.test/")
    assert home.startswith('index.html\nhttp://edges.test/\n\nheading 1 "Edges"\n[1] link "two" -> /two.html\n')

    def at(what: str) -> int:
        return edges.number(home, what)

    alert = await edges("click", element=at('button "Alert"'))
    assert alert.startswith("[the page showed a message (alert): 'careful']\n") and home in alert
    confirm = await edges("click", element=at('button "Confirm"'))
    assert "(confirm): 'sure?'; it was answered with OK]\ntrue\n" in confirm

    # what can't be done
    for call, sentence in (
        (("click", {"element": 99}), "Error: there is no element 99 on this page"),
        (("click", {"element": "x"}), "Error: nothing was run: `element` of click is 'x': input should be"),
        (("click", {"element": at('button "Off"')}), "was not clicked: it is disabled."),
        (("click", {"element": at('button "Covered"')}), "was not clicked: something else lies over it."),
        (("type", {"element": at('button "Off"'), "text": "x"}), "(button): click it instead."),
        (("type", {"element": at('"Day"'), "text": "tomorrow"}), "'tomorrow' has the wrong form (a date is"),
        (("type", {"element": at('"Size"'), "text": "huge"}), "it has no option 'huge'."),
        (("open", {"url": "file:///etc/passwd"}), "only http:// and https:// addresses are."),
        (("open", {"url": "view-source:http://edges.test/"}), "only http:// and https:// addresses are."),
        (("open", {"url": "http://["}), "'http://[' is no address."),
        (("open", {"url": ""}), "an empty address can't be opened."),
        (("read", {"part": 2}), "this page has 1 part, no part 2."),
        (("back", {}), "there is no page before this one."),
    ):  # fmt: skip
        said = await edges(call[0], **call[1])
        assert said.startswith("Error: ") and sentence in said, (call, said)

    # what can be
    assert 'combobox "Size": large' in await edges("type", element=at('"Size"'), text="large")
    assert 'textbox "Word": Zoë ?' in await edges("type", element=at('"Word"'), text="Zoë \ud800")
    found = await edges("type", element=at('"Find"'), text="lamp", submit=True)
    assert found.startswith("found.html\nhttp://edges.test/found.html?q=lamp\n")
    stale = await edges("click", element=at('link "two"'))
    assert stale.startswith("Error: there is no element 1 on this page (a new page has new numbers"), at('link "two"')
    home = await edges("back")
    assert at('link "two"') == 16, "numbers are never used twice"
    assert (await edges("click", element=at('button "Vanish"'))).count("Vanish") == 0
    assert "there is no element" in await edges("click", element=at('button "Vanish"'))

    tab = await edges("click", element=at('link "new tab"'))
    assert tab.startswith(
        "[a new tab was opened, and you see it: back() closes it and shows the one before]\ntwo.html\n"
    )
    assert (await edges("back")).startswith("[the tab was closed, and you see the one before]\nindex.html\n")
    home = await edges("open", url="/")
    tab = await edges("click", element=at('link "new tab"'))
    shut = await edges("click", element=edges.number(tab, 'button "Close"'))
    assert shut.startswith("[the tab was closed, and you see the one before]\nindex.html\n")

    saved = await edges("click", element=at('link "data"'))
    assert saved.startswith("[the file downloads/data.csv (8 bytes) was downloaded; it begins: 'a,b\\n1,2\\n']\n")
    broken = await edges("click", element=at('link "broken"'))
    assert broken.startswith("[the server answered http://edges.test/none.html with 404 File not found]\n")
    gone = await edges("open", url="elsewhere.test/page")
    assert gone.startswith("Error: http://elsewhere.test/page can't be opened: ERR_NAME_NOT_RESOLVED (this browser")
    assert (await edges("open", url="http://a b/")).startswith("Error: http://a b/ can't be opened: ")
    assert "\ntext: now" in await edges("open", url="late.html"), "what a page fetches by itself is waited for"

    first = await edges("open", url="/long.html")
    assert first.endswith("[part 1 of 4: read(part=2) shows the next]") and len(first) < 6200
    line = await edges("open", url="/line.html")
    assert (
        line.startswith("[the page is too large: its end is left out]\n") and "text: xxx" in line and len(line) < 6300
    )
    await edges("open", url="/long.html")
    last = await edges("read", part=4)
    assert last.endswith('button "Last"') and "[part" not in last

    shot = await edges("screenshot")
    assert shot.startswith("[screenshot saved as screenshots/1.png (1280 x 720)]\n")
    (listed,) = edges.ctx.state["screenshots"]
    kept = (tmp_path / "artifacts" / "screenshots" / "1.png").read_bytes()
    assert kept.startswith(b"\x89PNG") and listed["sha256"] == hashlib.sha256(kept).hexdigest()
    assert listed["kept"] == str(tmp_path / "artifacts" / "screenshots" / "1.png")


async def test_a_browser_that_hangs_or_is_lost_is_replaced(edges: Seat) -> None:
    home = await edges("open", url="http://edges.test/")
    slow = await edges("open", url="/slow")
    assert slow == "Error: http://edges.test/slow did not answer within 1 s."
    assert (await edges("read")).startswith("index.html\n"), "the page before is still there"

    hung = await edges("click", element=edges.number(home, 'button "Hang"'))
    assert hung.startswith(
        "[the browser did not answer any more (the page hangs): a new one was started, with no cookies"
    )
    assert "\nindex.html\nhttp://edges.test/\n" in hung
    assert edges.number(hung, 'button "Hang"') > edges.number(home, 'button "Hang"')

    session = edges.ctx.sandbox
    assert session is not None
    await session.bash("pkill -9 -f remote-debugging-pipe")
    lost = await edges("click", element=edges.number(hung, 'link "two"'))
    assert lost.startswith("[the browser crashed: a new one was started") and "\nindex.html\n" in lost

    await session.bash("pkill -9 -f ipykernel")
    again = await edges("read")
    assert again.startswith("[the browser was lost: a new one was started") and "\nindex.html\n" in again
    assert edges.number(again, 'link "two"') > edges.number(lost, 'link "two"')
    assert edges.ctx.state["web"]["restarts"] == 3
    count = await session.bash("pgrep -c -f -- --remote-debugging-pipe.--no-startup-window")
    assert count.text == "1", "what was replaced is gone"


async def test_a_sandbox_without_a_browser_is_said_at_once(tmp_path: Path) -> None:
    class Bare(Web):
        def sandbox_for(self, task: Web.Task) -> dict[str, Any]:
            asked = super().sandbox_for(task)
            files = asked["files"]
            text = files[f"{LIBRARY}/chromium.py"].replace(b"PROGRAMS = (", b'PROGRAMS = ("no-such-browser",) or (')
            return {**asked, "files": {**files, f"{LIBRARY}/chromium.py": text}}

    async with seated(Bare(), {"site": "museum", "question": "?", "answer": "x"}, tmp_path) as seat:
        with pytest.raises(
            HandlerError, match=r"no Chromium \(looked for no-such-browser\): docs/swap-a-handler.md says"
        ):
            await seat("read")


def test_a_site_that_is_not_there_is_the_tasks_fault() -> None:
    task = Web.Task(site="nowhere", question="?", answer="x")
    with pytest.raises(TaskError, match="field 'site' is 'nowhere': .*sites has booking, museum, shop"):
        Web().sandbox_for(task)
