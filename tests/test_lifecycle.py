"""The laws of the table of a job's life. That SQL agrees with the table is tested on databases.

Every law takes the module it judges, so that ``test_mutants.py`` can show that each has teeth.
"""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, fields
from typing import TYPE_CHECKING, Any, cast

import pytest

from sqlalchemy_jobs import lifecycle

if TYPE_CHECKING:
    from types import ModuleType


@pytest.fixture
def life() -> ModuleType:
    """The table that is judged."""
    return lifecycle


def moves(life: ModuleType) -> list[tuple[Any, Any]]:
    """The rows of the table: event and move."""
    return list(life.MOVES.items())


def sources_of(life: ModuleType, target: Any) -> set[Any]:
    """The statuses from which one move leads to *target*."""
    return {source for _, move in moves(life) if move.target is target for source in move.source}


def test_every_event_is_one_row_of_the_table(life: ModuleType) -> None:
    """Each event has a move, and the table holds nothing else."""
    assert set(life.MOVES) == set(life.Event)


def test_every_status_and_event_is_a_move_or_refused(life: ModuleType) -> None:
    """A status and an event are either a move of the table or illegal, and nothing else happens."""
    before = dict(life.MOVES)
    legal = 0
    for status, event in itertools.product(life.Status, life.Event):
        if status in life.MOVES[event].source:
            assert life.advance(status, event) is life.MOVES[event].target
            legal += 1
        else:
            with pytest.raises(life.IllegalMoveError) as caught:
                life.advance(status, event)
            assert str(caught.value) == f"a {status} job cannot {event}"
    assert legal == 17
    assert dict(life.MOVES) == before, "asking must not change the table"


def test_an_illegal_move_is_a_value_error(life: ModuleType) -> None:
    """Callers may catch an illegal move as the wrong value that it is."""
    assert issubclass(life.IllegalMoveError, ValueError)


def test_the_table_cannot_be_changed(life: ModuleType) -> None:
    """Neither the table nor a row of it accepts a change at run time."""
    with pytest.raises(TypeError):
        cast("dict[Any, Any]", life.MOVES)[life.Event.CLAIM] = life.MOVES[life.Event.FAIL]
    with pytest.raises(FrozenInstanceError):
        life.MOVES[life.Event.CLAIM].counts = False


def test_attempts_never_go_down(life: ModuleType) -> None:
    """The only change of the attempts is one more, at the claim, so that no number comes twice."""
    assert [event for event, move in moves(life) if move.counts] == [life.Event.CLAIM]
    assert {field.name for field in fields(life.Move)} == {
        "source",
        "target",
        "guard",
        "counts",
        "allowance",
        "lease",
        "run_at",
        "errors",
        "wakes",
    }, "a new kind of change needs a law here"


def test_giving_an_attempt_back_raises_the_bound(life: ModuleType) -> None:
    """Snoozing and releasing cost no attempt: they raise the bound; ending one never does."""
    giving_back = {
        event for event, move in moves(life) if move.allowance is life.Allowance.GIVE_BACK
    }
    assert giving_back == {life.Event.SNOOZE, life.Event.RELEASE}


def test_the_bound_changes_nowhere_else(life: ModuleType) -> None:
    """A claim settles an open bound, an operator's second chance raises it, the rest keeps it."""
    changed = {
        event: move.allowance
        for event, move in moves(life)
        if move.allowance not in (life.Allowance.KEEP, life.Allowance.GIVE_BACK)
    }
    assert changed == {
        life.Event.CLAIM: life.Allowance.SETTLE,
        life.Event.REQUEUE: life.Allowance.AT_LEAST_ONE_MORE,
    }


def test_a_lease_is_taken_exactly_by_entering_running(life: ModuleType) -> None:
    """Who enters running takes a lease, and nobody else does."""
    for event, move in moves(life):
        enters = move.target is life.Status.RUNNING and life.Status.RUNNING not in move.source
        assert (move.lease is life.Hold.TAKE) is enters, event


def test_a_lease_is_dropped_by_every_move_out_of_running(life: ModuleType) -> None:
    """No row keeps a lease without running, and no move that stays in running drops it."""
    for event, move in moves(life):
        leaves = life.Status.RUNNING in move.source and move.target is not life.Status.RUNNING
        assert (move.lease is life.Hold.DROP) is leaves, event


def test_only_its_holder_extends_a_lease(life: ModuleType) -> None:
    """A lease is extended by one event, which is guarded by the fence and changes nothing else."""
    extending = [(e, m) for e, m in moves(life) if m.lease is life.Hold.EXTEND]
    assert [event for event, _ in extending] == [life.Event.RENEW]
    move = extending[0][1]
    assert move.guard is life.Guard.HOLDER
    assert move.source == {life.Status.RUNNING}
    assert move.target is life.Status.RUNNING
    assert (move.counts, move.wakes) == (False, False)
    assert (move.run_at, move.errors) == (life.RunAt.KEEP, life.Errors.KEEP)


def test_running_is_left_only_under_a_guard_or_by_a_cancellation(life: ModuleType) -> None:
    """Somebody else's attempt ends by its holder, by the end of its lease, or by a person."""
    guards = {
        event: move.guard
        for event, move in moves(life)
        if life.Status.RUNNING in move.source and move.target is not life.Status.RUNNING
    }
    unguarded = {event for event, guard in guards.items() if guard is life.Guard.NONE}
    assert unguarded == {life.Event.CANCEL}
    assert {guard for event, guard in guards.items() if event not in unguarded} == {
        life.Guard.HOLDER,
        life.Guard.EXPIRED,
        life.Guard.EXPIRED_SPENT,
    }


def test_guards_about_a_lease_apply_only_to_running_rows(life: ModuleType) -> None:
    """A guard asks about what a row of that status has: a lease, a time to run or an age."""
    asked_of = {
        life.Guard.DUE: {life.Status.PENDING},
        life.Guard.SPENT: {life.Status.PENDING},
        life.Guard.HOLDER: {life.Status.RUNNING},
        life.Guard.EXPIRED: {life.Status.RUNNING},
        life.Guard.EXPIRED_SPENT: {life.Status.RUNNING},
        life.Guard.AGED: set(life.FINISHED),
    }
    assert set(asked_of) | {life.Guard.NONE} == set(life.Guard)
    for event, move in moves(life):
        if move.guard is not life.Guard.NONE:
            assert move.source == asked_of[move.guard], event


def test_attempts_left_and_attempts_spent_are_both_answered(life: ModuleType) -> None:
    """A due row and an expired lease have one way on with attempts left and one without."""
    assert life.MOVES[life.Event.CLAIM].guard is life.Guard.DUE
    assert life.MOVES[life.Event.EXHAUST].guard is life.Guard.SPENT
    assert life.MOVES[life.Event.EXHAUST].target is life.Status.FAILED
    assert life.MOVES[life.Event.RECOVER].guard is life.Guard.EXPIRED
    assert life.MOVES[life.Event.RECOVER].target is life.Status.PENDING
    assert life.MOVES[life.Event.BURY].guard is life.Guard.EXPIRED_SPENT
    assert life.MOVES[life.Event.BURY].target is life.Status.FAILED


def test_finished_jobs_are_left_only_by_requeue_and_prune(life: ModuleType) -> None:
    """What is finished stays finished until a person asks again or the retention is over."""
    leaving = {event for event, move in moves(life) if move.source & life.FINISHED}
    assert leaving == {life.Event.REQUEUE, life.Event.PRUNE}


def test_a_succeeded_job_is_never_run_again(life: ModuleType) -> None:
    """Even a person cannot requeue a job that succeeded."""
    with pytest.raises(life.IllegalMoveError):
        life.advance(life.Status.SUCCEEDED, life.Event.REQUEUE)


def test_only_pruning_deletes(life: ModuleType) -> None:
    """A row disappears by pruning alone, and pruning knows finished rows alone."""
    deleting = {event for event, move in moves(life) if move.target is None}
    assert deleting == {life.Event.PRUNE}
    assert life.MOVES[life.Event.PRUNE].source == life.FINISHED


def test_every_move_to_pending_wakes_and_no_other(life: ModuleType) -> None:
    """Whatever may have become due wakes somebody; what has not wakes nobody."""
    for event, move in moves(life):
        assert move.wakes is (move.target is life.Status.PENDING), event


def test_every_move_to_pending_says_when(life: ModuleType) -> None:
    """A job that becomes pending runs now or after the given delay, never at a stale time."""
    for event, move in moves(life):
        says_when = move.run_at is not life.RunAt.KEEP
        assert says_when is (move.target is life.Status.PENDING), event


def test_what_went_wrong_is_written_down(life: ModuleType) -> None:
    """Ending by an error, and only that, appends an entry to the record of errors."""
    appending = {event for event, move in moves(life) if move.errors is life.Errors.APPEND}
    assert appending == {
        life.Event.EXHAUST,
        life.Event.RETRY,
        life.Event.FAIL,
        life.Event.RECOVER,
        life.Event.BURY,
    }
    into_failed = {event for event, move in moves(life) if move.target is life.Status.FAILED}
    assert into_failed <= appending, "a dead letter must say why"


def test_the_outcomes_are_the_holders_ways_to_end_an_attempt(life: ModuleType) -> None:
    """A worker can report success, retry, snooze, release and failure, each behind the fence."""
    outcomes = set(life.OUTCOMES)
    assert outcomes == {
        life.Event.SUCCEED,
        life.Event.RETRY,
        life.Event.SNOOZE,
        life.Event.RELEASE,
        life.Event.FAIL,
    }
    for event in outcomes:
        assert life.MOVES[event].source == {life.Status.RUNNING}
        assert life.MOVES[event].guard is life.Guard.HOLDER


def test_unfinished_and_finished_share_the_statuses_out(life: ModuleType) -> None:
    """Every status is unfinished or finished, never both."""
    unfinished, finished = set(life.UNFINISHED), set(life.FINISHED)
    assert unfinished == {life.Status.PENDING, life.Status.RUNNING}
    assert finished == {life.Status.SUCCEEDED, life.Status.FAILED, life.Status.CANCELLED}


def test_jobs_begin_pending_and_reach_every_status(life: ModuleType) -> None:
    """Enqueueing is the only beginning; each status is entered and each can be left again."""
    beginnings = {event for event, move in moves(life) if not move.source}
    assert beginnings == {life.Event.ENQUEUE}
    assert life.MOVES[life.Event.ENQUEUE].target is life.Status.PENDING
    reached = {life.Status.PENDING}
    while True:
        further = {m.target for _, m in moves(life) if m.source & reached} - {None} - reached
        if not further:
            break
        reached |= further
    assert reached == set(life.Status)
    for status in life.Status:
        assert any(status in m.source and m.target is not status for _, m in moves(life)), status


def test_running_is_entered_only_by_a_claim(life: ModuleType) -> None:
    """Nothing runs that was not claimed, and claims take only what is pending."""
    assert sources_of(life, life.Status.RUNNING) == {life.Status.PENDING, life.Status.RUNNING}
    assert life.MOVES[life.Event.CLAIM].source == {life.Status.PENDING}
    assert life.MOVES[life.Event.CLAIM].guard is life.Guard.DUE


def test_the_words_are_what_the_database_stores(life: ModuleType) -> None:
    """The statuses are stored as these words, so that they may not be renamed by the way."""
    assert [str(status) for status in life.Status] == [
        "pending",
        "running",
        "succeeded",
        "failed",
        "cancelled",
    ]
    assert (life.DEFAULT_MAX_ATTEMPTS, life.KEPT_ERRORS) == (3, 20)
