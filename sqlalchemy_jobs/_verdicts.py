"""From what a handler did to the outcome that is recorded.

Both workers run handlers in their own way and bring what was raised here, so a job ends alike in
both. Nothing in this module may fail: whatever a handler, its exception or a user's back-off
does, the attempt gets an outcome that the database can store.
"""

from __future__ import annotations

import logging
import traceback
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ._messages import Outcome, Reason
from .errors import PayloadError, PermanentJobError, RetryAfter, Snooze, seconds
from .payload import load, storable
from .settings import LONGEST_BACKOFF, default_backoff
from .tasks import JobContext

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from ._messages import Lease
    from .settings import Backoff, WorkerSettings
    from .tasks import Task

LONGEST_ERROR: Final = 4000
"""Characters of an error that are kept."""

MOST_FRAMES: Final = 50

_HERE: Final = str(Path(__file__).parent)
_log = logging.getLogger("sqlalchemy_jobs")


def prepare(task: Task, lease: Lease) -> JobContext[Any]:
    """Build the context of an attempt. Raises :class:`PayloadError` if the payload does not fit."""
    return JobContext(lease, load(lease.payload, task.payload_type))


def judge(
    error: BaseException | None,
    lease: Lease,
    task: Task | None,
    settings: WorkerSettings,
    *,
    reason: Reason | None,
    duration: float,
) -> Outcome:
    """Return the outcome of an attempt that returned (*error* is None) or raised.

    *reason* is why the worker had aborted it, if it had: an attempt that ends by raising after
    the worker asked it to stop gives its attempt back, for that is nobody's failure.
    """
    match error:
        case None:
            return Outcome.succeeded(lease, duration)
        case _ if reason is Reason.SHUTDOWN:
            return Outcome.released(lease, duration)
        case Snooze():
            return Outcome.snoozed(lease, _chosen_delay(error, lease.tries), duration)
        case RetryAfter():
            wait = _chosen_delay(error, lease.tries)
            return Outcome.raised(lease, describe(error), wait, duration)
        case PermanentJobError() | PayloadError():
            return Outcome.failed(lease, describe(error), duration)
        case _:
            wait = next_delay(_backoff(task, settings), lease.tries)
            return Outcome.raised(lease, describe(error), wait, duration)


def timed_out(lease: Lease, task: Task | None, settings: WorkerSettings) -> Outcome:
    """Return the outcome of an attempt whose time is up."""
    error = f"TimeoutError: the attempt took longer than its timeout of {lease.timeout:g} s"
    wait = next_delay(_backoff(task, settings), lease.tries)
    return Outcome.raised(lease, error, wait, lease.timeout or 0.0)


def _backoff(task: Task | None, settings: WorkerSettings) -> Backoff:
    return task.backoff if task is not None and task.backoff else settings.backoff


def next_delay(backoff: Backoff, attempt: int) -> float:
    """Return what *backoff* says, or the default if that is no delay."""
    try:
        delay = backoff(attempt)
        value = delay.total_seconds() if isinstance(delay, timedelta) else float(delay)
        if 0 <= value < float("inf"):
            return min(value, LONGEST_BACKOFF)
        problem = f"it returned {delay!r}"
    except BaseException as error:  # noqa: BLE001 - a user's function must not cost an outcome
        problem = f"it raised {type(error).__name__}"
    _log.warning(
        "the backoff of attempt %d is unusable (%s): the default is used", attempt, problem
    )
    return _default_delay(attempt)


def _chosen_delay(verdict: RetryAfter | Snooze, attempt: int) -> float:
    """Return the delay that a handler chose, or the default if a subclass made it no delay."""
    try:
        return seconds(verdict.delay, "delay")
    except BaseException as error:  # noqa: BLE001 - a user's class must not cost an outcome
        _log.warning(
            "the delay of %s in attempt %d is unusable (%s): the default is used",
            type(verdict).__name__,
            attempt,
            type(error).__name__,
        )
        return _default_delay(attempt)


def _default_delay(attempt: int) -> float:
    fallback = default_backoff(attempt)
    assert isinstance(fallback, float)
    return fallback


def describe(error: BaseException) -> str:
    """Return the error with its traceback from the user's own frame on, always storable."""
    try:
        frames = _users_frames(error.__traceback__)
        deep = _depth(frames) > MOST_FRAMES
        limit = -MOST_FRAMES if deep else None
        summary = traceback.TracebackException(
            type(error), error, frames, limit=limit, compact=True
        )
        text = "".join(summary.format())
    except BaseException:  # noqa: BLE001 - an exception may break whatever looks at it
        text = f"{type(error).__name__} (the error could not be described)"
    return storable(text.strip(), LONGEST_ERROR)


def _users_frames(frames: TracebackType | None) -> TracebackType | None:
    """Skip the frames of this library that lead to the handler."""
    first = frames
    while first is not None and first.tb_frame.f_code.co_filename.startswith(_HERE):
        first = first.tb_next
    return first


def _depth(frames: TracebackType | None) -> int:
    depth = 0
    while frames is not None:
        depth += 1
        frames = frames.tb_next
    return depth
