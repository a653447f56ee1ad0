"""The async worker: coroutines on the running loop, ``def`` handlers in threads.

::

    @asynccontextmanager
    async def lifespan(app):
        async with AsyncWorker(engine, tasks, concurrency=20):
            yield

    await AsyncWorker(engine, tasks).run()                  # until SIGINT or SIGTERM
    await AsyncWorker(engine, tasks).run(until_idle=True)   # what is due now, then return

The decisions are the machine's; this is the shell that carries them out with tasks. Its twin for
threads is ``worker``, method by method.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Self

from sqlalchemy.ext.asyncio import AsyncEngine

from ._attempts import Attempt
from ._connections import own_engine
from ._core import LANES, Core, Summary, lane_of, settings_of
from ._lane_async import Lane
from ._listen_async import listen_in_task
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
from ._watchdog import Watchdog
from .errors import InvalidArgumentError
from .models import Job

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Callable
    from typing import Unpack

    from sqlalchemy import Connection

    from .health import Health
    from .settings import WorkerOptions
    from .tasks import Tasks

_log = logging.getLogger("sqlalchemy_jobs")


class AsyncWorker:
    """Runs jobs on an event loop. See the module's docstring and :class:`WorkerSettings`."""

    def __init__(
        self,
        engine: AsyncEngine,
        tasks: Tasks,
        *,
        job_class: Any = Job,
        **options: Unpack[WorkerOptions],
    ) -> None:
        """Make a worker for the jobs of *tasks* in the database of *engine*.

        *options* are the fields of :class:`WorkerSettings`. Nothing is connected or started.

        Raises :class:`UnsupportedDatabaseError` and :class:`InvalidArgumentError`.
        """
        if not isinstance(engine, AsyncEngine):
            message = f"an AsyncEngine is needed, got {type(engine).__name__}; see Worker"
            raise InvalidArgumentError(message)
        own_engine(engine.sync_engine)  # refuses what cannot work
        self._engine = engine
        self._tasks = tasks
        table = table_of(job_class)
        self._core = Core(engine.sync_engine, table, tasks, settings_of(dict(options)))
        self._events: list[Event | Rested | TasksChanged] = []
        self._waiter: asyncio.Future[None] | None = None
        self._attempts: dict[tuple[int, int], Attempt] = {}
        self._lanes: dict[str, Lane] = {}
        self._running = False
        self._main: asyncio.Task[None] | None = None
        self._failure: BaseException | None = None

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

    async def run(self, *, until_idle: bool = False) -> Summary:
        """Run until stopped, and return how many attempts ended in which way.

        On the main thread SIGINT and SIGTERM stop it: no further claim, running jobs get the
        shutdown timeout. A second signal ends the process at once. With *until_idle* it returns
        when nothing is due and nothing runs. Cancelling it stops it in the same bounded way.

        Raises :class:`SchemaError` if the table is missing or older than this release. A database
        that cannot be reached is waited for, but with *until_idle* its error is raised at the
        start. What no retry heals, in any of its loops, ends it as a stop does and is raised.
        """
        async with self._started(until_idle=until_idle):
            with stop_by_signal(self.stop):
                main = asyncio.get_running_loop().create_task(self._loop(), name="jobs")
                try:
                    await asyncio.shield(main)
                except asyncio.CancelledError:
                    if not main.done():
                        self.stop()
                        await main
                    raise
        return self._core.summary

    def stop(self) -> None:
        """Ask the worker to stop. Returns at once; safe from any thread, and more than once."""
        self._post_from_anywhere(StopRequested())

    async def __aenter__(self) -> Self:
        """Start in a task of the running loop."""
        context = self._started(until_idle=False)
        await context.__aenter__()
        self._context = context  # not before: it would replace, and so end, the one that runs
        self._main = asyncio.get_running_loop().create_task(self._loop_in_task(), name="jobs")
        return self

    async def __aexit__(self, *error: object) -> None:
        """Stop, within the shutdown timeout, and raise what ended the worker early, if anything."""
        assert self._main is not None
        self.stop()
        try:
            await self._main
        finally:
            self._main = None
            await self._context.__aexit__(None, None, None)
        if self._failure is not None:
            failure, self._failure = self._failure, None
            raise failure

    @asynccontextmanager
    async def _started(self, *, until_idle: bool) -> AsyncGenerator[None, None]:
        if self._running and not self._core.forked:  # else what runs is the parent's
            message = "this worker is running already"
            raise RuntimeError(message)
        self._running = True
        core = self._core
        undo: list[Callable[[], None]] = []
        try:
            core.begin(until_idle=until_idle)
            self._event_loop = asyncio.get_running_loop()
            self._events = []
            self._attempts = {}
            self._threads = Threads(core.settings.concurrency, "jobs-handler")
            self._context_vars = contextvars.copy_context()
            self._lanes = {name: self._new_lane(name) for name in LANES}
            await self._check_schema()
            wake = partial(self._post_from_anywhere, Notified())
            self._listener = listen_in_task(self._engine, core, self._post, self._ask)
            undo += [
                register(core.channel, wake),
                self._tasks.watch(partial(self._post_from_anywhere, TasksChanged())),
                self._listener.stop,
                Watchdog(self._engine, core, self._post_from_anywhere, self._culprit).stop,
            ]
            yield
        finally:
            for undo_one in undo:
                undo_one()
            for lane in self._lanes.values():
                await lane.close()
            self._threads.close()
            core.end()
            self._running = False

    async def _check_schema(self) -> None:
        """Refuse a wrong schema at once; a database that is away is waited for."""
        answer: asyncio.Future[object] = self._event_loop.create_future()
        self._lanes["claims"].submit(lambda _: None, answer.set_result)
        try:
            async with asyncio.timeout(self._core.machine.timing.statement_timeout):
                result = await answer
        except TimeoutError as error:
            result = error
            answer.cancel()
            self._lanes["claims"].abandon()
            self._lanes["claims"] = self._new_lane("claims")
        self._core.reached(result)

    # --- the loop ------------------------------------------------------------------------------

    async def _loop_in_task(self) -> None:
        try:
            await self._loop()
        except Exception as error:  # noqa: BLE001 - raised again when the worker is left
            _log.critical("worker %s ended: %s", self.name, describe(error))
            self._failure = error

    async def _loop(self) -> None:
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
                    events = await self._next_events(until)
            finally:
                self._leave_attempts()

    async def _next_events(self, until: float) -> list[Event | Rested | TasksChanged]:
        """Wait for an event, and take along all that are there: they are decided together."""
        if not self._events:
            self._waiter = self._event_loop.create_future()
            delay = max(0.0, until - time.monotonic())
            timer = self._event_loop.call_later(delay, self._ring)
            await self._waiter
            timer.cancel()
        events, self._events = self._events, []
        return events

    def _post(self, event: Event | Rested | TasksChanged) -> None:
        self._events.append(event)
        self._ring()

    def _ring(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _post_from_anywhere(self, event: Event | Rested | TasksChanged) -> None:
        if self._running:
            # Also from the loop's own thread: a signal's handler interrupts the loop's sleep
            # there, and only this ends it.
            with suppress(RuntimeError):  # the loop is closed: nobody is left to be told
                self._event_loop.call_soon_threadsafe(self._post, event)

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
            self._post(Broke(command, describe(answer), answer))
        else:
            self._post(answer)

    def _interrupt(self, command: DatabaseCommand) -> None:
        name = lane_of(command)
        waiting = self._lanes[name].abandon()
        self._lanes[name] = self._new_lane(name, early=True)
        for submitted in waiting:  # a renewal behind a sweep that hangs must not share its fate
            self._lanes[name].submit(*submitted)
        self._post(Broke(command, "TimeoutError: no answer from the database"))

    def _new_lane(self, name: str, *, early: bool = False) -> Lane:
        engine = AsyncEngine(own_engine(self._engine.sync_engine))
        return Lane(engine, self._core.prepare, f"jobs-{name}", early=early)

    # --- attempts ------------------------------------------------------------------------------

    def _start(self, lease: Lease) -> None:
        task = self._core.tasks.get(lease.task)
        attempt = Attempt(lease, task, self._core.settings)
        self._attempts[lease.key] = attempt
        context = self._context_vars.copy()
        if task is not None and not task.is_async:
            try:
                self._threads.run(lambda: context.run(self._run_in_thread, attempt))
            except RuntimeError as error:  # the system has no thread left
                self._end(attempt, error)
        else:
            attempt.runner = self._event_loop.create_task(
                self._run_attempt(attempt), context=context
            )
            attempt.on_abort(attempt.runner.cancel)

    async def _run_attempt(self, attempt: Attempt) -> None:
        """Run one handler in its own task. Any BaseException is an outcome."""
        error: BaseException | None = None
        try:
            result = attempt.task.handler(attempt.begin())
            if result is not None:
                await result
        except BaseException as raised:  # noqa: BLE001 - SystemExit and its like are outcomes too
            error = raised
        self._end(attempt, error)

    def _run_in_thread(self, attempt: Attempt) -> None:
        error: BaseException | None = None
        try:
            attempt.check_returned(attempt.task.handler(attempt.begin()))
        except BaseException as raised:  # noqa: BLE001 - SystemExit and its like are outcomes too
            error = raised
        with suppress(RuntimeError):  # the loop is closed: a zombie's result interests nobody
            self._event_loop.call_soon_threadsafe(self._end, attempt, error)

    def _end(self, attempt: Attempt, error: BaseException | None) -> None:
        self._attempts.pop(attempt.lease.key, None)
        self._post(Finished(attempt.end(error)))

    def _abort(self, command: Abort) -> None:
        attempt = self._attempts.get(command.lease.key)
        if attempt is not None:
            attempt.abort(command.reason)

    def _leave_attempts(self) -> None:
        """Tell the handlers that were not told yet, for an error ended the loop; let go of all.

        ``asyncio.run`` waits for every task it knows when the program ends; one that never ends
        would keep the process alive beyond the shutdown timeout.
        """
        for attempt in list(self._attempts.values()):
            if attempt.aborted is None:
                attempt.abort(Reason.SHUTDOWN)
            runner = attempt.runner
            if runner is not None and not runner.done():
                runner.cancel()
                with suppress(Exception):
                    runner._log_destroy_pending = False  # type: ignore[attr-defined]  # noqa: SLF001
                    asyncio._unregister_task(runner)  # noqa: SLF001 - there is no public way

    def _culprit(self, task: asyncio.Task[object] | None) -> str | None:
        for attempt in list(self._attempts.values()):
            if attempt.runner is not None and attempt.runner is task:
                return f"job {attempt.lease.job_id} ({attempt.lease.task})"
        return None
