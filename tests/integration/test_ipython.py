"""The IPython tool in every kind of box: results, order, pictures, what hangs, what dies, and that nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipeline.errors import SandboxError
from tests.boxes import Site, until
from tests.sessions import DRIVERS, boxed, either, gone, image_cache, make, running, session, short_root, site, unique
from workers.sandbox.tools import cells, kernel
from workers.sandbox.tools.inside import Inside
from workers.sandbox.tools.session import Session

__all__ = ["boxed", "either", "image_cache", "session", "short_root", "site"]

PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
NEW = "[a new kernel was started: variables and imports are gone]"


async def test_cells_print_return_fail_and_keep_their_state(session: Session) -> None:
    """H18 among them: `input` is an error at once."""
    assert await session.ipython("x = 1\nx") == ("1", "", (), False)
    assert await session.ipython("print(x); None") == ("1", "", (), False)
    ordered = (
        "import os, sys\nfrom IPython.display import display\nprint('a'); print('b', file=sys.stderr)\n"
        "print('c', end=''); display('d'); os.system('echo e; echo f >&2; echo g'); sys.stderr.write('h'); 'i'"
    )
    text = (await session.ipython(ordered)).text
    assert text == "a\nb\nc\n'd'\ne\nf\ng\nh\n'i'"
    failed = await session.ipython("1/0")
    assert failed.error == "ZeroDivisionError" and "division by zero" in failed.text and "\x1b" not in failed.text
    assert (await session.ipython("x =")).error == "SyntaxError"
    began = time.monotonic()
    asked = await session.ipython("a, b = int(input()), int(input())\nprint(a + b)")
    assert asked.error == "StdinNotImplementedError" and "input" in asked.text and time.monotonic() - began < 2
    assert await session.ipython("2 + 2") == ("4", "", (), False)
    assert (await session.ipython("%pwd")).text == repr((await session.bash("pwd")).text)
    long = (await session.ipython("print('x' * 200_000); print('END')")).text
    assert len(long) < 40_000 and long.endswith("\nEND") and "bytes left out]" in long
    assert (await session.ipython("import os; os.environ.get('ROLLOUT_REDIS__URL')")).text == ""


async def test_pictures_are_files_inside(boxed: Session) -> None:
    code = f"import base64\nfrom IPython.display import *\ndisplay(Image(base64.b64decode('{PIXEL}'))); 'after'"
    cell = await boxed.ipython(f"print('before')\n{code}")
    (path,) = cell.images
    assert cell == (f"before\n[picture: {path}]\n'after'", "", (path,), False)
    assert (await boxed.read(path)).startswith(b"\x89PNG")
    again = await boxed.ipython(code)
    assert again.images and again.images != cell.images


def test_pictures_of_one_cell_have_bounds() -> None:
    gathered = cells.Gathered("/p", "1")
    large = {"data": {"image/svg+xml": "x" * (cells.PICTURE_BYTES // 2 - 1), "text/plain": "figure"}}
    for _ in range(3):
        gathered.add("display_data", large)
    small = {"data": {"image/svg+xml": ""}}
    for _ in range(cells.PICTURES):
        gathered.add("display_data", small)
    assert len(gathered.pictures) == cells.PICTURES and "\nfigure\n" in gathered.take()


async def test_h14_a_timed_out_cell_ends_with_what_it_started(session: Session) -> None:
    earlier, spin = unique(788), f"qa_spin_h14_{unique(0)}"
    await session.ipython(f"import subprocess; kept = subprocess.Popen(['sleep', '{earlier}'], start_new_session=True)")
    began = time.monotonic()
    spinning = f"subprocess.run(['python3', '-c', 'while True: pass', '{spin}'])"
    cell = await session.ipython(f"print('begun'); {spinning}", 0.5)
    assert cell.text.startswith("begun") and (cell.error, cell.timed_out) == ("TimeoutError", True)
    assert time.monotonic() - began < 5 and await gone(spin, 1)
    await session.ipython("while True: pass", 0.2)
    assert await session.ipython("kept.poll(), 7") == ("(None, 7)", "", (), False)
    assert len(running(earlier)) == 1
    assert await session.bash("echo ok") == ("ok", 0, False)


async def test_a_kernel_that_died_or_is_stuck_is_replaced(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = await make(site, "bubblewrap")
    await session.ipython("x = 1")
    for death in ("import os; print('in', flush=True); os._exit(3)", "import os; os.kill(os.getpid(), 9)"):
        cell = await session.ipython(death)
        assert cell.error == "DeadKernelError" and "the kernel died" in cell.text
        assert await session.ipython("'x' in globals()") == (f"{NEW}\nFalse", "", (), False)
    left = await session.ipython("exit()")
    assert left.error == "" and "the cell ended the kernel" in left.text
    assert await session.ipython("1") == ("1", "", (), False)
    stuck = (
        "import signal, time\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nprint('in', flush=True)\nwhile True: pass"
    )
    monkeypatch.setattr(kernel, "STOP_SECONDS", 0.2)
    cell = await session.ipython(stuck, 0.5)
    assert cell.timed_out and cell.error == "TimeoutError" and cell.text.startswith("in\n[the kernel did not come back")
    assert await session.ipython("2") == (f"{NEW}\n2", "", (), False)
    await session.close()


async def test_a_cancelled_cell_is_ended_and_does_not_spoil_the_next(either: Session) -> None:
    word = unique(602)
    await either.ipython("x = 1")
    call = asyncio.create_task(either.ipython(f"import subprocess; subprocess.run(['sleep', '{word}'])"))
    assert await until(lambda: len(running(word)) == 1)
    call.cancel()
    await asyncio.gather(call, return_exceptions=True)
    assert call.cancelled() and await either.ipython("x") == ("1", "", (), False)
    assert await gone(word)
    await either.fresh()
    assert await either.ipython("'x' in globals()") == ("False", "", (), False)


async def test_nothing_is_left_of_a_kernel(site: Site) -> None:
    for kind in DRIVERS:
        made, box = await make(site, kind, name=f"left-{kind}")
        await made.ipython("1")
        await made.close()
        before = len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())
        first = asyncio.create_task(made.ipython("1"))  # cancelled while it starts
        await asyncio.sleep(0.05)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        await made.close()
        assert await until(lambda: (len(os.listdir("/proc/self/fd")), len(asyncio.all_tasks())) == before)  # noqa: B023
        assert [*box.sockets.iterdir(), *(box.folder / "own").iterdir()] == []
        assert await until(lambda: box.processes() == [])  # noqa: B023
        assert (await made.bash("ls -A | grep -v '^a$\\|^.pyenv'")).text == ""
        await made.close()


async def test_a_flood_does_not_hold_the_event_loop(site: Site) -> None:
    made, _ = await make(site, "local")
    await made.ipython("from IPython.display import display")
    flood = asyncio.create_task(made.ipython("while True: print('x' * 1000); display(1)", 1.0))
    turns, worst = 0, 0.0
    while not flood.done():
        before = time.monotonic()
        await asyncio.sleep(0.005)
        turns, worst = turns + 1, max(worst, time.monotonic() - before)
    cell = await flood
    assert cell.timed_out and turns > 20 and worst < 1 and len(cell.text) < 40_000
    assert (await made.ipython("print('x' * 80_000_000); print('END')")).text.endswith("xxx\nEND")
    huge = await made.ipython("display({'text/plain': 'x' * 80_000_000}, raw=True)")
    assert huge == ("[a part of the output was too large and is lost]", "", (), False)
    assert (await made.ipython("1")).text == "1"
    await made.close()


async def test_what_is_no_message_ends_the_kernel_and_not_us(site: Site) -> None:
    """The policy owns its kernel, and may send whatever it likes."""
    made, _ = await make(site, "local")
    evil = "k = get_ipython().kernel\nk.iopub_socket.send_multipart([b'x', b'<IDS|MSG>', b'', b'{', b'{', b'{', b'{'])"
    cell = await made.ipython(evil)
    assert cell.error == "DeadKernelError" and "no Jupyter message" in cell.text
    assert (await made.ipython("1")).text == f"{NEW}\n1"
    for kind, content in (("error", "{'traceback': 5}"), ("display_data", "{'data': {'image/png': [1]}}")):
        odd = f"k = get_ipython().kernel\nk.session.send(k.iopub_socket, '{kind}', {content}, parent=k.get_parent())"
        cell = await made.ipython(f"{odd}; import time; time.sleep(1)")
        assert cell.error == "DeadKernelError" and "no Jupyter message" in cell.text
        assert (await made.ipython("1")).text == f"{NEW}\n1"
    await made.close()


LINKS = """
import os
folder = "/run/rollout"
for name in os.listdir(folder):
    if name.endswith(("-1", "-2")):
        os.unlink(f"{folder}/{name}")
        os.symlink({target!r}, f"{folder}/{name}")
"""


async def test_a_link_in_the_place_of_a_kernels_socket_is_not_followed(site: Site, short_root: Path) -> None:
    """Neither by a new connection, nor by the first one."""
    made, box = await make(site, "bubblewrap")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(short_root / "s"))
        listener.listen()
        listener.setblocking(False)
        await made.ipython(LINKS.replace("{target!r}", repr(str(short_root / "s"))))
        huge = await made.ipython("display({'text/plain': 'x' * 40_000_000}, raw=True)")  # costs the connection
        assert "too large" in huge.text and await made.ipython("1") == ("1", "", (), False)
        (box.sockets / "k-1").symlink_to(short_root / "s")
        with pytest.raises(SandboxError, match="something else"):
            Inside(box).take_socket("k-1")
        with pytest.raises(BlockingIOError):
            listener.accept()
    await made.close()


@pytest.mark.parametrize("kind", ["bubblewrap", "apptainer"])
async def test_a_sandbox_that_died_under_a_cell(site: Site, kind: str) -> None:
    made, box = await make(site, kind)
    assert (await made.ipython("1")).text == "1" and box.pid is not None
    word = unique(60)
    call = asyncio.create_task(made.ipython(f"import os; os.system('sleep {word}')"))
    assert await until(lambda: len(running(word)) == 1)
    os.kill(box.pid, signal.SIGKILL)
    assert (await call).error == "DeadKernelError"
    cell = await made.ipython("2")
    assert cell.error == "" and cell.text.startswith(f"{NEW}\n2\n[the sandbox had died")
    await made.close()


async def test_an_image_without_a_kernel_says_where_there_is_one(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    made, _ = await make(site, "bubblewrap")
    monkeypatch.setattr(kernel.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    cell = await made.ipython("1")
    if cell.error == "":
        pytest.skip("this machine's own python3 has ipykernel, so every box has it")
    assert cell.error == "NoKernel" and "rollout image build python" in cell.text
    await made.close()


async def test_a_python_that_could_not_be_asked_is_no_image_without_a_kernel(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("python3", "python"):
        (tmp_path / name).write_text("#!/bin/sh\nkill -9 $$\n")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(kernel.sys, "executable", "/nowhere/python")
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    made, _ = await make(site, "local")
    with pytest.raises(SandboxError, match=r"(?s)could not be found out .*python ended with 137"):
        await made.ipython("1")
    await made.close()


KERNELS = """
import asyncio, sys
from pathlib import Path
from pipeline.config import Config
from workers.sandbox.box import Spec
from workers.sandbox.boxes import make_driver
from workers.sandbox.tools.session import Session

async def one(driver, config, name):
    box = await driver.create(Spec(), name)
    session = Session(box, config.sandbox)
    cell = await session.ipython(f"import os; print({name!r})")
    assert (await session.ipython("1 + 1")).text == "2"
    await session.close()
    await box.discard()
    return cell.text == name

async def main():
    config = Config().changed({"sandbox.driver": "bubblewrap"})
    driver = make_driver(config, Path(sys.argv[1]))
    names = [f"{sys.argv[2]}-{number}" for number in range(int(sys.argv[3]))]
    print(sum(await asyncio.gather(*(one(driver, config, name) for name in names))))

asyncio.run(main())
"""


@pytest.mark.parametrize(("processes", "kernels"), [(2, 3), pytest.param(4, 8, marks=pytest.mark.slow)])
def test_h19_many_kernels_start_at_once(short_root: Path, processes: int, kernels: int) -> None:
    """Sockets have names of their own, so none can be somebody else's."""
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", KERNELS, str(short_root / f"host{number}"), f"job{number}", str(kernels)],
            stdout=subprocess.PIPE, cwd=Path(__file__).parents[2],
        )
        for number in range(processes)
    ]  # fmt: skip
    assert [int(process.communicate(timeout=90)[0]) for process in begun] == [kernels] * processes
