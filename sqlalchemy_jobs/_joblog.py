"""What a worker says: one line an event, with stable ``extra`` keys, and never a payload.

A line about a job carries ``event, job_id, task, attempt, max_attempts, worker, wait_ms`` and
``duration_ms``; one about the worker carries ``event`` and ``worker``.
"""

from __future__ import annotations

import logging
from time import monotonic
from typing import TYPE_CHECKING, Final

from ._messages import Reason
from ._version import __version__
from .lifecycle import Event as Life

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ._messages import Lease, ListenerChanged, Outcome
    from .settings import WorkerSettings

COUNTED: Final = {
    Life.SUCCEED: "succeeded",
    Life.RETRY: "retried",
    Life.FAIL: "failed",
    Life.SNOOZE: "snoozed",
    Life.RELEASE: "released",
}
"""What the outcomes are called, in the log and in a summary."""

SAY_EVERY: Final = 30.0
"""Seconds between lines that say that the same loop of a worker fails."""

_LEVELS: Final = {Life.RETRY: logging.WARNING, Life.FAIL: logging.ERROR}

_log = logging.getLogger("sqlalchemy_jobs")


class JobLog:
    """The log of one worker."""

    def __init__(self, worker: str) -> None:
        self._worker = worker
        self._said_at: dict[str, float] = {}  # by loop: when its latest failure was told
        self._down: set[str] = set()  # the loops of which it was told that they fail

    # --- about a job ---------------------------------------------------------------------------

    def started(self, lease: Lease) -> None:
        """A handler starts."""
        self._job(logging.INFO, "started", lease, "started")

    def ended(self, outcome: Outcome) -> None:
        """An outcome was recorded."""
        level = _LEVELS.get(outcome.event, logging.INFO)
        if not _log.isEnabledFor(level):
            return
        name = COUNTED[outcome.event]
        said = {
            Life.RETRY: f"failed, next attempt in {outcome.delay:g} s",
            Life.FAIL: "failed for good",
            Life.SNOOZE: f"snoozed for {outcome.delay:g} s",
        }.get(outcome.event, name)
        if outcome.error:
            said += f"\n{outcome.error}"
        self._job(level, name, outcome.lease, said, outcome.duration)

    def refused(self, outcome: Outcome) -> None:
        """An outcome was not recorded, for the row is no longer this attempt's."""
        said = (
            f"its outcome ({outcome.event}) was dropped: the lease was lost, or it had been "
            "recorded before"
        )
        self._job(logging.WARNING, "refused", outcome.lease, said, outcome.duration)

    def aborted(self, lease: Lease, reason: Reason) -> None:
        """A handler is told that its attempt is no longer wanted."""
        said = {
            Reason.TIMEOUT: f"ran out of its {lease.timeout or 0:g} s",
            Reason.LEASE_LOST: "lost its lease; whatever it still does is not recorded",
            Reason.SHUTDOWN: "was told to end: the worker is stopping",
        }
        level = logging.INFO if reason is Reason.SHUTDOWN else logging.WARNING
        self._job(level, reason.replace(" ", "_"), lease, said[reason])

    def _job(
        self, level: int, event: str, lease: Lease, said: str, duration: float | None = None
    ) -> None:
        if not _log.isEnabledFor(level):
            return
        _log.log(
            level,
            "job %s (%s), attempt %s of %s: %s",
            lease.job_id,
            lease.task,
            lease.attempt,
            lease.max_attempts,
            said,
            extra={
                "event": event,
                "job_id": lease.job_id,
                "task": lease.task,
                "attempt": lease.attempt,
                "max_attempts": lease.max_attempts,
                "worker": self._worker,
                "wait_ms": round(lease.waited * 1000, 3),
                "duration_ms": None if duration is None else round(duration * 1000, 3),
            },
        )

    # --- about the worker ----------------------------------------------------------------------

    def ready(
        self,
        settings: WorkerSettings,
        *,
        database: str,
        revision: str | None,
        tasks: int,
        listener: ListenerChanged,
    ) -> None:
        """Say in one line what runs, on what, and with which bounds."""
        timeout = settings.default_timeout
        bound = f"{timeout:g} s" if timeout else "none"
        if settings.timeout is None:
            bound += " (the default: none was given)"
        listening = "on" if listener.up else f"off ({listener.reason})"
        self._say(
            logging.INFO,
            "ready",
            f"ready: sqlalchemy-jobs {__version__} on {database}, "
            f"schema revision {revision or 'not known yet'}, {tasks} tasks, "
            f"{settings.concurrency} slots, LISTEN {listening}, attempt timeout {bound}, "
            f"visibility timeout {settings.visibility_timeout:g} s, "
            f"shutdown timeout {settings.shutdown_timeout:g} s",
        )
        if not tasks:
            self._say(logging.WARNING, "no_tasks", "has no tasks: it will run nothing")

    def unreachable(self, error: str) -> None:
        """The database cannot be reached at the start."""
        said = f"cannot reach its database yet and goes on trying: {error}"
        self._say(logging.WARNING, "unreachable", said)

    def broke(self, loop: str, failures: int, error: str) -> None:
        """A loop failed: told once at error level, then rarely, however often it comes and goes."""
        level = self._may_tell(loop)
        if level is not None:
            self._say(level, "broke", f"{loop} failed ({failures} in a row): {error}", loop)

    def not_listening(self, said: str) -> None:
        """The listener failed: told likewise."""
        level = self._may_tell("listen")
        if level is not None:
            self._say(level, "not_listening", said, "listen")

    def never_listening(self) -> None:
        """Notifications never arrived: told once, for a pooler will not change its mind."""
        if "listen" in self._down:
            return
        self._down.add("listen")
        said = (
            "notifications do not arrive, so it polls. A pooler in transaction mode, such as "
            "PgBouncer, accepts LISTEN and delivers nothing: give the server's own address as "
            "direct_url= or DATABASE_DIRECT_URL"
        )
        self._say(logging.WARNING, "not_listening", said, "listen")

    def healed(self, loop: str, failures: int) -> None:
        """A loop works again, if it was told that it did not."""
        if loop in self._down:
            self._down.discard(loop)
            said = f"{loop} works again after {failures} failures"
            self._say(logging.WARNING, "healed", said, loop)

    def doomed(self, loop: str, error: str) -> None:
        """A loop will not work again."""
        said = f"{loop} fails for good, so it stops: {error}"
        self._say(logging.CRITICAL, "doomed", said, loop)

    def _may_tell(self, loop: str) -> int | None:
        """Return at which level a failure is told, or None if it was told a moment ago."""
        now = monotonic()
        if now < self._said_at.get(loop, now - SAY_EVERY) + SAY_EVERY:
            return None
        self._said_at[loop] = now
        level = logging.WARNING if loop in self._down else logging.ERROR
        self._down.add(loop)
        return level

    def abandoned(self, leases: Sequence[Lease]) -> None:
        """The worker stops while handlers run."""
        some = ", ".join(f"{lease.job_id} ({lease.task})" for lease in leases[:10])
        said = f"stopped while {len(leases)} attempts had not ended: {some}"
        self._say(logging.WARNING, "abandoned", said)

    def _say(self, level: int, event: str, said: str, command: str | None = None) -> None:
        extra = {"event": event, "worker": self._worker}
        if command is not None:
            extra["command"] = command
        _log.log(level, "worker %s: %s", self._worker, said, extra=extra)
