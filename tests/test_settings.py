from __future__ import annotations

import dataclasses
from datetime import timedelta
from typing import Any, get_type_hints

import pytest

from sqlalchemy_jobs import InvalidArgumentError, Status, WorkerSettings, exponential
from sqlalchemy_jobs.settings import WorkerOptions, default_backoff

DURATIONS = (
    "visibility_timeout",
    "timeout",
    "poll_interval",
    "max_poll_interval",
    "safety_interval",
    "recovery_interval",
    "prune_interval",
    "retain_succeeded",
    "retain_cancelled",
    "retain_failed",
    "shutdown_timeout",
    "statement_timeout",
)


# --- settings -----------------------------------------------------------------------------------


def test_the_defaults() -> None:
    """Left to themselves, the settings are those that the documentation promises."""
    settings = WorkerSettings()
    assert settings.concurrency == 5
    assert settings.seconds("visibility_timeout") == 300
    assert settings.seconds("poll_interval") == 2
    assert settings.seconds("max_poll_interval") == 30
    assert settings.seconds("safety_interval") == 30
    assert settings.seconds("recovery_interval") == 60
    assert settings.seconds("prune_interval") == 3600
    assert settings.seconds("shutdown_timeout") == 15
    assert settings.timeout is None
    assert settings.default_timeout == 900
    assert settings.statement_timeout is None
    assert settings.listen
    day = 86_400
    assert settings.retention == {
        Status.SUCCEEDED: 3 * day,
        Status.CANCELLED: 3 * day,
        Status.FAILED: 30 * day,
    }
    assert [settings.backoff(attempt) for attempt in (1, 2, 3, 50)] == [1, 5, 25, 3600]


@pytest.mark.parametrize("name", DURATIONS)
def test_a_duration_is_seconds_or_a_timedelta(name: str) -> None:
    """Both forms are accepted, and kept as seconds."""
    for value, kept in ((20, 20.0), (20.5, 20.5), (timedelta(seconds=25), 25.0)):
        options: dict[str, Any] = {"poll_interval": 1, name: value}
        settings = WorkerSettings(**options)
        assert settings.seconds(name) == kept
        assert type(getattr(settings, name)) is float


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize(
    "value",
    [-1, float("nan"), float("inf"), "5", True, timedelta(seconds=-1), timedelta.max, [], 1e12],
)
def test_what_is_no_duration_is_refused_by_name(name: str, value: Any) -> None:
    """Negative, endless, not a number, or of another type: the message names the setting."""
    options: dict[str, Any] = {name: value}
    with pytest.raises(InvalidArgumentError, match=name):
        WorkerSettings(**options)


@pytest.mark.parametrize(
    "name",
    [
        "visibility_timeout",
        "poll_interval",
        "max_poll_interval",
        "safety_interval",
        "recovery_interval",
        "prune_interval",
    ],
)
def test_an_interval_of_nothing_is_refused(name: str) -> None:
    """Zero would spin, or lose every lease at once."""
    options: dict[str, Any] = {name: 0}
    with pytest.raises(InvalidArgumentError, match=f"{name} must be at least 0.01 s, got 0"):
        WorkerSettings(**options)


def test_none_and_zero_where_they_mean_something() -> None:
    """None keeps jobs for ever or takes the default; zero is no bound, or no patience."""
    settings = WorkerSettings(
        retain_succeeded=None, retain_cancelled=0, retain_failed=None, timeout=0, shutdown_timeout=0
    )
    assert settings.retention == {
        Status.SUCCEEDED: None,
        Status.CANCELLED: 0.0,
        Status.FAILED: None,
    }
    assert settings.default_timeout == 0
    assert settings.seconds("shutdown_timeout") == 0


@pytest.mark.parametrize("value", [0, -1, 10_001, 1.0, "5", None, True])
def test_concurrency_is_a_whole_number_from_one(value: Any) -> None:
    """Anything else is refused, and the message says what was given."""
    with pytest.raises(InvalidArgumentError, match=f"concurrency must be .*{value}"):
        WorkerSettings(concurrency=value)


def test_settings_must_fit_each_other() -> None:
    """The longest pause between looks is not shorter than the first."""
    with pytest.raises(InvalidArgumentError, match="max_poll_interval must not be shorter"):
        WorkerSettings(poll_interval=5, max_poll_interval=4)


@pytest.mark.parametrize("value", [1, "5", None, [1, 5]])
def test_a_backoff_is_callable(value: Any) -> None:
    """A list of waits, for one, is refused with what is wanted instead."""
    with pytest.raises(InvalidArgumentError, match="backoff must be a callable"):
        WorkerSettings(backoff=value)


def test_settings_show_no_password() -> None:
    """The direct URL is not in the settings' repr."""
    settings = WorkerSettings(direct_url="postgresql://me:sw0rdfish@host/db")
    assert "sw0rdfish" not in repr(settings)
    assert "concurrency=5" in repr(settings)


def test_settings_are_values() -> None:
    """They compare by value and cannot be changed under a running worker."""
    assert WorkerSettings(timeout=timedelta(seconds=5)) == WorkerSettings(timeout=5)
    with pytest.raises(dataclasses.FrozenInstanceError):
        WorkerSettings().concurrency = 6  # type: ignore[misc]


def test_the_options_of_the_workers_are_the_settings() -> None:
    """The keyword arguments that type checkers accept are the fields, of the same types."""
    fields = {field.name for field in dataclasses.fields(WorkerSettings)}
    assert set(WorkerOptions.__annotations__) == fields
    assert get_type_hints(WorkerOptions) == get_type_hints(WorkerSettings)


# --- back-off -----------------------------------------------------------------------------------


def test_an_exponential_backoff_grows_up_to_its_maximum() -> None:
    """Each wait is *factor* times the one before, and none is longer than *maximum*."""
    backoff = exponential(timedelta(seconds=2), 3, timedelta(minutes=1))
    assert [backoff(attempt) for attempt in range(1, 7)] == [2, 6, 18, 54, 60, 60]
    assert backoff(1_000_000) == 60
    assert backoff(0) == 2
    assert [default_backoff(attempt) for attempt in (1, 2, 3, 4, 5, 6, 7)] == [
        1,
        5,
        25,
        125,
        625,
        3125,
        3600,
    ]


def test_odd_backoffs_are_what_they_say() -> None:
    """No wait at all, always the same one, and a first longer than the longest."""
    assert exponential(0)(9) == 0
    assert exponential(7, 1)(9) == 7
    assert exponential(100, 2, 10)(1) == 10


def test_jitter_shortens_a_wait_by_up_to_its_share() -> None:
    """Jobs that failed together do not come back together, and none waits longer than without."""
    backoff = exponential(100, 1, jitter=0.5)
    waits = {backoff(1) for _ in range(200)}
    assert len(waits) > 100
    assert all(isinstance(wait, float) and 50 <= wait <= 100 for wait in waits)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"first": -1}, "first"),
        ({"maximum": "long"}, "maximum"),
        ({"factor": 0.5}, "factor"),
        ({"factor": 1e9}, "factor"),
        ({"factor": float("nan")}, "factor"),
        ({"jitter": 1.5}, "jitter"),
        ({"jitter": -0.1}, "jitter"),
    ],
)
def test_a_backoff_out_of_range_is_refused(options: dict[str, Any], said: str) -> None:
    """The message names the argument."""
    with pytest.raises(InvalidArgumentError, match=said):
        exponential(**options)
