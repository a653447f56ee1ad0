"""A fleet on a virtual clock: processes, a database, and all that can happen to them.

Events wait in a queue by the time at which they happen, so thousands of seconds cost what happens
in them and nothing more. Each fault is a method with plain arguments; who calls them, and when, is
the adversary's business (``adversary.py``). At the end (:meth:`Fleet.end`) the faults cease, and
everything that is due must end in bounded time.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sqlalchemy_jobs import _bell, _machine
from sqlalchemy_jobs._messages import Lease, Notified, Outcome
from sqlalchemy_jobs.lifecycle import FINISHED, Status
from sqlalchemy_jobs.lifecycle import Event as Life
from tests.simulation import database as simulated
from tests.simulation.laws import Watched
from tests.simulation.ledger import LEFT_AT_MOST, PEACE_AFTER, Ledger
from tests.simulation.process import TICK, Process, Script, Statement
from tests.simulation.weather import Weather

if TYPE_CHECKING:
    import random
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from types import ModuleType

    from tests.simulation.database import Caller, Clock, Database, Insert, Row

VERSIONS = (
    {"mail": 3, "report": 1},
    {"mail": 3, "report": 2, "digest": 2},
    {"mail": 5, "digest": 2},
)
"""The tasks that each release of the application knows, with their own max_attempts."""

UNKNOWN = "unknown"
"""A task that no release knows."""

KNOWN = frozenset(itertools.chain.from_iterable(VERSIONS))

SPINS = 20_000
"""So many events happen in no history of a fleet that does not spin."""

RESTARTS_AFTER = 1.0
"""Seconds until a process that died takes up work again under a new name."""


def timed_out(lease: Lease) -> Outcome:
    """What a worker makes of an overdue attempt."""
    return Outcome.raised(lease, "timed out", delay=1.0)


@dataclass(frozen=True, slots=True)
class Parts:
    """What a fleet is made of, so that a broken part can be put in. *watched*: by ``laws.py``."""

    machine: ModuleType = _machine
    bell: ModuleType = _bell
    database: ModuleType = simulated
    watched: bool = True


SOUND = Parts()


@dataclass(slots=True)
class Order:
    """A job to be enqueued."""

    task: str
    delay: float = 0.0
    priority: int = 0
    max_attempts: int | None = None
    timeout: float | None = None
    key: str | None = None
    scripts: list[Script] = field(default_factory=list)


class Fleet:
    """Workers, a database and everything that can go wrong between them."""

    def __init__(
        self,
        chance: random.Random,
        *,
        latency: float,
        trouble: float,
        retention: float,
        parts: Parts = SOUND,
        tells: bool = False,
        **timing: Any,
    ) -> None:
        """Be empty. *timing* are the machine's settings; *tells*: keep the story."""
        self.parts = parts
        self.chance = chance
        self.story: list[str] | None = [] if tells else None
        self.clock: Clock = parts.database.Clock(1000.0)
        self.timing = parts.machine.Timing(**timing)
        self.weather = Weather(
            chance,
            latency=latency,
            trouble=trouble,
            patience=1.5 * self.timing.visibility_timeout,
        )
        self.database: Database = parts.database.Database(self.clock)
        self.database.notify = self._notify
        self.database.retention = dict.fromkeys(self.database.retention, retention)
        self.processes: list[Process] = []
        self.epoch = 0  # of the database's server
        self.down_until = 0.0
        self.blocked: list[tuple[Process, Statement]] = []  # wait for a row that is locked
        self.reached: Counter[str] = Counter()  # shows that the laws were put to the test
        self.ledger = Ledger(self)
        self.database.observe = self.ledger.moved
        self.visible_since: dict[int, float] = {}
        self.known = KNOWN
        self.calm_since: float | None = None
        self.steps = 0
        self.last: Process | None = None  # the process that the latest event was about
        self._queue: list[tuple[float, int, Callable[..., object], tuple[Any, ...]]] = []
        self._number = itertools.count()
        self._serial = itertools.count(1)

    # --- time -----------------------------------------------------------------------------------

    def after(self, seconds: float, do: Callable[..., object], *arguments: Any) -> None:
        """Have something happen in so many seconds."""
        at = self.clock.now + seconds
        heapq.heappush(self._queue, (at, next(self._number), do, arguments))

    def step(self) -> None:
        """Let the next thing happen, if there is any."""
        if not self._queue:
            return
        at, _, do, arguments = heapq.heappop(self._queue)
        self.clock.now = max(self.clock.now, at)
        self.steps += 1
        assert self.steps < SPINS, "it spins"
        subject = getattr(do, "__self__", None)
        if isinstance(subject, Process):
            self.last = subject
        do(*arguments)

    def run(self, seconds: float) -> None:
        """Let everything happen that happens in so many seconds."""
        until = self.clock.now + seconds
        while self._queue and self._queue[0][0] <= until:
            self.step()
        self.clock.now = until

    def tell(self, what: str) -> None:
        """Add a line to the story."""
        if self.story is not None:
            self.story.append(f"{self.clock.now:12.6f}  {what}")

    @property
    def is_down(self) -> bool:
        """Whether the database's server refuses connections."""
        return self.clock.now < self.down_until

    # --- processes ------------------------------------------------------------------------------

    def start(self, *, tasks: Mapping[str, int], listening: bool, reaction: float = 0.0) -> Process:
        """Start a process that knows *tasks*."""
        caller: Caller = self.parts.database.Caller(
            worker=f"worker-{next(self._serial)}",
            visibility_timeout=self.timing.visibility_timeout,
            tasks=dict(tasks),
        )
        offset = self.chance.choice((-900.0, 0.0, 77_777.0))
        now = self.clock.now + offset
        machine = self.parts.machine.Machine(
            self.timing, timed_out=timed_out, jitter=self.chance.random, now=now
        )
        if self.parts.watched:
            machine = Watched(machine, now)
        process = Process(self, machine, self.parts.bell.Bell(), caller, offset=offset)
        process.reaction = reaction
        self.processes.append(process)
        self.tell(f"{process.name} starts, listening: {listening}")
        process.start(listening=listening)
        return process

    def mourn(self, process: Process) -> None:
        """A process died: another takes its place, on the same host, under a new name."""
        self.bury()
        self.after(RESTARTS_AFTER, self._replace, process)

    def _replace(self, process: Process, tasks: Mapping[str, int] | None = None) -> None:
        self.start(
            tasks=process.tasks if tasks is None else tasks,
            listening=process.listener.wanted,
            reaction=process.reaction,
        )

    def bury(self) -> None:
        """Forget processes that are gone."""
        for process in self.processes:
            if not process.alive and isinstance(process.machine, Watched):
                self.reached.update(process.machine.reached)
        self.processes = [process for process in self.processes if process.alive]

    def alive(self) -> list[Process]:
        """The processes that are there."""
        if any(not process.alive for process in self.processes):
            self.bury()
        return self.processes

    def local_leases(self, process: Process) -> Iterator[tuple[int, int, float]]:
        """Until when a worker believes that it holds each job it runs: (id, attempt, time)."""
        machine = process.machine
        if isinstance(machine, Watched):
            for (job_id, attempt), running in machine.facts.running.items():
                yield job_id, attempt, running.lease_until

    # --- jobs -----------------------------------------------------------------------------------

    def enqueue(
        self,
        orders: Sequence[Order],
        *,
        stays_open: float = 0.0,
        hesitates: float = 0.0,
        rolls_back: bool = False,
        near: Process | None = None,
    ) -> None:
        """Somebody enqueues jobs in one transaction, which *stays_open* for so many seconds.

        *hesitates*: seconds between the steps in which it looks for resting workers. *near*: it
        happens in the process of a worker, which is woken directly.
        """
        inserts: list[Insert] = []
        for order in orders:
            insert = self.database.insert(
                order.task,
                delay=order.delay,
                priority=order.priority,
                max_attempts=order.max_attempts,
                timeout=order.timeout,
                key=order.key,
            )
            if insert is None:
                self.reached["key taken"] += 1
                continue
            inserts.append(insert)
            self.ledger.enqueued(insert.row.id, order.task, order.max_attempts, order.scripts)
        self.tell(f"enqueued: {[(insert.row.id, insert.row.task) for insert in inserts]}")
        if hesitates:
            self.after(hesitates, self._look_again, inserts, hesitates)
            stays_open += 2 * hesitates + TICK
        else:
            self._look_again(inserts, 0.0)
        if stays_open:
            self.after(stays_open, self._commit, inserts, self.epoch, rolls_back, near)
        else:
            self._commit(inserts, self.epoch, rolls_back, near)

    def _look_again(self, inserts: list[Insert], hesitates: float) -> None:
        for insert in inserts:
            if insert in self.database.inserts:
                self.database.go_silent(insert)
        if hesitates:
            self.after(hesitates, self._look_twice, inserts)
        else:
            self._look_twice(inserts)

    def _look_twice(self, inserts: list[Insert]) -> None:
        for insert in inserts:
            if insert in self.database.inserts:
                self.database.look_again(insert)

    def _commit(
        self,
        inserts: list[Insert],
        epoch: int,
        rolls_back: bool,  # noqa: FBT001 - an argument on its way
        near: Process | None,
    ) -> None:
        if epoch != self.epoch:
            return  # the server rolled it back when it restarted
        if rolls_back:
            for insert in inserts:
                self.database.roll_back(insert)
                self._rolled_back(insert)
            return
        for insert in inserts:
            self.database.commit(insert)
            self.expect_to_be_taken(insert.row)
        self.tell(f"committed: {[insert.row.id for insert in inserts]}")
        if near is not None and near.alive and inserts:
            near.post(Notified())

    def _rolled_back(self, insert: Insert) -> None:
        self.ledger.never_existed(insert.row.id)
        self.reached["rolled back"] += 1

    def operate(self, pick: int, life: Life) -> None:
        """A person cancels or requeues a job; one for which that means most is preferred."""
        rows = list(self.database.rows.values())
        if not rows:
            return
        fits = Status.RUNNING if life is Life.CANCEL else Status.FAILED
        rows.sort(key=lambda row: (row.status is not fits, row.id))
        row = rows[pick % len(rows)]
        before = row.status
        if self.database.operate(row.id, life):
            self.tell(f"somebody does {life} to job {row.id}")
            self.reached["running job cancelled"] += before is Status.RUNNING

    def lock(self, pick: int, seconds: float) -> None:
        """A stranger's transaction locks a row for a while."""
        if self.database.rows:
            job_id = list(self.database.rows)[pick % len(self.database.rows)]
            self.database.locked.add(job_id)
            self.tell(f"job {job_id} is locked")
            self.after(seconds, self._unlock, job_id)

    def _unlock(self, job_id: int) -> None:
        self.database.locked.discard(job_id)
        blocked, self.blocked = self.blocked, []
        for process, statement in blocked:
            process.perform(statement)

    def spoil(self, pick: int, seconds: float) -> None:
        """For a while a row takes no outcome: some constraint of the user's, say."""
        if self.database.rows:
            job_id = list(self.database.rows)[pick % len(self.database.rows)]
            self.database.unwritable.add(job_id)
            self.tell(f"job {job_id} takes no outcome")
            self.after(seconds, self.database.unwritable.discard, job_id)

    # --- faults ---------------------------------------------------------------------------------

    def restart_database(self, seconds: float, *, politely: bool) -> None:
        """The server restarts: what is under way there is lost, or was committed just before.

        *politely*: clients are told at once; else they wait in vain, as behind a dead host.
        """
        self.tell(f"the database restarts, politely: {politely}")
        self.reached["database restarted"] += 1
        for process in self.alive():
            for statement in process.in_flight:
                if not statement.performed and self.chance.random() < 0.5:
                    process.perform(statement)
        self.epoch += 1
        self.down_until = max(self.down_until, self.clock.now + seconds)
        self.database.marks.clear()
        self.database.silent.clear()
        for insert in self.database.inserts:
            self._rolled_back(insert)
        self.database.inserts.clear()
        self.database.locked.clear()
        self.blocked.clear()
        for process in self.alive():
            process.listener.marks.clear()
            process.listener.lose(silently=not politely)
            if politely:
                for statement in process.in_flight:
                    process.lose(statement)

    def break_connection(self, pick: int, *, committed: bool) -> None:
        """A statement that is under way fails, or its answer is lost after the commit."""
        found = [(p, s) for p in self.alive() for s in p.in_flight if p.is_awake]
        if found:
            process, statement = found[pick % len(found)]
            if committed:
                process.perform(statement)
            self.tell(f"{process.name} loses the connection of {statement.command}")
            process.lose(statement)

    def cut_off(self, process: Process, seconds: float) -> None:
        """The network of a process swallows everything for a while."""
        self.tell(f"{process.name} is cut off for {seconds} s")
        self.reached["cut off"] += 1
        process.cut_off_until = self.clock.now + seconds
        process.listener.lose(silently=True)
        for statement in process.in_flight:
            statement.answered = None
            statement.dead = not statement.performed

    def crash(self, process: Process) -> None:
        """A process dies."""
        self.tell(f"{process.name} dies")
        process.crash()
        self.bury()

    def stop(self, process: Process) -> None:
        """A process is asked to stop."""
        self.tell(f"{process.name} is asked to stop")
        process.stop()

    def sleep(self, process: Process, seconds: float, how: str) -> None:
        """A process stands still: see :meth:`Process.sleep`."""
        if process.is_awake:
            self.tell(f"{process.name}: {how} for {seconds} s")
            self.reached[how] += 1
            process.sleep(seconds, how)

    def leap(self, process: Process, seconds: float) -> None:
        """A process's clock jumps ahead."""
        self.tell(f"the clock of {process.name} leaps by {seconds} s")
        self.reached["clock leapt"] += 1
        process.leap(seconds)

    def deploy(self, version: int, pause: float) -> None:
        """Every process is replaced by one of another release, one after the other."""
        self.tell(f"release {version} is deployed")
        self.reached["deployed"] += 1
        for number, process in enumerate(self.alive()):
            self.after(number * pause, self._roll, process, version)

    def _roll(self, process: Process, version: int) -> None:
        if process.alive and not process.is_stopping:
            self.stop(process)
            self._replace(process, VERSIONS[version])

    def notify_for_nothing(self, process: Process) -> None:
        """A notification comes twice, or from elsewhere."""
        process.post(Notified())

    def _notify(self, task: str) -> None:
        for process in self.processes:
            process.listener.send(task)

    # --- the end --------------------------------------------------------------------------------

    def bounded(self, script: Script) -> Script:
        """When the faults have ceased nothing hangs: but longer than two leases is no matter."""
        if self.calm_since is not None and script.seconds is None:
            script = Script(2.5 * self.timing.visibility_timeout, script.end, script.delay)
        return script

    def calm_down(self) -> None:
        """Faults cease."""
        self.tell("--- the faults cease")
        self.calm_since = self.clock.now
        self.weather.clear_up()
        self.down_until = 0.0
        self.database.unwritable.clear()
        for job_id in list(self.database.locked):
            self._unlock(job_id)
        for process in self.alive():
            process.cut_off_until = 0.0
            process.wake_up()
            process.hurry(2.5 * self.timing.visibility_timeout)
        if not any(not process.is_stopping for process in self.alive()):
            self.start(tasks=self.chance.choice(VERSIONS), listening=True)
        self.after(PEACE_AFTER + LEFT_AT_MOST + TICK, self.ledger.nothing_is_left)

    def expect_to_be_taken(self, row: Row) -> None:
        """Look after a job that is due, or will be, and see that somebody took it."""
        self.visible_since[row.id] = self.clock.now
        if self.calm_since is not None:
            due_in = max(0.0, row.run_at - self.database.now)
            self.after(due_in + LEFT_AT_MOST + TICK, self.ledger.nothing_is_left)

    def expect_no_leftovers(self) -> None:
        """A worker has a free slot: see to it that it is used."""
        if self.calm_since is not None:
            self.after(LEFT_AT_MOST + TICK, self.ledger.nothing_is_left)

    def end(self, encore: Sequence[tuple[float, dict[str, Any]]] = ()) -> None:
        """Let the faults cease: everything due comes to its end, and every worker can stop.

        *encore*: what is enqueued while all is well, each so many seconds after the other.
        """
        self.calm_down()
        self.run(1.5 * self.timing.visibility_timeout)  # what the dead had sent arrives
        if encore:
            self.run(PEACE_AFTER)
            for pause, details in encore:
                self.run(pause)
                self.enqueue(**details)
        while self.database.inserts:
            self.step()
        deadline = self.clock.now + self._patience()
        while self._unfinished():
            assert self.clock.now < deadline, "what is due is attempted and ended"
            for _ in range(5):
                self.step()
        self._stop_all()
        self.ledger.close()

    def _patience(self) -> float:
        timing, now = self.timing, self.database.now
        unfinished = [row for row in self.database.rows.values() if row.status not in FINISHED]
        waits = [row.run_at - now for row in unfinished]
        attempts = sum((self.ledger.jobs[row.id].allowed or 3) + 1 for row in unfinished)
        comes_back = timing.visibility_timeout + 1.1 * timing.recovery_interval
        looks = 1.1 * timing.max_poll_interval + 60.0
        longest = 2.5 * timing.visibility_timeout + comes_back + looks
        bound: float = max([0.0, *waits]) + comes_back + looks + longest * attempts
        return bound

    def _unfinished(self) -> bool:
        known = {task for process in self.alive() for task in process.tasks}
        return any(
            row.status not in FINISHED and (row.task in known or row.status is Status.RUNNING)
            for row in self.database.rows.values()
        )

    def _stop_all(self) -> None:
        for process in self.alive():
            self.stop(process)
        self.run(self.timing.shutdown_timeout + 2.0)
        assert not self.alive(), "every worker stops in its time"
