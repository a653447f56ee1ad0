"""Thousands of schedules of a whole fleet, and broken rules that they catch.

`python -m tests.simulation --schedules 1000000` plays more of them, `--seed N` the same ones again.
"""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from sqlalchemy_jobs import _machine
from sqlalchemy_jobs.lifecycle import IllegalMoveError
from tests.mutants import Mutant
from tests.simulation import database
from tests.simulation.adversary import Adversary
from tests.simulation.fleet import SOUND, Parts

SCHEDULES = round(20_000 * float(os.environ.get("SQLALCHEMY_JOBS_CAMPAIGN", "1")))
FIRST = 100
"""The same schedules each time, so that a change is what breaks one; the command plays others."""

ENOUGH = 2_000
"""Schedules in which a broken rule must show; the rarest showed after a few hundred."""


@pytest.mark.campaign
@pytest.mark.timeout(0)
def test_no_schedule_breaks_a_law() -> None:
    """Whatever dies, stalls, is lost, comes late or twice, and whenever: no promise is broken."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "tests.simulation"),
            *("--schedules", str(SCHEDULES), "--seed", str(FIRST)),
        ],
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_seed_plays_the_same_schedule_again() -> None:
    """What fails can be replayed to the last event."""
    first = random.SystemRandom().randrange(2**40)
    for seed in range(first, first + 20):
        stories: list[list[str] | None] = []
        for _ in range(2):
            adversary = Adversary(seed, tells=True)
            adversary.run()
            stories.append(adversary.fleet.story)
        assert stories[0], "it has a story"
        assert stories[0] == stories[1], f"seed {seed}"


BROKEN = (
    Mutant(
        "fence without attempts",
        database,
        "row.locked_by == by and row.attempts == attempt",
        "row.locked_by == by",
    ),
    Mutant(
        "recovery by id only",
        database,
        "life = next((life for life in lives if self.allows(row, life, view.at)), None)",
        "life = lives[0]",
    ),
    Mutant(
        "renewal stopped during drain",
        _machine,
        "        self._plan_renew(now, commands)\n",
        "        if self.phase is Phase.RUNNING:\n            self._plan_renew(now, commands)\n",
    ),
    Mutant(
        "claim while stopping",
        _machine,
        "if self.phase is Phase.RUNNING and now < lease_until:",
        "if now < lease_until:",
    ),
    Mutant(
        "settle that forgets outcomes in flight",
        _machine,
        '        if kind == "claim":\n            self._look_at',
        '        if kind == "settle":\n            self._ended.clear()\n'
        '        if kind == "claim":\n            self._look_at',
    ),
)


@pytest.mark.parametrize("watched", [True, False], ids=["all laws", "laws of the queue"])
@pytest.mark.parametrize("broken", BROKEN, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_broken_rule_is_caught(broken: Mutant, *, watched: bool) -> None:
    """Each shows in what becomes of jobs, not only to who watches the machine.

    The table of moves refuses some of it itself, by :class:`IllegalMoveError`.
    """
    module = broken.load()
    if broken.module is database:
        parts = Parts(database=module, watched=watched)
    else:
        parts = Parts(machine=module, watched=watched)
    with pytest.raises((AssertionError, IllegalMoveError)):
        play(parts, ENOUGH)


def play(parts: Parts, schedules: int) -> None:
    """Play the first so many schedules."""
    for seed in range(schedules):
        Adversary(seed, parts).run()


def test_what_is_sound_is_not_caught() -> None:
    """The first of the same schedules find nothing wrong with the sound parts."""
    play(SOUND, 100)
