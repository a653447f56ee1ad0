"""Histories of commands on real rows, compared after each step with a model of every row.

The model knows the table of moves and which rows a command may find; it knows no SQL. Time does
not pass by itself: jobs are due an hour ago or in an hour, and a rule moves the times.

`SQLALCHEMY_JOBS_EXAMPLES=1000` searches longer, with `-o timeout=0` for pytest.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, ClassVar

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    initialize,
    invariant,
    multiple,
    precondition,
    rule,
    run_state_machine_as_test,
)

from sqlalchemy_jobs._messages import Chore, Claim, Lease, Outcome, Renew, Settle, Sweep
from sqlalchemy_jobs.lifecycle import FINISHED, MOVES, OUTCOMES, UNFINISHED, Event, Guard
from tests.rows import Between, Hand, Queue, RowDict, foretold, nothing, open_queue, tasks_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy import Engine

EXAMPLES = int(os.environ.get("SQLALCHEMY_JOBS_EXAMPLES", "30"))
STEPS = 30

BOUNDS = {"a": 2, "b": 3}
WORKERS = ("w1", "w2")
HOUR = 3600.0
RETENTION = {"succeeded": 1000.0, "failed": 10 * HOUR, "cancelled": None}


class Rows(RuleBasedStateMachine):
    """The jobs table beside a model of it."""

    queue: ClassVar[Queue]
    leases: Bundle[Lease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        tasks = tasks_named("a", max_attempts=BOUNDS["a"])
        tasks.task("b", max_attempts=BOUNDS["b"])(nothing)
        self.hands = {
            name: Hand(
                self.queue,
                worker=name,
                tasks=tasks,
                retain_succeeded=RETENTION["succeeded"],
                retain_failed=RETENTION["failed"],
                retain_cancelled=RETENTION["cancelled"],
            )
            for name in WORKERS
        }
        self.model: dict[int, RowDict] = {}
        self.holder: dict[tuple[int, int], str] = {}  # who claimed which attempt
        self.late = False  # something became due that a claim's memory may hide

    @initialize()
    def empty(self) -> None:
        """Begin with no rows."""
        self.queue.clear()

    # --- the model -------------------------------------------------------------------------

    def due(self) -> list[int]:
        """The ids that a claim may find, in its order."""
        now = self.queue.now()
        ids = [
            job_id
            for job_id, row in self.model.items()
            if row["status"] == "pending" and row["task"] in BOUNDS and row["run_at"] <= now
        ]
        return sorted(ids, key=self.rank)

    def rank(self, job_id: int) -> tuple[Any, ...]:
        """A job's place in the order of claims."""
        row = self.model[job_id]
        return (-row["priority"], row["run_at"], job_id)

    def spent(self, row: RowDict, bound: int = 3) -> bool:
        """Whether no attempt is left."""
        allowed = row["max_attempts"]
        return bool(row["attempts"] >= (bound if allowed is None else allowed))

    def settle_on(self, job_id: int, event: Event, now: Between, **given: Any) -> None:
        """Advance the model, and compare the row."""
        expected = foretold(self.model[job_id], event, now, **given)
        actual = self.queue.find(job_id)
        assert actual == expected, event
        if actual is None:
            del self.model[job_id]
        else:
            self.model[job_id] = actual  # with the very times

    @invariant()
    def agrees(self) -> None:
        """Every row is what the model says, in every column."""
        assert self.queue.rows() == self.model

    @invariant()
    def no_key_twice(self) -> None:
        """Among unfinished jobs no key occurs twice."""
        keys = [
            row["idempotency_key"]
            for row in self.model.values()
            if row["status"] in UNFINISHED and row["idempotency_key"] is not None
        ]
        assert len(keys) == len(set(keys))

    # --- the caller ------------------------------------------------------------------------

    @rule(
        task=st.sampled_from(["a", "a", "b", "unknown"]),
        delay=st.sampled_from([0.0, 0.0, HOUR]),
        priority=st.sampled_from([0, 0, -2, 1]),
        max_attempts=st.sampled_from([None, None, 1, 2]),
        key=st.sampled_from([None, None, "k1", "k2"]),
    )
    def enqueue(
        self, task: str, delay: float, priority: int, max_attempts: int | None, key: str | None
    ) -> None:
        """A free key gives a pending row with what was asked for; a taken one gives nothing."""
        new: RowDict = {"task": task, "payload": '{"n": 1}', "delay": delay, "priority": priority}
        if max_attempts is not None:
            new["max_attempts"] = max_attempts
        if key is not None:
            new["idempotency_key"] = key
        taken = key is not None and any(
            row["idempotency_key"] == key and row["status"] in UNFINISHED
            for row in self.model.values()
        )
        with self.queue.clocked() as now:
            call = self.queue.statements.enqueue(new, None)
            ids = [row[0] for row in self.queue.connection.execute(*call).all()]
        assert len(ids) == (0 if taken else 1)
        for job_id in ids:
            row = self.queue.row(job_id)
            assert row == {
                "id": job_id,
                "task": task,
                "payload": {"n": 1},
                "status": "pending",
                "priority": priority,
                "run_at": now[0].later(delay),
                "attempts": 0,
                "max_attempts": max_attempts,
                "timeout_s": None,
                "idempotency_key": key,
                "locked_by": None,
                "lease_expires_at": None,
                "started_at": None,
                "last_error": None,
                "errors": [],
                "meta": None,
                "created_at": now[0],
                "updated_at": now[0],
            }
            self.model[job_id] = row

    @precondition(lambda self: self.model)
    @rule(data=st.data(), event=st.sampled_from([Event.CANCEL, Event.REQUEUE]))
    def by_a_person(self, data: st.DataObject, event: Event) -> None:
        """Cancelling and requeueing move what the table allows, unless the key is taken."""
        job_id = data.draw(st.sampled_from(sorted(self.model)))
        row = self.model[job_id]
        statements = self.queue.statements
        of: Callable[[list[int]], Any]
        of = statements.cancel if event is Event.CANCEL else statements.requeue
        taken = event is Event.REQUEUE and any(
            row["idempotency_key"] is not None
            and other["idempotency_key"] == row["idempotency_key"]
            and other["status"] in UNFINISHED
            for other in self.model.values()
        )
        with self.queue.clocked() as now:
            done = [row[0] for row in self.queue.connection.execute(*of([job_id])).all()]
        assert done == ([job_id] if row["status"] in MOVES[event].source and not taken else [])
        if done:
            self.settle_on(job_id, event, now[0])
            self.late = True

    # --- workers ---------------------------------------------------------------------------

    @rule(
        target=leases,
        worker=st.sampled_from(WORKERS),
        limit=st.integers(1, 4),
        full=st.sampled_from([True, True, False]),
    )
    def claim(self, worker: str, limit: int, full: bool) -> Any:  # noqa: FBT001 - drawn
        """A full look takes the best due jobs in order; any look takes due ones, within its limit.

        Rows whose attempts are spent fail instead of starting.
        """
        due = self.due()
        with self.queue.clocked() as now:
            answer = self.hands[worker](Claim(limit, full=full))
        after = self.queue.rows()
        moved = sorted((i for i in after if after[i] != self.model[i]), key=self.rank)
        if full:
            assert moved == due[:limit]
        else:
            assert len(moved) <= limit
            assert set(moved) <= set(due)
        started = [lease.job_id for lease in answer.leases]
        bounds = {i: BOUNDS[self.model[i]["task"]] for i in moved}
        assert started == [i for i in moved if not self.spent(self.model[i], bounds[i])]
        if full and len(moved) < limit:
            assert not answer.more
        if len(moved) == limit:
            assert answer.more
        for job_id in moved:
            event = Event.CLAIM if job_id in started else Event.EXHAUST
            given = {"worker": worker, "bound": bounds[job_id]}
            self.settle_on(job_id, event, now[0], **given)
        for lease in answer.leases:
            row = self.model[lease.job_id]
            assert lease.key not in self.holder, "no attempt is given out twice"
            assert (lease.attempt, lease.task) == (row["attempts"], row["task"])
            assert lease.max_attempts == row["max_attempts"]
            self.holder[lease.key] = worker
        return multiple(*answer.leases)

    def held(self, lease: Lease, worker: str) -> bool:
        """Whether *worker* holds the row by this very lease."""
        row = self.model.get(lease.job_id)
        return row is not None and row["locked_by"] == worker and row["attempts"] == lease.attempt

    @rule(
        worker=st.sampled_from(WORKERS),
        ended=st.lists(
            st.tuples(
                leases,
                st.sampled_from(sorted(OUTCOMES)),
                st.sampled_from([0.0, HOUR]),
                st.sampled_from(["ValueError: 1", "KeyError: ü", ""]),
            ),
            min_size=1,
            max_size=5,
            unique_by=lambda drawn: drawn[0].key,
        ),
    )
    def settle(self, worker: str, ended: list[tuple[Lease, Event, float, str]]) -> None:
        """Each outcome of a held attempt is recorded, in one command; every other is refused."""
        outcomes = [Outcome(lease, event, delay, error) for lease, event, delay, error in ended]
        held = [outcome for outcome in outcomes if self.held(outcome.lease, worker)]
        with self.queue.clocked() as now:
            answer = self.hands[worker](Settle(tuple(outcomes)))
        assert not answer.postponed
        assert {o.lease.key for o in answer.refused} == {
            o.lease.key for o in outcomes if o not in held
        }
        for outcome in held:
            given = {"delay": outcome.delay, "error": outcome.error}
            self.settle_on(outcome.lease.job_id, outcome.event, now[0], **given)

    @rule(
        worker=st.sampled_from(WORKERS),
        kept=st.lists(leases, min_size=1, max_size=5, unique_by=lambda lease: lease.key),
    )
    def renew(self, worker: str, kept: list[Lease]) -> None:
        """Held leases are extended and nothing else in the row changes; the lost are named."""
        held = [lease for lease in kept if self.held(lease, worker)]
        with self.queue.clocked() as now:
            answer = self.hands[worker](Renew(tuple(kept)))
        assert answer.lost == {lease.key for lease in kept} - {lease.key for lease in held}
        for lease in held:
            self.settle_on(lease.job_id, Event.RENEW, now[0])

    @rule(worker=st.sampled_from(WORKERS))
    def recover(self, worker: str) -> None:
        """Every expired lease is given back, or buried when no attempt is left."""
        present = self.queue.now()
        expired = [
            job_id
            for job_id, row in self.model.items()
            if row["status"] == "running" and row["lease_expires_at"] < present
        ]
        with self.queue.clocked() as now:
            answer = self.hands[worker](Sweep(Chore.RECOVER))
        events = {i: Event.BURY if self.spent(self.model[i]) else Event.RECOVER for i in expired}
        assert answer.woke == list(events.values()).count(Event.RECOVER)
        assert not answer.more
        for job_id, event in events.items():
            assert MOVES[event].guard in (Guard.EXPIRED, Guard.EXPIRED_SPENT)
            self.settle_on(job_id, event, now[0])

    @rule(worker=st.sampled_from(WORKERS))
    def prune(self, worker: str) -> None:
        """What finished longer ago than its status is kept for is deleted, and nothing else."""
        present = self.queue.now()
        aged = []
        for job_id, row in self.model.items():
            kept = RETENTION.get(row["status"])
            if kept is not None and (present - row["updated_at"]).total_seconds() > kept:
                aged.append(job_id)
        with self.queue.clocked() as now:
            self.hands[worker](Sweep(Chore.PRUNE))
        for job_id in aged:
            self.settle_on(job_id, Event.PRUNE, now[0])

    # --- time and other people's hands -----------------------------------------------------

    @precondition(lambda self: self.model)
    @rule(data=st.data(), column=st.sampled_from(["run_at", "lease_expires_at", "updated_at"]))
    def time_passes(self, data: st.DataObject, column: str) -> None:
        """A job becomes due, a lease runs out, or a finished job grows old."""
        wanted = {"run_at": {"pending"}, "lease_expires_at": {"running"}}.get(column, FINISHED)
        ids = [i for i, row in self.model.items() if row["status"] in wanted]
        if ids:
            job_id = data.draw(st.sampled_from(sorted(ids)))
            self.queue.edit(job_id, **{column: -2 * HOUR})
            self.model[job_id] = self.queue.row(job_id)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), bound=st.sampled_from([0, 1, 2, 5]))
    def bound_is_edited(self, data: st.DataObject, bound: int) -> None:
        """Somebody changes the bound of a job that is not running."""
        ids = [i for i, row in self.model.items() if row["status"] != "running"]
        if ids:
            job_id = data.draw(st.sampled_from(sorted(ids)))
            self.queue.edit(job_id, max_attempts=bound)
            self.model[job_id] = self.queue.row(job_id)


@pytest.mark.every_postgres
def test_rows_live_as_the_model_says(sync_engine: Engine) -> None:
    """Whatever commands come in whatever order, each row is what the table of moves foretells."""
    with open_queue(sync_engine) as opened:

        class Here(Rows):
            queue = opened

        run_state_machine_as_test(
            Here,
            settings=settings(
                max_examples=EXAMPLES,
                stateful_step_count=STEPS,
                deadline=None,
                suppress_health_check=[HealthCheck.too_slow],
            ),
        )
