"""The file in which a Redis that may move says where it is: written by whoever keeps the server, read by every client.

One JSON object: url, password, epoch, job, started. It holds the password, so only its user can read it. It is replaced
as a whole, so a reader sees the old address or the new one and nothing between. The epoch grows with every start of a
server; the password is another one at each, so that whoever has read of one server can't speak to another. A server
that ends in good order leaves its epoch there, and no url: the line is down, which is not the same as a server that is
away.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.config import Config
from pipeline.errors import RedisUnavailable
from pipeline.whole_file import write_whole

NAME = "address.json"
"""The file's name in `slurm.folder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where Redis is: `url` redis://HOST:PORT/DB; `job` of the scheduler or ""; `started` in Unix seconds.

    Of a server that has ended in good order: `url` and `password` are empty, and `started` is when it ended. `down`:
    the line itself was taken down, so nobody needs to wait for the next one.
    """

    url: str
    password: str
    epoch: int
    job: str
    started: float
    down: bool = False

    @property
    def host(self) -> str:
        """The host's name or address, without brackets."""
        return urlsplit(self.url).hostname or ""

    @property
    def port(self) -> int:
        return urlsplit(self.url).port or 6379

    @property
    def database(self) -> int:
        return int(urlsplit(self.url).path.strip("/") or 0)

    def __repr__(self) -> str:
        return f"Address(url={self.url!r}, password=***, epoch={self.epoch}, job={self.job!r})"


def file_of(config: Config) -> Path | None:
    """The address file that these settings follow, absolute; None where Redis has one address (or none is named).

    redis.address_file, else the one in slurm.folder, but for settings with a redis.url and no redis.address_file.
    """
    if config.redis.address_file:
        return config.path_of(config.redis.address_file).absolute()
    if config.redis.url or not config.slurm.folder:
        return None
    return config.path_of(config.slurm.folder).absolute() / NAME


def read(path: Path) -> Address:
    """The present address. Raises RedisUnavailable: no file (yet), a line that is down, no address, can't be read."""
    found = _stored(path)
    if not found.url:
        job = f" (job {found.job})" if found.job else ""
        ended = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(found.started))
        raise RedisUnavailable(
            f"the line is down: its Redis{job} ended in good order at {ended}, and no other one has followed yet "
            f"({path}): `rollout slurm up` starts one, or `rollout redis start --foreground --publish`"
        )
    return found


def last_epoch(path: Path) -> int:
    """The epoch of the last server that was published, which may have ended; 0 where none is known."""
    try:
        return _stored(path).epoch
    except RedisUnavailable:
        return 0


def _stored(path: Path) -> Address:
    """What the file holds; the url is empty where the line is down. Raises RedisUnavailable as `read` does."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RedisUnavailable(
            f"no Redis has published its address in {path} yet: `rollout slurm up` starts one, or `rollout redis start "
            "--foreground --publish`"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise RedisUnavailable(f"the address of Redis in {path} can't be read: {why}") from None
    try:
        return _parsed(json.loads(text))
    except (ValueError, TypeError) as error:
        raise RedisUnavailable(
            f"{path} holds no address of a Redis ({error}): remove it, and start Redis again (`rollout redis start "
            "--foreground --publish`)"
        ) from None


def _parsed(told: object) -> Address:
    """Unknown fields are those of a newer version, and left alone. Raises ValueError, TypeError."""
    if not isinstance(told, dict):
        raise ValueError("it is no JSON object")
    about = {field.name: told.get(field.name, field.name != "down" and None) for field in fields(Address)}
    address = Address(**about)  # type: ignore[arg-type]
    kinds = (("url", str), ("password", str), ("epoch", int), ("job", str), ("started", (int, float)), ("down", bool))
    for name, kind in kinds:
        if not isinstance(getattr(address, name), kind):
            raise ValueError(f"{name} is missing or of a wrong type")
    if not address.url:
        return address
    parts = urlsplit(address.url)
    if parts.scheme != "redis" or not parts.hostname:
        raise ValueError("its url is none of the form redis://HOST:PORT/0")
    _ = address.port, address.database  # ValueError where they are no numbers
    return address


def publish(path: Path, address: Address) -> None:
    """Put the address in the place of the one before, readable by this user alone. Raises OSError."""
    write_whole(path, json.dumps(asdict(address)) + "\n")


def take_down(path: Path) -> None:
    """Say that the line was taken down on purpose; nothing where no server was ever published. Raises OSError."""
    try:
        found = _stored(path)
    except RedisUnavailable:
        return
    publish(path, replace(found, url="", password="", down=True))


def is_down(path: Path) -> bool:
    """Whether the line was taken down on purpose, and no server has been published since."""
    try:
        return _stored(path).down
    except RedisUnavailable:
        return False


def withdraw(path: Path, address: Address) -> None:
    """Say that this server has ended in good order, now, and no other one has come yet. Raises OSError."""
    publish(path, replace(address, url="", password="", started=time.time()))
