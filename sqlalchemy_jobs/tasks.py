"""Tasks: which function handles which jobs, and what it is told.

::

    tasks = Tasks()

    @tasks.task("send-welcome", max_attempts=5, timeout=30)
    async def send_welcome(job: JobContext[Welcome]) -> None:
        await mail(job.payload.user_id)

A handler is a ``def`` or an ``async def`` that takes the job. It succeeds by returning and fails
by raising; what it returns is ignored. :class:`PermanentJobError` fails the job for good,
:class:`RetryAfter` chooses the delay, :class:`Snooze` gives the attempt back.
"""

from __future__ import annotations

import functools
import inspect
import json
import threading
import time
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeAlias

from . import payload as _payload
from .errors import InvalidArgumentError, JobCancelled, TaskError, seconds
from .lifecycle import DEFAULT_MAX_ATTEMPTS

if TYPE_CHECKING:
    from ._messages import Lease, Reason
    from .settings import Backoff, Duration

if TYPE_CHECKING:
    from typing_extensions import TypeVar

    P = TypeVar("P", default=Any)
else:  # the default matters to type checkers only
    P = typing.TypeVar("P")

Handler: TypeAlias = "Callable[[JobContext[Any]], Awaitable[None] | None]"
H = typing.TypeVar("H", bound="Callable[..., Any]")

MAX_NAME = 200
LARGEST_ATTEMPTS = 1_000_000


def check_max_attempts(value: object) -> int:
    """Return *value* if it may bound the attempts of a job."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= LARGEST_ATTEMPTS:
        message = f"max_attempts must be from 1 to {LARGEST_ATTEMPTS}, got {value!r}"
        raise InvalidArgumentError(message)
    return value


class Cancelled:
    """Whether an attempt is no longer wanted: ``if job.cancelled: …`` or ``job.cancelled.wait(5)``.

    Waiting blocks the thread, so it is for ``def`` handlers; an ``async def`` handler is
    cancelled where it awaits.
    """

    __slots__ = ("_event", "_set", "reason")

    def __init__(self) -> None:
        self.reason: Reason | None = None
        self._set = False
        self._event: threading.Event | None = None  # made when somebody waits: few do

    def set(self) -> None:
        """Make it true, and end every wait."""
        with _cancelling:
            self._set = True
            event = self._event
        if event is not None:
            event.set()

    def is_set(self) -> bool:
        """Return whether the attempt is no longer wanted."""
        return self._set

    __bool__ = is_set

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is, or for *timeout* seconds, and return whether it is."""
        with _cancelling:
            if self._set:
                return True
            event = self._event = self._event or threading.Event()
        return event.wait(timeout)


_cancelling = threading.Lock()


class JobContext(Generic[P]):
    """What a handler is told about its job and attempt.

    id, task, payload, meta
        As enqueued. The payload is built into the type that the handler's annotation names:
        ``JobContext[Welcome]`` for a dataclass, pydantic model, msgspec struct or plain type.
    attempt, max_attempts
        The number of this attempt, from 1, and its bound.
    cancelled
        True once the attempt is no longer wanted: its time is up, its lease is lost, or a
        stopping worker has waited long enough.
    """

    __slots__ = (
        "attempt",
        "cancelled",
        "deadline",
        "id",
        "max_attempts",
        "meta",
        "payload",
        "task",
    )

    def __init__(self, lease: Lease, payload: P) -> None:
        self.id = lease.job_id
        self.task = lease.task
        self.payload = payload
        self.meta = None if lease.meta == "null" else json.loads(lease.meta)
        self.attempt = lease.attempt
        self.max_attempts = lease.max_attempts
        self.deadline = time.monotonic() + lease.timeout if lease.timeout else None
        self.cancelled = Cancelled()

    @property
    def remaining(self) -> float | None:
        """Seconds until the attempt times out; None if it has no bound."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    def raise_if_cancelled(self) -> None:
        """Raise :class:`JobCancelled` once the attempt is no longer wanted."""
        if self.cancelled:
            raise JobCancelled(str(self.cancelled.reason or "cancelled"))

    def __repr__(self) -> str:
        return f"<job {self.id} {self.task} attempt {self.attempt} of {self.max_attempts}>"


@dataclass(frozen=True, slots=True)
class Task:
    """A registered task. Call it to call the handler."""

    name: str
    handler: Handler
    max_attempts: int
    timeout: float | None  # seconds; None: the worker's; 0: no bound
    backoff: Backoff | None
    payload_type: Any
    is_async: bool

    def __call__(self, job: JobContext[Any]) -> Awaitable[None] | None:
        """Call the handler."""
        return self.handler(job)


class Tasks:
    """The tasks that a worker can run, by name."""

    def __init__(self) -> None:
        self._tasks: dict[str, Task] = {}
        self._watchers: list[Callable[[], None]] = []

    def task(
        self,
        name: str | None = None,
        *,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        timeout: Duration | None = None,
        backoff: Backoff | None = None,
    ) -> Callable[[H], H]:
        """Register the decorated function as the handler of *name*; it is returned unchanged.

        name
            1 to 200 characters. Default: the function's module and qualified name.
        max_attempts
            Bound for jobs that were enqueued without one. Default 3.
        timeout
            Bound on one attempt, in seconds or a timedelta; 0: none. Default: the worker's.
        backoff
            From the number of the failed attempt to the wait before the next. Default: the
            worker's.

        Raises :class:`TaskError` for a name that is taken, and for a function of ``__main__``
        without an explicit name, which other processes would know by another one.
        """

        def decorate(handler: H) -> H:
            self.register(
                handler, name, max_attempts=max_attempts, timeout=timeout, backoff=backoff
            )
            return handler

        if callable(name):
            message = "write @tasks.task(), with brackets"
            raise TaskError(message)
        return decorate

    def register(
        self,
        handler: Callable[..., Any],
        name: str | None = None,
        *,
        max_attempts: int = DEFAULT_MAX_ATTEMPTS,
        timeout: Duration | None = None,
        backoff: Backoff | None = None,
    ) -> Task:
        """Register *handler*, as :meth:`task` does; a running worker takes it at its next look."""
        if not callable(handler):
            message = f"a handler must be callable, got {type(handler).__name__}"
            raise TaskError(message)
        name = _name(handler) if name is None else _payload.check_text(name, "name", MAX_NAME)
        if name in self._tasks:
            message = f"the task {name!r} is registered already"
            raise TaskError(message)
        if backoff is not None and not callable(backoff):
            message = "backoff must be a callable from the attempt's number to a delay"
            raise InvalidArgumentError(message)
        task = Task(
            name=name,
            handler=handler,
            max_attempts=check_max_attempts(max_attempts),
            timeout=None if timeout is None else seconds(timeout, "timeout"),
            backoff=backoff,
            payload_type=_payload_type(handler),
            is_async=_is_async(handler),
        )
        # A new dict, so that a worker may read the old one meanwhile.
        self._tasks = {**self._tasks, name: task}
        for watcher in self._watchers:
            watcher()
        return task

    def get(self, name: str) -> Task | None:
        """Return the task called *name*, or None."""
        return self._tasks.get(name)

    def bounds(self) -> dict[str, int]:
        """Return each task's name with its own max_attempts."""
        return {name: task.max_attempts for name, task in self._tasks.items()}

    def watch(self, watcher: Callable[[], None]) -> Callable[[], None]:
        """Call *watcher* after each registration; returns how to end that."""
        self._watchers.append(watcher)
        return lambda: self._watchers.remove(watcher)

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def __iter__(self) -> typing.Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)


def _name(handler: Callable[..., Any]) -> str:
    module = getattr(handler, "__module__", None)
    qualified = getattr(handler, "__qualname__", None)
    if module is None or qualified is None:
        message = "this handler has no name of its own; give the task one"
        raise TaskError(message)
    if module == "__main__":
        message = (
            f"give the task a name: {qualified!r} is defined in __main__, which is another module "
            "in every process"
        )
        raise TaskError(message)
    return _payload.check_text(f"{module}.{qualified}", "name", MAX_NAME)


def _is_async(handler: Callable[..., Any]) -> bool:
    call = getattr(handler, "__call__", None)  # noqa: B004 - for objects and partials
    return inspect.iscoroutinefunction(inspect.unwrap(handler)) or inspect.iscoroutinefunction(call)


def _payload_type(handler: Callable[..., Any]) -> Any:
    """The P of a first parameter annotated JobContext[P]; None if there is none."""
    function: Any = inspect.unwrap(handler)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    if not inspect.isroutine(function):
        function = type(function).__call__  # an object with a __call__
    try:
        parameters = list(inspect.signature(handler).parameters.values())
    except (TypeError, ValueError):
        return None
    if not parameters:
        message = "a handler must take the job as its argument"
        raise TaskError(message)
    hint = parameters[0].annotation
    if isinstance(hint, str):
        if "[" not in hint:
            return None
        names = {"JobContext": JobContext, **getattr(function, "__globals__", {})}
        try:
            hint = typing.get_type_hints(
                function, names, {"JobContext": JobContext}, include_extras=True
            )[parameters[0].name]
        except (NameError, KeyError, TypeError) as error:
            message = (
                f"the annotation {parameters[0].annotation!r} of {function.__qualname__} cannot be "
                "read; define the payload's type at module level and import it at run time"
            )
            raise TaskError(message) from error
    if typing.get_origin(hint) is not JobContext:
        return None
    (payload_type,) = typing.get_args(hint)
    return payload_type
