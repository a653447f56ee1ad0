"""docs/guarantees.md names tests: they exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "docs" / "guarantees.md"


def test_every_test_that_the_page_names_is_there() -> None:
    """What is said to be shown is shown by a test of that name in that file."""
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", PAGE.read_text("utf-8"))
    assert len(named) > 30
    missing = [f"{file}::{name}" for file, name in named if name not in _functions(TESTS / file)]
    assert missing == []


def _functions(file: Path) -> set[str]:
    if not file.exists():
        return set()
    nodes = ast.walk(ast.parse(file.read_text("utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
