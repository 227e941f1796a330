"""What a handler sees and what it may be: the agent handler, its context, the sandbox and the policy."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypedDict, runtime_checkable

from pydantic import BaseModel

from pipeline.builder import TrajectoryBuilder
from pipeline.errors import PolicyError, SandboxError


class Message(TypedDict, total=False):
    """A chat message as the renderers take it (OpenAI's field names)."""

    role: str
    content: str
    tool_calls: list[dict[str, Any]]
    tool_call_id: str
    name: str
    reasoning_content: str


class Output(NamedTuple):
    """What a command printed (stdout and stderr in order) and how it ended; `exit_code` is None after a time-out."""

    text: str
    exit_code: int | None
    timed_out: bool = False


class Cell(NamedTuple):
    """What an IPython cell printed and returned (text, ANSI colours removed), and how it ended.

    `error`: the exception's name, "TimeoutError" after a time-out, "" if it ended well. `images`: paths inside the
    sandbox of the pictures that it showed.
    """

    text: str
    error: str = ""
    images: tuple[str, ...] = ()
    timed_out: bool = False


class Sandbox(Protocol):
    """An open sandbox: one attempt uses it at a time.

    Each verb raises SandboxError (retryable) when the sandbox itself fails, and SandboxGone when it does not exist any
    more. Paths are as seen inside; a relative one starts at the home.
    """

    async def bash(self, command: str, timeout: float | None = None) -> Output:
        """Run a command in the persistent shell. `timeout` (s) can shorten the site's limit, not lengthen it."""
        ...

    async def ipython(self, code: str, timeout: float | None = None) -> Cell:
        """Run a cell in the rollout's persistent IPython kernel."""
        ...

    async def read(self, path: str, start: int = 0, size: int | None = None) -> bytes:
        """Bytes of a file from `start`, at most `size`. Raises OSError (with its errno), ValueError above the limit."""
        ...

    async def write(self, path: str, data: bytes) -> None:
        """Write a file whole; missing folders are made. Raises OSError, ValueError above the size limit."""
        ...

    async def edit(self, path: str, old: str, new: str) -> None:
        """Replace `old`, which must stand exactly once in the file. Raises OSError, ValueError with the count."""
        ...

    async def upload(self, path: str, tar: bytes) -> None:
        """Unpack a tar archive into the folder `path`. Raises OSError, ValueError."""
        ...

    async def download(self, path: str) -> bytes:
        """A file or a folder as a tar archive. Raises OSError, ValueError above the size limit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """One model call's result. `ids` and `logprobs` have one entry per sampled token.

    `versions`: (version, start, end) over `ids`, gapless. `finish_reason`: stop, length or abort. `prompt_ids`: the
    prompt as the server read it, where it rendered it itself and the ids are not those that it was asked with; what
    was read or sampled before is the same. `endpoint`: "chat" of such a server, "" of those that take ids.
    """

    ids: Sequence[int]
    logprobs: Sequence[float]
    versions: list[tuple[int, int, int]]
    finish_reason: str
    sampling: dict[str, Any] = field(default_factory=dict)
    started: float = 0.0
    seconds: float = 0.0
    prompt_ids: Sequence[int] | None = None
    endpoint: str = ""


class Parsed(NamedTuple):
    """Sampled tokens read as a message: text, reasoning, and calls as (id, name, arguments) or an error's sentence."""

    message: Message
    calls: list[ToolCall]


class ToolCall(NamedTuple):
    """A tool call out of sampled tokens. `arguments` is None where they did not parse; `error` says why."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    error: str | None = None


@runtime_checkable
class Policy(Protocol):
    """The model that plays, token in, token out."""

    context: int
    """Tokens of prompt and completion together that the server takes."""

    async def ready(self) -> None:
        """Return when `context` is known and the other methods can be called."""
        ...

    async def generate(self, prompt_ids: Sequence[int], sampling: dict[str, Any]) -> Completion:
        """Sample one action. Raises PolicyError (retryable) or TaskError (a request that can never work)."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[dict[str, Any]] = ()) -> list[int]:
        """Ids of a conversation that ends where the policy speaks."""
        ...

    def parse(self, ids: Sequence[int], prompt_ids: Sequence[int], tools: Sequence[dict[str, Any]] = ()) -> Parsed:
        """Read sampled ids."""
        ...

    def bridge(
        self,
        prompt_ids: Sequence[int],
        completion_ids: Sequence[int],
        new: Sequence[Message],
        tools: Sequence[dict[str, Any]] = (),
        before: Sequence[Message] = (),
    ) -> list[int] | None:
        """Ids of prompt + completion + `new` messages up to where the policy speaks; None: render anew.

        `before`, if given, are the messages of prompt and completion: with them more formats can go on.
        """
        ...

    def text(self, ids: Sequence[int]) -> str:
        """Decoded text, control tokens included: for people, never to be encoded again."""
        ...


EVAL_SANDBOXES = ("none", "same", "fresh", "only")


@dataclass(kw_only=True)
class Context:
    """What an attempt gives a handler.

    `task` is the handler's `Task` model (or the plain dict). `state` is the handler's own small map, handed from stage
    to stage (msgpack types only). `deadline` is the stage's limit in seconds of work. `trajectory` grows
    in `run` and is complete in `eval`. `sandbox` is None unless the handler asked for one.
    """

    id: str
    group: str
    sample: int
    lane: str
    attempt: int
    task: Any
    log: logging.LoggerAdapter[logging.Logger]
    sampling: dict[str, Any] = field(default_factory=dict)
    limits: dict[str, float] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)
    trajectory: TrajectoryBuilder = field(default_factory=TrajectoryBuilder)
    sandbox: Sandbox | None = None
    deadline: float | None = None
    max_turns: int = 100
    _policy: Policy | None = None
    _policies: Callable[[str], Policy] | None = None
    _compute: Callable[..., Awaitable[Any]] | None = None
    _artifacts: Path | None = None

    @property
    def policy(self) -> Policy:
        """The policy of this attempt. Raises PolicyError (tried again) where this call of the handler has none."""
        if self._policy is None:
            raise PolicyError(
                "there is no policy here: only `async def` methods have one, and without a Redis only where policy.url "
                "is set"
            )
        return self._policy

    def policy_of(self, name: str) -> Policy:
        """The policy of another name (a judge): of the section `policies`, or "policy", the one that is trained.

        Its tokens are not in the trajectory unless you add them. Call its `ready` first. A RUN attempt that is gone on
        with asks it anew: what it says then must not lead to other actions, else set `resumable = False`. Raises
        ConfigError for a name that is none, PolicyError (tried again) where this call of the handler has no policies.
        """
        if self._policies is None:
            raise PolicyError(f"there is no policy {name!r} here: only `async def` methods have one")
        return self._policies(name)

    async def compute(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """Call a plain module-level function in a child process; arguments and result are msgpack types.

        For whatever computes in an `async def` method (a parser, a comparison): the event loop stays free, and a call
        that is over `timeout` (s, from when its process has begun), or whose attempt ends, is killed. Raises
        TimeoutError, and TypeError for what can't be sent; what the function raised comes back as the error that it
        would be in this stage. In `rollout try` it is called right here, without a limit.
        """
        if self._compute is None:
            return function(*args)
        return await self._compute(function, args, timeout)

    def keep(self, name: str, data: bytes) -> str:
        """Write a file that belongs to this rollout (a whole log, a screenshot) to `artifacts.folder`; its path.

        "" where no folder is set: nothing is kept then. `name` may have folders in it. Raises SandboxError (tried
        again) when it can't be written.
        """
        if self._artifacts is None:
            return ""
        relative = PurePosixPath(name)
        if relative.is_absolute() or ".." in relative.parts or not relative.parts:
            raise ValueError(f"the artifact {name!r} must have a relative path")
        place = self._artifacts / relative
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            fresh = place.with_name(f".{place.name}.{os.getpid()}")
            fresh.write_bytes(data)
            fresh.replace(place)
        except OSError as error:
            raise SandboxError(f"the artifact {place} can't be written: {error} (artifacts.folder)") from error
        return str(place)

    @property
    def answer(self) -> str:
        """Text of the last assistant message, as `run` left it in `state["answer"]`; empty if there was none."""
        return str(self.state.get("answer", ""))


@dataclass(frozen=True, kw_only=True)
class Reward:
    """A score with its named parts and the evidence for it (both kept with the trajectory)."""

    value: float
    parts: dict[str, float] = field(default_factory=dict)
    evidence: dict[str, Any] = field(default_factory=dict)


class AgentHandler:
    """A task family: three methods named like the stages.

    `async def` methods run in the worker's event loop; plain `def` methods run in a child process that is killed at the
    limit. A handler raises plain Python errors: in `init` and `run` they end the rollout as `handler`, in `eval` as
    `grader` (tried again). `TaskError` says that the task itself is wrong.
    """

    Task: ClassVar[type[BaseModel] | None] = None
    """Pydantic model of the task's data; None leaves it a dict."""

    sandbox: ClassVar[dict[str, Any] | None] = None
    """What the rollout needs to act in; None takes no sandbox, `{}` the driver's default one."""

    preload: ClassVar[tuple[str, ...]] = ()
    """Modules that the plain `def` methods need: imported once a worker instead of once a call."""

    eval_sandbox: ClassVar[Literal["none", "same", "fresh", "only"]] = "none"
    """What EVAL needs: nothing (RUN's commit frees the sandbox), the same one, or a new one made from `sandbox`. With
    "only" RUN has none, and the new one of EVAL is all there is."""

    resumable: ClassVar[bool] = True
    """A RUN attempt that was lost is gone on with by replay: its model calls and sandbox actions are answered from the
    journal as long as the handler asks the same ones. False for a handler with state elsewhere: it starts over."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if cls.eval_sandbox not in EVAL_SANDBOXES:
            raise TypeError(f"{cls.__name__}.eval_sandbox is {cls.eval_sandbox!r}: one of {', '.join(EVAL_SANDBOXES)}")
        if cls.sandbox is not None and not isinstance(cls.sandbox, dict):
            raise TypeError(
                f"{cls.__name__}.sandbox is {cls.sandbox!r}: None for no sandbox, or a map ({{}} for a plain one)"
            )
        if cls.sandbox is None and cls.eval_sandbox != "none":
            raise TypeError(
                f"{cls.__name__}.eval_sandbox is {cls.eval_sandbox!r}, but it has no `sandbox`: set `sandbox = {{}}`"
            )

    def sandbox_for(self, task: Any) -> dict[str, Any]:
        """The sandbox of this task, where tasks differ (an image of its own); usually `sandbox` as it stands.

        Asked in INIT, and again in EVAL for a fresh one: the same task must give the same map. Raises TaskError.
        """
        return dict(self.sandbox or {})

    @property
    def acts(self) -> bool:
        """Whether RUN has a sandbox to act in."""
        return self.sandbox is not None and self.eval_sandbox != "only"

    async def init(self, ctx: Context) -> None:
        """Make the sandbox ready for the policy. Must be repeatable."""

    async def run(self, ctx: Context) -> None:
        """Let the policy act; grow `ctx.trajectory`. `handlers.turns.Turns` has the usual loop."""
        raise TypeError(f"{type(self).__name__} defines no `run`: derive from handlers.turns:Turns or write one")

    async def eval(self, ctx: Context) -> Reward | float:
        """Score the rollout."""
        raise TypeError(f"{type(self).__name__} defines no `eval`: it must return a number or a Reward")

    def gold(self, task: Any) -> str | list[Message] | None:
        """The right answer, or the assistant's messages that lead to it; None if the family has none.

        `rollout task validate` and the scripted policy server ask for it. A text of one line may be said within a
        sentence; messages are said as they are.
        """
        return None
