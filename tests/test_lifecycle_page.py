"""The page about a job's life is the table of moves in other words, and stays so.

What stands between the marks of `docs/lifecycle.md` is made from `lifecycle.MOVES`. After a change
of the table write it anew:

    python -m tests.test_lifecycle_page
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from sqlalchemy_jobs.lifecycle import (
    MOVES,
    Allowance,
    Errors,
    Event,
    Guard,
    Hold,
    Move,
    RunAt,
    Status,
)
from sqlalchemy_jobs.models import Job

HOW = "made from the table of moves; python -m tests.test_lifecycle_page"
PAGE = Path(__file__).parent.parent / "docs" / "lifecycle.md"

GUARDS = {
    Guard.NONE: "",
    Guard.DUE: "its time has come, attempts are left",
    Guard.SPENT: "its time has come, no attempt is left",
    Guard.HOLDER: "by the worker and attempt that hold the lease",
    Guard.EXPIRED: "the lease ran out, attempts are left",
    Guard.EXPIRED_SPENT: "the lease ran out, no attempt is left",
    Guard.AGED: "older than the retention of its status",
}
CHANGES: dict[object, str] = {
    Allowance.SETTLE: "an open `max_attempts` becomes the task's",
    Allowance.GIVE_BACK: "`max_attempts` + 1",
    Allowance.AT_LEAST_ONE_MORE: "`max_attempts` leaves at least one more",
    Hold.TAKE: "lease taken",
    Hold.EXTEND: "lease extended",
    Hold.DROP: "lease dropped",
    RunAt.NOW: "due at once",
    RunAt.GIVEN: "due after a delay",
    Errors.APPEND: "error recorded",
}


def changes(move: Move) -> str:
    """What a move changes beyond the status, in words."""
    words = ["`attempts` + 1"] if move.counts else []
    kinds = (move.allowance, move.lease, move.run_at, move.errors)
    words += [CHANGES[kind] for kind in kinds if str(kind) != "keep"]
    if move.wakes:
        words.append("workers are woken")
    return ", ".join(words)


def events() -> str:
    """The table of events."""
    lines = ["| event | from | to | only if | changes |", "|---|---|---|---|---|"]
    for event, move in MOVES.items():
        source = ", ".join(status for status in Status if status in move.source) or "(new)"
        target = move.target or "deleted"
        lines.append(f"| {event} | {source} | {target} | {GUARDS[move.guard]} | {changes(move)} |")
    return "\n".join(lines)


def diagram() -> str:
    """The diagram of states, one arrow for all events between two of them."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for event, move in MOVES.items():
        sources = [str(status) for status in Status if status in move.source]
        for source in sources or ["[*]"]:
            arrows.setdefault((source, str(move.target or "[*]")), []).append(str(event))
    lines = ["```mermaid", "stateDiagram-v2"]
    lines += [
        f"    {source} --> {target}: {', '.join(e)}" for (source, target), e in arrows.items()
    ]
    return "\n".join([*lines, "```"])


GENERATED = {"diagram": diagram, "events": events}


def written(page: str) -> str:
    """Return the page with its generated parts made anew."""
    for name, make in GENERATED.items():
        before, mark, rest = page.partition(f"<!-- {name}: {HOW} -->\n")
        _, end, after = rest.partition("<!-- end -->")
        assert mark, f"the page has a part for {name}"
        assert end, f"the part for {name} has an end"
        page = before + mark + make() + "\n" + end + after
    return page


def test_the_page_is_up_to_date() -> None:
    """The diagram and the table of events are what the table of moves makes of them."""
    page = PAGE.read_text()
    assert page == written(page), "run: python -m tests.test_lifecycle_page"


def test_a_stale_page_is_noticed() -> None:
    """An arrow or a row that was changed by hand makes the page differ from what is generated."""
    page = PAGE.read_text()
    for line in (*diagram().splitlines()[2:-1], *events().splitlines()):
        assert page.count(line) == 1
        stale = page.replace(line, f"{line} ")
        assert written(stale) == page != stale


@pytest.mark.parametrize("status", Status)
def test_every_status_has_a_paragraph(status: Status) -> None:
    """Each status is explained under a heading of its own."""
    assert (
        len(re.findall(rf"^### {status}\n\n\w(?:.+\n){{2,}}", PAGE.read_text(), re.MULTILINE)) == 1
    )


def test_every_guard_and_change_has_words() -> None:
    """A new guard or kind of change cannot be left out of the page."""
    assert set(GUARDS) == set(Guard)
    kinds = [*Allowance, *Hold, *RunAt, *Errors]
    assert {kind for kind in kinds if str(kind) != "keep"} == set(CHANGES)
    assert set(MOVES) == set(Event)


def test_every_column_is_explained_in_order() -> None:
    """The table of columns names each column of the table once, in the table's order."""
    part = PAGE.read_text().partition("## The columns")[2]
    rows = re.findall(r"^\| (`.*?`) \|", part, re.MULTILINE)
    named = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert named == [column.name for column in Job.__table__.columns]


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
