"""A worker as a process of its own, beside an application that enqueues.

    python examples/script.py enqueue 10    # what an application does
    python examples/script.py               # work until Ctrl-C or SIGTERM

Any number of these may run at once. It works on a SQLite file; set DATABASE_URL to run it on
PostgreSQL.
"""

import logging
import os
import sys
import time

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from sqlalchemy_jobs import JobContext, JobSession, NewJob, Tasks, Worker, metadata

url = os.environ.get("DATABASE_URL", "sqlite:///script.sqlite")
engine = create_engine(url.replace("postgres://", "postgresql://", 1))
Session = sessionmaker(engine, class_=JobSession)
tasks = Tasks()


@tasks.task("count", timeout=60)
def count(job: JobContext[int]) -> None:
    """Count to the payload, and stop early if nobody wants the result any more."""
    for number in range(1, job.payload + 1):
        job.raise_if_cancelled()
        print(f"job {job.id}: {number} of {job.payload}", flush=True)
        time.sleep(0.1)


def enqueue(jobs: int) -> None:
    """Enqueue so many jobs in one transaction."""
    with Session.begin() as session:
        ids = session.enqueue_many(NewJob("count", payload=5) for _ in range(jobs))
    print(f"enqueued {len(ids)} jobs")


def work() -> None:
    """Run jobs until a signal comes."""
    summary = Worker(engine, tasks, concurrency=4).run()
    print(f"stopped after {summary.attempts} attempts, {summary.succeeded} of them succeeded")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    metadata.create_all(engine)  # a real application uses Alembic
    if sys.argv[1:2] == ["enqueue"]:
        enqueue(int(sys.argv[2]))
    else:
        work()
