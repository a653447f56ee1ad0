"""What telling workers costs those who enqueue."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .figures import Figure, Measured
from .peers import ASYNCPG
from .programs.protocol import TASK

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from .bench import Bench
    from .peers import Peer

CLIENTS = 8
LISTENERS = 10
JOBS = 4000
SLOW_COMMIT_US = 2000
WAYS = {
    "session": "by session.enqueue with its default notify mode",
    "core+notify": "as a Core INSERT with pg_notify in the same statement, every time",
    "core": "as a Core INSERT without any notification",
    "silent": "by session.enqueue with notify=False",
    "after_commit": "by session.enqueue with notify='after_commit'",
}


@dataclass(frozen=True, slots=True)
class Notify:
    """Enqueueing in different ways while workers listen."""

    name: str
    serve: str
    slow_commits: bool = False

    @property
    def figures(self) -> Sequence[Figure]:
        """Jobs a second by way."""
        what = f"{JOBS:,} jobs by {CLIENTS} concurrent clients, each job committed by itself,"
        run = "that run them as they come" if self.serve == TASK else "of another task"
        what += f" while {LISTENERS} workers with concurrency 1 listen {run}"
        if self.slow_commits:
            what += f", on a server whose commits take {SLOW_COMMIT_US / 1000:g} ms (commit_delay)"
        return [
            Figure(f"{self.name}.{way}", "jobs/s", f"{what}: {how}; ways take turns")
            for way, how in WAYS.items()
        ]

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """Ours, on one driver: the others differ in nothing here."""
        return [peer for peer in bench.peers if peer == ASYNCPG]

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Enqueue in every way while one set of workers listens."""
        with bench.database(peer) as database:
            if self.slow_commits:
                settings = {"commit_delay": SLOW_COMMIT_US, "commit_siblings": 0}
                for setting, value in settings.items():
                    bench.cluster.psql(f'ALTER DATABASE "{database}" SET {setting} = {value}')
            listeners = ("--concurrency", 1, "--workers", LISTENERS, "--serve", self.serve)
            with bench.worker(peer, database, *listeners) as worker:
                worker.go()
                time.sleep(2)
                n = bench.size(JOBS, least=200)
                options = ("--n", n, "--clients", CLIENTS, "--ways", ",".join(WAYS))
                rates = bench.call(peer, "enqueue", database, *options)
                worker.check()
        for way, rate in rates.items():
            yield Measured(f"{self.name}.{way}", peer.name, rate)


SCENARIOS = (
    Notify("notify", serve="another"),
    Notify("notify-slow", serve="another", slow_commits=True),
    Notify("notify-working", serve=TASK),
)
