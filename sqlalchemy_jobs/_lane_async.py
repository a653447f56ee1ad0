"""A connection of the async worker's own, and the task that uses it."""

from __future__ import annotations

import asyncio
import logging
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from ._connections import cut, end_statement
from ._cures import judged

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sqlalchemy import Connection
    from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

Submitted: TypeAlias = "tuple[Callable[[Connection], Any], Callable[[Any], None], float | None]"
"""What :meth:`Lane.submit` was given."""

_log = logging.getLogger("sqlalchemy_jobs")


class Lane:
    """A connection of the worker's own and the task that uses it, one piece of work at a time."""

    def __init__(
        self,
        engine: AsyncEngine,
        prepare: Callable[[Connection], Connection],
        name: str,
        *,
        early: bool = False,
    ) -> None:
        """*early*: connect before there is work, whose time is bounded: far away, connecting alone
        takes seconds.
        """
        self._engine = engine
        self._prepare = prepare
        self._connection: AsyncConnection | None = None
        self._work: asyncio.Queue[Any] = asyncio.Queue()
        self._abandoned = False
        self._connecting = early
        self._server = asyncio.get_running_loop().create_task(self._serve(), name=name)

    def submit(
        self,
        work: Callable[[Connection], Any],
        done: Callable[[Any], None],
        within: float | None = None,
    ) -> None:
        """Do *work* with the connection and hand its result, or what it raised, to *done*.

        *within*: it fails after so many seconds. Without, :meth:`abandon` is the bound.
        """
        self._work.put_nowait((work, done, within))

    async def close(self) -> None:
        """Close the connection, after the work that was submitted if that does not take long."""
        self._work.put_nowait(None)
        done: set[Any] = set()
        if not self._connecting:
            done, _ = await asyncio.wait({self._server}, timeout=1.0)
        if not done:
            self.abandon()
            await asyncio.wait({self._server}, timeout=1.0)

    def abandon(self) -> list[Submitted]:
        """Break the connection, whose work is not answered any more; return what had not begun."""
        left: list[Submitted] = []
        while not self._work.empty():
            item = self._work.get_nowait()
            if item is not None:
                left.append(item)
        self._abandoned = True
        self._cut()
        self._server.cancel()
        self._work.put_nowait(None)  # a driver may lose the cancellation; see _listen_async
        return left

    async def _connect(self) -> AsyncConnection:
        if self._connection is None:
            self._connection = await self._engine.connect()
            await self._connection.run_sync(self._prepare)
        return self._connection

    async def _connect_early(self) -> None:
        try:
            await self._connect()
        except Exception:  # noqa: BLE001 - who has work will be told
            await self._drop()
        self._connecting = False

    async def _serve(self) -> None:
        try:
            if self._connecting:
                await self._connect_early()
            while (item := await self._work.get()) is not None and not self._abandoned:
                work, done, within = item
                try:
                    connection = await self._connect()
                    if self._abandoned:  # what it would claim now nobody would run
                        break
                    with self._bounded(within):
                        answer = await connection.run_sync(_done, work)
                except Exception as error:  # noqa: BLE001 - it is the answer
                    answer = error if self._connection is None else judged(error)
                    await self._drop()
                if not self._abandoned:
                    done(answer)
        finally:
            await self._drop()

    @contextmanager
    def _bounded(self, within: float | None) -> Generator[None]:
        # Not asyncio.timeout(): psycopg answers a cancellation by waiting for the server's answer.
        if within is None:
            yield
            return
        timer = asyncio.get_running_loop().call_later(within, self._cut)
        try:
            yield
        finally:
            timer.cancel()

    def _cut(self) -> None:
        if self._connection is not None:
            with suppress(Exception):
                sync = self._connection.sync_connection
                cut(sync.connection.driver_connection if sync is not None else None)

    async def _drop(self) -> None:
        """Let go of the connection: after an error, a new one is the way out of any state."""
        connection, self._connection = self._connection, None
        try:
            async with asyncio.timeout(1.0):
                if connection is not None:
                    await connection.invalidate()
                    await connection.close()
                await self._engine.dispose()
        except Exception:  # noqa: BLE001 - it is being thrown away
            _log.debug("a connection could not be closed", exc_info=True)


def _done(connection: Connection, work: Callable[[Connection], Any]) -> Any:
    answer = work(connection)
    end_statement(connection)
    return answer
