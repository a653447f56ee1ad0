"""The command line that every measured program has.

The runner also imports the module and reads the class called ``PROGRAM``: settings, and the SQL
that tells when all is done.

``setup``
    Install the peer's tables into an empty database.
``enqueue --n --clients --ways``
    Enqueue *n* jobs in each way, one at a time, each in a committed transaction of its own. Ways
    take turns in blocks, so that noise falls on all of them. Prints jobs a second by way.
``bulk --n``
    Enqueue *n* jobs by the peer's own bulk call, after a small one. Prints jobs a second.
``fill --n``
    The same without the small one: exactly *n* jobs.
``produce --n --gap --background --busy-ms``
    Enqueue *n* jobs with a *gap* in seconds, each with its number; meanwhile *background* jobs a
    second that keep a slot busy for *busy-ms*. Prints [number, called, returned] of each.
``work --concurrency --workers --serve``
    Print ``{"loaded": true}``, wait for a line on standard input, then run jobs until SIGTERM.
    Prints ``{"count", "at"}`` at the first and every hundredth handler start, and
    ``{"seq", "at"}`` for numbered jobs.

Each answer is one line of JSON, the last one. Times are nanoseconds of CLOCK_MONOTONIC, which is
the same clock in all processes of one host.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import signal
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")

COUNT_EVERY = 100
TASK = "noop"
BLOCKS = 10
WARM_UP = 30
FILL_CHUNK = 10_000

_started = itertools.count(1)


@dataclass(frozen=True, slots=True)
class Options:
    """The command line of a program."""

    command: str
    dsn: str
    driver: str
    uvloop: bool
    n: int
    clients: int
    ways: tuple[str, ...]
    gap: float
    background: float
    busy_ms: float
    concurrency: int
    workers: int
    serve: str


def say(**event: object) -> None:
    """Print one line of JSON."""
    sys.stdout.write(json.dumps(event) + "\n")
    sys.stdout.flush()


def started(seq: int) -> None:
    """Note that a handler has started. Safe from threads: next() of a count is atomic."""
    count = next(_started)
    if count == 1 or count % COUNT_EVERY == 0:
        say(count=count, at=time.monotonic_ns())
    if seq >= 0:
        say(seq=seq, at=time.monotonic_ns())


def payload(seq: int = -1, busy_ms: float = 0) -> dict[str, Any]:
    """Return the payload of a job: its number, and how long it keeps its slot busy."""
    return {"seq": seq, "busy_ms": busy_ms}


async def no_op(data: dict[str, Any]) -> None:
    """Handle a job: nothing, unless it is to keep a slot busy."""
    started(data["seq"])
    if data["busy_ms"]:
        await asyncio.sleep(data["busy_ms"] / 1000)


class Program(ABC):
    """A peer's program."""

    settings: ClassVar[str]
    """What was chosen where the peer leaves a choice."""

    finished: ClassVar[str]
    """SQL: true once no job is left that has not ended well."""

    succeeded: ClassVar[str]
    """SQL: how many jobs have ended well."""

    ways: ClassVar[tuple[str, ...]] = ("own",)
    """The ways to enqueue one job that ``enqueue`` knows; the first is the peer's own."""

    def __init__(self, options: Options) -> None:
        self.options = options

    @abstractmethod
    def setup(self) -> None:
        """Install the peer's tables."""

    @abstractmethod
    def enqueue(self, n: int, clients: int, ways: Sequence[str]) -> dict[str, float]:
        """Return jobs a second of single enqueues, by way."""

    @abstractmethod
    def bulk(self, chunks: Sequence[int]) -> list[float]:
        """Enqueue chunks of jobs in one call each; return the seconds of each."""

    @abstractmethod
    def produce(self) -> list[tuple[int, int, int]]:
        """Enqueue numbered jobs at a pace."""

    @abstractmethod
    def work(self) -> None:
        """Run jobs until SIGTERM."""

    def answer(self) -> object:
        """Carry out the command and return what to print."""
        o = self.options
        match o.command:
            case "setup":
                self.setup()
            case "enqueue":
                return self.enqueue(o.n, o.clients, o.ways or self.ways[:1])
            case "bulk":
                return o.n / self.bulk([min(o.n, 100), o.n])[-1]
            case "fill":
                full, rest = divmod(o.n, FILL_CHUNK)
                self.bulk([FILL_CHUNK] * full + [rest] * bool(rest))
            case "produce":
                return self.produce()
            case "work":
                say(loaded=True)
                sys.stdin.readline()
                threading.Thread(target=_stop_with_the_runner, daemon=True).start()
                self.work()
            case _:
                raise AssertionError(o.command)
        return None


class AsyncProgram(Program):
    """A program on asyncio: what is left to say is how to do one thing."""

    def run(self, main: Coroutine[Any, Any, T]) -> T:
        """Run *main*, with uvloop if it is there and wanted."""
        if self.options.uvloop:
            try:
                import uvloop  # noqa: PLC0415 - optional
            except ImportError:
                pass
            else:
                return asyncio.Runner(loop_factory=uvloop.new_event_loop).run(main)
        return asyncio.run(main)

    @abstractmethod
    async def install(self) -> None:
        """Install the peer's tables."""

    @abstractmethod
    async def open(self, clients: int) -> None:
        """Open what *clients* concurrent enqueuers need."""

    @abstractmethod
    async def close(self) -> None:
        """Close it."""

    @abstractmethod
    async def one(self, client: int, way: str, data: dict[str, Any]) -> None:
        """Enqueue one job in a committed transaction of its own."""

    @abstractmethod
    async def many(self, data: list[dict[str, Any]]) -> None:
        """Enqueue many jobs by one call in one transaction."""

    @abstractmethod
    async def serve(self) -> None:
        """Run jobs until SIGTERM."""

    def setup(self) -> None:
        """Install the peer's tables."""
        self.run(self.install())

    def enqueue(self, n: int, clients: int, ways: Sequence[str]) -> dict[str, float]:
        """Return jobs a second of single enqueues, by way."""
        return self.run(self._enqueue(n, clients, ways))

    def bulk(self, chunks: Sequence[int]) -> list[float]:
        """Enqueue chunks of jobs in one call each; return the seconds of each."""
        return self.run(self._bulk(chunks))

    def produce(self) -> list[tuple[int, int, int]]:
        """Enqueue numbered jobs at a pace."""
        return self.run(self._produce())

    def work(self) -> None:
        """Run jobs until SIGTERM."""
        self.run(self.serve())

    async def _enqueue(self, n: int, clients: int, ways: Sequence[str]) -> dict[str, float]:
        async def block(way: str, size: int) -> float:
            left = iter(range(size))

            async def client(number: int) -> None:
                for _ in left:
                    await self.one(number, way, payload())

            begun = time.perf_counter()
            await asyncio.gather(*(client(number) for number in range(clients)))
            return time.perf_counter() - begun

        await self.open(clients)
        for way in ways:
            await block(way, min(WARM_UP * clients, n // 5))
        seconds = dict.fromkeys(ways, 0.0)
        for way, size in turns(ways, n):
            seconds[way] += await block(way, size)
        await self.close()
        return {way: n / spent for way, spent in seconds.items()}

    async def _bulk(self, chunks: Sequence[int]) -> list[float]:
        await self.open(1)
        seconds = []
        for chunk in chunks:
            data = [payload() for _ in range(chunk)]
            begun = time.perf_counter()
            await self.many(data)
            seconds.append(time.perf_counter() - begun)
        await self.close()
        return seconds

    async def _produce(self) -> list[tuple[int, int, int]]:
        o = self.options
        await self.open(2)
        await self.one(0, self.ways[0], payload())
        background = asyncio.create_task(self._background(o.background, o.busy_ms))
        await asyncio.sleep(1 if o.background else 0)
        sent = []
        for seq in range(o.n):
            await asyncio.sleep(o.gap)
            called = time.monotonic_ns()
            await self.one(0, self.ways[0], payload(seq))
            sent.append((seq, called, time.monotonic_ns()))
        background.cancel()
        await asyncio.sleep(0.1)
        await self.close()
        return sent

    async def _background(self, rate: float, busy_ms: float) -> None:
        begun, sent = time.monotonic(), 0
        while rate:
            await asyncio.sleep(max(0.0, begun + sent / rate - time.monotonic()))
            await self.one(1, self.ways[0], payload(-1, busy_ms))
            sent += 1


class SyncProgram(Program):
    """A program on threads."""

    @abstractmethod
    def open(self, clients: int) -> None:
        """Open what *clients* concurrent enqueuers need."""

    @abstractmethod
    def close(self) -> None:
        """Close it."""

    @abstractmethod
    def one(self, way: str, data: dict[str, Any]) -> None:
        """Enqueue one job in a committed transaction of its own."""

    @abstractmethod
    def many(self, data: list[dict[str, Any]]) -> None:
        """Enqueue many jobs by one call in one transaction."""

    def enqueue(self, n: int, clients: int, ways: Sequence[str]) -> dict[str, float]:
        """Return jobs a second of single enqueues, by way."""
        self.open(clients)
        with ThreadPoolExecutor(clients) as threads:

            def client(way: str, size: int) -> None:
                for _ in range(size):
                    self.one(way, payload())

            def block(way: str, size: int) -> float:
                begun = time.perf_counter()
                sizes = [size // clients + (k < size % clients) for k in range(clients)]
                list(threads.map(client, [way] * clients, sizes))
                return time.perf_counter() - begun

            for way in ways:
                block(way, min(WARM_UP * clients, n // 5))
            seconds = dict.fromkeys(ways, 0.0)
            for way, size in turns(ways, n):
                seconds[way] += block(way, size)
        self.close()
        return {way: n / spent for way, spent in seconds.items()}

    def bulk(self, chunks: Sequence[int]) -> list[float]:
        """Enqueue chunks of jobs in one call each; return the seconds of each."""
        self.open(1)
        seconds = []
        for chunk in chunks:
            data = [payload() for _ in range(chunk)]
            begun = time.perf_counter()
            self.many(data)
            seconds.append(time.perf_counter() - begun)
        self.close()
        return seconds

    def produce(self) -> list[tuple[int, int, int]]:
        """Enqueue numbered jobs at a pace."""
        o = self.options
        self.open(2)
        self.one(self.ways[0], payload())
        over = threading.Event()
        background = threading.Thread(target=self._background, args=(over,))
        background.start()
        time.sleep(1 if o.background else 0)
        sent = []
        for seq in range(o.n):
            time.sleep(o.gap)
            called = time.monotonic_ns()
            self.one(self.ways[0], payload(seq))
            sent.append((seq, called, time.monotonic_ns()))
        over.set()
        background.join()
        time.sleep(0.1)
        self.close()
        return sent

    def _background(self, over: threading.Event) -> None:
        rate = self.options.background
        begun, sent = time.monotonic(), 0
        while rate and not over.wait(max(0.0, begun + sent / rate - time.monotonic())):
            self.one(self.ways[0], payload(-1, self.options.busy_ms))
            sent += 1


def turns(ways: Sequence[str], n: int) -> list[tuple[str, int]]:
    """Split *n* jobs of each way into blocks that take turns, the order reversed each time."""
    blocks = max(1, min(BLOCKS, n // 50))
    plan: list[tuple[str, int]] = []
    for block in range(blocks):
        size = n // blocks + (block < n % blocks)
        order = ways if block % 2 == 0 else ways[::-1]
        plan += [(way, size) for way in order]
    return plan


def until_told_to_stop() -> Callable[[], Coroutine[Any, Any, object]]:
    """Return what waits for SIGTERM or SIGINT; for peers that do not watch for signals."""
    told = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, told.set)
    return told.wait


def _stop_with_the_runner() -> None:
    """End with the runner, however that ended: its end of the pipe is then closed."""
    sys.stdin.read()
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(10)
    os._exit(1)


def main(program: type[Program]) -> None:
    """Answer the command line."""
    parser = argparse.ArgumentParser()
    commands = ("setup", "enqueue", "bulk", "fill", "produce", "work")
    parser.add_argument("command", choices=commands)
    parser.add_argument("--dsn", default="")
    parser.add_argument("--driver", default="asyncpg")
    parser.add_argument("--uvloop", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--n", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument(
        "--ways", type=lambda text: tuple(filter(None, text.split(","))), default=()
    )
    parser.add_argument("--gap", type=float, default=0.05)
    parser.add_argument("--background", type=float, default=0)
    parser.add_argument("--busy-ms", type=float, default=0)
    parser.add_argument("--concurrency", type=int, default=10)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--serve", default=TASK)
    answer = program(Options(**vars(parser.parse_args()))).answer()
    print(json.dumps(answer))
