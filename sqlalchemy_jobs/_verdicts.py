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
from typing import TYPE_CHECKING, Any, Final

from ._messages import Outcome, Reason
from .errors import PayloadError, PermanentJobError, RetryAfter, Snooze, seconds
from .payload import load, storable
from .settings import LONGEST_BACKOFF, default_backoff
from .tasks import JobContext

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

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
    if error is None:
        return Outcome.succeeded(lease, duration)
    if reason is Reason.SHUTDOWN:
        return Outcome.released(lease, duration)
    kind = type(error)  # isinstance() would ask the error, which may lie, or raise
    if issubclass(kind, Snooze):
        return Outcome.snoozed(lease, _chosen_delay(error, lease.tries), duration)
    if issubclass(kind, RetryAfter):
        wait = _chosen_delay(error, lease.tries)
        return Outcome.raised(lease, describe(error), wait, duration)
    if issubclass(kind, PermanentJobError | PayloadError):
        return Outcome.failed(lease, describe(error), duration)
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
        problem = f"it raised {_name_of(type(error))}"
    _log.warning(
        "the backoff of attempt %d is unusable (%s): the default is used", attempt, problem
    )
    return _default_delay(attempt)


def _chosen_delay(verdict: BaseException, attempt: int) -> float:
    """Return the delay that a handler chose, or the default if a subclass made it no delay."""
    try:
        delay: Any = getattr(verdict, "delay", None)
        return seconds(delay, "delay")
    except BaseException as error:  # noqa: BLE001 - a user's class must not cost an outcome
        _log.warning(
            "the delay of %s in attempt %d is unusable (%s): the default is used",
            _name_of(type(verdict)),
            attempt,
            _name_of(type(error)),
        )
        return _default_delay(attempt)


def _default_delay(attempt: int) -> float:
    fallback = default_backoff(attempt)
    assert isinstance(fallback, float)
    return fallback


def describe(error: BaseException) -> str:
    """Return the error with its traceback from the user's own frame on, always storable."""
    frames = _users_frames(_traceback_of(error))
    limit = -MOST_FRAMES if _depth(frames) > MOST_FRAMES else None
    text = f"{_name_of(type(error))} (the error could not be described)"
    for form in (_with_its_causes, _alone, _named):
        try:
            text = form(error, frames, limit)
        except BaseException:  # noqa: BLE001, S112 - an exception may break whatever looks at it
            continue
        break
    return storable(text.strip(), LONGEST_ERROR)


def _with_its_causes(error: BaseException, frames: TracebackType | None, limit: int | None) -> str:
    summary = traceback.TracebackException(type(error), error, frames, limit=limit, compact=True)
    return "".join(summary.format())


def _alone(error: BaseException, frames: TracebackType | None, limit: int | None) -> str:
    said = str(error)
    return f"{_frames(frames, limit)}{_name_of(type(error))}: {said}"


def _named(error: BaseException, frames: TracebackType | None, limit: int | None) -> str:
    return f"{_frames(frames, limit)}{_name_of(type(error))} (the error could not be described)"


def _frames(frames: TracebackType | None, limit: int | None) -> str:
    told = "".join(traceback.format_tb(frames, limit))
    return told and f"Traceback (most recent call last):\n{told}"


# By the slots of the base classes: an error's own class may answer anything, or raise.
_name_of: Final[Callable[[type], str]] = vars(type)["__name__"].__get__
_traceback_of: Final[Callable[[BaseException], Any]] = BaseException.__dict__[
    "__traceback__"
].__get__


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
