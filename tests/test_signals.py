"""What SIGINT and SIGTERM do while a worker runs."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

PROGRAM = """
import os, signal, sys, time
from sqlalchemy_jobs._signals import stop_by_signal

asked = []
with stop_by_signal(lambda: asked.append(1)):
    for pause in map(float, sys.argv[1:]):
        time.sleep(pause)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.01)
print(f"asked {len(asked)} times", flush=True)
"""


LEAVING = """
import os, signal, threading, time
from sqlalchemy_jobs._signals import stop_by_signal

asked = threading.Event()
with stop_by_signal(asked.set):
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Timer(0.03, os.kill, (os.getpid(), signal.SIGTERM)).start()
    asked.wait()
print("left in order", flush=True)
"""


def run(*pauses: float) -> subprocess.CompletedProcess[str]:
    """Run the program, which signals itself after each of the pauses."""
    command = [sys.executable, "-c", PROGRAM, *map(str, pauses)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_one_signal_asks_to_stop() -> None:
    """The first signal leaves the process running, so that it can stop in order."""
    done = run(0)
    assert (done.returncode, done.stdout) == (0, "asked 1 times\n")


def test_a_second_signal_ends_the_process() -> None:
    """Whoever asks again does not want to wait."""
    began = time.monotonic()
    assert run(0, 0.5).returncode == -signal.SIGTERM
    assert time.monotonic() - began < 30


def test_a_signal_that_comes_twice_at_once_asks_once() -> None:
    """A program that signals a process and its group means it once."""
    done = run(0, 0)
    assert (done.returncode, done.stdout) == (0, "asked 1 times\n")


def test_the_other_half_of_a_signal_does_not_meet_the_restored_handlers() -> None:
    """An idle worker, which stops at once, still waits for the second of two quick signals."""
    command = [sys.executable, "-c", LEAVING]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "left in order\n")
