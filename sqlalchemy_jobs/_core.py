"""What both workers share beside the machine: names, start-up, bookkeeping and the log.

A shell passes every batch of events through :meth:`Core.handle`, which logs what they say,
counts the outcomes and returns the machine's commands.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from . import migrations
from ._channel import channel_of
from ._connections import autocommit, describe
from ._machine import Machine, Timing
from ._messages import (
    Abort,
    Broke,
    Claimed,
    Command,
    DatabaseCommand,
    Event,
    Lease,
    ListenerChanged,
    Outcome,
    Reason,
    Renew,
    Renewed,
    Settle,
    Settled,
    Start,
    Stop,
    Sweep,
    Swept,
)
from ._store import Store
from ._verdicts import timed_out
from ._version import __version__
from .errors import InvalidArgumentError, SchemaError
from .lifecycle import Event as Life
from .settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from sqlalchemy import Connection, Engine, Table

    from .tasks import Tasks

_log = logging.getLogger("sqlalchemy_jobs")

_COUNTED: Final = {
    Life.SUCCEED: "succeeded",
    Life.RETRY: "retried",
    Life.FAIL: "failed",
    Life.SNOOZE: "snoozed",
    Life.RELEASE: "released",
}


@dataclass(slots=True)
class Summary:
    """How many attempts of a worker's run ended in which way."""

    succeeded: int = 0
    retried: int = 0
    failed: int = 0
    snoozed: int = 0
    released: int = 0
    lost: int = 0

    @property
    def attempts(self) -> int:
        """All attempts that ended."""
        return (
            self.succeeded + self.retried + self.failed + self.snoozed + self.released + self.lost
        )


def worker_name() -> str:
    """Return a name for this process's worker that no other will have, not even its successor."""
    return f"{socket.gethostname()[:100]}:{os.getpid()}:{uuid4().hex[:12]}"


class Core:
    """The shared state of one worker. Not safe for threads: the shell's loop owns it."""

    def __init__(
        self, engine: Engine, table: Table, tasks: Tasks, settings: WorkerSettings
    ) -> None:
        self.tasks = tasks
        self.settings = settings
        self.table = table
        self.name = worker_name()
        self.channel = channel_of(engine, table)
        self.store = Store(table, tasks, settings, self.name)
        self.summary = Summary()
        self._said_ready = False
        self.revision: str | None = None
        self.until_idle = False
        self.machine = self._new_machine()
        self._engine = engine
        self._broken: dict[str, int] = {}

    def begin(self, *, until_idle: bool) -> None:
        """Begin a run: a new machine with nothing held."""
        self.until_idle = until_idle
        self.summary = Summary()
        self.machine = self._new_machine()
        self._said_ready = False
        self._broken.clear()

    def _new_machine(self) -> Machine:
        settings = self.settings
        visibility = settings.seconds("visibility_timeout")
        statement = min(30.0, max(1.0, visibility / 3))
        if settings.statement_timeout is not None:
            statement = settings.seconds("statement_timeout")
        timing = Timing(
            concurrency=settings.concurrency,
            visibility_timeout=visibility,
            poll_interval=settings.seconds("poll_interval"),
            max_poll_interval=settings.seconds("max_poll_interval"),
            safety_interval=settings.seconds("safety_interval"),
            recovery_interval=settings.seconds("recovery_interval"),
            prune_interval=settings.seconds("prune_interval"),
            shutdown_timeout=settings.seconds("shutdown_timeout"),
            statement_timeout=statement,
            until_idle=self.until_idle,
        )
        return Machine(
            timing,
            timed_out=lambda lease: timed_out(lease, self.tasks.get(lease.task), settings),
            jitter=random.random,
            now=time.monotonic(),
        )

    def prepare(self, connection: Connection) -> Connection:
        """Set up a connection of the worker's own; the first time, look at the schema too.

        Raises :class:`~sqlalchemy_jobs.errors.SchemaError` if it is missing or too old.
        """
        connection = autocommit(connection)
        if self.revision is None:
            self.revision = migrations.check_schema(connection, self.table)
        return connection

    def reached(self, result: object) -> None:
        """Take the answer to the first look at the database.

        Raises it if it is a :class:`~sqlalchemy_jobs.errors.SchemaError`. A database that is away
        is waited for instead: servers and workers are restarted in any order.
        """
        if isinstance(result, SchemaError):
            raise result
        if isinstance(result, BaseException):
            _log.warning(
                "worker %s cannot reach its database yet and goes on trying: %s",
                self.name,
                describe(result),
                extra={"event": "unreachable", "worker": self.name},
            )

    # --- the loop ------------------------------------------------------------------------------

    def handle(self, events: Sequence[Event]) -> list[Command]:
        """Log and count what *events* say and return the machine's commands."""
        for event in events:
            self._note(event)
        commands = self.machine.handle(events, time.monotonic())
        for command in commands:
            match command:
                case Start(lease):
                    self._log_start(lease)
                case Abort(lease, reason):
                    self._log_abort(lease, reason)
                case Stop(abandoned) if abandoned:
                    _log.warning(
                        "worker %s stopped while %d attempts had not ended: %s",
                        self.name,
                        len(abandoned),
                        ", ".join(f"{a.job_id} ({a.task})" for a in abandoned[:10]),
                        extra={"event": "abandoned", "worker": self.name},
                    )
                case _:
                    pass
        return commands

    def settled(self, command: Settle, event: Settled) -> None:
        """Log and count the outcomes that *event* says are recorded."""
        refused = {outcome.lease.key for outcome in event.refused}
        postponed = {outcome.lease.key for outcome in event.postponed}
        for outcome in command.outcomes:
            if outcome.lease.key in refused:
                self.summary.lost += 1
                self._log_job(
                    logging.WARNING,
                    "refused",
                    outcome.lease,
                    f"its outcome ({outcome.event}) was dropped: the lease was lost, or it "
                    "had been recorded before",
                )
            elif outcome.lease.key not in postponed:
                counter = _COUNTED[outcome.event]
                setattr(self.summary, counter, getattr(self.summary, counter) + 1)
                self._log_outcome(outcome)

    def _note(self, event: Event) -> None:
        match event:
            case Broke(command, error):
                kind = _kind(command)
                failures = self._broken[kind] = self._broken.get(kind, 0) + 1
                # Once at error level, then bounded by the back-off at a lower one.
                _log.log(
                    logging.ERROR if failures == 1 else logging.WARNING,
                    "worker %s: %s failed (%d in a row): %s",
                    self.name,
                    kind,
                    failures,
                    error,
                    extra={"event": "broke", "worker": self.name, "command": kind},
                )
            case Claimed():
                self._healed("claim")
            case Settled():
                self._healed("settle")
            case Renewed():
                self._healed("renew")
            case Swept(chore):
                self._healed(chore)
            case ListenerChanged() if not self._said_ready:
                self._said_ready = True
                self._log_ready(event)
            case _:
                pass

    def _healed(self, kind: str) -> None:
        failures = self._broken.pop(kind, 0)
        if failures:
            _log.warning(
                "worker %s: %s works again after %d failures",
                self.name,
                kind,
                failures,
                extra={"event": "healed", "worker": self.name, "command": kind},
            )

    # --- the log -------------------------------------------------------------------------------

    def _log_ready(self, listener: ListenerChanged) -> None:
        """Say in one line what runs, on what, and with which bounds."""
        settings = self.settings
        timeout = settings.default_timeout
        bound = f"{timeout:g} s" if timeout else "none"
        if settings.timeout is None:
            bound += " (the default: none was given)"
        _log.info(
            "worker %s ready: sqlalchemy-jobs %s on %s, schema revision %s, %d tasks, %d slots, "
            "LISTEN %s, attempt timeout %s, visibility timeout %g s, shutdown timeout %g s",
            self.name,
            __version__,
            self._engine.url.render_as_string(hide_password=True),
            self.revision or "not known yet",
            len(self.tasks),
            settings.concurrency,
            "on" if listener.up else f"off ({listener.reason})",
            bound,
            settings.visibility_timeout,
            settings.shutdown_timeout,
            extra={"event": "ready", "worker": self.name},
        )
        if not len(self.tasks):
            _log.warning("worker %s has no tasks: it will run nothing", self.name)

    def _log_start(self, lease: Lease) -> None:
        if _log.isEnabledFor(logging.INFO):
            self._log_job(logging.INFO, "started", lease, "started")

    def _log_abort(self, lease: Lease, reason: Reason) -> None:
        if reason is Reason.LEASE_LOST:
            self.summary.lost += 1
        said = {
            Reason.TIMEOUT: f"ran out of its {lease.timeout or 0:g} s",
            Reason.LEASE_LOST: "lost its lease; whatever it still does is not recorded",
            Reason.SHUTDOWN: "was told to end: the worker is stopping",
        }
        level = logging.INFO if reason is Reason.SHUTDOWN else logging.WARNING
        self._log_job(level, reason.replace(" ", "_"), lease, said[reason])

    def _log_outcome(self, outcome: Outcome) -> None:
        level = {Life.RETRY: logging.WARNING, Life.FAIL: logging.ERROR}.get(
            outcome.event, logging.INFO
        )
        if not _log.isEnabledFor(level):
            return
        said = _COUNTED[outcome.event]
        if outcome.event is Life.RETRY:
            said = f"failed, next attempt in {outcome.delay:g} s"
        elif outcome.event is Life.FAIL:
            said = "failed for good"
        elif outcome.event is Life.SNOOZE:
            said = f"snoozed for {outcome.delay:g} s"
        if outcome.error:
            said += f"\n{outcome.error}"
        self._log_job(level, _COUNTED[outcome.event], outcome.lease, said, outcome.duration)

    def _log_job(
        self, level: int, event: str, lease: Lease, said: str, duration: float | None = None
    ) -> None:
        extra: dict[str, Any] = {
            "event": event,
            "job_id": lease.job_id,
            "task": lease.task,
            "attempt": lease.attempt,
            "max_attempts": lease.max_attempts,
            "worker": self.name,
            "wait_ms": round(lease.waited * 1000, 3),
            "duration_ms": None if duration is None else round(duration * 1000, 3),
        }
        _log.log(
            level,
            "job %s (%s), attempt %s of %s: %s",
            lease.job_id,
            lease.task,
            lease.attempt,
            lease.max_attempts,
            said,
            extra=extra,
        )


def settings_of(options: dict[str, Any]) -> WorkerSettings:
    """Return the settings that keyword arguments make.

    Raises :class:`InvalidArgumentError` for one that does not exist.
    """
    unknown = sorted(set(options) - set(WorkerSettings.__dataclass_fields__))
    if unknown:
        message = f"a worker has no setting {', '.join(unknown)}"
        raise InvalidArgumentError(message)
    return WorkerSettings(**options)


def lane_of(command: DatabaseCommand) -> str:
    """Return which of the two connections serves *command*.

    Renewal must not wait behind a slow claim, nor a claim behind a chore.
    """
    return "leases" if isinstance(command, Renew | Sweep) else "claims"


def _kind(command: DatabaseCommand) -> str:
    return str(getattr(command, "chore", type(command).__name__.lower()))
