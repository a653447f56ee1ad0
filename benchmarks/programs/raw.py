"""The ceiling: the same table and the same SQL text, driven by asyncpg alone.

No Core at run time, no state machine, no timeout, no renewal, no retry: a claim of as many jobs as
slots are free on one connection, and on another a settle of all that ended while the last settle
was under way. What a library does beyond that must fit into the difference.
"""

from __future__ import annotations

import asyncio
import json
from typing import TYPE_CHECKING, Any, cast

import asyncpg
from sqlalchemy.dialects.postgresql import asyncpg as dialects
from sqlalchemy.ext.asyncio import create_async_engine

from sqlalchemy_jobs import Job, metadata
from sqlalchemy_jobs._store import statements_for
from sqlalchemy_jobs.lifecycle import Event
from sqlalchemy_jobs.sqltypes import MARK, bucket_of, lock_key

from . import jobs_table
from .protocol import TASK, AsyncProgram, main, no_op, until_told_to_stop

if TYPE_CHECKING:
    from sqlalchemy import Table

WORKER = "raw"
CHANNEL = "jobs.jobs"
VISIBILITY = 300.0
FULL_LOOK_EVERY_S = 2.0
_DIALECT: Any = dialects.dialect()  # type: ignore[no-untyped-call]
_STATEMENTS = statements_for(cast("Table", Job.__table__), _DIALECT)


class Statement:
    """SQL text as the library's statement compiles to for asyncpg, and where its parameters go."""

    def __init__(self, statement: Any, **constant: Any) -> None:
        compiled = statement.compile(dialect=_DIALECT)
        self.text: str = compiled.string
        self._order: list[str] = compiled.positiontup
        self._constant = {**compiled.params, **constant}

    def places(self, **parameters: Any) -> list[Any]:
        """Return the parameters in the order of their places."""
        given = {**self._constant, **parameters}
        return [given[name] for name in self._order]


# As the worker's own connections have it.
_FORCE = {"plan_cache_mode": "force_generic_plan", "enable_seqscan": "off"}


class Raw(AsyncProgram):
    """The same durable semantics with as little as possible around them."""

    settings = (
        "claims of as many as slots are free, settles batched while the last one is under way, "
        "two connections; it listens, and is told of every enqueue"
    )
    finished = jobs_table.FINISHED
    succeeded = jobs_table.SUCCEEDED

    connections: list[Any]

    async def install(self) -> None:
        """Create the table."""
        engine = create_async_engine(jobs_table.url(self.options.dsn, "asyncpg"))
        async with engine.begin() as connection:
            await connection.run_sync(metadata.create_all)
        await engine.dispose()

    async def open(self, clients: int) -> None:
        """Open a connection a client."""
        columns = frozenset({"task", "payload"})
        self.insert = Statement(
            _STATEMENTS.enqueue_statement(columns, notify=True), task=TASK, channel=CHANNEL
        )
        self.insert_many = Statement(
            _STATEMENTS.enqueue_many_statement(columns, notify=True), channel=CHANNEL
        )
        self.connections = [await asyncpg.connect(self.options.dsn) for _ in range(clients)]

    async def close(self) -> None:
        """Close the connections."""
        for connection in self.connections:
            await connection.close()

    async def one(self, client: int, way: str, data: dict[str, Any]) -> None:  # noqa: ARG002 - there is one way
        """Insert one job; the statement is its own transaction."""
        places = self.insert.places(payload=json.dumps(data))
        await self.connections[client].fetch(self.insert.text, *places)

    async def many(self, data: list[dict[str, Any]]) -> None:
        """Insert many jobs in one statement."""
        payloads = [json.dumps(one) for one in data]
        places = self.insert_many.places(task=[TASK] * len(payloads), payload=payloads)
        await self.connections[0].fetch(self.insert_many.text, *places)

    async def serve(self) -> None:
        """Claim, run and settle until told to stop."""
        told = until_told_to_stop()
        loop = Loop(self.options)
        await loop.connect()
        working = [asyncio.create_task(step()) for step in (loop.claim, loop.settle)]
        stopping: asyncio.Task[object] = asyncio.create_task(told())
        await asyncio.wait([*working, stopping], return_when=asyncio.FIRST_COMPLETED)
        for task in working:
            if task.done():
                task.result()
            task.cancel()


class Loop:
    """A worker without a machine."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.free: int = options.concurrency
        self.ended: list[tuple[int, int]] = []
        self.has_ended = asyncio.Event()
        self.has_room = asyncio.Event()
        self.woken = asyncio.Event()
        self.running: set[asyncio.Task[None]] = set()
        self.claim_sql = Statement(
            _STATEMENTS.claim_statement,
            worker=WORKER,
            visibility=VISIBILITY,
            tasks=[options.serve],
            priorities=[0],
            bounds=[3],
        )
        settle = _STATEMENTS.settle_statement(frozenset({Event.SUCCEED}))
        self.settle_sql = Statement(settle, worker=WORKER)

    async def connect(self) -> None:
        """Open a connection for each kind of statement."""
        dsn = self.options.dsn
        self.claims = await asyncpg.connect(dsn, server_settings=_FORCE)
        self.settles = await asyncpg.connect(dsn, server_settings=_FORCE)
        self.listens = await asyncpg.connect(dsn)
        await self.listens.add_listener(CHANNEL, lambda *_: self.woken.set())
        # The mark of a worker that wants to be told, which this one always does.
        mark = lock_key("$1::text", MARK, bucket_of("$2::text"))
        await self.listens.fetch(f"SELECT pg_advisory_lock_shared({mark})", CHANNEL, TASK)

    async def claim(self) -> None:
        """Keep the slots full, for ever."""
        loop = asyncio.get_running_loop()
        after: tuple[int | None, int] = (None, 0)
        full_look = loop.time()
        while True:
            self.has_room.clear()
            if not self.free:
                await self.has_room.wait()
                continue
            limit = self.free
            if loop.time() - full_look > FULL_LOOK_EVERY_S:
                after, full_look = (None, 0), loop.time()
            self.woken.clear()
            places = self.claim_sql.places(
                limit=limit, window=2 * limit, after=[after[0]], after_id=[after[1]]
            )
            rows = await self.claims.fetch(self.claim_sql.text, *places)
            for row in sorted(rows, key=_place):
                self.free -= 1
                task = loop.create_task(self.run(row))
                self.running.add(task)
                task.add_done_callback(self.running.discard)
            if len(rows) == limit:
                after = max((row["run_at"], row["id"]) for row in rows)
            elif after[0] is not None:
                after = (None, 0)
            elif not rows:
                await self.woken.wait()

    async def run(self, row: Any) -> None:
        """Run one job."""
        await no_op(json.loads(row["payload"]))
        self.free += 1
        self.ended.append((row["id"], row["attempts"]))
        self.has_ended.set()
        self.has_room.set()

    async def settle(self) -> None:
        """Record what ended, for ever."""
        while True:
            await self.has_ended.wait()
            self.has_ended.clear()
            batch, self.ended = self.ended, []
            ids, attempts = zip(*batch, strict=True)
            places = self.settle_sql.places(ids=ids, held_attempts=attempts)
            await self.settles.fetch(self.settle_sql.text, *places)


def _place(row: Any) -> tuple[int, int]:
    return row["run_at"], row["id"]


PROGRAM = Raw

if __name__ == "__main__":
    main(PROGRAM)
