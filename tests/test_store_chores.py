"""Recovering expired leases and pruning finished jobs: bounded, shared and never stuck."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import pytest
from sqlalchemy.exc import DBAPIError

from sqlalchemy_jobs import _store
from sqlalchemy_jobs._messages import Chore, Claim, Settle, Sweep, Swept
from sqlalchemy_jobs._messages import Outcome as Ended
from tests.engines import open_engine
from tests.rows import WORKER, Hand, Queue, open_queue

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from sqlalchemy import Engine

POSTGRES = pytest.mark.drivers("psycopg")
RECOVER, PRUNE = Sweep(Chore.RECOVER), Sweep(Chore.PRUNE)
DAY = 86400.0


@pytest.fixture
def queue(sync_engine: Engine) -> Generator[Queue]:
    """The jobs table, empty."""
    with open_queue(sync_engine) as queue:
        yield queue


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches of five, so that a test needs few rows."""
    monkeypatch.setattr(_store, "RECOVER_BATCH", 5)
    monkeypatch.setattr(_store, "PRUNE_BATCH", 5)


def at_once(engine: Engine, count: int, work: Callable[[Queue], None]) -> None:
    """Run *work* in threads, each with a connection of its own, and raise what one raised."""
    failures: list[BaseException] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        try:
            with open_engine(engine.url) as own, open_queue(own) as queue:
                barrier.wait(30)
                work(queue)
        except BaseException as error:  # noqa: BLE001 - raised below
            failures.append(error)

    threads = [threading.Thread(target=run, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)
    if failures:
        raise failures[0]


# --- recovery ----------------------------------------------------------------------------------


@pytest.mark.every_postgres
def test_an_expired_lease_gives_the_job_back(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """With attempts left the job is due at once, and its error names the worker and the time."""
    lease = queue.add_running(lease_expires_at=-5, run_at=-500, attempts=1, max_attempts=2)
    ended = queue.row(lease.job_id)["lease_expires_at"]
    assert Hand(queue, worker="w2")(RECOVER) == Swept(Chore.RECOVER, more=False, woke=1)
    row = queue.row(lease.job_id)
    assert row["status"] == "pending"
    assert WORKER in row["last_error"]
    assert ended.strftime("%Y-%m-%d %H:%M:%S") in row["last_error"]
    assert row["errors"][-1]["worker"] == WORKER
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "recovered"]
    assert record.job_id == lease.job_id  # type: ignore[attr-defined]
    assert [again.job_id for again in Hand(queue)(Claim(1)).leases] == [lease.job_id]


def test_a_job_that_kills_its_workers_ends(queue: Queue, caplog: pytest.LogCaptureFixture) -> None:
    """Case 9: without an attempt left the job fails, says that none is left, and wakes nobody."""
    lease = queue.add_running(lease_expires_at=-5, attempts=3, max_attempts=3)
    assert Hand(queue)(RECOVER) == Swept(Chore.RECOVER, more=False, woke=0)
    row = queue.row(lease.job_id)
    assert row["status"] == "failed"
    assert WORKER in row["last_error"]
    assert "no attempt is left" in row["last_error"]
    assert [r for r in caplog.records if getattr(r, "event", "") == "buried"]


def test_jobs_of_any_task_are_recovered(queue: Queue) -> None:
    """A worker recovers the jobs of tasks that it does not know, for nobody else may be there."""
    lease = queue.add_running("unknown", lease_expires_at=-5)
    Hand(queue, "a")(RECOVER)
    assert queue.statuses() == {lease.job_id: "pending"}


def test_a_live_lease_is_left_alone(queue: Queue) -> None:
    """A lease that has not run out is not touched, however long the attempt has been running."""
    lease = queue.add_running(lease_expires_at=1, started_at=-9000, timeout_s=1.0)
    before = queue.row(lease.job_id)
    Hand(queue)(RECOVER)
    assert queue.row(lease.job_id) == before


def test_a_restart_under_the_same_name_recovers_like_any_other(queue: Queue) -> None:
    """Names are unique to the process start; should one come twice, the attempt still fences."""
    old = queue.add_running(lease_expires_at=-5)
    hand = Hand(queue)
    hand(RECOVER)
    (new,) = hand(Claim(1)).leases
    assert hand(Settle((Ended.succeeded(old),))).refused
    assert hand(Settle((Ended.succeeded(new),))).recorded


@pytest.mark.usefixtures("small_batches")
def test_recovery_goes_in_bounded_batches(queue: Queue) -> None:
    """One sweep recovers at most a batch and says whether there may be more."""
    for _ in range(12):
        queue.add_running(lease_expires_at=-5)
    hand = Hand(queue)
    answers = [hand(RECOVER) for _ in range(4)]
    assert [(answer.woke, answer.more) for answer in answers] == [
        (5, True),
        (5, True),
        (2, False),
        (0, False),
    ]


@pytest.mark.parametrize(
    "change",
    [{"max_attempts": None}, {"max_attempts": 0}, {"errors": {}}, {"errors": None}],
    ids=str,
)
def test_a_row_that_a_hand_edited_is_recovered(queue: Queue, change: dict[str, Any]) -> None:
    """Neither an open bound nor a spoilt record of errors keeps a job running for ever."""
    lease = queue.add_running(lease_expires_at=-5)
    queue.edit(lease.job_id, **change)
    Hand(queue)(RECOVER)
    row = queue.row(lease.job_id)
    assert row["status"] == ("failed" if change.get("max_attempts") == 0 else "pending")
    assert len(row["errors"]) == 1


def refuse(queue: Queue, job_ids: list[int]) -> None:
    """Have a trigger of the user's refuse every update of some rows."""
    bad = ", ".join(map(str, job_ids))
    if queue.connection.dialect.name == "sqlite":
        queue.run(
            f"CREATE TRIGGER mine BEFORE UPDATE ON jobs WHEN OLD.id IN ({bad})"
            " BEGIN SELECT RAISE(ABORT, 'not this one'); END"
        )
        return
    queue.run(
        "CREATE OR REPLACE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN"
        f" IF OLD.id IN ({bad}) THEN RAISE EXCEPTION 'not this one'; END IF; RETURN NEW; END $$"
    )
    queue.run("CREATE TRIGGER mine BEFORE UPDATE ON {jobs} FOR EACH ROW EXECUTE FUNCTION refuse()")


@pytest.fixture
def without_trigger(queue: Queue) -> Generator[None]:
    """The user's trigger is gone after the test."""
    yield
    if queue.connection.dialect.name == "postgresql":
        queue.run("DROP TRIGGER IF EXISTS mine ON {jobs}")


@pytest.mark.every_postgres
@pytest.mark.usefixtures("without_trigger", "small_batches")
def test_one_bad_row_does_not_keep_the_others(
    queue: Queue, caplog: pytest.LogCaptureFixture
) -> None:
    """A row that a user's trigger refuses stays, is logged, and all the others are recovered."""
    leases = [queue.add_running(lease_expires_at=-5) for _ in range(4)]
    bad = leases[1].job_id
    refuse(queue, [bad])
    assert Hand(queue)(RECOVER).woke == 3
    assert [i for i, status in queue.statuses().items() if status == "running"] == [bad]
    (record,) = [r for r in caplog.records if getattr(r, "event", "") == "unrecoverable"]
    assert record.job_id == bad  # type: ignore[attr-defined]


@pytest.mark.usefixtures("without_trigger", "small_batches")
def test_a_batch_of_bad_rows_does_not_hide_those_behind(queue: Queue) -> None:
    """More bad rows than a batch holds do not keep the good ones behind them from recovery."""
    bad = [queue.add_running(lease_expires_at=-50).job_id for _ in range(7)]
    good = [queue.add_running(lease_expires_at=-5).job_id for _ in range(7)]
    refuse(queue, bad)
    assert Hand(queue)(RECOVER).woke == 7
    assert {i for i, status in queue.statuses().items() if status == "pending"} == set(good)


@pytest.mark.usefixtures("without_trigger")
def test_recovery_that_recovers_nothing_fails(queue: Queue) -> None:
    """When only bad rows are left the sweep fails, so that it backs off instead of spinning."""
    refuse(queue, [queue.add_running(lease_expires_at=-5).job_id])
    with pytest.raises(DBAPIError, match="not this one"):
        Hand(queue)(RECOVER)


@POSTGRES
@pytest.mark.every_postgres
def test_recoveries_at_once_do_not_collide(sync_engine: Engine, queue: Queue) -> None:
    """Four workers recover at once: no error, no wait, and each job exactly once."""
    queue.run(
        "INSERT INTO {jobs} (task, status, attempts, max_attempts, locked_by, lease_expires_at)"
        " SELECT 'a', 'running', 1, 3, 'dead', now() - interval '1 minute'"
        " FROM generate_series(1, 500)"
    )
    woke: list[int] = []

    def sweep(own: Queue) -> None:
        hand = Hand(own, worker="w")
        while answer := hand(RECOVER):
            woke.append(answer.woke)
            if not answer.more:
                return

    at_once(sync_engine, 4, sweep)
    Hand(queue)(RECOVER)  # what two claimed each other's rows of, at the very end
    rows = queue.rows().values()
    assert {row["status"] for row in rows} == {"pending"}
    assert {len(row["errors"]) for row in rows} == {1}


@POSTGRES
def test_recovery_skips_what_another_is_recovering(sync_engine: Engine, queue: Queue) -> None:
    """Rows that another worker has locked are passed over without waiting."""
    leases = [queue.add_running(lease_expires_at=-5) for _ in range(4)]
    queue.run("SET lock_timeout = '2s'")
    with sync_engine.connect() as other, other.begin():
        assert len(other.execute(*queue.statements.recover(2, "c")).all()) == 2
        assert Hand(queue)(RECOVER).woke == 2
        other.rollback()
    assert Hand(queue)(RECOVER).woke == 2
    assert set(queue.statuses()) == {lease.job_id for lease in leases}


# --- pruning -----------------------------------------------------------------------------------


@pytest.mark.every_postgres
def test_each_status_has_its_own_retention(queue: Queue) -> None:
    """By default succeeded and cancelled jobs are kept for three days, failed ones for thirty."""
    ages = {2: "young", 4: "middle", 31: "old"}
    jobs = {
        (status, age): queue.add(status=status, updated_at=-age * DAY)
        for status in ("succeeded", "cancelled", "failed")
        for age in ages
    }
    assert Hand(queue)(PRUNE) == Swept(Chore.PRUNE, more=False)
    kept = {key for key, job_id in jobs.items() if job_id in queue.statuses()}
    assert kept == {
        ("succeeded", 2),
        ("cancelled", 2),
        ("failed", 2),
        ("failed", 4),
    }


@pytest.mark.every_postgres
@pytest.mark.parametrize("kept", ["succeeded", "cancelled", "failed"])
def test_none_keeps_for_ever(queue: Queue, kept: str) -> None:
    """A retention of None keeps the jobs of that status, whatever their age, and of no other."""
    for status in ("succeeded", "cancelled", "failed"):
        queue.add(status=status, updated_at=-3650 * DAY)
    options: dict[str, Any] = {f"retain_{kept}": None}
    Hand(queue, **options)(PRUNE)
    assert list(queue.statuses().values()) == [kept]


def test_none_for_all_keeps_all(queue: Queue) -> None:
    """Without any retention nothing is ever deleted."""
    for status in ("succeeded", "cancelled", "failed"):
        queue.add(status=status, updated_at=-3650 * DAY)
    hand = Hand(queue, retain_succeeded=None, retain_cancelled=None, retain_failed=None)
    assert hand(PRUNE) == Swept(Chore.PRUNE, more=False)
    assert len(queue.statuses()) == 3


def test_a_retention_of_zero_deletes_at_the_next_sweep(queue: Queue) -> None:
    """Zero seconds is a retention too: whatever has finished before the sweep goes."""
    queue.add(status="succeeded", updated_at=-0.1)
    queue.add(status="failed", updated_at=-0.1)
    Hand(queue, retain_succeeded=0)(PRUNE)
    assert list(queue.statuses().values()) == ["failed"]


def test_unfinished_jobs_are_never_pruned(queue: Queue) -> None:
    """Neither a pending nor a running job grows too old."""
    queue.add(updated_at=-3650 * DAY, run_at=-3650 * DAY)
    queue.add_running(updated_at=-3650 * DAY, lease_expires_at=-3650 * DAY)
    Hand(queue, retain_succeeded=0, retain_cancelled=0, retain_failed=0)(PRUNE)
    assert list(queue.statuses().values()) == ["pending", "running"]


@pytest.mark.usefixtures("small_batches")
def test_pruning_goes_in_bounded_batches_from_the_oldest(queue: Queue) -> None:
    """One sweep deletes at most a batch, the oldest first, and says whether there may be more."""
    jobs = [queue.add(status="succeeded", updated_at=-(10 + n) * DAY) for n in range(12)]
    hand = Hand(queue)
    assert hand(PRUNE).more
    assert list(queue.statuses()) == jobs[:7]
    assert [hand(PRUNE).more for _ in range(2)] == [True, False]
    assert queue.statuses() == {}


@POSTGRES
@pytest.mark.every_postgres
def test_pruning_skips_what_another_is_pruning(sync_engine: Engine, queue: Queue) -> None:
    """Two workers that prune at once neither wait for each other nor fail."""
    for n in range(6):
        queue.add(status="succeeded", updated_at=-(10 + n) * DAY)
    queue.run("SET lock_timeout = '2s'")
    hand = Hand(queue)
    with sync_engine.connect() as other, other.begin():
        call = queue.statements.prune(2, hand.settings.retention)
        assert len(other.execute(*call).all()) == 2
        assert not hand(PRUNE).more
        assert len(queue.statuses()) == 2, "those two that the other has deleted, uncommitted"
    assert queue.statuses() == {}


@POSTGRES
@pytest.mark.every_postgres
@pytest.mark.usefixtures("small_batches")
def test_pruning_at_once_deletes_everything_once(sync_engine: Engine, queue: Queue) -> None:
    """Four workers prune the same rows without a deadlock."""
    queue.run(
        "INSERT INTO {jobs} (task, status, updated_at) SELECT 'a', 'succeeded',"
        " now() - interval '10 days' FROM generate_series(1, 300)"
    )
    fresh = queue.add(status="succeeded")

    def sweep(own: Queue) -> None:
        hand = Hand(own)
        while hand(PRUNE).more:
            pass

    at_once(sync_engine, 4, sweep)
    while Hand(queue)(PRUNE).more:
        pass
    assert list(queue.statuses()) == [fresh]
