"""sqlalchemy-jobs with Worker and JobSession, on psycopg."""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import Engine, create_engine
from sqlalchemy.orm import sessionmaker

from sqlalchemy_jobs import JobContext, JobSession, NewJob, Tasks, Worker, metadata

from . import jobs_table
from .ours_async import CORE, CORE_NOTIFY
from .protocol import TASK, SyncProgram, main, started


class OursSync(SyncProgram):
    """A session per transaction, as an application has it."""

    settings = "worker and session defaults; the engine's pool has one connection a client"
    finished = jobs_table.FINISHED
    succeeded = jobs_table.SUCCEEDED
    ways = ("session", "core", "core+notify", "silent", "after_commit")

    engine: Engine
    session: sessionmaker[JobSession]

    def setup(self) -> None:
        """Create the table."""
        engine = create_engine(jobs_table.url(self.options.dsn, "psycopg"))
        metadata.create_all(engine)
        engine.dispose()

    def open(self, clients: int) -> None:
        """Make the engine and the session class."""
        url = jobs_table.url(self.options.dsn, "psycopg")
        self.engine = create_engine(url, pool_size=clients)
        self.session = sessionmaker(self.engine, class_=JobSession)

    def close(self) -> None:
        """Close the pool."""
        self.engine.dispose()

    def one(self, way: str, data: dict[str, Any]) -> None:
        """Enqueue one job, or write its row in another way, in a session of its own."""
        with self.session.begin() as session:
            match way:
                case "session":
                    session.enqueue(TASK, data)
                case "core":
                    session.execute(CORE, {"task": TASK, "payload": data})
                case "core+notify":
                    session.execute(CORE_NOTIFY, {"task": TASK, "payload": data})
                case "silent":
                    session.enqueue(TASK, data, notify=False)
                case _:
                    session.enqueue(TASK, data, notify="after_commit")

    def many(self, data: list[dict[str, Any]]) -> None:
        """Enqueue jobs with enqueue_many."""
        with self.session.begin() as session:
            session.enqueue_many([NewJob(TASK, one) for one in data])

    def work(self) -> None:
        """Run one worker; it watches for signals itself."""
        engine = create_engine(jobs_table.url(self.options.dsn, "psycopg"))
        tasks = Tasks()

        @tasks.task(self.options.serve)
        def handler(job: JobContext) -> None:
            started(job.payload["seq"])
            if job.payload["busy_ms"]:
                time.sleep(job.payload["busy_ms"] / 1000)

        Worker(engine, tasks, concurrency=self.options.concurrency).run()
        engine.dispose()


PROGRAM = OursSync

if __name__ == "__main__":
    main(PROGRAM)
