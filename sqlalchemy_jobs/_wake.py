"""Waking workers of the same process, which needs no database."""

from __future__ import annotations

import os
from collections.abc import Callable
from threading import Lock
from typing import TypeAlias

Wake: TypeAlias = Callable[[], None]

_lock = Lock()
_workers: dict[str, list[Wake]] = {}


def register(channel: str, wake: Wake) -> Callable[[], None]:
    """Call *wake*, from any thread, when jobs of *channel* may be due; returns how to end that."""
    with _lock:
        _workers[channel] = [*_workers.get(channel, ()), wake]

    def unregister() -> None:
        with _lock:
            left = [other for other in _workers.get(channel, ()) if other is not wake]
            if left:
                _workers[channel] = left
            else:
                _workers.pop(channel, None)

    return unregister


def _forget() -> None:
    """Wake nobody from a fork: its workers' threads are in the parent, and so are their loops."""
    global _lock  # noqa: PLW0603 - another thread may have held it when it was copied
    _lock = Lock()
    _workers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)


def wake_workers(channel: str) -> None:
    """Wake this process's workers of *channel*."""
    for wake in _workers.get(channel, ()):
        wake()
