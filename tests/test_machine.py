"""The worker's machine by plain examples: each row of its tables and each of its laws once.

Values in, values out: no clock and no database. Histories that nobody thought of are the matter
of ``test_machine_stateful.py``; ``test_mutants.py`` breaks the machine on purpose and expects
these examples, or those histories, to notice. Every test takes *make*, which builds a machine on
a virtual clock, so that a broken machine can be put in its place.
"""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pytest

from sqlalchemy_jobs import _machine
from sqlalchemy_jobs._messages import (
    Abort,
    Broke,
    Chore,
    Claim,
    Claimed,
    Command,
    DatabaseCommand,
    Event,
    Finished,
    Interrupt,
    Lease,
    ListenerChanged,
    Notified,
    Outcome,
    Reason,
    Renew,
    Renewed,
    Settle,
    Settled,
    Start,
    Stop,
    StopRequested,
    Sweep,
    Swept,
    Tick,
    Wait,
)
from sqlalchemy_jobs.lifecycle import Event as Life

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import ModuleType

T = TypeVar("T")
DAY = 86_400.0


def lease(job_id: int, attempt: int = 1, **details: Any) -> Lease:
    """A claimed job of some task."""
    return Lease(job_id, attempt, "task", **details)


def timed_out(overdue: Lease) -> Outcome:
    """What the shell would make of an overdue attempt."""
    return Outcome.raised(overdue, "timed out", delay=1.0)


class Rig:
    """A machine, a virtual clock, and what the machine has asked for and got no answer to."""

    def __init__(
        self, module: ModuleType, *, jitter: Callable[[], float] = lambda: 0.0, **settings: Any
    ) -> None:
        self.now = 1_000_000.0  # a monotonic clock does not start at zero
        self.machine = module.Machine(
            module.Timing(**settings), timed_out=timed_out, jitter=jitter, now=self.now
        )
        self.flying: list[DatabaseCommand] = []
        self.said: list[Command] = []
        self.until = self.now

    def tell(self, *events: Event) -> list[Command]:
        """Hand *events* over now; return what the machine wants done beside waiting."""
        commands = self.machine.handle(events, self.now)
        waits = [command for command in commands if isinstance(command, Wait | Stop)]
        assert len(waits) == 1, "every answer ends with one Wait, or is the last"
        assert commands[-1] is waits[0]
        if isinstance(waits[0], Wait):
            self.until = waits[0].until
            assert self.now < self.until <= self.now + 3600.0
        self.said = [command for command in commands if not isinstance(command, Wait)]
        self.flying += [c for c in self.said if isinstance(c, Claim | Settle | Renew | Sweep)]
        return self.said

    def after(self, seconds: float, *events: Event) -> list[Command]:
        """Let *seconds* pass unobserved, then hand *events* over, or a Tick."""
        self.now += seconds
        return self.tell(*events or (Tick(),))

    def wait(self) -> list[Command]:
        """Let the time pass that the machine wants to wait."""
        return self.after(self.until - self.now)

    def flight(self, kind: type[T]) -> T:
        """The only command of *kind* that waits for its answer."""
        flying = only(self.flying, kind)
        assert len(flying) == 1, f"one {kind.__name__} must be in flight, not {flying}"
        return flying[0]

    def flies(self, kind: type[T]) -> bool:
        """Whether a command of *kind* waits for its answer."""
        return any(isinstance(command, kind) for command in self.flying)

    def land(self, kind: type[T]) -> T:
        """Take the command of *kind* out of the air: its answer comes now."""
        command = self.flight(kind)
        self.flying = [other for other in self.flying if other is not command]
        return command

    def claimed(self, *leases: Lease, **rest: Any) -> list[Command]:
        """Answer the Claim."""
        self.land(Claim)
        return self.tell(Claimed(leases, **rest))

    def settled(self, **rest: Any) -> list[Command]:
        """Answer the Settle."""
        self.land(Settle)
        return self.tell(Settled(**rest))

    def renewed(self, *lost: Lease) -> list[Command]:
        """Answer the Renew."""
        command = self.land(Renew)
        return self.tell(Renewed(command, frozenset(one.key for one in lost)))

    def swept(self, **rest: Any) -> list[Command]:
        """Answer the Sweep."""
        return self.tell(Swept(self.land(Sweep).chore, **rest))

    def broke(self, kind: type[DatabaseCommand]) -> list[Command]:
        """Let the command of *kind* fail."""
        return self.tell(Broke(self.land(kind), "connection refused"))

    def succeed(self, *leases: Lease) -> list[Command]:
        """Let these handlers return."""
        return self.tell(*(Finished(Outcome.succeeded(one)) for one in leases))

    def swept_up(self) -> Rig:
        """Past the first ticks, with both chores done and the first Claim in flight."""
        self.tell(Tick())
        self.swept()
        self.swept()
        return self

    def busy_with(self, *leases: Lease, **rest: Any) -> Rig:
        """Past the start, with handlers running and, slots or not, nothing more to find."""
        self.swept_up().claimed(*leases, **rest)
        if self.flies(Claim):
            self.claimed()
        return self


class MakeRig(Protocol):
    """Builds a rig around the machine that is tested."""

    def __call__(self, *, jitter: Callable[[], float] = ..., **settings: Any) -> Rig:
        """Take the machine's jitter and its settings."""
        ...


@pytest.fixture
def make() -> MakeRig:
    """The rig around the machine itself, and not a broken one."""
    return partial(Rig, _machine)


def only(commands: Sequence[Command], kind: type[T]) -> list[T]:
    """The commands of one kind."""
    return [command for command in commands if isinstance(command, kind)]


# --- looking for work -------------------------------------------------------------------------


def test_a_worker_starts_with_a_full_look_and_both_chores(make: MakeRig) -> None:
    """The first commands are a claim that trusts no memory and recovery, then pruning."""
    rig = make(concurrency=3)
    assert rig.tell(Tick()) == [Claim(3, full=True), Sweep(Chore.RECOVER)]
    assert rig.swept() == [Sweep(Chore.PRUNE)]
    assert rig.swept() == []
    assert rig.machine.phase.name == "RUNNING"


def test_claimed_jobs_start_in_their_order(make: MakeRig) -> None:
    """Each lease is started once, in the order of the claim, and occupies a slot."""
    rig = make(concurrency=3).swept_up()
    assert rig.claimed(lease(7), lease(3)) == [Start(lease(7)), Start(lease(3))]
    assert rig.machine.running == (lease(7), lease(3))
    assert rig.machine.free == 1


def test_no_more_is_claimed_than_slots_are_free(make: MakeRig) -> None:
    """The limit of a claim is the number of free slots, and without one there is no claim."""
    rig = make(concurrency=2).swept_up()
    assert rig.flight(Claim).limit == 2
    assert only(rig.claimed(lease(1), more=True), Claim) == [Claim(1, full=False)]
    assert only(rig.claimed(lease(2), more=True), Claim) == []
    assert rig.machine.free == 0
    assert only(rig.after(99.0, Notified(), Tick()), Claim) == []


def test_a_slot_that_gets_free_is_filled_at_once_while_there_is_more(make: MakeRig) -> None:
    """One slow job does not hold back the next claim of the others' slots."""
    rig = make(concurrency=2).swept_up()
    rig.claimed(lease(1), lease(2), more=True)
    said = rig.succeed(lease(1))
    assert only(said, Claim) == [Claim(1, full=False)]
    assert only(said, Settle) == [Settle((Outcome.succeeded(lease(1)),))]


def test_while_there_is_more_the_next_claim_follows_at_once(make: MakeRig) -> None:
    """A claim whose answer says that more is due is followed by another without waiting."""
    rig = make().swept_up()
    assert only(rig.claimed(lease(1), more=True), Claim) == [Claim(4, full=False)]


def test_a_look_that_saw_only_locked_jobs_does_not_spin(make: MakeRig) -> None:
    """If others hold everything that is due, the next look waits a moment."""
    rig = make().swept_up()
    assert rig.claimed(more=True) == []
    assert rig.until == pytest.approx(rig.now + 0.005)
    assert only(rig.wait(), Claim) != []


def test_an_empty_answer_from_memory_is_not_believed(make: MakeRig) -> None:
    """A claim that trusted its memory and found no more is followed by one that does not."""
    rig = make().swept_up()
    rig.claimed(lease(1), more=True)
    assert rig.flight(Claim).full is False
    assert only(rig.claimed(), Claim) == [Claim(4, full=True)]
    assert only(rig.claimed(), Claim) == []


def test_a_few_jobs_from_memory_are_not_believed_to_be_all(make: MakeRig) -> None:
    """The same when that claim found some jobs, but no sign of more."""
    rig = make().swept_up()
    rig.claimed(lease(1), more=True)
    assert only(rig.claimed(lease(2)), Claim) == [Claim(3, full=True)]


def test_even_a_busy_worker_looks_at_everything_every_two_seconds(make: MakeRig) -> None:
    """While there is always more, memory is trusted for two seconds at most."""
    rig = make(concurrency=1).swept_up()
    looks = []
    for number in range(1, 81):  # a job each eighth of a second
        rig.claimed(lease(number), more=True)
        rig.after(0.125)
        rig.succeed(lease(number))
        rig.settled()
        if rig.flight(Claim).full:
            looks.append(number)
    assert looks == [16, 32, 48, 64, 80]


def test_idle_polling_backs_off_and_returns_with_work(make: MakeRig) -> None:
    """Without notifications the pause doubles from 2 s to 30 s, and work brings it back to 2 s."""
    rig = make(recovery_interval=3000.0).swept_up()
    pauses = []
    for _ in range(7):
        rig.claimed()
        pauses.append(rig.until - rig.now)
        assert rig.wait() == [Claim(5, full=True)]
    assert pauses == [2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0]
    rig.claimed(lease(1))
    assert rig.until - rig.now == 2.0
    rig.succeed(lease(1))
    rig.settled()
    rig.wait()
    rig.claimed()
    assert rig.until - rig.now == 2.0


def test_idle_polls_of_many_workers_spread(make: MakeRig) -> None:
    """The pause is drawn out by up to a tenth, so that workers do not look in step."""
    rig = make(jitter=lambda: 0.5, recovery_interval=3000.0).swept_up()
    rig.claimed()
    assert rig.until - rig.now == pytest.approx(2.1)


def test_with_notifications_an_idle_worker_looks_every_half_minute(make: MakeRig) -> None:
    """A listening worker still looks, for safety, every 30 s: neither less nor more."""
    rig = make(recovery_interval=3000.0).swept_up()
    rig.tell(ListenerChanged(up=True))
    rig.claimed()
    rig.claimed()
    for _ in range(3):
        assert rig.until - rig.now == 30.0
        assert rig.wait() == [Claim(5, full=True)]
        rig.claimed()


def idle_day(rig: Rig) -> int:
    """Count the claims of a day on which nothing happens."""
    claims = 0
    end = rig.now + DAY
    rig.tell(Tick())
    while rig.now < end:
        if rig.flies(Claim):
            claims += 1
            rig.claimed()
        elif rig.flies(Sweep):
            rig.swept()
        else:
            rig.wait()
    return claims


def test_a_day_of_idle_polling_is_cheap(make: MakeRig) -> None:
    """With the defaults and no notifications, an idle day costs at most 2,900 claims."""
    assert 2_600 <= idle_day(make()) <= 2_900


def test_a_day_of_idle_listening_is_cheap(make: MakeRig) -> None:
    """With the defaults and notifications, an idle day costs at most 2,900 claims."""
    rig = make()
    rig.tell(ListenerChanged(up=True))
    assert 2_600 <= idle_day(rig) <= 2_900


def test_the_next_look_is_when_the_next_job_is_due(make: MakeRig) -> None:
    """A job that becomes due before the next poll is looked for exactly then."""
    for up in (False, True):
        rig = make().swept_up()
        rig.claimed()
        rig.tell(ListenerChanged(up=up))
        rig.claimed(next_due=0.75)
        assert rig.until == rig.now + 0.75
        assert rig.wait() == [Claim(5, full=True)]


def test_a_job_due_at_once_is_not_waited_for_in_a_spin(make: MakeRig) -> None:
    """However soon the next job is due, looks are 5 ms apart."""
    rig = make().swept_up()
    rig.claimed(next_due=0.000_001)
    assert rig.until == pytest.approx(rig.now + 0.005)
    rig.wait()
    rig.claimed(next_due=-3.0)
    assert rig.until == pytest.approx(rig.now + 0.005)


def test_a_job_due_later_than_the_next_poll_does_not_delay_it(make: MakeRig) -> None:
    """A far due time is no reason to look less often."""
    rig = make().swept_up()
    rig.claimed(next_due=500.0)
    assert rig.until == rig.now + 2.0


def test_a_notification_makes_the_worker_look_at_once(make: MakeRig) -> None:
    """Whatever the pause was, a notified worker looks now, and trusts no memory."""
    rig = make().swept_up()
    rig.claimed()
    assert rig.after(0.5, Notified()) == [Claim(5, full=True)]


def test_a_notification_during_a_claim_means_look_again(make: MakeRig) -> None:
    """The claim in flight may have looked too early, so another follows it: one, however many."""
    rig = make().swept_up()
    assert rig.tell(Notified(), Notified(), Notified()) == []
    assert rig.claimed() == [Claim(5, full=True)]
    assert rig.claimed() == []


def test_a_notification_during_a_claim_that_found_more_asks_for_a_full_look(make: MakeRig) -> None:
    """The next claim would follow anyway, but then it must not trust its memory."""
    rig = make().swept_up()
    rig.tell(Notified())
    assert only(rig.claimed(lease(1), more=True), Claim) == [Claim(4, full=True)]


def test_a_notification_without_a_free_slot_is_remembered(make: MakeRig) -> None:
    """A full worker that was notified looks as soon as a slot gets free."""
    rig = make(concurrency=1).busy_with(lease(1))
    assert rig.tell(Notified()) == []
    assert only(rig.succeed(lease(1)), Claim) == [Claim(1, full=True)]


def test_a_change_of_the_listener_makes_the_worker_look(make: MakeRig) -> None:
    """What was sent while nobody listened is found by a look right after, up or down."""
    for up in (True, False):
        rig = make().swept_up()
        rig.claimed()
        assert rig.tell(ListenerChanged(up)) == [Claim(5, full=True)]


def test_polling_takes_over_when_the_listener_goes_down(make: MakeRig) -> None:
    """Without notifications the pauses start again at 2 s."""
    rig = make(recovery_interval=3000.0).swept_up()
    rig.tell(ListenerChanged(up=True))
    rig.claimed()
    rig.claimed()
    rig.tell(ListenerChanged(up=False))
    rig.claimed()
    assert rig.until - rig.now == 2.0


def test_a_recovery_that_gave_work_back_makes_the_worker_look(make: MakeRig) -> None:
    """Recovered jobs are due at once; sweeping without a find changes nothing."""
    rig = make(jitter=lambda: 0.0).swept_up()
    rig.claimed(next_due=None)
    rig.now += 60.0
    rig.tell(Tick())
    rig.claimed()
    assert only(rig.swept(woke=0), Claim) == []
    rig.now += 60.0
    rig.tell(Tick())
    rig.claimed()
    assert only(rig.swept(woke=2), Claim) == [Claim(5, full=True)]


# --- running ----------------------------------------------------------------------------------


def test_a_second_tick_at_the_same_time_changes_nothing(make: MakeRig) -> None:
    """After any event the machine has planned all there is to plan."""
    rig = make(concurrency=2)
    steps: list[Callable[[], object]] = [
        lambda: rig.tell(Tick()),
        lambda: rig.claimed(lease(1, timeout=5.0), lease(2), more=True),
        lambda: rig.swept(more=True),
        lambda: rig.succeed(lease(2)),
        lambda: rig.after(5.0),
        lambda: rig.broke(Settle),
        lambda: rig.after(200.0),
        lambda: rig.tell(StopRequested()),
    ]
    for step in steps:
        step()
        until = rig.until
        assert rig.tell(Tick()) == []
        assert rig.until == until


def test_outcomes_that_wait_go_out_together(make: MakeRig) -> None:
    """While a Settle is in flight outcomes gather, and the next one takes them all."""
    leases = [lease(number) for number in range(1, 6)]
    rig = make().busy_with(*leases)
    assert only(rig.succeed(leases[0]), Settle) == [Settle((Outcome.succeeded(leases[0]),))]
    for one in leases[1:4]:
        assert only(rig.succeed(one), Settle) == []
    assert only(rig.settled(), Settle) == [
        Settle(tuple(Outcome.succeeded(one) for one in leases[1:4]))
    ]
    assert rig.machine.held == (leases[4], *leases[1:4])


def test_a_slow_settle_holds_back_neither_slot_nor_claim(make: MakeRig) -> None:
    """An ended attempt frees its slot before its outcome is recorded."""
    rig = make(concurrency=1).swept_up()
    rig.claimed(lease(1), more=True)
    said = rig.succeed(lease(1))
    assert said == [Settle((Outcome.succeeded(lease(1)),)), Claim(1, full=False)]
    assert rig.machine.free == 1


def test_an_outcome_is_kept_until_it_is_recorded(make: MakeRig) -> None:
    """A Settle that failed is sent again with everything, and with what ended since."""
    rig = make().busy_with(lease(1), lease(2))
    rig.succeed(lease(1))
    assert only(rig.broke(Settle), Settle) == []
    assert rig.machine.held == (lease(2), lease(1))
    rig.succeed(lease(2))
    assert not rig.flies(Settle), "a failing command waits, also for new outcomes"
    rig.wait()
    both = (Outcome.succeeded(lease(1)), Outcome.succeeded(lease(2)))
    assert rig.flight(Settle).outcomes == both
    rig.settled()
    assert rig.machine.held == ()


def test_a_refused_outcome_is_forgotten(make: MakeRig) -> None:
    """What the database refuses was lost or recorded before; sending it again is pointless."""
    rig = make().busy_with(lease(1))
    rig.succeed(lease(1))
    assert rig.settled(refused=(Outcome.succeeded(lease(1)),)) == []
    assert rig.machine.held == ()


def test_a_postponed_outcome_waits_alone(make: MakeRig) -> None:
    """One row that the database refuses is tried again ever later; the others go on at once."""
    rig = make(jitter=lambda: 0.999_999, recovery_interval=3000.0).busy_with(lease(1), lease(2))
    bad, good = Outcome.succeeded(lease(1)), Outcome.succeeded(lease(2))
    rig.tell(Finished(bad))
    pauses = []
    for _ in range(8):
        start = rig.now
        rig.settled(postponed=(bad,))
        while not rig.flies(Settle):
            rig.wait()
            if rig.flies(Claim):
                rig.claimed()
            if rig.flies(Renew):
                rig.renewed()
        pauses.append(round(rig.now - start))
        assert rig.flight(Settle).outcomes == (bad,)
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]
    rig.settled(postponed=(bad,))
    assert only(rig.tell(Finished(good)), Settle) == [Settle((good,))]
    rig.settled()
    assert rig.machine.held == (lease(1),)


def test_a_job_put_back_is_looked_for_when_it_is_due(make: MakeRig) -> None:
    """A recorded retry is due after its delay, and this worker looks then, to the moment."""
    rig = make(concurrency=1, recovery_interval=3000.0).busy_with(lease(1))
    rig.tell(Finished(Outcome.raised(lease(1), "boom", delay=0.25)))
    rig.settled()
    assert rig.until == rig.now + 0.25
    assert only(rig.wait(), Claim) != []


def test_a_job_put_back_for_now_is_looked_for_at_once(make: MakeRig) -> None:
    """A retry without delay does not wait for the next poll."""
    rig = make().busy_with(lease(1))
    rig.tell(Finished(Outcome.raised(lease(1), "boom", delay=0.0)))
    assert only(rig.settled(), Claim) == [Claim(5, full=True)]


def test_a_job_put_back_during_a_claim_is_not_forgotten(make: MakeRig) -> None:
    """The claim in flight may have looked before the retry was recorded; its due time counts."""
    rig = make(recovery_interval=3000.0).busy_with(lease(1))
    rig.tell(Finished(Outcome.raised(lease(1), "boom", delay=0.25)), Notified())
    assert rig.flies(Claim)
    rig.settled()
    put_back = rig.now
    rig.now += 0.125
    rig.claimed()
    assert rig.until == put_back + 0.25
    assert only(rig.wait(), Claim) != []


def test_a_job_put_back_is_looked_for_once(make: MakeRig) -> None:
    """The claim that takes it when it is due needs no other after it."""
    rig = make(recovery_interval=3000.0).busy_with(lease(1))
    rig.tell(Finished(Outcome.raised(lease(1), "boom", delay=0.25)))
    rig.settled()
    assert only(rig.wait(), Claim) == [Claim(5, full=True)]
    assert only(rig.claimed(lease(1, attempt=2)), Claim) == []


def test_a_recorded_success_is_no_reason_to_look(make: MakeRig) -> None:
    """What ended for good frees a slot but makes nothing due."""
    rig = make().busy_with(lease(1), lease(2))
    rig.succeed(lease(1))
    assert rig.settled() == []
    rig.tell(Finished(Outcome.failed(lease(2), "no")))
    assert rig.settled() == []


def test_unknown_and_repeated_ends_are_ignored(make: MakeRig) -> None:
    """An attempt ends once: a second end and the end of something unknown change nothing."""
    rig = make().busy_with(lease(1))
    assert rig.succeed(lease(9)) == []
    assert rig.succeed(lease(1, attempt=2)) == []
    first = Outcome.succeeded(lease(1))
    rig.tell(Finished(first), Finished(Outcome.failed(lease(1), "late")))
    assert rig.flight(Settle).outcomes == (first,)
    rig.settled()
    assert rig.tell(Finished(first)) == []
    assert rig.machine.held == ()


# --- timeouts ---------------------------------------------------------------------------------


def test_an_overdue_attempt_is_failed_and_its_slot_is_free(make: MakeRig) -> None:
    """At the deadline, not before: an abort, an outcome, and a slot for the next job."""
    rig = make(concurrency=1).swept_up()
    rig.claimed(lease(1, timeout=10.0), more=True)
    assert rig.until == rig.now + 10.0
    assert rig.after(9.999) == []
    said = rig.wait()
    assert said == [
        Abort(lease(1), Reason.TIMEOUT),
        Settle((timed_out(lease(1)),)),
        Claim(1, full=True),
    ]
    assert rig.machine.running == ()
    assert rig.machine.held == (lease(1),)


def test_a_result_after_the_deadline_is_dropped(make: MakeRig) -> None:
    """The attempt has been failed already; what its thread returns later is not an outcome."""
    rig = make().busy_with(lease(1, timeout=10.0))
    rig.after(10.0)
    assert rig.flight(Settle).outcomes == (timed_out(lease(1)),)
    assert only(rig.succeed(lease(1)), Settle) == []
    rig.settled()
    assert not rig.flies(Settle)
    assert rig.machine.held == ()


def test_a_result_that_comes_with_the_deadline_counts(make: MakeRig) -> None:
    """A result that is in the inbox when the deadline is noticed wins."""
    rig = make().busy_with(lease(1, timeout=10.0))
    said = rig.after(10.0, Finished(Outcome.succeeded(lease(1))))
    assert only(said, Abort) == []
    assert only(said, Settle) == [Settle((Outcome.succeeded(lease(1)),))]


def test_without_a_timeout_a_renewed_attempt_runs_for_ever(make: MakeRig) -> None:
    """Neither None nor zero is a limit, and a slow handler on a live worker keeps its job."""
    rig = make(jitter=lambda: 0.5).busy_with(lease(1, timeout=None), lease(2, timeout=0.0))
    end = rig.now + 20 * 300.0
    while rig.now < end:
        said = rig.wait()
        assert only(said, Abort) == []
        while rig.flying:
            if rig.flies(Renew):
                rig.renewed()
            if rig.flies(Claim):
                rig.claimed()
            if rig.flies(Sweep):
                rig.swept()
    assert rig.machine.running == (lease(1), lease(2))


def test_a_timeout_longer_than_the_lease_is_honoured(make: MakeRig) -> None:
    """Renewed leases carry an attempt to its deadline, however far that is."""
    rig = make(visibility_timeout=30.0).busy_with(lease(1, timeout=100.0))
    start = rig.now
    while rig.machine.running:
        rig.wait()
        for kind, answer in ((Renew, rig.renewed), (Claim, rig.claimed), (Sweep, rig.swept)):
            if rig.flies(kind):
                answer()
    assert rig.now == start + 100.0
    assert rig.flight(Settle).outcomes == (timed_out(lease(1)),)


# --- leases -----------------------------------------------------------------------------------


def test_a_lease_is_renewed_when_a_third_of_it_is_over(make: MakeRig) -> None:
    """The first renewal comes a third after the claim was issued, the next after the renewal."""
    rig = make(visibility_timeout=30.0).swept_up()
    issued = rig.now
    rig.now += 4.0
    rig.claimed(lease(1))
    while not rig.flies(Renew):
        rig.wait()
        if rig.flies(Claim):
            rig.claimed()
    assert rig.now == pytest.approx(issued + 10.0)
    assert rig.flight(Renew).leases == (lease(1),)
    rig.now += 4.0
    rig.renewed()
    while not rig.flies(Renew):
        rig.wait()
        if rig.flies(Claim):
            rig.claimed()
    assert rig.now == pytest.approx(issued + 20.0)


def test_the_oldest_lease_decides_when_to_renew(make: MakeRig) -> None:
    """A claim that was answered slowly is renewed in time, though others were renewed since."""
    rig = make(visibility_timeout=30.0, concurrency=2, recovery_interval=3000.0).swept_up()
    rig.claimed(lease(1), more=True)
    rig.now += 9.0
    rig.tell(Tick())
    rig.now += 1.0
    rig.tell(Tick())
    rig.renewed()
    rig.claimed(lease(2))
    assert rig.flight(Renew).leases == (lease(1), lease(2))


def test_leases_renewed_on_behalf_of_some_do_not_delay_the_others(make: MakeRig) -> None:
    """A renewal that came unasked and covered one lease leaves the other's time as it was."""
    rig = make(visibility_timeout=30.0, recovery_interval=3000.0).busy_with(lease(1), lease(2))
    start = rig.now
    rig.now += 9.0
    rig.tell(Renewed(Renew((lease(1),)), issued=rig.now))
    while not rig.flies(Renew):
        rig.wait()
        if rig.flies(Claim):
            rig.claimed()
    assert rig.now == pytest.approx(start + 10.0)


def test_a_lease_is_counted_from_the_issue_of_the_claim(make: MakeRig) -> None:
    """The row's lease started when the database claimed, so the answer's travel does not count."""
    rig = make(visibility_timeout=30.0).swept_up()
    issued = rig.now
    rig.now += 20.0
    rig.claimed(lease(1))
    rig.now = issued + 29.999
    assert only(rig.tell(Tick()), Abort) == []
    rig.now = issued + 30.0
    assert only(rig.tell(Tick()), Abort) == [Abort(lease(1), Reason.LEASE_LOST)]


def test_a_lease_is_extended_from_the_issue_of_the_renewal(make: MakeRig) -> None:
    """The same for a renewal whose answer was slow."""
    rig = make(visibility_timeout=30.0).busy_with(lease(1))
    rig.after(10.0)
    issued = rig.now
    rig.now += 15.0
    rig.renewed()
    rig.now = issued + 29.999
    assert only(rig.tell(Tick()), Abort) == []
    rig.now = issued + 30.0
    assert only(rig.tell(Tick()), Abort) == [Abort(lease(1), Reason.LEASE_LOST)]


def test_no_handler_starts_when_its_lease_is_over(make: MakeRig) -> None:
    """A claim answered after its leases ran out is given back: others may run those jobs now."""
    rig = make(visibility_timeout=30.0).swept_up()
    said = rig.after(30.0, Claimed((lease(1), lease(2))))
    assert only(said, Start) == []
    assert only(said, Settle) == [Settle((Outcome.released(lease(1)), Outcome.released(lease(2))))]


def test_everything_held_is_renewed(make: MakeRig) -> None:
    """What runs and what ended but is not recorded: both are still this worker's."""
    rig = make().busy_with(lease(1), lease(2))
    rig.succeed(lease(2))
    said = rig.after(100.0)
    assert only(said, Renew) == [Renew((lease(1), lease(2)))]


def test_a_lost_lease_aborts_its_attempt_and_frees_its_slot(make: MakeRig) -> None:
    """What a renewal did not find is somebody else's: abort it, record nothing about it."""
    rig = make(concurrency=2).busy_with(lease(1), lease(2))
    rig.after(100.0)
    said = rig.renewed(lease(1))
    assert only(said, Abort) == [Abort(lease(1), Reason.LEASE_LOST)]
    assert rig.machine.running == (lease(2),)
    assert rig.succeed(lease(1)) == []
    assert rig.machine.held == (lease(2),)


def test_an_ended_outcome_is_not_judged_by_a_renewal(make: MakeRig) -> None:
    """The Settle decides: a renewal after the record was made does not find the row either."""
    rig = make().busy_with(lease(1))
    rig.succeed(lease(1))
    rig.after(100.0)
    assert rig.renewed(lease(1)) == []
    assert rig.machine.held == (lease(1),)


def test_an_ended_outcome_outlives_its_lease(make: MakeRig) -> None:
    """However long the database takes, the work was done and is sent again, not done again."""
    rig = make(visibility_timeout=30.0).busy_with(lease(1))
    rig.succeed(lease(1))
    rig.broke(Settle)
    rig.after(1000.0)
    assert rig.flight(Settle).outcomes == (Outcome.succeeded(lease(1)),)


def test_a_renewal_on_the_machines_behalf_counts_from_its_issue(make: MakeRig) -> None:
    """Whoever renewed says when; without that, a renewal that nobody asked for proves nothing."""
    for issued, lives in ((25.0, True), (None, False)):
        rig = make(visibility_timeout=30.0).busy_with(lease(1))
        start = rig.now
        rig.now += 29.0
        at = None if issued is None else start + issued
        rig.tell(Renewed(Renew((lease(1),)), issued=at))
        rig.now = start + 54.0
        lost = only(rig.tell(Tick()), Abort)
        assert (lost == []) is lives
        rig.now = start + 55.0
        rig.tell(Tick())
        assert rig.machine.running == ()


def test_a_lease_lost_to_somebody_elses_renewal_is_lost(make: MakeRig) -> None:
    """A renewal on the machine's behalf that did not find the row aborts the attempt, too."""
    rig = make().busy_with(lease(1), lease(2))
    said = rig.tell(
        Renewed(Renew((lease(1), lease(2))), frozenset({(1, 1)}), issued=rig.now),
    )
    assert only(said, Abort) == [Abort(lease(1), Reason.LEASE_LOST)]


def test_failing_renewals_end_in_an_abort_on_time(make: MakeRig) -> None:
    """When the local lease is over the attempt is aborted, whatever the database thinks."""
    rig = make(visibility_timeout=30.0, concurrency=1).busy_with(lease(1))
    start, said = rig.now, list[Command]()
    while rig.machine.running:
        said = rig.wait()
        if rig.flies(Renew):
            rig.broke(Renew)
    assert only(said, Abort) == [Abort(lease(1), Reason.LEASE_LOST)]
    assert rig.now == start + 30.0
    assert rig.machine.held == ()
    assert rig.succeed(lease(1)) == []


def test_a_failing_renewal_is_tried_again_while_the_leases_live(make: MakeRig) -> None:
    """However long renewals have failed, their back-off stays below a sixth of a lease."""
    rig = make(visibility_timeout=12.0, recovery_interval=3000.0, jitter=lambda: 0.999_999)
    rig.busy_with(lease(1))
    attempts = []
    while rig.machine.running:
        rig.wait()
        if rig.flies(Claim):
            rig.claimed()
        if rig.flies(Renew):
            attempts.append(rig.now)
            rig.broke(Renew)
    gaps = [round(later - sooner) for sooner, later in itertools.pairwise(attempts)]
    assert gaps == [1, 2, 2, 2]


# --- failing and hanging commands -------------------------------------------------------------


def test_each_command_backs_off_alone(make: MakeRig) -> None:
    """A failing claim is tried after 1 s, 2 s ... 30 s, and stops neither settle nor renewal."""
    rig = make(jitter=lambda: 0.999_999, concurrency=2, recovery_interval=1e6, prune_interval=1e6)
    rig.busy_with(lease(1))
    rig.tell(Notified())
    pauses = []
    for _ in range(7):
        start = rig.now
        rig.broke(Claim)
        assert not rig.flies(Claim)
        while not rig.flies(Claim):
            rig.wait()
            if rig.flies(Renew):
                rig.renewed()
        pauses.append(round(rig.now - start))
    assert pauses == [1, 2, 4, 8, 16, 30, 30]
    rig.broke(Claim)
    assert only(rig.succeed(lease(1)), Settle) != []
    assert rig.settled() == []


def test_a_success_ends_the_back_off(make: MakeRig) -> None:
    """After an answer the next failure waits as briefly as the first one."""
    rig = make(jitter=lambda: 0.999_999, recovery_interval=3000.0).swept_up()
    for _ in range(4):
        rig.broke(Claim)
        rig.wait()
    rig.claimed()
    rig.tell(Notified())
    rig.broke(Claim)
    assert rig.until - rig.now == pytest.approx(1.0, abs=0.01)


def test_the_back_off_has_jitter(make: MakeRig) -> None:
    """Workers that fail together do not try again together: half of the pause is drawn."""
    waits = []
    for draw in (0.0, 0.5, 0.999_999):
        rig = make(jitter=partial(float, draw), recovery_interval=3000.0).swept_up()
        rig.broke(Claim)
        waits.append(rig.until - rig.now)
    assert waits == pytest.approx([0.5, 0.75, 1.0], abs=0.001)


def test_a_failing_claim_is_not_hurried_by_notifications(make: MakeRig) -> None:
    """A flood of notifications does not break the back-off, and the look after it is full."""
    rig = make().swept_up()
    rig.broke(Claim)
    assert rig.tell(*[Notified()] * 50) == []
    assert rig.wait() == [Claim(5, full=True)]


def test_a_failing_sweep_stops_nothing_else(make: MakeRig) -> None:
    """Recovery that fails backs off; pruning and claims go on meanwhile."""
    rig = make(jitter=lambda: 0.999_999)
    rig.tell(Tick())
    assert rig.broke(Sweep) == [Sweep(Chore.PRUNE)]
    assert only(rig.claimed(lease(1), more=True), Claim) == [Claim(4, full=False)]
    rig.swept()
    rig.claimed()
    if rig.flies(Claim):
        rig.claimed()
    assert rig.until - rig.now == pytest.approx(1.0, abs=0.01)
    assert rig.wait() == [Sweep(Chore.RECOVER)]


def test_an_answer_to_something_else_is_ignored(make: MakeRig) -> None:
    """The failure of a command that is not in flight changes nothing."""
    rig = make().swept_up()
    until = rig.until
    assert rig.tell(Broke(Settle(()))) == []
    assert rig.tell(Broke(Renew(()))) == []
    assert rig.until == until
    assert rig.flies(Claim)


def test_a_hanging_command_is_interrupted_once(make: MakeRig) -> None:
    """After the statement timeout its connection is broken; the answer Broke frees the way."""
    rig = make(statement_timeout=7.0)
    rig.tell(Tick())
    claim, sweep = rig.flight(Claim), rig.flight(Sweep)
    assert rig.until == rig.now + 7.0
    assert rig.after(6.999) == []
    assert rig.wait() == [Interrupt(claim), Interrupt(sweep)]
    assert rig.after(100.0) == []
    rig.broke(Claim)
    assert rig.wait() == [Claim(5, full=True)]


def test_every_kind_of_command_is_interrupted(make: MakeRig) -> None:
    """Settles and renewals that hang are interrupted, too, each counted from its own issue."""
    rig = make(statement_timeout=7.0, visibility_timeout=30.0).busy_with(lease(1), lease(2))
    rig.succeed(lease(1))
    settle = rig.flight(Settle)
    rig.after(4.0)
    rig.now += 3.0
    assert only(rig.tell(Tick()), Interrupt) == [Interrupt(settle)]
    rig.after(3.0)
    renew = rig.flight(Renew)
    assert Interrupt(renew) not in rig.after(6.999)
    assert Interrupt(renew) in rig.after(0.001)


def test_at_most_one_command_of_a_kind_is_in_flight(make: MakeRig) -> None:
    """However much happens meanwhile, a second claim, settle, renewal or sweep waits."""
    rig = make(statement_timeout=1e6).busy_with(lease(1), lease(2), lease(3))
    rig.succeed(lease(1))
    rig.after(101.0, Notified())
    assert {type(command) for command in rig.flying} == {Claim, Settle, Renew, Sweep}
    for _ in range(50):
        rig.after(1.0, Notified(), ListenerChanged(up=True))
        rig.succeed(lease(2))
    assert len(rig.flying) == 4


def test_every_wait_is_finite(make: MakeRig) -> None:
    """With nothing to wait for but an hour's sweep, and not even that, the wait is an hour."""
    rig = make(
        concurrency=1,
        visibility_timeout=1e9,
        recovery_interval=1e9,
        prune_interval=1e9,
        statement_timeout=1e9,
    ).busy_with(lease(1))
    assert rig.until == rig.now + 3600.0
    rig.tell(StopRequested())
    assert math.isfinite(rig.until)


# --- chores -----------------------------------------------------------------------------------


def test_expired_leases_are_recovered_every_minute(make: MakeRig) -> None:
    """Recovery is due a minute after the last one, pruning after an hour, one at a time."""
    rig = make(jitter=lambda: 0.999_999, poll_interval=1e6, max_poll_interval=1e6).swept_up()
    rig.claimed()
    start = rig.now
    done: dict[Chore, list[int]] = {Chore.RECOVER: [], Chore.PRUNE: []}
    while rig.now < start + 2.5 * 3600:
        for sweep in only(rig.wait(), Sweep):
            done[sweep.chore].append(round(rig.now - start))
            while rig.flies(Sweep):
                rig.swept()
    assert done[Chore.RECOVER][:3] == [66, 132, 198]
    assert done[Chore.PRUNE] == [3960, 7920]


def test_an_answer_that_is_not_sure_is_followed_by_a_full_look(make: MakeRig) -> None:
    """What was claimed starts before it is known what is left, and then the worker looks again."""
    rig = make(concurrency=3)
    rig.tell(Tick())
    said = rig.claimed(lease(1), sure=False)
    assert only(said, Start) == [Start(lease(1))]
    assert only(said, Claim) == [Claim(2, full=True)]


def test_a_full_batch_is_followed_by_the_next_at_once(make: MakeRig) -> None:
    """A chore goes on until its batch is not full any more."""
    rig = make()
    rig.tell(Tick())
    assert rig.swept(more=True) == [Sweep(Chore.RECOVER)]
    assert rig.swept(more=True) == [Sweep(Chore.RECOVER)]
    assert rig.swept() == [Sweep(Chore.PRUNE)]
    assert rig.swept(more=True) == [Sweep(Chore.PRUNE)]
    assert rig.swept() == []


# --- stopping ---------------------------------------------------------------------------------


def test_an_idle_worker_stops_at_once(make: MakeRig) -> None:
    """With nothing held and nothing in flight, the answer to a stop is the end."""
    rig = make().swept_up()
    rig.claimed()
    assert rig.tell(StopRequested()) == [Stop(())]
    assert rig.machine.phase.name == "STOPPED"


def test_a_stopped_machine_says_nothing(make: MakeRig) -> None:
    """After Stop there are no commands, whatever is said to it."""
    rig = make().swept_up()
    rig.claimed()
    rig.tell(StopRequested())
    events = [Tick(), Notified(), StopRequested(), Claimed((lease(1),)), ListenerChanged(up=True)]
    assert rig.machine.handle(events, rig.now + 500.0) == []
    assert rig.machine.running == ()


def test_a_stopping_worker_claims_and_sweeps_no_more(make: MakeRig) -> None:
    """While jobs end, neither notifications nor free slots nor due chores lead to new work."""
    rig = make(shutdown_timeout=1e6, concurrency=2, statement_timeout=1e9)
    rig.busy_with(lease(1), lease(2))
    rig.tell(StopRequested())
    assert rig.machine.phase.name == "DRAINING"
    said = rig.succeed(lease(1))
    assert only(said, Claim) == []
    assert only(rig.tell(Notified(), ListenerChanged(up=True)), Claim) == []
    said = rig.after(7200.0)
    assert only(said, Claim) == []
    assert only(said, Sweep) == []


def test_a_stopping_worker_records_what_ends_and_then_stops(make: MakeRig) -> None:
    """The stop comes when the last outcome is recorded, not before."""
    rig = make().busy_with(lease(1))
    rig.tell(StopRequested())
    assert only(rig.succeed(lease(1)), Settle) == [Settle((Outcome.succeeded(lease(1)),))]
    assert rig.settled() == [Stop(())]


def test_a_stopping_worker_renews_its_leases(make: MakeRig) -> None:
    """A long shutdown does not cost the running jobs their leases."""
    rig = make(shutdown_timeout=1000.0).busy_with(lease(1))
    rig.tell(StopRequested())
    assert only(rig.after(100.0), Renew) == [Renew((lease(1),))]


def test_a_claim_answered_after_the_stop_is_given_back(make: MakeRig) -> None:
    """Nothing starts any more: the attempts are released, which costs the jobs nothing."""
    rig = make().swept_up()
    assert rig.tell(StopRequested()) == [], "the claim in flight is waited for"
    said = rig.claimed(lease(1), lease(2), more=True)
    assert said == [Settle((Outcome.released(lease(1)), Outcome.released(lease(2))))]
    assert rig.flight(Settle).outcomes[0].event is Life.RELEASE
    assert rig.machine.running == ()
    assert rig.settled() == [Stop(())]


def test_two_thirds_of_the_shutdown_wait_then_handlers_are_told(make: MakeRig) -> None:
    """After two thirds every running handler is aborted once, and still keeps slot and lease."""
    rig = make(shutdown_timeout=15.0).busy_with(lease(1), lease(2))
    rig.tell(StopRequested())
    assert rig.until == pytest.approx(rig.now + 10.0)
    assert rig.after(9.999) == []
    assert rig.wait() == [Abort(lease(1), Reason.SHUTDOWN), Abort(lease(2), Reason.SHUTDOWN)]
    assert rig.machine.phase.name == "ABORTING"
    assert rig.machine.running == (lease(1), lease(2))
    assert rig.tell(Tick()) == []


def test_what_ends_in_the_last_third_is_recorded(make: MakeRig) -> None:
    """A handler that obeys the abort still reports, and then the worker may stop early."""
    rig = make(shutdown_timeout=15.0).busy_with(lease(1))
    rig.tell(StopRequested())
    rig.after(10.0)
    said = rig.tell(Finished(Outcome.released(lease(1))))
    assert only(said, Settle) == [Settle((Outcome.released(lease(1)),))]
    assert rig.settled() == [Stop(())]


def test_at_the_end_of_the_shutdown_the_rest_is_abandoned(make: MakeRig) -> None:
    """When the time is over the worker stops, and says which leases it leaves behind."""
    rig = make(shutdown_timeout=15.0).busy_with(lease(1), lease(2))
    rig.tell(StopRequested())
    rig.after(10.0)
    rig.succeed(lease(2))
    assert rig.until == pytest.approx(rig.now + 5.0)
    assert rig.wait() == [Stop((lease(1), lease(2)))]


def test_handlers_are_told_even_when_the_shutdown_had_no_time(make: MakeRig) -> None:
    """With no time at all, or after a stall through all of it, the abort comes with the stop."""
    expected = [Abort(lease(1), Reason.SHUTDOWN), Stop((lease(1),))]
    rig = make(shutdown_timeout=0.0).busy_with(lease(1))
    assert rig.tell(StopRequested()) == expected
    rig = make(shutdown_timeout=15.0).busy_with(lease(1))
    rig.tell(StopRequested())
    assert rig.after(60.0) == expected


def test_a_second_stop_request_does_not_prolong_the_shutdown(make: MakeRig) -> None:
    """The time is counted from the first request."""
    rig = make(shutdown_timeout=15.0).busy_with(lease(1))
    rig.tell(StopRequested())
    rig.after(9.0, StopRequested())
    assert rig.wait() == [Abort(lease(1), Reason.SHUTDOWN)]
    rig.tell(StopRequested())
    assert rig.machine.phase.name == "ABORTING"
    assert only(rig.after(5.0), Stop) == [Stop((lease(1),))]


def test_deadlines_hold_while_stopping(make: MakeRig) -> None:
    """A timeout during the shutdown is recorded as one."""
    rig = make(shutdown_timeout=15.0).busy_with(lease(1, timeout=3.0))
    rig.tell(StopRequested())
    assert rig.after(3.0) == [
        Abort(lease(1), Reason.TIMEOUT),
        Settle((timed_out(lease(1)),)),
    ]
    assert rig.settled() == [Stop(())]


# --- until idle -------------------------------------------------------------------------------


def test_until_idle_stops_when_nothing_is_due(make: MakeRig) -> None:
    """A worker that runs until idle stops after a full look that found nothing due."""
    rig = make(until_idle=True)
    rig.tell(Tick())
    rig.swept()
    rig.swept()
    assert rig.claimed() == [Stop(())]


def test_until_idle_waits_for_its_chores(make: MakeRig) -> None:
    """Recovery comes first, for it may give work back; then what it gave back is done."""
    rig = make(until_idle=True)
    rig.tell(Tick())
    assert rig.claimed() == []
    said = rig.swept(woke=1)
    assert only(said, Claim) == [Claim(5, full=True)]
    rig.swept()
    rig.claimed(lease(1))
    assert only(rig.succeed(lease(1)), Stop) == []
    assert only(rig.settled(), Stop) == [Stop(())]


def test_until_idle_works_off_everything_due(make: MakeRig) -> None:
    """It goes on while there is more, and does not stop while anything runs or is unrecorded."""
    rig = make(until_idle=True, concurrency=1).swept_up()
    for number in range(1, 4):
        rig.claimed(lease(number), more=True)
        rig.succeed(lease(number))
        rig.settled()
    assert rig.flies(Claim)
    said = rig.claimed()
    assert only(said, Claim) == [Claim(1, full=True)], "memory is no proof of idleness"
    assert rig.claimed() == [Stop(())]


def test_until_idle_does_not_take_a_failed_look_for_idleness(make: MakeRig) -> None:
    """Only an answer proves that nothing is due."""
    rig = make(until_idle=True).swept_up()
    assert rig.broke(Claim) == []
    assert rig.wait() == [Claim(5, full=True)]
    assert rig.claimed() == [Stop(())]


def test_until_idle_does_not_wait_for_jobs_of_the_future(make: MakeRig) -> None:
    """What is due later is not due."""
    rig = make(until_idle=True).swept_up()
    assert rig.claimed(next_due=1.0) == [Stop(())]
