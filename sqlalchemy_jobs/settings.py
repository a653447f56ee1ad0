"""The settings of a worker, validated, and how long to wait between attempts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from random import random
from typing import Final, TypeAlias, TypedDict

from .errors import InvalidArgumentError, seconds
from .lifecycle import Status

Duration: TypeAlias = float | timedelta
"""Seconds, or a timedelta."""

Backoff: TypeAlias = Callable[[int], Duration]
"""From the number of the attempt that failed, counted from 1, to the wait before the next."""

DEFAULT_TIMEOUT: Final = 900.0
LONGEST_BACKOFF: Final = 3600.0
MOST_SLOTS: Final = 10_000


def exponential(
    first: Duration = 1.0,
    factor: float = 5.0,
    maximum: Duration = LONGEST_BACKOFF,
    *,
    jitter: float = 0.0,
) -> Backoff:
    """Return a back-off that waits *first*, then *factor* times longer each time, up to *maximum*.

    With *jitter*, from 0 to 1, that share of each wait is drawn at random, so that jobs which
    failed together do not come back together. The default is 1 s, 5 s, 25 s … 1 h.
    """
    start = seconds(first, "first")
    longest = seconds(maximum, "maximum")
    if not 1 <= factor <= 1000 or not 0 <= jitter <= 1:  # noqa: PLR2004 - bounds of sanity
        message = "factor must be from 1 to 1000, and jitter from 0 to 1"
        raise InvalidArgumentError(message)

    def wait(attempt: int) -> float:
        # Compared as logarithms: a power of a large attempt number overflows.
        steps = max(attempt, 1) - 1
        if start <= 0 or factor == 1:
            delay = start
        elif steps * math.log(factor) >= math.log(max(longest, start) / start):
            delay = longest
        else:
            delay = min(start * factor**steps, longest)
        return delay * (1 - jitter * random())  # noqa: S311 - no secret depends on it

    return wait


default_backoff: Final = exponential()


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """How a worker runs. Durations are seconds or timedeltas; they are kept as seconds.

    concurrency
        Handlers at once in this worker.
    visibility_timeout
        How long a claim lives unless it is renewed, which is done every third of it. A dead
        worker's jobs come back after at most this plus *recovery_interval*.
    timeout
        Bound on one attempt, unless the task or the job has its own. 0: no bound. Left out, it
        is 900 s, and the worker says so when it starts.
    backoff
        Wait after a failed attempt, unless the task has its own.
    poll_interval, max_poll_interval
        Without notifications: the wait between looks, which doubles while nothing is found.
    safety_interval
        With notifications: the wait between looks all the same.
    recovery_interval, prune_interval
        Between sweeps for expired leases, and for finished jobs beyond their retention.
    retain_succeeded, retain_cancelled, retain_failed
        How long finished jobs are kept; None: for ever.
    shutdown_timeout
        Bound on stopping. Two thirds of it wait for running jobs.
    statement_timeout
        Bound on one statement of the worker's own, after which its connection is replaced.
        None: 30 s, and at most a third of *visibility_timeout*.
    direct_url
        URL for the LISTEN connection, past a pooler in transaction mode. None: the environment's
        ``DATABASE_DIRECT_URL``, else the engine's own.
    listen
        Use notifications where the database has them.
    """

    concurrency: int = 5
    visibility_timeout: Duration = 300.0
    timeout: Duration | None = None
    backoff: Backoff = default_backoff
    poll_interval: Duration = 2.0
    max_poll_interval: Duration = 30.0
    safety_interval: Duration = 30.0
    recovery_interval: Duration = 60.0
    prune_interval: Duration = 3600.0
    retain_succeeded: Duration | None = timedelta(days=3)
    retain_cancelled: Duration | None = timedelta(days=3)
    retain_failed: Duration | None = timedelta(days=30)
    shutdown_timeout: Duration = 15.0
    statement_timeout: Duration | None = None
    direct_url: str | None = field(default=None, repr=False)
    listen: bool = True

    def __post_init__(self) -> None:
        concurrency = self.concurrency
        if isinstance(concurrency, bool) or not isinstance(concurrency, int):
            message = f"concurrency must be a whole number, got {concurrency!r}"
            raise InvalidArgumentError(message)
        if not 1 <= concurrency <= MOST_SLOTS:
            message = f"concurrency must be from 1 to {MOST_SLOTS}, got {concurrency}"
            raise InvalidArgumentError(message)
        if not callable(self.backoff):
            message = "backoff must be a callable from the attempt's number to a delay"
            raise InvalidArgumentError(message)
        for name in (
            "visibility_timeout",
            "poll_interval",
            "max_poll_interval",
            "safety_interval",
            "recovery_interval",
            "prune_interval",
        ):
            self._keep_seconds(name, least=0.01)
        for name in ("shutdown_timeout", "timeout", "statement_timeout"):
            self._keep_seconds(name)
        for name in ("retain_succeeded", "retain_cancelled", "retain_failed"):
            self._keep_seconds(name)
        if self.seconds("max_poll_interval") < self.seconds("poll_interval"):
            message = "max_poll_interval must not be shorter than poll_interval"
            raise InvalidArgumentError(message)

    def _keep_seconds(self, name: str, least: float = 0.0) -> None:
        value = getattr(self, name)
        if value is None:
            return
        kept = seconds(value, name)
        if kept < least:
            message = f"{name} must be at least {least:g} s, got {kept:g}"
            raise InvalidArgumentError(message)
        object.__setattr__(self, name, kept)

    def seconds(self, name: str) -> float:
        """Return the duration called *name* in seconds."""
        value = getattr(self, name)
        assert isinstance(value, float)
        return value

    @property
    def retention(self) -> dict[Status, float | None]:
        """How long, in seconds, finished jobs are kept, by status."""
        kept = {
            Status.SUCCEEDED: self.retain_succeeded,
            Status.CANCELLED: self.retain_cancelled,
            Status.FAILED: self.retain_failed,
        }
        return {status: None if d is None else seconds(d, status) for status, d in kept.items()}

    @property
    def default_timeout(self) -> float:
        """The bound in seconds of an attempt that has no other; 0: none."""
        return DEFAULT_TIMEOUT if self.timeout is None else self.seconds("timeout")


class WorkerOptions(TypedDict, total=False):
    """The fields of :class:`WorkerSettings`, as keyword arguments of the workers."""

    concurrency: int
    visibility_timeout: Duration
    timeout: Duration | None
    backoff: Backoff
    poll_interval: Duration
    max_poll_interval: Duration
    safety_interval: Duration
    recovery_interval: Duration
    prune_interval: Duration
    retain_succeeded: Duration | None
    retain_cancelled: Duration | None
    retain_failed: Duration | None
    shutdown_timeout: Duration
    statement_timeout: Duration | None
    direct_url: str | None
    listen: bool
