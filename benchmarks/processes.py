"""The measured programs as processes: calls that answer, and workers that run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

_CALL_TIMEOUT_S = 600
_STOP_TIMEOUT_S = 10


class ProgramError(Exception):
    """A measured program failed; the message is what it wrote."""


def call(program: str, arguments: Sequence[str]) -> Any:
    """Run a program's command to its end and return its answer."""
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.programs.{program}", *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=_CALL_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise ProgramError(f"{program} {' '.join(arguments)}\n{done.stderr[-3000:]}")
    return json.loads(done.stdout.splitlines()[-1])


class WorkerProcess:
    """A program that runs jobs. Made, it has loaded and waits; :meth:`go` starts the work."""

    def __init__(self, program: str, arguments: Sequence[str]) -> None:
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - it lives as long as this
        self._process = subprocess.Popen(
            [sys.executable, "-m", f"benchmarks.programs.{program}", "work", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            start_new_session=True,  # what it starts ends with it
        )
        self._loaded = threading.Event()
        self.counts: list[tuple[int, int]] = []
        """(handlers started so far, when)."""
        self.starts: dict[int, int] = {}
        """When the handler of each numbered job started."""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._loaded.wait(30):
            self.stop()
            raise ProgramError(f"{program} did not start\n{self.said()}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    @property
    def pid(self) -> int:
        """The id of its process."""
        return self._process.pid

    @property
    def count(self) -> int:
        """How many handlers had started when it last said so."""
        return self.counts[-1][0] if self.counts else 0

    def go(self) -> None:
        """Let it begin."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def check(self) -> None:
        """Raise if it has ended."""
        if self._process.poll() is not None:
            raise ProgramError(f"a worker ended\n{self.said()}")

    def said(self) -> str:
        """Return the end of what it wrote to standard error."""
        self._log.seek(0)
        return self._log.read()[-3000:]

    def memory_kb(self) -> float | None:
        """Return its resident memory in KiB; None where ps does not tell."""
        done = subprocess.run(
            ["ps", "-o", "rss=", "-p", str(self.pid)],  # noqa: S607 - wherever it is
            capture_output=True,
            text=True,
            check=False,
        )
        return float(done.stdout) if done.stdout.strip() else None

    def stop(self) -> None:
        """Ask it to stop, and end it if it does not."""
        with contextlib.suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_TIMEOUT_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._reader.join(1)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                event = json.loads(line)
            except ValueError:
                continue  # a peer's own words
            match event:
                case {"loaded": True}:
                    self._loaded.set()
                case {"count": count, "at": at}:
                    self.counts.append((count, at))
                case {"seq": seq, "at": at}:
                    self.starts.setdefault(seq, at)
                case _:
                    pass


def wait_for(condition: Callable[[], bool], seconds: float, every: float = 0.01) -> bool:
    """Wait until *condition* holds; False if it does not within *seconds*."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(every)
    return True
