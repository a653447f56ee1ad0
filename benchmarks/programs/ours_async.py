"""sqlalchemy-jobs with AsyncWorker and AsyncJobSession."""

from __future__ import annotations

import asyncio
from typing import Any, cast

from sqlalchemy import Table, func, insert
from sqlalchemy.ext.asyncio import AsyncEngine, async_sessionmaker, create_async_engine

from sqlalchemy_jobs import AsyncJobSession, AsyncWorker, Job, JobContext, NewJob, Tasks, metadata

from . import jobs_table
from .protocol import TASK, AsyncProgram, main, no_op

TABLE = cast("Table", Job.__table__)
CORE = insert(TABLE).returning(TABLE.c.id)
CORE_NOTIFY = insert(TABLE).returning(TABLE.c.id, func.pg_notify("jobs.jobs", TABLE.c.task))


class OursAsync(AsyncProgram):
    """A session per transaction, as an application has it."""

    settings = "worker and session defaults; the engine's pool has one connection a client"
    finished = jobs_table.FINISHED
    succeeded = jobs_table.SUCCEEDED
    ways = ("session", "core", "core+notify", "silent", "after_commit")

    engine: AsyncEngine
    session: async_sessionmaker[AsyncJobSession]

    async def install(self) -> None:
        """Create the table."""
        engine = create_async_engine(jobs_table.url(self.options.dsn, self.options.driver))
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await engine.dispose()

    async def open(self, clients: int) -> None:
        """Make the engine and the session class."""
        url = jobs_table.url(self.options.dsn, self.options.driver)
        self.engine = create_async_engine(url, pool_size=clients)
        self.session = async_sessionmaker(self.engine, class_=AsyncJobSession)

    async def close(self) -> None:
        """Close the pool."""
        await self.engine.dispose()

    async def one(self, client: int, way: str, data: dict[str, Any]) -> None:  # noqa: ARG002 - the pool has one for each
        """Enqueue one job, or write its row in another way, in a session of its own."""
        async with self.session.begin() as session:
            match way:
                case "session":
                    await session.enqueue(TASK, data)
                case "core":
                    await session.execute(CORE, {"task": TASK, "payload": data})
                case "core+notify":
                    await session.execute(CORE_NOTIFY, {"task": TASK, "payload": data})
                case "silent":
                    await session.enqueue(TASK, data, notify=False)
                case _:
                    await session.enqueue(TASK, data, notify="after_commit")

    async def many(self, data: list[dict[str, Any]]) -> None:
        """Enqueue jobs with enqueue_many."""
        async with self.session.begin() as session:
            await session.enqueue_many([NewJob(TASK, one) for one in data])

    async def serve(self) -> None:
        """Run workers; the first one's signal handlers stop it, and it the others."""
        o = self.options
        engine = create_async_engine(jobs_table.url(o.dsn, o.driver))
        tasks = Tasks()

        @tasks.task(o.serve)
        async def handler(job: JobContext) -> None:
            await no_op(job.payload)

        workers = [AsyncWorker(engine, tasks, concurrency=o.concurrency) for _ in range(o.workers)]
        others = [asyncio.create_task(worker.run()) for worker in workers[1:]]
        await workers[0].run()
        for worker in workers[1:]:
            worker.stop()
        await asyncio.gather(*others)
        await engine.dispose()


PROGRAM = OursAsync

if __name__ == "__main__":
    main(PROGRAM)
