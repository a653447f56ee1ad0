"""A fleet: several workers on one simulated database, and all that can happen to them.

Each thing that can happen is an :func:`action` with the values that its arguments may take, so that
anybody can drive a fleet: hypothesis, which shrinks what it finds, or a random walk, which is
many times faster. After each action :meth:`Fleet.laws_hold` judges the fleet as a whole; each
machine is judged all the time by :class:`tests.laws.Watched`.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from sqlalchemy_jobs import _machine
from sqlalchemy_jobs._messages import (
    Claim,
    Finished,
    Lease,
    ListenerChanged,
    Notified,
    Outcome,
    Reason,
    Renew,
    Renewed,
    Settle,
    StopRequested,
    Sweep,
)
from sqlalchemy_jobs.lifecycle import FINISHED, Status
from sqlalchemy_jobs.lifecycle import Event as Life
from tests import simulated
from tests.laws import Watched

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

    from tests.simulated import Database, Handler, Row, Statement, Worker

SETTLED_IN = 15
"""Steps before somebody crashes or is stopped: else most histories are about a dead worker."""

TASKS = {"mail": 3, "report": 1}
"""The tasks of the fleet, each with its own max_attempts."""

RARE, UNKNOWN = "rare", "unknown"
"""A task that only the first worker knows, and one that nobody knows."""

TICK = 1e-7
"""Seconds: the least step of the clock, so that a rounding error cannot hold it."""

PICK = range(12)
"""Which of those there are: taken modulo their number, so that hypothesis can shrink it."""

RANK = {Settle: 0, Renew: 1, Claim: 2, Sweep: 3}

PAUSES = (0.001, 0.1, 0.6, 1.0, 2.0, 3.4, 5.0, 10.0, 31.0, 61.0, 400.0)


def timed_out(lease: Lease) -> Outcome:
    """What a worker makes of an overdue attempt."""
    return Outcome.raised(lease, "timed out", delay=1.0)


Do = TypeVar("Do", bound="Callable[..., None]")


@dataclass(frozen=True, slots=True)
class Action:
    """Something that can happen, when it can, and with which arguments."""

    do: Callable[..., None]
    when: Callable[[Any], bool]
    choices: dict[str, Sequence[Any]]
    first: bool
    weight: float


ACTIONS: dict[str, Action] = {}
"""Everything that can happen to a fleet, by name."""


def action(
    *,
    when: Callable[[Any], bool] = lambda _: True,
    first: bool = False,
    weight: float = 1.0,
    **choices: Sequence[Any],
) -> Callable[[Do], Do]:
    """Declare an action; *first*: it happens once, before all others.

    *weight* tells a random walk how often it happens, compared with others.
    """

    def declare(do: Do) -> Do:
        ACTIONS[do.__name__] = Action(do, when, choices, first, weight)
        return do

    return declare


class Fleet:
    """Workers, a database and everything that can go wrong between them."""

    machine_module: ModuleType = _machine
    simulated_module: ModuleType = simulated
    reached: ClassVar[Counter[str]] = Counter()  # shows that the laws were put to the test

    # --- the beginning --------------------------------------------------------------------------

    @action(
        first=True,
        count=(2, 3),
        concurrency=(1, 2, 3),
        visibility_timeout=(3.0, 12.0, 60.0, 300.0),
        statement_timeout=(1.0, 5.0, 30.0),
        shutdown_timeout=(0.0, 3.0, 15.0, 200.0),
        recovery_interval=(5.0, 60.0),
        retention=(1.0, 100.0, 1e6),
        seed=range(100),
        listening=(False, True),
    )
    def begin(
        self, *, count: int, retention: float, seed: int, listening: bool, **timing: Any
    ) -> None:
        """Start the first workers on an empty table."""
        self.clock = self.simulated_module.Clock(1000.0)
        self.database: Database = self.simulated_module.Database(self.clock)
        self.database.notify = self._notify
        self.database.retention = dict.fromkeys(FINISHED, retention)
        self.timing = self.machine_module.Timing(**timing)
        self.random = random.Random(seed)  # noqa: S311 - dice, not keys
        self.workers: list[Worker] = []
        self.stalled: set[str] = set()
        self.runs: dict[int, float | None] = {}  # job -> seconds its handlers run; None: hangs
        self.allowed: dict[int, int] = {}  # job -> attempts that it may have
        self.attempts: dict[int, int] = {}  # job -> attempts seen so far
        self.final: dict[int, Status] = {}
        self.operated: set[tuple[int, int]] = set()  # attempts that an operator called off
        self.deaf = False  # the database's answers are all lost
        self.steps = 0
        self.serial = 0
        self.quiet_since: float | None = None
        for _ in range(count):
            self._start(listening=listening)

    def _start(self, *, listening: bool) -> Worker:
        self.serial += 1
        tasks = dict(TASKS) if self.workers else {**TASKS, RARE: 2}
        caller = self.simulated_module.Caller(
            worker=f"worker-{self.serial}",
            visibility_timeout=self.timing.visibility_timeout,
            tasks=tasks,
        )
        offset = self.random.choice((-900.0, 0.0, 77_777.0))
        machine = self.machine_module.Machine(
            self.timing,
            timed_out=timed_out,
            jitter=self.random.random,
            now=self.clock.now + offset,
        )
        worker: Worker = self.simulated_module.Worker(
            Watched(machine, self.clock.now + offset),
            self.database,
            caller,
            offset=offset,
            ends=self._handler_runs,
        )
        worker.inbox.append(ListenerChanged(listening))
        worker.listening = listening
        self.workers.append(worker)
        return worker

    def _notify(self) -> None:
        for worker in self.workers:
            if worker.listening and worker.stopped is None:
                worker.notifications += 1

    def _handler_runs(self, lease: Lease) -> float | None:
        runs = self.runs[lease.job_id]
        return self._hangs() if runs is None else runs

    def _hangs(self) -> float | None:
        """For ever, until faults cease; then longer than two leases, which must be no matter."""
        return None if self.quiet_since is None else 2.5 * self.timing.visibility_timeout

    # --- who and what there is ------------------------------------------------------------------

    def _live(self) -> list[Worker]:
        return [worker for worker in self.workers if worker.stopped is None]

    def _awake(self) -> list[Worker]:
        return [worker for worker in self._live() if worker.name not in self.stalled]

    def _statements(self, *stages: str) -> list[tuple[Worker, Statement]]:
        """Statements on their way, the interesting ones first: small picks are likelier."""
        found = [
            (worker, statement)
            for worker in self._live()
            for statement in worker.statements
            if statement.stage.value in stages
        ]
        return sorted(found, key=lambda pair: RANK[type(pair[1].command)])

    def _handlers(self, *, wanted: bool) -> list[tuple[Worker, Handler]]:
        return [
            (worker, handler)
            for worker in self._live()
            for handler in worker.handlers
            if handler.has_slot is wanted
        ]

    def _any_live(self) -> bool:
        return bool(self._live())

    def _any_awake(self) -> bool:
        return bool(self._awake())

    def _settled_in(self) -> bool:
        return self.steps >= SETTLED_IN and bool(self._live())

    # --- jobs -----------------------------------------------------------------------------------

    @action(
        weight=2.0,
        task=("mail", "mail", "report", RARE, UNKNOWN),
        count=(1, 2, 3),
        delay=(-5.0, 0.0, 0.0, 0.0, 0.3, 7.0, 40.0),
        priority=(0, 1, -1),
        max_attempts=(None, None, 1, 2, 0),
        timeout=(None, None, 2.0, 30.0, 700.0),
        runs=(0.0, 0.2, 4.0, None, None),
        key=(None, None, "one"),
    )
    def enqueue(self, *, task: str, count: int, runs: float | None, **details: Any) -> None:
        """Somebody enqueues jobs; a negative delay is a transaction that committed late."""
        for job_id in [self.database.enqueue(task, **details) for _ in range(count)]:
            if job_id is None:
                continue
            self.runs[job_id] = runs
            bound = details["max_attempts"]
            self.allowed[job_id] = {**TASKS, RARE: 2}.get(task, 0) if bound is None else bound
            self.attempts[job_id] = 0

    @action(
        weight=0.7,
        when=lambda self: bool(self.database.rows),
        pick=PICK,
        life=(Life.CANCEL, Life.REQUEUE, Life.REQUEUE),
    )
    def operate(self, pick: int, life: Life) -> None:
        """A person cancels or requeues a job."""
        fits = Status.RUNNING if life is Life.CANCEL else Status.CANCELLED
        rows = sorted(self.database.rows.values(), key=lambda row: row.status is not fits)
        row = rows[pick % len(rows)]
        before = (row.id, row.attempts), row.status
        if self.database.operate(row.id, life):
            self.final.pop(row.id, None)
            if before[1] is Status.RUNNING:
                self.operated.add(before[0])
                self.reached["running job cancelled"] += 1
            if life is Life.REQUEUE:
                self.allowed[row.id] = max(self.allowed[row.id], row.attempts + 1)
                self.reached["requeued"] += 1

    @action(
        weight=0.7,
        when=lambda self: bool(self.database.rows),
        pick=PICK,
        how=("lock", "spoil", "clear", "clear"),
    )
    def obstruct(self, pick: int, how: str) -> None:
        """A stranger's transaction locks a row, a row takes no outcome any more, or all is fine."""
        job_id = list(self.database.rows)[pick % len(self.database.rows)]
        match how:
            case "lock":
                self.database.locked.add(job_id)
            case "spoil":
                self.database.unwritable.add(job_id)
            case _:
                self.database.locked.clear()
                self.database.unwritable.clear()

    # --- statements: the database performs them, then their answers arrive ----------------------

    @action(when=lambda self: bool(self._statements("sent")), pick=PICK)
    def database_performs(self, pick: int) -> None:
        """The database carries out one statement; nobody knows of it yet."""
        sent = self._statements("sent")
        worker, statement = sent[pick % len(sent)]
        worker.perform(statement)
        self._account()

    @action(when=lambda self: bool(self._statements("performed")), pick=PICK)
    def answer_arrives(self, pick: int) -> None:
        """One answer reaches its worker's inbox."""
        performed = self._statements("performed")
        worker, statement = performed[pick % len(performed)]
        worker.answer(statement)

    @action(
        when=lambda self: bool(self._statements("sent", "performed")),
        pick=PICK,
        weight=2.0,
        about=("Settle", "Renew", "Claim", "any"),
        committed=(False, True),
    )
    def connection_breaks(self, pick: int, about: str, *, committed: bool) -> None:
        """One statement fails before it has any effect, or its answer is lost after the commit."""
        statements = self._statements("performed", "sent")
        wanted = [pair for pair in statements if type(pair[1].command).__name__ == about]
        worker, statement = (wanted or statements)[pick % len(wanted or statements)]
        if committed and statement.answer is None:
            worker.perform(statement)
            self._account()
        worker.lose(statement)
        if statement.answer is not None:
            self.reached[f"answer lost: {type(statement.command).__name__}"] += 1

    @action(
        weight=2.0,
        when=_any_awake,
        pick=PICK,
        rounds=(1, 2, 3),
        about=("all", "all", "Claim", "Settle", "Renew"),
    )
    def worker_talks(self, pick: int, rounds: int, about: str) -> None:
        """All that a worker has sent, or has of one kind, is performed, answered and read."""
        worker = self._awake()[pick % len(self._awake())]
        for _ in range(rounds):
            for statement in list(worker.statements):
                if about not in {"all", type(statement.command).__name__}:
                    continue
                if statement.answer is None:
                    worker.perform(statement)
                worker.answer(statement)
            self._account()
            worker.turn()

    @action(
        when=lambda self: any(s.interrupted for w in self._live() for s in w.statements),
        performed=(False, True),
    )
    def interrupted_statements_break(self, *, performed: bool) -> None:
        """The interrupts take effect, some of them just after the commit."""
        for worker in self._live():
            for statement in [s for s in worker.statements if s.interrupted]:
                if performed and statement.answer is None:
                    worker.perform(statement)
                worker.lose(statement)
        self._account()

    @action(
        weight=0.7,
        when=lambda self: any(worker.in_slots for worker in self._awake()),
        pick=PICK,
        late=(False, True),
    )
    def somebody_else_renews(self, pick: int, *, late: bool) -> None:
        """A second thread of a worker renews some leases and tells the machine later."""
        busy = [worker for worker in self._awake() if worker.in_slots]
        worker = busy[pick % len(busy)]
        leases = tuple(worker.in_slots)[pick % len(worker.in_slots) :]
        command, issued = Renew(leases), worker.now
        renewed = self.database.perform(command, worker.caller)
        assert isinstance(renewed, Renewed)
        told = Renewed(command, renewed.lost, issued)
        if late:
            self._pass(0.7)
        worker.inbox.append(told)

    # --- notifications --------------------------------------------------------------------------

    @action(
        when=lambda self: any(worker.notifications for worker in self._live()),
        pick=PICK,
        copies=(0, 1, 1, 2),
    )
    def notification_arrives(self, pick: int, copies: int) -> None:
        """A notification arrives, is lost, or comes twice."""
        waiting = [worker for worker in self._live() if worker.notifications]
        worker = waiting[pick % len(waiting)]
        worker.notifications -= 1
        worker.inbox.extend([Notified()] * copies)

    @action(weight=0.5, when=_any_live, pick=PICK, up=(False, True))
    def listener_changes(self, pick: int, *, up: bool) -> None:
        """The connection that listens breaks, which loses what was sent, or is back."""
        worker = self._live()[pick % len(self._live())]
        worker.listening, worker.notifications = up, 0
        worker.inbox.append(ListenerChanged(up))

    # --- handlers -------------------------------------------------------------------------------

    @action(
        weight=4.0,
        at_once=(False, True),
        when=lambda self: bool(self._handlers(wanted=True)),
        pick=PICK,
        how=("succeed", "succeed", "raise", "raise", "fail", "snooze", "release"),
        delay=(0.0, 0.0, 0.25, 1.0, 20.0),
    )
    def handler_ends(self, pick: int, how: str, delay: float, *, at_once: bool) -> None:
        """A handler ends in one of its ways."""
        running = self._handlers(wanted=True)
        worker, handler = running[pick % len(running)]
        lease = handler.lease
        worker.end(
            handler,
            {
                "succeed": Outcome.succeeded(lease),
                "raise": Outcome.raised(lease, "boom", delay),
                "fail": Outcome.failed(lease, "never again"),
                "snooze": Outcome.snoozed(lease, delay),
                "release": Outcome.released(lease),
            }[how],
        )
        if at_once and worker in self._awake():
            worker.turn()

    @action(when=lambda self: bool(self._handlers(wanted=False)), pick=PICK)
    def unwanted_handler_ends(self, pick: int) -> None:
        """A handler that was aborted, and went on all the same, ends with a late success."""
        unwanted = self._handlers(wanted=False)
        worker, handler = unwanted[pick % len(unwanted)]
        worker.end(handler, Outcome.succeeded(handler.lease))

    # --- time, stalls, crashes and stops --------------------------------------------------------

    @action(weight=1.5, when=_any_awake, pick=PICK, count=(0, 1, 1, 2, 9, 9))
    def worker_turns(self, pick: int, count: int) -> None:
        """A worker hands some of its inbox to its machine, or a Tick."""
        worker = self._awake()[pick % len(self._awake())]
        worker.turn(min(count, len(worker.inbox)))

    @action(pause=PAUSES)
    def time_passes(self, pause: float) -> None:
        """Time passes and nothing is answered, but who is awake keeps its appointments."""
        self._pass(min(pause, 20 * self.timing.visibility_timeout))

    def _pass(self, pause: float) -> None:
        until = self.clock.now + pause
        while True:
            for worker in self._awake():
                while worker.is_due:
                    worker.turn()
            waits = [worker.wait_until - worker.now for worker in self._awake()]
            step = min([until - self.clock.now, *waits])
            if step <= 0:
                return
            self.clock.now += max(step, TICK)

    @action(weight=0.7, when=_any_live, pick=PICK, stall=(False, True))
    def worker_stalls(self, pick: int, *, stall: bool) -> None:
        """A worker's process stands still, as a suspended machine does, or goes on."""
        worker = self._live()[pick % len(self._live())]
        (self.stalled.add if stall else self.stalled.discard)(worker.name)

    @action(weight=0.5, when=_any_awake, pause=PAUSES)
    def all_is_well(self, pause: float) -> None:
        """For a while the network works, and handlers end by themselves."""
        # Each renewal takes its time to simulate: a dozen in a row show as much as hundreds.
        self._run(min(pause, 5 * self.timing.visibility_timeout))

    @action(weight=0.7, when=_settled_in, pick=PICK, how=("stop", "stop at once", "crash"))
    def worker_leaves(self, pick: int, how: str) -> None:
        """A process crashes, or it is asked to stop, perhaps not for the first time."""
        worker = self._live()[pick % len(self._live())]
        if how != "crash":
            worker.inbox.append(StopRequested())
            worker.stopping = True
            if how == "stop at once":
                worker.turn()
            return
        # Its handlers are gone; its statements may still reach the database.
        self.reached["crash with handlers" if worker.handlers else "crash"] += 1
        self.workers.remove(worker)
        for statement in worker.statements:
            if statement.answer is None and self.random.random() < 0.5:
                worker.perform(statement)
        self._account()

    @action(
        when=lambda self: sum(not worker.stopping for worker in self._live()) < 2,
        listening=(False, True),
    )
    def worker_starts(self, *, listening: bool) -> None:
        """A new process takes the place of one that is gone: the same host, but a new name."""
        self._start(listening=listening)

    # --- when all is well -----------------------------------------------------------------------

    def _run(self, pause: float) -> None:
        """Let everything work for *pause* seconds: answers at once, no message lost."""
        until = self.clock.now + pause
        while True:
            self._come_to_rest()
            appointments = [worker.wait_until - worker.now for worker in self._awake()]
            appointments += [
                handler.ends - worker.now
                for worker in self._awake()
                for handler in worker.handlers
                if handler.ends is not None
            ]
            step = min([until - self.clock.now, *appointments])
            if step <= 0:
                return
            self.clock.now += max(step, TICK)

    def _come_to_rest(self) -> None:
        """Let everything happen that happens now. It must come to an end: no busy loop."""
        rounds = 0
        while self._advance():
            rounds += 1
            assert rounds <= 30 + 10 * len(self.database.rows), "it spins"
        for worker in self._awake():
            self._nothing_due_is_left_to(worker)
            self._nothing_is_lost_by(worker)

    def _advance(self) -> bool:
        moved = False
        for worker in self._awake():
            for statement in list(worker.statements):
                if statement.answer is None:
                    worker.perform(statement)
                worker.answer(statement)
            for handler in list(worker.handlers):
                if handler.ends is not None and worker.now >= handler.ends:
                    worker.end(handler, Outcome.succeeded(handler.lease))
            worker.inbox.extend([Notified()] * worker.notifications)
            worker.notifications = 0
            if worker.is_due:
                worker.turn()
                moved = True
            self._account()
        return moved

    def _nothing_due_is_left_to(self, worker: Worker) -> None:
        """A worker at rest that was notified of everything has taken what it could."""
        watched = worker.machine
        assert isinstance(watched, Watched)
        if (
            worker.stopping
            or not worker.listening
            or self.quiet_since is None
            or self.clock.now < self.quiet_since + 35.0  # the last back-off and safety look
            or watched.machine.free == 0
        ):
            return
        for row in self.database.rows.values():
            known = row.task in worker.caller.tasks
            due = self.database.allows(row, Life.CLAIM) and row.run_at < self.database.now - 0.02
            assert not (known and due), "due, known, and left"
        self.reached["rest with a free slot"] += 1

    def _nothing_is_lost_by(self, worker: Worker) -> None:
        """A slow handler on a live worker keeps its job, however long it takes."""
        if self.quiet_since is None:
            return
        for handler in worker.handlers:
            in_peace = handler.started + worker.database.clock.now - worker.now
            if in_peace > self.quiet_since + 35.0 and handler.lease.key not in self.operated:
                assert Reason.LEASE_LOST not in handler.told, "lost without any fault"
                self.reached["handler in peace"] += 1

    # --- the laws of the queue ------------------------------------------------------------------

    def _account(self) -> None:
        """Judge what the database has just done."""
        recorded, self.database.recorded = self.database.recorded, []
        for record in recorded:
            assert record.made_by == record.held_by, "an outcome ends the claim that made it"
            if record.outcome.event in {Life.SNOOZE, Life.RELEASE}:
                self.allowed[record.outcome.lease.job_id] += 1
            self.reached[f"recorded {record.outcome.event}"] += 1

    def laws_hold(self) -> None:
        """Judge the state after each step."""
        self.steps += 1
        self._each_row_is_sound()
        self._what_runs_is_what_the_machine_thinks()
        self._a_local_lease_never_outlives_the_rows()

    def _each_row_is_sound(self) -> None:
        """Attempts only grow and are bounded; a lease goes with running; the end is the end."""
        for row in self.database.rows.values():
            assert row.attempts >= self.attempts[row.id], "attempts never go down"
            self.attempts[row.id] = row.attempts
            assert row.attempts <= self.allowed[row.id], "no attempt beyond the bound"
            running = row.status is Status.RUNNING
            assert (row.locked_by is not None) is running
            assert (row.lease_expires_at is not None) is running
            if row.status in FINISHED:
                assert self.final.setdefault(row.id, row.status) is row.status, "one final status"
                if row.status is Status.FAILED:
                    assert row.errors, "a dead letter says why"
            if row.task == UNKNOWN:
                assert row.attempts == 0, "an unknown task spends no attempt"

    def _what_runs_is_what_the_machine_thinks(self) -> None:
        """The slots of the machines and the handlers that really run are the same."""
        for worker in self.workers:
            watched = worker.machine
            assert isinstance(watched, Watched)
            untold = {end.outcome.lease.key for end in worker.inbox if isinstance(end, Finished)}
            believed = {lease.key for lease in watched.machine.running} - untold
            real = [lease.key for lease in worker.in_slots]
            if worker.stopped is None:
                assert sorted(believed) == sorted(real)
            assert len(real) <= self.timing.concurrency

    def _a_local_lease_never_outlives_the_rows(self) -> None:
        """Who thinks that a lease lives is right, unless an operator took it away."""
        holders: Counter[int] = Counter()
        for worker in self._live():
            watched = worker.machine
            assert isinstance(watched, Watched)
            for key, attempt in watched.facts.running.items():
                # A stalled worker cannot know the time; what it does next is what counts.
                if worker.now >= min(attempt.lease_until, attempt.deadline):
                    continue
                if key in self.operated:
                    continue
                job_id, number = key
                row = self.database.rows[job_id]
                assert (row.locked_by, row.attempts) == (worker.name, number), "somebody else's"
                assert row.lease_expires_at is not None
                left = row.lease_expires_at - self.database.now
                assert attempt.lease_until - worker.now <= left + 1e-6, "the row's lease is over"
                holders[job_id] += 1
        assert all(count == 1 for count in holders.values()), "one live lease a row"

    # --- the end --------------------------------------------------------------------------------

    def end(self) -> None:
        """Faults cease: everything due comes to its end, and every worker can stop."""
        self._cease_faults()
        timing = self.timing
        waiting = [row.run_at - self.database.now for row in self.database.rows.values()]
        hang = 2.5 * timing.visibility_timeout
        patience = (
            max([0.0, *waiting])
            + timing.visibility_timeout
            + 1.1 * timing.recovery_interval
            + 1.1 * timing.max_poll_interval
            + 30.0
            + hang * (1 + sum(self.allowed[job] for job in self.database.rows))
        )
        deadline = self.clock.now + patience
        while self.clock.now < deadline and self._unfinished():
            self._run(timing.visibility_timeout)
        assert not self._unfinished(), "what is due is attempted and ended"
        self._stop_all()
        for worker in self.workers:
            assert isinstance(worker.machine, Watched)
            self.reached.update(worker.machine.reached)

    def _unfinished(self) -> list[Row]:
        known = {task for worker in self._live() for task in worker.caller.tasks}
        return [
            row
            for row in self.database.rows.values()
            if row.status not in FINISHED and row.task in known
        ]

    def _cease_faults(self) -> None:
        self.quiet_since = self.clock.now
        self.stalled.clear()
        self.database.locked.clear()
        self.database.unwritable.clear()
        if not any(not worker.stopping for worker in self._live()):
            self._start(listening=True)
        for worker in self._live():
            if not worker.listening:
                worker.listening = True
                worker.inbox.append(ListenerChanged(up=True))
            for handler in worker.handlers:
                if handler.has_slot and handler.ends is None:
                    handler.ends = worker.now + 2.5 * self.timing.visibility_timeout
                elif not handler.has_slot:
                    handler.ends = worker.now + 1.0

    def _stop_all(self) -> None:
        for worker in self._live():
            worker.inbox.append(StopRequested())
            worker.stopping = True
        self._run(self.timing.shutdown_timeout + 1.0)
        assert not self._live(), "every worker stops in its time"
