"""Connections to Redis, a look at what kind of server it is, and its errors as sentences.

A Redis that may move has an address file (pipeline/address_file.py), which every new connection reads again.
Nothing is tried again here: the verbs of the queue are idempotent and their callers repeat them, who alone know for
how long that makes sense. The password comes from a file or from the URL, and never appears in a message.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

import redis
import redis.asyncio
from redis import exceptions
from redis._parsers.encoders import Encoder
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.connection import PythonRespSerializer
from redis.retry import Retry

from pipeline import address_file
from pipeline.config import Config
from pipeline.errors import ConfigError, RedisUnavailable
from pipeline.moving import AsyncMovingConnection, MovingConnection, NotPublished

OLDEST = (6, 2)
# The longest time that one blocking command may ask for (seconds); a blocking client waits this much longer, and no
# more: a heartbeat whose reply is lost must be repeated well within its lease.
BLOCK_SECONDS = 2.0
# Connections of one client. More callers wait for a free one: a thousand commits at once are no thousand sockets.
CONNECTIONS = 32
_AUTHENTICATION = (
    "noauth",
    "wrongpass",
    "invalid username-password",
    "authentication required",
    "any password configured",
)
# redis-py sends what is larger than this (bytes) as a piece of its own, without a copy.
_CUTOFF = 6000


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What a server says of itself. `maxmemory` and `used_memory` in bytes (0 = no bound); `warnings` are sentences."""

    kind: str
    version: str
    aof: bool
    maxmemory: int
    used_memory: int
    policy: str
    is_replica: bool
    warnings: tuple[str, ...]


def connect(config: Config, *, blocking: bool = False, name: str = "") -> redis.asyncio.Redis:
    """An asyncio client; it connects with its first command. Replies are bytes.

    `blocking=True` is for a client that blocks in BLPOP (at most BLOCK_SECONDS at a time): its socket may be silent
    for that much longer. `name` is shown by CLIENT LIST. Raises ConfigError (no URL, a bad one, no password file).
    """
    options = _options(config, blocking=blocking, name=name)
    options |= {"retry": AsyncRetry(NoBackoff(), 0), "max_connections": CONNECTIONS, "timeout": 60}
    file = address_file.file_of(config)
    if file is not None:
        options |= {"connection_class": AsyncMovingConnection, "address_file": file}
        return redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool(**options))
    return redis.asyncio.Redis.from_pool(redis.asyncio.BlockingConnectionPool.from_url(_url(config), **options))


def connect_sync(config: Config, *, blocking: bool = False, name: str = "") -> redis.Redis:
    """The same for threads and plain code."""
    options = _options(config, blocking=blocking, name=name)
    options |= {"retry": Retry(NoBackoff(), 0), "max_connections": CONNECTIONS, "timeout": 60}
    # hiredis reads faster, but its packer copies: a 1 MB write takes 1.5 ms instead of 0.35 ms.
    packer = PythonRespSerializer(_CUTOFF, Encoder("utf-8", "strict", False).encode)  # type: ignore[no-untyped-call]
    options["command_packer"] = packer
    file = address_file.file_of(config)
    if file is not None:
        options |= {"connection_class": MovingConnection, "address_file": file}
        return redis.Redis.from_pool(redis.BlockingConnectionPool(**options))  # type: ignore[no-untyped-call]
    return redis.Redis.from_pool(redis.BlockingConnectionPool.from_url(_url(config), **options))


def _options(config: Config, *, blocking: bool, name: str) -> dict[str, Any]:
    wait = config.redis.socket_timeout + (BLOCK_SECONDS if blocking else 0.0)
    options: dict[str, Any] = {
        "socket_connect_timeout": config.redis.connect_timeout,
        "socket_timeout": wait,
        "protocol": 2,  # no HELLO: an old server can still be asked for its version
        "driver_info": None,  # saves two round trips at each connect
    }
    moves = address_file.file_of(config) is not None
    if moves or not config.redis.url.startswith("unix:"):
        options["socket_keepalive"] = True
    if config.redis.password_file and not moves:  # else the password stands beside the address
        options["password"] = read_password(config.path_of(config.redis.password_file))
    if name:
        options["client_name"] = re.sub(r"[^!-~]+", "-", name)  # CLIENT SETNAME takes printable ASCII without spaces
    return options


def _url(config: Config) -> str:
    url = config.redis.url
    if not url:
        raise ConfigError("redis.url is empty, and no server was started: set redis.url, or run `rollout redis start`")
    scheme = urlsplit(url).scheme
    if scheme not in {"redis", "rediss", "unix"}:
        raise ConfigError(f"redis.url: {redacted(url)} is wrong, wanted redis://HOST:PORT, rediss:// or unix:///PATH")
    return url


def read_password(path: Path) -> str:
    """The first line of a password file. Raises ConfigError."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"redis.password_file: {path} can't be read: {error.strerror}") from None
    if not lines or not lines[0].strip():
        raise ConfigError(f"redis.password_file: {path} is empty, wanted the password in its first line")
    return lines[0].strip()


def redacted(url: str) -> str:
    """The URL without its password: redis://:***@host:6379/0."""
    parts = urlsplit(url)
    if "@" not in parts.netloc:
        return url
    user, _, host = parts.netloc.rpartition("@")
    hidden = user.partition(":")[0] + ":***" if ":" in user else user
    return urlunsplit(parts._replace(netloc=f"{hidden}@{host}"))


async def check(client: redis.asyncio.Redis, url: str = "") -> ServerFacts:
    """Ask the server what it is. `url` is for the messages; without it the connection's own address is named.

    Raises RedisUnavailable: unreachable, wrong password, loading, older than 6.2.
    """
    url = url or _address(client)
    try:
        info: dict[str, Any] = await client.info()
    except (exceptions.RedisError, OSError) as error:
        raise RedisUnavailable(explain(error, url)) from None  # the sentence says it all
    return _facts(info, url)


def check_sync(client: redis.Redis, url: str = "") -> ServerFacts:
    """`check` for plain code."""
    url = url or _address(client)
    try:
        info: dict[str, Any] = client.info()
    except (exceptions.RedisError, OSError) as error:
        raise RedisUnavailable(explain(error, url)) from None  # the sentence says it all
    return _facts(info, url)


def _facts(info: dict[str, Any], url: str) -> ServerFacts:
    kind = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info.get("redis_version", "0"))
    spoken = tuple(int(part) for part in re.findall(r"\d+", str(info.get("redis_version", "0")))[:2])
    if spoken < OLDEST:
        raise RedisUnavailable(f"{kind} {version} at {redacted(url)} is too old: 6.2 or newer is needed")
    if info.get("loading"):
        left = info.get("loading_eta_seconds")
        soon = f", about {left} s left" if left is not None else ""
        raise RedisUnavailable(f"{kind} at {redacted(url)} is loading its data{soon}: wait, then try again")
    facts = ServerFacts(
        kind=kind,
        version=version,
        aof=bool(info.get("aof_enabled")),
        maxmemory=int(info.get("maxmemory", 0)),
        used_memory=int(info.get("used_memory", 0)),
        policy=str(info.get("maxmemory_policy", "noeviction")),
        is_replica=info.get("role") != "master",
        warnings=(),
    )
    cluster = bool(info.get("cluster_enabled"))
    return ServerFacts(
        **{field: getattr(facts, field) for field in facts.__slots__ if field != "warnings"},
        warnings=tuple(_warnings(facts, redacted(url), cluster)),
    )


def _warnings(facts: ServerFacts, url: str, cluster: bool) -> list[str]:
    found = []
    if not facts.aof:
        found.append(f"{url} keeps no append-only file: a crash of Redis loses the line; set `appendonly yes`")
    if facts.policy != "noeviction":
        found.append(f"{url} evicts keys ({facts.policy}): rollouts may vanish; set `maxmemory-policy noeviction`")
    if not facts.maxmemory:
        found.append(f"{url} has no maxmemory: the memory mark (memory.high) is off; set `maxmemory`")
    if facts.is_replica:
        found.append(f"{url} is a replica: it refuses writes; give the primary's address")
    if cluster:
        found.append(f"{url} runs in cluster mode: the line uses one primary; give a server without it")
    return found


def explain(error: BaseException, url: str) -> str:
    """A redis or socket error as a sentence: what happened, where, what to do. The password is left out."""
    if isinstance(error, NotPublished) or isinstance(error.__cause__, NotPublished):
        return str(error)
    place, text = redacted(url) or "Redis", _without_password(" ".join(str(error).split()), url)
    wrong = text.lower()
    # By its words too: while connecting, redis-py wraps a refused password as a plain ConnectionError.
    if isinstance(error, exceptions.AuthenticationError) or any(word in wrong for word in _AUTHENTICATION):
        if "without any password" in wrong:
            return f"Redis at {place} has no password, but one was given: leave redis.password_file empty"
        if "required" in wrong:
            return f"Redis at {place} wants a password: set redis.password_file to a file that holds it"
        return f"Redis at {place} refused the password: check redis.password_file, or the password in redis.url"
    if isinstance(error, exceptions.BusyLoadingError) or wrong.startswith("loading"):
        return f"Redis at {place} is loading its data: wait, then try again"
    if isinstance(error, exceptions.ReadOnlyError):
        return f"Redis at {place} is a replica and refuses writes: give the primary's address"
    if isinstance(error, exceptions.OutOfMemoryError):
        return f"Redis at {place} has reached its maxmemory: pop what is done, or raise maxmemory"
    if isinstance(error, exceptions.NoPermissionError):
        return f"Redis at {place} does not let this user do that ({text}): give the user more rights"
    if isinstance(error, (exceptions.TimeoutError, TimeoutError)):
        return f"Redis at {place} did not answer in time ({text}): is it frozen, or the network cut?"
    if "protocol error" in wrong:
        return f"what listens at {place} does not speak Redis's protocol ({text}): is redis.url right?"
    if isinstance(error, (exceptions.ConnectionError, OSError)):
        return f"Redis at {place} can't be reached ({text}): is it running, and the address right?"
    return f"Redis at {place} answered with an error: {text}"


def _without_password(text: str, url: str) -> str:
    password = urlsplit(url).password
    for secret in {password, unquote(password)} if password else ():
        text = text.replace(secret, "***")
    return text


def _address(client: redis.asyncio.Redis | redis.Redis) -> str:
    known = client.connection_pool.connection_kwargs
    if known.get("address_file"):
        try:
            return address_file.read(known["address_file"]).url
        except RedisUnavailable:
            return ""
    if known.get("path"):
        return f"unix://{known['path']}"
    return f"redis://{known.get('host', 'localhost')}:{known.get('port', 6379)}"
