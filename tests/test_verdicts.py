from __future__ import annotations

import asyncio
import threading
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

from sqlalchemy_jobs import PayloadError, PermanentJobError, RetryAfter, Snooze, WorkerSettings
from sqlalchemy_jobs import _verdicts as verdicts
from sqlalchemy_jobs._messages import Lease, Outcome, Reason
from sqlalchemy_jobs.lifecycle import Event
from sqlalchemy_jobs.tasks import JobContext, Tasks
from tests.faults.raised import Anonymous, Impostor, Untouchable

FIRST = Lease(1, 1, task="t", max_attempts=3, timeout=5.0)
LAST = Lease(1, 3, task="t", max_attempts=3, timeout=5.0)
SETTINGS = WorkerSettings(backoff=lambda attempt: 10 * attempt)


def judged(
    error: BaseException | None, lease: Lease = FIRST, reason: Reason | None = None
) -> Outcome:
    """Return the outcome of an attempt that ended so."""
    return verdicts.judge(error, lease, None, SETTINGS, reason=reason, duration=2.0)


def raised(error: BaseException) -> BaseException:
    """Raise and catch it, so that it has a traceback."""
    try:
        raise error  # noqa: TRY301 - it is what this is for
    except BaseException as caught:  # noqa: BLE001 - whatever it is
        return caught


# --- which outcome ------------------------------------------------------------------------------


def test_returning_succeeds() -> None:
    """An attempt that returned succeeded, and says how long it took."""
    assert judged(None) == Outcome.succeeded(FIRST, 2.0)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("x"),
        SystemExit(1),
        KeyboardInterrupt(),
        GeneratorExit(),
        asyncio.CancelledError(),
        ExceptionGroup("several", [ValueError("x")]),
    ],
    ids=lambda error: type(error).__name__,
)
def test_raising_anything_is_retried_by_the_backoff(error: BaseException) -> None:
    """Any exception fails the attempt: another follows after the back-off, the last one ends it."""
    error = raised(error)
    first, last = judged(error), judged(error, LAST)
    assert (first.event, first.delay, first.duration) == (Event.RETRY, 10.0, 2.0)
    assert (last.event, last.delay) == (Event.FAIL, 0.0)
    assert type(error).__name__ in str(first.error)
    assert last.error == first.error


def test_the_backoff_counts_failures_and_not_attempts_that_were_given_back() -> None:
    """A job that snoozed seven times and then fails for the first time waits as after one."""
    lease = Lease(1, 8, task="t", max_attempts=10, timeout=5.0, failures=0)
    assert judged(ValueError("x"), lease).delay == 10.0
    assert verdicts.timed_out(lease, None, SETTINGS).delay == 10.0


def test_the_verdicts_of_a_handler() -> None:
    """A handler chooses the end, the delay, or to have its attempt back, by what it raises."""
    assert judged(PermanentJobError("no")).event is Event.FAIL
    assert judged(PayloadError("no")).event is Event.FAIL
    again = judged(RetryAfter(7))
    assert (again.event, again.delay) == (Event.RETRY, 7.0)
    assert judged(RetryAfter(7), LAST).event is Event.FAIL
    snoozed = judged(Snooze(timedelta(minutes=1)), LAST)
    assert (snoozed.event, snoozed.delay, snoozed.error) == (Event.SNOOZE, 60.0, None)


def test_an_end_at_shutdown_gives_the_attempt_back() -> None:
    """Raising after the worker asked it to end is no failure; returning is still a success."""
    for error in (asyncio.CancelledError(), ValueError("x"), PermanentJobError("x")):
        assert judged(error, reason=Reason.SHUTDOWN).event is Event.RELEASE
    assert judged(None, reason=Reason.SHUTDOWN).event is Event.SUCCEED


@pytest.mark.parametrize("kind", [RetryAfter, Snooze])
@pytest.mark.parametrize(
    "delay",
    [timedelta(seconds=4), "soon", float("nan"), -1, 10**400, None],
    ids=lambda delay: str(delay)[:9],
)
def test_a_delay_that_a_subclass_made_up_is_made_usable(
    kind: type[RetryAfter | Snooze], delay: Any
) -> None:
    """A verdict with an unusable delay gets the default, for the outcome must be storable."""

    class Own(kind):  # type: ignore[misc, valid-type]
        def __init__(self) -> None:
            self.delay = delay

    outcome = judged(raised(Own()))
    assert type(outcome.delay) is float
    assert outcome.delay == (4.0 if isinstance(delay, timedelta) else 1.0)


# --- the wait -----------------------------------------------------------------------------------


def exits(attempt: int) -> float:
    """Leave, which a back-off should not."""
    raise SystemExit(attempt)


@pytest.mark.parametrize(
    "backoff",
    [
        lambda _: -1,
        lambda _: float("nan"),
        lambda _: float("inf"),
        lambda _: 10**400,
        lambda _: "soon",
        lambda _: None,
        lambda _: timedelta(seconds=-1),
        lambda _: 1 / 0,
        lambda: 1,
        exits,
    ],
)
def test_an_unusable_backoff_costs_no_outcome(
    backoff: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """A back-off that raises or returns no delay is replaced by the default, and is warned of."""
    assert verdicts.next_delay(backoff, 2) == 5.0
    assert "the backoff of attempt 2 is unusable" in caplog.text


def test_a_backoff_returns_seconds_or_a_timedelta_up_to_an_hour() -> None:
    """What a back-off says counts, up to the longest wait."""
    assert verdicts.next_delay(lambda attempt: attempt / 4, 2) == 0.5
    assert verdicts.next_delay(lambda _: timedelta(minutes=2), 1) == 120.0
    assert verdicts.next_delay(lambda _: 1e9, 1) == 3600.0


def test_a_timeout_is_retried_like_any_failure() -> None:
    """The error of a timeout names its bound; the task's own back-off goes before the worker's."""
    tasks = Tasks()
    task = tasks.register(lambda _job: None, "t", backoff=lambda _: 3)
    outcome = verdicts.timed_out(FIRST, task, SETTINGS)
    assert (outcome.event, outcome.delay) == (Event.RETRY, 3.0)
    assert "TimeoutError" in str(outcome.error)
    assert "5 s" in str(outcome.error)
    assert verdicts.timed_out(FIRST, None, SETTINGS).delay == 10.0
    assert verdicts.timed_out(LAST, task, SETTINGS).event is Event.FAIL


# --- the text of an error -----------------------------------------------------------------------


class Broken(Exception):  # noqa: N818 - a test's own
    """Cannot be printed."""

    def __str__(self) -> str:
        raise RuntimeError("not even this")


class Evil(Exception):  # noqa: N818 - a test's own
    """Ends the program that looks at it."""

    def __str__(self) -> str:
        raise SystemExit(3)


def deep(level: int) -> None:
    """Recurse without end."""
    deep(level + 1)


def recursion() -> BaseException:
    """Return a recursion error with its hundreds of frames."""
    try:
        deep(0)
    except RecursionError as error:
        return error
    raise AssertionError


def cycle() -> BaseException:
    """Return an error that is its own cause's cause."""
    one, other = raised(ValueError("one")), raised(ValueError("other"))
    one.__cause__, other.__cause__ = other, one
    return one


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ValueError("a\x00b"), "ValueError: a"),
        (ValueError("lone \ud800 surrogate"), "ValueError: lone"),
        (ValueError("x" * 50_000_000), "ValueError"),
        (Broken(), "Broken"),
        (Evil(), "Evil"),
        (recursion(), "RecursionError"),
        (cycle(), "ValueError: one"),
        (ExceptionGroup("g", [ValueError(f"inner {i}") for i in range(500)]), "ExceptionGroup: g"),
    ],
    ids=["nul", "surrogate", "huge", "broken", "evil", "recursion", "cycle", "group"],
)
def test_every_error_is_storable(error: BaseException, said: str) -> None:
    """Whatever an exception is made of, its text can be stored, is bounded and names its class."""
    text = verdicts.describe(raised(error))
    assert len(text) <= 4000
    assert "\x00" not in text
    text.encode()  # no lone surrogates
    assert said in text or said.split(":", maxsplit=1)[0] in text


def test_an_error_is_what_it_is_and_not_what_it_says() -> None:
    """An error that lies about its class, or raises when asked for anything, fails its attempt."""
    for name, error in {
        "Untouchable": Untouchable("x"),
        "Impostor": Impostor("x"),
        "Anonymous": Anonymous("x"),
    }.items():
        outcome = judged(raised(error))
        assert (outcome.event, outcome.delay) == (Event.RETRY, 10.0)
        assert name in str(outcome.error)


def test_an_odd_cause_does_not_cost_the_message() -> None:
    """Where the chain of causes cannot be described, the error itself is, with its frames."""
    for cause in (Untouchable(), Anonymous()):
        error = raised(ValueError("kept"))
        error.__cause__ = cause
        text = verdicts.describe(error)
        assert text.endswith("ValueError: kept")
        assert "in raised" in text


def fails(job: JobContext[Any]) -> None:
    """Fail, as a handler."""
    raise ValueError(f"job {job.id}")


def test_a_traceback_starts_at_the_users_frame() -> None:
    """The frames of this library that lead to the handler are left out, the user's own are kept."""
    task = Tasks().register(fails)
    with pytest.raises(ValueError, match="job 1") as caught:
        task(JobContext(FIRST, None))
    frames = caught.value.__traceback__
    assert frames is not None
    below = caught.value.with_traceback(frames.tb_next)  # without this test's own frame
    assert len(traceback.extract_tb(below.__traceback__)) == 2
    lines = verdicts.describe(below).splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].startswith(f'  File "{__file__}"')
    assert lines[1].endswith("in fails")
    assert lines[-1] == "ValueError: job 1"


def test_describing_runs_in_any_thread() -> None:
    """A deep traceback is described in a thread with its small stack, too."""
    found: list[str] = []
    thread = threading.Thread(target=lambda: found.append(verdicts.describe(recursion())))
    thread.start()
    thread.join()
    assert "RecursionError" in found[0]
