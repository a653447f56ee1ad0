"""The async worker's listener: asyncpg or psycopg, in a task."""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from ._connections import cut, direct_url, keep_alive, own_engine
from ._cures import judged
from ._listen import (
    ANSWER_WITHIN,
    PROVE_AGAIN_AFTER,
    PROVE_EVERY,
    STAY,
    Listener,
    Listening,
    NoListener,
    SilentError,
)
from ._messages import ListenerChanged

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._core import Core
    from ._listen import Ask, Post, Request


def listen_in_task(engine: AsyncEngine, core: Core, post: Post, ask: Ask) -> Listener:
    """Listen in a task of the running loop. *ask* works with the worker's ordinary connection."""
    listening = Listening(core, post)
    why = listening.unavailable(engine.sync_engine)
    if why is not None:
        post(ListenerChanged(up=False, reason=why))
        return NoListener()
    return _TaskListener(engine, listening, ask)


class _TaskListener:
    """A task watches the connection; what is asked of it is done one by one by another."""

    def __init__(self, engine: AsyncEngine, listening: Listening, ask: Ask) -> None:
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
        self._stopped = False
        self._may_cancel = False
        self._lost: BaseException | None = None
        self._requests: asyncio.Queue[Request | None] = asyncio.Queue()
        self._task = asyncio.get_running_loop().create_task(self._run(), name="jobs-listen")

    def rest(self) -> None:
        self._requests.put_nowait(self._listening.resting)

    def rouse(self) -> None:
        self._requests.put_nowait(self._listening.rousing)

    def stop(self) -> None:
        # Cancelled only where no driver is at work: before Python 3.12 asyncio.wait_for, which they
        # use, loses a cancellation that comes with its answer, and a cancelled connect leaves a
        # connection behind. Elsewhere the flag is looked at.
        self._stopped = True
        self._changed.set()
        if self._may_cancel:
            self._task.cancel()

    async def _run(self) -> None:
        try:
            await self._keep_listening()
        except Exception as error:  # noqa: BLE001 - else nobody would know that it has ended
            self._listening.doom(error)

    async def _keep_listening(self) -> None:
        while not self._stopped:
            connected = False
            servant: asyncio.Task[None] | None = None
            driver: _Driver | None = None
            self._lost, self._returned = None, False
            requests: asyncio.Queue[Request | None] = asyncio.Queue()
            try:
                connection = await self._engine.connect()
                connected = True
                try:
                    raw = await connection.get_raw_connection()
                    found = raw.driver_connection
                    keep_alive(found)
                    driver = _driver(found)(found, self._hear, self._end)
                    too_late = asyncio.get_running_loop().call_later(ANSWER_WITHIN, driver.close)
                    try:
                        await driver.listen(self._listening)
                    finally:
                        too_late.cancel()
                    self._listening.marked.clear()
                    self._requests = requests  # nothing that was asked of another one
                    servant = asyncio.create_task(
                        self._serve(driver, requests), name="jobs-listen-requests"
                    )
                    if not self._stopped:
                        self._may_cancel = True
                        await self._watch()
                finally:
                    self._may_cancel = False
                    if servant is not None:
                        servant.cancel()
                        requests.put_nowait(None)
                    if driver is not None:
                        driver.close()
                    with suppress(Exception):
                        await connection.invalidate()
                        await connection.close()
            except Exception as error:  # noqa: BLE001 - whatever it was, a new connection is the cure
                if not self._stopped:
                    self._may_cancel = True
                    pause = self._listening.down(judged(error) if connected else error)
                    await asyncio.sleep(pause)
                    self._may_cancel = False

    def _hear(self, channel: str, payload: str) -> None:
        if self._listening.heard(channel, payload):
            self._returned = True
            self._changed.set()

    def _end(self, error: BaseException) -> None:
        self._lost = error
        self._changed.set()

    async def _serve(self, driver: _Driver, requests: asyncio.Queue[Request | None]) -> None:
        try:
            while (request := await requests.get()) is not None:
                steps = request()
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
            if not await self._prove():
                await self._wait(PROVE_AGAIN_AFTER)
                await self._prove()

    async def _wait(self, seconds: float) -> None:
        """Wait so long, or until something changed. Raises what ended the connection."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()
        self._changed.clear()
        if self._lost is not None:
            raise self._lost

    async def _prove(self) -> bool:
        """Raise :class:`SilentError` if nothing arrives; False if nothing could be sent."""
        sent: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._returned = False
        self._ask(
            self._listening.new_probe(),
            lambda answer: None if sent.done() else sent.set_result(answer),
            ANSWER_WITHIN,
        )
        try:
            # Not wait_for(): before Python 3.12 it loses a cancellation that comes with the answer.
            async with asyncio.timeout(ANSWER_WITHIN):
                answer = await sent
        except TimeoutError:
            return False  # the other connection is in trouble; this one is not to blame
        if not self._listening.was_sent(answer):
            return False
        until = time.monotonic() + ANSWER_WITHIN
        while not self._returned:
            left = until - time.monotonic()
            if left <= 0:
                raise SilentError
            await self._wait(left)
        if self._lost is None:  # the nonce may have come before the answer that it was sent
            self._changed.clear()
        return True


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
    async def listen(self, listening: Listening) -> None:
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
    def close(self) -> None:
        self.raw.terminate()

    async def listen(self, listening: Listening) -> None:
        self.raw.add_termination_listener(self._closed)
        await self.raw.execute(STAY)
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
    async def listen(self, listening: Listening) -> None:
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
