"""Clocks and time zones: an instant is the same one for everybody."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta, timezone
from typing import TYPE_CHECKING, Any
from zoneinfo import ZoneInfo

import pytest
from sqlalchemy import make_url, text

from sqlalchemy_jobs import InvalidArgumentError, Job, JobSession, Tasks
from tests.enqueue_tools import in_session, rows
from tests.workers import EVERYWHERE, jobs_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.workers import Jobs


@pytest.fixture(params=EVERYWHERE)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver."""
    yield from jobs_on(request)


@pytest.fixture
def in_kolkata(jobs: Jobs, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Set the time zone of this process, and of the database's sessions where it has one."""
    name = make_url(jobs.url).database
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    if jobs.on_postgres:
        jobs.execute(f"ALTER DATABASE {name} SET timezone TO 'Asia/Kolkata'")
    yield
    if jobs.on_postgres:
        jobs.execute(f"ALTER DATABASE {name} RESET timezone")
    monkeypatch.undo()
    time.tzset()


@pytest.mark.usefixtures("in_kolkata")
def test_an_instant_is_the_same_in_every_time_zone(jobs: Jobs) -> None:
    """Case 49: aware times mean their instant whatever the zones; naive ones are refused."""
    moment = datetime(2030, 6, 1, 12, 0, 0, 123456, tzinfo=UTC)
    west = timezone(timedelta(hours=-11, minutes=-30))
    hour = timedelta(hours=1)
    now = datetime.now(UTC)
    given = {
        "UTC": moment,
        "process": moment.astimezone(),
        "Kolkata": moment.astimezone(ZoneInfo("Asia/Kolkata")),
        "west": moment.astimezone(west),
        "fold": datetime(2030, 10, 27, 2, 30, tzinfo=ZoneInfo("Europe/Berlin"), fold=1),
        "last": datetime(9999, 12, 31, tzinfo=UTC),
        "epoch": datetime(1970, 1, 1, tzinfo=UTC),
        "due": (now - hour).astimezone(west),
        "due here": (now - hour).astimezone(),
        "in an hour": (now + hour).astimezone(west),
    }
    refused: list[dict[str, Any]] = [
        {"run_at": moment.replace(tzinfo=None)},
        {"run_at": "2030-01-01T00:00:00Z"},
        {"delay": -1},
        {"delay": timedelta(seconds=-1)},
        {"delay": moment},
    ]

    def work(session: JobSession) -> dict[str, datetime]:
        if jobs.on_postgres:
            assert session.scalar(text("SHOW timezone")) == "Asia/Kolkata"
        for options in refused:
            with pytest.raises(InvalidArgumentError):
                session.enqueue("refused", **options)
        for name, at in given.items():
            session.enqueue("t", name, run_at=at)
        session.enqueue("t", "no delay", delay=0)
        session.enqueue("t", "seconds", delay=3600)
        session.enqueue("t", "timedelta", delay=hour)
        return {job.payload: job.run_at for job in session.query(Job)}

    read = in_session(jobs, work)
    later = datetime.now(UTC)
    for name, at in given.items():
        # Not compared as it is: of an hour that comes twice, no instant equals another zone's.
        assert (name, read[name], read[name].utcoffset()) == (
            name,
            at.astimezone(UTC),
            timedelta(0),
        )
    assert read["fold"].hour == 1
    grain = timedelta(seconds=2)  # this clock and the database's need not be read at once
    for name in ("seconds", "timedelta"):
        assert now + hour - grain <= read[name] <= later + hour + grain
    ran: list[str] = []
    tasks = Tasks()
    tasks.register(lambda job: ran.append(job.payload), "t")
    jobs.drain(tasks)
    assert sorted(ran) == ["due", "due here", "epoch", "no delay"]
    for times in rows(jobs.url, Job.created_at, Job.updated_at):
        assert all(now - grain <= at <= datetime.now(UTC) + grain for at in times)
