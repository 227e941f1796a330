"""What a sandbox is on its own machine: folders on disk and a place to start processes in. Drivers make boxes.

A driver is one way to make them: `local` (isolates nothing), `bubblewrap` (no image), `apptainer` (rootless images).
The tools (bash, IPython, files) know only this page, so each works in every kind of box.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, Literal, Protocol

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pipeline.config_sources import is_wrong, unknown_key
from pipeline.errors import HandlerError
from workers.sandbox.processes import Process


class Allow(BaseModel):
    """Network through a proxy that lets these hosts through: `example.org`, `*.example.org`, `example.org:8443`."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    allow: list[str]


NETWORK_FORMS = '"none", "host" or {"allow": [hosts]}, as in {"allow": ["example.org", "*.example.org:8443"]}'


class Spec(BaseModel):
    """What a handler's `sandbox` map may ask for. A limit can lower the site's (`sandbox.*`), never raise it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    image: str = ""
    """Name or path of the image; empty = `sandbox.image`. Drivers without images refuse one."""
    files: dict[str, str | bytes] = Field(default_factory=dict)
    """Relative path inside the home -> content."""
    env: dict[str, str] = Field(default_factory=dict)
    workdir: str = ""
    """Where the shell starts, as seen inside; empty = the home."""
    network: Literal["none", "host"] | Allow = "none"
    memory_mb: Annotated[int, Field(gt=0)] | None = None
    processes: Annotated[int, Field(gt=0)] | None = None
    disk_mb: Annotated[int, Field(gt=0)] | None = None
    cpus: Annotated[float, Field(gt=0)] | None = None

    @field_validator("files")
    @classmethod
    def _inside(cls, files: dict[str, str | bytes]) -> dict[str, str | bytes]:
        for name in files:
            path = PurePosixPath(name)
            if path.is_absolute() or ".." in path.parts or not path.parts or "\0" in name:
                raise ValueError(f"the file {name!r} must be a relative path inside the home")
        return files

    @classmethod
    def of(cls, asked: Mapping[str, Any]) -> Spec:
        """A handler's map, checked. Raises HandlerError: for each mistake the key, the value and what is wanted."""
        try:
            return cls.model_validate(dict(asked))
        except ValidationError as error:
            said = [cls._sentence(item, asked) for item in error.errors()]
            sentences = "; ".join(dict.fromkeys(said))  # a union tells one mistake once for each of its forms
            raise HandlerError(f"the handler's `sandbox` can't be met: {sentences}") from None

    @classmethod
    def _sentence(cls, item: Any, asked: Mapping[str, Any]) -> str:
        place = ".".join(str(part) for part in item["loc"] if part != "[key]")
        if place.startswith("network."):
            return f"network: {is_wrong({**item, 'input': asked['network']}, NETWORK_FORMS)}"
        if item["type"] == "extra_forbidden":
            return f"{place}: {unknown_key(place, list(cls.model_fields))}"
        return f"{place}: {item['ctx']['error'] if item['type'] == 'value_error' else is_wrong(item)}"


class Box(Protocol):
    """A live sandbox of this machine."""

    name: str
    """Rollout id and INIT's token: no other attempt's."""
    folder: Path
    """Private folder on this machine (0700, local disk); `discard` removes it."""
    home: str
    """The home folder as seen inside."""
    workdir: str
    """Where a shell starts, as seen inside."""
    sockets: Path
    """Folder on this machine for Unix sockets (a short path), and the same folder as seen inside."""
    sockets_inside: str
    pid: int | None
    """The keeper's pid on this machine: first process of the sandbox's own pid namespace; None where it has none."""
    notes: list[str]
    """Sentences for the policy (a watchdog killed something, the sandbox was restarted); whoever shows them clears."""

    def command(self, argv: Sequence[str]) -> list[str]:
        """The command line of this machine that runs `argv` inside, in the folder that its process starts in.

        What it starts is not a daemon: it ends when the command ends and has its exit code. Start it with
        `environment()` and nothing else, and with cwd="/".
        """
        ...

    def environment(self) -> dict[str, str]:
        """The whole environment of a process inside. Nothing of the worker's."""
        ...

    def processes(self) -> list[Process]:
        """All living processes inside, the keeper left out; pids are this machine's."""
        ...

    def alive(self) -> bool:
        """False once the keeper has died: then nothing runs inside any more."""
        ...

    async def kill(self) -> None:
        """End everything inside at once; the files stay. Safe twice."""
        ...

    async def restart(self) -> None:
        """Start the keeper again on the same files. Raises SandboxError."""
        ...

    async def discard(self) -> None:
        """End everything inside and remove the folder. Safe twice. Raises SandboxError for what can't be removed."""
        ...


class Driver(Protocol):
    """One way to make boxes under one root folder, which is one host process's alone."""

    name: str

    async def create(self, spec: Spec, name: str) -> Box:
        """Make the box called `name`; what an earlier call of that name left is removed first.

        Raises SandboxError (the machine could not) and HandlerError (the spec can't be met by this driver).
        """
        ...
