"""Listeners that are lost, come late, or hear nothing and are not told."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

from sqlalchemy_jobs import NewJob, _listen_async, _listen_thread
from tests.faults.fleets import NEVER_LOOKS, enqueue_elsewhere, quick_tasks, told
from tests.faults.proxy import Proxy
from tests.faults.server import LISTENERS
from tests.workers import ON_POSTGRES, Jobs, jobs_on, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(params=ON_POSTGRES)
def jobs(request: pytest.FixtureRequest) -> Iterator[Jobs]:
    """Run on every driver of PostgreSQL."""
    yield from jobs_on(request)


@pytest.fixture
def proxy(jobs: Jobs) -> Iterator[Proxy]:
    """A proxy in front of the server."""
    with Proxy(jobs.url) as proxy:
        yield proxy


@pytest.fixture
def suspicious(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have listeners prove themselves every second instead of twice a minute."""
    for module in (_listen_async, _listen_thread):
        monkeypatch.setattr(module, "PROVE_EVERY", 0.5)
        monkeypatch.setattr(module, "ANSWER_WITHIN", 2.0)


def listeners(jobs: Jobs) -> list[int]:
    """Return the server's processes that listen."""
    found = jobs.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() "
        f"AND pid <> pg_backend_pid() AND {LISTENERS}"
    )
    return [row[0] for row in found]


# --- 22: the listener is lost -------------------------------------------------------------------


def test_a_lost_listener_is_replaced(jobs: Jobs) -> None:
    """Case 22: jobs enqueued while it was away are found when it is back, later ones at once."""
    with jobs.worker(quick_tasks(), **NEVER_LOOKS) as running:
        running.ready()
        told(jobs)
        for _ in range(2):
            before = wait_until(lambda: listeners(jobs))
            for pid in before:
                jobs.execute("SELECT pg_terminate_backend(:pid)", pid=pid)
            told(jobs)
            wait_until(lambda: set(listeners(jobs)).difference(before))  # noqa: B023 - at once
            told(jobs)
        assert running.log.of("not_listening")
    assert len(running.log.of("ready")) == 1


def test_jobs_are_found_when_the_listener_is_back(jobs: Jobs, proxy: Proxy) -> None:
    """Case 22: whoever listens again looks once, for what nobody could tell it."""
    options: dict[str, Any] = {**NEVER_LOOKS, "direct_url": proxy.url(jobs.url)}
    with jobs.worker(quick_tasks(), **options) as running:
        running.ready()
        told(jobs)
        proxy.refuse()
        proxy.cut()
        running.log.wait_for("not_listening")
        left = job_nobody_was_told_of(jobs)
        proxy.heal()
        assert jobs.finished(left).status == "succeeded"
        told(jobs)


def job_nobody_was_told_of(jobs: Jobs) -> int:
    """Return a job that stays pending, after the last looks that were due anyway."""
    for _ in range(20):
        job_id = enqueue_elsewhere(jobs)
        until = time.monotonic() + 0.7
        while jobs.job(job_id).status == "pending":
            if time.monotonic() > until:
                return job_id
            time.sleep(0.02)
    pytest.fail("the worker finds every job")


def test_a_worker_without_its_database_listens_as_soon_as_it_is_there(
    jobs: Jobs, proxy: Proxy
) -> None:
    """Case 22: a server that comes after its worker is listened to, though nothing was lost."""
    proxy.refuse()
    late = Jobs(jobs.driver, proxy.url(jobs.url), jobs.engine)
    with late.worker(quick_tasks(), **NEVER_LOOKS) as running:
        running.log.wait_for("unreachable")
        before = enqueue_elsewhere(jobs)
        proxy.heal()
        assert jobs.finished(before).status == "succeeded"
        wait_until(lambda: listeners(jobs))
        told(jobs)


# --- 23: nobody says that the connection is gone ------------------------------------------------


@pytest.mark.parametrize("fault", ["half open", "half open, the server too", "dropped"])
@pytest.mark.usefixtures("suspicious")
def test_a_silent_listener_is_noticed_and_replaced(jobs: Jobs, proxy: Proxy, fault: str) -> None:
    """Case 23: a listener that hears nothing more is replaced, and a warning says so."""
    options: dict[str, Any] = {**NEVER_LOOKS, "direct_url": proxy.url(jobs.url)}
    with jobs.worker(quick_tasks(), **options) as running:
        running.ready()
        told(jobs)
        break_silently(proxy, fault)
        lost = running.log.wait_for("not_listening")
        assert lost.levelno >= logging.WARNING
        proxy.heal()
        told(jobs)
        wait_until(lambda: proxy.connections == 1)


def break_silently(proxy: Proxy, fault: str) -> None:
    """Let no end of a connection hear of the other."""
    match fault:
        case "half open":
            proxy.half_open()
        case "half open, the server too":
            proxy.half_open(server_knows=False)
        case _:
            proxy.drop()


@pytest.mark.usefixtures("suspicious")
def test_a_listener_that_is_asked_while_it_is_silent_is_replaced(jobs: Jobs, proxy: Proxy) -> None:
    """Case 23: what the worker asks of a silent listener does not keep it from being replaced."""
    hold = threading.Event()
    tasks = quick_tasks()
    tasks.register(lambda _: hold.wait(60) or None, "holds")
    options: dict[str, Any] = {**NEVER_LOOKS, "direct_url": proxy.url(jobs.url), "concurrency": 1}
    with jobs.worker(tasks, **options) as running:
        running.ready()
        told(jobs)
        first = enqueue_elsewhere(jobs, "holds")
        jobs.wait(first, lambda job: job.status == "running")
        proxy.half_open(server_knows=False)
        # More than it can take: it gives up the mark of a resting worker, or tries to.
        jobs.enqueue_many(*[NewJob("quick") for _ in range(5)])
        hold.set()
        running.log.wait_for("not_listening")
        wait_until(lambda: not jobs.unfinished())
        told(jobs)


@pytest.mark.parametrize("fault", ["half open", "dropped"])
@pytest.mark.usefixtures("suspicious")
def test_a_worker_whose_connections_all_went_silent_replaces_them(
    jobs: Jobs, proxy: Proxy, fault: str
) -> None:
    """Case 23: statements are bounded, so that what ran is recorded and the worker goes on."""
    hold = threading.Event()
    tasks = quick_tasks()
    tasks.register(lambda _: hold.wait(60) or None, "holds")
    behind = Jobs(jobs.driver, proxy.url(jobs.url), jobs.engine)
    with behind.worker(tasks, statement_timeout=1, **NEVER_LOOKS) as running:
        running.ready()
        told(jobs)
        held = enqueue_elsewhere(jobs, "holds")
        jobs.wait(held, lambda job: job.status == "running")
        wait_until(lambda: listeners(jobs))
        break_silently(proxy, fault)
        hold.set()
        running.log.wait_for("broke", command="settle")
        proxy.heal()
        assert jobs.finished(held).attempts == 1
        if fault == "half open":  # what was dropped arrives late, and is no reason for a new one
            running.log.wait_for("not_listening")
        told(jobs)
    assert "TimeoutError: no answer from the database" in running.log.text
