"""Histories that nobody thought of: several workers on one simulated database.

What can happen, and the laws that hold whatever happens, stand in ``tests/fleet.py`` and
``tests/laws.py``. Two drivers choose: hypothesis, which shrinks what it finds to a few steps, and
random walks, which cost a tenth and wander farther. At the end of every history the faults cease,
and everything that is due must come to its end in bounded time.

``SQLALCHEMY_JOBS_EXAMPLES=20000 pytest tests/test_machine_stateful.py`` searches for longer. A
history that fails is printed as a program with a ``@reproduce_failure`` line that replays it; of a
walk the seed is printed: ``walk(Fleet, seed)``.
"""

from __future__ import annotations

import os
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sqlalchemy_jobs import _machine
from tests import simulated
from tests.fleet import ACTIONS, Fleet

if TYPE_CHECKING:
    from types import ModuleType

EXAMPLES = int(os.environ.get("SQLALCHEMY_JOBS_EXAMPLES", "200"))
WALKS = 3 * EXAMPLES
STEPS = 60

pytestmark = pytest.mark.timeout(60 + EXAMPLES)


# --- random walks ------------------------------------------------------------------------------


class WalkError(AssertionError):
    """A walk broke a law; the message says how to walk it again."""


def walk(kind: type[Fleet], seed: int) -> None:
    """Let chance decide what happens. The same seed walks the same way again.

    Each walk has its own taste: of all that can happen some things never do, and some often, so
    that walks differ more than dice would make them.
    """
    chance = random.Random(seed)  # noqa: S311 - dice, not keys
    taste = {
        name: action.weight * chance.choice((0.0, 0.3, 1.0, 1.0, 1.0, 4.0))
        for name, action in ACTIONS.items()
    }
    fleet = kind()
    steps: list[str] = []
    try:
        for name, action in ACTIONS.items():
            if action.first:
                _take(fleet, name, chance, steps)
        for _ in range(STEPS):
            possible = [
                name
                for name, action in ACTIONS.items()
                if not action.first and taste[name] and action.when(fleet)
            ]
            if possible:
                weights = [taste[name] for name in possible]
                _take(fleet, chance.choices(possible, weights)[0], chance, steps)
            fleet.laws_hold()
        fleet.end()
    except AssertionError as error:
        history = "\n".join(steps)
        message = f"{error}\nafter {history}\nin walk({kind.__name__}, {seed})"
        raise WalkError(message) from error


def _take(fleet: Fleet, name: str, chance: random.Random, steps: list[str]) -> None:
    choices = ACTIONS[name].choices
    arguments = {argument: chance.choice(values) for argument, values in choices.items()}
    steps.append(f"  {name}({', '.join(f'{k}={v!r}' for k, v in arguments.items())})")
    ACTIONS[name].do(fleet, **arguments)


def fleet_of(machine_module: ModuleType, simulated_module: ModuleType) -> type[Fleet]:
    """A fleet of these machines on this database, which counts what it reaches for itself."""

    class FleetOf(Fleet):
        reached: ClassVar[Counter[str]] = Counter()

    FleetOf.machine_module = machine_module
    FleetOf.simulated_module = simulated_module
    return FleetOf


# --- hypothesis --------------------------------------------------------------------------------


def under_hypothesis(kind: type[Fleet]) -> type[RuleBasedStateMachine]:
    """The same fleet, with its actions as rules."""

    class History(kind, RuleBasedStateMachine):  # type: ignore[misc, valid-type]
        laws_hold = invariant()(kind.laws_hold)

        def teardown(self) -> None:
            # When the history has failed already, a second complaint would hide the first.
            if hasattr(self, "database") and sys.exc_info()[0] is None:
                self.end()

    for name, action in ACTIONS.items():
        declare: Any = initialize if action.first else rule
        strategies = {key: st.sampled_from(values) for key, values in action.choices.items()}
        made: Any = declare(**strategies)(action.do)
        setattr(History, name, made if action.first else precondition(action.when)(made))
    return History


def search(kind: type[Fleet], examples: int) -> None:
    """Let hypothesis try so many histories of *kind*, and shrink what breaks a law."""
    run_state_machine_as_test(
        under_hypothesis(kind),
        settings=settings(
            max_examples=examples,
            stateful_step_count=STEPS,
            deadline=None,
            print_blob=True,
            suppress_health_check=list(HealthCheck),  # pyright: ignore[reportArgumentType]
        ),
    )


# --- the tests ---------------------------------------------------------------------------------


def test_the_laws_hold_in_every_history() -> None:
    """Whatever happens in whatever order, the machine and the queue keep their laws."""
    search(Fleet, EXAMPLES)


PLACES = (
    "all slots taken",
    "answer lost: Claim",
    "answer lost: Settle",
    "answer lost: Sweep",
    "broke Claim",
    "broke Renew",
    "broke Settle",
    "broke prune",
    "broke recover",
    "crash",
    "full look",
    "group commit",
    "handler in peace",
    "interrupt",
    "late end",
    "local lease ran out",
    "look from memory",
    "news during a claim",
    "postponed",
    "recorded fail",
    "recorded release",
    "recorded retry",
    "recorded snooze",
    "recorded succeed",
    "refused",
    "released",
    "renewal while stopping",
    "renewed by others",
    "requeued",
    "rest with a free slot",
    "running job cancelled",
    "stopped clean",
    "stopped with abandoned",
    "timeout",
    "told to stop",
)
"""Where the walks must have been, or the laws were not put to the test. A thousand walks see the
rarest of these some fifty times."""


def test_the_laws_hold_wherever_chance_leads() -> None:
    """The same for hundreds of walks, which between them get everywhere that matters."""
    kind = fleet_of(_machine, simulated)
    start = random.SystemRandom().randrange(2**32)
    for seed in range(start, start + WALKS):
        walk(kind, seed)
    missed = [place for place in PLACES if not kind.reached[place]]
    assert not missed, f"{WALKS} walks from {start} never saw these"


def test_a_walk_can_be_repeated() -> None:
    """The same seed leads the same way: what fails can be looked at again."""
    for seed in range(3):
        first, again = fleet_of(_machine, simulated), fleet_of(_machine, simulated)
        walk(first, seed)
        walk(again, seed)
        assert first.reached == again.reached
        assert first.reached["full look"]
