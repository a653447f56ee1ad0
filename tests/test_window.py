"""What a claim remembers, against a model of the queue: no memory hides a job for good."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from sqlalchemy_jobs._messages import Claim, Claimed
from sqlalchemy_jobs._store import Store
from sqlalchemy_jobs._window import FIRST_PAUSE, LONGEST_PAUSE, PRIORITIES, WIDEST, Window
from sqlalchemy_jobs.settings import WorkerSettings
from tests.rows import JOBS, tasks_named

if TYPE_CHECKING:
    from collections.abc import Callable

    from sqlalchemy_jobs._window import Look

TASKS = {"a": 3, "b": 3}


# --- the window alone --------------------------------------------------------------------------


def test_a_first_look_probes_every_queue_from_its_beginning() -> None:
    """Each task and priority is probed, with the task's own bound and twice the free slots."""
    look = Window().look({"a": 3, "b": 7}, 5, full=True)
    assert list(zip(look.tasks, look.priorities, strict=True)) == [
        (task, priority) for task in "ab" for priority in PRIORITIES
    ]
    assert look.bounds == [3] * 5 + [7] * 5
    assert (set(look.after), set(look.after_id)) == ({None}, {0})
    assert look.window == 10


def test_a_look_goes_on_after_the_last_claimed() -> None:
    """What was claimed bounds the next look of its queue from below, and of no other."""
    window = Window()
    window.claimed([(("a", 0), (50, 7)), (("a", 0), (50, 9)), (("a", 0), (40, 99))])
    look = window.look(TASKS, 1, full=False)
    places = {
        (task, priority): (at, number)
        for task, priority, at, number in zip(
            look.tasks, look.priorities, look.after, look.after_id, strict=True
        )
    }
    assert places.pop(("a", 0)) == (50, 9)
    assert set(places.values()) == {(None, 0)}


def test_a_job_at_the_very_epoch_is_a_place_too() -> None:
    """Zero microseconds is a time like any other, and not "nothing remembered"."""
    window = Window()
    window.claimed([(("a", 0), (0, 5))])
    look = window.look(TASKS, 1, full=False)
    assert (0, 5) in zip(look.after, look.after_id, strict=True)


def test_only_queues_in_use_are_probed() -> None:
    """Queues without due jobs are not probed until the next full look."""
    window = Window()
    window.in_use([("b", 2), ("a", 0), ("gone", 0)])
    look = window.look(TASKS, 1, full=False)
    assert list(zip(look.tasks, look.priorities, strict=True)) == [("a", 0), ("b", 2)]
    window.in_use([])
    assert window.look(TASKS, 1, full=False).tasks == []


def test_a_full_look_forgets_everything_but_the_width() -> None:
    """A full look probes all queues from the beginning, but as far as the last look had to."""
    window = Window()
    window.claimed([(("a", 0), (50, 9))])
    window.in_use([("a", 0)])
    window.crowded()
    assert window.look(TASKS, 3, full=True) == Window().look(TASKS, 6, full=True)


def test_the_width_doubles_up_to_its_end_and_shrinks_again() -> None:
    """Crowding doubles the window, at its widest it says so, and good claims narrow it to two."""
    window = Window()

    def width() -> int:
        return window.look(TASKS, 1, full=False).window

    widths = [width()]
    while window.crowded():
        widths.append(width())
    assert widths == [2, 4, 8, WIDEST]
    assert width() == WIDEST
    for _ in range(2 * WIDEST):
        before = width()
        window.relax()
        assert width() == max(2, before - 1)
    assert width() == 2


def test_jobs_that_cannot_be_had_are_looked_for_more_and_more_rarely() -> None:
    """What came due just after a claim is found at once; what a stranger locks costs little."""
    window = Window()
    assert window.left(0) is None
    pauses = [window.left(1) for _ in range(12)]
    assert pauses[0] == FIRST_PAUSE
    assert pauses == sorted(pauses, key=lambda pause: pause or 0)
    assert pauses[-1] == LONGEST_PAUSE
    assert window.left(0) is None
    assert window.left(3) == FIRST_PAUSE


# --- the window and the store, against a model of the queue ------------------------------------


class Job(NamedTuple):
    """A row of the model: its place in a queue, and what a claim returns of it."""

    id: int
    task: str
    priority: int
    run_at: int

    @property
    def rank(self) -> tuple[int, int, int]:
        """The job's place in the order of claims."""
        return (-self.priority, self.run_at, self.id)


class Row(NamedTuple):
    """What the claim returns, in its order."""

    rank: int
    run_at: int
    id: int
    status: str
    task: str
    attempts: int
    max_attempts: int
    timeout_s: float | None
    failures: int
    payload: str
    meta: str
    waited: float

    @classmethod
    def of(cls, job: Job) -> Row:
        """Return the row of a job that was claimed."""
        return cls(
            -job.priority,
            job.run_at,
            job.id,
            "running",
            job.task,
            1,
            3,
            None,
            0,
            "null",
            "null",
            0.0,
        )


@dataclass
class ModelQueue:
    """The rows that are committed and pending, and statements that see them as SQL does."""

    jobs: dict[int, Job] = field(default_factory=dict[int, Job])
    locked: set[int] = field(default_factory=set[int])
    now: int = 1000
    looks: list[Look] = field(default_factory=list["Look"])

    def due(self) -> list[Job]:
        """Every due job, in the order of claims."""
        return sorted((j for j in self.jobs.values() if j.run_at <= self.now), key=lambda j: j.rank)

    def heads(self, look: Look) -> list[Job]:
        """The window of each queue, from its lower bound on."""
        found: list[Job] = []
        for task, priority, after, after_id in zip(
            look.tasks, look.priorities, look.after, look.after_id, strict=True
        ):
            queue = [j for j in self.due() if (j.task, j.priority) == (task, priority)]
            floor = (-1 if after is None else after, after_id)
            found += [j for j in queue if (j.run_at, j.id) >= floor][: look.window]
        return sorted(found, key=lambda j: j.rank)[: look.window]

    # The statements that Store._claim uses. A call is a function here.

    def claim(self, _worker: str, _visibility: float, look: Look, limit: int, _channel: str) -> Any:
        """The claim: heads, unlocked ones of them, at most the limit, in no order of its own."""

        def perform() -> list[Row]:
            self.looks.append(look)
            free = [job for job in self.heads(look) if job.id not in self.locked][:limit]
            for job in free:
                del self.jobs[job.id]
            return [Row.of(job) for job in reversed(free)]

        return perform, {}

    def survey(self, look: Look) -> Any:
        """Which of the queues have due jobs."""
        queues = set(zip(look.tasks, look.priorities, strict=True))
        return lambda: [q for q in queues if any(j[1:3] == q for j in self.due())], {}

    def outlook(self, _look: Look) -> Any:
        """How many due jobs the windows hold, and nothing to come."""
        return lambda: [(len(self.due()), None)], {}

    # A connection that carries them out.

    def execute(self, call: Callable[[], list[Any]], _parameters: object) -> ModelQueue:
        """Carry a call out."""
        self._rows = call()
        return self

    def all(self) -> list[Any]:
        """The rows of the last call."""
        return self._rows


@dataclass
class Claimer:
    """A store on a model of the queue."""

    queue: ModelQueue = field(default_factory=ModelQueue)

    def __post_init__(self) -> None:
        self.store = Store(JOBS, tasks_named(*TASKS), WorkerSettings(), "w")
        self.seen: set[int] = set()  # what was due and free when a full look was last made
        self.ids = itertools.count(1)

    def commit(self, task: str, priority: int, run_at: int) -> None:
        """A job appears, perhaps long after its id and its time were given."""
        job = Job(next(self.ids), task, priority, run_at)
        self.queue.jobs[job.id] = job

    def claim(self, limit: int, *, full: bool) -> Claimed:
        """Claim, and check what every claim promises."""
        queue, statements = self.queue, self.queue
        due = queue.due()
        free = [job for job in due if job.id not in queue.locked]
        if full:
            self.seen = {job.id for job in free}
        answer = self.store._claim(queue, statements, "c", Claim(limit, full=full))  # type: ignore[arg-type]
        got = [lease.job_id for lease in answer.leases]
        assert len(got) == len(set(got)) <= limit
        by_id = {job.id: job for job in due}
        assert set(got) <= {job.id for job in free}
        assert got == sorted(got, key=lambda i: by_id[i].rank), "sorted, as RETURNING is not"
        # Among what the last full look could see, the order is exact: a prefix is taken.
        known = [job.id for job in free if job.id in self.seen]
        taken = [i for i in known if i in got]
        assert taken == known[: len(taken)]
        if full and not queue.locked:
            assert got == [job.id for job in due[:limit]], "a full look finds the best"
            assert answer.more is (len(got) == limit)
        return answer


queues = st.tuples(st.sampled_from(sorted(TASKS)), st.sampled_from([1, 0, -2]))
steps = st.one_of(
    st.tuples(st.just("commit"), queues, st.integers(0, 1200)),
    st.tuples(st.just("commit"), queues, st.integers(900, 1000)),
    st.tuples(st.just("claim"), st.integers(1, 4), st.sampled_from([False, False, True])),
    st.tuples(st.just("time"), st.integers(1, 60)),
    st.tuples(st.just("lock"), st.integers(0, 5)),
    st.tuples(st.just("unlock")),
)


@settings(max_examples=300)
@given(st.lists(steps, max_size=60))
def test_no_memory_hides_a_job(history: list[Any]) -> None:
    """After any history, full looks find every due job in order, however late it was committed."""
    claimer = Claimer()
    queue = claimer.queue
    for step in history:
        match step:
            case ("commit", (task, priority), run_at):
                claimer.commit(task, priority, run_at)
            case ("claim", limit, full):
                claimer.claim(limit, full=full)
            case ("time", passed):
                queue.now += passed
            case ("lock", count):
                queue.locked = {job.id for job in queue.due()[:count]}
                claimer.seen -= queue.locked  # another claimer may give them back later
            case _:
                queue.locked = set()
        assert all(look.window <= 4 * WIDEST for look in queue.looks)
    queue.locked = set()
    left = len(queue.due())
    found: list[int] = []
    while answer := claimer.claim(3, full=True).leases:
        found += [lease.job_id for lease in answer]
    assert len(found) == left
    assert queue.due() == []


@settings(max_examples=200)
@given(
    st.lists(st.tuples(queues, st.integers(0, 1000)), max_size=60),
    st.integers(1, 5),
    st.integers(1, 10),
)
def test_memory_changes_no_order_while_nothing_is_added(
    jobs: list[Any], limit: int, full_every: int
) -> None:
    """With nobody else at work, draining by remembered places gives the order of full looks."""
    claimer = Claimer()
    for (task, priority), run_at in jobs:
        claimer.commit(task, priority, run_at)
    expected = [job.id for job in claimer.queue.due()]
    got: list[int] = []
    for n in range(2 * len(jobs) + 2):
        got += [x.job_id for x in claimer.claim(limit, full=n % full_every == 0).leases]
    assert got == expected


def test_a_look_by_memory_reads_nothing_before_its_place() -> None:
    """The rows that were claimed are not walked again: that is what keeps the cost flat."""
    claimer = Claimer()
    for n in range(20):
        claimer.commit("a", 0, n)
    claimer.claim(4, full=True)
    claimer.claim(4, full=False)
    claimer.claim(4, full=False)
    places = [
        {(at, number) for at, number in zip(look.after, look.after_id, strict=True)}
        for look in claimer.queue.looks
    ]
    assert places == [{(None, 0)}, {(3, 4)}, {(7, 8)}]
    assert [len(look.tasks) for look in claimer.queue.looks] == [10, 1, 1]


@pytest.mark.parametrize("full", [True, False])
def test_a_late_commit_waits_for_the_next_full_look(full: bool) -> None:  # noqa: FBT001
    """A row that commits late with an earlier time is found by the next full look, no earlier."""
    claimer = Claimer()
    for n in range(4):
        claimer.commit("a", 0, 100 + n)
    claimer.claim(2, full=True)
    claimer.commit("a", 0, 50)
    got = [lease.job_id for lease in claimer.claim(1, full=full).leases]
    assert got == ([5] if full else [3])
