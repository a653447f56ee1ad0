"""What both workers share beside the machine: names, start-up and bookkeeping.

A shell passes every batch of events through :meth:`Core.handle`, which has them logged, counts
the outcomes and returns the machine's commands.
"""

from __future__ import annotations

import os
import random
import socket
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from . import migrations
from ._bell import Bell
from ._channel import channel_of
from ._connections import autocommit
from ._cures import doubts_schema, is_hopeless, told
from ._joblog import COUNTED, JobLog
from ._machine import Machine, Phase, Timing, kind_of
from ._messages import (
    Abort,
    Broke,
    Claim,
    Claimed,
    Command,
    DatabaseCommand,
    Event,
    Finished,
    ListenerChanged,
    Reason,
    Renew,
    Renewed,
    Rest,
    Rested,
    Rouse,
    Settle,
    Settled,
    Start,
    Stop,
    StopRequested,
    Sweep,
    Swept,
    TasksChanged,
    Wait,
)
from ._store import Store, describe
from ._verdicts import timed_out
from .errors import InvalidArgumentError, SchemaError
from .health import LATE, Health, State, Vitals
from .settings import WorkerSettings

if TYPE_CHECKING:
    from collections.abc import Generator, Sequence

    from sqlalchemy import Connection, Engine, Table

    from .lifecycle import Event as Life
    from .tasks import Tasks


@dataclass(slots=True)
class Summary:
    """How many attempts of a worker's run ended in which way."""

    succeeded: int = 0
    retried: int = 0
    failed: int = 0
    snoozed: int = 0
    released: int = 0
    lost: int = 0

    def count(self, event: Life) -> None:
        """Count an outcome that was recorded."""
        name = COUNTED[event]
        setattr(self, name, getattr(self, name) + 1)

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
        self._take_name()
        self.channel = channel_of(engine, table)
        self.summary = Summary()
        self._said_ready = False
        self.revision: str | None = None
        self.until_idle = False
        self.machine = self._new_machine()
        self.bell = Bell()
        self.vitals = Vitals()
        self.failure: BaseException | None = None  # what ends the run, though it was not stopped
        self._engine = engine
        self._schema_in_doubt = False

    def begin(self, *, until_idle: bool) -> None:
        """Begin a run: a new machine with nothing held."""
        if self.forked:  # the parent may run under that name
            self._take_name()
        self.until_idle = until_idle
        self.summary = Summary()
        self.machine = self._new_machine()
        self.bell = Bell()
        self._said_ready = False
        self.vitals = Vitals()
        self.vitals.active = True
        self.failure = None

    @property
    def forked(self) -> bool:
        """Whether this process was forked from the one whose worker this is, or was until now."""
        return self._process != os.getpid()

    def _take_name(self) -> None:
        self._process = os.getpid()
        self.name = worker_name()
        self.log = JobLog(self.name)
        self.store = Store(self.table, self.tasks, self.settings, self.name)

    @contextmanager
    def running(self) -> Generator[None, None, None]:
        """Go around the shell's loop; at its end raise what ended it, if an error did."""
        try:
            yield
        except Exception as error:  # noqa: BLE001 - raised below
            self.failure = error
        finally:
            if self.failure is not None:
                self.vitals.ended_by = describe(self.failure)
            self.end()
        if self.failure is not None:
            raise self.failure

    def end(self) -> None:
        """End the run."""
        self.vitals.active = False

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
        if self.revision is None or self._schema_in_doubt:
            self.revision = migrations.check_schema(connection, self.table)
            self._schema_in_doubt = False
        return connection

    def reached(self, result: object) -> None:
        """Take the answer to the first look at the database.

        Raises it if it is a :class:`~sqlalchemy_jobs.errors.SchemaError`. A database that is away
        is waited for instead: servers and workers are restarted in any order. Only who wants to
        see what is due now, and return, is told at once.
        """
        if isinstance(result, SchemaError) or (
            isinstance(result, BaseException) and self.until_idle
        ):
            raise told(result)
        if isinstance(result, BaseException):
            self.log.unreachable(describe(result))

    # --- the loop ------------------------------------------------------------------------------

    def handle(
        self, events: Sequence[Event | Rested | TasksChanged]
    ) -> list[Command | Rest | Rouse]:
        """Log and count what *events* say and return what the shell is to do."""
        now = time.monotonic()
        passed, requests = self.bell.handle(events, now)
        for event in passed:
            self._note(event, now)
        if self.failure is not None:
            passed.append(StopRequested())
        commands: list[Command | Rest | Rouse] = [*self.machine.handle(passed, now)]
        for place, command in enumerate(commands):
            match command:
                case Start(lease):
                    self.log.started(lease)
                case Claim():
                    self.bell.claiming(command)
                case Wait(until):
                    if until > self.bell.at:
                        until = self.bell.at
                        commands[place] = Wait(until)
                    self.vitals.turn_by = until
                case Abort(lease, reason):
                    self.summary.lost += reason is Reason.LEASE_LOST
                    self.log.aborted(lease, reason)
                case Stop(abandoned) if abandoned:
                    self.log.abandoned(abandoned)
                case _:
                    pass
        return [*requests, *commands]

    def _note(self, event: Event, now: float) -> None:
        match event:
            case Finished():  # by far the most
                pass
            case Settled(refused=refused, recorded=recorded):
                self._succeeded("settle", now)
                for outcome in recorded:
                    self.summary.count(outcome.event)
                    self.log.ended(outcome)
                for outcome in refused:
                    self.summary.lost += 1
                    self.log.refused(outcome)
            case Claimed():
                self._succeeded("claim", now)
            case Renewed():
                self._succeeded("renew", now)
            case Swept(chore):
                self._succeeded(chore, now)
            case Broke():
                self._broke(event, now)
            case ListenerChanged() if not self._said_ready:
                self._said_ready = True
                self.log.ready(
                    self.settings,
                    database=self._engine.url.render_as_string(hide_password=True),
                    revision=self.revision,
                    tasks=len(self.tasks),
                    listener=event,
                )
            case _:
                pass

    def _succeeded(self, loop: str, now: float) -> None:
        failures = self.vitals.loops[loop].succeed(now)
        if failures:
            self.log.healed(loop, failures)

    def _broke(self, event: Broke, now: float) -> None:
        loop, cause = kind_of(event.command), event.cause
        if doubts_schema(cause):
            self._schema_in_doubt = True
        vital = self.vitals.loops[loop]
        doomed = vital.fail(event.error, now, hopeless=is_hopeless(cause))
        self.log.broke(loop, vital.failures, event.error)
        if cause is not None and (
            doomed or (isinstance(cause, SchemaError) and self.revision is None)
        ):
            self.doom(loop, cause)

    def doom(self, loop: str, error: BaseException) -> None:
        """Have the run end with *error*, which no retry of *loop* heals, after an orderly stop."""
        if self.failure is None:
            self.failure = told(error)
            self.log.doomed(loop, describe(self.failure))

    # --- for others to see ---------------------------------------------------------------------

    def health(self, zombies: int) -> Health:
        """Return how the worker is. Safe from any thread."""
        now, vitals, machine = time.monotonic(), self.vitals, self.machine
        unrecorded = machine.unrecorded
        busy = machine.timing.concurrency - machine.free
        loops = {
            name: vital.seen(now, idle=name == "renew" and not busy + unrecorded)
            for name, vital in vitals.loops.items()
        }
        state: State
        if not vitals.active:
            state, busy, unrecorded = "stopped", 0, 0
        elif machine.phase is not Phase.RUNNING:
            state = "stopping"
        else:
            state = "starting" if loops["claim"].age is None else "running"
        late = max(0.0, now - vitals.turn_by) if vitals.active else 0.0
        return Health(
            ok=state == "running"
            and late < LATE
            and not machine.is_swamped
            and not any(loop.failures for name, loop in loops.items() if name != "listen"),
            state=state,
            ended_by=vitals.ended_by,
            loops=loops,
            listening=vitals.active and vitals.listening,
            slots=machine.timing.concurrency,
            busy=busy,
            unrecorded=unrecorded,
            zombies=zombies,
            late=late,
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


LANES: Final = ("claims", "outcomes", "leases")
"""The worker's connections for its statements."""


def lane_of(command: DatabaseCommand) -> str:
    """Return which connection serves *command*.

    Outcomes are recorded while the next jobs are claimed; and renewal must wait for neither.
    """
    if isinstance(command, Settle):
        return "outcomes"
    return "leases" if isinstance(command, Renew | Sweep) else "claims"
