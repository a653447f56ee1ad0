"""What a worker costs that is not speed: memory over many jobs, statements while idle."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .figures import Figure, Measured

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .bench import Bench
    from .peers import Peer
    from .processes import WorkerProcess

WARM_UP_JOBS = 20_000
JOBS = 100_000
CONCURRENCY = 100
IDLE_S = 60
IDLE_FROM_S = 12
"""An idle session reports the transactions of its start up to ten seconds late."""
LIMIT_S = 600


@dataclass(frozen=True, slots=True)
class Memory:
    """Growth of one worker process."""

    name: str = "memory"

    @property
    def figures(self) -> Sequence[Figure]:
        """KiB."""
        what = (
            f"growth of a worker's resident memory while it runs {JOBS:,} no-op jobs with "
            f"concurrency {CONCURRENCY}, after {WARM_UP_JOBS:,} others, per 100,000 jobs"
        )
        return [Figure(self.name, "KiB", what)]

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """Those who are fast enough."""
        return [peer for peer in bench.peers if peer.share == 1]

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Run twice, in one process."""
        warm_up, n = bench.size(WARM_UP_JOBS, 1000), bench.size(JOBS, 2000)
        with (
            bench.database(peer, warm_up) as database,
            bench.worker(peer, database, "--concurrency", CONCURRENCY) as worker,
        ):
            worker.go()
            bench.wait_until_finished(peer, database, [worker], warm_up, LIMIT_S)
            time.sleep(0.5)
            before = worker.memory_kb()
            bench.call(peer, "fill", database, "--n", n)
            bench.wait_until_finished(peer, database, [worker], warm_up + n, LIMIT_S)
            time.sleep(0.5)
            after = worker.memory_kb()
        if before is not None and after is not None:
            yield Measured(self.name, peer.name, (after - before) * 100_000 / n)


@dataclass(frozen=True, slots=True)
class Idle:
    """A worker with nothing to do."""

    name: str = "idle"

    @property
    def figures(self) -> Sequence[Figure]:
        """Statements and transactions."""
        what = (
            f"a minute of an idle worker, counted over {IDLE_S} s from {IDLE_FROM_S} s after its "
            "start; all peers at once, each in a database of its own"
        )
        return [
            Figure("idle.statements", "1/min", f"SQL statements {what}"),
            Figure("idle.commits", "1/min", f"committed transactions {what}"),
        ]

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """One after which it is done: all are measured in the same minute."""
        return bench.peers[:1]

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Count over one window, each peer in a database of its own."""
        del peer
        window = bench.size(IDLE_S, least=5)
        with ExitStack() as stack:
            databases: dict[str, str] = {}
            workers: list[WorkerProcess] = []
            for one in bench.peers:
                database = databases[one.name] = stack.enter_context(bench.database(one))
                workers.append(stack.enter_context(bench.worker(one, database)))
                workers[-1].go()
            time.sleep(min(IDLE_FROM_S, 2 + 100 * bench.scale))
            before = {name: bench.counters(database) for name, database in databases.items()}
            time.sleep(window)
            spent = {name: bench.counters(databases[name]) - before[name] for name in databases}
            for worker in workers:
                worker.check()
        for name, counted in spent.items():
            if bench.counts_statements:
                yield Measured("idle.statements", name, counted.statements * 60 / window)
            yield Measured("idle.commits", name, counted.commits * 60 / window)


SCENARIOS = (Memory(), Idle())
