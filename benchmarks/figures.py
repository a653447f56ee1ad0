"""Figures, and the scenarios that measure them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .bench import Bench
    from .peers import Peer


@dataclass(frozen=True, slots=True)
class Figure:
    """A number that is measured, and exactly what it is."""

    key: str
    unit: str
    definition: str


@dataclass(frozen=True, slots=True)
class Measured:
    """One value of one figure, in one repeat."""

    figure: str
    peer: str
    value: float


class Scenario(Protocol):
    """Something that is measured, for each peer that can do it."""

    @property
    def name(self) -> str:
        """What --only calls it."""
        ...

    @property
    def figures(self) -> Sequence[Figure]:
        """The figures it yields."""
        ...

    def peers(self, bench: Bench) -> Sequence[Peer]:
        """Those of the bench's peers that can do it."""
        ...

    def run(self, bench: Bench, peer: Peer) -> Iterator[Measured]:
        """Measure one of them once."""
        ...
