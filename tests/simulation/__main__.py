"""Play many schedules: ``python -m tests.simulation --schedules 1000000 [--seed N]``.

Each has a seed of its own, from the first one on, and plays the same way again: a schedule that
breaks a law is named with the command that replays it and tells its story.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from concurrent.futures import ProcessPoolExecutor

from tests.simulation.adversary import Adversary

CHUNK = 200
"""Schedules that a process plays at a time."""


def main() -> int:
    """Play what the command line asks for; 1 if a law was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--schedules", type=int, default=1000)
    parser.add_argument("--seed", type=int, help="of the first schedule (default: by chance)")
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--story", action="store_true", help="play the first one and tell it")
    arguments = parser.parse_args()
    first = arguments.seed
    if first is None:
        first = random.SystemRandom().randrange(2**40)
    if arguments.story:
        return tell(first)
    say(f"{arguments.schedules} schedules from seed {first}")
    began = time.monotonic()
    starts = range(first, first + arguments.schedules, CHUNK)
    ends = [min(start + CHUNK, first + arguments.schedules) for start in starts]
    broken = 0
    with ProcessPoolExecutor(arguments.processes) as pool:
        for failures in pool.map(play, starts, ends):
            for seed, law in failures:
                broken += 1
                say(f"seed {seed}: {law}")
                say(f"    python -m tests.simulation --story --seed {seed}")
    say(f"{broken} broken, in {time.monotonic() - began:.0f} s")
    return 1 if broken else 0


def play(start: int, end: int) -> list[tuple[int, str]]:
    """Return the seeds whose schedules broke a law, and the law."""
    failures: list[tuple[int, str]] = []
    for seed in range(start, end):
        try:
            Adversary(seed).run()
        except Exception as error:  # noqa: BLE001 - a crash of the machine's is a failure too
            failures.append((seed, f"{type(error).__name__}: {error}".partition("\n")[0]))
    return failures


def tell(seed: int) -> int:
    """Play one schedule and write its story, and the law that it breaks, if it does."""
    adversary = Adversary(seed, tells=True)
    try:
        adversary.run()
    except Exception as error:  # noqa: BLE001 - it is the end of the story
        end = f"{type(error).__name__}: {error}"
        broken = 1
    else:
        end, broken = "no law is broken", 0
    for line in [*(adversary.fleet.story or ()), end]:
        say(line)
    return broken


def say(line: str) -> None:
    """Write a line."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
