from __future__ import annotations

import asyncio
import functools
import subprocess
import sys
import threading
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import pytest

from sqlalchemy_jobs import InvalidArgumentError, Job, JobCancelled, JobContext, TaskError, Tasks
from sqlalchemy_jobs._messages import Lease, Reason

if TYPE_CHECKING:
    from decimal import Decimal

LEASE = Lease(7, 2, task="t", max_attempts=3, timeout=5.0, payload='{"secret": 1}', meta='{"m": 1}')


@dataclass
class Welcome:
    """A payload."""

    user: int


def plain(job: JobContext) -> None:
    """Handle, without a type."""


def typed(job: JobContext[Welcome]) -> None:
    """Handle, with a type."""


async def coroutine(job: JobContext[list[int]]) -> None:
    """Handle, as a coroutine."""


def unreadable(job: JobContext[Decimal]) -> None:
    """Handle a type that is there for type checkers only."""


class Handler:
    """A handler that is an object."""

    def __call__(self, job: JobContext[Welcome]) -> None:
        """Handle."""

    async def method(self, job: JobContext[int]) -> None:
        """Handle, as a method."""


class AsyncHandler:
    """A handler that is an object and a coroutine."""

    async def __call__(self, job: JobContext[Welcome]) -> None:
        """Handle."""


# --- registration -------------------------------------------------------------------------------


def test_a_decorated_function_stays_itself() -> None:
    """`@tasks.task(...)` registers, and returns the function, which tests may call."""
    tasks = Tasks()
    assert tasks.task("welcome", max_attempts=5, timeout=timedelta(minutes=1))(typed) is typed
    task = tasks.get("welcome")
    assert task is not None
    assert (task.name, task.handler, task.max_attempts, task.timeout) == ("welcome", typed, 5, 60.0)
    assert (task.payload_type, task.is_async, task.backoff) == (Welcome, False, None)


def test_defaults() -> None:
    """Without options a task has three attempts, and the rest is the worker's."""
    tasks = Tasks()
    task = tasks.register(plain)
    assert task.name == f"{__name__}.plain"
    assert (task.max_attempts, task.timeout, task.backoff) == (3, None, None)
    assert tasks.register(Handler().method).name == f"{__name__}.Handler.method"


def test_tasks_are_a_collection_of_names() -> None:
    """A name can be looked for, the names walked over and counted."""
    tasks = Tasks()
    tasks.register(plain, "a")
    tasks.register(typed, "b", max_attempts=7)
    assert "a" in tasks
    assert "c" not in tasks
    assert list(tasks) == ["a", "b"]
    assert len(tasks) == 2
    assert tasks.get("c") is None
    assert tasks.bounds() == {"a": 3, "b": 7}


def test_a_name_taken_is_refused() -> None:
    """Registering a name twice is an error, whichever function it is, and changes nothing."""
    tasks = Tasks()
    first = tasks.register(plain, "taken")
    for handler in (plain, typed):
        with pytest.raises(TaskError, match="'taken' is registered already"):
            tasks.register(handler, "taken")
    assert tasks.get("taken") is first


def test_brackets_are_needed() -> None:
    """`@tasks.task` without brackets is refused, with the way to write it."""
    with pytest.raises(TaskError, match=r"@tasks\.task\(\)"):
        Tasks().task(plain)  # type: ignore[arg-type]


def test_a_function_of_main_needs_a_name() -> None:
    """Its module has another name in every process, so the default would not be found again."""
    program = """
from sqlalchemy_jobs import TaskError, Tasks
tasks = Tasks()
def handler(job): pass
tasks.register(handler, "named")
try:
    tasks.register(handler)
except TaskError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert "give the task a name: 'handler' is defined in __main__" in done.stdout


@pytest.mark.parametrize(
    "handler", [lambda: None, None, "name", 3, functools.partial(plain, JobContext(LEASE, 1))]
)
def test_what_cannot_take_a_job_is_refused(handler: Any) -> None:
    """A handler must be callable and take the job."""
    with pytest.raises(TaskError):
        Tasks().register(handler, "t")


def test_a_handler_without_a_name_needs_one() -> None:
    """An object has no name of its own."""
    tasks = Tasks()
    for handler in (Handler(), functools.partial(plain)):
        with pytest.raises(TaskError, match="give the task one"):
            tasks.register(handler)
        tasks.register(handler, f"named {type(handler).__name__}")


@pytest.mark.parametrize("name", ["", "x" * 201, "nul\x00", 5, b"bytes"])
def test_a_name_is_text_of_up_to_200_characters(name: Any) -> None:
    """Other names could not be stored."""
    with pytest.raises((InvalidArgumentError, ValueError), match="name"):
        Tasks().register(plain, name)


@pytest.mark.parametrize(
    "options",
    [
        {"max_attempts": 0},
        {"max_attempts": 1.5},
        {"max_attempts": True},
        {"max_attempts": 10**9},
        {"timeout": -1},
        {"timeout": "long"},
        {"backoff": 5},
    ],
    ids=str,
)
def test_options_are_checked(options: dict[str, Any]) -> None:
    """A wrong option is refused when the task is registered, by its name."""
    tasks = Tasks()
    with pytest.raises(InvalidArgumentError, match=next(iter(options))):
        tasks.register(plain, "t", **options)
    assert len(tasks) == 0


# --- kinds of handlers --------------------------------------------------------------------------


def wrapped(handler: Any) -> Any:
    """Decorate as decorators should."""

    @functools.wraps(handler)
    def wrapper(*arguments: Any) -> Any:
        return handler(*arguments)

    return wrapper


@pytest.mark.parametrize(
    ("handler", "is_async", "payload_type"),
    [
        (plain, False, None),
        (typed, False, Welcome),
        (coroutine, True, list[int]),
        (Handler(), False, Welcome),
        (AsyncHandler(), True, Welcome),
        (Handler().method, True, int),
        (functools.partial(coroutine), True, list[int]),
        (wrapped(coroutine), True, list[int]),
        (wrapped(typed), False, Welcome),
        (lambda _job: None, False, None),
    ],
)
def test_every_kind_of_handler_is_understood(
    handler: Any,
    is_async: bool,  # noqa: FBT001 - a test's parameter
    payload_type: Any,
) -> None:
    """Functions, methods, objects, partials and decorated ones: their colour and payload's type."""
    task = Tasks().register(handler, "t")
    assert (task.is_async, task.payload_type) == (is_async, payload_type)


def test_a_type_that_is_not_there_at_run_time_is_refused() -> None:
    """The message says what to do, instead of a payload of the wrong type later."""
    with pytest.raises(TaskError, match="import it at run time"):
        Tasks().register(unreadable, "t")


def test_a_task_can_be_called() -> None:
    """Calling a task calls its handler, which is how tests of handlers begin."""
    tasks = Tasks()
    seen: list[int] = []
    tasks.register(lambda job: seen.append(job.id), "t")
    task = tasks.get("t")
    assert task is not None
    task(JobContext(LEASE, None))
    assert seen == [7]


def test_watchers_are_told_of_every_registration() -> None:
    """Whoever watches is called after a task was added, until it is no longer interested."""
    tasks = Tasks()
    told: list[int] = []
    end = tasks.watch(lambda: told.append(len(tasks)))
    tasks.register(plain, "a")
    end()
    tasks.register(plain, "b")
    assert told == [1]


# --- the job's context --------------------------------------------------------------------------


def test_a_handler_is_told_about_its_job() -> None:
    """The context carries what was enqueued and where the attempts stand; its repr no payload."""
    job = JobContext(LEASE, {"secret": 1})
    assert (job.id, job.task, job.attempt, job.max_attempts) == (7, "t", 2, 3)
    assert (job.payload, job.meta) == ({"secret": 1}, {"m": 1})
    assert repr(job) == "<job 7 t attempt 2 of 3>"


def test_remaining_is_the_time_to_the_deadline() -> None:
    """It falls to zero and not below; without a bound there is none."""
    job = JobContext(LEASE, None)
    assert job.remaining is not None
    assert 0 < job.remaining <= 5
    assert job.deadline is not None
    job.deadline -= 60
    assert job.remaining == 0
    assert JobContext(Lease(1, 1), None).remaining is None


def test_cancelled_is_a_flag_and_an_event() -> None:
    """It is false until it is set, can be waited for, and says why it was set."""
    job = JobContext(LEASE, None)
    assert not job.cancelled
    job.raise_if_cancelled()
    assert not job.cancelled.wait(0.001)
    threading.Timer(0.01, job.cancelled.set).start()
    assert job.cancelled.wait(20)
    assert job.cancelled
    job.cancelled.reason = Reason.TIMEOUT
    with pytest.raises(JobCancelled, match="timeout"):
        job.raise_if_cancelled()


def test_a_context_is_no_row() -> None:
    """What a handler gets is its own: changing it changes no job."""
    job = JobContext(LEASE, None)
    assert not isinstance(job, Job)
    with pytest.raises(AttributeError):
        job.status = "succeeded"  # type: ignore[attr-defined]


async def test_a_context_can_be_used_in_a_loop() -> None:
    """Nothing of it blocks: `cancelled` is looked at without waiting."""
    job = JobContext(LEASE, [1])
    await asyncio.wait_for(coroutine(job), 5)
    assert not job.cancelled
