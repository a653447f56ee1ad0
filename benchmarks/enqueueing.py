"""Enqueueing: one job at a time, each committed by itself, and 10,000 in one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from .figures import Figure, Measured
from .peers import OURS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .bench import Bench
    from .peers import Peer

SINGLE = 2000
BULK = 10_000

_COMPARED = {
    "core": "as a bare Core INSERT of task and payload, returning the id, in the same kind of "
    "session and transaction, without a notification; in turns with session.enqueue",
    "core+notify": "as that Core INSERT with pg_notify in its RETURNING",
    "silent": "by session.enqueue with notify=False",
}


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Single enqueues by one process."""

    clients: int

    @property
    def name(self) -> str:
        """As enqueue8."""
        return f"enqueue{self.clients}"

    @property
    def figures(self) -> Sequence[Figure]:
        """The peer's own way, and for ours what it can be compared with."""
        jobs = SINGLE * self.clients
        each = (
            f"{jobs:,} jobs enqueued one at a time, each in a session and a committed transaction "
            f"of its own, by {self.clients} concurrent client(s) of one process"
        )
        own = "by session.enqueue (ours), the peer's own call (others), the INSERT (raw)"
        figures = [Figure(self.name, "jobs/s", f"{each}: {own}")]
        for way, how in _COMPARED.items():
            figures.append(Figure(f"{self.name}.{way}", "jobs/s", f"{each}: {how}"))
        return figures

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """All of them."""
        return bench.peers

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Enqueue in every way."""
        ways = ["session", *_COMPARED] if peer in OURS else [bench.about[peer.name].ways[0]]
        n = bench.size(SINGLE * self.clients, least=100)
        with bench.database(peer) as database:
            listed = ",".join(ways)
            rates = bench.call(
                peer, "enqueue", database, "--n", n, "--clients", self.clients, "--ways", listed
            )
        for way, rate in rates.items():
            figure = self.name if way == ways[0] else f"{self.name}.{way}"
            yield Measured(figure, peer.name, rate)


@dataclass(frozen=True, slots=True)
class Bulk:
    """10,000 jobs in one transaction."""

    name: str = "bulk"

    @property
    def figures(self) -> Sequence[Figure]:
        """Jobs a second."""
        what = (
            f"{BULK:,} jobs by enqueue_many, or the peer's own bulk call, in one committed "
            "transaction, the payloads being at hand; after a call with 100 jobs"
        )
        return [Figure(self.name, "jobs/s", what)]

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """All of them."""
        return bench.peers

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Enqueue once."""
        with bench.database(peer) as database:
            rate = bench.call(peer, "bulk", database, "--n", bench.size(BULK, least=500))
        yield Measured(self.name, peer.name, rate)


SCENARIOS = (Enqueue(1), Enqueue(8), Bulk())
