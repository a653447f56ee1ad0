"""The laws of the queue: what must hold of the rows, whatever workers, networks and clocks do.

The ledger sees each change of a row at the moment of the database's commit, each start of a
handler, and each answer that a worker takes. It keeps its own books from that, which share no code
with the table of moves, and compares them. The promises of the queue, by number:

1. a committed job is attempted, one that was rolled back never existed;
2. a row is held by one live lease at most, and an outcome ends the very claim that made it;
3. every claim ends exactly once, by an outcome or by a recovery that leaves an error; no job is
   lost, and a job that ended stays as it ended;
4. attempts are the claims that were made, each handler start is one of them, and they keep within
   ``max_attempts`` and what was given back;
5. only a lease that ran out is recovered, and a worker that could renew it has;
6. an unknown task spends no attempt;
7. no clock of a worker's decides anything: this is what clocks that leap and stop are for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sqlalchemy_jobs._messages import (
    Claim,
    Claimed,
    ListenerChanged,
    Reason,
    Renewed,
    StopRequested,
)
from sqlalchemy_jobs.lifecycle import FINISHED, Status
from sqlalchemy_jobs.lifecycle import Event as Life
from tests.simulation.database import MIDNIGHT, serial_of
from tests.simulation.process import SLOW, Script

if TYPE_CHECKING:
    from collections.abc import Iterable

    from sqlalchemy_jobs._messages import Event, Key, Lease
    from tests.simulation.database import Moved, Row
    from tests.simulation.fleet import Fleet
    from tests.simulation.process import Handler, Process, Statement

EPSILON = 1e-4
LEFT_AT_MOST = 2.6
"""Seconds that a due job may be left by an idle worker that is told of it: the longest time in
which it waits for enqueuers that are silent (see ``_bell``), and a few messages."""

PEACE_AFTER = 70.0
"""Seconds after the last fault until the last back-off and the last long pause are over."""


@dataclass(slots=True)
class Job:
    """What is known of a job beside its row."""

    task: str
    scripts: list[Script]  # of its first handlers; those after them succeed
    allowed: int | None  # attempts that it may have; None: the first claim says
    claims: int = 0
    starts: int = 0
    errors: int = 0
    final: Status | None = None
    pruned: bool = False


@dataclass(slots=True)
class Held:
    """A claim of a job: whether anybody knew of it, and how it ended."""

    job_id: int
    attempt: int
    process: Process
    made_at: float
    answered: bool = False
    given_up: bool = False  # its worker could not renew it for too long, or not see that it had
    locked: bool = False  # somebody had locked its row when it was to be renewed
    started: bool = False
    ended: Life | None = None


class Ledger:
    """The books of a fleet."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.jobs: dict[int, Job] = {}
        self.claims: dict[int, Held] = {}  # by serial
        self.made: dict[Key, Held] = {}  # the latest of each attempt
        self.rolled_back: set[int] = set()
        self._caller: Process | None = None

    # --- what happens ---------------------------------------------------------------------------

    def enqueued(self, job_id: int, task: str, allowed: int | None, scripts: list[Script]) -> None:
        """Open the account of a job, committed or not yet."""
        self.jobs[job_id] = Job(task, scripts, allowed)

    def never_existed(self, job_id: int) -> None:
        """Close the account of a job that never existed."""
        del self.jobs[job_id]
        self.rolled_back.add(job_id)

    def issued(self, process: Process, statement: Statement) -> None:
        """Note whose statement is performed now."""
        self._caller = process
        if isinstance(statement.command, Claim) and process.stopping_since is not None:
            assert statement.issued <= process.stopping_since, "a stopping worker claims no more"

    def heard(self, process: Process, events: Iterable[Event]) -> None:
        """Note what a worker takes from its inbox."""
        for event in events:
            if isinstance(event, Claimed):
                for lease in event.leases:
                    self.claims[serial_of(lease)].answered = True
            elif isinstance(event, Renewed):
                for lease in event.command.leases:
                    self.claims[serial_of(lease)].locked |= lease.key in event.passed_by
            elif isinstance(event, StopRequested):
                process.stopping_since = process.stopping_since or self.fleet.clock.now
            elif isinstance(event, ListenerChanged):
                self.fleet.expect_no_leftovers()

    def started(self, process: Process, lease: Lease) -> Script:
        """Judge the start of a handler; return what it is to do."""
        held = self.claims[serial_of(lease)]
        job = self.jobs[lease.job_id]
        assert (held.job_id, held.attempt) == lease.key
        assert held.process is process, "a worker starts what it claimed"
        assert not held.started, "an attempt starts once"
        assert process.stopping_since is None, "nothing starts while stopping"
        held.started = True
        job.starts += 1
        script = job.scripts[job.starts - 1] if job.starts <= len(job.scripts) else Script(0.1)
        return self.fleet.bounded(script)

    def gave_up(self, lease: Lease, reason: Reason) -> None:
        """Note that a worker believes a lease to be over."""
        if reason is Reason.LEASE_LOST:
            self.claims[serial_of(lease)].given_up = True

    def moved(self, row: Row, moved: Moved) -> None:
        """Judge a change of a row."""
        job = self.jobs[row.id]
        life = moved.life
        assert row.id not in self.rolled_back, "what was rolled back never existed"
        if life is Life.RENEW:
            return
        if life is Life.CLAIM:
            self._claimed(row, job, moved)
        else:
            assert row.attempts == moved.attempts, "nothing but a claim is an attempt"
        if moved.claim is not None:
            self._ended(job, moved)
        elif life is Life.REQUEUE:
            job.final = None
            if job.allowed is not None:
                job.allowed = max(job.allowed, row.attempts + 1)
            self.fleet.reached["requeued"] += 1
        if life is Life.PRUNE:
            job.pruned = True
            assert job.final is moved.status, "only what ended is pruned"
            self.fleet.reached["pruned"] += 1
            return
        self._is_sound(row, job, life)
        if row.status is Status.PENDING:
            self.fleet.expect_to_be_taken(row)

    def _claimed(self, row: Row, job: Job, moved: Moved) -> None:
        process = self._caller
        assert process is not None
        assert moved.worker is None, "what somebody holds is not claimed"
        assert row.locked_by == process.name
        assert row.claim is not None
        assert job.task in process.tasks, "a worker takes only what it can run"
        job.claims += 1
        if job.allowed is None:
            job.allowed = moved.bound
        held = Held(row.id, row.attempts, process, self.fleet.clock.now)
        self.claims[row.claim] = self.made[row.id, row.attempts] = held
        assert row.attempts == job.claims, "each claim is an attempt, and nothing takes one back"
        assert row.attempts <= job.allowed, "no attempt beyond the bound"

    def _ended(self, job: Job, moved: Moved) -> None:
        """A claim ends: by its outcome, or because its lease ran out, or called off."""
        assert moved.claim is not None
        life, held = moved.life, self.claims[moved.claim]
        assert held.ended is None, "a claim ends once"
        held.ended = life
        if moved.outcome is not None:
            made_by = serial_of(moved.outcome.lease)
            assert made_by == moved.claim, "an outcome ends the claim that made it"
            if life is not Life.RELEASE:
                assert held.started, "no outcome without a handler"
            if life in (Life.SNOOZE, Life.RELEASE) and job.allowed is not None:
                job.allowed += 1
        elif life in (Life.RECOVER, Life.BURY):
            assert moved.lease_expires_at is not None
            assert moved.lease_expires_at <= moved.at, "only a lease that ran out is recovered"
            self._could_not_renew(held, moved.lease_expires_at - MIDNIGHT)
        else:
            assert life is Life.CANCEL, f"{life} is no end of a claim"
        self.fleet.reached[f"claim ended by {life}"] += 1

    def _misled(self, held: Held) -> bool:
        """Whether its worker's clock stood still since the claim was sent."""
        longest = self.fleet.timing.statement_timeout
        return bool(held.made_at <= held.process.misled_until + longest)

    def _could_not_renew(self, held: Held, expired: float) -> None:
        """A worker that lives, knows of its lease, and had time for it, has renewed it."""
        process, fleet = held.process, self.fleet
        if not process.is_awake or not held.answered or self._misled(held):
            return
        if held.given_up or held.locked:
            return
        if any(fleet.clock.now - s.issued > SLOW for s in process.in_flight):
            return
        vt = fleet.timing.visibility_timeout
        due = max(process.trouble_until + vt / 6, expired - vt * 2 / 3)
        assert due + 2 * SLOW > expired, "a lease ran out that its worker had time to renew"

    def _is_sound(self, row: Row, job: Job, life: Life) -> None:
        running = row.status is Status.RUNNING
        assert (row.locked_by is not None) is running, "a worker's name goes with running"
        assert (row.lease_expires_at is not None) is running, "a lease goes with running"
        assert job.final is None, "the end is the end"
        if row.status in FINISHED:
            job.final = row.status
        if life in (Life.RETRY, Life.FAIL, Life.RECOVER, Life.BURY, Life.EXHAUST):
            job.errors += 1
            assert len(row.errors) == min(job.errors, 20), "what went wrong is told"
        if row.task not in self.fleet.known:
            assert row.attempts == 0, "an unknown task spends no attempt"

    # --- what a worker believes -----------------------------------------------------------------

    def turned(self, process: Process) -> None:
        """Judge a worker after its turn."""
        machine, fleet = process.machine, self.fleet
        running = {lease.key for lease in machine.running}
        slots = [handler.lease.key for handler in process.handlers if handler.has_slot]
        assert len(slots) == len(running), "what has a slot is what the machine thinks"
        assert running.issuperset(slots)
        assert len(slots) <= fleet.timing.concurrency
        if machine.free == 0:
            process.free_since = float("inf")
        elif process.free_since == float("inf"):
            process.free_since = fleet.clock.now
            fleet.expect_no_leftovers()
        now = fleet.database.now
        for job_id, attempt, until in fleet.local_leases(process):
            held = self.made[job_id, attempt]
            if self._misled(held) or held.ended is Life.CANCEL:
                continue
            row = fleet.database.rows.get(job_id)
            assert row is not None, "it believes in a lease of nothing"
            assert (row.locked_by, row.attempts) == (process.name, attempt), "somebody else's lease"
            assert row.lease_expires_at is not None
            left = row.lease_expires_at - now
            assert until - process.now <= left + EPSILON, "its lease outlives the row's"

    # --- when there is peace --------------------------------------------------------------------

    def nothing_is_left(self) -> None:
        """No due job waits while a worker that knows of it has a free slot."""
        fleet = self.fleet
        if fleet.calm_since is None:
            return
        now = fleet.clock.now
        for process in fleet.processes:
            since = max(
                process.free_since, process.listener.up_since, fleet.calm_since + PEACE_AFTER
            )
            if now - since < LEFT_AT_MOST or process.is_stopping or not process.is_awake:
                continue
            for row in fleet.database.rows.values():
                if row.status is not Status.PENDING or row.task not in process.tasks:
                    continue
                since = max(fleet.visible_since[row.id], row.run_at - MIDNIGHT)
                assert now - since < LEFT_AT_MOST, "a due job waits beside an idle worker"
            fleet.reached["an idle worker had nothing left"] += 1

    def aborted(self, handler: Handler, reason: Reason) -> None:
        """In peace a slow handler on a live worker keeps its job, however long it takes."""
        calm_since = self.fleet.calm_since
        if calm_since is not None and handler.started > calm_since + PEACE_AFTER:
            assert reason is not Reason.LEASE_LOST, "lost without any fault"

    def close(self) -> None:
        """Add everything up, at the end."""
        rows = self.fleet.database.rows
        for job_id, job in self.jobs.items():
            row = rows.get(job_id)
            assert row is not None or job.pruned, "no job is lost"
            held = [claim for claim in self.claims.values() if claim.job_id == job_id]
            assert len(held) == job.claims
            started = [claim for claim in held if claim.started]
            assert len(started) == job.starts
            for claim in held:
                assert claim.ended is not None, "every claim ends"
                if not claim.started and claim.answered:
                    assert claim.ended in (Life.RELEASE, Life.RECOVER, Life.BURY, Life.CANCEL), (
                        "who starts nothing gives it back"
                    )
                elif not claim.started:
                    assert claim.ended in (Life.RECOVER, Life.BURY, Life.CANCEL), (
                        "what nobody knows of comes back by itself"
                    )
            assert row is None or row.attempts == len(held), "attempts are claims"
            self.fleet.reached["attempts added up"] += 1
