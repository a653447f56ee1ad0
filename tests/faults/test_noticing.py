"""How workers learn of jobs: by notifications, their price, clocks, and looks."""

from __future__ import annotations

import random
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

import psycopg
import pytest
from sqlalchemy import text
from sqlalchemy.orm import sessionmaker

from sqlalchemy_jobs import JobSession, Tasks, _listen_async, _listen_thread
from sqlalchemy_jobs._joblog import JobLog
from sqlalchemy_jobs._listen import PROVE_EVERY
from sqlalchemy_jobs._messages import Claim
from sqlalchemy_jobs._store import Store
from sqlalchemy_jobs.models import metadata
from tests.engines import open_engine
from tests.faults.fleets import (
    CAMPAIGN,
    NEVER_LOOKS,
    enqueue_elsewhere,
    quick_tasks,
    told,
    url_for,
)
from tests.faults.proxy import Proxy
from tests.workers import ON_POSTGRES, Jobs, jobs_on, on_drivers, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from sqlalchemy import Connection

    from sqlalchemy_jobs import JobContext
    from tests.conftest import Database
    from tests.postgres import Server
    from tests.workers import Running

BUSY: Final = 5.0
"""Seconds that a start may take on a very busy machine; by a mere look it would take minutes."""


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL."""
    yield from jobs_on(request)


# --- 24: jobs for later -------------------------------------------------------------------------


def test_a_delayed_job_starts_when_it_is_due(jobs: Jobs) -> None:
    """Case 24: without a look or a notice at that time; a retry is a delayed job too."""
    tasks = quick_tasks()

    @tasks.task("fails first", backoff=lambda _: 1.0)
    def fails_first(job: JobContext) -> None:
        if job.attempt == 1:
            raise ValueError

    with jobs.worker(tasks, **NEVER_LOOKS) as running:
        running.ready()
        retried = enqueue_elsewhere(jobs, "fails first")
        far = enqueue_elsewhere(jobs, delay=20)
        delayed = [enqueue_elsewhere(jobs, delay=delay) for delay in (2.5, 1.0, 1.7)]
        for job_id in (retried, *delayed):
            assert jobs.finished(job_id).status == "succeeded"
        # The worker now sleeps towards the one that is far away.
        sooner = enqueue_elsewhere(jobs, delay=1)
        assert jobs.finished(sooner).status == "succeeded"
        assert jobs.job(far).status == "pending"
    late = latencies(jobs)
    assert len(late) == 5
    assert min(late) >= 0
    assert max(late) < BUSY
    assert sorted(late)[2] < 0.5


def latencies(jobs: Jobs) -> list[float]:
    """Return how long after its time each job started, by the database's clock."""
    rows = jobs.execute(
        "SELECT extract(epoch FROM started_at - run_at)::float FROM jobs.jobs "
        "WHERE started_at IS NOT NULL"
    )
    return [row[0] for row in rows]


# --- 25: the price of a notification ------------------------------------------------------------


def test_a_transaction_notifies_once(jobs: Jobs) -> None:
    """Case 25: a thousand jobs of one task are one notification, and none if asked so."""
    with jobs.worker(quick_tasks(), **NEVER_LOOKS) as running, hearing(jobs) as heard:
        running.ready()
        rests(jobs, heard)
        with jobs.session.begin() as session:
            for _ in range(1000):
                session.enqueue("quick")
        assert heard() == ["quick"]
        wait_until(lambda: not jobs.unfinished())
        rests(jobs, heard)
        with jobs.session.begin() as session:
            session.enqueue("quick", notify=False)
        assert heard() == []


def rests(jobs: Jobs, heard: Callable[[], list[str]]) -> None:
    """Wait until the worker asks to be notified, as one does that finds nothing for a while."""

    def is_notified() -> bool:
        told(jobs)
        return heard() == ["quick"]

    wait_until(is_notified, every=0.3)
    wait_until(lambda: not heard())


@contextmanager
def hearing(jobs: Jobs) -> Generator[Callable[[], list[str]]]:
    """Yield what returns the notifications that workers got since the last call."""
    with psycopg.connect(
        jobs.url.replace("+asyncpg", "").replace("+psycopg", ""), autocommit=True
    ) as connection:
        connection.execute('LISTEN "jobs.jobs"')
        yield lambda: [notice.payload for notice in connection.notifies(timeout=0.2)]


@pytest.mark.campaign
@on_drivers("asyncpg")
def test_notifications_do_not_ruin_the_rate_of_commits(
    jobs: Jobs, record_property: Callable[[str, object], None]
) -> None:
    """Case 25: many small transactions, each with a job, keep their rate while a worker rests."""
    rates: dict[str, float] = {}
    with jobs.worker(quick_tasks(), **NEVER_LOOKS) as running:
        running.ready()
        for how in ("commit", "after_commit", False):
            rates[str(how)] = commits_per_second(jobs, how, seconds=1.5 * CAMPAIGN)
    record_property("commits a second", rates)
    assert rates["commit"] > rates["False"] / 5


def commits_per_second(jobs: Jobs, notify: Any, seconds: float) -> float:
    """Let 16 clients commit one job a transaction, of a task that nobody has."""
    until = time.monotonic() + seconds
    sessions = sessionmaker(class_=JobSession)

    def client(number: int) -> int:
        commits = 0
        with open_engine(jobs.engine.url) as engine, sessions(bind=engine) as session:
            while time.monotonic() < until:
                session.enqueue("nobody's", notify=notify)
                session.commit()
                commits += 1
        return commits

    with ThreadPoolExecutor(16) as pool:
        return sum(pool.map(client, range(16))) / seconds


# --- 26: what a notification can hold -----------------------------------------------------------


def test_neither_payload_nor_names_are_too_long_for_a_notification(jobs: Jobs) -> None:
    """Case 26: a payload of 1 MB, the longest task and a schema of 60 letters wake the worker."""
    schema, longest = "s" * 60, "ü" * 200
    translated: dict[str, Any] = {"execution_options": {"schema_translate_map": {"jobs": schema}}}
    jobs.execute(f"CREATE SCHEMA {schema}")
    try:
        with open_engine(jobs.engine.url, **translated) as engine:
            metadata.create_all(engine)
            there = Jobs(jobs.driver, jobs.url, engine)
            tasks = quick_tasks("quick", longest)
            with there.worker(tasks, engine=translated, **NEVER_LOOKS) as running:
                running.ready()
                told(there)
                for task in ("quick", longest):
                    job_id = enqueue_elsewhere(there, task, {"text": "x" * 1_000_000})
                    assert there.finished(job_id).status == "succeeded"
    finally:
        jobs.execute(f"DROP SCHEMA {schema} CASCADE")


# --- 27: what drivers make of notifications -----------------------------------------------------


def test_no_notification_is_late_whatever_else_goes_on(jobs: Jobs) -> None:
    """Case 27: jobs at random times start at once, beside a pool of one connection."""
    tasks = Tasks()

    def works(_: JobContext) -> None:
        with engines[0].connect() as connection:
            connection.execute(text("SELECT pg_sleep(0.005)"))

    async def works_async(_: JobContext) -> None:
        async with engines[0].connect() as connection:
            await connection.execute(text("SELECT pg_sleep(0.005)"))

    tasks.register(works_async if jobs.is_async else works, "works")
    engine = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 60}
    pauses = random.Random(27)  # noqa: S311 - the same every time
    count = round(40 * CAMPAIGN)
    with jobs.worker(tasks, engine=engine, **NEVER_LOOKS) as running:
        engines = [running.worker._engine]
        running.ready()
        for _ in range(count):
            enqueue_elsewhere(jobs, "works")
            time.sleep(pauses.uniform(0, 0.15))
        wait_until(lambda: not jobs.unfinished())
    late = sorted(latencies(jobs))
    assert len(late) == count
    assert late[count // 2] < 0.5
    assert late[-1] < BUSY


# --- 28: many idle workers ----------------------------------------------------------------------


class Crowd:
    """Idle workers of every driver on one table."""

    def __init__(self, database: Database, stack: ExitStack, *, each: int) -> None:
        """Start so many of each."""
        self.looks: list[str] = []
        jobs = stack.enter_context(Jobs.opened("psycopg", database.url("psycopg")))
        self.jobs = jobs
        self.proxy = stack.enter_context(Proxy(jobs.url))
        self.running: list[Running] = []
        for driver in ON_POSTGRES:
            url = self.proxy.url(url_for(database.cluster, database.name, driver))
            at = Jobs(driver, url, jobs.engine)
            for _ in range(each):
                worker = at.worker(quick_tasks(), **NEVER_LOOKS)
                self.running.append(stack.enter_context(worker))
        for running in self.running:
            running.ready()


def test_a_crowd_of_workers_does_not_stampede(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case 28: a job costs each idle worker about one claim; retries of an outage are spread."""
    claims: list[float] = []
    tries: dict[str, float] = {}
    perform = Store.perform

    def counted(self: Store, connection: Connection, command: Any) -> Any:
        if isinstance(command, Claim):
            claims.append(time.monotonic())
        return perform(self, connection, command)

    def broke(self: JobLog, loop: str, failures: int, _: str) -> None:
        if (loop, failures) == ("claim", 3):
            tries[self._worker] = time.monotonic()

    monkeypatch.setattr(Store, "perform", counted)
    monkeypatch.setattr(JobLog, "broke", broke)
    with ExitStack() as stack:
        crowd = Crowd(database, stack, each=7)
        wait_until(lambda: are_quiet(claims))
        before = len(claims)
        for _ in range(3):
            told(crowd.jobs)
            wait_until(lambda: are_quiet(claims))
        assert len(claims) - before <= 1.5 * 3 * len(crowd.running)
        crowd.proxy.refuse()
        crowd.proxy.cut()
        wait_until(lambda: len(tries) == len(crowd.running))
        times = list(tries.values())
        assert max(times) - min(times) > 0.3
        assert most_within(0.1, times) <= len(times) / 2
        crowd.proxy.heal()
        told(crowd.jobs)


def are_quiet(claims: list[float]) -> bool:
    """Tell whether nobody has looked for a while."""
    return bool(claims) and time.monotonic() - claims[-1] > 1.0


def most_within(seconds: float, times: list[float]) -> int:
    """Return how many of these times fall together at most."""
    return max(sum(at <= other < at + seconds for other in times) for at in times)


@pytest.mark.timeout(240)
def test_an_idle_worker_hardly_asks(cluster: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 28: with LISTEN, a minute of idling costs at most 8 statements, whatever for.

    All its intervals are shorter here, by the same factor as the minute.
    """
    shorter = max(1.0, 8 / CAMPAIGN)
    for module in (_listen_async, _listen_thread):
        monkeypatch.setattr(module, "PROVE_EVERY", PROVE_EVERY / shorter)
    with ExitStack() as stack:
        names: dict[str, str] = {}
        for driver in ON_POSTGRES:
            names[driver] = name = cluster.create_database()
            stack.callback(cluster.drop_database, name)
            jobs = stack.enter_context(Jobs.opened(driver, url_for(cluster, name, driver)))
            worker = jobs.worker(
                quick_tasks(),
                poll_interval=2,
                max_poll_interval=30,
                safety_interval=30 / shorter,
                recovery_interval=60 / shorter,
            )
            stack.enter_context(worker).ready()
            told(jobs)
        probe = cluster.create_database()
        stack.callback(cluster.drop_database, probe)
        try:
            cluster.psql("CREATE EXTENSION pg_stat_statements", probe)
        except psycopg.Error as error:
            pytest.skip(f"no pg_stat_statements: {error}")
        count = (
            "SELECT datname, coalesce(sum(calls), 0)::int, "
            "array_agg(calls || ' ' || left(query, 60)) "
            "FROM pg_stat_statements JOIN pg_database ON oid = dbid GROUP BY datname"
        )
        time.sleep(3)  # the last outcome, and the look that follows
        cluster.psql("SELECT pg_stat_statements_reset()", probe)
        time.sleep(60 / shorter)
        asked = {name: (calls, said) for name, calls, said in cluster.psql(count, probe)}
        for driver, name in names.items():
            calls, said = asked.get(name, (0, []))
            assert 2 <= calls <= 8, (driver, said)
