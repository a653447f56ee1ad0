"""A worker of each driver on one server of a test's own, and jobs from elsewhere.

def test_it(own_cluster):
    with Fleet(own_cluster) as fleet:
        fleet.start(quick_tasks(), concurrency=4)
        own_cluster.restart()
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Final, Self

from sqlalchemy_jobs import Tasks, enqueue
from tests.workers import ON_POSTGRES, Jobs, Running

if TYPE_CHECKING:
    from collections.abc import Callable

    from tests.postgres import Server

NEVER_LOOKS: Final[dict[str, Any]] = {
    "poll_interval": 600,
    "max_poll_interval": 600,
    "safety_interval": 600,
}
"""Options of a worker that finds a job because it is told of it, or not at all."""

CAMPAIGN: Final = float(os.environ.get("SQLALCHEMY_JOBS_CAMPAIGN", "1"))
"""How many times longer than a test needs its faults shall last."""


def quick_tasks(*names: str) -> Tasks:
    """Return tasks that do nothing."""
    tasks = Tasks()
    for name in names or ("quick",):
        tasks.register(lambda _: None, name)
    return tasks


def enqueue_elsewhere(jobs: Jobs, task: str = "quick", payload: Any = None, **options: Any) -> int:
    """Enqueue as another process does: nothing but the notification wakes the worker."""
    with jobs.engine.begin() as connection:
        job_id = enqueue(connection, task, payload, **options)
    assert job_id is not None
    return job_id


def told(jobs: Jobs, task: str = "quick") -> None:
    """Assert that a job of another process is run: that somebody was notified, or looked."""
    job_id = enqueue_elsewhere(jobs, task)
    assert jobs.finished(job_id).status == "succeeded"


def url_for(server: Server, database: str, driver: str) -> str:
    """Return the URL of a database for a driver of ours."""
    return server.url(database, "asyncpg" if driver == "asyncpg" else "psycopg")


class Fleet:
    """A worker of each driver, each on a database of its own."""

    def __init__(self, server: Server) -> None:
        """Start nothing."""
        self.server = server
        self.stack = ExitStack()
        self.jobs: dict[str, Jobs] = {}
        self.running: dict[str, Running] = {}

    def __enter__(self) -> Self:
        """Make the databases and their tables."""
        with ExitStack() as stack:
            for driver in ON_POSTGRES:
                url = url_for(self.server, self.server.create_database(), driver)
                self.jobs[driver] = stack.enter_context(Jobs.opened(driver, url))
            self.stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        """Stop the workers."""
        self.stack.close()

    def start(self, tasks: Tasks, *, through: Callable[[str], str] = str, **options: Any) -> None:
        """Start each database's worker, at the URL that *through* makes of the database's."""
        for driver, jobs in self.jobs.items():
            at = Jobs(driver, through(jobs.url), jobs.engine)
            self.running[driver] = self.stack.enter_context(at.worker(tasks, **options))
