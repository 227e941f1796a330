"""One live sandbox of a host: who may use it, its numbered actions, each run once, and the journal of its RUN stage."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from pipeline.errors import SandboxError, SandboxGone
from workers.sandbox import replies
from workers.sandbox.box import Box
from workers.sandbox.journal import Journal
from workers.sandbox.replies import Fenced
from workers.sandbox.tools.session import Session

log = logging.getLogger(__name__)


class Live:
    """A box with its tools. `id`, `token`: the rollout, and the INIT attempt that made it; `text`: its reference."""

    def __init__(self, box: Box, session: Session, *, id: str, token: str, lane: str) -> None:
        self.box, self.session = box, session
        self.id, self.token, self.lane = id, token, lane
        self.reference: dict[str, Any] = {}
        self.text = ""
        self._opener = ("", "")
        """Stage and lease token of the attempt that may use it; what it shows for that is `_key`."""
        self._key = ""
        self._journal: Journal | None = None
        self._running: dict[int, asyncio.Task[bytes]] = {}
        self._unwritten: dict[int, bytes] = {}

    # -- who may use it ----------------------------------------------------------------------------------------------

    def may(self, key: str) -> bool:
        """Whether `key` is the present opener's; compared in constant time."""
        return bool(self._key) and hmac.compare_digest(key.encode("utf-8", "replace"), self._key.encode())

    async def open(self, stage: str, token: str, *, resume: bool) -> tuple[str, list[bytes]]:
        """Make the attempt that holds `token` the only user: its key, and the turns that it may replay.

        Raises SandboxGone where an earlier RUN attempt has touched the sandbox and this one can't go on from it.
        """
        if self._opener == (stage, token):  # the reply was lost, and it asks again
            return self._key, self._turns()
        before, self._opener = self._opener, (stage, token)
        self._key = secrets.token_hex(32)
        if stage == "run" and before[0] == "run":
            if not resume or self._journal is None:
                raise SandboxGone(f"an earlier attempt has acted in sandbox {self.box.name}: this one starts over")
            return self._key, self._turns()
        await self._stop_actions()
        await self.session.fresh()
        self._drop_journal()
        self._journal = Journal(self.box.folder / "journal")
        return self._key, []

    def _turns(self) -> list[bytes]:
        return self._journal.all_turns() if self._journal else []

    # -- actions -----------------------------------------------------------------------------------------------------

    async def act(self, number: int, verb: str, args: dict[str, Any], turns: Sequence[bytes], key: str) -> bytes:
        """Do action `number` once; a repeat gets the stored result, or waits for the one that is running.

        The packed reply. It goes on when its caller goes away: the next attempt of the rollout asks for it.
        """
        if not self.may(key) or self._journal is None:
            return replies.pack_error(Fenced(f"another attempt uses sandbox {self.box.name} now"))
        asked = replies.digest(verb, args)
        if self._journal.digests.get(number, asked) != asked:
            why = (
                f"action {number} was another one in the attempt before: the handler can't be replayed, it starts over"
            )
            return replies.pack_error(SandboxGone(why))
        stored = self._unwritten.get(number) or self._journal.result_of(number)
        if stored is not None:
            return stored
        if number not in self._running:
            try:
                for turn in turns:
                    self._journal.turn(turn)
                self._journal.action(number, asked)
            except OSError as error:
                why = f"the journal of sandbox {self.box.name} can't be written: {error}; is the disk full?"
                return replies.pack_error(SandboxError(why))
            self._running[number] = asyncio.create_task(self._run(number, verb, args))
        return await asyncio.shield(self._running[number])

    async def _run(self, number: int, verb: str, args: dict[str, Any]) -> bytes:
        journal = self._journal
        try:
            if verb not in replies.VERBS:
                raise ValueError(f"{verb!r} is no verb of a sandbox: {', '.join(replies.VERBS)}")
            result = replies.pack_result(await getattr(self.session, verb)(**args))
        except asyncio.CancelledError:
            result = replies.pack_error(SandboxGone(f"sandbox {self.box.name} was taken away while it worked"))
        except Exception as error:
            result = replies.pack_error(error)
        self._running.pop(number, None)
        try:
            if journal is not None:
                journal.result(number, result)
        except OSError as error:  # a repeat must still not run it again
            log.warning("the journal of sandbox %s can't be written: %s", self.box.name, error)
            self._unwritten[number] = result
        return result

    async def _stop_actions(self) -> None:
        running = list(self._running.values())
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=5.0)

    def _drop_journal(self) -> None:
        self._unwritten.clear()
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    async def end(self) -> None:
        """End everything inside, and the tools; the folder is left for `box.discard`. Safe twice."""
        self._key = ""
        await self.box.kill()  # before the tools: they need not wait for what runs
        await self._stop_actions()
        try:
            await self.session.close()
        except Exception:
            log.warning(
                "the tools of sandbox %s did not end well; the box goes all the same", self.box.name, exc_info=True
            )
        self._drop_journal()
