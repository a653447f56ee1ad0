"""pgqueuer, with its asyncpg driver."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import TYPE_CHECKING, Any

import asyncpg
from pgqueuer import PgQueuer
from pgqueuer.db import AsyncpgDriver
from pgqueuer.queries import Queries

from .protocol import TASK, AsyncProgram, main, no_op, until_told_to_stop

if TYPE_CHECKING:
    from pgqueuer.models import Job


class Pgqueuer(AsyncProgram):
    """As its documentation runs it."""

    settings = (
        "AsyncpgDriver, one consumer, batch_size=concurrency; no max_concurrent_tasks, so "
        "concurrency is a batch and not a bound on running handlers; an ended job is deleted and "
        "a row is added to its log"
    )
    finished = "SELECT NOT EXISTS (SELECT FROM pgqueuer)"
    succeeded = "SELECT count(*) FROM pgqueuer_log WHERE status = 'successful'"

    async def install(self) -> None:
        """Install its tables."""
        connection = await asyncpg.connect(self.options.dsn)
        await Queries(AsyncpgDriver(connection)).install()
        await connection.close()

    async def open(self, clients: int) -> None:
        """Open a connection a client."""
        self.connections = [await asyncpg.connect(self.options.dsn) for _ in range(clients)]
        self.queries = [Queries(AsyncpgDriver(connection)) for connection in self.connections]

    async def close(self) -> None:
        """Close them."""
        for connection in self.connections:
            await connection.close()

    async def one(self, client: int, way: str, data: dict[str, Any]) -> None:  # noqa: ARG002 - there is one way
        """Enqueue one job."""
        await self.queries[client].enqueue(TASK, json.dumps(data).encode())

    async def many(self, data: list[dict[str, Any]]) -> None:
        """Enqueue jobs in one call."""
        payloads: list[bytes | None] = [json.dumps(one).encode() for one in data]
        await self.queries[0].enqueue([TASK] * len(data), payloads, [0] * len(data))

    async def serve(self) -> None:
        """Run one consumer until told to stop."""
        told = until_told_to_stop()
        queuer = PgQueuer(AsyncpgDriver(await asyncpg.connect(self.options.dsn)))

        @queuer.entrypoint(TASK)
        async def noop(job: Job) -> None:
            await no_op(json.loads(job.payload or b"{}"))

        running = asyncio.create_task(queuer.run(batch_size=self.options.concurrency))
        await told()
        queuer.shutdown.set()
        await asyncio.wait([running], timeout=5)


PROGRAM = Pgqueuer

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(PROGRAM)
