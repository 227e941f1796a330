"""One live sandbox of a host: who may use it, its numbered actions, each run once, and the journal of its RUN stage."""

from __future__ import annotations

import asyncio
import hmac
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from pipeline.errors import SandboxError, SandboxGone
from workers.canary import Canary
from workers.sandbox import replies
from workers.sandbox.box import Box
from workers.sandbox.journal import Journal
from workers.sandbox.replies import Fenced
from workers.sandbox.tools.session import Session

log = logging.getLogger(__name__)

STOP_SECONDS = 5.0
"""For an action to end when its stage does."""


class Live:
    """A box with its tools. `id`, `token`: the rollout, and the INIT attempt that made it; `text`: its reference."""

    def __init__(
        self, box: Box, session: Session, *, id: str, token: str, lane: str, canary: Canary | None = None
    ) -> None:
        self.box, self.session = box, session
        self.id, self.token, self.lane = id, token, lane
        self._canary = canary
        self.reference: dict[str, Any] = {}
        self.text = ""
        self._opener = ("", "")
        """Stage and lease token of the attempt that may use it; what it shows for that is `_key`."""
        self._key = ""
        self._opening = asyncio.Lock()
        self.over = False
        """It ends, or has ended."""
        self._journal: Journal | None = None
        self._running: dict[int, asyncio.Task[bytes]] = {}
        """Number -> an action of this stage that has not ended; another stage has numbers of its own."""

    # -- who may use it ----------------------------------------------------------------------------------------------

    def may(self, key: str) -> bool:
        """Whether `key` is the present opener's; compared in constant time."""
        return bool(self._key) and hmac.compare_digest(key.encode("utf-8", "replace"), self._key.encode())

    async def open(self, stage: str, token: str, *, resume: bool) -> tuple[str, list[bytes]]:
        """Make the attempt that holds `token` the only user: its key, and the turns that it may replay.

        Raises SandboxGone where an earlier RUN attempt has touched the sandbox and this one can't go on from it.
        """
        async with self._opening:  # a request that is repeated waits for what its first one does
            if self.over:
                raise SandboxGone(self._gone())
            if self._opener != (stage, token):
                self._key = ""  # whatever comes of it, the attempt before is fenced from here on
                try:
                    await self._become(stage, resume)
                except (OSError, SandboxError) as error:
                    await self._settled()
                    if self.over:
                        raise SandboxGone(self._gone()) from error
                    if isinstance(error, SandboxError):
                        raise
                    raise SandboxError(self._unwritable(error)) from error
                self._opener, self._key = (stage, token), secrets.token_hex(32)
            try:
                return self._key, self._journal.all_turns() if self._journal else []
            except OSError as error:
                raise SandboxGone(f"the journal of sandbox {self.box.name} can't be read: {error}") from error

    async def _become(self, stage: str, resume: bool) -> None:
        if stage == "run" and self._opener[0] == "run":
            if not resume or self._journal is None:
                raise SandboxGone(f"an earlier attempt has acted in sandbox {self.box.name}: this one starts over")
            return
        await self._stop_actions()
        await self.session.fresh()
        self._drop_journal()
        self._journal = Journal(self.box.folder / "journal")

    def _gone(self) -> str:
        return f"sandbox {self.box.name} does not exist any more on this host"

    def _unwritable(self, error: OSError) -> str:
        return f"the journal of sandbox {self.box.name} can't be written: {error}; is the disk full?"

    # -- actions -----------------------------------------------------------------------------------------------------

    async def act(self, number: int, verb: str, args: dict[str, Any], turns: Sequence[bytes], key: str) -> bytes:
        """Do action `number` once; a repeat gets the stored result, or waits for the one that is running.

        The packed reply. It goes on when its caller goes away: the next attempt of the rollout asks for it.
        """
        journal, running = self._journal, self._running
        if self.over:
            return replies.pack_error(SandboxGone(self._gone()))
        if not self.may(key) or journal is None:
            return replies.pack_error(Fenced(f"another attempt uses sandbox {self.box.name} now"))
        asked = replies.digest(verb, args)
        if journal.digests.get(number, asked) != asked:
            why = (
                f"action {number} was another one in the attempt before: the handler can't be replayed, it starts over"
            )
            return replies.pack_error(SandboxGone(why))
        try:
            stored = journal.result_of(number)
            if stored is not None:
                return stored
            if number not in running:
                for turn in turns:
                    journal.turn(turn)
                journal.action(number, asked)
                running[number] = asyncio.create_task(self._run(number, verb, args, journal, running))
        except OSError as error:
            return replies.pack_error(SandboxError(self._unwritable(error)))
        return await asyncio.shield(running[number])

    async def _run(
        self, number: int, verb: str, args: dict[str, Any], journal: Journal, running: dict[int, asyncio.Task[bytes]]
    ) -> bytes:
        """The action itself. What outlives its stage touches nothing of the next one's: it has its own two."""
        try:
            if verb not in replies.VERBS:
                raise ValueError(f"{verb!r} is no verb of a sandbox: {', '.join(replies.VERBS)}")
            result = replies.pack_result(await getattr(self.session, verb)(**args))
        except asyncio.CancelledError:
            result = replies.pack_error(SandboxGone(f"sandbox {self.box.name} was taken away while it worked"))
        except Exception as error:
            result = replies.pack_error(error)
        await self._settled()
        if self.over:  # what it saw is how the sandbox ended
            result = replies.pack_error(SandboxGone(self._gone()))
        journal.result(number, result)
        running.pop(number, None)
        return result

    async def _settled(self) -> None:
        """Where a signal to the whole job ended what ran here, `over` says so after this."""
        if self._canary is not None:
            await self._canary.settled()

    async def _stop_actions(self) -> None:
        running, self._running = list(self._running.values()), {}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running, timeout=STOP_SECONDS)

    def _drop_journal(self) -> None:
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    async def end(self) -> None:
        """End everything inside, and the tools; the folder is left for `box.discard`. Safe twice.

        Raises SandboxError for a process that does not end; the tools and the journal are closed all the same.
        """
        self.over, self._key = True, ""
        try:
            await self.box.kill()  # before the tools: they need not wait for what runs
        finally:
            await self._stop_actions()
            self._drop_journal()
            try:
                await self.session.close()
            except Exception:
                log.warning(
                    "the tools of sandbox %s did not end well; the box goes all the same", self.box.name, exc_info=True
                )
