"""One attempt while its handler runs: what the shells share about it."""

from __future__ import annotations

import inspect
import time
from typing import TYPE_CHECKING, Any

from ._verdicts import judge, prepare
from .errors import PermanentJobError

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from ._messages import Lease, Outcome, Reason
    from .settings import WorkerSettings
    from .tasks import JobContext, Task


class Attempt:
    """A handler's run. :meth:`abort` may come from another thread than the rest."""

    def __init__(self, lease: Lease, task: Task | None, settings: WorkerSettings) -> None:
        self.lease = lease
        self.aborted: Reason | None = None
        self.runner: asyncio.Task[None] | None = None  # None: it runs in a thread
        self._task = task
        self._settings = settings
        self._job: JobContext[Any] | None = None
        self._cancel: Callable[[], object] | None = None
        self._began = time.monotonic()

    @property
    def task(self) -> Task:
        """The task; it was known when the job was claimed."""
        if self._task is None:
            message = f"no handler is registered for {self.lease.task!r}"
            raise PermanentJobError(message)
        return self._task

    @property
    def job(self) -> JobContext[Any]:
        """What the handler is told."""
        assert self._job is not None
        return self._job

    def begin(self) -> JobContext[Any]:
        """Build the job's context. Raises what makes the attempt fail before its handler ran."""
        self._job = prepare(self.task, self.lease)
        if self.aborted is not None:  # it came while the payload was being read
            self.abort(self.aborted)
        return self._job

    @staticmethod
    def check_returned(result: object) -> None:
        """Refuse what a ``def`` handler returned if it is work that nobody would await."""
        if inspect.isawaitable(result):
            if inspect.iscoroutine(result):
                result.close()  # Python would warn that it was never awaited
            message = (
                "the handler returned a coroutine, which nobody awaits: make it an async def, or "
                "put functools.wraps on its decorator"
            )
            raise PermanentJobError(message)

    def on_abort(self, cancel: Callable[[], object]) -> None:
        """Call *cancel* when the attempt is aborted."""
        self._cancel = cancel
        if self.aborted is not None:
            cancel()

    def abort(self, reason: Reason) -> None:
        """Tell the handler that its attempt is no longer wanted."""
        self.aborted = reason
        if self._job is not None:
            self._job.cancelled.reason = reason
            self._job.cancelled.set()
        if self._cancel is not None:
            self._cancel()

    def end(self, error: BaseException | None) -> Outcome:
        """Return the outcome of a handler that returned, or raised *error*."""
        return judge(
            error,
            self.lease,
            self._task,
            self._settings,
            reason=self.aborted,
            duration=time.monotonic() - self._began,
        )
