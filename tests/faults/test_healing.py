"""Every loop of a worker heals, or the worker ends with what cannot be healed: case 5.

The workers of a test run side by side, so that they wait together.
"""

from __future__ import annotations

import secrets
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url

from sqlalchemy_jobs import (
    Health,
    JobContext,
    NewJob,
    SchemaError,
    Tasks,
    _listen_async,
    _listen_thread,
    enqueue,
    health,
)
from sqlalchemy_jobs._messages import Chore, Claim, Renew, Settle, Sweep
from tests.workers import ON_POSTGRES, Jobs, jobs_on, on_drivers, wait_until

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from sqlalchemy import Connection

    from tests.conftest import Database
    from tests.workers import Running


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL."""
    yield from jobs_on(request)


def health_of(running: Running) -> Health:
    """Return how a worker is."""
    found = running.worker.health()
    assert isinstance(found, Health)
    return found


def is_ok(running: Running) -> bool:
    """Whether a worker is well."""
    return health_of(running).ok


def is_listening(running: Running) -> bool:
    """Whether notifications arrive."""
    return health_of(running).listening


def is_swamped(running: Running) -> bool:
    """Whether many outcomes wait for being recorded."""
    return health_of(running).unrecorded >= 100


def has_swept(running: Running) -> bool:
    """Whether both sweeps of the start are over."""
    return None not in (health_of(running).loops[chore].age for chore in ("recover", "prune"))


def has_failed(running: Running, loop: str, times: int) -> bool:
    """Whether a loop has failed so often in a row."""
    return health_of(running).loops[loop].failures >= times


class Part:
    """A worker with a role and a task of its own, whose rights can be taken away."""

    def __init__(self, jobs: Jobs, loop: str) -> None:
        """Make the role."""
        self.jobs = jobs
        self.loop = loop
        self.task = f"for {loop}"
        self.role = f"healing_{secrets.token_hex(6)}"
        self.go_on = threading.Event()
        self.running: Any = None
        columns = ", ".join(row.name for row in jobs.execute(COLUMNS))
        for statement in (
            f"CREATE ROLE {self.role} LOGIN PASSWORD '{self.role}'",
            f"GRANT USAGE ON SCHEMA jobs TO {self.role}",
            f"GRANT SELECT, DELETE, UPDATE ({columns}) ON jobs.jobs TO {self.role}",
        ):
            jobs.execute(statement)

    @contextmanager
    def worker(self, **options: Any) -> Generator[None]:
        """Run the worker; its task waits for the test's word, and fails at the first attempt."""
        url = make_url(self.jobs.url).set(username=self.role, password=self.role)
        address = url.render_as_string(hide_password=False)
        tasks = Tasks()
        tasks.register(self._handle, self.task, backoff=lambda _: 0.05)
        try:
            there = Jobs(self.jobs.driver, address, self.jobs.engine)
            with there.worker(tasks, concurrency=1, shutdown_timeout=3, **options) as self.running:
                yield
        finally:
            self.go_on.set()
            self.jobs.execute(f"DROP OWNED BY {self.role}")
            self.jobs.execute(f"DROP ROLE {self.role}")

    def _handle(self, job: JobContext) -> None:
        assert self.go_on.wait(60)
        if job.attempt == 1:
            raise ValueError("once")

    def take(self, right: str) -> None:
        """Take a right away."""
        self.jobs.execute(f"REVOKE {right} ON jobs.jobs FROM {self.role}")

    def give(self, right: str) -> None:
        """Give a right back."""
        self.jobs.execute(f"GRANT {right} ON jobs.jobs TO {self.role}")


COLUMNS = (
    "SELECT attname AS name FROM pg_attribute WHERE attrelid = 'jobs.jobs'::regclass "
    "AND attnum > 0 AND NOT attisdropped"
)

RIGHTS = {
    "claim": "UPDATE (started_at)",
    "settle": "UPDATE (run_at)",  # to put a job back is the only outcome that needs it
    "renew": "UPDATE (lease_expires_at)",
    "recover": "UPDATE (run_at)",
    "prune": "DELETE",
}
"""What a loop needs of the table, and no other that is at work in the same worker."""

LISTENER_OF = (
    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = :role "
    "AND (query LIKE 'LISTEN%' OR query LIKE '%AS bell')"
)


@pytest.mark.timeout(240)
def test_every_loop_heals(jobs: Jobs) -> None:
    """Case 5: A loop that is refused says so once, disturbs no other, and resumes when it may."""
    options: dict[str, dict[str, Any]] = {
        "renew": {"visibility_timeout": 9},
        "recover": {"recovery_interval": 0.2},
        "prune": {"prune_interval": 0.2, "retain_succeeded": 1800},
    }
    ids: dict[str, int] = {}
    with ExitStack() as stack:
        parts = {loop: Part(jobs, loop) for loop in health.LOOPS}
        for loop, part in parts.items():
            stack.enter_context(part.worker(**options.get(loop, {})))
        for part in parts.values():
            part.running.ready()
            wait_until(partial(is_ok, part.running))
            # With the sweeps of the start over, no worker does what another is to do.
            wait_until(partial(has_swept, part.running))
        for loop in ("settle", "renew"):
            ids[loop] = jobs.enqueue(parts[loop].task)
            parts[loop].running.log.wait_for("started")
        parts["listen"].go_on.set()
        jobs.finished(jobs.enqueue(parts["listen"].task))  # with it all connections are open

        for loop, right in RIGHTS.items():
            parts[loop].take(right)
        jobs.execute(f"ALTER ROLE {parts['listen'].role} NOLOGIN")
        assert jobs.execute(LISTENER_OF, role=parts["listen"].role)

        ids["claim"] = enqueue_elsewhere(jobs, parts["claim"].task)
        ids["listen"] = enqueue_elsewhere(jobs, parts["listen"].task)
        lost, old = (enqueue_elsewhere(jobs, "of nobody") for _ in range(2))
        jobs.execute(
            "UPDATE jobs.jobs SET status = 'running', attempts = 1, max_attempts = 3, "
            "locked_by = 'gone', started_at = now(), lease_expires_at = now() WHERE id = :id",
            id=lost,
        )
        jobs.execute(
            "UPDATE jobs.jobs SET status = 'succeeded', updated_at = now() - interval '1 h' "
            "WHERE id = :id",
            id=old,
        )
        for loop in ("claim", "settle"):
            parts[loop].go_on.set()

        for loop, part in parts.items():
            wait_until(partial(has_failed, part.running, loop, 2))
            seen = health_of(part.running)
            assert seen.ok is (loop == "listen"), (loop, seen)
            assert {name for name, one in seen.loops.items() if one.failures} == {loop}
            assert ("permission denied" if loop != "listen" else "not permitted to log in") in str(
                seen.loops[loop].error
            )
            assert seen.listening is (loop != "listen")
        # A worker that hears nothing looks by itself.
        assert jobs.finished(ids["listen"]).status == "succeeded"
        assert [jobs.job(ids[loop]).status for loop in ("claim", "settle", "renew")] == [
            "pending",
            "running",
            "running",
        ]

        for loop, right in RIGHTS.items():
            parts[loop].give(right)
        jobs.execute(f"ALTER ROLE {parts['listen'].role} LOGIN")
        for loop, part in parts.items():
            part.running.log.wait_for("healed", command=loop)
            wait_until(partial(is_ok, part.running))
        parts["renew"].go_on.set()
        for loop in ("claim", "settle", "renew"):
            job = jobs.finished(ids[loop])
            assert (job.status, job.attempts) == ("succeeded", 2), loop
        jobs.wait(lost, lambda job: job.status == "pending")
        wait_until(lambda: [job.id for job in jobs.all()].count(old) == 0)
        wait_until(partial(is_listening, parts["listen"].running))
        for loop, part in parts.items():
            told = part.running.log.of("broke") + part.running.log.of("not_listening")
            assert [(r.command, r.levelname) for r in told] == [(loop, "ERROR")]


def enqueue_elsewhere(jobs: Jobs, task: str) -> int:
    """Enqueue as another process does: nothing but the notification wakes the worker."""
    with jobs.engine.begin() as connection:
        job_id = enqueue(connection, task)
    assert job_id is not None
    return job_id


# --- a worker of each driver ----------------------------------------------------------------------


@dataclass
class Trio:
    """A worker of each driver on one table, each with a task of its own."""

    jobs: Jobs
    database: Database
    running: dict[str, Running] = field(default_factory=dict)

    @contextmanager
    def workers(self, **options: Any) -> Generator[None]:
        """Run them."""
        with ExitStack() as stack:
            for driver in ON_POSTGRES:
                url = self.database.url("asyncpg" if driver == "asyncpg" else "psycopg")
                tasks = Tasks()
                tasks.register(lambda _: None, driver)
                there = Jobs(driver, url, self.jobs.engine)
                self.running[driver] = stack.enter_context(there.worker(tasks, **options))
            for running in self.running.values():
                wait_until(partial(is_ok, running))
            yield

    def enqueue(self) -> list[int]:
        """Enqueue a job for each."""
        return [self.jobs.enqueue(driver) for driver in self.running]


@pytest.fixture
def trio(database: Database) -> Iterator[Trio]:
    """Make an empty table for a worker of each driver."""
    with Jobs.opened("psycopg", database.url("psycopg")) as jobs:
        yield Trio(jobs, database)


RAISE = """
CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
    RAISE EXCEPTION 'refused by a trigger';
END $$
"""


def refusing(status: str) -> str:
    """Return the statement for a trigger that refuses a status."""
    return (
        "CREATE TRIGGER refuses BEFORE UPDATE ON jobs.jobs FOR EACH ROW "
        f"WHEN (NEW.status = '{status}') EXECUTE FUNCTION refuse()"
    )


FAULTS = {
    "a missing column": (
        ["ALTER TABLE jobs.jobs RENAME COLUMN started_at TO other"],
        ["ALTER TABLE jobs.jobs RENAME COLUMN other TO started_at"],
        "lacks started_at",
    ),
    "a missing table": (
        ["ALTER TABLE jobs.jobs RENAME TO other"],
        ["ALTER TABLE jobs.other RENAME TO jobs"],
        "is not in the database",
    ),
    "a trigger that raises": (
        [
            RAISE,
            refusing("running"),
            *(f"INSERT INTO jobs.jobs (task) VALUES ('{driver}')" for driver in ON_POSTGRES),
        ],
        ["DROP TRIGGER refuses ON jobs.jobs"],
        "refused by a trigger",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_claiming_heals(trio: Trio, fault: str) -> None:
    """Case 5: What the table keeps from being claimed for a while is claimed afterwards."""
    breaks, mends, said = FAULTS[fault]
    with trio.workers(listen=False):
        for statement in breaks:
            trio.jobs.execute(statement)
        try:
            for running in trio.running.values():
                wait_until(partial(has_failed, running, "claim", 2))
                assert said in str(health_of(running).loops["claim"].error)
                assert not health_of(running).ok
        finally:
            for statement in mends:
                trio.jobs.execute(statement)
        for running in trio.running.values():
            running.log.wait_for("healed", command="claim")
            wait_until(partial(is_ok, running))
        trio.enqueue()
        wait_until(lambda: not trio.jobs.unfinished())
    assert {job.status for job in trio.jobs.all()} == {"succeeded"}
    for running in trio.running.values():
        assert [r.levelname for r in running.log.of("broke", command="claim")] == ["ERROR"]


def test_outcomes_that_are_refused_are_recorded_later(trio: Trio) -> None:
    """Case 5: While none can be recorded, none is lost, and so many wait that no more is claimed.

    A refusal of rows is no failure of the loop, so health tells of it by their number.
    """
    with trio.workers():
        trio.jobs.execute(RAISE)
        trio.jobs.execute(refusing("succeeded"))
        try:
            trio.jobs.enqueue_many(*(NewJob(driver) for driver in ON_POSTGRES for _ in range(150)))
            for running in trio.running.values():
                wait_until(partial(is_swamped, running))
                assert not health_of(running).ok
            waiting = [job for job in trio.jobs.unfinished() if job.status == "pending"]
            assert waiting
        finally:
            trio.jobs.execute("DROP TRIGGER refuses ON jobs.jobs")
        for running in trio.running.values():
            wait_until(partial(is_ok, running))
        wait_until(lambda: not trio.jobs.unfinished())
    assert {(job.status, job.attempts) for job in trio.jobs.all()} == {("succeeded", 1)}


def test_lost_connections_are_replaced_and_told_rarely(trio: Trio) -> None:
    """Case 5: However often its connections are cut, a loop comes back and the log stays short."""
    with trio.workers(recovery_interval=0.1, prune_interval=0.1):
        until = time.monotonic() + 2.5
        while time.monotonic() < until:
            trio.jobs.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            trio.enqueue()
            time.sleep(0.2)
        for running in trio.running.values():
            wait_until(partial(is_ok, running))
            wait_until(partial(is_listening, running))
        wait_until(lambda: not trio.jobs.unfinished())
    assert {job.status for job in trio.jobs.all()} == {"succeeded"}
    for running in trio.running.values():
        for loop in health.LOOPS:
            told = running.log.of("broke", command=loop)
            told += running.log.of("not_listening", command=loop)
            assert len(told) <= 1, loop
            assert len(running.log.of("healed", command=loop)) == len(told)
        assert running.log.of("not_listening", command="listen")


# --- what does not heal -------------------------------------------------------------------------


def test_a_worker_ends_when_its_table_is_gone(trio: Trio, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 5: A table that is dropped for good ends the run with SchemaError, in bounded time."""
    monkeypatch.setattr(health, "PATIENCE", 1.0)
    with trio.workers(listen=False, shutdown_timeout=1):
        trio.jobs.execute("DROP TABLE jobs.jobs")
        for running in trio.running.values():
            error = running.failed()
            assert isinstance(error, SchemaError)
            assert "alembic upgrade head" in str(error)
            assert [r.levelname for r in running.log.of("doomed")] == ["CRITICAL"]
            seen = health_of(running)
            assert (seen.ok, seen.state) == (False, "stopped")
            assert "alembic upgrade head" in str(seen.ended_by)


class BugError(TypeError):
    """What no database raises."""


DUE: dict[str, Callable[[Any], bool]] = {
    "claim": lambda command: isinstance(command, Claim),
    "settle": lambda command: isinstance(command, Settle),
    "renew": lambda command: isinstance(command, Renew),
    "recover": lambda command: command == Sweep(Chore.RECOVER),
    "prune": lambda command: command == Sweep(Chore.PRUNE),
}


def break_loop(running: Running, loop: str, *, times: float = float("inf")) -> list[str]:
    """Have what a loop does raise a bug, so often; returns the list of how often it did."""
    store = running.worker._core.store
    perform, notify = store.perform, store.notify
    raised: list[str] = []

    def bug() -> None:
        if len(raised) < times:
            raised.append(loop)
            raise BugError(f"in {loop}")

    def broken_perform(connection: Connection, command: Any) -> Any:
        if loop in DUE and DUE[loop](command):
            bug()
        return perform(connection, command)

    def broken_notify(*arguments: Any) -> None:
        if loop == "listen":
            bug()
        notify(*arguments)

    store.perform, store.notify = broken_perform, broken_notify
    return raised


@contextmanager
def broken_workers(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch, **how: Any
) -> Generator[dict[str, tuple[Running, list[str]]]]:
    """Run a worker for each loop, in which that loop meets a bug while a job of it runs.

    The jobs end then, but for that whose lease shall be renewed.
    """
    monkeypatch.setattr(_listen_thread, "PROVE_EVERY", 0.2)
    monkeypatch.setattr(_listen_async, "PROVE_EVERY", 0.2)
    broken: dict[str, tuple[Running, list[str]]] = {}
    events = {loop: threading.Event() for loop in health.LOOPS}

    def handle(job: JobContext) -> None:
        while not (events[job.task].is_set() or job.cancelled.is_set()):
            time.sleep(0.01)

    with ExitStack() as stack:
        for loop in health.LOOPS:
            tasks = Tasks()
            tasks.register(handle, loop)
            running = stack.enter_context(
                jobs.worker(
                    tasks,
                    visibility_timeout=6,
                    shutdown_timeout=1.5,
                    recovery_interval=0.2,
                    prune_interval=0.2,
                )
            )
            running.ready()
            jobs.enqueue(loop)
            running.log.wait_for("started")
            broken[loop] = running, break_loop(running, loop, **how)
        for loop, event in events.items():
            if loop != "renew":
                event.set()
        yield broken


@on_drivers("psycopg", "asyncpg")
def test_a_bug_that_stays_ends_the_worker(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 5: An error that is not the database's ends the run if it stays, after a stop in order.

    What else the worker holds is recorded as in any stop.
    """
    monkeypatch.setattr(health, "PATIENCE", 0.5)
    with broken_workers(jobs, monkeypatch) as broken:
        for loop, (running, raised) in broken.items():
            error = running.failed()
            assert isinstance(error, BugError), loop
            assert str(error) == f"in {loop}"
            assert len(raised) >= health.TRIES
            assert running.log.of("doomed", command=loop)
            assert f"BugError: in {loop}" in str(health_of(running).ended_by)
    assert {job.task for job in jobs.unfinished()} == {"settle"}


@on_drivers("psycopg", "asyncpg")
def test_a_bug_that_passes_ends_nothing(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 5: The passing state of a driver is cured by another connection."""
    monkeypatch.setattr(health, "PATIENCE", 0.2)
    with broken_workers(jobs, monkeypatch, times=health.TRIES - 1) as broken:
        for loop, (running, raised) in broken.items():
            running.log.wait_for("healed", command=loop)
            wait_until(partial(is_ok, running))
            assert len(raised) == health.TRIES - 1
    assert {job.status for job in jobs.all()} == {"succeeded"}


@on_drivers("psycopg", "asyncpg")
def test_a_bug_of_the_decisions_ends_the_worker_at_once(jobs: Jobs) -> None:
    """Case 5: What cannot go on at all does not wait; its handlers are told, its rows stay leased.

    Another worker takes the jobs over when the leases run out.
    """
    told = threading.Event()
    tasks = Tasks()
    tasks.register(lambda job: told.set() if job.cancelled.wait(30) else None, "told")
    with jobs.worker(tasks, visibility_timeout=60) as running:
        job_id = jobs.enqueue("told")
        running.log.wait_for("started")

        def broken(*_: object) -> None:
            raise BugError("in the machine")

        running.worker._core.machine.handle = broken
        jobs.enqueue("told")  # wakes it
        error = running.failed()
        assert isinstance(error, BugError)
        assert told.wait(10)
        assert "in the machine" in str(health_of(running).ended_by)
    assert jobs.job(job_id).status == "running"
