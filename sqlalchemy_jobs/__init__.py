"""Durable background jobs for applications that already use SQLAlchemy.

A job is a row in your own database. :meth:`JobSession.enqueue` inserts it in your transaction,
and a :class:`Worker` or :class:`AsyncWorker` runs it: at least once, one at a time, with retries.
"""

from ._core import Summary
from ._newjob import NewJob
from ._version import __version__
from .errors import (
    AutocommitError,
    InvalidArgumentError,
    JobCancelled,
    JobsError,
    PayloadError,
    PermanentJobError,
    RetryAfter,
    SchemaError,
    Snooze,
    TaskError,
    UnsupportedDatabaseError,
)
from .health import Health, LoopHealth
from .lifecycle import Status
from .models import Job, JobMixin, metadata, table_args
from .session import (
    AsyncJobSession,
    AsyncJobSessionMixin,
    JobSession,
    JobSessionMixin,
    cancel,
    cancel_async,
    enqueue,
    enqueue_async,
    enqueue_many,
    enqueue_many_async,
    requeue,
    requeue_async,
)
from .settings import WorkerSettings, exponential
from .tasks import JobContext, Task, Tasks
from .worker import Worker
from .worker_async import AsyncWorker

__all__ = [
    "AsyncJobSession",
    "AsyncJobSessionMixin",
    "AsyncWorker",
    "AutocommitError",
    "Health",
    "InvalidArgumentError",
    "Job",
    "JobCancelled",
    "JobContext",
    "JobMixin",
    "JobSession",
    "JobSessionMixin",
    "JobsError",
    "LoopHealth",
    "NewJob",
    "PayloadError",
    "PermanentJobError",
    "RetryAfter",
    "SchemaError",
    "Snooze",
    "Status",
    "Summary",
    "Task",
    "TaskError",
    "Tasks",
    "UnsupportedDatabaseError",
    "Worker",
    "WorkerSettings",
    "__version__",
    "cancel",
    "cancel_async",
    "enqueue",
    "enqueue_async",
    "enqueue_many",
    "enqueue_many_async",
    "exponential",
    "metadata",
    "requeue",
    "requeue_async",
    "table_args",
]
