"""The file in which a Redis that may move says where it is: written by whoever keeps the server, read by every client.

One JSON object: url, password, epoch, job, started. It holds the password, so only its user can read it. It is replaced
as a whole, so a reader sees the old address or the new one and nothing between. The epoch grows with every start of a
server; the password is another one at each, so that whoever has read of one server can't speak to another.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from urllib.parse import urlsplit

from pipeline.config import Config
from pipeline.errors import RedisUnavailable

NAME = "address.json"
"""The file's name in `slurm.folder`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where Redis is: `url` redis://HOST:PORT/DB; `job` of the scheduler or ""; `started` in Unix seconds."""

    url: str
    password: str
    epoch: int
    job: str
    started: float

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
    """The present address. Raises RedisUnavailable: no file (yet), can't be read, not what a server publishes."""
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
    address = Address(**{field.name: told.get(field.name) for field in fields(Address)})  # type: ignore[arg-type]
    for name, kind in (("url", str), ("password", str), ("epoch", int), ("job", str), ("started", (int, float))):
        if not isinstance(getattr(address, name), kind):
            raise ValueError(f"{name} is missing or of a wrong type")
    parts = urlsplit(address.url)
    if parts.scheme != "redis" or not parts.hostname:
        raise ValueError("its url is none of the form redis://HOST:PORT/0")
    _ = address.port, address.database  # ValueError where they are no numbers
    return address


def publish(path: Path, address: Address) -> None:
    """Put the address in the place of the one before, readable by this user alone. Raises OSError."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, 0o600)  # whatever the umask is
            file.write(json.dumps(asdict(address)) + "\n")
            file.flush()
            os.fsync(handle)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Let what was renamed in a folder last. Not every file system knows this; the rename itself is done anyway."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.EIO, errno.ENOSYS):
            raise
    finally:
        os.close(handle)
