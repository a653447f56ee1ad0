"""Connections that are cancelled, shared by a fork, or fewer than handlers."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import text
from sqlalchemy.ext.asyncio import async_sessionmaker

from sqlalchemy_jobs import AsyncWorker, JobContext, Tasks
from tests.engines import open_async_engine
from tests.faults.fleets import CAMPAIGN
from tests.workers import Jobs, jobs_on, on_drivers

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["psycopg", "asyncpg", "psycopg_async"])
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """An empty table and workers of each driver."""
    yield from jobs_on(request)


@on_drivers("asyncpg", "psycopg_async")
def test_handlers_cancelled_in_a_query_leak_no_connection(jobs: Jobs) -> None:
    """Case 42: a timeout in the middle of a statement gives the connection back to its pool."""
    chance = random.Random(42)  # noqa: S311 - dice, not keys
    count = round(60 * CAMPAIGN)

    async def run() -> tuple[int, int]:
        async with open_async_engine(jobs.url, pool_size=2, max_overflow=0) as engine:
            session = async_sessionmaker(engine)
            tasks = Tasks()

            @tasks.task("query", max_attempts=1)
            async def query(job: JobContext[float]) -> None:
                async with session() as its_own:
                    await its_own.execute(text("SELECT pg_sleep(:s)"), {"s": job.payload})

            @tasks.task("quick")
            async def quick(_: JobContext) -> None:
                async with session() as its_own:
                    await its_own.execute(text("SELECT 1"))

            for _ in range(count):
                timeout = chance.uniform(0.005, 0.1)
                jobs.enqueue("query", chance.choice([0.0, 0.05, 5.0]), timeout=timeout)
            await AsyncWorker(engine, tasks, concurrency=8).run(until_idle=True)
            await asyncio.sleep(0.3)  # what was cancelled last gives back what it held
            summary = await AsyncWorker(engine, tasks).run(until_idle=True)
            assert summary.attempts == 0
            jobs.enqueue("quick")
            summary = await AsyncWorker(engine, tasks).run(until_idle=True)
            return engine.pool.checkedout(), summary.succeeded  # type: ignore[attr-defined]

    assert asyncio.run(run()) == (0, 1)
    assert len(jobs.all()) == count + 1
    assert not jobs.unfinished()


def run_program(name: str, *arguments: str) -> list[dict[str, Any]]:
    """Run one of the programs to its end, and return what it printed."""
    # Python 3.12 warns of every fork beside threads.
    command = [sys.executable, "-W", "ignore::DeprecationWarning"]
    done = subprocess.run(
        [*command, REPOSITORY / "tests" / "programs" / name, *arguments],
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_fork_shares_neither_name_nor_connection(jobs: Jobs) -> None:
    """Case 45: a worker made before a fork runs in each child, under a name of its own.

    The application's engine is told of forks, and no process speaks to the server through
    another's connection.
    """
    kind = "async" if jobs.is_async else "sync"
    parent, *runs = run_program("forks.py", jobs.url, kind, "3")
    names = [run["name"] for run in runs]
    assert len(set(names)) == 4
    assert [name for name in names if name == parent["parent"]] == [names[-1]]
    rows = jobs.all()
    assert len(rows) == 61
    assert {(row.status, row.attempts) for row in rows} == {("succeeded", 1)}
    assert sorted(job_id for run in runs for job_id in run["ran"]) == [row.id for row in rows]
    *children, again = [set(run["spoke_to"]) for run in runs]
    assert set(parent["spoke_to"]) <= again, "the parent's pool is as it was"
    pids = [pid for each in (*children, again) for pid in each]
    assert len(pids) == len(set(pids))


def test_a_fork_beside_a_running_worker_leaves_it_alone(jobs: Jobs) -> None:
    """Case 45: a child ends by the signal that would stop its parent's worker.

    One that leaves the worker's block takes no connection from the parent, and may run a worker.
    """
    said = run_program("forks_running.py", jobs.url, "async" if jobs.is_async else "sync")
    assert [line for line in said if "trouble" in line] == []
    assert {"ended": -signal.SIGTERM} in said
    if not jobs.is_async:
        (parent,) = (line for line in said if "parent" in line)
        (child,) = (line for line in said if "child" in line)
        assert {"same": True} in said
        assert child["name"] != parent["name"]
        assert [line["pid"] for line in said if "ran" in line] == [parent["parent"]] * 2
    assert not jobs.unfinished()
