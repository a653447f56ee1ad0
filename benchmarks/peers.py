"""What is measured: our three shapes, the ceiling, and other queues if they are installed."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Final


@dataclass(frozen=True, slots=True)
class Peer:
    """A program, and the kind of tables it works on."""

    name: str
    program: str
    tables: str
    options: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()
    share: float = 1.0
    """Of the jobs of a drain, unless --full: less for one whose rate shows in far fewer."""

    @property
    def missing(self) -> list[str]:
        """The modules that are not installed."""
        return [module for module in self.needs if find_spec(module) is None]


ASYNCPG: Final = Peer(
    "async-asyncpg", "ours_async", "jobs", ("--driver", "asyncpg"), needs=("asyncpg",)
)
PSYCOPG: Final = Peer(
    "async-psycopg", "ours_async", "jobs", ("--driver", "psycopg"), needs=("psycopg",)
)
SYNC: Final = Peer("sync-psycopg", "ours_sync", "jobs", needs=("psycopg",))
RAW: Final = Peer("raw", "raw", "jobs", needs=("asyncpg",))
PROCRASTINATE: Final = Peer(
    "procrastinate",
    "procrastinate_peer",
    "procrastinate",
    needs=("procrastinate", "psycopg_pool"),
    share=0.1,
)
PGQUEUER: Final = Peer("pgqueuer", "pgqueuer_peer", "pgqueuer", needs=("pgqueuer", "asyncpg"))

PEERS: Final = (ASYNCPG, PSYCOPG, SYNC, RAW, PROCRASTINATE, PGQUEUER)
OURS: Final = (ASYNCPG, PSYCOPG, SYNC)
