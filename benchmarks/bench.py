"""The private server, its databases, and the programs on them."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self

from tests.postgres import Cluster

from .peers import OURS
from .processes import ProgramError, WorkerProcess, call

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .peers import Peer
    from .programs.protocol import Program

SERVER_SETTINGS = {
    # No checkpoint by the clock in one measurement and not in another.
    "checkpoint_timeout": "1h",
    "max_wal_size": "16GB",
    "log_lock_waits": "off",
    "max_connections": "400",
}


LARGE = 50_000_000


@dataclass(frozen=True, slots=True)
class Counters:
    """What the server has counted in one database (WAL: in all)."""

    wal_bytes: int
    commits: int
    statements: int

    def __sub__(self, other: Counters) -> Counters:
        return Counters(
            self.wal_bytes - other.wal_bytes,
            self.commits - other.commits,
            self.statements - other.statements,
        )


class Bench:
    """What every scenario works with."""

    def __init__(
        self,
        peers: Sequence[Peer],
        *,
        scale: float,
        full: bool,
        uvloop: bool,
        version: int | None,
    ) -> None:
        self.peers = tuple(peers)
        self.scale = scale
        self.full = full
        self._uvloop = uvloop
        self.cluster = Cluster(version, durable=True, settings=SERVER_SETTINGS)
        self.about: dict[str, type[Program]] = {}
        self._stack = ExitStack()
        self._copies = itertools.count(1)
        self._filling = threading.Lock()
        self._templates: dict[tuple[str, int], str] = {}
        self._beginnings: dict[str, Counters] = {}

    def __enter__(self) -> Self:
        self._stack.enter_context(self.cluster)
        ((found,),) = self.cluster.psql(
            "SELECT count(*) FROM pg_available_extensions WHERE name = 'pg_stat_statements'"
        )
        self.counts_statements = bool(found)
        if found:
            self.cluster.psql("CREATE EXTENSION pg_stat_statements")
        for peer in self.peers:
            module = import_module(f".programs.{peer.program}", __package__)
            self.about[peer.name] = module.PROGRAM
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def size(self, full_size: int, least: int = 1) -> int:
        """Scale a size of a definition."""
        return max(least, round(full_size * self.scale))

    def ours(self) -> list[Peer]:
        """Those of our own shapes that are measured."""
        return [peer for peer in self.peers if peer in OURS]

    # --- databases -----------------------------------------------------------------------------

    @contextmanager
    def database(self, peer: Peer, jobs: int = 0) -> Iterator[str]:
        """A database with the peer's tables and so many pending jobs, the same files each time."""
        template = self._template(peer, jobs)
        with self._copy(template) as name:
            yield name

    @contextmanager
    def _copy(self, template: str) -> Iterator[str]:
        """A copy of a database. It is dropped only if it is large: that takes a checkpoint.

        Copied through the WAL, which takes none either, so that no page of it is written to the
        WAL in full at its first change.
        """
        name = f"copy_{next(self._copies)}"
        self.cluster.psql(f"CREATE DATABASE {name} TEMPLATE {template} STRATEGY wal_log")
        yield name
        ((size,),) = self.cluster.psql("SELECT pg_database_size(%s)", parameters=[name])
        if size > LARGE:
            self.cluster.drop_database(name)

    def _template(self, peer: Peer, jobs: int) -> str:
        key = (peer.tables, jobs)
        with self._filling:
            if key not in self._templates:
                self._templates[key] = self._filled(peer, jobs)
            return self._templates[key]

    def _filled(self, peer: Peer, jobs: int) -> str:
        name = self.cluster.create_database(f"template_{peer.tables}_{jobs}")
        self.call(peer, "setup", name)
        if jobs:
            self.call(peer, "fill", name, "--n", jobs)
        self.cluster.psql("VACUUM ANALYZE", name)
        return name

    # --- programs ------------------------------------------------------------------------------

    def call(self, peer: Peer, command: str, database: str, *arguments: object) -> Any:
        """Run one command of a peer's program and return its answer."""
        return call(peer.program, [command, *self._options(peer, database), *map(str, arguments)])

    def worker(self, peer: Peer, database: str, *arguments: object) -> WorkerProcess:
        """Start a peer's worker, which waits for :meth:`WorkerProcess.go`."""
        return WorkerProcess(peer.program, [*self._options(peer, database), *map(str, arguments)])

    def _options(self, peer: Peer, database: str) -> list[str]:
        dsn = self.dsn(database)
        uvloop = "--uvloop" if self._uvloop else "--no-uvloop"
        return ["--dsn", dsn, uvloop, *peer.options]

    def dsn(self, database: str) -> str:
        """Return the plain URL of a database."""
        return f"postgresql://postgres@127.0.0.1:{self.cluster.port}/{database}"

    # --- the server's own counters -------------------------------------------------------------

    def counters(self, database: str) -> Counters:
        """Read the counters. Sessions that have ended have reported everything."""
        ((wal, commits),) = self.cluster.psql(
            "SELECT (pg_current_wal_insert_lsn() - '0/0')::bigint, xact_commit"
            " FROM pg_stat_database WHERE datname = %s",
            parameters=[database],
        )
        statements = 0
        if self.counts_statements:
            ((statements,),) = self.cluster.psql(
                "SELECT coalesce(sum(calls), 0)::bigint FROM pg_stat_statements s"
                " JOIN pg_database d ON d.oid = s.dbid WHERE d.datname = %s",
                parameters=[database],
            )
        return Counters(wal, commits, statements)

    def beginning(self, peer: Peer) -> Counters:
        """Return what a worker that finds no job costs from its start to its end, a second later.

        Drivers ask for types, and workers for the schema; that is not a cost of jobs.
        """
        if peer.name not in self._beginnings:
            with self.database(peer) as database:
                before = self.counters(database)
                with self.worker(peer, database) as worker:
                    worker.go()
                    time.sleep(1.5)
                self._beginnings[peer.name] = self.counters(database) - before
        return self._beginnings[peer.name]

    def wait_until_finished(
        self, peer: Peer, database: str, workers: Sequence[WorkerProcess], n: int, limit_s: float
    ) -> int:
        """Wait until all *n* jobs have ended well, and return when that was.

        The database is asked only when the handlers of nearly all have started, and by an index.
        """
        until = time.monotonic() + limit_s
        spare = 100 * len(workers)
        while sum(worker.count for worker in workers) < n - spare:
            time.sleep(0.01)
            for worker in workers:
                worker.check()
            if time.monotonic() > until:
                raise ProgramError(f"{peer.name}: not finished within {limit_s:.0f} s")
        with self.cluster.connect(database) as connection:
            connection.execute("SET enable_seqscan = off")
            finished: str = self.about[peer.name].finished
            while not connection.execute(finished.encode()).fetchall()[0][0]:
                if time.monotonic() > until:
                    raise ProgramError(f"{peer.name}: not finished within {limit_s:.0f} s")
                time.sleep(0.003)
            return time.monotonic_ns()
