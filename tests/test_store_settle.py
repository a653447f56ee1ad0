"""Settling and renewing: what the holder of a lease may write, and nobody else."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import DBAPIError

from sqlalchemy_jobs._channel import channel_of
from sqlalchemy_jobs._messages import Chore, Claim, Lease, Outcome, Renew, Settle, Sweep
from sqlalchemy_jobs.lifecycle import KEPT_ERRORS, MOVES, OUTCOMES, Event
from tests.enqueue_tools import TAKE_ALL_MARKS
from tests.rows import JOBS, WORKER, Hand, Queue, foretold, open_queue

if TYPE_CHECKING:
    from collections.abc import Generator

    from sqlalchemy import Engine

    from tests.conftest import Database

POSTGRES = pytest.mark.drivers("psycopg")


@pytest.fixture
def queue(sync_engine: Engine) -> Generator[Queue]:
    """The jobs table, empty."""
    with open_queue(sync_engine) as queue:
        yield queue


def outcome(lease: Lease, event: Event, delay: float = 30.0, error: str = "E: no") -> Outcome:
    """An outcome with everything that its event may need."""
    return Outcome(lease, event, delay, error)


def keys(outcomes: tuple[Outcome, ...]) -> list[tuple[int, int]]:
    """Which attempts they belong to."""
    return [o.lease.key for o in outcomes]


# --- many outcomes at once ---------------------------------------------------------------------


@pytest.mark.every_postgres
def test_every_mixture_of_outcomes_is_recorded_in_one_command(queue: Queue) -> None:
    """Outcomes of all kinds go out together, and each row changes as if it were alone."""
    hand = Hand(queue)
    events = sorted(OUTCOMES) * 3
    leases = [queue.add_running(max_attempts=n + 1) for n in range(len(events))]
    before = queue.rows()
    outcomes = tuple(
        outcome(lease, event, delay=10.0 * n, error=f"E: {n}")
        for n, (lease, event) in enumerate(zip(leases, events, strict=True))
    )
    with queue.clocked() as now:
        answer = hand(Settle(outcomes))
    assert (answer.refused, answer.postponed) == ((), ())
    assert answer.recorded == outcomes
    for o in outcomes:
        job_id = o.lease.job_id
        expected = foretold(before[job_id], o.event, now[0], delay=o.delay, error=o.error)
        assert queue.row(job_id) == expected, o.event


@POSTGRES
def test_many_outcomes_are_one_statement(queue: Queue) -> None:
    """However many outcomes of however many kinds, PostgreSQL sees a single statement."""
    sent: list[str] = []
    leases = [queue.add_running() for _ in range(10)]
    events = sorted(OUTCOMES) * 2

    from sqlalchemy import event  # noqa: PLC0415 - beside an Event of our own

    def spy(connection: Any, cursor: Any, statement: str, *more: Any) -> None:
        sent.append(statement)

    event.listen(queue.connection, "before_cursor_execute", spy)
    Hand(queue)(Settle(tuple(map(outcome, leases, events))))
    event.remove(queue.connection, "before_cursor_execute", spy)
    assert len(sent) == 1
    assert "running" not in queue.statuses().values()


# --- the fence ---------------------------------------------------------------------------------


@pytest.mark.parametrize("event", sorted(OUTCOMES))
@pytest.mark.parametrize(
    "change",
    [{"locked_by": "host-2-xyz"}, {"attempts": 2}, {"attempts": 0}],
    ids=["another worker", "a later attempt", "an earlier attempt"],
)
def test_who_lost_the_lease_changes_nothing(
    queue: Queue, event: Event, change: dict[str, Any]
) -> None:
    """An outcome of another worker's, or of another attempt's, is refused; the row stays."""
    lease = queue.add_running()
    queue.edit(lease.job_id, **change)
    before = queue.row(lease.job_id)
    answer = Hand(queue)(Settle((outcome(lease, event),)))
    assert keys(answer.refused) == [lease.key]
    assert queue.row(lease.job_id) == before


@pytest.mark.parametrize("second", sorted(OUTCOMES))
@pytest.mark.parametrize("first", sorted(OUTCOMES))
def test_a_repeated_settle_changes_nothing(queue: Queue, first: Event, second: Event) -> None:
    """After an answer that was lost, the same settle or any other is refused and writes nothing."""
    hand = Hand(queue)
    lease = queue.add_running()
    hand(Settle((outcome(lease, first),)))
    before = queue.row(lease.job_id)
    answer = hand(Settle((outcome(lease, second),)))
    assert keys(answer.refused) == [lease.key]
    assert queue.row(lease.job_id) == before


@pytest.mark.parametrize("event", [Event.SNOOZE, Event.RELEASE, Event.RETRY])
def test_an_old_answer_never_ends_a_new_attempt(queue: Queue, event: Event) -> None:
    """The same worker claims a job again, and the late repetition of its first outcome is lost."""
    queue.add()
    hand = Hand(queue)
    (first,) = hand(Claim(1)).leases
    hand(Settle((outcome(first, event, delay=0.0),)))
    (second,) = hand(Claim(1)).leases
    before = queue.row(second.job_id)
    assert keys(hand(Settle((outcome(first, event),))).refused) == [first.key]
    assert queue.row(second.job_id) == before
    assert second.attempt > first.attempt


@pytest.mark.parametrize("reverse", [False, True])
def test_of_two_attempts_in_one_command_the_later_counts(
    queue: Queue,
    reverse: bool,  # noqa: FBT001
) -> None:
    """An outcome of a lost attempt beside one of the present attempt of the same job is refused."""
    lease = queue.add_running(attempts=2)
    old = Lease(lease.job_id, 1, task="a")
    both = [outcome(old, Event.FAIL), outcome(lease, Event.SUCCEED)]
    answer = Hand(queue)(Settle(tuple(reversed(both) if reverse else both)))
    assert keys(answer.refused) == [old.key]
    assert keys(answer.recorded) == [lease.key]
    assert queue.statuses() == {lease.job_id: "succeeded"}


def test_a_deleted_row_is_refused(queue: Queue) -> None:
    """An outcome for a row that is gone is lost like any other."""
    lease, other = queue.add_running(), queue.add_running()
    queue.run("DELETE FROM {jobs} WHERE id = :id", id=lease.job_id)
    answer = Hand(queue)(Settle((outcome(lease, Event.FAIL), outcome(other, Event.SUCCEED))))
    assert keys(answer.refused) == [lease.key]
    assert keys(answer.recorded) == [other.key]


def test_a_late_recovery_never_overwrites_an_outcome(queue: Queue) -> None:
    """A job whose holder settled it after the lease ran out is no longer there to recover."""
    lease = queue.add_running(lease_expires_at=-5)
    Hand(queue)(Settle((outcome(lease, Event.SUCCEED),)))
    before = queue.row(lease.job_id)
    other = Hand(queue, worker="w2")
    assert other(Sweep(Chore.RECOVER)).woke == 0
    assert queue.row(lease.job_id) == before


def test_a_late_outcome_never_overwrites_a_recovery(queue: Queue) -> None:
    """A job that was recovered, and claimed by another, is lost to its first holder."""
    lease = queue.add_running(lease_expires_at=-5)
    other = Hand(queue, worker="w2")
    other(Sweep(Chore.RECOVER))
    hand = Hand(queue)
    assert keys(hand(Settle((outcome(lease, Event.SUCCEED),))).refused) == [lease.key]
    (second,) = other(Claim(1)).leases
    assert keys(hand(Settle((outcome(lease, Event.SUCCEED),))).refused) == [lease.key]
    assert queue.row(lease.job_id)["locked_by"] == "w2"
    assert second.attempt == 2


@POSTGRES
@pytest.mark.every_postgres
@pytest.mark.parametrize("winner", ["recover", "settle"])
def test_recovery_and_outcome_at_once_have_one_winner(
    sync_engine: Engine, queue: Queue, winner: str
) -> None:
    """While one of the two holds the row lock the other waits or skips, and changes nothing."""
    lease = queue.add_running(lease_expires_at=-5)
    settle = Settle((outcome(lease, Event.SUCCEED),))
    if winner == "recover":
        answers: list[Any] = []
        with sync_engine.connect() as connection, connection.begin():
            call = queue.statements.recover(10, "c")
            assert len(connection.execute(*call).all()) == 1
            late = threading.Thread(target=lambda: answers.append(Hand(queue)(settle)))
            late.start()
            late.join(0.2)
            assert late.is_alive(), "the outcome waits for the recovery's row lock"
        late.join(30)
        assert keys(answers[0].refused) == [lease.key]
        assert queue.statuses() == {lease.job_id: "pending"}
    else:
        with sync_engine.connect() as connection, connection.begin():
            (call,) = queue.statements.settle(WORKER, settle.outcomes, "c")
            assert len(connection.execute(*call).all()) == 1
            assert Hand(queue)(Sweep(Chore.RECOVER)).woke == 0
        assert queue.statuses() == {lease.job_id: "succeeded"}


# --- rows that the database refuses ------------------------------------------------------------


def refuse(queue: Queue, job_id: int) -> None:
    """Have a trigger of the user's refuse every update of one row."""
    if queue.connection.dialect.name == "sqlite":
        queue.run(
            f"CREATE TRIGGER mine BEFORE UPDATE ON jobs WHEN OLD.id = {job_id}"
            " BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        )
        return
    queue.run(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF OLD.id = {job_id} THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
    )
    queue.run("CREATE TRIGGER mine BEFORE UPDATE ON {jobs} FOR EACH ROW EXECUTE FUNCTION refuse()")


@pytest.fixture
def without_triggers(queue: Queue) -> Generator[None]:
    """The user's trigger and constraint are gone after the test."""
    yield
    if queue.connection.dialect.name == "postgresql":
        queue.run("DROP TRIGGER IF EXISTS mine ON {jobs}")
        queue.run("ALTER TABLE {jobs} DROP CONSTRAINT IF EXISTS mine")


@pytest.mark.every_postgres
@pytest.mark.usefixtures("without_triggers")
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_row_refused_by_a_trigger_holds_up_no_other(queue: Queue, place: int) -> None:
    """The refused outcome is postponed, not lost; the others are recorded, wherever it stands."""
    leases = [queue.add_running() for _ in range(3)]
    bad = leases[place]
    refuse(queue, bad.job_id)
    before = queue.row(bad.job_id)
    answer = Hand(queue)(Settle(tuple(outcome(lease, Event.SUCCEED) for lease in leases)))
    assert keys(answer.postponed) == [bad.key]
    assert keys(answer.recorded) == [lease.key for lease in leases if lease != bad]
    assert answer.refused == ()
    assert queue.row(bad.job_id) == before
    if queue.connection.dialect.name == "postgresql":
        queue.run("DROP TRIGGER mine ON {jobs}")
    else:
        queue.run("DROP TRIGGER mine")
    assert keys(Hand(queue)(Settle(answer.postponed)).recorded) == [bad.key]


@POSTGRES
@pytest.mark.usefixtures("without_triggers")
def test_a_row_refused_by_a_check_holds_up_no_other(queue: Queue) -> None:
    """A constraint that a user added, and one outcome violates, postpones that outcome alone."""
    queue.run("ALTER TABLE {jobs} ADD CONSTRAINT mine CHECK (last_error NOT LIKE '%secret%')")
    good, bad = queue.add_running(), queue.add_running()
    answer = Hand(queue)(
        Settle((outcome(bad, Event.FAIL, error="secret"), outcome(good, Event.FAIL)))
    )
    assert (keys(answer.postponed), keys(answer.recorded)) == ([bad.key], [good.key])
    assert queue.statuses() == {good.job_id: "failed", bad.job_id: "running"}


@POSTGRES
def test_a_value_that_cannot_be_stored_holds_up_no_other(queue: Queue) -> None:
    """Should a NUL get as far as the database, only its own outcome is postponed."""
    good, bad = queue.add_running(), queue.add_running()
    answer = Hand(queue)(
        Settle((outcome(bad, Event.FAIL, error="a\x00b"), outcome(good, Event.FAIL)))
    )
    assert (keys(answer.postponed), keys(answer.recorded)) == ([bad.key], [good.key])


@POSTGRES
def test_a_broken_connection_is_no_refusal(queue: Queue) -> None:
    """When the server ends the connection, the whole command fails, so that it is sent again."""
    lease = queue.add_running()
    (pid,) = queue.run("SELECT pg_backend_pid()")
    with queue.connection.engine.connect() as other:
        Queue(other).run("SELECT pg_terminate_backend(:pid)", pid=pid[0])
    with pytest.raises(DBAPIError):
        Hand(queue)(Settle((outcome(lease, Event.SUCCEED),)))
    queue.connection.invalidate()


# --- errors ------------------------------------------------------------------------------------


@pytest.mark.every_postgres
def test_the_latest_twenty_errors_are_kept(queue: Queue) -> None:
    """Each failure appends an entry; beyond twenty the oldest go; last_error is the newest."""
    job_id = queue.add(max_attempts=100)
    hand = Hand(queue)
    for n in range(1, KEPT_ERRORS + 4):
        (lease,) = hand(Claim(1)).leases
        hand(Settle((Outcome.raised(lease, f"E: {n}", 0.0),)))
    row = queue.row(job_id)
    assert row["last_error"] == f"E: {KEPT_ERRORS + 3}"
    kept = range(4, KEPT_ERRORS + 4)
    assert [entry["error"] for entry in row["errors"]] == [f"E: {n}" for n in kept]
    assert [entry["attempt"] for entry in row["errors"]] == list(kept)
    assert {entry["worker"] for entry in row["errors"]} == {WORKER}
    assert set(row["errors"][0]) == {"attempt", "at", "worker", "error"}


@pytest.mark.parametrize(
    "error", ["ü €\n\t\"quoted\" 'single' \\ {}", "%s %(x)s :name", "", "x" * 4000]
)
def test_any_text_is_kept_as_an_error(queue: Queue, error: str) -> None:
    """Quotes, percent signs, colons and newlines come back as they were."""
    lease = queue.add_running()
    Hand(queue)(Settle((outcome(lease, Event.FAIL, error=error),)))
    row = queue.row(lease.job_id)
    assert row["last_error"] == error
    assert row["errors"][0]["error"] == error


# --- attempts that are given back --------------------------------------------------------------


@pytest.mark.parametrize("event", [Event.SNOOZE, Event.RELEASE])
def test_an_attempt_given_back_raises_the_bound(queue: Queue, event: Event) -> None:
    """However often a job snoozes or is released, it has as many attempts left as before."""
    job_id = queue.add(max_attempts=2)
    hand = Hand(queue)
    for n in range(1, 6):
        (lease,) = hand(Claim(1)).leases
        assert (lease.attempt, lease.max_attempts) == (n, n + 1)
        hand(Settle((outcome(lease, event, delay=0.0),)))
    row = queue.row(job_id)
    assert (row["attempts"], row["max_attempts"]) == (5, 7)


@pytest.mark.parametrize("event", [Event.SNOOZE, Event.RELEASE])
def test_the_largest_bound_is_raised_no_further(queue: Queue, event: Event) -> None:
    """A bound that somebody set to the largest number of the column does not refuse an outcome."""
    lease = queue.add_running(max_attempts=2**31 - 1)
    assert keys(Hand(queue)(Settle((outcome(lease, event),))).recorded) == [lease.key]
    assert queue.row(lease.job_id)["max_attempts"] == 2**31 - 1


def test_a_delay_of_years_is_stored(queue: Queue) -> None:
    """The longest delay that the library accepts fits into the database."""
    years = 10 * 365.25 * 86400
    lease = queue.add_running()
    with queue.clocked() as now:
        Hand(queue)(Settle((outcome(lease, Event.SNOOZE, delay=years),)))
    assert queue.row(lease.job_id)["run_at"] == now[0].later(years)


# --- notifications -----------------------------------------------------------------------------


@POSTGRES
@pytest.mark.every_postgres
def test_exactly_the_moves_to_pending_are_told(database: Database, sync_engine: Engine) -> None:
    """Listeners hear the task of every job that becomes pending, once, and of no other."""
    with open_queue(sync_engine) as queue, database.cluster.connect(database.name) as listener:
        channel = channel_of(queue.connection, JOBS)
        listener.execute(f'LISTEN "{channel}"'.encode())
        # The marks of workers that rest: who looks anyway need not be notified.
        listener.execute(TAKE_ALL_MARKS, [channel])

        def heard() -> list[tuple[str, str]]:
            queue.run("SELECT pg_notify(:channel, 'end')", channel=channel)
            got: list[tuple[str, str]] = []
            for notice in listener.notifies(timeout=30):
                if notice.payload == "end":
                    break
                got.append((notice.channel, notice.payload))
            return sorted(got)

        hand = Hand(queue, *(str(event) for event in OUTCOMES))
        leases = [queue.add_running(str(event), max_attempts=5) for event in sorted(OUTCOMES)]
        lost = queue.add_running("lost", locked_by="w2")
        hand(Settle((*map(outcome, leases, sorted(OUTCOMES)), outcome(lost, Event.RELEASE))))
        assert heard() == sorted((channel, str(event)) for event in OUTCOMES if MOVES[event].wakes)
        for event in sorted(OUTCOMES):  # alone, each has a statement of its own
            hand(Settle((outcome(queue.add_running(str(event)), event),)))
            assert heard() == ([(channel, str(event))] if MOVES[event].wakes else [])
        queue.run("DELETE FROM {jobs} WHERE status = 'running'")
        queue.add_running("back", lease_expires_at=-5, attempts=1)
        queue.add_running("gone", lease_expires_at=-5, attempts=3)
        assert hand(Sweep(Chore.RECOVER)).woke == 1
        assert heard() == [(channel, "back")]
        hand(Renew((queue.add_running("x"),)))
        queue.add("succeed", attempts=9)
        hand(Claim(5))
        assert heard() == []


# --- renewing ----------------------------------------------------------------------------------


@pytest.mark.every_postgres
def test_renewing_extends_what_is_held_and_names_what_is_lost(queue: Queue) -> None:
    """Held leases move to the full visibility timeout from now; the others are lost, unchanged."""
    held = [queue.add_running(), queue.add_running(lease_expires_at=-5)]  # late, nobody took it
    lost = [
        queue.add_running(locked_by="w2"),
        queue.add_running(attempts=2),
        Lease(10**9, 1),
        Lease(queue.add(), 1),
        Lease(queue.add(status="succeeded", attempts=1), 1),
    ]
    lost[1] = Lease(lost[1].job_id, 1)
    before = queue.rows()
    with queue.clocked() as now:
        answer = Hand(queue, visibility_timeout=42.0)(Renew((*held, *lost)))
    assert answer.lost == {lease.key for lease in lost}
    after = queue.rows()
    for lease in held:
        expected = foretold(before[lease.job_id], Event.RENEW, now[0], visibility=42.0)
        assert after.pop(lease.job_id) == expected
        assert expected is not None
        assert expected["updated_at"] == before.pop(lease.job_id)["updated_at"]
    assert after == before


def test_a_cancelled_job_is_lost_to_its_holder(queue: Queue) -> None:
    """The holder of a job that a person cancelled learns it when it renews."""
    lease = queue.add_running()
    queue.connection.execute(*queue.statements.cancel([lease.job_id])).all()
    hand = Hand(queue)
    assert hand(Renew((lease,))).lost == {lease.key}
    assert keys(hand(Settle((outcome(lease, Event.SUCCEED),))).refused) == [lease.key]
    assert queue.statuses() == {lease.job_id: "cancelled"}


def test_two_attempts_of_a_job_in_one_renewal(queue: Queue) -> None:
    """Of two attempts of one job only the later can be held, and the earlier is reported lost."""
    lease = queue.add_running(attempts=2)
    old = Lease(lease.job_id, 1)
    assert Hand(queue)(Renew((lease, old))).lost == {old.key}
    assert Hand(queue)(Renew((old, lease))).lost == {old.key}


@POSTGRES
@pytest.mark.every_postgres
def test_a_renewal_writes_no_index(queue: Queue) -> None:
    """Renewals are heap-only updates, but where a page is full: they add nothing to an index."""
    leases = tuple(queue.add_running() for _ in range(20))
    hand = Hand(queue)

    def counted() -> tuple[int, int]:
        queue.run("SELECT pg_stat_force_next_flush()")
        (row,) = queue.run(
            "SELECT n_tup_upd, n_tup_hot_upd FROM pg_stat_user_tables"
            " WHERE schemaname = 'jobs' AND relname = 'jobs'"
        )
        return row[0], row[1]

    updated, hot = counted()
    for _ in range(5):
        assert not hand(Renew(leases)).lost
    updated_after, hot_after = counted()
    assert updated_after - updated == 100
    assert hot_after - hot >= 80
