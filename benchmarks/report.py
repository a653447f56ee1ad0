"""The table and the JSON."""

from __future__ import annotations

import os
import platform
import statistics
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from .figures import Figure, Measured

_VERSIONS = (
    "sqlalchemy-jobs",
    "sqlalchemy",
    "asyncpg",
    "psycopg",
    "uvloop",
    "procrastinate",
    "pgqueuer",
)


class Results:
    """All that was measured: values by figure and peer, a list with one for each repeat."""

    def __init__(self) -> None:
        self.values: dict[str, dict[str, dict[int, float]]] = {}

    def add(self, measured: Measured, repeat: int) -> None:
        """Keep one value."""
        by_peer = self.values.setdefault(measured.figure, {})
        by_peer.setdefault(measured.peer, {})[repeat] = measured.value

    def median(self, figure: str, peer: str) -> float | None:
        """Return the median over the repeats."""
        values = self.values.get(figure, {}).get(peer)
        return statistics.median(values.values()) if values else None

    def ratio(self, over: tuple[str, str], under: tuple[str, str]) -> float | None:
        """Return the median, over the repeats, of one (figure, peer) divided by another.

        Within a repeat the two are measured soon after one another, so that a slow minute of the
        machine falls on both.
        """
        top = self.values.get(over[0], {}).get(over[1], {})
        bottom = self.values.get(under[0], {}).get(under[1], {})
        ratios = [top[k] / bottom[k] for k in top if bottom.get(k)]
        return statistics.median(ratios) if ratios else None


def number(value: float | None) -> str:
    """Return a number as the table shows it."""
    if value is None:
        return "-"
    if abs(value) >= 100:  # noqa: PLR2004 - decimals beyond are noise
        return f"{value:,.0f}"
    return f"{value:.3g}"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a table in Markdown, the first one its head."""
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        first, *others = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        cells = [
            first,
            *(cell.strip().rjust(w) for cell, w in zip(others, widths[1:], strict=True)),
        ]
        return f"| {' | '.join(cells)} |"

    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return "\n".join([line(rows[0]), f"| {' | '.join(rule)} |", *map(line, rows[1:])])


def figures_table(results: Results, figures: Iterable[Figure], peers: Sequence[str]) -> str:
    """Return the medians: a line a figure, a column a peer."""
    rows = [["figure", "unit", *peers]]
    for figure in figures:
        if figure.key in results.values:
            medians = (number(results.median(figure.key, peer)) for peer in peers)
            rows.append([figure.key, figure.unit, *medians])
    return table(rows)


def surroundings(server: str) -> dict[str, Any]:
    """Return what the figures depend on."""
    versions: dict[str, str] = {}
    for name in _VERSIONS:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "system": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "load_at_start": os.getloadavg()[0],
        "postgresql": server,
        "packages": versions,
    }


def as_json(
    results: Results, figures: Iterable[Figure], more: Mapping[str, object]
) -> dict[str, object]:
    """Return everything for a file."""
    measured: dict[str, object] = {}
    for figure in figures:
        by_peer = results.values.get(figure.key)
        if by_peer is not None:
            measured[figure.key] = {
                "unit": figure.unit,
                "definition": figure.definition,
                "median": {peer: results.median(figure.key, peer) for peer in by_peer},
                "values": {peer: list(values.values()) for peer, values in by_peer.items()},
            }
    return {**more, "figures": measured}
