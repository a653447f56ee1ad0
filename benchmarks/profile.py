"""Where a worker's time goes: drain jobs under cProfile and print the time per job by function.

    python -m benchmarks.profile --worker async --driver psycopg --concurrency 100

The profiler makes every call slower, so look at shares and not at sums; the jobs a second of an
unprofiled drain of the same size are printed first. Time spent waiting for the server is that of
the event loop's or the lock's wait.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import io
import pstats
import threading
import time
from typing import TYPE_CHECKING, Any

from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_jobs import AsyncWorker, JobContext, Tasks, Worker
from tests.postgres import Cluster

from .bench import SERVER_SETTINGS
from .processes import call
from .programs.jobs_table import url
from .programs.protocol import TASK

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """Profile what the command line asks for."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.profile", description=__doc__)
    parser.add_argument("--worker", choices=["async", "sync"], default="async")
    parser.add_argument("--driver", choices=["asyncpg", "psycopg"], default="asyncpg")
    parser.add_argument("--concurrency", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=10_000)
    parser.add_argument("--rows", type=int, default=40, help="functions to show")
    parser.add_argument("--sort", choices=["tottime", "cumtime"], default="tottime")
    parser.add_argument("--postgres", type=int, help="major version (the newest that is found)")
    arguments = parser.parse_args()
    drain = drain_async if arguments.worker == "async" else drain_sync
    driver = arguments.driver if arguments.worker == "async" else "psycopg"
    with Cluster(arguments.postgres, durable=True, settings=SERVER_SETTINGS) as cluster:
        dsn = f"postgresql://postgres@127.0.0.1:{cluster.port}/"

        def prepared() -> str:
            database = cluster.create_database()
            call("ours_async", ["setup", "--dsn", dsn + database])
            call("ours_async", ["fill", "--dsn", dsn + database, "--n", str(arguments.jobs)])
            cluster.psql("VACUUM ANALYZE", database)
            return url(dsn + database, driver)

        plain = prepared()
        begun = time.perf_counter()
        drain(plain, arguments.concurrency)
        seconds = time.perf_counter() - begun
        print(
            f"without the profiler: {arguments.jobs / seconds:,.0f} jobs/s, start and end included"
        )
        address = prepared()
        stats = profiled(lambda: drain(address, arguments.concurrency))
    show(stats, arguments.jobs, arguments.rows, arguments.sort)


def drain_async(address: str, concurrency: int) -> None:
    """Run all jobs with an AsyncWorker."""

    async def run() -> None:
        engine = create_async_engine(address)
        tasks = Tasks()

        @tasks.task(TASK)
        async def handler(job: JobContext) -> None:
            pass

        await AsyncWorker(engine, tasks, concurrency=concurrency).run(until_idle=True)
        await engine.dispose()

    asyncio.run(run())


def drain_sync(address: str, concurrency: int) -> None:
    """Run all jobs with a Worker."""
    engine = create_engine(address)
    tasks = Tasks()

    @tasks.task(TASK)
    def handler(job: JobContext) -> None:
        pass

    Worker(engine, tasks, concurrency=concurrency).run(until_idle=True)
    engine.dispose()


def profiled(work: Callable[[], None]) -> pstats.Stats:
    """Run *work* and return what this thread and every one it starts spent where."""
    profiles = [cProfile.Profile()]

    def begin(*_: Any) -> None:
        profile = cProfile.Profile()
        profiles.append(profile)
        profile.enable()  # takes the place of this function in the new thread

    threading.setprofile(begin)
    try:
        profiles[0].runcall(work)
    finally:
        threading.setprofile(None)
    stats = pstats.Stats(profiles[0])
    for profile in profiles[1:]:
        profile.create_stats()
        if getattr(profile, "stats", None):
            stats.add(profile)
    return stats


def show(stats: pstats.Stats, jobs: int, rows: int, sort: str) -> None:
    """Print the costliest functions in microseconds a job."""
    by_function: dict[tuple[str, int, str], tuple[int, int, float, float, Any]]
    by_function = stats.stats  # type: ignore[attr-defined] # pstats' own, since ever
    order = 2 if sort == "tottime" else 3
    lines = sorted(by_function.items(), key=lambda item: item[1][order], reverse=True)[:rows]
    out = io.StringIO()
    print(f"{'calls/job':>10} {'own us/job':>11} {'total us/job':>13}  function", file=out)
    for (file, line, name), (_, calls, own, total, _) in lines:
        short = "/".join(file.split("/")[-2:])
        where = name if file == "~" else f"{short}:{line} {name}"
        print(
            f"{calls / jobs:>10.2f} {own / jobs * 1e6:>11.1f} {total / jobs * 1e6:>13.1f}  {where}",
            file=out,
        )
    print(out.getvalue(), end="")


if __name__ == "__main__":
    main()
