"""What a caller asks for, checked, and the columns that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from .errors import InvalidArgumentError, seconds
from .payload import MAX_CHARACTERS, check_text, dump
from .tasks import MAX_NAME, check_max_attempts

if TYPE_CHECKING:
    from .settings import Duration

LONGEST_KEY: Final = 255
CHUNK: Final = 5000
"""Rows a statement of ``enqueue_many``; fewer if their payloads are large."""


@dataclass(frozen=True, slots=True)
class NewJob:
    """A job for ``enqueue_many``; the fields are the arguments of :func:`enqueue`."""

    task: str
    payload: Any = field(default=None, repr=False)
    delay: Duration | None = None
    run_at: datetime | None = None
    max_attempts: int | None = None
    timeout: Duration | None = None
    priority: int = 0
    idempotency_key: str | None = None
    meta: Any = field(default=None, repr=False)


DEFAULTS: Final = {"priority": 0}
"""What a row of ``enqueue_many`` has in a column that only other rows give; else null."""


def chunks(rows: Sequence[dict[str, Any]]) -> Iterator[list[int]]:
    """Yield the places of the rows of each statement, in the order of keys."""
    # Sorting is stable: jobs without a key keep the caller's order, and so do those with one key.
    order = sorted(range(len(rows)), key=lambda i: rows[i].get("idempotency_key") or "")
    places: list[int] = []
    size = 0
    for i in order:
        length = len(rows[i]["payload"]) + len(rows[i].get("meta") or "")
        if places and (len(places) == CHUNK or size + length > MAX_CHARACTERS):
            yield places
            places, size = [], 0
        places.append(i)
        size += length
    yield places


def row_of(job: NewJob, resolve: Callable[[Any], Any]) -> dict[str, Any]:
    """Check a new job and return the columns that it gives; SQL comes after this.

    *resolve* calls a callable payload, after a flush.
    """
    row: dict[str, Any] = {"task": check_text(job.task, "task", MAX_NAME)}
    if job.delay is not None and job.run_at is not None:
        message = "give delay or run_at, not both"
        raise InvalidArgumentError(message)
    if job.delay is not None:
        row["delay"] = seconds(job.delay, "delay")
    if job.run_at is not None:
        row["run_at"] = _aware(job.run_at)
    if job.max_attempts is not None:
        row["max_attempts"] = check_max_attempts(job.max_attempts)
    if job.timeout is not None:
        row["timeout_s"] = seconds(job.timeout, "timeout")
    if _priority(job.priority):
        row["priority"] = job.priority
    if job.idempotency_key is not None:
        row["idempotency_key"] = check_text(job.idempotency_key, "idempotency_key", LONGEST_KEY)
    if job.meta is not None:
        row["meta"] = dump(job.meta, "meta")
    # Last: a callable may flush, and everything else is checked before any SQL.
    row["payload"] = dump(resolve(job.payload))
    return row


def _aware(run_at: object) -> datetime:
    if not isinstance(run_at, datetime):
        message = f"run_at must be a datetime, got {type(run_at).__name__}"
        raise InvalidArgumentError(message)
    if run_at.utcoffset() is None:
        message = "run_at must be aware: a naive datetime names no instant; give it a tzinfo"
        raise InvalidArgumentError(message)
    try:
        return run_at.astimezone(UTC)
    except OverflowError:
        message = "run_at is outside of the years 1 to 9999 in UTC"
        raise InvalidArgumentError(message) from None


def _priority(priority: object) -> int:
    if isinstance(priority, bool) or not isinstance(priority, int) or not -2 <= priority <= 2:  # noqa: PLR2004 - the range of the column
        message = f"priority must be a whole number from -2 to 2, got {priority!r}"
        raise InvalidArgumentError(message)
    return priority


def checked_ids(job_ids: int | Sequence[int]) -> list[int]:
    ids = [job_ids] if isinstance(job_ids, int) else list(job_ids)
    if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
        message = "job ids must be whole numbers"
        raise InvalidArgumentError(message)
    return sorted(set(ids))
