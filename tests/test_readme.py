"""The README does what it says: its programs, its SQL, its tables, its commands, its links."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from sqlalchemy import create_engine

from sqlalchemy_jobs import Tasks, Worker, WorkerSettings, enqueue
from sqlalchemy_jobs.lifecycle import DEFAULT_MAX_ATTEMPTS
from tests.alembic_project import engine as engine_of
from tests.postgres import available

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from sqlalchemy import Row

    from tests.conftest import Clusters

REPOSITORY = Path(__file__).resolve().parent.parent
README = REPOSITORY / "README.md"
WORKERS = REPOSITORY / "docs" / "workers.md"
PAGES = sorted([*REPOSITORY.glob("*.md"), *REPOSITORY.glob("docs/*.md")])
PATIENCE = 60.0

FAILED_JOB = """
from sqlalchemy import create_engine
from sqlalchemy_jobs import Tasks, Worker, enqueue, metadata

def fail(job):
    raise OSError("the mail server is away")

engine = create_engine("postgresql+psycopg://localhost/app")
tasks = Tasks()
tasks.register(fail, "mail")
metadata.create_all(engine)
with engine.begin() as connection:
    enqueue(connection, "mail", max_attempts=1)
Worker(engine, tasks).run(until_idle=True)
"""


@dataclass(frozen=True)
class Block:
    """A fenced block of the README."""

    language: str
    text: str
    line: int
    part: str  # the nearest heading


def sections(page: Path) -> dict[str, list[Block]]:
    """The blocks of a page by second-level heading."""
    found: dict[str, list[Block]] = {}
    section = part = ""
    lines = page.read_text().splitlines()
    number = 0
    while number < len(lines):
        line = lines[number]
        number += 1
        if heading := re.match(r"(##+) (.+)", line):
            part = heading[2]
            section = part if heading[1] == "##" else section
        elif line.startswith("```"):
            end = lines.index("```", number)
            text = "\n".join(lines[number:end]) + "\n"
            found.setdefault(section, []).append(Block(line[3:], text, number + 1, part))
            number = end + 1
    return found


SECTIONS = sections(README)


class Sandbox:
    """A directory and a database in which the blocks of one section are run in order."""

    def __init__(self, root: Path, url: str) -> None:
        """*url* is that of an empty PostgreSQL database, for psycopg."""
        self.root = root
        self.url = url
        self.rows: list[Row[Any]] = []
        self._program: list[Block] = []

    def run(self, blocks: list[Block]) -> None:
        """Run everything. Python blocks of one part of the text are one program."""
        for block in blocks:
            if self._program and block.part != self._program[0].part:
                self.end_program()
            match block.language:
                case "python":
                    self._program.append(block)
                case "text":
                    assert self.end_program() == block.text
                case "sh":
                    self.end_program()
                    for command in block.text.splitlines():
                        self.shell(command)
                case "sql":
                    self.end_program()
                    with engine_of(self.url).connect() as connection:
                        self.rows = list(connection.exec_driver_sql(block.text))
                case other:
                    pytest.fail(f"line {block.line}: what is {other!r}?")
        self.end_program()

    def fail_a_job(self) -> None:
        """Have a job in the database that failed."""
        (self.root / "failed_job.py").write_text(self.adapted(FAILED_JOB))
        self.output(sys.executable, "failed_job.py")

    def end_program(self) -> str:
        """Run the program that was collected, if any, and return what it printed."""
        blocks, self._program = self._program, []
        if not blocks:
            return ""
        first = blocks[0].text.splitlines()[0]
        named = re.fullmatch(r"# (\w+\.py)", first)
        program = ""
        for block in blocks:  # errors shall name the lines of the README
            program += "\n" * (block.line - 1 - program.count("\n")) + block.text
        program = self.adapted(program)
        if blocks[0].part == "Migrations":
            self.migrations(program.lstrip())
            return ""
        path = self.root / (named[1] if named else "readme.py")
        path.write_text(program)
        if re.search(r"\.run\(\)", program):
            return self.until("ready", path.name)
        return self.output(sys.executable, "-W", "error", path.name)

    def adapted(self, program: str) -> str:
        """Put the address of the test's database where the README has one."""
        asyncpg = self.url.replace("+psycopg", "+asyncpg")
        return program.replace("postgresql+psycopg://localhost/app", self.url).replace(
            "postgresql+asyncpg://localhost/app", asyncpg
        )

    def migrations(self, functions: str) -> None:
        """Make an Alembic environment as a user has it, with the README's revision in it."""
        self.output("alembic", "init", "migrations")
        ini = self.root / "alembic.ini"
        url = self.url.replace("%", "%%")
        ini.write_text(
            re.sub(r"(?m)^sqlalchemy\.url = .*", f"sqlalchemy.url = {url}", ini.read_text())
        )
        env = self.root / "migrations" / "env.py"
        (phrase,) = re.findall(r"In `env\.py`, add `([^`]+)`", README.read_text())
        text = env.read_text().replace(
            "import context", "import context\nfrom sqlalchemy_jobs import migrations"
        )
        text, times = re.subn(r"context\.configure\(", rf"\g<0>{phrase}, ", text)
        assert times == 2
        text = text.replace(
            "target_metadata = None",
            "from sqlalchemy import MetaData\ntarget_metadata = MetaData()",
        )
        env.write_text(text)
        self.output("alembic", "revision", "-m", "Add jobs")
        (revision,) = (self.root / "migrations" / "versions").glob("*.py")
        head, _, _ = revision.read_text().partition("def upgrade")
        revision.write_text(head + functions)

    def shell(self, command: str) -> None:
        """Run a command line; what serves is served until its work is seen."""
        words = shlex.split(command, comments=True)
        if words[0] == "uvicorn":
            self.until(r"Uvicorn running on (\S+)", "-m", *words, "--port", "0", then=post_a_user)
        else:
            self.output(*words)

    def output(self, *words: str) -> str:
        """Run a program that must succeed, and return what it printed."""
        module = [sys.executable, "-m"] if words[0] == "alembic" else []
        done = subprocess.run(
            [*module, *words],
            cwd=self.root,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE,
        )
        assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
        return done.stdout

    def until(self, pattern: str, *words: str, then: Callable[[str], str] | None = None) -> str:
        """Start Python, wait until it prints *pattern*, do *then*, and stop it with SIGTERM."""
        log = self.root / "log.txt"
        with log.open("w") as out:
            process = subprocess.Popen(
                [sys.executable, "-W", "error", *words],
                cwd=self.root,
                env=self.environment(),
                stdout=out,
                stderr=subprocess.STDOUT,
            )
        try:
            seen = self.wait_for(process, log, pattern)
            if then is not None:
                self.wait_for(process, log, then(seen))
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE)
        finally:
            process.kill()
            process.wait()
        assert process.returncode in {0, -signal.SIGTERM}, log.read_text()
        return log.read_text()

    @staticmethod
    def wait_for(process: subprocess.Popen[bytes], log: Path, pattern: str) -> str:
        """Wait until the log has *pattern*; return its first group, or all of it."""
        until = time.monotonic() + PATIENCE
        while True:
            ended = process.poll() is not None
            if match := re.search(pattern, log.read_text()):
                return match[match.re.groups]
            assert not ended, log.read_text()
            assert time.monotonic() < until, log.read_text()
            time.sleep(0.02)

    def environment(self) -> dict[str, str]:
        """The package need not be installed where its tests run."""
        return {**os.environ, "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}


def post_a_user(address: str) -> str:
    """Use the application of the FastAPI block, and return what its worker must print."""
    answer = httpx.post(
        f"{address}/users", params={"email": "ada@example.org"}, timeout=PATIENCE, trust_env=False
    )
    assert answer.status_code == 200
    return f"mail to user {answer.json()}"


@pytest.fixture
def sandbox(tmp_path: Path, clusters: Clusters) -> Iterator[Sandbox]:
    """A sandbox with a PostgreSQL database of its own."""
    versions = available()
    if not versions:
        pytest.skip("TEST_POSTGRES=none")
    cluster = clusters.get(versions[0])
    name = cluster.create_database()
    yield Sandbox(tmp_path, cluster.url(name, "psycopg"))
    cluster.drop_database(name)


WHY = "Why did it fail?"
FIRST_RUN = "First run"


@pytest.mark.parametrize("section", sorted(SECTIONS.keys() - {WHY, FIRST_RUN}))
def test_every_block_runs(sandbox: Sandbox, section: str) -> None:
    """The blocks of a section run in order, without a warning, and print what the text shows."""
    sandbox.run(SECTIONS[section])


def test_one_statement_says_why_a_job_failed(sandbox: Sandbox) -> None:
    """The statement of the README finds a failed job and its traceback."""
    sandbox.fail_a_job()
    sandbox.run(SECTIONS[WHY])
    (row,) = sandbox.rows
    assert (row.id, row.task, row.attempts) == (1, "mail", 1)
    assert "OSError: the mail server is away" in row.last_error


def test_the_statements_about_health_run(sandbox: Sandbox) -> None:
    """The statements in the page about workers run, and the last one finds a failed job."""
    sandbox.fail_a_job()
    for blocks in sections(WORKERS).values():
        sandbox.run(blocks)
    (row,) = sandbox.rows
    assert (row.task, row.failed) == ("mail", 1)


def test_the_events_of_the_log_are_the_real_ones() -> None:
    """Every event that the page about workers names is in the code."""
    code = "".join(path.read_text() for path in (REPOSITORY / "sqlalchemy_jobs").glob("*.py"))
    _, _, logging = WORKERS.read_text().partition("\n## Logging")
    events = [name for cell in re.findall(r"(?m)^\| (`.+?) \|", logging) for name in _names(cell)]
    assert len(events) > 15
    for event in events:
        assert f'"{event}"' in code or f'"{event.replace("_", " ")}"' in code, event


def _names(cell: str) -> list[str]:
    return [name for name in re.findall(r"`(\w+)`", cell) if name != "event"]


def test_the_two_commands_are_in_the_makefile() -> None:
    """A fresh machine needs two commands, one to run the main job and one to pass the tests."""
    (block,) = SECTIONS[FIRST_RUN]
    commands = [shlex.split(line, comments=True) for line in block.text.splitlines()]
    assert commands == [["make", "quickstart"], ["make", "test"]]
    makefile = (REPOSITORY / "Makefile").read_text()
    for _, target in commands:
        assert re.search(rf"(?m)^{target}: \$\(VENV\)/installed", makefile), target


# --- tables ------------------------------------------------------------------------------------


def table(page: Path, first: str) -> dict[str, str]:
    """The first two columns of the table whose heading starts with *first*."""
    _, _, rest = page.read_text().partition(f"\n| {first} |")
    body, _, _ = rest.partition("\n\n")
    rows = [line.strip("| ").split(" | ") for line in body.splitlines()[2:]]
    return {row[0].strip("`"): row[1].strip() for row in rows}


def words(value: object) -> str:
    """A default as the tables write it."""
    match value:
        case None:
            return "none"
        case bool():
            return "on" if value else "off"
        case int():
            return str(value)
        case str():
            return f'`"{value}"`'
        case type():
            return f"`{value.__name__}`"
        case float():
            units = (("days", 86_400), ("h", 3600), ("min", 60), ("s", 1))
            unit, size = next(u for u in units if value >= u[1] and value % u[1] == 0)
            return f"{value / size:g} {unit}"
        case _:
            raise AssertionError(value)


def worker_defaults() -> dict[str, str]:
    """The real defaults of a worker; where None stands for a number, that number."""
    settings = WorkerSettings()
    timing = Worker(create_engine("postgresql+psycopg://"), Tasks())._core.machine.timing
    real = {field.name: getattr(settings, field.name) for field in fields(settings)}
    real["timeout"] = settings.default_timeout
    real["statement_timeout"] = timing.statement_timeout
    wait = real.pop("backoff")
    shown = {name: words(value) for name, value in real.items()}
    shown["backoff"] = ", ".join(words(float(wait(n))) for n in (1, 2, 3))
    shown["backoff"] += f" … {words(float(wait(99)))}"
    return shown


@pytest.mark.parametrize("page", [README, WORKERS], ids=lambda page: page.name)
def test_the_defaults_of_a_worker_are_the_real_ones(page: Path) -> None:
    """Both tables name every setting of a worker with its default."""
    assert table(page, "worker") == worker_defaults()


def test_the_defaults_of_a_job_are_the_real_ones() -> None:
    """The table names every option of `enqueue` with its default."""
    parameters = list(inspect.signature(enqueue).parameters.values())[2:]
    assert table(README, "job") == {p.name: words(p.default) for p in parameters}
    assert f"which is {DEFAULT_MAX_ATTEMPTS} unless" in README.read_text()


# --- links -------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that a page's headings make."""
    headings = re.findall(r"(?m)^#+ (.+)$", page.read_text())
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Links to files and headings of this repository are not broken."""
    for target in re.findall(r"\]\((?!\w+:)([^)\s]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        linked = page.parent / name if name else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target
