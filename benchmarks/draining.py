"""Drains: a backlog of no-op jobs, from the first handler's start until every row has ended."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .figures import Figure, Measured
from .processes import ProgramError

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .bench import Bench
    from .peers import Peer

JOBS = 20_000
LIMIT_S = 300
LEAST_TO_COUNT = 1000
"""In a smaller drain a job's share of them drowns in what happens once."""


@dataclass(frozen=True, slots=True)
class Drain:
    """20,000 no-op jobs by one or more worker processes."""

    concurrency: int
    processes: int = 1

    @property
    def name(self) -> str:
        """As drain100x2: concurrency, processes."""
        times = f"x{self.processes}" if self.processes > 1 else ""
        return f"drain{self.concurrency}{times}"

    @property
    def figures(self) -> Sequence[Figure]:
        """Jobs a second, and what each job costs the server."""
        what = f"{JOBS:,} no-op jobs, concurrency {self.concurrency}"
        if self.processes > 1:
            what += f", {self.processes} processes"
        of_drain = (
            f"of that drain, less what a worker without jobs needs to start and stop ({what})"
        )
        figures = [
            Figure(
                self.name,
                "jobs/s",
                f"{what}: from the first handler's start until every row is in its final state",
            ),
            Figure(f"{self.name}.commits", "1/job", f"committed transactions {of_drain}"),
            Figure(f"{self.name}.statements", "1/job", f"SQL statements {of_drain}"),
            Figure(f"{self.name}.wal", "B/job", f"bytes of WAL of that drain ({what})"),
        ]
        if self.processes > 1:
            least = f"handlers that the least busy process started, as a share of all ({what})"
            figures.append(Figure(f"{self.name}.least", "share", least))
        return figures

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """All of them."""
        return bench.peers

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Drain once."""
        share = 1.0 if bench.full else peer.share
        n = bench.size(round(JOBS * share), least=400)
        with bench.database(peer, n) as database:
            before = bench.counters(database)
            with ExitStack() as stack:
                workers = [
                    stack.enter_context(
                        bench.worker(peer, database, "--concurrency", self.concurrency)
                    )
                    for _ in range(self.processes)
                ]
                for worker in workers:
                    worker.go()
                end = bench.wait_until_finished(peer, database, workers, n, LIMIT_S)
                first = min(worker.counts[0][1] for worker in workers if worker.counts)
            after = bench.counters(database)
            ((ended,),) = bench.cluster.psql(bench.about[peer.name].succeeded, database)
        if ended != n:
            raise ProgramError(f"{peer.name}: {ended} of {n} jobs ended well")
        yield Measured(self.name, peer.name, n / ((end - first) / 1e9))
        spent = after - before
        if n >= LEAST_TO_COUNT:
            beginning = bench.beginning(peer)
            commits = spent.commits - beginning.commits * self.processes
            yield Measured(f"{self.name}.commits", peer.name, commits / n)
            if bench.counts_statements:
                statements = spent.statements - beginning.statements * self.processes
                yield Measured(f"{self.name}.statements", peer.name, statements / n)
        yield Measured(f"{self.name}.wal", peer.name, spent.wal_bytes / n)
        if self.processes > 1:
            counts = [worker.count for worker in workers]
            yield Measured(f"{self.name}.least", peer.name, min(counts) / max(1, sum(counts)))


SCENARIOS = (Drain(10), Drain(100), Drain(100, processes=2))
