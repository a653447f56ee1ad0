"""Daemon threads for handlers that block.

A thread cannot be killed, so a pool of a fixed size loses a place to each handler that outlives
its deadline. Here a thread is made whenever none is idle, and ends when enough others are; being
daemons, stuck ones do not keep the process from exiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

Work: TypeAlias = Callable[[], None]


class Threads:
    """Runs functions in threads, up to *idle* of which are kept for the next one."""

    def __init__(self, idle: int, name: str) -> None:
        self._most_idle = idle
        self._name = name
        self._idle: list[SimpleQueue[Work | None]] = []
        self._closed = False

    def run(self, work: Work) -> None:
        """Run *work*, which must not raise, in a thread of its own."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = SimpleQueue[Work | None]()
            threading.Thread(
                target=self._serve, args=(inbox,), name=self._name, daemon=True
            ).start()
        inbox.put(work)

    def close(self) -> None:
        """End the idle threads; busy ones end with their work."""
        self._closed = True
        while self._idle:
            self._idle.pop().put(None)

    def _serve(self, inbox: SimpleQueue[Work | None]) -> None:
        while True:
            work = inbox.get()
            if work is None:
                return
            work()
            del work  # what it holds must not live until the next one comes
            if self._closed or len(self._idle) >= self._most_idle:
                return
            self._idle.append(inbox)
            if self._closed:  # closed in between: nobody else will end this thread
                self.close()
