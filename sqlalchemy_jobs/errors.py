"""The errors that this library raises."""

from __future__ import annotations

from datetime import timedelta
from typing import Final

MAX_DELAY: Final = 10 * 365.25 * 86_400
"""Ten years, in seconds: a longer delay is a mistake, and far longer ones overflow an interval."""


class JobsError(Exception):
    """Base of every error of this library."""


class PayloadError(JobsError, ValueError):
    """The payload is not storable JSON; the message names the path, as ``payload.user.name``."""


class InvalidArgumentError(JobsError, ValueError):
    """An argument is out of its range; the message names it and says what is accepted."""


class AutocommitError(JobsError):
    """The session commits each statement by itself, so the job could not be rolled back with it."""


class UnsupportedDatabaseError(JobsError):
    """The engine speaks a dialect on which the queue's promises cannot be kept."""


class SchemaError(JobsError):
    """The jobs table is missing or older than this release; the message names the command."""


class TaskError(JobsError):
    """A task is registered twice, or in a way that a worker could not find again."""


class JobCancelled(JobsError):  # noqa: N818 - it is a signal to unwind, like CancelledError
    """Raised by ``job.raise_if_cancelled()`` once the attempt is no longer wanted."""


class PermanentJobError(JobsError):
    """Raise it in a handler to fail the job for good: no further attempt is made."""


class RetryAfter(JobsError):  # noqa: N818 - a verdict, not a fault
    """Raise it in a handler to fail this attempt and choose the delay before the next one.

    ``delay`` is in seconds or a :class:`~datetime.timedelta`. The attempt counts: when it was
    the last one, the job fails.
    """

    def __init__(self, delay: float | timedelta, reason: str = "") -> None:
        self.delay = seconds(delay, "RetryAfter.delay")
        super().__init__(reason or f"retry after {self.delay:g} s")


class Snooze(JobsError):  # noqa: N818 - a verdict, not a fault
    """Raise it in a handler to run the job again after *delay* without spending an attempt."""

    def __init__(self, delay: float | timedelta) -> None:
        self.delay = seconds(delay, "Snooze.delay")
        super().__init__(f"snoozed for {self.delay:g} s")


def seconds(value: float | timedelta, name: str, *, maximum: float = MAX_DELAY) -> float:
    """Return *value* as seconds, from 0 to *maximum*.

    Raises :class:`InvalidArgumentError`, naming *name*, for anything else.
    """
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= maximum:
        message = f"{name} must be seconds or a timedelta from 0 to {maximum:.0f} s, got {value!r}"
        raise InvalidArgumentError(message)
    return float(value)
