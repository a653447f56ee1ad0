"""LISTEN on a connection of its own, per driver.

A listener subscribes to the channel of the jobs table and to one of its own, over which it proves
itself: a nonce sent through the worker's ordinary connection must come back. That one test finds a
dead network path, a server that hangs and a pooler in transaction mode, which accepts LISTEN and
delivers nothing. What does not prove itself is replaced, with growing pauses, and the worker polls
meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import random
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from ._connections import cut, direct_url, keep_alive, own_engine
from ._messages import ListenerChanged, Notified
from ._store import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Connection, Engine

    from ._core import Core
    from ._messages import Event

    Post = Callable[[Event], object]
    Ask = Callable[[Callable[[Connection], Any], Callable[[Any], None]], object]

PROVE_EVERY: Final = 24.0
ANSWER_WITHIN: Final = 5.0
"""Seconds. Together they notice a silent connection within 30 s at less than three statements a
minute."""

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
        self._failures = 0
        self._was_up: bool | None = None
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

    def statements(self, engine: Engine) -> list[str]:
        """Return the LISTEN statements."""
        quote = engine.dialect.identifier_preparer.quote_identifier
        return [f"LISTEN {quote(name)}" for name in (self.channel, self.own_channel)]

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


# --- sync: psycopg in a thread ----------------------------------------------------------------


def listen_in_thread(engine: Engine, core: Core, post: Post, ask: Ask) -> Callable[[], None]:
    """Listen in a thread until the function that is returned is called.

    *ask* does a piece of work with the worker's ordinary connection.
    """
    listening = _Listening(core, post)
    why = listening.unavailable(engine)
    if why is not None:
        post(ListenerChanged(up=False, reason=why))
        return lambda: None
    listener = _Listener(engine, listening, ask)
    threading.Thread(target=listener.run, name="jobs-listen", daemon=True).start()
    return listener.stop


class _Listener:
    def __init__(self, engine: Engine, listening: _Listening, ask: Ask) -> None:
        url = direct_url(engine, listening.core.settings.direct_url)
        self._engine = own_engine(engine) if url is None else create_engine(url, poolclass=NullPool)
        self._listening = listening
        self._ask = ask
        self._stopped = threading.Event()
        self._driver: Any = None

    def stop(self) -> None:
        self._stopped.set()
        cut(self._driver)

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

    def _listen(self, connection: Connection) -> None:
        connection = connection.execution_options(isolation_level="AUTOCOMMIT")
        for statement in self._listening.statements(self._engine):
            connection.exec_driver_sql(statement)
        self._driver = driver = connection.connection.driver_connection
        keep_alive(driver)
        self._prove(driver)
        self._listening.up()
        while not self._stopped.is_set():
            self._read(driver, PROVE_EVERY)
            self._prove(driver)

    def _read(self, driver: Any, seconds: float) -> bool:
        """Take notifications for so long, or until the nonce comes back."""
        for notice in driver.notifies(timeout=seconds):
            if self._listening.heard(notice.channel, notice.payload):
                return True
            if self._stopped.is_set():
                break
        return False

    def _prove(self, driver: Any) -> None:
        sent: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ask(self._listening.new_probe(), sent.put)
        try:
            answer = sent.get(timeout=ANSWER_WITHIN)
        except queue.Empty:
            return  # the other connection is in trouble; this one is not to blame
        if isinstance(answer, BaseException) or self._stopped.is_set():
            return
        until = time.monotonic() + ANSWER_WITHIN
        while (left := until - time.monotonic()) > 0:
            if self._read(driver, left):
                return
        if not self._stopped.is_set():
            raise _SilentError


# --- async: asyncpg and psycopg ---------------------------------------------------------------


def listen_in_task(engine: AsyncEngine, core: Core, post: Post, ask: Ask) -> Callable[[], None]:
    """Listen in a task of the running loop until the function that is returned is called."""
    listening = _Listening(core, post)
    why = listening.unavailable(engine.sync_engine)
    if why is not None:
        post(ListenerChanged(up=False, reason=why))
        return lambda: None
    listener = _AsyncListener(engine, listening, ask)
    task = asyncio.get_running_loop().create_task(listener.run(), name="jobs-listen")
    return lambda: listener.stop(task)


class _AsyncListener:
    def __init__(self, engine: AsyncEngine, listening: _Listening, ask: Ask) -> None:
        url = direct_url(engine.sync_engine, listening.core.settings.direct_url)
        self._engine = (
            AsyncEngine(own_engine(engine.sync_engine))
            if url is None
            else create_async_engine(url, poolclass=NullPool)
        )
        self._listening = listening
        self._ask = ask
        self._driver: Any = None
        self._changed = asyncio.Event()
        self._returned = False
        self._lost: BaseException | None = None

    def stop(self, task: asyncio.Task[None]) -> None:
        task.cancel()

    async def run(self) -> None:
        while True:
            reader: asyncio.Task[None] | None = None
            driver: Any = None
            self._lost, self._returned = None, False
            try:
                connection = await self._engine.connect()
                try:
                    raw = await connection.get_raw_connection()
                    self._driver = driver = raw.driver_connection
                    reader = await self._subscribe(driver)
                    await self._watch()
                finally:
                    self._driver = None
                    if reader is not None:
                        reader.cancel()
                    cut(driver)  # a polite end would wait for a peer that may be gone
                    with suppress(Exception):
                        await connection.invalidate()
                        await connection.close()
            except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is the cure
                await asyncio.sleep(self._listening.down(error))

    async def _subscribe(self, driver: Any) -> asyncio.Task[None] | None:
        """LISTEN, and have notifications and the connection's end reported. Per driver."""
        keep_alive(driver)
        listening = self._listening
        if hasattr(driver, "add_termination_listener"):  # asyncpg
            driver.add_termination_listener(self._closed)
            for channel in (listening.channel, listening.own_channel):
                await driver.add_listener(channel, self._notified)
            return None
        await driver.set_autocommit(True)
        for statement in listening.statements(self._engine.sync_engine):
            await driver.execute(statement)
        return asyncio.get_running_loop().create_task(self._read(driver), name="jobs-notifies")

    def _closed(self, connection: object) -> None:  # noqa: ARG002 - the driver's signature
        self._end(ConnectionError("it was closed"))

    def _notified(self, connection: object, pid: int, channel: str, payload: str) -> None:  # noqa: ARG002 - the driver's signature
        self._hear(channel, payload)

    async def _read(self, driver: Any) -> None:
        try:
            async for notice in driver.notifies():
                self._hear(notice.channel, notice.payload)
            self._end(ConnectionError("it was closed"))
        except Exception as error:  # noqa: BLE001 - reported to the watcher
            self._end(error)

    def _hear(self, channel: str, payload: str) -> None:
        if self._listening.heard(channel, payload):
            self._returned = True
            self._changed.set()

    def _end(self, error: BaseException) -> None:
        self._lost = error
        self._changed.set()

    async def _watch(self) -> None:
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
            answer = await asyncio.wait_for(sent, ANSWER_WITHIN)
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
