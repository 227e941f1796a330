"""What a policy is told by its tools: results, its own mistakes, what the sandbox refuses; no call ends the rollout."""

from __future__ import annotations

from typing import Any

from handlers.tools import READ_BYTES, TOOLS, answer
from pipeline.interfaces import ToolCall
from tests.boxes import Site
from tests.sessions import boxed, image_cache, make, short_root, site
from workers.sandbox.tools.session import Session

__all__ = ["boxed", "image_cache", "short_root", "site"]

SAID: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("bash", {"command": "echo hi"}, "hi"),
    ("bash", {"command": "echo hi; (exit 3)"}, "hi\n[exit code 3]"),
    ("bash", {"command": "sleep 60", "timeout": 0.1}, "[timed out after 0.1 s]"),
    ("bash", {"command": " "}, "Error: nothing was run: bash wants `command`, a text that is not empty."),
    ("bash", {"command": "true", "timeout": 0}, "Error: nothing was run: `timeout` is a number of seconds above 0."),
    ("bash", {"command": "true", "timeout": True}, "Error: nothing was run: `timeout` is a number of seconds above 0."),
    ("write_file", {"path": "d/x", "content": "one two"}, "[7 bytes written]"),
    ("write_file", {"path": "d/x/y", "content": ""}, "Error: Not a directory."),
    ("edit_file", {"path": "d/x", "old": "two", "new": ""}, "[done]"),
    ("read_file", {"path": "d/x"}, "one "),
    ("read_file", {"path": "d/x", "start": 2.0}, "e "),
    ("read_file", {"path": "nope"}, "Error: No such file or directory."),
    ("read_file", {"path": "x\ud800"}, "Error: 'utf-8' codec can't encode character '\\ud800' in position 13: "
     "surrogates not allowed."),
    *(("read_file", {"path": "d/x", "start": start}, "Error: nothing was run: `start` is a number of bytes, 0 or more.")
      for start in (-1, True, "1", float("inf"), float("nan"), 1e300)),
)  # fmt: skip


async def test_a_call_is_answered_whatever_it_is(boxed: Session) -> None:
    for name, arguments, text in SAID:
        call = ToolCall("1", name, arguments)
        assert (call, await answer(boxed, call, tuple(TOOLS))) == (call, text)
    missing = await answer(boxed, ToolCall("1", "edit_file", {"path": "d/x", "old": "x", "new": ""}), tuple(TOOLS))
    assert missing.startswith("Error: the text to replace stands 0 times")
    assert await answer(boxed, ToolCall("1", "bash", {"command": "x"}), ("ipython",)) == (
        "Error: there is no tool 'bash'; there are: ipython."
    )
    assert (await answer(boxed, ToolCall("1", "bash", None, "no JSON"), ("bash",))).startswith(
        "Error: nothing was run: no JSON."
    )


async def test_output_is_cut_to_the_setting(site: Site) -> None:
    """`sandbox.output_bytes` counts head and tail together, for bash and for IPython."""
    for most in (16_000, 2000):
        made, _ = await make(site, "local", name=f"g.{most}-token", output_bytes=most)
        flood = await answer(made, ToolCall("1", "bash", {"command": "seq 100000"}), ("bash",))
        cell = await answer(made, ToolCall("1", "ipython", {"code": "print(*range(100000))"}), ("ipython",))
        for text in (flood, cell):
            assert most - 500 < len(text) < most + 100 and " bytes left out]" in text
        assert flood.startswith("1\n2\n") and flood.endswith("\n100000")
        await made.close()


async def test_a_long_file_is_shown_in_parts(boxed: Session) -> None:
    await boxed.write("long", b"x" * (READ_BYTES + 1))
    text = await answer(boxed, ToolCall("1", "read_file", {"path": "long"}), ("read_file",))
    assert text.endswith(f"\n[it goes on at byte {READ_BYTES}]")
    text = await answer(boxed, ToolCall("1", "read_file", {"path": "long", "start": READ_BYTES}), ("read_file",))
    assert text == "x"
