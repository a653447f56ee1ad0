"""Imports go down only: the floors of the library, enforced on its source.

The modules are parsed, not imported, so that an import inside a function or under
``TYPE_CHECKING`` counts too: a type that must look up is a dependency all the same.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

PACKAGE: Final = "sqlalchemy_jobs"
ROOT: Final = Path(__file__).resolve().parent.parent / PACKAGE

FLOORS: Final[tuple[tuple[str, ...], ...]] = (
    # From the roof to the ground. A module may import modules of lower floors, and of its own
    # floor as long as no cycle comes of it. A new module fails the test below until it stands
    # here; a name that does not exist yet does no harm.
    ("__init__",),
    ("worker", "worker_async"),
    ("_watchdog", "_listen_thread", "_listen_async", "_lane", "_lane_async"),
    ("_listen",),
    ("_core", "_bell", "_attempts", "_joblog", "_signals", "_threads"),
    ("_cures", "health"),
    ("_connections",),
    ("session", "_verdicts"),
    ("_newjob", "_target", "_wake"),
    ("_store",),
    ("models", "statements", "_statements_sqlite", "_window", "_channel", "sqltypes", "migrations"),
    ("tasks", "payload", "_fit", "settings"),
    ("_machine", "_messages", "lifecycle"),
    ("errors", "_version"),
)
"""``migrations`` stands for the whole package of that name."""

STRANGERS: Final = (
    # Two modules that never see each other, in either direction, not even through others.
    ("worker", "worker_async"),
)

PURE: Final = frozenset({"_machine", "_messages", "lifecycle"})
PURE_MAY_IMPORT: Final = frozenset(
    {"__future__", "collections.abc", "dataclasses", "enum", "types", "typing"}
)
"""No clock, no randomness, no threads, no loop, no SQL: whatever the pure floor needs of those
comes in from outside."""


def module_of(path: Path) -> str:
    """``_machine`` for ``_machine.py``; the name of the package for everything inside one."""
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def imports_of(source: str, package: tuple[str, ...]) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield what *source*, a module inside *package*, imports: (dotted module, names taken)."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, ()
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            base = package[: len(package) - node.level + 1] if node.level else ()
            yield ".".join((*base, *filter(None, [node.module]))), names


def neighbours(source: str, package: tuple[str, ...] = (PACKAGE,)) -> set[str]:
    """The modules of the library that *source* imports."""
    found: set[str] = set()
    for module, names in imports_of(source, package):
        head, *rest = module.split(".")
        if head != PACKAGE:
            continue
        if rest:
            found.add(rest[0])
        elif names:  # from . import a, b: modules, or names that the roof exports
            found.update(name if exists(name) else "__init__" for name in names)
        else:
            found.add("__init__")
    return found


def exists(name: str) -> bool:
    """Whether *name* is a module or a package of the library."""
    return (ROOT / f"{name}.py").exists() or (ROOT / name / "__init__.py").exists()


def sources() -> list[Path]:
    """Every module of the library, those of its packages too."""
    return sorted(path for path in ROOT.rglob("*.py") if "__pycache__" not in path.parts)


def graph() -> dict[str, set[str]]:
    """Which module imports which, itself left out."""
    edges: dict[str, set[str]] = {}
    for path in sources():
        name = module_of(path)
        package = (PACKAGE, *path.relative_to(ROOT).parts[:-1])
        edges.setdefault(name, set()).update(neighbours(path.read_text("utf-8"), package) - {name})
    return edges


def below(name: str, edges: dict[str, set[str]]) -> set[str]:
    """Everything that *name* imports, directly or through others."""
    seen: set[str] = set()
    todo = [name]
    while todo:
        for other in edges.get(todo.pop(), set()) - seen:
            seen.add(other)
            todo.append(other)
    return seen


def violations(edges: dict[str, set[str]]) -> list[str]:
    """What in *edges* breaks the floors, as sentences."""
    floor = {name: number for number, names in enumerate(FLOORS) for name in names}
    found = [f"{name} has no floor: give it one in FLOORS" for name in edges if name not in floor]
    for name, others in edges.items():
        found += [
            f"{name} looks up to {other}"
            for other in others
            if name in floor and other in floor and floor[other] < floor[name]
        ]
        if name in below(name, edges):
            found.append(f"{name} is part of a cycle")
    for one, two in STRANGERS:
        for name, other in ((one, two), (two, one)):
            if other in below(name, edges):
                found.append(f"{name} sees {other}")
    return sorted(found)


def impurities(source: str) -> set[str]:
    """The modules that *source* imports although the pure floor must not."""
    return {
        module
        for module, _ in imports_of(source, (PACKAGE,))
        if module not in PURE_MAY_IMPORT and module.split(".")[0] != PACKAGE
    }


def test_every_import_goes_down() -> None:
    """Every module has a floor, imports only from it and from lower ones, and in no circle."""
    edges = graph()
    assert not PURE - set(edges), "the parser must have found the modules"
    assert violations(edges) == []


def test_every_imported_neighbour_exists() -> None:
    """No module imports a neighbour that is not there, so the graph above is complete."""
    missing = {(n, other) for n, others in graph().items() for other in others if not exists(other)}
    assert missing == set()


def test_no_module_stands_on_two_floors() -> None:
    """The map of the floors names each module once."""
    names = [name for floor in FLOORS for name in floor]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("name", sorted(PURE))
def test_the_pure_floor_imports_neither_clock_nor_io(name: str) -> None:
    """The decisions are made of values alone: a short list of modules is all they may import."""
    assert impurities((ROOT / f"{name}.py").read_text("utf-8")) == set()


def test_the_pure_floor_can_be_imported_alone() -> None:
    """Each name of the allow-list is a module of the standard library."""
    roots = {module.split(".")[0] for module in PURE_MAY_IMPORT}
    assert roots <= set(sys.stdlib_module_names)


@pytest.mark.parametrize(
    ("edges", "complaint"),
    [
        ({"errors": {"models"}}, "errors looks up to models"),
        ({"_machine": {"_store"}}, "_machine looks up to _store"),
        ({"migrations": {"session"}}, "migrations looks up to session"),
        ({"tasks": {"__init__"}}, "tasks looks up to __init__"),
        ({"novelty": set()}, "novelty has no floor: give it one in FLOORS"),
        ({"models": {"sqltypes"}, "sqltypes": {"models"}}, "models is part of a cycle"),
        ({"worker": {"worker_async"}}, "worker sees worker_async"),
        ({"worker_async": {"_lanes"}, "_lanes": {"worker"}}, "worker_async sees worker"),
    ],
)
def test_the_lint_notices(edges: dict[str, set[str]], complaint: str) -> None:
    """Each way to break the floors is reported."""
    assert complaint in violations(edges)


@pytest.mark.parametrize(
    ("source", "package", "seen"),
    [
        ("from ._machine import Machine", (), {"_machine"}),
        ("from . import lifecycle, Job", (), {"lifecycle", "__init__"}),
        ("import sqlalchemy_jobs.models", (), {"models"}),
        ("from sqlalchemy_jobs.errors import JobsError", (), {"errors"}),
        ("import sqlalchemy_jobs", (), {"__init__"}),
        ("from .. import lifecycle", ("migrations",), {"lifecycle"}),
        ("from ..models import Job", ("migrations",), {"models"}),
        ("from .env import run", ("migrations",), {"migrations"}),
        ("from ...models import Job", ("migrations", "versions"), {"models"}),
        ("def f():\n    from .tasks import Tasks", (), {"tasks"}),
        ("if TYPE_CHECKING:\n    from .tasks import Tasks", (), {"tasks"}),
        ("import asyncio, sqlalchemy", (), set()),
    ],
)
def test_the_parser_sees(source: str, package: tuple[str, ...], seen: set[str]) -> None:
    """Every way to write an import is seen, wherever in the file it stands."""
    assert neighbours(source, (PACKAGE, *package)) == seen


@pytest.mark.parametrize(
    "source",
    [
        "import time",
        "import asyncio",
        "from random import random",
        "from collections import deque",
        "def f():\n    import threading",
        "import sqlalchemy",
        "from sqlalchemy.orm import Session",
    ],
)
def test_an_impurity_is_noticed(source: str) -> None:
    """A clock, a loop, threads, randomness or SQL on the pure floor is reported."""
    assert impurities(source)
