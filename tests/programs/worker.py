"""A worker in a process of its own, for tests that kill, pause and signal it.

Started by `tests/processes.py` with its configuration as JSON. It reports what its handlers and
the library's log say as JSON, one object a line, with the time of the monotonic clock, which on
Linux is the same in all processes.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_jobs import AsyncWorker, JobContext, Tasks, Worker, _watchdog, exponential
from sqlalchemy_jobs._store import Store

_OURS = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "taskName"}


def say(event: str, **more: Any) -> None:
    """Print one line."""
    line = json.dumps({"event": event, "at": time.monotonic(), **more}, default=str)
    os.write(1, f"{line}\n".encode())


class Reporter(logging.Handler):
    """Prints the library's log, the extra keys included."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        extra = {key: value for key, value in record.__dict__.items() if key not in _OURS}
        event = extra.pop("event", None)
        say("log", said=record.getMessage(), level=record.levelname, of=event, **extra)


def tell(event: str, job: JobContext[Any], **more: Any) -> None:
    """Print what happens to a job."""
    say(event, job=job.id, task=job.task, attempt=job.attempt, pid=os.getpid(), **more)


def begin(job: JobContext[Any]) -> float:
    """Report the start of an attempt, do what its payload wishes, and return how long to wait."""
    tell("start", job)
    wish = job.payload or {}
    if job.attempt in wish.get("kill", ()):
        signal.raise_signal(signal.SIGKILL)
    if job.attempt in wish.get("fail", ()):
        raise ValueError("as wished")
    return float(wish.get("first", 0) if job.attempt == 1 else wish.get("later", 0))


async def work_async(job: JobContext[Any]) -> None:
    """Wait as the payload says, and report a cancellation."""
    try:
        await asyncio.sleep(begin(job))
    except asyncio.CancelledError:
        tell("cancelled", job, reason=job.cancelled.reason)
        raise
    tell("end", job)


def work(job: JobContext[Any]) -> None:
    """Wait as the payload says, and report a cancellation."""
    if job.cancelled.wait(begin(job)):
        tell("cancelled", job, reason=job.cancelled.reason)
        job.raise_if_cancelled()
    tell("end", job)


async def stubborn_async(job: JobContext[Any]) -> None:
    """Never end, whatever is asked."""
    tell("start", job)
    while True:
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            tell("ignored", job)


def stubborn(job: JobContext[Any]) -> None:
    """Never end, whatever is asked."""
    tell("start", job)
    while True:
        time.sleep(0.05)


def blocking(job: JobContext[Any]) -> None:
    """Wait without looking at anything else."""
    time.sleep(begin(job))
    tell("end", job)


async def blocking_async(job: JobContext[Any]) -> None:
    """Block the event loop."""
    blocking(job)


def held(job: JobContext[Any]) -> bool:
    """Tell whether the file that the payload names, if it names one, is still to come."""
    path = (job.payload or {}).get("until")
    return path is not None and not Path(path).exists()


def hold(job: JobContext[Any]) -> None:
    """Wait for a file."""
    begin(job)
    while held(job):
        time.sleep(0.02)
    tell("end", job)


async def hold_async(job: JobContext[Any]) -> None:
    """Wait for a file in a coroutine."""
    begin(job)
    while held(job):  # noqa: ASYNC110 - another process makes it
        await asyncio.sleep(0.02)
    tell("end", job)


HANDLERS = {
    "work": work,
    "work_async": work_async,
    "stubborn": stubborn,
    "stubborn_async": stubborn_async,
    "blocking": blocking,
    "blocking_async": blocking_async,
    "hold": hold,
    "hold_async": hold_async,
}


def freeze_before(command: str) -> None:
    """Stop this process, as SIGSTOP does, when the worker first sends such a command."""
    perform = Store.perform
    frozen = False

    def frozen_first(self: Store, connection: Any, given: Any) -> Any:
        nonlocal frozen
        if type(given).__name__ == command and not frozen:
            frozen = True
            say("freezes")
            # To this thread: it goes no further, wherever the others are.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        return perform(self, connection, given)

    Store.perform = frozen_first  # type: ignore[method-assign,assignment]


def pose_as(host: str, pid: int) -> None:
    """Have the host name and the process id that a container gives to each start."""
    socket.gethostname = lambda: host
    os.getpid = lambda: pid


def main(configuration: dict[str, Any]) -> None:
    """Run a worker as the configuration says."""
    if "blocked_after" in configuration:
        # The watchdog's turns would wake a loop that sleeps through a signal.
        _watchdog.BLOCKED_AFTER = configuration["blocked_after"]  # type: ignore[misc]
    if "freeze_before" in configuration:
        freeze_before(configuration["freeze_before"])
    if "pose_as" in configuration:
        pose_as(*configuration["pose_as"])
    logger = logging.getLogger("sqlalchemy_jobs")
    logger.setLevel(logging.DEBUG)
    logger.addHandler(Reporter())
    tasks = Tasks()
    for name, handler in configuration["tasks"].items():
        timeout = configuration.get("timeouts", {}).get(name)
        tasks.register(HANDLERS[handler], name, timeout=timeout, backoff=exponential(0.2))
    options = configuration["options"]

    async def run_async() -> None:
        engine = create_async_engine(configuration["url"])
        worker = AsyncWorker(engine, tasks, **options)
        say("named", name=worker.name)
        summary = await worker.run()
        say("returned", summary=asdict(summary), restored=handlers() == before)
        await engine.dispose()

    def run_sync() -> None:
        engine = create_engine(configuration["url"])
        worker = Worker(engine, tasks, **options)
        say("named", name=worker.name)
        summary = worker.run()
        say("returned", summary=asdict(summary), restored=handlers() == before)
        engine.dispose()

    def handlers() -> list[Any]:
        return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    # Its own, so that "restored" can be told from "reset".
    signal.signal(signal.SIGTERM, lambda *_: say("the program's own handler"))
    signal.signal(signal.SIGINT, lambda *_: say("the program's own handler"))
    before = handlers()
    if configuration["is_async"]:
        asyncio.run(run_async())
    else:
        run_sync()
    say("done")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
