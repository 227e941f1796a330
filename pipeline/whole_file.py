"""Small files that others see whole or not at all, readable by this user alone; and names that outlast a crash."""

from __future__ import annotations

import errno
import os
import secrets
from pathlib import Path

NO_FLUSH = (errno.EINVAL, errno.ENOTSUP, errno.EBADF, errno.ENOSYS)
"""What a file system says whose folders need no flush of their own."""


def write_whole(path: Path, text: str) -> None:
    """Put a file with this text in the place of the one before. Raises OSError; nothing is left then."""
    draft = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    handle = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "w", encoding="utf-8") as file:
            os.fchmod(handle, 0o600)  # whatever the umask is
            file.write(text)
            file.flush()
            os.fsync(handle)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def flush_folder(folder: Path) -> None:
    """Names in this folder outlast a crash of its machine. Raises OSError."""
    number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(number)
    except OSError as error:
        if error.errno not in NO_FLUSH:
            raise
    finally:
        os.close(number)
