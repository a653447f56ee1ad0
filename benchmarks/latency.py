"""Pick-up latency: from the acknowledged commit to the start of the handler."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .figures import Figure, Measured
from .processes import ProgramError, wait_for

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .bench import Bench
    from .peers import Peer

SAMPLES = 200
GAP_S = 0.05
CONCURRENCY = 10
BUSY_RATE = 250
BUSY_MS = 20
SETTLE_S = 2.0
LOST_AFTER_S = 5.0


@dataclass(frozen=True, slots=True)
class Pickup:
    """Jobs enqueued one by one by another process."""

    busy: bool

    @property
    def name(self) -> str:
        """As pickup-idle."""
        return "pickup-busy" if self.busy else "pickup-idle"

    @property
    def figures(self) -> Sequence[Figure]:
        """Percentiles of two intervals."""
        state = "which has nothing else to do"
        if self.busy:
            used = BUSY_RATE * BUSY_MS / 1000
            state = (
                f"which meanwhile runs {BUSY_RATE} other jobs a second that sleep {BUSY_MS} ms "
                f"each ({used:g} of its {CONCURRENCY} slots)"
            )
        what = (
            f"of {SAMPLES} jobs, enqueued one by one {GAP_S * 1000:g} ms apart by another process, "
            f"for one worker with concurrency {CONCURRENCY} {state}"
        )
        end = "to the start of its handler"
        return [
            *(
                Figure(
                    f"{self.name}.p{p}",
                    "ms",
                    f"percentile {p} {what}: from the return of the enqueueing call, its commit "
                    f"acknowledged, {end} (may be negative)",
                )
                for p in (50, 95, 99)
            ),
            Figure(
                f"{self.name}.call",
                "ms",
                f"median {what}: from the beginning of the enqueueing call {end}",
            ),
        ]

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """All of them."""
        return bench.peers

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Enqueue all samples once."""
        n = bench.size(SAMPLES, least=20)
        with (
            bench.database(peer) as database,
            bench.worker(peer, database, "--concurrency", CONCURRENCY) as worker,
        ):
            worker.go()
            time.sleep(SETTLE_S * min(1.0, 0.4 + bench.scale))
            background = ("--background", BUSY_RATE, "--busy-ms", BUSY_MS) if self.busy else ()
            sent = bench.call(peer, "produce", database, "--n", n, "--gap", GAP_S, *background)
            if not wait_for(lambda: len(worker.starts) >= n, LOST_AFTER_S):
                worker.check()
                lost = n - len(worker.starts)
                raise ProgramError(
                    f"{peer.name}: {lost} of {n} jobs were not picked up\n{worker.said()}"
                )
        starts = worker.starts
        after = [(starts[seq] - returned) / 1e6 for seq, _, returned in sent]
        for p in (50, 95, 99):
            yield Measured(f"{self.name}.p{p}", peer.name, percentile(after, p))
        calls = [(starts[seq] - called) / 1e6 for seq, called, _ in sent]
        yield Measured(f"{self.name}.call", peer.name, percentile(calls, 50))


def percentile(values: Sequence[float], p: float) -> float:
    """Return the nearest-rank percentile."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(p / 100 * len(ordered)))]


SCENARIOS = (Pickup(busy=False), Pickup(busy=True))
