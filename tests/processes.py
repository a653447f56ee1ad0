"""Workers as real processes: started, watched, paused, signalled and killed by tests.

    with WorkerProcess(jobs.url, {"nap": "work"}, visibility_timeout=2) as worker:
        worker.ready()
        job_id = jobs.enqueue("nap", {"first": 60})
        worker.wait_for("start", job=job_id)
        worker.kill()

The program is `tests/programs/worker.py`, which has the handlers that can be named.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tests.workers import SYNC, wait_until

if TYPE_CHECKING:
    from collections.abc import Mapping

_REPOSITORY = Path(__file__).resolve().parent.parent
_PROGRAM = _REPOSITORY / "tests" / "programs" / "worker.py"

Said = dict[str, Any]


class WorkerProcess:
    """A worker of one driver's kind in a process, killed at the end if it still runs."""

    def __init__(
        self,
        url: str,
        tasks: Mapping[str, str],
        *,
        driver: str = "psycopg",
        blocked_after: float | None = None,
        program: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        """Prepare a worker for *tasks*, from their names to the program's handlers.

        *program* is more of the program's own configuration, *options* are the worker's.
        """
        self._configuration: dict[str, Any] = {
            "url": url,
            "is_async": driver not in SYNC,
            "tasks": dict(tasks),
            "options": options,
            **(program or {}),
        }
        if blocked_after is not None:
            self._configuration["blocked_after"] = blocked_after
        self._said: list[Said] = []
        self._errors: list[str] = []

    def __enter__(self) -> Self:
        """Start the process."""
        environment = {**os.environ, "PYTHONPATH": str(_REPOSITORY), "PYTHONUNBUFFERED": "1"}
        self.process = subprocess.Popen(
            [sys.executable, str(_PROGRAM), json.dumps(self._configuration)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_REPOSITORY,
        )
        self._readers = [
            threading.Thread(target=self._read_said, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Kill it if it still runs, paused or not."""
        self.process.kill()
        self.process.wait()
        for reader in self._readers:
            reader.join(5)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()

    def _read_said(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self._errors.extend(self.process.stderr)

    # --- what it says --------------------------------------------------------------------------

    @property
    def errors(self) -> str:
        """Everything on its standard error."""
        return "".join(self._errors)

    def said(self, event: str, **more: Any) -> list[Said]:
        """Return the lines of an event that have these values, in order."""
        wanted = {"event": event, **more}
        return [said for said in list(self._said) if wanted.items() <= _hashable(said).items()]

    def wait_for(self, event: str, **more: Any) -> Said:
        """Return the first such line when it is there."""

        def found() -> list[Said]:
            ended = self.process.poll() is not None and not any(r.is_alive() for r in self._readers)
            lines = self.said(event, **more)
            assert lines or not ended, f"it ended: {self.errors}"
            return lines

        return wait_until(found)[0]

    def wait_for_log(self, of: str, **more: Any) -> Said:
        """Return the first record of an event of the library's log."""
        return self.wait_for("log", of=of, **more)

    def ready(self) -> Self:
        """Wait until the worker has said that it is."""
        self.wait_for_log("ready")
        return self

    @property
    def name(self) -> str:
        """The name under which it holds its jobs."""
        name: str = self.wait_for("named")["name"]
        return name

    # --- what is done to it --------------------------------------------------------------------

    def signal(self, number: int) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    def kill(self) -> None:
        """End it without a chance to do anything."""
        self.signal(signal.SIGKILL)
        self.process.wait(30)

    def pause(self) -> None:
        """Stop it in its tracks."""
        self.signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on as if nothing had been."""
        self.signal(signal.SIGCONT)

    def wait(self, within: float = 30.0) -> int:
        """Wait for its end and return its exit code; below 0: the signal that ended it."""
        code = self.process.wait(within)
        for reader in self._readers:
            reader.join(5)
        return code


def _hashable(said: Said) -> Said:
    return {key: value for key, value in said.items() if not isinstance(value, list | dict)}
