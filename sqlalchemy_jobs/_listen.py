"""LISTEN on a connection of its own: what the listeners of both workers know and say.

A listener subscribes to the channel of the jobs table and to one of its own, over which it proves
itself: a nonce sent through the worker's ordinary connection must come back. That one test finds a
dead network path, a server that hangs and a pooler in transaction mode, which accepts LISTEN and
delivers nothing. What does not prove itself is replaced, with growing pauses, and the worker polls
meanwhile.

The same connection holds the mark of a resting worker (see ``sqltypes.told``), so the mark ends
with it, whatever ends it.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from ._cures import Defect, is_hopeless
from ._messages import ListenerChanged, Notified, Rested, Tick
from ._store import describe
from .sqltypes import MARK, SILENT, bucket_of, lock_key

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sqlalchemy import Connection, Engine

    from ._core import Core
    from ._messages import Event

    Post = Callable[[Event | Rested], object]
    Steps = Generator[tuple[str, list[Any]], Any, None]
    Request = Callable[[], Steps]
    Ask = Callable[[Callable[[Connection], Any], Callable[[Any], None], float], object]

PROVE_EVERY: Final = 24.0
ANSWER_WITHIN: Final = 5.0
"""Seconds. Together they notice a silent connection within 30 s at less than three statements a
minute."""

PROVE_AGAIN_AFTER: Final = 1.0
"""Seconds after a proof that the ordinary connection failed to send, which was silent itself and
has been replaced: what silenced one may have silenced the other."""

_MARK: Final = lock_key("CAST(%s AS text)", MARK, "bucket")
_SILENT: Final = lock_key("CAST(%s AS text)", SILENT, "bucket")
_GIVEN: Final = "FROM unnest(CAST(%s AS int[])) AS bucket"
_BUCKETS: Final = (
    f"SELECT array_agg(DISTINCT {bucket_of('task')}) FROM unnest(CAST(%s AS text[])) AS task"
)
_TAKE_MARKS: Final = (
    f"SELECT array_agg(bucket) FROM (SELECT pg_try_advisory_lock_shared({_MARK}) AS taken, bucket"
    f" {_GIVEN}) AS marks WHERE taken"
)
_DROP_MARKS: Final = f"SELECT count(pg_advisory_unlock_shared({_MARK})) {_GIVEN}"
_IS_QUIET: Final = (
    "SELECT count(*) = count(free) FROM (SELECT CASE WHEN pg_try_advisory_lock(key)"
    f" THEN pg_advisory_unlock(key) END AS free FROM (SELECT {_SILENT} AS key {_GIVEN}) AS keys)"
    " AS locks"
)

PROOFS_OF_THE_SUSPECT: Final = 3
"""After nothing arrived: through a pooler one notification may arrive by luck."""

STAY: Final = "SET idle_session_timeout = 0"
"""A listener does nothing but be idle."""

LONGEST_PAUSE: Final = 30.0
LONGEST_SILENT_PAUSE: Final = 300.0


class SilentError(ConnectionError):
    """LISTEN was accepted and nothing arrives."""


class Listening:
    """What both kinds of listener know: their channels, and what they have said already."""

    def __init__(self, core: Core, post: Post) -> None:
        self.core = core
        self.post = post
        self.channel = core.channel
        self.own_channel = f"jobs.probe.{uuid4().hex}"
        self.nonce = ""
        self.marked: set[int] = set()  # the buckets whose mark of a resting worker is held
        self.proofs = 1  # how often a new connection must prove itself
        self._failures = 0
        self._was_up: bool | None = None
        self._never_up = True
        self._vitals = core.vitals

    def unavailable(self, engine: Engine) -> str | None:
        """Return why there is no LISTEN on this engine, or None."""
        if not self.core.settings.listen:
            return "switched off"
        if self.core.until_idle:
            return "it runs only until nothing is due"
        if engine.dialect.name != "postgresql":
            return f"{engine.dialect.name} has no notifications; it polls"
        if engine.dialect.driver not in ("asyncpg", "psycopg", "psycopg_async"):
            return f"not supported with {engine.dialect.driver}; it polls"
        return None

    def statements(self) -> list[str]:
        """Return the statements that set a connection up."""
        return [STAY, *(sql_listen(channel) for channel in (self.channel, self.own_channel))]

    def heard(self, channel: str, payload: str) -> bool:
        """Take a notification; True if it is the nonce that was sent."""
        if channel == self.own_channel:
            if payload != self.nonce:
                return False
            self._vitals.loops["listen"].succeed(time.monotonic())
            return True
        # The payload is the task; foreign ones are no reason to look.
        if not payload or payload in self.core.tasks:
            self.post(Notified())
        return False

    def new_probe(self) -> Callable[[Connection], None]:
        """Return what sends the next nonce."""
        self.nonce = nonce = uuid4().hex
        return lambda connection: self.core.store.notify(connection, self.own_channel, nonce)

    @staticmethod
    def was_sent(answer: Any) -> bool:
        """Return whether the nonce was sent. Raises what kept it from that for good."""
        if isinstance(answer, Defect):
            raise answer
        return not isinstance(answer, BaseException)

    def resting(self) -> Steps:
        """Take the marks of this worker's tasks, and ask whether all is quiet.

        Yields (statement, parameters) and is sent the value that each gives, if any. Quiet means
        that no enqueuer is left that saw no mark and has not committed yet.
        """
        tasks = list(self.core.tasks)
        buckets: list[int] = (yield _BUCKETS, [tasks]) or []
        missing = [bucket for bucket in buckets if bucket not in self.marked]
        if missing:
            self.marked.update((yield _TAKE_MARKS, [self.channel, missing]) or [])
        quiet = self.marked.issuperset(buckets) and (yield _IS_QUIET, [self.channel, buckets])
        self.post(Rested(quiet=quiet is not False))
        # So that people who look at the server's activity see what the connection is for.
        yield sql_listen(self.channel), []

    def rousing(self) -> Steps:
        """Give up the marks; as :meth:`resting`."""
        marked, self.marked = sorted(self.marked), set()
        if marked:
            yield _DROP_MARKS, [self.channel, marked]
            yield sql_listen(self.channel), []

    def up(self) -> None:
        """Report that notifications arrive."""
        if self._was_up is False:
            self.core.log.healed("listen", self._failures)
        self._failures = 0
        self._was_up, self._never_up = True, False
        self._vitals.listening = True
        self.post(ListenerChanged(up=True))

    def down(self, error: BaseException) -> float:
        """Report that they do not, and return the pause in seconds before another try."""
        silent = isinstance(error, SilentError)
        if silent:
            self.proofs = PROOFS_OF_THE_SUSPECT
        why = "notifications do not arrive; it polls" if silent else describe(error)
        if silent and self._never_up:
            self.core.log.never_listening()
        else:
            self.core.log.not_listening(f"the listener was lost and is being replaced: {why}")
        vital = self._vitals.loops["listen"]
        if vital.fail(why, time.monotonic(), hopeless=is_hopeless(error)):
            self.doom(error)
        self._vitals.listening = False
        if self._was_up is not False:
            self._was_up = False
            self.post(ListenerChanged(up=False, reason=why))
        self._failures += 1
        longest = LONGEST_SILENT_PAUSE if silent else LONGEST_PAUSE
        pause = min(2.0 ** (min(self._failures, 10) - 1), longest)
        return pause * (0.5 + random.random() / 2)  # noqa: S311 - no secret depends on it

    def doom(self, error: BaseException) -> None:
        """Have the worker end with *error*, for there will be no listener any more."""
        self.core.doom("listen", error)
        self.post(Tick())


class Listener(Protocol):
    """What a worker has of its listener. None of it waits."""

    def rest(self) -> None:
        """Take the mark of a resting worker; the answer is a :class:`Rested`."""

    def rouse(self) -> None:
        """Give up the mark."""

    def stop(self) -> None:
        """End it."""


class NoListener:
    """There are no notifications, so nobody rests."""

    def rest(self) -> None:
        pass

    rouse = stop = rest


def sql_listen(channel: str) -> str:
    """Return the statement that subscribes to *channel*, whatever is in its name."""
    quoted = channel.replace('"', '""')
    return f'LISTEN "{quoted}"'
