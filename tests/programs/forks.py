"""A program that makes an engine and a worker, uses the engine, and then forks.

    python tests/programs/forks.py URL KIND CHILDREN

KIND is "sync" or "async". Each child runs the worker until nothing is due. It prints the worker's
name, the jobs it ran, and the server's processes that it spoke to.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from typing import Any

from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_jobs import AsyncJobSession, AsyncWorker, JobContext, JobSession, Tasks, Worker

PID = text("SELECT pg_backend_pid()")

tasks = Tasks()
ran: list[int] = []
spoke_to: set[int] = set()


def say(**what: object) -> None:
    """Write a line, at once: a fork would write what is buffered twice."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def note(job: JobContext, worker: Any) -> None:
    """Note the job, and the connections of the worker's own."""
    ran.append(job.id)
    for lane in list(worker._lanes.values()):
        connection = getattr(lane._connection, "sync_connection", lane._connection)
        if connection is not None:
            driver = connection.connection.driver_connection
            asyncpg = hasattr(driver, "get_server_pid")
            pid = driver.get_server_pid() if asyncpg else driver.info.backend_pid
            spoke_to.add(pid)


def report(worker: Any) -> None:
    """Say what this process did."""
    say(name=worker.name, ran=ran, spoke_to=sorted(spoke_to))


def fork(children: int, work: Any) -> None:
    """Have *work* done by so many children, and wait for their ends."""
    pids: list[int] = []
    for _ in range(children):
        pid = os.fork()
        if pid == 0:
            try:
                work()
            finally:
                os._exit(0)
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)


def main_sync(url: str, children: int) -> None:
    """Enqueue in the parent, run in the children, then in the parent too."""
    engine = create_engine(url)
    os.register_at_fork(after_in_child=lambda: engine.dispose(close=False))

    @tasks.task("quick")
    def quick(job: JobContext) -> None:
        time.sleep(0.02)
        with engine.connect() as connection:
            spoke_to.add(connection.execute(PID).scalar_one())
        note(job, worker)

    worker = Worker(engine, tasks, concurrency=2, poll_interval=0.2)

    def enqueue(count: int) -> None:
        with JobSession(engine) as session, session.begin():
            spoke_to.add(session.execute(PID).scalar_one())
            for _ in range(count):
                session.enqueue("quick")

    def run() -> None:
        spoke_to.clear()
        worker.run(until_idle=True)
        report(worker)

    enqueue(20 * children)
    say(parent=worker.name, spoke_to=sorted(spoke_to))
    fork(children, run)
    # The parent's own connections still work: no child has used or closed them.
    enqueue(1)
    worker.run(until_idle=True)
    report(worker)
    engine.dispose()


def main_async(url: str, children: int) -> None:
    """Do the same, with an event loop in each process."""
    engine = create_async_engine(url)
    os.register_at_fork(after_in_child=lambda: engine.sync_engine.dispose(close=False))

    @tasks.task("quick")
    async def quick(job: JobContext) -> None:
        await asyncio.sleep(0.02)
        async with engine.connect() as connection:
            spoke_to.add((await connection.execute(PID)).scalar_one())
        note(job, worker)

    worker = AsyncWorker(engine, tasks, concurrency=2, poll_interval=0.2)

    async def enqueue(count: int) -> None:
        async with AsyncJobSession(engine) as session, session.begin():
            spoke_to.add((await session.execute(PID)).scalar_one())
            for _ in range(count):
                await session.enqueue("quick")

    def run() -> None:
        spoke_to.clear()
        asyncio.run(worker.run(until_idle=True))
        report(worker)

    with asyncio.Runner() as runner:
        runner.run(enqueue(20 * children))
        say(parent=worker.name, spoke_to=sorted(spoke_to))
        fork(children, run)
        runner.run(enqueue(1))
        runner.run(worker.run(until_idle=True))
        report(worker)
        runner.run(engine.dispose())


if __name__ == "__main__":
    {"sync": main_sync, "async": main_async}[sys.argv[2]](sys.argv[1], int(sys.argv[3]))
