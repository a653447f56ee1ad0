"""SIGINT and SIGTERM while a worker's ``run()`` has the main thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

SAME_SIGNAL: Final = 0.1
"""Seconds: what comes so soon after the first is no second thought. ``timeout`` of coreutils, for
one, signals its child and then the whole group with it."""

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType


@contextmanager
def stop_by_signal(stop: Callable[[], object]) -> Generator[None, None, None]:
    """Call *stop* at the first signal, end the process at the second; then restore the handlers.

    Without effect on any other thread than the main one, where Python allows no handlers.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at: float | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the protocol
        nonlocal asked_at
        if asked_at is None:
            asked_at = time.monotonic()
            stop()
        elif time.monotonic() - asked_at > SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        if asked_at is not None:  # the other half of a signal that came twice may be on its way
            time.sleep(max(0.0, asked_at + SAME_SIGNAL - time.monotonic()))
        for number, handler in before.items():
            # None: it was not installed from Python, and cannot be put back from it either.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
