"""How long a claim takes in tables of different kinds, and what its plan reads."""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from sqlalchemy import create_engine
from sqlalchemy.pool import NullPool

from sqlalchemy_jobs import Job, Tasks, WorkerSettings
from sqlalchemy_jobs._connections import autocommit
from sqlalchemy_jobs._messages import Claim, Claimed, Outcome, Settle
from sqlalchemy_jobs._store import Store, statements_for
from sqlalchemy_jobs._window import Window

from .figures import Figure, Measured
from .latency import percentile
from .peers import SYNC
from .programs.protocol import TASK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from sqlalchemy import Connection, Table

    from .bench import Bench
    from .peers import Peer

LIMIT = 10
CLAIMS = 150
FULL_CLAIMS = 50
OWN_JOBS = 5000
WARM_UP = 10
TABLE = cast("Table", Job.__table__)


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is in the table beside 5,000 due jobs of the worker's own."""

    name: str
    what: str
    rows: int = 0
    task: str = f"'{TASK}'"
    columns: str = ""
    values: str = ""
    tasks: int = 1
    priorities: int = 1


BACKLOGS = (
    Backlog("empty", "nothing else"),
    Backlog(
        "finished",
        "1,000,000 finished rows",
        1_000_000,
        columns="status, attempts, updated_at",
        values="'succeeded', 1, now() - i * interval '100 ms'",
    ),
    Backlog(
        "foreign",
        "500,000 pending rows, due earlier, of five tasks that this worker lacks",
        500_000,
        task="'foreign-' || i % 5",
        columns="run_at",
        values="now() - interval '1 hour'",
    ),
    Backlog("own", "1,000,000 more due rows of its own", 1_000_000),
    Backlog(
        "delayed",
        "500,000 rows of its own that are due in a day",
        500_000,
        columns="run_at",
        values="now() + interval '1 day' + i * interval '1 ms'",
    ),
    Backlog("tasks50", "those of 50 tasks, all of them the worker's", tasks=50),
    Backlog("priorities3", "those of three priorities", priorities=3),
)


@dataclass(frozen=True, slots=True)
class Claims:
    """Claims of ten jobs on a worker's connection."""

    name: str = "claims"

    @property
    def figures(self) -> Sequence[Figure]:
        """For each backlog, claims as they follow one another and claims that look at all."""
        figures: list[Figure] = []
        for backlog in BACKLOGS:
            what = (
                f"a claim of {LIMIT} jobs on psycopg, from the call to the leases, in a table of "
                f"{OWN_JOBS:,} due jobs and: {backlog.what}"
            )
            of = f"claims.{backlog.name}"
            figures += [
                Figure(f"{of}.median", "ms", f"median of {what}"),
                Figure(f"{of}.p95", "ms", f"percentile 95 of {what}"),
                Figure(
                    f"{of}.full",
                    "ms",
                    f"median of {what}; the full look that a worker takes every two seconds",
                ),
                Figure(
                    f"{of}.read",
                    "rows",
                    "most rows that one node of the plan (EXPLAIN ANALYZE) of such a full look "
                    "read, sorted or removed by a filter; more than the windows of all queues "
                    "would mean that the backlog is scanned",
                ),
                Figure(
                    f"{of}.flat",
                    "0/1",
                    "1 if that plan has no sequential scan of jobs and no node that reads more "
                    "rows than the windows of all queues hold",
                ),
            ]
        return figures

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """Ours, on psycopg without a loop: nothing else is in the time."""
        return [peer for peer in bench.peers if peer == SYNC]

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Claim in each table in turn, so that noise falls on all of them."""
        share = min(1.0, max(0.2, bench.scale))
        usual, full = round(CLAIMS * share), round(FULL_CLAIMS * share)
        with ExitStack() as stack:
            claimers = [
                stack.enter_context(_claimer(_table(bench, backlog, usual + full), backlog, bench))
                for backlog in BACKLOGS
            ]
            for _ in range(WARM_UP):
                for claimer in claimers:
                    claimer.claim(full=True)
            fulls = [[claimer.claim(full=True) for claimer in claimers] for _ in range(full)]
            usuals = [[claimer.claim(full=False) for claimer in claimers] for _ in range(usual)]
            plans = [claimer.plan() for claimer in claimers]
        for backlog, looks, claims, plan in zip(
            BACKLOGS, zip(*fulls, strict=True), zip(*usuals, strict=True), plans, strict=True
        ):
            found = {
                "median": percentile(claims, 50),
                "p95": percentile(claims, 95),
                "full": percentile(looks, 50),
                "read": plan.most_read,
                "flat": float(not plan.scans and plan.most_read <= plan.allowed),
            }
            for key, value in found.items():
                yield Measured(f"claims.{backlog.name}.{key}", peer.name, value)


def _table(bench: Bench, backlog: Backlog, claims: int) -> str:
    """Return a database with the backlog, topped up with what will be claimed."""
    name = f"claims_{backlog.name}"
    if not bench.cluster.psql("SELECT 1 FROM pg_database WHERE datname = %s", parameters=[name]):
        with bench.database(SYNC) as empty:
            bench.cluster.psql(f"CREATE DATABASE {name} TEMPLATE {empty} STRATEGY wal_log")
        columns = f", {backlog.columns}" if backlog.columns else ""
        values = f", {backlog.values}" if backlog.values else ""
        rows = bench.size(backlog.rows) if backlog.rows else 0
        bench.cluster.psql(
            f"INSERT INTO jobs.jobs (task, payload{columns})"
            f" SELECT {backlog.task}, '{{}}'{values} FROM generate_series(1, {rows}) i",
            name,
        )
        _add_jobs(bench, name, backlog, OWN_JOBS)
    _add_jobs(bench, name, backlog, (WARM_UP + claims) * LIMIT)
    bench.cluster.psql("VACUUM ANALYZE jobs.jobs", name)
    return name


def _add_jobs(bench: Bench, database: str, backlog: Backlog, n: int) -> None:
    task = f"'{TASK}' || coalesce('-' || nullif(i % {backlog.tasks}, 0), '')"
    bench.cluster.psql(
        "INSERT INTO jobs.jobs (task, payload, priority)"
        f" SELECT {task}, '{{}}', i % {backlog.priorities} FROM generate_series(1, {n}) i",
        database,
    )


@contextmanager
def _claimer(database: str, backlog: Backlog, bench: Bench) -> Iterator[Claimer]:
    engine = create_engine(bench.cluster.url(database, "psycopg"), poolclass=NullPool)
    with engine.connect() as connection:
        yield Claimer(autocommit(connection), backlog.tasks)


@dataclass(frozen=True, slots=True)
class Plan:
    """What EXPLAIN ANALYZE says about a claim."""

    most_read: float
    allowed: float
    scans: bool


class Claimer:
    """Claims as a worker does, with its memory, on a connection set up as a worker's."""

    def __init__(self, connection: Connection, tasks: int) -> None:
        self._connection = connection
        self._tasks = Tasks()
        for k in range(tasks):
            self._tasks.register(_handler, f"{TASK}-{k}" if k else TASK)
        self._store = Store(TABLE, self._tasks, WorkerSettings(), "claims")

    def claim(self, *, full: bool) -> float:
        """Return the milliseconds of one claim; its jobs are settled afterwards."""
        begun = time.perf_counter()
        claimed = self._store.perform(self._connection, Claim(LIMIT, full=full))
        spent = (time.perf_counter() - begun) * 1000
        assert isinstance(claimed, Claimed)
        assert len(claimed.leases) == LIMIT
        outcomes = tuple(Outcome.succeeded(lease) for lease in claimed.leases)
        self._store.perform(self._connection, Settle(outcomes))
        return spent

    def plan(self) -> Plan:
        """Explain a full look."""
        dialect = self._connection.dialect
        statements = statements_for(TABLE, dialect)
        look = Window().look(self._tasks.bounds(), LIMIT, full=True)
        statement, parameters = statements.claim("explain", 300.0, look, LIMIT, "jobs.jobs")
        compiled: Any = statement.compile(dialect=dialect)  # type: ignore[attr-defined]
        explain = f"EXPLAIN (ANALYZE, FORMAT JSON) {compiled}"
        given = compiled.construct_params(parameters)
        ((plan,),) = self._connection.exec_driver_sql(explain, given).all()
        nodes = list(_nodes(plan[0]["Plan"]))
        scans = any(
            node["Node Type"] in ("Seq Scan", "Bitmap Heap Scan") and "Relation Name" in node
            for node in nodes
        )
        allowed = float(len(look.tasks) * look.window)
        return Plan(max(map(_rows_read, nodes)), allowed, scans)


def _handler(job: object) -> None:
    del job


def _nodes(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
    yield node
    for child in node.get("Plans", ()):
        yield from _nodes(child)


def _rows_read(node: dict[str, Any]) -> float:
    """Rows that left a node or were removed in it, in all its loops."""
    removed = node.get("Rows Removed by Filter", 0) + node.get("Rows Removed by Join Filter", 0)
    return float((node["Actual Rows"] + removed) * node["Actual Loops"])


SCENARIOS = (Claims(),)
