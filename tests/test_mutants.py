"""The laws have teeth: each broken machine, table or database of ``mutants.py`` is caught.

One mutant at a time, with its law's words: ``python -m tests.mutants``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from sqlalchemy_jobs import _machine, lifecycle
from tests.mutants import MUTANTS, Laws, Mutant, judge

if TYPE_CHECKING:
    from types import ModuleType


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name.replace(" ", "-"))
def test_a_mutant_is_caught(mutant: Mutant) -> None:
    """A law finds it wrong: by an assertion, for a crash would not be caught here."""
    assert judge(mutant.laws, mutant.load()) is not None, "it escaped"


@pytest.mark.parametrize(
    ("laws", "module"),
    [
        (Laws.HISTORIES, _machine),
        (Laws.EXAMPLES, _machine),
        (Laws.TABLE, lifecycle),
    ],
)
def test_what_is_sound_is_not_caught(laws: Laws, module: ModuleType) -> None:
    """The very same run finds nothing wrong with the modules as they are."""
    assert judge(laws, module) is None


def test_no_two_mutants_are_the_same() -> None:
    """Names are unique, and each mutant changes something in its own way."""
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 14
    assert len({(mutant.sound, mutant.broken) for mutant in MUTANTS}) == len(MUTANTS)


def test_a_mutant_without_its_passage_is_refused() -> None:
    """When the source has changed the mutant says so, rather than testing nothing."""
    with pytest.raises(LookupError, match="must stand once"):
        replace(MUTANTS[0], sound="no such passage").load()
    with pytest.raises(LookupError, match="must stand once"):
        replace(MUTANTS[0], sound="self").load()


def test_a_crash_is_not_a_catch() -> None:
    """A mutant that cannot even run proves nothing about the laws."""
    crashing = Mutant("crashing", _machine, "        commands: list[Command] = []\n", "")
    with pytest.raises(NameError):
        judge(Laws.HISTORIES, crashing.load())
