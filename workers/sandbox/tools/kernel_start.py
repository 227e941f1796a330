"""The first, silent cell of each kernel: what a cell prints comes in the order in which it was written.

It runs inside, by whatever Python the image has. Both streams and the descriptors of subprocesses become one stream;
what a subprocess wrote waits in a pipe for a thread of ipykernel's, so once a subprocess has ended we put a mark into
the pipe, and wait for it to come out, before the next thing is printed, shown, or said to be over.
"""

import os
import resource
import select
import sys
import threading
from typing import Any

MOST_SECONDS = 0.2
"""A background process that prints without end must not hold the cell."""

MARK = "\x1e"
"""A single byte, so that it can't be read in parts; no terminal shows it."""

PORTION = 1 << 20
"""Characters of one message at most: who reads them has others to serve."""


def install() -> None:
    """Change this kernel's streams."""
    stream: Any = sys.stdout
    if sys.stderr is stream:
        return  # done already: the first cell is sent again until its end was heard
    os.dup2(1, 2)
    captures = getattr(stream, "_fid", None) is not None
    sys.stdout = sys.stderr = ordered(stream) if captures else stream


def ordered(stream: Any) -> Any:
    """`stream`, which a pipe from subprocesses ends in, with two methods of its own; all else is the stream's.

    IPython puts a `write` of its own into the stream of the moment for each cell, also for the one that runs this, and
    takes it away again: so it is a new object.
    """
    kind = type(stream)
    entrance = os.dup(1)  # the pipe's, whatever a cell does to the descriptor itself
    passed = threading.Event()
    ended, waiting = [0], [0]

    def from_pipe(text: str) -> int:
        written: int = kind.write(stream, text.replace(MARK, ""))
        if MARK in text:
            passed.set()
        return written

    def settle() -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        faults = resource.getrusage(resource.RUSAGE_CHILDREN).ru_minflt  # grows with every subprocess that has ended
        if faults == ended[0]:
            return
        ended[0] = faults
        vars(stream)["write"] = from_pipe  # nobody but the pipe's thread writes by this any more
        passed.clear()
        if select.select([], [entrance], [], MOST_SECONDS)[1]:
            os.write(entrance, MARK.encode())
            passed.wait(MOST_SECONDS)

    def write(text: str) -> int:
        settle()
        for begin in range(0, len(text), PORTION):
            portion = text[begin : begin + PORTION]
            waiting[0] += len(portion)
            kind.write(stream, portion)
            if waiting[0] >= PORTION:
                flush()
        return len(text)

    def flush() -> None:
        settle()
        waiting[0] = 0
        kind.flush(stream)

    own = {"write": write, "flush": flush}

    class Ordered(kind):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:
            """The stream's state is not repeated here."""

        def __getattribute__(self, name: str) -> Any:
            return own[name] if name in own else getattr(stream, name)

        def __setattr__(self, name: str, value: Any) -> None:
            if name in own:
                own[name] = value
            else:
                setattr(stream, name, value)

    return Ordered()


install()
