"""Every setting of the line: one file, read once, strictly; the defaults live in these models.

Order of precedence: the built-in defaults, then the file, then `ROLLOUT_SECTION__KEY` variables, then `--set a.b=c`.
`config.yaml` at the root shows every setting with its default, its unit and why; a test holds the two together.
Nothing is read at import. Reading and merging live in `pipeline/config_sources.py`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, StringConstraints, ValidationError

from pipeline import config_sources as sources
from pipeline.config_slurm import SlurmConfig
from pipeline.errors import ConfigError

CONFIG_VARIABLE = "ROLLOUT_CONFIG"
TRAINED = "policy"
"""The name of the policy that is trained; others have a name of the section `policies`."""

# Variables that begin with ROLLOUT_ and are no setting. Anything else unknown is an error.
SPECIAL_VARIABLES = frozenset({CONFIG_VARIABLE})

Seconds = Annotated[float, Field(ge=0)]
Period = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=0)]
AtLeastOne = Annotated[int, Field(ge=1)]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


class Section(BaseModel):
    """Frozen, strict (a text is no number, 1 is no bool), and closed: an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class LineConfig(Section):
    """The line itself: its name, its lanes, its length."""

    name: Name = "rollout"
    lanes: dict[Name, AtLeastOne] = Field(default_factory=lambda: {"train": 4, "eval": 1}, min_length=1)
    max_length: Count = 100_000


class RedisConfig(Section):
    """Where Redis is; without a URL a private server is found or started."""

    url: str = ""
    password_file: str = ""
    connect_timeout: Period = 5.0
    socket_timeout: Period = 5.0
    maxmemory_fraction: Share = 0.25
    data: str = ""
    address_file: str = ""


class NetworkConfig(Section):
    """By which of a machine's addresses the other ones reach it."""

    interface: str = ""


class LeaseConfig(Section):
    """How long work belongs to one worker without a sign of life."""

    seconds: Period = 30.0
    beat: Period = 10.0
    tick: Period = 1.0
    done_seconds: Period = 60.0


class RetryConfig(Section):
    """How often, and how soon, a rollout is tried again."""

    attempts: AtLeastOne = 3
    losses: AtLeastOne = 10
    backoff: Seconds = 1.0
    backoff_max: Seconds = 60.0


class LimitsConfig(Section):
    """Time limits, all enforced from outside the handler."""

    init: Period = 600.0
    run: Period = 3600.0
    eval: Period = 1800.0
    total: Seconds = 0.0
    queue_ttl: Seconds = 0.0
    grace: Seconds = 30.0
    outage: Period = 900.0
    policy_wait: Seconds = 900.0
    loop_stall: Period = 30.0
    loop_dead: Period = 120.0
    swallow: Period = 1.0
    eval_timeout: Literal["mask", "zero"] = "mask"


class MemoryConfig(Section):
    """Back-pressure by the memory of Redis."""

    high: Share = 0.75


class KeepConfig(Section):
    """How long what is over is still kept."""

    dead_days: Period = 7.0
    gone_hours: Period = 24.0


class ArtifactsConfig(Section):
    """Large files of a rollout that are kept beside the line."""

    folder: str = ""


class StageWorkersConfig(Section):
    """Workers of one stage."""

    slots: AtLeastOne


class WorkersConfig(Section):
    """What one worker process does at once."""

    init: StageWorkersConfig = StageWorkersConfig(slots=8)
    run: StageWorkersConfig = StageWorkersConfig(slots=64)
    eval: StageWorkersConfig = StageWorkersConfig(slots=4)
    claim_batch: AtLeastOne = 32
    metrics_port: Annotated[int, Field(ge=0, le=65535)] = 0


class HandlersConfig(Section):
    """Where a user's handlers are looked for."""

    path: str = ""
    load: list[str] = Field(default_factory=list)


class PolicyConfig(Section):
    """The model that is trained, and how it is sampled unless the task says otherwise."""

    url: str = ""
    model: str = "policy"
    tokenizer: str = ""
    renderer: str = "auto"
    max_tokens: AtLeastOne = 1024
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Share = 1.0
    context: AtLeastOne = 32_768
    request_timeout: Period = 3600.0
    max_turns: AtLeastOne = 100
    max_staleness: Annotated[int, Field(ge=-1)] = -1
    stale: Literal["mark", "drop"] = "mark"
    update_timeout: Period = 600.0
    probe_every: Period = 10.0
    probe_timeout: Period = 10.0
    backend_lease: Period = 30.0
    vllm: str = "vllm"


class OtherPolicyConfig(Section):
    """A policy of another name, beside the one that is trained: a judge. The rest of its settings are `policy`'s."""

    url: str = ""
    model: str = ""
    tokenizer: str = ""
    renderer: str = "auto"
    max_tokens: AtLeastOne = 1024
    temperature: Annotated[float, Field(ge=0)] = 0.0
    top_p: Share = 1.0
    context: AtLeastOne = 32_768
    request_timeout: Period = 3600.0


class SandboxConfig(Section):
    """Where the agent's commands run."""

    driver: Literal["local", "bubblewrap", "apptainer"] = "local"
    image: str = "host"
    root: str = ""
    max_live: Count = 0
    reserve: Annotated[float, Field(ge=0, lt=1)] = 0.1
    command_timeout: Period = 120.0
    start_timeout: Period = 60.0
    memory_mb: AtLeastOne = 4096
    processes: AtLeastOne = 512
    disk_mb: AtLeastOne = 10_240
    cpus: Annotated[float, Field(ge=0)] = 0.0
    output_bytes: Annotated[int, Field(ge=1000)] = 16_000
    transfer_mb: AtLeastOne = 64
    host_network: bool = False
    listen: str = ""
    sweep: Period = 30.0


class ImagesConfig(Section):
    """The cache of images on this machine's disk."""

    cache: str = ""
    keep_gb: Annotated[float, Field(gt=0)] = 50.0
    prefetch: list[str] = Field(default_factory=list)


class DatasetConfig(Section):
    """Rows of one dataset as tasks (docs/datasets.md). Paths: a column, with dots for steps into it; {braces}: text."""

    handler: str = ""
    id: str = ""
    fields: dict[str, str] = Field(default_factory=dict)
    constants: dict[str, Any] = Field(default_factory=dict)
    keep: bool = False
    sampling: dict[str, Any] = Field(default_factory=dict)
    limits: dict[str, float] = Field(default_factory=dict)


class GroupsConfig(Section):
    """How a group of samples closes; the lane `eval` is left alone."""

    extra: Count = 0
    usable: Count = 0
    deadline: Seconds = 0.0
    rest: Literal["cancel", "later"] = "cancel"
    keep: Literal["all", "scored", "spread"] = "all"


class PayloadConfig(Section):
    """How large data lies in Redis, and from which size on in files beside it."""

    inline_bytes: Count = 4096
    dir: str = ""
    inline_max: Count = 262_144
    zstd_level: Annotated[int, Field(ge=1, le=19)] = 1


class Config(Section):
    """All settings. `config.lease.seconds` and so on; `source` is the file it came from, or None."""

    line: LineConfig = LineConfig()
    redis: RedisConfig = RedisConfig()
    network: NetworkConfig = NetworkConfig()
    lease: LeaseConfig = LeaseConfig()
    retry: RetryConfig = RetryConfig()
    limits: LimitsConfig = LimitsConfig()
    memory: MemoryConfig = MemoryConfig()
    keep: KeepConfig = KeepConfig()
    workers: WorkersConfig = WorkersConfig()
    handlers: HandlersConfig = HandlersConfig()
    policy: PolicyConfig = PolicyConfig()
    policies: dict[Name, OtherPolicyConfig] = Field(default_factory=lambda: {"judge": OtherPolicyConfig()})
    sandbox: SandboxConfig = SandboxConfig()
    images: ImagesConfig = ImagesConfig()
    artifacts: ArtifactsConfig = ArtifactsConfig()
    groups: GroupsConfig = GroupsConfig()
    payload: PayloadConfig = PayloadConfig()
    slurm: SlurmConfig = SlurmConfig()
    datasets: dict[Name, DatasetConfig] = Field(default_factory=dict)

    _source: Path | None = PrivateAttr(default=None)

    @property
    def source(self) -> Path | None:
        """The file that was read, absolute; None when there was none."""
        return self._source

    @property
    def folder(self) -> Path:
        """The folder that relative paths and `handlers.path` start from: the config's, else the current one."""
        return self._source.parent if self._source else Path.cwd()

    def path_of(self, text: str) -> Path:
        """A path from a setting, absolute: `~` is the home, a relative one starts at `folder`."""
        return self.folder / Path(text).expanduser()

    def policy_of(self, name: str) -> PolicyConfig:
        """The settings of the policy of this name; "policy" is the one that is trained. Raises ConfigError."""
        if name == TRAINED:
            return self.policy
        other = self.policies.get(name)
        if other is None:
            known = ", ".join([TRAINED, *self.policies])
            raise ConfigError(
                f"no policy is named {name!r} (known: {known}): add it to the section `policies` of config.yaml, then "
                f"start its server with `rollout serve MODEL --policy {name}`"
            )
        return self.policy.model_copy(update={**other.model_dump(), "model": other.model or name})

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """A checked copy with other values: `config.changed({"lease.seconds": 2.0})`. Raises ConfigError."""
        merged = sources.Merged(self.model_dump(), fields=type(self), origin="the configuration")
        for name, value in changes.items():
            merged.put(tuple(name.split(".")), value, origin=name)
        return self._checked(merged, self._source)

    @classmethod
    def _checked(cls, merged: sources.Merged, source: Path | None) -> Self:
        try:
            config = cls.model_validate(merged.data)
        except ValidationError as error:
            raise ConfigError(merged.explain(error)) from None
        config._source = source
        _check_together(config, merged.origin)
        return config


def load(path: Path | None = None, overrides: Sequence[str] = (), environ: Mapping[str, str] = os.environ) -> Config:
    """Read the settings. `path` wins over ROLLOUT_CONFIG, that over ./config.yaml; else the built-in defaults hold.

    `overrides` are `section.key=value` texts, as given to `--set`. Raises ConfigError, a sentence that names the
    place, the key, the value and what is wanted.
    """
    source = _find(path, environ)
    merged = sources.Merged(Config().model_dump(), fields=Config, origin=str(source.name if source else "config"))
    if source is not None:
        merged.put_file(sources.read_file(source))
    merged.put_variables(environ, prefix="ROLLOUT_", special=SPECIAL_VARIABLES)
    merged.put_overrides(overrides)
    config = Config._checked(merged, source)
    if config.redis.url and config.redis.address_file:
        raise ConfigError(
            f"{merged.origin}: redis.url and redis.address_file are both set: a Redis has one address, or it may move "
            "and publishes where it is; leave one of them empty"
        )
    return config


def _find(path: Path | None, environ: Mapping[str, str]) -> Path | None:
    named = environ.get(CONFIG_VARIABLE, "")
    if path is None and named:
        path = Path(named)
        if not path.is_file():
            raise ConfigError(f"{CONFIG_VARIABLE}={named}: no such file")
    if path is None:
        default = Path("config.yaml")
        return default.resolve() if default.is_file() else None
    if not path.is_file():
        raise ConfigError(f"{path}: no such file (give --config FILE, or none to use the defaults)")
    return path.resolve()


def _check_together(config: Config, origin: str) -> None:
    """Rules between settings, each with its reason in the sentence."""
    lease, limits, retry = config.lease, config.limits, config.retry
    if lease.beat * 2 > lease.seconds:
        raise ConfigError(
            f"{origin}: lease.beat: {lease.beat} s is more than half of lease.seconds ({lease.seconds} s): "
            "one late beat would lose the rollout"
        )
    if lease.tick * 2 > lease.seconds:
        raise ConfigError(
            f"{origin}: lease.tick: {lease.tick} s is more than half of lease.seconds ({lease.seconds} s): "
            "the line would think that it was blind at every tick"
        )
    if limits.loop_dead <= limits.loop_stall:
        raise ConfigError(
            f"{origin}: limits.loop_dead: {limits.loop_dead} s must be longer than limits.loop_stall "
            f"({limits.loop_stall} s), which warns first"
        )
    if retry.backoff_max < retry.backoff:
        raise ConfigError(
            f"{origin}: retry.backoff_max: {retry.backoff_max} s is less than retry.backoff ({retry.backoff} s)"
        )
    if TRAINED in config.policies:
        raise ConfigError(f"{origin}: policies.{TRAINED}: this name is the trained policy's: use the section `policy`")
    windows: dict[str, PolicyConfig | OtherPolicyConfig] = {"policy": config.policy}
    windows |= {f"policies.{name}": other for name, other in config.policies.items()}
    for place, policy in windows.items():
        if policy.max_tokens > policy.context:
            raise ConfigError(
                f"{origin}: {place}.max_tokens: {policy.max_tokens} does not fit in {place}.context ({policy.context})"
            )
    wrong = config.slurm.wrong(limits.grace)
    if wrong:
        raise ConfigError(f"{origin}: {wrong}")
