"""procrastinate, with its asynchronous psycopg connector."""

from __future__ import annotations

import logging
from typing import Any

import procrastinate

from .protocol import TASK, AsyncProgram, main, no_op

POOL = 20


class Procrastinate(AsyncProgram):
    """As its documentation runs it."""

    settings = (
        f"PsycopgConnector, pool of min(concurrency, {POOL}); listen_notify on; rows are kept "
        "(delete_jobs=never); it fetches one job at a time by design"
    )
    finished = (
        "SELECT NOT EXISTS (SELECT FROM procrastinate_jobs WHERE status IN ('todo', 'doing'))"
    )
    succeeded = "SELECT count(*) FROM procrastinate_jobs WHERE status = 'succeeded'"

    def _app(self, size: int) -> procrastinate.App:
        connector = procrastinate.PsycopgConnector(
            conninfo=self.options.dsn, min_size=size, max_size=size
        )
        app = procrastinate.App(connector=connector)

        @app.task(name=TASK)
        async def noop(**data: Any) -> None:
            await no_op(data)

        self.noop = noop
        return app

    async def install(self) -> None:
        """Apply its schema."""
        async with self._app(1).open_async() as app:
            await app.schema_manager.apply_schema_async()

    async def open(self, clients: int) -> None:
        """Open its pool."""
        self.app = self._app(clients)
        await self.app.open_async()

    async def close(self) -> None:
        """Close it."""
        await self.app.close_async()

    async def one(self, client: int, way: str, data: dict[str, Any]) -> None:  # noqa: ARG002 - its pool, its way
        """Defer one job."""
        await self.noop.defer_async(**data)

    async def many(self, data: list[dict[str, Any]]) -> None:
        """Defer jobs by its batch call."""
        await self.noop.batch_defer_async(*data)

    async def serve(self) -> None:
        """Run its worker, which watches for signals itself."""
        concurrency = self.options.concurrency
        async with self._app(min(concurrency, POOL)).open_async() as app:
            await app.run_worker_async(concurrency=concurrency, wait=True, delete_jobs="never")


PROGRAM = Procrastinate

if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    main(PROGRAM)
