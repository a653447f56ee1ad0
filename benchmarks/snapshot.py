"""A drain while another transaction holds a snapshot, so that no dead row can be removed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .figures import Figure, Measured
from .peers import OURS, RAW

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .bench import Bench
    from .peers import Peer

JOBS = 200_000
CONCURRENCY = 100
LIMIT_S = 900


@dataclass(frozen=True, slots=True)
class Snapshot:
    """200,000 jobs behind a held snapshot."""

    name: str = "snapshot"

    @property
    def figures(self) -> Sequence[Figure]:
        """The whole and the slowing down."""
        what = (
            f"{JOBS:,} no-op jobs drained with concurrency {CONCURRENCY} by one process while "
            "another transaction holds a snapshot from before"
        )
        return [
            Figure(self.name, "jobs/s", f"{what}: as in a drain"),
            Figure(
                "snapshot.tenths",
                "ratio",
                f"{what}: handler starts a second in the last tenth of the jobs, divided by those "
                "in the first tenth",
            ),
        ]

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """Ours and the ceiling."""
        chosen = (*OURS, RAW) if bench.full else (OURS[0], OURS[2])
        return [peer for peer in bench.peers if peer in chosen]

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Drain once."""
        n = bench.size(JOBS, least=5000)
        with bench.database(peer, n) as database, bench.cluster.connect(database) as holder:
            holder.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT txid_current(), count(*) FROM pg_class")
            with bench.worker(peer, database, "--concurrency", CONCURRENCY) as worker:
                worker.go()
                end = bench.wait_until_finished(peer, database, [worker], n, LIMIT_S)
            holder.execute("ROLLBACK")
        yield Measured(self.name, peer.name, n / ((end - worker.counts[0][1]) / 1e9))
        first = _rate(worker.counts, 0, n // 10)
        last = _rate(worker.counts, n - n // 10, n)
        yield Measured("snapshot.tenths", peer.name, last / first)


def _rate(counts: Sequence[tuple[int, int]], begin: int, end: int) -> float:
    """Return handler starts a second between two counts."""
    inside = [(count, at) for count, at in counts if begin <= count <= end]
    (first, since), (last, until) = inside[0], inside[-1]
    return (last - first) / ((until - since) / 1e9)


SCENARIOS = (Snapshot(),)
