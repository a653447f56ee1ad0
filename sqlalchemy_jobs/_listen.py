"""LISTEN on a connection of its own, per driver.

A listener subscribes to the channel of the jobs table and to one of its own, over which it proves
itself: a nonce sent through the worker's ordinary connection must come back. That one test finds a
dead network path, a server that hangs and a pooler in transaction mode, which accepts LISTEN and
delivers nothing. What does not prove itself is replaced, with growing pauses, and the worker polls
meanwhile.

The same connection holds the mark of a resting worker (see ``sqltypes.told``), so the mark ends
with it, whatever ends it.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import select
import socket
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol
from uuid import uuid4

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from ._connections import cut, direct_url, keep_alive, own_engine
from ._messages import ListenerChanged, Notified, Rested
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
    Ask = Callable[[Callable[[Connection], Any], Callable[[Any], None]], object]

PROVE_EVERY: Final = 24.0
ANSWER_WITHIN: Final = 5.0
"""Seconds. Together they notice a silent connection within 30 s at less than three statements a
minute."""

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

LONGEST_PAUSE: Final = 30.0
LONGEST_SILENT_PAUSE: Final = 300.0

_log = logging.getLogger("sqlalchemy_jobs")


class _SilentError(Exception):
    """LISTEN was accepted and nothing arrives."""


class _Listening:
    """What both kinds of listener know: their channels, and what they have said already."""

    def __init__(self, core: Core, post: Post) -> None:
        self.core = core
        self.post = post
        self.channel = core.channel
        self.own_channel = f"jobs.probe.{uuid4().hex}"
        self.nonce = ""
        self.marked: set[int] = set()  # the buckets whose mark of a resting worker is held
        self._failures = 0
        self._was_up: bool | None = None
        self.proofs = 1  # how often a new connection must prove itself
        self._warned = False

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
        """Return the LISTEN statements."""
        return [sql_listen(channel) for channel in (self.channel, self.own_channel)]

    def heard(self, channel: str, payload: str) -> bool:
        """Take a notification; True if it is the nonce that was sent."""
        if channel == self.own_channel:
            return payload == self.nonce
        # The payload is the task; foreign ones are no reason to look.
        if not payload or payload in self.core.tasks:
            self.post(Notified())
        return False

    def new_probe(self) -> Callable[[Connection], None]:
        """Return what sends the next nonce."""
        self.nonce = nonce = uuid4().hex
        return lambda connection: self.core.store.notify(connection, self.own_channel, nonce)

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
        self._failures = 0
        if self._was_up is False:
            _log.warning("worker %s: notifications arrive again", self.core.name)
        self._was_up = True
        self._warned = False
        self.post(ListenerChanged(up=True))

    def down(self, error: BaseException) -> float:
        """Report that they do not, and return the pause in seconds before another try."""
        silent = isinstance(error, _SilentError)
        if silent:
            self.proofs = PROOFS_OF_THE_SUSPECT
        why = "notifications do not arrive; it polls" if silent else describe(error)
        if not self._warned:
            self._warned = True
            if silent and not self._was_up:
                _log.warning(
                    "worker %s: notifications do not arrive, so it polls. A pooler in transaction "
                    "mode, such as PgBouncer, accepts LISTEN and delivers nothing: give the "
                    "server's own address as direct_url= or DATABASE_DIRECT_URL",
                    self.core.name,
                    extra={"event": "not_listening", "worker": self.core.name},
                )
            else:
                _log.warning(
                    "worker %s: the listener was lost and is being replaced: %s",
                    self.core.name,
                    why,
                    extra={"event": "not_listening", "worker": self.core.name},
                )
        if self._was_up is not False:
            self._was_up = False
            self.post(ListenerChanged(up=False, reason=why))
        self._failures += 1
        longest = LONGEST_SILENT_PAUSE if silent else LONGEST_PAUSE
        pause = min(2.0 ** (min(self._failures, 10) - 1), longest)
        return pause * (0.5 + random.random() / 2)  # noqa: S311 - no secret depends on it


class Listener(Protocol):
    """What a worker has of its listener. None of it waits."""

    def rest(self) -> None:
        """Take the mark of a resting worker; the answer is a :class:`Rested`."""

    def rouse(self) -> None:
        """Give up the mark."""

    def stop(self) -> None:
        """End it."""


class _NoListener:
    """There are no notifications, so nobody rests."""

    def rest(self) -> None:
        pass

    rouse = stop = rest


# --- sync: psycopg in a thread ----------------------------------------------------------------


def listen_in_thread(engine: Engine, core: Core, post: Post, ask: Ask) -> Listener:
    """Listen in a thread. *ask* does a piece of work with the worker's ordinary connection."""
    listening = _Listening(core, post)
    why = listening.unavailable(engine)
    if why is not None:
        post(ListenerChanged(up=False, reason=why))
        return _NoListener()
    listener = _ThreadListener(engine, listening, ask)
    threading.Thread(target=listener.run, name="jobs-listen", daemon=True).start()
    return listener


class _ThreadListener:
    """One thread reads, and does what is asked of the connection in between."""

    def __init__(self, engine: Engine, listening: _Listening, ask: Ask) -> None:
        url = direct_url(engine, listening.core.settings.direct_url)
        self._engine = own_engine(engine) if url is None else create_engine(url, poolclass=NullPool)
        self._listening = listening
        self._ask = ask
        self._stopped = threading.Event()
        self._driver: Any = None
        self._requests: queue.SimpleQueue[Callable[[Any], None]] = queue.SimpleQueue()
        self._wake_in, self._wake_out = socket.socketpair()

    def rest(self) -> None:
        self._request(lambda driver: self._carry_out(driver, self._listening.resting()))

    def rouse(self) -> None:
        self._request(lambda driver: self._carry_out(driver, self._listening.rousing()))

    def stop(self) -> None:
        self._stopped.set()
        self._request(lambda _: None)
        cut(self._driver)

    def _request(self, work: Callable[[Any], None]) -> None:
        self._requests.put(work)
        with suppress(OSError):
            self._wake_in.send(b"x")

    def run(self) -> None:
        while not self._stopped.is_set():
            try:
                with self._engine.connect() as connection:
                    try:
                        self._listen(connection)
                    finally:
                        self._driver = None
                        connection.invalidate()
            except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is the cure
                if not self._stopped.is_set():
                    self._stopped.wait(self._listening.down(error))
            finally:
                with suppress(Exception):
                    self._engine.dispose()
        self._wake_in.close()
        self._wake_out.close()

    def _listen(self, connection: Connection) -> None:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        for statement in self._listening.statements():
            connection.exec_driver_sql(statement)
        self._driver = driver = connection.connection.driver_connection
        keep_alive(driver)
        self._listening.marked.clear()
        while not self._requests.empty():  # asked of the connection before
            self._requests.get()
        self._prove(driver)
        for _ in range(self._listening.proofs - 1):
            self._read(driver, 1.0)
            self._prove(driver)
        self._listening.up()
        while not self._stopped.is_set():
            self._read(driver, PROVE_EVERY)
            self._prove(driver)

    def _read(self, driver: Any, seconds: float) -> bool:
        """Take notifications, and do what is asked, for so long or until the nonce comes back."""
        until = time.monotonic() + seconds
        while not self._stopped.is_set():
            while not self._requests.empty():
                self._requests.get()(driver)
            # Also what came while a request was done: it waits in the driver, not in the socket.
            notices = list(driver.notifies(timeout=0))
            if sum(self._listening.heard(n.channel, n.payload) for n in notices):
                return True
            left = until - time.monotonic()
            if left <= 0:
                break
            if self._requests.empty():
                ready, _, _ = select.select([driver.fileno(), self._wake_out], [], [], left)
                if self._wake_out in ready:
                    self._wake_out.recv(4096)
        return False

    @staticmethod
    def _carry_out(driver: Any, steps: Steps) -> None:
        value = None
        with suppress(StopIteration):
            while True:
                statement, parameters = steps.send(value)
                cursor = driver.execute(statement, parameters)
                value = cursor.fetchone()[0] if cursor.description else None

    def _prove(self, driver: Any) -> None:
        sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ask(self._listening.new_probe(), sent.put)
        try:
            answer = sent.get(timeout=ANSWER_WITHIN)
        except queue.Empty:
            return  # the other connection is in trouble; this one is not to blame
        if isinstance(answer, BaseException) or self._stopped.is_set():
            return
        if not self._read(driver, ANSWER_WITHIN) and not self._stopped.is_set():
            raise _SilentError


# --- async: asyncpg and psycopg ---------------------------------------------------------------


def listen_in_task(engine: AsyncEngine, core: Core, post: Post, ask: Ask) -> Listener:
    """Listen in a task of the running loop. *ask* works with the worker's ordinary connection."""
    listening = _Listening(core, post)
    why = listening.unavailable(engine.sync_engine)
    if why is not None:
        post(ListenerChanged(up=False, reason=why))
        return _NoListener()
    return _TaskListener(engine, listening, ask)


class _TaskListener:
    """A task watches the connection; what is asked of it is done one by one by another."""

    def __init__(self, engine: AsyncEngine, listening: _Listening, ask: Ask) -> None:
        url = direct_url(engine.sync_engine, listening.core.settings.direct_url)
        self._engine = (
            AsyncEngine(own_engine(engine.sync_engine))
            if url is None
            else create_async_engine(url, poolclass=NullPool)
        )
        self._listening = listening
        self._ask = ask
        self._changed = asyncio.Event()
        self._returned = False
        self._lost: BaseException | None = None
        self._requests: asyncio.Queue[Request] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="jobs-listen")

    def rest(self) -> None:
        self._requests.put_nowait(self._listening.resting)

    def rouse(self) -> None:
        self._requests.put_nowait(self._listening.rousing)

    def stop(self) -> None:
        self._task.cancel()

    async def _run(self) -> None:
        while True:
            servant: asyncio.Task[None] | None = None
            driver: _Driver | None = None
            self._lost, self._returned = None, False
            try:
                connection = await self._engine.connect()
                try:
                    raw = await connection.get_raw_connection()
                    found = raw.driver_connection
                    keep_alive(found)
                    driver = _driver(found)(found, self._hear, self._end)
                    await driver.listen(self._listening)
                    self._listening.marked.clear()
                    self._requests = asyncio.Queue()  # nothing that was asked of another one
                    servant = asyncio.create_task(self._serve(driver), name="jobs-listen-requests")
                    await self._watch()
                finally:
                    if servant is not None:
                        servant.cancel()
                    if driver is not None:
                        driver.close()
                    with suppress(Exception):
                        await connection.invalidate()
                        await connection.close()
            except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is the cure
                await asyncio.sleep(self._listening.down(error))

    def _hear(self, channel: str, payload: str) -> None:
        if self._listening.heard(channel, payload):
            self._returned = True
            self._changed.set()

    def _end(self, error: BaseException) -> None:
        self._lost = error
        self._changed.set()

    async def _serve(self, driver: _Driver) -> None:
        try:
            while True:
                steps = (await self._requests.get())()
                value = None
                with suppress(StopIteration):
                    while True:
                        value = await driver.ask(*steps.send(value))
        except Exception as error:  # noqa: BLE001 - the connection is replaced
            self._end(error)

    async def _watch(self) -> None:
        await self._prove()
        for _ in range(self._listening.proofs - 1):
            await self._wait(1.0)
            await self._prove()
        self._listening.up()
        while True:
            await self._wait(PROVE_EVERY)
            await self._prove()

    async def _wait(self, seconds: float) -> None:
        """Wait so long, or until something changed. Raises what ended the connection."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()
        if self._lost is not None:
            raise self._lost

    async def _prove(self) -> None:
        sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._returned = False
        self._ask(
            self._listening.new_probe(),
            lambda answer: None if sent.done() else sent.set_result(answer),
        )
        try:
            # Not wait_for(): before Python 3.12 it loses a cancellation that comes with the answer.
            async with asyncio.timeout(ANSWER_WITHIN):
                answer = await sent
        except TimeoutError:
            return  # the other connection is in trouble; this one is not to blame
        if isinstance(answer, BaseException):
            return
        until = time.monotonic() + ANSWER_WITHIN
        while not self._returned:
            left = until - time.monotonic()
            if left <= 0:
                raise _SilentError
            await self._wait(left)
        if self._lost is None:  # the nonce may have come before the answer that it was sent
            self._changed.clear()


class _Driver(ABC):
    """The few things that the two async drivers do differently."""

    def __init__(
        self, raw: Any, hear: Callable[[str, str], None], end: Callable[[BaseException], None]
    ) -> None:
        self.raw = raw
        self.reader: asyncio.Task[None] | None = None
        self._hear = hear
        self._end = end

    @abstractmethod
    async def listen(self, listening: _Listening) -> None:
        """Subscribe, and report notifications and the connection's end."""

    @abstractmethod
    async def ask(self, statement: str, parameters: list[Any]) -> Any:
        """Return the single value that *statement* gives."""

    def close(self) -> None:
        """End the connection at once; a polite end would wait for a peer that may be gone."""
        if self.reader is not None:
            self.reader.cancel()
        cut(self.raw)


class _Asyncpg(_Driver):
    async def listen(self, listening: _Listening) -> None:
        self.raw.add_termination_listener(self._closed)
        for channel in (listening.channel, listening.own_channel):
            await self.raw.add_listener(channel, self._notified)

    async def ask(self, statement: str, parameters: list[Any]) -> Any:
        for number in range(1, len(parameters) + 1):
            statement = statement.replace("%s", f"${number}", 1)
        return await self.raw.fetchval(statement, *parameters, timeout=ANSWER_WITHIN)

    def _closed(self, connection: object) -> None:  # noqa: ARG002 - the driver's signature
        self._end(ConnectionError("it was closed"))

    def _notified(self, connection: object, pid: int, channel: str, payload: str) -> None:  # noqa: ARG002 - the driver's signature
        self._hear(channel, payload)


class _Psycopg(_Driver):
    async def listen(self, listening: _Listening) -> None:
        await self.raw.set_autocommit(True)
        for statement in listening.statements():
            await self.raw.execute(statement)
        self._resume()

    async def ask(self, statement: str, parameters: list[Any]) -> Any:
        # Reading holds the connection; what arrives meanwhile is kept by the driver.
        if self.reader is not None:
            self.reader.cancel()
            await asyncio.wait({self.reader})
        async with asyncio.timeout(ANSWER_WITHIN):
            cursor = await self.raw.execute(statement, parameters)
            value = (await cursor.fetchone())[0] if cursor.description else None
        self._resume()
        return value

    def _resume(self) -> None:
        self.reader = asyncio.get_running_loop().create_task(self._read(), name="jobs-notifies")

    async def _read(self) -> None:
        try:
            async for notice in self.raw.notifies():
                self._hear(notice.channel, notice.payload)
            self._end(ConnectionError("it was closed"))
        except Exception as error:  # noqa: BLE001 - reported to the watcher
            self._end(error)


def _driver(raw: Any) -> type[_Asyncpg | _Psycopg]:
    return _Asyncpg if hasattr(raw, "add_termination_listener") else _Psycopg


def sql_listen(channel: str) -> str:
    """Return the statement that subscribes to *channel*, whatever is in its name."""
    quoted = channel.replace('"', '""')
    return f'LISTEN "{quoted}"'
