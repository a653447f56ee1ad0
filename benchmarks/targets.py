"""What is meant to hold, as ratios of figures that are measured side by side."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .claims import BACKLOGS
from .report import number, table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .report import Results

A, P, S = "async-asyncpg", "async-psycopg", "sync-psycopg"
PEERS: Final = ("procrastinate", "pgqueuer")


@dataclass(frozen=True, slots=True)
class Target:
    """(figure, peer) against (figure, peer), or against nothing: a number by itself."""

    what: str
    over: tuple[str, str]
    under: tuple[str, str] | None
    bound: float
    at_most: bool = False
    aim: bool = True
    """False: told for information."""

    def judge(self, results: Results) -> tuple[float | None, bool]:
        """Return the number and whether it holds."""
        if self.under is None:
            found = results.median(*self.over)
        else:
            found = results.ratio(self.over, self.under)
        if found is None:
            return None, False
        return found, found <= self.bound if self.at_most else found >= self.bound


def _targets() -> list[Target]:
    targets = [
        Target("drain c=100 / pgqueuer", ("drain100", A), ("drain100", "pgqueuer"), 1.2),
        Target("drain c=100 / procrastinate", ("drain100", A), ("drain100", "procrastinate"), 10),
        Target("drain c=100 / raw", ("drain100", A), ("drain100", "raw"), 0.7),
        Target("drain c=10 / pgqueuer", ("drain10", A), ("drain10", "pgqueuer"), 1.5),
        Target("drain c=10 / raw", ("drain10", A), ("drain10", "raw"), 0.7),
    ]
    targets += [
        Target(f"{t.what}, async psycopg", (t.over[0], P), t.under, t.bound, aim=False)
        for t in list(targets)
    ]
    for ours in (A, P, S):
        two = ("drain100x2", ours)
        targets += [
            Target(f"two processes / one, {ours}", two, ("drain100", ours), 0.9),
            Target(f"share of the lesser process, {ours}", ("drain100x2.least", ours), None, 0.25),
        ]
    for drain in ("drain10", "drain100"):
        what = f"sync worker {drain} / procrastinate"
        targets.append(Target(what, (drain, S), (drain, "procrastinate"), 5))
    for ours in (A, P, S):
        one = ("enqueue1", ours)
        bare = Target(f"enqueue / bare Core INSERT, {ours}", one, ("enqueue1.core", ours), 0.9)
        peer = f"enqueue / procrastinate, {ours}"
        targets += [bare, Target(peer, one, ("enqueue1", "procrastinate"), 1.2)]
        many = ("bulk", ours)
        targets += [
            Target(f"enqueue_many / {other}, {ours}", many, ("bulk", other), 1.2) for other in PEERS
        ]
    for ours in (A, P, S):
        idle = "pickup-idle.p50"
        targets += [
            Target(f"pick-up p50 / {other}, {ours}", (idle, ours), (idle, other), 1, at_most=True)
            for other in PEERS
        ]
        late = ("pickup-idle.p99", ours)
        targets.append(Target(f"pick-up p99 in ms, {ours}", late, None, 10, at_most=True))
    for backlog in BACKLOGS[1:]:
        of = f"claims.{backlog.name}"
        for kind in ("median", "full"):
            empty = (f"claims.empty.{kind}", S)
            what = f"claim ({kind}), {backlog.name} / empty"
            targets.append(Target(what, (f"{of}.{kind}", S), empty, 2, at_most=True))
        targets.append(Target(f"claim, {backlog.name}: flat plan", (f"{of}.flat", S), None, 1))
    targets += [
        Target(f"snapshot: last tenth / first, {ours}", ("snapshot.tenths", ours), None, 0.7)
        for ours in (A, P, S)
    ]
    for scenario in ("notify", "notify-slow", "notify-working"):
        every = (f"{scenario}.core+notify", A)
        what = f"{scenario}: default / pg_notify in every statement"
        targets.append(Target(what, (f"{scenario}.session", A), every, 2))
        none = (f"{scenario}.silent", A)
        what = f"{scenario}: default / none"
        targets.append(Target(what, (f"{scenario}.session", A), none, 0.8, aim=False))
    return targets


TARGETS: Final[Sequence[Target]] = _targets()


def targets_table(results: Results) -> tuple[str, list[dict[str, object]]]:
    """Return the targets whose figures were measured, as a table and for a file."""
    rows = [["target", "found", "aim", ""]]
    kept: list[dict[str, object]] = []
    for target in TARGETS:
        found, holds = target.judge(results)
        if found is None:
            continue
        verdict = ("pass" if holds else "MISS") if target.aim else ""
        sign = "<=" if target.at_most else ">="
        rows.append([target.what, number(found), f"{sign} {target.bound:g}", verdict])
        kept.append(
            {"target": target.what, "found": found, "bound": target.bound}
            | {"at_most": target.at_most, "aim": target.aim, "holds": holds}
        )
    return table(rows) if kept else "", kept
