"""Tasks in a web browser: a site is served inside the sandbox, and the policy clicks and types its way through it.

The browser is a headless Chromium, driven by Playwright from the rollout's IPython kernel (the package `inside` runs
there). The policy reads pages as accessibility trees in text. Nothing needs a network.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator

from handlers.tools import tool
from handlers.turns import Turns
from handlers.web.checks import Form, grade
from pipeline.errors import HandlerError, SandboxGone, TaskError
from pipeline.interfaces import Context, Message, Reward

PACKAGE = Path(__file__).parent
FOLDER = ".web"
"""Inside the sandbox's home; the browser shows nothing of it but `site`."""

LIBRARY = f"{FOLDER}/lib/handlers/web/inside"
"""Where our own modules lie there."""

MOST_VISITED = 100
"""Addresses that are kept as evidence."""

CALL = """import os, sys
if os.path.expanduser("~/{folder}/lib") not in sys.path:
    sys.path.insert(0, os.path.expanduser("~/{folder}/lib"))
from handlers.web.inside import browser as _browser
await _browser.act({order!r})"""

PROMPT = """{question}

You have a web browser. Begin with open("{address}"). Each tool shows the page as text, one element a line; what can \
be clicked or typed into has a number, as in [12] button "Add". Numbers are good until a new page comes. {ending}"""

ASKED = "At the end put the answer alone between <answer> and </answer>."
UNASKED = "When all is done, say <answer>done</answer>."

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]*$", max_length=60)]


class Step(BaseModel):
    """One call of the right way through a task: a tool's name and its arguments."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tool: str
    arguments: dict[str, Any] = Field(default_factory=dict)


class Web(Turns):
    """Find something out on a site, or do something there.

    A site is a folder of pages in `sites` (a subclass names another one); NAME is served as http://NAME.test/. What a
    form or a script sends to /send/FORM is recorded where the policy can't reach. 1.0 where the answer is right and
    the site was sent what `check` says, else 0.0; `parts` has both. The sandbox needs Chromium and Playwright: see
    docs/swap-a-handler.md, "A browser in the sandbox".
    """

    sites: ClassVar[Path] = PACKAGE / "sites"
    """Folder with one folder of pages for each site."""

    tools: ClassVar[tuple[str, ...]] = ("open", "click", "type", "read", "back", "screenshot")
    sandbox: ClassVar[dict[str, Any]] = {}

    class Task(BaseModel):
        """`start` is a path on the site. `answer`: the right one, or several that are; `check`: what must have been
        sent. One of the two at least. `gold`: calls of the right way, for the scripted policy alone."""

        model_config = ConfigDict(frozen=True, extra="ignore")

        site: Name
        question: Annotated[str, StringConstraints(strip_whitespace=True, min_length=1)]
        start: Annotated[str, StringConstraints(pattern=r"^/")] = "/"
        answer: str | tuple[str, ...] = ()
        check: Form | None = None
        gold: tuple[Step, ...] = ()

        @model_validator(mode="after")
        def _is_scored(self) -> Self:
            if not self.answers and self.check is None:
                raise ValueError("it has neither `answer` nor `check`: nothing says what is right")
            return self

        @property
        def answers(self) -> tuple[str, ...]:
            """All right answers."""
            return tuple(filter(None, (self.answer,) if isinstance(self.answer, str) else self.answer))

        @property
        def address(self) -> str:
            """Where the policy begins."""
            return f"http://{self.site}.test{self.start}"

    def sandbox_for(self, task: Web.Task) -> dict[str, Any]:
        """The pages and what runs inside, as files. Raises TaskError for a site that is not there."""
        folder = self.sites / task.site
        pages = {str(path.relative_to(folder)): path for path in sorted(folder.rglob("*")) if path.is_file()}
        if not pages:
            known = sorted(path.name for path in self.sites.iterdir() if path.is_dir()) if self.sites.is_dir() else []
            raise TaskError(f"field 'site' is {task.site!r}: {self.sites} has {', '.join(known) or 'no sites'}")
        files = {f"{LIBRARY}/{path.name}": path.read_bytes() for path in (PACKAGE / "inside").glob("*.py")}
        files |= {f"{FOLDER}/lib/handlers/{name}": b"" for name in ("__init__.py", "web/__init__.py")}  # not the line's
        files |= {f"{FOLDER}/site/{name}": path.read_bytes() for name, path in pages.items()}
        return {**self.sandbox, "files": {**self.sandbox.get("files", {}), **files}}

    def prompt(self, task: Web.Task) -> str:
        ending = ASKED if task.answers else UNASKED
        return PROMPT.format(question=task.question, address=task.address, ending=ending)

    async def run(self, ctx: Context) -> None:
        ctx.state["web"] = {"next": 1, "shots": 0, "calls": 0, "restarts": 0}
        ctx.state["visited"], ctx.state["screenshots"] = [], []
        await self._call(ctx, "look")  # a sandbox without a browser is found out before a token is sampled
        await super().run(ctx)
        assert ctx.sandbox is not None
        ctx.state["sent"] = json.loads(await ctx.sandbox.read(f"{FOLDER}/sent.json"))

    async def eval(self, ctx: Context) -> Reward:
        return grade(ctx.task.answers, ctx.task.check, ctx.answer, ctx.state)

    def gold(self, task: Web.Task) -> list[Message] | None:
        if not task.gold:
            return None
        calls = [{"name": step.tool, "arguments": step.arguments} for step in task.gold]
        last = task.answers[0] if task.answers else "done"
        return [
            *(
                Message(role="assistant", content="", tool_calls=[{"type": "function", "function": call}])
                for call in calls
            ),
            Message(role="assistant", content=f"<answer>{last}</answer>"),
        ]

    @tool("Open an address.", url="A whole address, or a path on this site.")
    async def open(self, ctx: Context, url: str) -> str:
        return await self._call(ctx, "open", url=url)

    @tool("Click an element: a link, a button, a box.", element="Its number.")
    async def click(self, ctx: Context, element: int) -> str:
        return await self._call(ctx, "click", element=element)

    @tool(
        "Write into a field, in the place of what is in it. Of a combobox it chooses the option of that name.",
        element="The field's number.",
        text="What it shall hold.",
        submit="Whether to press Enter after it.",
    )
    async def type(self, ctx: Context, element: int, text: str, submit: bool = False) -> str:
        return await self._call(ctx, "type", element=element, text=text, submit=submit)

    @tool("Show the page as it is now, without doing anything. A long page has several parts.", part="Which, from 1.")
    async def read(self, ctx: Context, part: int = 1) -> str:
        return await self._call(ctx, "look", part=part)

    @tool("Go back to the page before; in a new tab that has none: close the tab.")
    async def back(self, ctx: Context) -> str:
        return await self._call(ctx, "back")

    @tool("Save a picture of what is visible now.")
    async def screenshot(self, ctx: Context) -> str:
        return await self._call(ctx, "screenshot")

    async def _call(self, ctx: Context, do: str, **given: Any) -> str:
        """Let the browser do one thing; its observation. Raises ValueError with what the policy is told is wrong."""
        kept = ctx.state["web"]
        kept["calls"] += 1
        said = await self._said(ctx, do, given) or await self._said(ctx, "look", {})
        if said is None:
            raise SandboxGone("the browser's kernel was lost twice: the rollout needs a new sandbox")
        if "missing" in said:
            raise HandlerError(f"{said['missing']}: docs/swap-a-handler.md says how a sandbox gets a browser")
        kept["next"] = said["next"]
        if "restarted" in said:
            kept["restarts"] += 1
            ctx.log.info("a new browser was started: %s", said["restarted"])
        new = [url for url in said["visited"] if url.startswith("http")]
        ctx.state["visited"] = [*ctx.state["visited"], *new][:MOST_VISITED]
        if "shot" in said:
            said["notes"].append(await self._keep(ctx, said["shot"]))
        notes = "".join(f"[{note}]\n" for note in said["notes"])
        if "refused" in said:
            raise ValueError(f"{said['refused']}{' ' if notes else ''}{notes.strip()}")
        return notes + observation(said)

    async def _said(self, ctx: Context, do: str, given: dict[str, Any]) -> dict[str, Any] | None:
        """What the browser's side wrote; None when its kernel had to be ended: the next call has a new one."""
        assert ctx.sandbox is not None
        kept = ctx.state["web"]
        asked = {"do": do, "with": given, "site": f"{ctx.task.site}.test", "start": ctx.task.address}
        order = json.dumps({**asked, "calls": kept["calls"], "next": kept["next"], "shots": kept["shots"]})
        cell = await ctx.sandbox.ipython(CALL.format(folder=FOLDER, order=order))
        if cell.timed_out or cell.error == "DeadKernelError":
            return None
        if cell.error == "NoKernel":
            raise HandlerError(f"{cell.text.strip('[]')}: docs/swap-a-handler.md says how a sandbox gets a browser")
        if cell.error:
            raise SandboxGone(f"the browser can't be driven in this sandbox: {cell.text.strip()[-600:]}")
        found: dict[str, Any] = json.loads(await ctx.sandbox.read(f"{FOLDER}/said.json"))
        return found

    async def _keep(self, ctx: Context, shot: dict[str, Any]) -> str:
        """List a screenshot, and keep its file where artifacts are kept; the policy's note about it."""
        assert ctx.sandbox is not None
        ctx.state["web"]["shots"] += 1
        kept = ctx.keep(shot["path"], await ctx.sandbox.read(shot["path"]))
        ctx.state["screenshots"].append({**shot, "kept": kept})
        return f"screenshot saved as {shot['path']} ({shot['size']})"


def observation(said: dict[str, Any]) -> str:
    """A page as the policy reads it: title, address, its elements."""
    head = [line for line in (re.sub(r"\s+", " ", said["title"]).strip(), said["url"]) if line]
    more = said["part"] < said["parts"] if "part" in said else False
    tail = [f"[part {said['part']} of {said['parts']}: read(part={said['part'] + 1}) shows the next]"] if more else []
    return "\n".join([*head, "", said["text"] or "(the page is empty)", *tail])
