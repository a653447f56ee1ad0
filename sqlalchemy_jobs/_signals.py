"""SIGINT and SIGTERM while a worker's ``run()`` has the main thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

SAME_SIGNAL: Final = 0.1
"""Seconds: what comes so soon after the first is no second thought. ``timeout`` of coreutils, for
one, signals its child and then the whole group with it."""

if TYPE_CHECKING:
    from collections.abc import Callable, Generator
    from types import FrameType


@contextmanager
def stop_by_signal(stop: Callable[[], object]) -> Generator[None, None, None]:
    """Call *stop* at the first signal, end the process at the second; then restore the handlers.

    Without effect where Python allows no handlers: on any other thread than the main one, and in
    programs that embed it. A child that was forked meanwhile is none of the worker's business, and
    has the handlers of before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked_at: float | None = None
    process = os.getpid()
    before: dict[signal.Signals, Any] = {}

    def restore(number: int, handler: Any) -> None:
        # None: it was not installed from Python, and cannot be put back from it either.
        signal.signal(number, signal.SIG_DFL if handler is None else handler)

    def on_signal(number: int, frame: FrameType | None) -> None:  # noqa: ARG001 - the protocol
        nonlocal asked_at
        if os.getpid() != process:
            restore(number, before[signal.Signals(number)])
            os.kill(os.getpid(), number)
        elif asked_at is None:
            asked_at = time.monotonic()
            stop()
        elif time.monotonic() - asked_at > SAME_SIGNAL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    with suppress(ValueError):
        for number in (signal.SIGINT, signal.SIGTERM):
            before[number] = signal.signal(number, on_signal)
    try:
        yield
    finally:
        if asked_at is not None:  # the other half of a signal that came twice may be on its way
            time.sleep(max(0.0, asked_at + SAME_SIGNAL - time.monotonic()))
        for number, handler in before.items():
            restore(number, handler)
