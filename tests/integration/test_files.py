"""Files of a box: whole, in ranges, edited, as archives; errors by number; nothing that hangs, floods or gets out."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import io
import os
import tarfile
import time

import pytest

from pipeline.config import Config
from tests.boxes import Site, until
from tests.sessions import boxed, image_cache, make, running, session, short_root, site, unique
from workers.sandbox.tools import files
from workers.sandbox.tools.run import Ran
from workers.sandbox.tools.session import Session

__all__ = ["boxed", "image_cache", "session", "short_root", "site"]

ODD = ("-n", "--help", "with space", "q'\"$(touch pwned)`touch pwned`", "new\nline\n", "*", "ä\udcff", "~", "#x")


def packed(files: dict[str, bytes]) -> bytes:
    """A tar archive of `files`."""
    data = io.BytesIO()
    with tarfile.open(fileobj=data, mode="w") as archive:
        for name, content in files.items():
            about = tarfile.TarInfo(name)
            about.size = len(content)
            archive.addfile(about, io.BytesIO(content))
    return data.getvalue()


def unpacked(data: bytes) -> dict[str, bytes]:
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        found = ((item.name, archive.extractfile(item)) for item in archive if item.isfile())
        return {name: file.read() for name, file in found if file is not None}


async def test_h21_files_are_written_and_read_whole(session: Session) -> None:
    data = os.urandom(200_000)
    await session.write("deep/er/x.bin", data)
    assert await session.read("deep/er/x.bin") == data
    assert await session.read("deep/er/x.bin", 100_000, 10) == data[100_000:100_010]
    assert await session.read("deep/er/x.bin", 199_999) == data[-1:]
    assert await session.read("deep/er/x.bin", 300_000) == b"" and await session.read("a/b.txt", 0, 0) == b""
    assert (await session.bash("sha256sum < deep/er/x.bin")).text.split()[0] == hashlib.sha256(data).hexdigest()
    await session.bash("chmod 755 deep/er/x.bin; ln -s deep/er/x.bin link")
    await session.write("link", b"short")
    assert await session.bash("stat -c %a deep/er/x.bin; cat link") == ("755\nshort", 0, False)
    home = (await session.bash("echo $HOME")).text
    assert await session.read(f"{home}/a/b.txt") == b"hi\n"
    assert b"root" in await session.read("/etc/passwd") and await session.read("/proc/self/status")


async def test_odd_names_are_only_names(boxed: Session) -> None:
    for name in ODD:
        await boxed.write(f"odd/{name}", name.encode("utf-8", "surrogateescape"))
        await boxed.write(name, b"")
        assert await boxed.read(f"odd/{name}") == name.encode("utf-8", "surrogateescape")
        assert unpacked(await boxed.download(f"odd/{name}")) == {name: name.encode("utf-8", "surrogateescape")}
        await boxed.upload(f"up/{name}", packed({"x": b"1"}))
        assert await boxed.read(f"up/{name}/x", 0) == b"1"
    assert (await boxed.bash("find odd -type f -printf x | wc -c; ls -d pwned */pwned 2>/dev/null")).text == str(
        len(ODD)
    )


async def test_errors_have_their_numbers(session: Session) -> None:
    await session.bash("mkdir d; mkfifo f; ln -s nowhere broken; ln -s loop loop; echo x > file")
    read = {
        "nope": errno.ENOENT,
        "nope/x/y": errno.ENOENT,
        "d": errno.EISDIR,
        "file/x": errno.ENOTDIR,
        "f": errno.EINVAL,
        "/dev/zero": errno.EINVAL,
        "broken": errno.ENOENT,
        "": errno.EINVAL,
        "x\0y": errno.EINVAL,
        "x" * 300: errno.ENOENT,
        "x/" * 3000: errno.ENAMETOOLONG,
    }
    for path, number in read.items():
        with pytest.raises(OSError) as raised:
            await session.read(path)
        assert (path[:20], raised.value.errno) == (path[:20], number)
    write = {"d": errno.EISDIR, "new/": errno.EISDIR, "file/x": errno.ENOTDIR, "file/x/y": errno.ENOTDIR,
             "f": errno.EINVAL, "loop": errno.ELOOP, "x" * 300: errno.ENAMETOOLONG}  # fmt: skip
    for path, number in write.items():
        with pytest.raises(OSError) as raised:
            await session.write(path, b"x")
        assert (path[:20], raised.value.errno) == (path[:20], number)
    for path, number in {"nope": errno.ENOENT, "f": errno.EINVAL}.items():
        with pytest.raises(OSError) as raised:
            await session.download(path)
        assert (path, raised.value.errno) == (path, number)
    with pytest.raises(NotADirectoryError):
        await session.upload("file", packed({}))
    with pytest.raises(ValueError, match="could not be unpacked"):
        await session.upload("up", b"garbage" * 1000)


async def test_what_may_not_be_read_or_written_is_permission(site: Site) -> None:
    """Root of a bubblewrap box has no capabilities; in the others root may do everything in its own files."""
    made, _ = await make(site, "bubblewrap")
    await made.bash("mkdir no; echo x > no/x; chmod 0 no; echo x > ro; chmod 400 ro; echo x > wo; chmod 200 wo")
    for path in ("no/x", "wo"):
        with pytest.raises(PermissionError):
            await made.read(path)
    for path in ("no/x", "no/new", "ro"):
        with pytest.raises(PermissionError):
            await made.write(path, b"y")
    with pytest.raises(OSError) as raised:
        await made.write("/usr/new", b"x")
    assert raised.value.errno in (errno.EROFS, errno.EACCES)
    with pytest.raises(PermissionError):
        await made.upload("no/up", packed({"x": b""}))
    await made.close()


async def test_an_edit_wants_its_text_exactly_once(boxed: Session) -> None:
    await boxed.write("e", b"one\r\ntwo\xff two\naaa\n")
    await boxed.edit("e", "one\r\n", "1\n")
    assert await boxed.read("e") == b"1\ntwo\xff two\naaa\n"
    for old, words in (("two", "stands 2 times"), ("aa", "stands 2 times"), ("three", "stands 0 times"), ("", "empty")):
        with pytest.raises(ValueError, match=words):
            await boxed.edit("e", old, "x")
    with pytest.raises(FileNotFoundError):
        await boxed.edit("nope", "x", "y")
    assert await boxed.read("e") == b"1\ntwo\xff two\naaa\n"


async def test_folders_travel_as_archives(session: Session) -> None:
    await session.upload("up", packed({"a/x": b"1", "y": os.urandom(100_000)}))
    await session.bash("mkfifo up/fifo; ln -s nowhere up/link; chmod 711 up/a")
    again = await session.download("up")
    await session.upload("copy/deep", again)
    assert (
        await session.bash("diff -r --no-dereference -x fifo up copy/deep/up && stat -c %a copy/deep/up/a")
    ).text == "711"
    assert unpacked(await session.download("up/a/x")) == {"x": b"1"}
    with pytest.raises(ValueError, match="escaped"):
        await session.upload("out", packed({"../../../escaped": b""}))
    assert await session.bash("ls -d escaped ../escaped /escaped 2>/dev/null") == ("", 2, False)


async def test_limits_hold_and_nothing_hangs(site: Site) -> None:
    made, box = await make(site, "bubblewrap", transfer_mb=1, command_timeout=2.0)
    await made.bash(
        "truncate -s 5M big; head -c 2M /dev/zero > growing; (while :; do echo more; done >> growing) & echo"
    )
    for call in (made.read("big"), made.read("big", 0, 2 << 20), made.read("growing"), made.download("big")):
        with pytest.raises(ValueError, match="limit of 1 MB"):
            await call
    for call in (made.write("x", bytes(1 + (1 << 20))), made.upload("x", bytes(1 + (1 << 20)))):
        with pytest.raises(ValueError, match="limit of 1 MB"):
            await call
    assert len(await made.read("big", 4 << 20, 1 << 20)) == 1 << 20
    await made.bash("kill %1; mkdir -p bin; printf '#!/bin/sh\\nsleep 700' > bin/tar; chmod +x bin/tar")
    box_environment = box.environment()
    box.environment = lambda: {**box_environment, "PATH": f"{box.home}/bin:{box_environment['PATH']}"}  # type: ignore[method-assign]
    began = time.monotonic()
    with pytest.raises(TimeoutError):
        await made.download("big")
    assert time.monotonic() - began < 10
    call = asyncio.create_task(made.download("big"))
    await asyncio.sleep(0.1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    await made.close()
    assert await until(lambda: not box.processes())


async def test_a_full_sandbox_says_so(site: Site) -> None:
    box = await site.box("bubblewrap", disk_mb=1)
    made = Session(box, Config().sandbox)
    with pytest.raises(OSError) as raised:
        await made.write("x", bytes(2 << 20))
    assert raised.value.errno in (errno.EFBIG, errno.ENOSPC, errno.EDQUOT)
    assert await made.read("x") is not None and await made.bash("echo ok") == ("ok", 0, False)
    await made.close()


def test_a_full_disk_is_read_from_what_the_tool_says() -> None:
    ran = Ran(1, b"", "cat: write error: No space left on device\n")
    with pytest.raises(OSError) as raised:
        files.raise_for(ran, "x", "")
    assert (raised.value.errno, raised.value.filename) == (errno.ENOSPC, "x")


async def test_files_go_beside_a_command(boxed: Session) -> None:
    word = unique(30)
    call = asyncio.create_task(boxed.bash(f"sleep {word}", 10))
    assert await until(lambda: len(running(word)) == 1)
    await boxed.write("x", b"1")
    assert await boxed.read("x") == b"1" and not call.done()
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
