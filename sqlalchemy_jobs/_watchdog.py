"""Notices a blocked event loop, says who blocks it, and keeps the leases meanwhile.

Renewal is work for the loop, so a handler that blocks the loop longer than the visibility timeout
would have its own job, and its neighbours', run again elsewhere. This thread costs nothing while
the loop turns; when it does not, it renews the leases with a connection and a loop of its own.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from typing import TYPE_CHECKING, Final

from sqlalchemy.ext.asyncio import AsyncEngine

from ._connections import autocommit, end_statement, own_engine
from ._messages import Renew, Renewed
from ._store import describe

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._core import Core

BLOCKED_AFTER: Final = 5.0
"""Seconds without a turn of the loop before a warning; less for short visibility timeouts."""

_log = logging.getLogger("sqlalchemy_jobs")


class Watchdog:
    """Started and stopped with the worker, in its loop."""

    def __init__(
        self,
        engine: AsyncEngine,
        core: Core,
        renewed: Callable[[Renewed], None],
        culprit: Callable[[asyncio.Task[object] | None], str | None],
    ) -> None:
        """*renewed* is called from this thread; *culprit* names the job of a task of the loop."""
        self._engine = engine
        self._core = core
        self._renewed = renewed
        self._culprit = culprit
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._every = core.settings.seconds("visibility_timeout") / 3
        self._late = min(BLOCKED_AFTER, self._every)
        self._beat = time.monotonic()
        self._stopped = threading.Event()
        self._timer: asyncio.TimerHandle | None = None
        self._turn()
        threading.Thread(target=self._watch, name="jobs-watchdog", daemon=True).start()

    def stop(self) -> None:
        """End the watch."""
        self._stopped.set()
        if self._timer is not None:
            self._timer.cancel()

    def _turn(self) -> None:
        self._beat = time.monotonic()
        self._timer = self._loop.call_later(self._late / 2, self._turn)

    def _watch(self) -> None:
        try:
            self._keep_watching()
        except Exception as error:  # noqa: BLE001 - else nobody would know that it has ended
            self._core.doom("watchdog", error)

    def _keep_watching(self) -> None:
        blocked_since: float | None = None
        renewed_at = 0.0
        while not self._stopped.wait(self._late / 2):
            beat, now = self._beat, time.monotonic()
            if now - beat < self._late:
                blocked_since = None
                continue
            if blocked_since != beat:
                blocked_since = beat
                renewed_at = beat
                self._warn(now - beat)
            if now - renewed_at >= self._late:
                renewed_at = now
                self._renew()

    def _warn(self, seconds: float) -> None:
        task = asyncio.current_task(self._loop)
        frame = sys._current_frames().get(self._loop_thread)  # noqa: SLF001 # pyright: ignore[reportPrivateUsage] - documented, for all its name
        where = traceback.extract_stack(frame)[-1] if frame is not None else None
        place = f"{where.filename}:{where.lineno} in {where.name}" if where is not None else "?"
        _log.warning(
            "worker %s: the event loop has been blocked for %.1f s by %s, at %s; leases are "
            "renewed from another thread, but timeouts cannot be kept. Use a def handler for code "
            "that blocks",
            self._core.name,
            seconds,
            self._culprit(task) or "something that is not a job",
            place,
            extra={"event": "loop_blocked", "worker": self._core.name},
        )

    def _renew(self) -> None:
        leases = self._core.machine.held
        if not leases:
            return
        command, issued = Renew(leases), time.monotonic()
        try:
            answer = asyncio.run(self._perform(command))
        except Exception as error:  # noqa: BLE001 - tried again soon
            _log.warning(
                "worker %s could not renew leases while its loop is blocked: %s",
                self._core.name,
                describe(error),
            )
            return
        self._renewed(Renewed(command, answer.lost, issued, answer.passed_by))

    async def _perform(self, command: Renew) -> Renewed:
        engine = AsyncEngine(own_engine(self._engine.sync_engine))
        try:
            async with asyncio.timeout(max(1.0, self._every)), engine.connect() as connection:
                await connection.run_sync(autocommit)
                answer = await connection.run_sync(self._core.store.perform, command)
                await connection.run_sync(end_statement)
        finally:
            await engine.dispose()
        assert isinstance(answer, Renewed)
        return answer
