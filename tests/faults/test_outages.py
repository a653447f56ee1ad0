"""Workers that outlive servers which stop, crash, come late, refuse writes or have no patience."""

from __future__ import annotations

import asyncio
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest

from sqlalchemy_jobs import SchemaError
from tests.engines import open_engine
from tests.faults.fleets import CAMPAIGN, NEVER_LOOKS, Fleet, enqueue_elsewhere, quick_tasks
from tests.faults.server import LISTENERS, Knobs
from tests.workers import Jobs, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

    from sqlalchemy_jobs import JobContext, Tasks
    from tests.postgres import Cluster, StopMode
    from tests.workers import Running

FAST: dict[str, Any] = {"visibility_timeout": 60, "recovery_interval": 1}


@pytest.fixture
def fleet(own_cluster: Cluster) -> Iterator[Fleet]:
    """A database of each driver's on one server."""
    with Fleet(own_cluster) as fleet:
        yield fleet


def holding_tasks(hold: threading.Event) -> Tasks:
    """Return a quick task and two that wait for *hold*."""
    tasks = quick_tasks()

    @tasks.task("held")
    def held(_: JobContext) -> None:
        assert hold.wait(100)

    @tasks.task("held async")
    async def held_async(_: JobContext) -> None:
        await asyncio.to_thread(hold.wait, 100)

    return tasks


def hold_jobs(fleet: Fleet) -> dict[str, list[int]]:
    """Have every worker run two jobs that do not end, with others behind them."""
    held = {
        driver: [jobs.enqueue("held"), jobs.enqueue("held async")]
        for driver, jobs in fleet.jobs.items()
    }
    for driver, jobs in fleet.jobs.items():
        for job_id in held[driver]:
            jobs.wait(job_id, lambda job: job.status == "running")
    return held


def all_succeed_at_once(fleet: Fleet, ids: dict[str, list[int]]) -> None:
    """Assert that each of these jobs succeeds at its first attempt."""
    for driver, jobs in fleet.jobs.items():
        for job_id in ids[driver]:
            job = jobs.finished(job_id)
            assert (driver, job.status, job.attempts) == (driver, "succeeded", 1)


def complains_in_moderation(running: Running, seconds: float) -> None:
    """Assert that each command that failed said so, and less often than once a second."""
    broke = running.log.of("broke")
    for command in {record.command for record in broke}:  # type: ignore[attr-defined]
        records = running.log.of("broke", command=command)
        assert records[0].levelname == "ERROR"
        assert len(records) <= seconds + 2, "the log is flooded"


# --- 6: the server stops ------------------------------------------------------------------------


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_workers_outlive_an_outage_of_the_database(
    own_cluster: Cluster, fleet: Fleet, mode: StopMode
) -> None:
    """Case 6: while the server is away a worker waits; then it records, claims and listens."""
    knobs = Knobs(own_cluster)
    knobs.keep_commits()
    hold = threading.Event()
    began = time.monotonic()
    fleet.stack.callback(hold.set)
    fleet.start(holding_tasks(hold), concurrency=3, **NEVER_LOOKS, **FAST)
    held = hold_jobs(fleet)
    own_cluster.stop(mode)
    for running in fleet.running.values():
        running.log.wait_for("not_listening")
    hold.set()  # the handlers end while there is no database
    for running in fleet.running.values():
        running.log.wait_for("broke", command="settle")
    time.sleep(2 * CAMPAIGN)
    own_cluster.start()
    all_succeed_at_once(fleet, held)
    later = {driver: [enqueue_elsewhere(jobs)] for driver, jobs in fleet.jobs.items()}
    all_succeed_at_once(fleet, later)
    for driver, running in fleet.running.items():
        waited = fleet.jobs[driver].execute(
            "SELECT max(started_at - run_at) < interval '10 s' FROM jobs.jobs"
        )
        assert waited[0][0]
        assert running.thread.is_alive()
        complains_in_moderation(running, time.monotonic() - began)
    assert knobs.complaints() == []


@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_restart_is_hardly_noticed(own_cluster: Cluster, fleet: Fleet, mode: StopMode) -> None:
    """Case 6: after a restart between two jobs the next one is run, and told of."""
    Knobs(own_cluster).keep_commits()
    fleet.start(quick_tasks(), **NEVER_LOOKS)
    for running in fleet.running.values():
        running.ready()
    for _ in range(2):
        own_cluster.restart(mode)
        later = {
            driver: [wait_until(partial(enqueue_elsewhere, jobs))]
            for driver, jobs in fleet.jobs.items()
        }
        all_succeed_at_once(fleet, later)


@pytest.mark.timeout(240)
def test_jobs_of_a_long_outage_are_recovered(own_cluster: Cluster, fleet: Fleet) -> None:
    """Case 6: an outage longer than the leases costs their attempts, and no job."""
    hold = threading.Event()
    fleet.stack.callback(hold.set)
    fleet.start(holding_tasks(hold), visibility_timeout=2, recovery_interval=0.5)
    held = hold_jobs(fleet)
    own_cluster.stop()
    for running in fleet.running.values():
        running.log.wait_for("lease_lost")
    own_cluster.start()
    for driver, jobs in fleet.jobs.items():
        for job_id in held[driver]:
            jobs.wait(job_id, lambda job: job.attempts == 2 and job.status == "running")
    hold.set()
    for driver, jobs in fleet.jobs.items():
        for job_id in held[driver]:
            job = jobs.finished(job_id)
            assert (driver, job.status, job.attempts) == (driver, "succeeded", 2)
            assert "lease" in job.errors[0]["error"]


@pytest.mark.timeout(240)
def test_workers_wait_for_a_database_that_comes_later(own_cluster: Cluster, fleet: Fleet) -> None:
    """Case 6: a worker that is started before its database says so, and works when it is there."""
    tableless_url = own_cluster.url(own_cluster.create_database(), "psycopg")
    engine = fleet.stack.enter_context(open_engine(tableless_url))
    own_cluster.stop()
    fleet.start(quick_tasks(), **NEVER_LOOKS)
    for running in fleet.running.values():
        running.log.wait_for("unreachable")
    tableless = Jobs("psycopg", tableless_url, engine)
    refused = fleet.stack.enter_context(tableless.worker(quick_tasks()))
    refused.log.wait_for("unreachable")
    own_cluster.start()
    later = {driver: [enqueue_elsewhere(jobs)] for driver, jobs in fleet.jobs.items()}
    all_succeed_at_once(fleet, later)
    # No retry makes a table, so the worker whose database has none ends.
    error = refused.failed()
    assert isinstance(error, SchemaError)
    assert "alembic upgrade head" in str(error)


# --- 46: the server refuses writes --------------------------------------------------------------


@pytest.mark.timeout(240)
def test_workers_outlive_a_server_that_refuses_writes(own_cluster: Cluster, fleet: Fleet) -> None:
    """Case 46: errors are logged, connections replaced, and everything goes on by itself."""
    knobs = Knobs(own_cluster)
    hold = threading.Event()
    began = time.monotonic()
    fleet.stack.callback(hold.set)
    fleet.start(
        holding_tasks(hold),
        concurrency=3,
        visibility_timeout=30,
        recovery_interval=0.5,
        safety_interval=0.5,
    )
    held = hold_jobs(fleet)
    wait_until(lambda: len(knobs.sessions(LISTENERS)) == 3)
    before = set(knobs.sessions(f"NOT ({LISTENERS})"))
    with knobs.read_only():
        hold.set()
        for running in fleet.running.values():
            for command in ("claim", "settle", "recover"):
                broke = running.log.wait_for("broke", command=command)
                assert "read-only" in broke.getMessage()
        time.sleep(2 * CAMPAIGN)
    queued = {driver: [enqueue_elsewhere(jobs)] for driver, jobs in fleet.jobs.items()}
    all_succeed_at_once(fleet, held)
    all_succeed_at_once(fleet, queued)
    for running in fleet.running.values():
        for command in ("claim", "settle", "recover"):
            running.log.wait_for("healed", command=command)
        complains_in_moderation(running, time.monotonic() - began)
    assert not before.intersection(knobs.sessions())


# --- 47: the server has no patience -------------------------------------------------------------


@pytest.mark.timeout(240)
def test_idle_connections_survive_an_impatient_server(own_cluster: Cluster, fleet: Fleet) -> None:
    """Case 47: the worker's own connections are idle for longer than sessions may be."""
    knobs = Knobs(own_cluster)
    role = knobs.role(
        statement_timeout="500ms",
        lock_timeout="200ms",
        idle_session_timeout="1s",
        idle_in_transaction_session_timeout="1s",
    )
    fleet.start(quick_tasks(), through=partial(knobs.url_of, role), **NEVER_LOOKS)
    for running in fleet.running.values():
        running.ready()
    wait_until(lambda: len(knobs.sessions(f"usename = '{role}' AND {LISTENERS}")) == 3)
    before = knobs.sessions(f"usename = '{role}'")
    time.sleep(4 * CAMPAIGN)
    later = {driver: [enqueue_elsewhere(jobs)] for driver, jobs in fleet.jobs.items()}
    all_succeed_at_once(fleet, later)
    for running in fleet.running.values():
        assert not running.log.of("not_listening")
        assert not running.log.of("broke")
    assert set(before) <= set(knobs.sessions(f"usename = '{role}'"))


@pytest.mark.timeout(240)
def test_sweeps_shrink_until_an_impatient_server_lets_them(
    own_cluster: Cluster, fleet: Fleet
) -> None:
    """Case 47: a batch that takes longer than a statement may is halved, and so gets through."""
    role = Knobs(own_cluster).role(statement_timeout="400ms")
    for jobs in fleet.jobs.values():
        slow_down(jobs, "DELETE", 0.001)
        slow_down(jobs, "UPDATE", 0.006)
        jobs.execute(
            "INSERT INTO jobs.jobs (task, status, attempts, created_at, updated_at) "
            "SELECT 'old', 'succeeded', 1, now() - interval '4 days', now() - interval '4 days' "
            "FROM generate_series(1, 1200)"
        )
        jobs.execute(
            "INSERT INTO jobs.jobs (task, status, attempts, max_attempts, locked_by, "
            "lease_expires_at, started_at) SELECT 'lost', 'running', 1, 2, 'gone', "
            "now() - interval '1 min', now() FROM generate_series(1, 120)"
        )
    fleet.start(quick_tasks(), through=partial(Knobs.url_of, role), **NEVER_LOOKS)
    for driver, jobs in fleet.jobs.items():
        count = "SELECT status, count(*) FROM jobs.jobs GROUP BY status"
        wait_until(lambda: dict(map(tuple, jobs.execute(count))) == {"pending": 120})  # noqa: B023
        broke = fleet.running[driver].log.of("broke")
        assert {record.command for record in broke} == {"recover", "prune"}  # type: ignore[attr-defined]
        assert len(broke) <= 6
    later = {driver: [enqueue_elsewhere(jobs)] for driver, jobs in fleet.jobs.items()}
    all_succeed_at_once(fleet, later)


def slow_down(jobs: Jobs, what: str, seconds: float) -> None:
    """Make each row of a statement take so long."""
    name = f"slow_{what}"
    jobs.execute(
        f"CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"PERFORM pg_sleep({seconds}); "
        "IF TG_OP = 'DELETE' THEN RETURN OLD; END IF; RETURN NEW; END $$"
    )
    jobs.execute(
        f"CREATE TRIGGER {name} BEFORE {what} ON jobs.jobs FOR EACH ROW EXECUTE FUNCTION {name}()"
    )
