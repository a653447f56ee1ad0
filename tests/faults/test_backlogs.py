"""Which indexes the statements use: their cost must not grow with rows that are not theirs.

Plans are judged, and rows that they read, not times: those depend on the machine.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
from psycopg.sql import Literal
from sqlalchemy.dialects.postgresql import asyncpg

from sqlalchemy_jobs._messages import Lease, Outcome
from sqlalchemy_jobs._window import Window
from sqlalchemy_jobs.lifecycle import Event, Status
from tests.engines import make_empty_tables, open_engine
from tests.rows import WORKER, Queue, open_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterator

    from sqlalchemy_jobs.statements import Call
    from tests.postgres import Server

pytestmark = pytest.mark.every_postgres

MANY = 50_000
NUMBERED: Any = asyncpg.dialect()  # type: ignore[no-untyped-call]
TASKS = {"a": 3, "b": 3}

SEED = {
    "finished": "INSERT INTO {jobs} (task, status, attempts, max_attempts, updated_at)"
    " SELECT 'a', (ARRAY['succeeded', 'succeeded', 'failed', 'cancelled'])[1 + n % 4], 1, 3,"
    " now() - n * interval '4 seconds' FROM generate_series(1, :many) AS n",
    "foreign": "INSERT INTO {jobs} (task, priority, run_at) SELECT 'foreign', n % 3 - 1,"
    " now() - interval '1 hour' FROM generate_series(1, :many) AS n",
    "delayed": "INSERT INTO {jobs} (task, run_at)"
    " SELECT 'a', now() + interval '1 hour' + n * interval '1 second'"
    " FROM generate_series(1, :many) AS n",
    "running": "INSERT INTO {jobs} (task, status, attempts, max_attempts, locked_by,"
    " lease_expires_at) SELECT 'a', 'running', 1, 3, :worker,"
    " now() + CASE WHEN n % 2 = 0 THEN 1 ELSE -1 END * interval '1 hour'"
    " FROM generate_series(1, 100) AS n",
    "backlog": "INSERT INTO {jobs} (task, run_at)"
    " SELECT 'a', now() - n * interval '1 millisecond' FROM generate_series(1, :many) AS n",
    "mine": "INSERT INTO {jobs} (task, priority, run_at) SELECT (ARRAY['a', 'b'])[1 + n % 2],"
    " n % 2, now() - n * interval '1 millisecond' FROM generate_series(1, 2000) AS n",
}


@dataclass(frozen=True)
class Plan:
    """The nodes of a plan that was carried out."""

    nodes: list[dict[str, Any]]

    @classmethod
    def of(cls, root: dict[str, Any]) -> Plan:
        """Gather the nodes of a tree."""

        def walk(node: dict[str, Any]) -> Iterator[dict[str, Any]]:
            yield node
            for child in node.get("Plans", ()):
                yield from walk(child)

        return cls(list(walk(root)))

    def kinds(self) -> set[str]:
        """The node types."""
        return {node["Node Type"] for node in self.nodes}

    def indexes(self) -> set[str]:
        """The names of the indexes that were read."""
        return {node["Index Name"] for node in self.nodes if "Index Name" in node}

    def read(self) -> int:
        """The rows that the scans of indexes and tables looked at."""
        scans = [n for n in self.nodes if n["Node Type"].endswith(("Scan", "Scan using"))]
        return sum(
            int(
                n["Actual Loops"]
                * (
                    n["Actual Rows"]
                    + n.get("Rows Removed by Filter", 0)
                    + n.get("Rows Removed by Index Recheck", 0)
                )
            )
            for n in scans
            if n["Node Type"] not in ("Function Scan", "Subquery Scan")
        )

    def pages(self) -> int:
        """The pages that were touched in all."""
        root = self.nodes[0]
        return int(root["Shared Hit Blocks"] + root["Shared Read Blocks"])

    def sorted_rows(self) -> int:
        """The rows that went into sorts."""
        return sum(
            int(child["Actual Rows"] * child["Actual Loops"])
            for node in self.nodes
            if node["Node Type"] in ("Sort", "Incremental Sort")
            for child in node["Plans"]
        )


class Loaded:
    """A queue full of other people's rows."""

    def __init__(self, queue: Queue) -> None:
        self.queue = queue

    def explain(self, call: Call, *first: str) -> Plan:
        """Carry a call out after some SQL, undo both, and return how it was done."""
        self.queue.run("BEGIN")
        try:
            for sql in first:
                self.queue.run(sql)
            self.prepare(call)
            return self.execute(call)
        finally:
            self.queue.run("ROLLBACK")
            self.queue.run("DEALLOCATE call")

    def prepare(self, call: Call) -> None:
        """Prepare a call, as the drivers do."""
        compiled = call[0].compile(dialect=NUMBERED)  # type: ignore[attr-defined]
        self.queue.connection.exec_driver_sql(f"PREPARE call AS {compiled}")

    def execute(self, call: Call) -> Plan:
        """Execute what was prepared, with the parameters of *call*."""
        compiled = call[0].compile(dialect=NUMBERED)  # type: ignore[attr-defined]
        values = compiled.construct_params(call[1])
        connection = self.queue.connection
        raw = connection.connection.driver_connection
        places = (Literal(values[name]).as_string(raw) for name in compiled.positiontup)
        (row,) = connection.exec_driver_sql(
            "EXPLAIN (ANALYZE, BUFFERS, TIMING off, FORMAT json)"
            f" EXECUTE call ({', '.join(places)})"
        )
        return Plan.of(row[0][0]["Plan"])

    def running(self, count: int) -> list[Lease]:
        """Some of the leases that WORKER holds."""
        rows = self.queue.run(
            "SELECT id, attempts FROM {jobs} WHERE status = 'running' ORDER BY id LIMIT :n",
            n=count,
        )
        return [Lease(*row) for row in rows]


@contextmanager
def filled(cluster: Server, names: list[str]) -> Generator[Loaded]:
    """A database of its own with the named rows of SEED, analysed."""
    database = cluster.create_database()
    url = cluster.url(database, "psycopg")
    make_empty_tables(url)
    with open_engine(url) as engine, open_queue(engine) as queue:
        queue.run("ALTER TABLE {jobs} SET (autovacuum_enabled = off)")
        for name in names:
            queue.run(SEED[name], many=MANY, worker=WORKER)
        queue.run("VACUUM ANALYZE {jobs}")
        yield Loaded(queue)
    cluster.drop_database(database)


@pytest.fixture(scope="module")
def loaded(cluster: Server) -> Generator[Loaded]:
    """50,000 finished, foreign and delayed rows each, 100 running, 2,000 due."""
    with filled(cluster, ["finished", "foreign", "delayed", "running", "mine"]) as loaded:
        yield loaded


@pytest.fixture(scope="module")
def backlog(cluster: Server) -> Generator[Loaded]:
    """Nothing but 50,000 due rows: statistics say that any row will do."""
    with filled(cluster, ["backlog"]) as loaded:
        yield loaded


def look(*, full: bool = True) -> Any:
    """A look of a worker with ten free slots, first or by memory."""
    window = Window()
    if not full:
        window.claimed([(("a", 0), (1_600_000_000_000_000, 5)), (("b", 1), (10**15, 5))])
        window.in_use([("a", 0), ("b", 1)])
    return window.look(TASKS, 10, full=full)


def claim(loaded: Loaded, *, full: bool = True) -> Call:
    """The claim of ten jobs."""
    return loaded.queue.statements.claim(WORKER, 300.0, look(full=full), 10, "c")


@pytest.mark.parametrize("full", [True, False])
def test_a_claim_reads_the_index_of_due_jobs_alone(loaded: Loaded, full: bool) -> None:  # noqa: FBT001
    """Case 53: a claim reads heads of the index of due jobs, whatever else the table holds."""
    plan = loaded.explain(claim(loaded, full=full))
    assert plan.indexes() == {"jobs_due", "jobs_pkey"}
    assert "Seq Scan" not in plan.kinds()
    assert "Bitmap Heap Scan" not in plan.kinds()
    heads = [n for n in plan.nodes if n.get("Index Name") == "jobs_due"]
    assert {n["Node Type"] for n in heads} == {"Index Only Scan"}
    assert plan.read() <= 150, "two windows of 20 heads, and what is locked and updated of them"
    assert plan.sorted_rows() <= 40, "the heads are sorted, not the backlog"


@pytest.mark.parametrize("name", ["survey", "outlook"])
def test_what_follows_a_claim_reads_the_index_of_due_jobs_alone(loaded: Loaded, name: str) -> None:
    """Which queues have work, how much waits and what is due next: by index only."""
    statements = loaded.queue.statements
    plan = loaded.explain(getattr(statements, name)(look()))
    assert plan.indexes() == {"jobs_due"}
    assert "Seq Scan" not in plan.kinds()
    assert {n["Node Type"] for n in plan.nodes if "Index Name" in n} == {"Index Only Scan"}
    assert plan.read() <= 80
    assert plan.sorted_rows() == 0


@pytest.mark.parametrize("name", ["claim", "survey", "outlook"])
def test_an_own_backlog_is_not_read(backlog: Loaded, name: str) -> None:
    """Case 52: with a backlog of the worker's own jobs a look reads no more than its windows."""
    statements = backlog.queue.statements
    plan = backlog.explain(claim(backlog) if name == "claim" else getattr(statements, name)(look()))
    assert plan.indexes() <= {"jobs_due", "jobs_pkey"}
    assert "Seq Scan" not in plan.kinds()
    assert plan.read() <= 150
    assert plan.sorted_rows() <= 40


def test_a_claim_without_statistics_reads_the_same(loaded: Loaded) -> None:
    """Case 52: the plan is the same where the table was never analysed."""
    unknown = "DELETE FROM pg_statistic WHERE starelid = CAST('jobs.jobs' AS regclass)"
    plan = loaded.explain(claim(loaded), unknown)
    assert plan.indexes() == {"jobs_due", "jobs_pkey"}
    assert plan.read() <= 150


def test_what_is_remembered_passes_over_dead_rows(backlog: Loaded) -> None:
    """Rows that were claimed, and that an open snapshot keeps, are walked by a full look only."""
    # Changed in the same transaction, the old versions cannot be cleared away.
    half = "SELECT min(run_at) + interval '30 seconds' FROM {jobs}"
    done = f"UPDATE {{jobs}} SET status = 'succeeded' WHERE run_at < ({half})"
    (place,) = backlog.queue.run(
        f"SELECT CAST(extract(epoch FROM half) * 1000000 AS bigint) FROM ({half}) AS the (half)"
    )
    window = Window()
    window.claimed([(("a", 0), (place[0], 0))])
    window.in_use([("a", 0)])
    by_memory = window.look(TASKS, 10, full=False)
    statements = backlog.queue.statements
    pages = [
        backlog.explain(statements.claim(WORKER, 300.0, each, 10, "c"), done).pages()
        for each in (look(), by_memory)
    ]
    assert pages[1] < 300
    assert pages[0] > 3 * pages[1], "the full look is what the memory spares"


def outcomes(leases: list[Lease]) -> list[Outcome]:
    """Outcomes of two kinds."""
    events = (Event.SUCCEED, Event.RETRY)
    return [Outcome(lease, events[n % 2], 1.0, "E: no") for n, lease in enumerate(leases)]


WRITES: dict[str, Callable[[Queue, list[Lease]], list[Any]]] = {
    "settle": lambda queue, leases: queue.statements.settle(WORKER, outcomes(leases), "c"),
    "renew": lambda queue, leases: queue.statements.renew(WORKER, 300.0, leases),
}


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("name", sorted(WRITES))
def test_the_holders_writes_find_rows_by_primary_key(loaded: Loaded, name: str, count: int) -> None:
    """Settling and renewing never go through the index of running jobs, full of dead entries."""
    (call,) = WRITES[name](loaded.queue, loaded.running(count))
    plan = loaded.explain(call)
    assert plan.indexes() == {"jobs_pkey"}
    assert "Seq Scan" not in plan.kinds()
    assert plan.read() <= 2 * count


def test_recovery_reads_the_index_of_running_jobs(loaded: Loaded) -> None:
    """Recovery looks at running jobs only, whatever else the table holds."""
    plan = loaded.explain(loaded.queue.statements.recover(100, "c"))
    assert "jobs_running" in plan.indexes()
    assert plan.indexes() <= {"jobs_running", "jobs_pkey"}
    assert "Seq Scan" not in plan.kinds()
    assert plan.read() <= 300


@pytest.mark.parametrize(
    ("retention", "read"),
    [
        ({Status.SUCCEEDED: 150_000.0, Status.CANCELLED: 150_000.0, Status.FAILED: 1e9}, 4000),
        ({Status.SUCCEEDED: 1e9, Status.CANCELLED: 1e9, Status.FAILED: 1e9}, 10),
        ({Status.SUCCEEDED: 1e9, Status.CANCELLED: 1e9, Status.FAILED: None}, 10),
        ({Status.SUCCEEDED: None, Status.CANCELLED: None, Status.FAILED: None}, 10),
    ],
    ids=["a batch", "all young", "one kept", "all kept"],
)
def test_pruning_reads_the_old_end_of_the_index_of_finished_jobs(
    loaded: Loaded, retention: dict[Status, float | None], read: int
) -> None:
    """Pruning reads finished jobs from the oldest on, and those that are too young not at all."""
    plan = loaded.explain(loaded.queue.statements.prune(1000, retention))
    assert plan.indexes() <= {"jobs_finished", "jobs_pkey"}
    assert "jobs_finished" in plan.indexes() or not any(retention.values())
    assert "Seq Scan" not in plan.kinds()
    assert plan.read() <= read
    assert plan.sorted_rows() == 0


@pytest.mark.parametrize("name", ["claim", "survey", "outlook", "settle", "renew", "recover"])
def test_a_plan_of_an_empty_table_is_good_for_ever(cluster: Server, name: str) -> None:
    """What was planned while the table was empty reads no more once it is full."""
    with filled(cluster, []) as loaded:
        queue = loaded.queue

        def call() -> Call:
            match name:
                case "claim":
                    return claim(loaded)
                case "survey" | "outlook":
                    return getattr(queue.statements, name)(look())  # type: ignore[no-any-return]
                case "recover":
                    return queue.statements.recover(100, "c")
                case _:
                    leases = loaded.running(20) or [Lease(n, 1) for n in range(20)]
                    return WRITES[name](queue, leases)[0]  # type: ignore[no-any-return]

        loaded.prepare(call())
        loaded.execute(call())
        for seed in ("finished", "backlog", "running"):
            queue.run(SEED[seed], many=MANY, worker=WORKER)
        plan = loaded.execute(call())
    assert "Seq Scan" not in plan.kinds()
    assert "jobs_finished" not in plan.indexes()
    assert plan.read() <= 300
    assert plan.sorted_rows() <= 100
