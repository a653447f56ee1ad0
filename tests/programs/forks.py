"""A program that makes an engine and a worker, uses the engine, and then forks.

    python tests/programs/forks.py URL CHILDREN

Each child runs the worker until nothing is due, and prints the worker's name and the jobs it ran.
"""

from __future__ import annotations

import json
import os
import sys
import time

from sqlalchemy import create_engine
from sqlalchemy.orm import sessionmaker

from sqlalchemy_jobs import JobContext, JobSession, Tasks, Worker


def say(**what: object) -> None:
    """Write a line, at once: a fork would write what is buffered twice."""
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def main(url: str, children: int) -> None:
    """Enqueue in the parent, run in the children."""
    engine = create_engine(url)
    tasks = Tasks()
    ran: list[int] = []

    @tasks.task("quick")
    def quick(job: JobContext) -> None:
        time.sleep(0.02)
        ran.append(job.id)

    worker = Worker(engine, tasks, concurrency=2, poll_interval=0.2)
    with sessionmaker(engine, class_=JobSession).begin() as session:
        for _ in range(20 * children):
            session.enqueue("quick")
    say(parent=worker.name)
    pids: list[int] = []
    for _ in range(children):
        pid = os.fork()
        if pid == 0:
            worker.run(until_idle=True)
            say(name=worker.name, ran=ran)
            os._exit(0)  # the parent's pool is the parent's to close
        pids.append(pid)
    for pid in pids:
        os.waitpid(pid, 0)
    # The parent's own connections still work: no child has used or closed them.
    with sessionmaker(engine, class_=JobSession).begin() as session:
        session.enqueue("quick")
    worker.run(until_idle=True)
    say(name=worker.name, ran=ran)
    engine.dispose()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
