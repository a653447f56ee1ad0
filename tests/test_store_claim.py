"""The claim: which rows it takes, in which order, how many, and what it leaves alone."""

from __future__ import annotations

import random
import threading
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy import make_url, text

from sqlalchemy_jobs._messages import Claim, Claimed, Outcome, Settle
from sqlalchemy_jobs._store import check_dialect, statements_for
from sqlalchemy_jobs._window import WIDEST
from sqlalchemy_jobs.errors import UnsupportedDatabaseError
from sqlalchemy_jobs.lifecycle import KEPT_ERRORS
from sqlalchemy_jobs.tasks import Tasks
from tests.engines import open_engine
from tests.rows import JOBS, WORKER, Hand, Queue, nothing, open_queue, tasks_named

if TYPE_CHECKING:
    from collections.abc import Generator

    from sqlalchemy import Engine

POSTGRES = pytest.mark.drivers("psycopg")


@pytest.fixture
def queue(sync_engine: Engine) -> Generator[Queue]:
    """The jobs table, empty."""
    with open_queue(sync_engine) as queue:
        yield queue


def ids(answer: Claimed) -> list[int]:
    """The claimed jobs, in the order in which they are started."""
    return [lease.job_id for lease in answer.leases]


@contextmanager
def held_by_another(engine: Engine, job_ids: list[int]) -> Generator[None]:
    """Rows that another claimer has locked and not yet committed."""
    with engine.connect() as other, other.begin():
        other.execute(
            text("SELECT 1 FROM jobs.jobs WHERE id = ANY(:ids) FOR UPDATE"), {"ids": job_ids}
        ).all()
        yield


# --- order and number ------------------------------------------------------------------------


def fill(queue: Queue, count: int, *, seed: int = 1) -> list[int]:
    """Add jobs of three tasks, priorities and times; returns their ids as claims must order them.

    Many share a time, so that the id decides.
    """
    chance = random.Random(seed)  # noqa: S311 - a repeatable example
    at = queue.now()
    rows: dict[int, tuple[Any, ...]] = {}
    for _ in range(count):
        priority, age = chance.choice([-2, 0, 0, 1, 2]), chance.randrange(1, 5)
        job_id = queue.add(chance.choice("abc"), priority=priority, run_at=at)
        queue.run(
            "UPDATE {jobs} SET run_at = "
            + (
                "run_at - make_interval(secs => :age)"
                if queue.connection.dialect.name == "postgresql"
                else "strftime('%Y-%m-%d %H:%M:%f000', run_at, '-' || :age || ' seconds')"
            )
            + " WHERE id = :id",
            age=age,
            id=job_id,
        )
        rows[job_id] = (-priority, -age, job_id)
    return sorted(rows, key=lambda job_id: rows[job_id])


@pytest.mark.parametrize("full", [True, False])
def test_jobs_are_claimed_by_priority_then_time_then_id(queue: Queue, full: bool) -> None:  # noqa: FBT001
    """Higher priorities first, then the longest due, then the lowest id, over all tasks."""
    expected = fill(queue, 60)
    hand = Hand(queue, "a", "b", "c")
    claimed = ids(hand(Claim(7)))
    while answer := hand(Claim(7, full=full)).leases:
        claimed += [lease.job_id for lease in answer]
    assert claimed == expected


@pytest.mark.every_postgres
@pytest.mark.parametrize("limit", [1, 2, 5, 50])
def test_a_claim_takes_no_more_than_its_limit(queue: Queue, limit: int) -> None:
    """A claim takes exactly its limit where there are enough, else what there is."""
    for _ in range(20):
        queue.add()
    hand = Hand(queue)
    assert len(hand(Claim(limit)).leases) == min(limit, 20)
    assert list(queue.statuses().values()).count("running") == min(limit, 20)


@POSTGRES
@pytest.mark.every_postgres
def test_no_plan_makes_a_claim_exceed_its_limit(sync_engine: Engine, queue: Queue) -> None:
    """The limit holds under the plans, and the stale statistics, that break a naive claim."""
    queue.run("ALTER TABLE {jobs} SET (autovacuum_enabled = off)")
    try:
        queue.add()
        queue.run("ANALYZE {jobs}")
        queue.run(
            "INSERT INTO {jobs} (task, run_at) SELECT 'a', now() FROM generate_series(1, 200)"
        )
        queue.run("SET jit = off")  # the forbidden plans look expensive enough for it
        for kind in ("material", "hashjoin", "mergejoin", "hashagg", "sort", "memoize"):
            queue.run(f"SET enable_{kind} = off")
        with queue.connection.engine.connect() as other, other.begin() as naive:
            other.execute(text("SET LOCAL jit = off"))
            for kind in ("material", "hashjoin", "mergejoin", "hashagg", "sort"):
                other.execute(text(f"SET LOCAL enable_{kind} = off"))
            taken = other.execute(
                text(
                    "UPDATE jobs.jobs SET locked_by = 'x', lease_expires_at = now(),"
                    " status = 'running' WHERE id IN (SELECT id FROM jobs.jobs"
                    " WHERE status = 'pending' LIMIT 5 FOR UPDATE SKIP LOCKED) RETURNING id"
                )
            ).all()
            naive.rollback()
        assert len(taken) > 5, "the settings no longer break the naive statement: find others"
        hand = Hand(queue)
        for n in range(1, 11):
            assert len(hand(Claim(3)).leases) == 3
            assert list(queue.statuses().values()).count("running") == 3 * n
    finally:
        queue.run("ALTER TABLE {jobs} RESET (autovacuum_enabled)")


def test_without_tasks_nothing_is_claimed(queue: Queue) -> None:
    """A worker that has no tasks takes nothing and asks for nothing."""
    queue.add()
    assert Hand(queue, tasks=Tasks())(Claim(5)) == Claimed(())


def test_only_known_tasks_are_claimed(queue: Queue) -> None:
    """Jobs of unknown tasks stay as they are, spend no attempt and do not count as more work."""
    foreign = queue.add("b", priority=2, run_at=-100)
    before = queue.row(foreign)
    mine = queue.add("a")
    answer = Hand(queue, "a", "c")(Claim(5))
    assert (ids(answer), answer.more, answer.next_due) == ([mine], False, None)
    assert queue.row(foreign) == before


def test_a_delayed_job_is_not_claimed(queue: Queue) -> None:
    """A job whose time has not come stays pending."""
    delayed = queue.add(run_at=30)
    before = queue.row(delayed)
    assert ids(Hand(queue)(Claim(5))) == []
    assert queue.row(delayed) == before


def test_a_lease_carries_what_the_handler_needs(queue: Queue) -> None:
    """Payload, metadata, bounds and the time it waited come with the claim, in the job's order."""
    job_id = queue.add(
        payload={"user": "ü"}, meta={"trace": 1}, run_at=-25, timeout_s=2.5, max_attempts=7
    )
    (lease,) = Hand(queue)(Claim(1)).leases
    assert (lease.job_id, lease.attempt, lease.task) == (job_id, 1, "a")
    assert (lease.max_attempts, lease.timeout) == (7, 2.5)
    assert lease.payload.replace(" ", "") in ('{"user":"ü"}', '{"user":"\\u00fc"}')
    assert lease.meta.replace(" ", "") == '{"trace":1}'
    assert 25 <= lease.waited < 60


@pytest.mark.parametrize(
    ("of_job", "of_task", "of_worker", "expected"),
    [
        (None, None, None, 900.0),
        (None, None, 60.0, 60.0),
        (None, None, 0.0, None),
        (None, 5.0, 60.0, 5.0),
        (None, 0.0, 60.0, None),
        (2.5, 5.0, 60.0, 2.5),
        (0.0, 5.0, 60.0, None),
    ],
)
def test_the_nearest_timeout_holds(
    queue: Queue,
    of_job: float | None,
    of_task: float | None,
    of_worker: float | None,
    expected: float | None,
) -> None:
    """A job's own timeout beats its task's, that beats the worker's, and zero means no bound."""
    queue.add(timeout_s=of_job)
    hand = Hand(queue, tasks=tasks_named("a", timeout=of_task), timeout=of_worker)
    assert hand(Claim(1)).leases[0].timeout == expected


# --- bounds ----------------------------------------------------------------------------------


def test_an_open_bound_becomes_the_tasks_own_at_the_first_claim(queue: Queue) -> None:
    """A job without max_attempts takes its task's when it is claimed, each task its own."""
    tasks = tasks_named("a", max_attempts=5)
    tasks.task("b", max_attempts=1)(nothing)
    open_a, open_b, given = queue.add("a"), queue.add("b"), queue.add("b", max_attempts=9)
    leases = {lease.job_id: lease for lease in Hand(queue, tasks=tasks)(Claim(5)).leases}
    assert {i: lease.max_attempts for i, lease in leases.items()} == {
        open_a: 5,
        open_b: 1,
        given: 9,
    }
    assert [queue.row(i)["max_attempts"] for i in (open_a, open_b, given)] == [5, 1, 9]


def test_a_claim_says_how_often_the_job_has_failed(queue: Queue) -> None:
    """Failed attempts count, those given back do not, and beyond a bound nobody counts."""
    queue.add(max_attempts=100)
    hand = Hand(queue)

    def failures(end: Any) -> int | None:
        (lease,) = hand(Claim(1)).leases
        hand(Settle((end(lease),)))
        failed: int | None = lease.failures
        return failed

    ends = [
        partial(Outcome.snoozed, delay=0.0),
        partial(Outcome.raised, error="ValueError", delay=0.0),
        Outcome.released,
        partial(Outcome.raised, error="ValueError", delay=0.0),
    ]
    assert [failures(end) for end in ends] == [0, 0, 1, 1]
    for _ in range(KEPT_ERRORS - 2):
        failures(ends[1])
    assert failures(ends[0]) is None


def test_a_bound_is_settled_once(queue: Queue) -> None:
    """A later change of the task's own bound does not change a job that was claimed before."""
    queue.add()
    (lease,) = Hand(queue, tasks=tasks_named("a", max_attempts=5))(Claim(1)).leases
    again = Hand(queue, tasks=tasks_named("a", max_attempts=2))
    again(Settle((Outcome.raised(lease, "ValueError", 0.0),)))
    assert again(Claim(1)).leases[0].max_attempts == 5


def test_spent_rows_fail_with_a_reason_and_take_no_slot(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows without an attempt left fail, say why, and the next look fills the slots with others."""
    spent = [
        queue.add(attempts=3, max_attempts=3, run_at=-50),
        queue.add(attempts=9, max_attempts=3, run_at=-50),
        queue.add(attempts=0, max_attempts=0, run_at=-50),
        queue.add(attempts=4, run_at=-50),  # open, and the task's own bound is 3
    ]
    good = [queue.add(), queue.add()]
    hand = Hand(queue)
    first = hand(Claim(4))
    assert (ids(first), first.more) == ([], True)
    assert ids(hand(Claim(2))) == good
    for job_id in spent:
        row = queue.row(job_id)
        assert row["status"] == "failed"
        assert "attempts are spent" in row["last_error"]
        assert row["errors"][-1]["error"] == row["last_error"]
        assert (row["locked_by"], row["lease_expires_at"]) == (None, None)
    logged = [r for r in caplog.records if getattr(r, "event", "") == "exhausted"]
    assert sorted(r.job_id for r in logged) == spent  # type: ignore[attr-defined]


# --- rows that a hand has edited ---------------------------------------------------------------


@pytest.mark.parametrize("payload", ['"text"', "null", "[]", "17", '{"a": {"b": []}}'])
def test_an_odd_payload_is_claimed_like_any_other(queue: Queue, payload: str) -> None:
    """Whatever JSON a payload is, the claim hands it on as it is."""
    job_id = queue.add()
    queue.run("UPDATE {jobs} SET payload = :payload", payload=payload) if (
        queue.connection.dialect.name == "sqlite"
    ) else queue.run("UPDATE {jobs} SET payload = CAST(:payload AS jsonb)", payload=payload)
    other = queue.add()
    answer = Hand(queue)(Claim(5))
    assert ids(answer) == [job_id, other]
    assert answer.leases[0].payload == payload


@POSTGRES
@pytest.mark.every_postgres
def test_infinite_times_harm_nobody(queue: Queue) -> None:
    """A job due since for ever is claimed with a finite wait; one due never is never claimed."""
    good = queue.add()
    always, never = queue.add(), queue.add()
    queue.run("UPDATE {jobs} SET run_at = '-infinity' WHERE id = :id", id=always)
    queue.run("UPDATE {jobs} SET run_at = 'infinity' WHERE id = :id", id=never)
    hand = Hand(queue)
    answer = hand(Claim(2))
    assert ids(answer) == [always, good]
    assert 0 < answer.leases[0].waited < 1e11
    assert hand(Claim(5)) == Claimed(())
    hand(Settle(tuple(Outcome.succeeded(lease) for lease in answer.leases)))
    assert queue.run("SELECT status FROM {jobs} WHERE id = :id", id=never) == [("pending",)]


@POSTGRES
def test_a_job_from_before_1970_is_claimed_once(queue: Queue) -> None:
    """Times before the epoch of the remembered places neither repeat nor hide a row for good."""
    for year in (1901, 1950, 1969, 2001):
        queue.run("INSERT INTO {jobs} (task, run_at) VALUES ('a', :at)", at=f"{year}-01-01")
    hand = Hand(queue)
    claimed = ids(hand(Claim(1)))
    claimed += ids(hand(Claim(1, full=False)))
    while answer := ids(hand(Claim(1))):
        claimed += answer
    assert sorted(claimed) == sorted(queue.statuses())


@pytest.mark.parametrize(
    "odd",
    ["", "2001-01-01", "2001-01-01 10:00:00", "2001-01-01T10:00:00Z", 17, 1.5],
    ids=repr,
)
@pytest.mark.drivers("sqlite")
def test_an_odd_time_on_sqlite_harms_nobody(queue: Queue, odd: Any) -> None:
    """Whatever was written into a time on SQLite, the claim gets by and takes the others too."""
    job_id, other = queue.add(), queue.add()
    queue.run("UPDATE {jobs} SET run_at = :odd WHERE id = :id", odd=odd, id=job_id)
    assert ids(Hand(queue)(Claim(5))) == [job_id, other]


@pytest.mark.parametrize("errors", ["{}", "null", '"text"', "17"])
def test_errors_that_are_no_list_are_begun_anew(queue: Queue, errors: str) -> None:
    """A record of errors that somebody made into something else does not stop a claim."""
    job_id, good = queue.add(attempts=3, max_attempts=3), queue.add()
    form = ":e" if queue.connection.dialect.name == "sqlite" else "CAST(:e AS jsonb)"
    queue.run("UPDATE {jobs} SET errors = " + form + " WHERE id = :id", e=errors, id=job_id)
    assert ids(Hand(queue)(Claim(5))) == [good]
    assert [entry["attempt"] for entry in queue.row(job_id)["errors"]] == [3]


@pytest.mark.drivers("sqlite")
@pytest.mark.parametrize("errors", ["not json", "", "["])
def test_errors_that_are_no_json_on_sqlite_are_begun_anew(queue: Queue, errors: str) -> None:
    """SQLite stores any text as JSON, and the queue copes."""
    job_id, good = queue.add(attempts=3, max_attempts=3), queue.add()
    queue.run("UPDATE {jobs} SET errors = :e WHERE id = :id", e=errors, id=job_id)
    assert ids(Hand(queue)(Claim(5))) == [good]
    assert [entry["attempt"] for entry in queue.row(job_id)["errors"]] == [3]


# --- what comes next ---------------------------------------------------------------------------


@pytest.mark.every_postgres
def test_the_next_due_job_is_announced_within_a_minute(queue: Queue) -> None:
    """A look that leaves slots free says in how many seconds the next known job is due."""
    queue.add(run_at=50)
    queue.add(run_at=20, priority=-2)
    queue.add("b", run_at=5)
    queue.add("unknown", run_at=2)
    answer = Hand(queue, "a", "b")(Claim(5))
    assert answer.next_due is not None
    assert 0 < answer.next_due <= 5.01
    assert not answer.more


def test_a_job_due_later_than_a_minute_is_not_announced(queue: Queue) -> None:
    """What is due beyond the horizon is nobody's next look."""
    queue.add(run_at=65)
    assert Hand(queue)(Claim(5)).next_due is None


def test_an_empty_queue_announces_nothing(queue: Queue) -> None:
    """Nothing to do, nothing to come."""
    assert Hand(queue)(Claim(5)) == Claimed(())


def test_a_full_claim_says_that_there_may_be_more(queue: Queue) -> None:
    """Who got all that was asked for looks again at once."""
    for _ in range(3):
        queue.add()
    hand = Hand(queue)
    assert [hand(Claim(2)).more for _ in range(2)] == [True, False]


# --- several claimers --------------------------------------------------------------------------


@POSTGRES
@pytest.mark.every_postgres
def test_a_claim_skips_what_others_are_claiming(sync_engine: Engine, queue: Queue) -> None:
    """Rows that another claimer has locked are passed over without waiting, the next ones taken."""
    jobs = [queue.add() for _ in range(6)]
    queue.run("SET lock_timeout = '2s'")
    with held_by_another(sync_engine, [jobs[0], jobs[2]]):
        assert ids(Hand(queue)(Claim(2))) == [jobs[1], jobs[3]]
    assert ids(Hand(queue)(Claim(5))) == [jobs[0], jobs[2], jobs[4], jobs[5]]


@POSTGRES
@pytest.mark.every_postgres
def test_the_window_widens_until_it_shows_a_free_row(sync_engine: Engine, queue: Queue) -> None:
    """When others hold the whole window, the claimer says "more" and looks further next time."""
    jobs = [queue.add() for _ in range(30)]
    hand = Hand(queue)
    with held_by_another(sync_engine, jobs[:20]):
        answers = [hand(Claim(5)) for _ in range(4)]
    # 10 rows seen, then 20, both all locked; then 40, of which ten are free.
    assert [(ids(answer), answer.more) for answer in answers] == [
        ([], True),
        ([], True),
        (jobs[20:25], True),
        (jobs[25:], True),
    ]


@POSTGRES
def test_the_window_has_an_end(sync_engine: Engine, queue: Queue) -> None:
    """With its widest window full of locked rows a claimer waits instead of looking for ever."""
    jobs = [queue.add() for _ in range(WIDEST + 4)]
    hand = Hand(queue)
    with held_by_another(sync_engine, jobs):
        more = [hand(Claim(1)).more for _ in range(6)]
    assert more == [True, True, True, False, False, False]
    assert ids(hand(Claim(1))) == jobs[:1]


@POSTGRES
@pytest.mark.every_postgres
def test_eight_claimers_share_a_queue_without_a_job_twice(
    sync_engine: Engine, queue: Queue
) -> None:
    """Eight at once claim every job exactly once, and when all are done nothing is left behind."""
    count = 600
    queue.run(
        "INSERT INTO {jobs} (task, priority) SELECT (ARRAY['a', 'b'])[1 + n % 2], n % 3 - 1"
        " FROM generate_series(1, :count) AS n",
        count=count,
    )
    claimed: list[tuple[int, str]] = []
    failures: list[BaseException] = []
    barrier = threading.Barrier(8)

    def work(name: str) -> None:
        try:
            with open_engine(sync_engine.url) as engine, open_queue(engine) as own:
                hand = Hand(own, "a", "b", worker=name)
                barrier.wait(30)
                full = True
                while True:
                    answer = hand(Claim(5, full=full))
                    claimed.extend((lease.job_id, name) for lease in answer.leases)
                    if not answer.leases and not answer.more and full:
                        return
                    full = not answer.more
        except BaseException as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(f"w{n}",), daemon=True) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
    assert len(claimed) == count
    rows = queue.rows()
    assert {job_id: row["locked_by"] for job_id, row in rows.items()} == dict(claimed)
    assert {row["attempts"] for row in rows.values()} == {1}


# --- dialects ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["mysql", "mssql", "oracle"])
def test_another_dialect_is_refused_by_name(name: str) -> None:
    """A dialect that cannot keep the promises is refused in a sentence that names what can."""
    dialect = make_url(f"{name}://").get_dialect()()
    for refuse in (check_dialect, partial(statements_for, JOBS)):
        with pytest.raises(UnsupportedDatabaseError) as caught:
            refuse(dialect)
        message = str(caught.value)
        assert name in message
        assert "PostgreSQL" in message
        assert "SQLite" in message


def test_the_worker_is_named_in_the_row(queue: Queue) -> None:
    """The claim writes who holds the row, which the fence of every later write asks for."""
    job_id = queue.add()
    Hand(queue, worker="pod-0-17-r4nd")(Claim(1))
    assert queue.row(job_id)["locked_by"] == "pod-0-17-r4nd" != WORKER
