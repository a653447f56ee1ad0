"""The sync worker: handlers in threads, for scripts and sync applications.

::

    worker = Worker(engine, tasks, concurrency=10)
    worker.run()                      # until SIGINT or SIGTERM
    worker.run(until_idle=True)       # what is due now, then return

    with Worker(engine, tasks):       # beside the application's own work
        ...

The decisions are the machine's; this is the shell that carries them out with threads. Its twin
for asyncio is ``worker_async``, method by method.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import queue
import threading
import time
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy import Engine

from ._attempts import Attempt
from ._connections import own_engine
from ._core import LANES, Core, Summary, lane_of, settings_of
from ._lane import Lane
from ._listen_thread import listen_in_thread
from ._messages import (
    Abort,
    Broke,
    Claim,
    Command,
    DatabaseCommand,
    Event,
    Finished,
    Interrupt,
    Lease,
    Notified,
    Reason,
    Renew,
    Rest,
    Rested,
    Rouse,
    Settle,
    Start,
    Stop,
    StopRequested,
    Sweep,
    TasksChanged,
    Wait,
)
from ._signals import stop_by_signal
from ._store import describe
from ._target import table_of
from ._threads import Threads
from ._wake import register
from .errors import InvalidArgumentError
from .models import Job

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from typing import Unpack

    from sqlalchemy import Connection

    from .health import Health
    from .settings import WorkerOptions
    from .tasks import Tasks

_log = logging.getLogger("sqlalchemy_jobs")


class Worker:
    """Runs jobs in threads. See the module's docstring and :class:`WorkerSettings`."""

    def __init__(
        self,
        engine: Engine,
        tasks: Tasks,
        *,
        job_class: Any = Job,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """Make a worker for the jobs of *tasks* in the database of *engine*.

        *options* are the fields of :class:`WorkerSettings`. Nothing is connected or started.

        Raises :class:`UnsupportedDatabaseError` and :class:`InvalidArgumentError`.
        """
        if not isinstance(engine, Engine):
            message = f"an Engine is needed, got {type(engine).__name__}; see AsyncWorker"
            raise InvalidArgumentError(message)
        own_engine(engine)  # refuses what cannot work
        self._engine = engine
        self._tasks = tasks
        self._core = Core(engine, table_of(job_class), tasks, settings_of(dict(options)))
        self._inbox: queue.SimpleQueue[Event | Rested | TasksChanged] = queue.SimpleQueue()
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._lanes: dict[str, Lane] = {}
        self._thread: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._running = threading.Lock()

    @property
    def name(self) -> str:
        """The name under which this worker holds its jobs."""
        return self._core.name

    @property
    def zombies(self) -> int:
        """Handlers that still run although their attempts are over."""
        return sum(attempt.aborted is not None for attempt in list(self._attempts.values()))

    def health(self) -> Health:
        """Return how it is, for probes and dashboards.

        Safe from any thread and at any time, before and after a run too. It asks nobody and takes
        microseconds.
        """
        return self._core.health(self.zombies)

    # --- from start to stop --------------------------------------------------------------------

    def run(self, *, until_idle: bool = False) -> Summary:
        """Run until stopped, and return how many attempts ended in which way.

        On the main thread SIGINT and SIGTERM stop it: no further claim, running jobs get the
        shutdown timeout. A second signal ends the process at once. With *until_idle* it returns
        when nothing is due and nothing runs.

        Raises :class:`SchemaError` if the table is missing or older than this release. A database
        that cannot be reached is waited for, but with *until_idle* its error is raised at the
        start. What no retry heals, in any of its loops, ends it as a stop does and is raised.
        """
        with self._started(until_idle=until_idle), stop_by_signal(self.stop):
            self._loop()
        return self._core.summary

    def stop(self) -> None:
        """Ask the worker to stop. Returns at once; safe from any thread, and more than once."""
        self._inbox.put(StopRequested())

    def __enter__(self) -> Self:
        """Start in a thread of its own."""
        context = self._started(until_idle=False)
        context.__enter__()
        self._context = context  # not before: it would replace, and so end, the one that runs
        self._thread = threading.Thread(target=self._loop_in_thread, name="jobs", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop, within the shutdown timeout, and raise what ended the worker early, if anything."""
        assert self._thread is not None
        self.stop()
        self._thread.join()
        self._thread = None
        self._context.__exit__(None, None, None)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @contextmanager
    def _started(self, *, until_idle: bool) -> Generator[None, None, None]:
        if self._core.forked:  # what runs is the parent's
            self._running = threading.Lock()
        if not self._running.acquire(blocking=False):
            message = "this worker is running already"
            raise RuntimeError(message)
        core = self._core
        undo: list[Callable[[], None]] = []
        try:
            core.begin(until_idle=until_idle)
            self._inbox = queue.SimpleQueue()
            self._attempts.clear()
            self._threads = Threads(core.settings.concurrency, "jobs-handler")
            self._context_vars = contextvars.copy_context()
            self._lanes = {name: self._new_lane(name) for name in LANES}
            self._check_schema()
            wake = partial(self._inbox.put, Notified())
            undo += [
                register(core.channel, wake),
                self._tasks.watch(partial(self._inbox.put, TasksChanged())),
            ]
            self._listener = listen_in_thread(self._engine, core, self._inbox.put, self._ask)
            undo.append(self._listener.stop)
            yield
        finally:
            if not core.forked:  # in a child the connections are the parent's
                for undo_one in undo:
                    undo_one()
                for lane in self._lanes.values():
                    lane.close()
                self._threads.close()
            core.end()
            self._running.release()

    def _check_schema(self) -> None:
        """Refuse a wrong schema at once; a database that is away is waited for."""
        answer: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._lanes["claims"].submit(lambda _: None, answer.put)
        try:
            result = answer.get(timeout=self._core.machine.timing.statement_timeout)
        except queue.Empty:
            result = TimeoutError("no answer from the database")
            self._lanes["claims"].abandon()
            self._lanes["claims"] = self._new_lane("claims")
        self._core.reached(result)

    # --- the loop ------------------------------------------------------------------------------

    def _loop_in_thread(self) -> None:
        try:
            self._loop()
        except BaseException as error:  # noqa: BLE001 - raised again when the worker is left
            _log.critical("worker %s ended: %s", self.name, describe(error))
            self._failure = error

    def _loop(self) -> None:
        events: list[Event | Rested | TasksChanged] = []
        with self._core.running():
            try:
                while True:
                    until = time.monotonic()
                    for command in self._core.handle(events):
                        match command:
                            case Wait(until):
                                pass
                            case Stop():
                                return
                            case _:
                                self._carry_out(command)
                    events = self._next_events(until)
            finally:
                self._leave_attempts()

    def _next_events(self, until: float) -> list[Event | Rested | TasksChanged]:
        """Wait for an event, and take along all that are there: they are decided together."""
        events: list[Event | Rested | TasksChanged] = []
        try:
            event = self._inbox.get(timeout=max(0.0, until - time.monotonic()))
            while True:
                events.append(event)
                event = self._inbox.get_nowait()
        except queue.Empty:
            return events

    def _carry_out(self, command: Command | Rest | Rouse) -> None:
        match command:
            case Start(lease):
                self._start(lease)
            case Abort():
                self._abort(command)
            case Interrupt(hanging):
                self._interrupt(hanging)
            case Claim() | Settle() | Renew() | Sweep():
                self._submit(command)
            case Rest():
                self._listener.rest()
            case Rouse():
                self._listener.rouse()
            case _:
                pass

    # --- database commands ---------------------------------------------------------------------

    def _submit(self, command: DatabaseCommand) -> None:
        self._lanes[lane_of(command)].submit(
            lambda connection: self._core.store.perform(connection, command),
            lambda answer: self._answered(command, answer),
        )

    def _ask(
        self, work: Callable[[Connection], Any], done: Callable[[Any], None], within: float
    ) -> None:
        self._lanes["leases"].submit(work, done, within)

    def _answered(self, command: DatabaseCommand, answer: Any) -> None:
        if isinstance(answer, BaseException):
            self._inbox.put(Broke(command, describe(answer), answer))
        else:
            self._inbox.put(answer)

    def _interrupt(self, command: DatabaseCommand) -> None:
        name = lane_of(command)
        waiting = self._lanes[name].abandon()
        self._lanes[name] = self._new_lane(name, early=True)
        for submitted in waiting:  # a renewal behind a sweep that hangs must not share its fate
            self._lanes[name].submit(*submitted)
        self._inbox.put(Broke(command, "TimeoutError: no answer from the database"))

    def _new_lane(self, name: str, *, early: bool = False) -> Lane:
        engine = own_engine(self._engine)
        return Lane(engine, self._core.prepare, f"jobs-{name}", early=early)

    # --- attempts ------------------------------------------------------------------------------

    def _start(self, lease: Lease) -> None:
        attempt = Attempt(lease, self._core.tasks.get(lease.task), self._core.settings)
        self._attempts[lease.key] = attempt
        context = self._context_vars.copy()
        try:
            self._threads.run(lambda: context.run(self._run_attempt, attempt))
        except RuntimeError as error:  # the system has no thread left
            self._end(attempt, error)

    def _run_attempt(self, attempt: Attempt) -> None:
        """Run one handler, in its own thread. Any BaseException is an outcome."""
        error: BaseException | None = None
        try:
            job = attempt.begin()
            if attempt.task.is_async:
                error = asyncio.run(self._run_coroutine(attempt))
            else:
                attempt.check_returned(attempt.task.handler(job))
        except BaseException as raised:  # noqa: BLE001 - SystemExit and its like are outcomes too
            error = raised
        self._end(attempt, error)

    def _end(self, attempt: Attempt, error: BaseException | None) -> None:
        finished = Finished(attempt.end(error))
        self._attempts.pop(attempt.lease.key, None)  # a zombie of an earlier run is in no list
        self._inbox.put(finished)

    @staticmethod
    async def _run_coroutine(attempt: Attempt) -> BaseException | None:
        loop, task = asyncio.get_running_loop(), asyncio.current_task()
        assert task is not None

        def cancel() -> None:
            with suppress(RuntimeError):  # the loop is closed: the handler has just ended
                loop.call_soon_threadsafe(task.cancel)

        attempt.on_abort(cancel)
        try:
            result = attempt.task.handler(attempt.job)
            if result is not None:
                await result
        except BaseException as raised:  # noqa: BLE001 - taken here, for its traceback's sake
            return raised
        return None

    def _abort(self, command: Abort) -> None:
        attempt = self._attempts.get(command.lease.key)
        if attempt is not None:
            attempt.abort(command.reason)

    def _leave_attempts(self) -> None:
        """Tell the handlers that were not told yet, for an error ended the loop."""
        for attempt in list(self._attempts.values()):
            if attempt.aborted is None:
                attempt.abort(Reason.SHUTDOWN)
