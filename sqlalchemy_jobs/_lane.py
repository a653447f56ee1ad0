"""A connection of the sync worker's own, and the thread that uses it."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import TYPE_CHECKING, Any, TypeAlias

from ._connections import cut, cut_after, end_statement
from ._cures import judged

if TYPE_CHECKING:
    from sqlalchemy import Connection, Engine

Submitted: TypeAlias = "tuple[Callable[[Connection], Any], Callable[[Any], None], float | None]"
"""What :meth:`Lane.submit` was given."""

_log = logging.getLogger("sqlalchemy_jobs")


class Lane:
    """A connection of the worker's own and the thread that uses it, one piece of work at a time."""

    def __init__(
        self,
        engine: Engine,
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
        self._connection: Connection | None = None
        self._work: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._abandoned = False
        self._connecting = early
        self._server = threading.Thread(target=self._serve, name=name, daemon=True)
        self._server.start()

    def submit(
        self,
        work: Callable[[Connection], Any],
        done: Callable[[Any], None],
        within: float | None = None,
    ) -> None:
        """Do *work* with the connection and hand its result, or what it raised, to *done*.

        *within*: it fails after so many seconds. Without, :meth:`abandon` is the bound.
        """
        self._work.put((work, done, within))

    def close(self) -> None:
        """Close the connection, after the work that was submitted if that does not take long."""
        self._work.put(None)
        if not self._connecting:
            self._server.join(timeout=1.0)
        if self._server.is_alive():
            self.abandon()
            self._server.join(timeout=1.0)

    def abandon(self) -> list[Submitted]:
        """Break the connection, whose work is not answered any more; return what had not begun."""
        left: list[Submitted] = []
        with suppress(queue.Empty):
            while (item := self._work.get_nowait()) is not None:
                left.append(item)
        self._abandoned = True
        connection = self._connection
        if connection is not None:
            cut(_driver(connection))
        self._work.put(None)
        return left

    def _connect(self) -> Connection:
        if self._connection is None:
            self._connection = self._engine.connect()
            self._connection = self._prepare(self._connection)
        return self._connection

    def _connect_early(self) -> None:
        try:
            self._connect()
        except BaseException:  # noqa: BLE001 - who has work will be told
            self._drop()
        self._connecting = False

    def _serve(self) -> None:
        if self._connecting:
            self._connect_early()
        while (item := self._work.get()) is not None and not self._abandoned:
            work, done, within = item
            try:
                connection = self._connect()
                if self._abandoned:  # what it would claim now nobody would run
                    break
                with cut_after(within, _driver(connection)) if within else nullcontext():
                    answer = work(connection)
                    end_statement(connection)
            except BaseException as error:  # noqa: BLE001 - it is the answer
                answer = error if self._connection is None else judged(error)
                self._drop()
            if not self._abandoned:
                done(answer)
        self._drop()

    def _drop(self) -> None:
        """Let go of the connection: after an error, a new one is the way out of any state."""
        connection, self._connection = self._connection, None
        try:
            if connection is not None:
                connection.invalidate()
                connection.close()
        except Exception:  # noqa: BLE001 - it is being thrown away
            _log.debug("a connection could not be closed", exc_info=True)
        self._engine.dispose()


def _driver(connection: Connection) -> Any:
    return getattr(connection.connection, "driver_connection", None)
