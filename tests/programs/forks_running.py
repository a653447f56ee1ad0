"""A program that forks while its worker runs.

    python tests/programs/forks_running.py URL KIND

KIND is "sync" or "async". A handler starts a process and ends it by a signal. Then, beside a
worker in a block of its own, a child leaves the block, and runs the worker itself.
"""

from __future__ import annotations

import asyncio
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from typing import Any

import psycopg
from sqlalchemy import create_engine, make_url
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_jobs import AsyncWorker, JobContext, JobSession, Tasks, Worker

OWN = (
    "SELECT pid FROM pg_stat_activity WHERE datname = current_database()"
    " AND pid <> pg_backend_pid() AND backend_type = 'client backend' ORDER BY pid"
)

tasks = Tasks()
ran = threading.Event()


class Trouble(logging.Handler):
    """Prints what a worker complains of."""

    def emit(self, record: logging.LogRecord) -> None:
        """Print one record."""
        say(trouble=record.getMessage(), pid=os.getpid())


def say(**what: object) -> None:
    """Write a line, at once: a fork would write what is buffered twice."""
    os.write(1, (json.dumps(what) + "\n").encode())


@tasks.task("quick")
def quick(job: JobContext) -> None:
    """Say who runs it."""
    say(ran=job.id, pid=os.getpid())
    ran.set()


def sleep(runs: Any) -> None:
    """Do what a child does."""
    runs.set()
    time.sleep(60)


@tasks.task("starts a process")
def starts_a_process(_: JobContext) -> None:
    """Start a child by a fork, and end it as everybody does."""
    context = multiprocessing.get_context("fork")
    runs = context.Event()  # before that Python may lose a signal
    child = context.Process(target=sleep, args=(runs,))
    child.start()
    assert runs.wait(30)
    child.terminate()
    child.join(30)
    say(ended=child.exitcode)
    worker.stop()


def enqueue(task: str) -> None:
    """Enqueue with connections of this process's own."""
    engine = create_engine(url.set(drivername="postgresql+psycopg"))
    with JobSession(engine) as session, session.begin():
        session.enqueue(task)
    engine.dispose()


def connections() -> list[Any]:
    """Return the server's processes of this database."""
    address = url.set(drivername="postgresql").render_as_string(hide_password=False)
    with psycopg.connect(address) as connection:
        return [pid for (pid,) in connection.execute(OWN).fetchall()]


def run() -> None:
    """Run the worker until it is stopped, on the main thread."""
    if is_async:
        asyncio.run(worker.run())
    else:
        worker.run()


def beside() -> None:
    """Fork in the block of a sync worker."""
    with worker:
        enqueue("quick")
        ran.wait(30)
        ran.clear()
        before = connections()
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            say(same=connections() == before)
            enqueue("quick")
            ran.wait(30)
    if not child:
        worker.run(until_idle=True)
        say(child=os.getpid(), name=worker.name)
        os._exit(0)


url = make_url(sys.argv[1])
is_async = sys.argv[2] == "async"
logging.getLogger("sqlalchemy_jobs").addHandler(Trouble(logging.WARNING))
options: Any = {"timeout": 60}
worker: Any = (
    AsyncWorker(create_async_engine(url), tasks, **options)
    if is_async
    else Worker(create_engine(url), tasks, **options)
)
enqueue("starts a process")
run()
if not is_async:
    beside()
say(parent=os.getpid(), name=worker.name)
