"""What the worker's machine is told, and what it asks for. Values only.

Events come in, commands go out. A database command is answered by exactly one event of its own
kind or by :class:`Broke`; times inside a message are either durations in seconds or readings of
the monotonic clock that the shell passes to the machine, never a time of day.

Nobody changes a message. The four of which each job has one are not frozen all the same, for that
would make them four times slower to build.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeAlias

from .lifecycle import Event as Life

Key: TypeAlias = tuple[int, int]
"""(job id, attempt): with the worker's name, the fence of every write."""


@dataclass(slots=True, unsafe_hash=True)  # see the module's docstring
class Lease:
    """A claimed job: what the handler needs, and the key under which its outcome is recorded."""

    job_id: int
    attempt: int
    task: str = field(default="", compare=False)
    max_attempts: int = field(default=3, compare=False)
    timeout: float | None = field(default=None, compare=False)  # seconds; None: no limit
    failures: int | None = field(default=None, compare=False)  # before; None: attempt - 1
    waited: float = field(default=0.0, compare=False)  # seconds from run_at to the claim
    payload: str = field(default="null", compare=False, repr=False)  # JSON text, not yet parsed
    meta: str = field(default="null", compare=False, repr=False)  # JSON text, not yet parsed

    @property
    def key(self) -> Key:
        return (self.job_id, self.attempt)

    @property
    def tries(self) -> int:
        """The attempts that count, this one included: not those that were given back."""
        return self.attempt if self.failures is None else self.failures + 1

    @property
    def last(self) -> bool:
        """True when no attempt is left after this one."""
        return self.attempt >= self.max_attempts


@dataclass(slots=True, unsafe_hash=True)  # see the module's docstring
class Outcome:
    """How an attempt ended. Made by the constructors below, one a legal end."""

    lease: Lease
    event: Life
    delay: float = 0.0  # seconds until the job is due again
    error: str | None = field(default=None, repr=False)
    duration: float = 0.0  # seconds that the handler ran

    @classmethod
    def succeeded(cls, lease: Lease, duration: float = 0.0) -> Outcome:
        return cls(lease, Life.SUCCEED, duration=duration)

    @classmethod
    def raised(cls, lease: Lease, error: str, delay: float, duration: float = 0.0) -> Outcome:
        """Another attempt after *delay*, or the end if this was the last one."""
        event = Life.FAIL if lease.last else Life.RETRY
        return cls(lease, event, 0.0 if lease.last else delay, error, duration)

    @classmethod
    def failed(cls, lease: Lease, error: str, duration: float = 0.0) -> Outcome:
        return cls(lease, Life.FAIL, error=error, duration=duration)

    @classmethod
    def snoozed(cls, lease: Lease, delay: float, duration: float = 0.0) -> Outcome:
        return cls(lease, Life.SNOOZE, delay, duration=duration)

    @classmethod
    def released(cls, lease: Lease, duration: float = 0.0) -> Outcome:
        return cls(lease, Life.RELEASE, duration=duration)


class Reason(StrEnum):
    """Why an attempt is aborted."""

    TIMEOUT = "timeout"
    LEASE_LOST = "lease lost"
    SHUTDOWN = "shutdown"


class Chore(StrEnum):
    """What a sweep does."""

    RECOVER = "recover"  # expired leases
    PRUNE = "prune"  # finished rows beyond their retention


# --- commands ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Claim:
    """Claim up to *limit* due jobs. *full*: look at everything, trusting no memory of earlier."""

    limit: int
    full: bool = True


@dataclass(frozen=True, slots=True)
class Settle:
    """Record outcomes. *passing_by*: do not wait for rows that another transaction has locked."""

    outcomes: tuple[Outcome, ...]
    passing_by: bool = False


@dataclass(frozen=True, slots=True)
class Renew:
    """Extend leases by the visibility timeout."""

    leases: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Do one bounded batch of a chore."""

    chore: Chore


DatabaseCommand: TypeAlias = Claim | Settle | Renew | Sweep


@dataclass(slots=True, unsafe_hash=True)  # see the module's docstring
class Start:
    """Run the handler of a lease in a slot."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class Abort:
    """Tell a handler that its attempt is no longer wanted."""

    lease: Lease
    reason: Reason


@dataclass(frozen=True, slots=True)
class Interrupt:
    """Break the connection on which *command* hangs, and answer it with :class:`Broke`."""

    command: DatabaseCommand


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to do before *until* (monotonic) unless an event comes first."""

    until: float


@dataclass(frozen=True, slots=True)
class Stop:
    """The last command. *abandoned* are still claimed and come back when their leases run out."""

    abandoned: tuple[Lease, ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """Have the listener take the mark of a worker that wants to be notified. See ``_bell``."""


@dataclass(frozen=True, slots=True)
class Rouse:
    """Have the listener give up that mark."""


Command: TypeAlias = DatabaseCommand | Start | Abort | Interrupt | Wait | Stop

# --- events -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Notified:
    """Something may have become due: a job was enqueued, moved back, or a task was registered."""


@dataclass(frozen=True, slots=True)
class ListenerChanged:
    """Notifications arrive (*up*) or do not, for the *reason*, so polling must take over."""

    up: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Claimed:
    """The answer to :class:`Claim`.

    *more*: other due jobs may be waiting. *next_due*: seconds until the earliest job that is
    pending but not yet due; None if there is none or nobody asked, because there is more. *sure*:
    nothing else is due; if not, the answer was given at once, before that was known.
    """

    leases: tuple[Lease, ...]
    more: bool = False
    sure: bool = True
    next_due: float | None = None


@dataclass(frozen=True, slots=True)
class Settled:
    """The answer to :class:`Settle`.

    *refused*: the lease was lost (or an earlier try recorded it). *postponed*: the database
    refuses this one row; the outcome is kept and tried again later. All others are *recorded*.
    """

    refused: tuple[Outcome, ...] = ()
    postponed: tuple[Outcome, ...] = ()
    recorded: tuple[Outcome, ...] = ()


@dataclass(frozen=True, slots=True)
class Renewed:
    """The answer to :class:`Renew`, or leases renewed by somebody else on the machine's behalf.

    *issued* is then the monotonic time at which that renewal was sent. *passed_by*: still held,
    but another transaction has locked the row.
    """

    command: Renew
    lost: frozenset[Key] = frozenset()
    issued: float | None = None
    passed_by: frozenset[Key] = frozenset()


@dataclass(frozen=True, slots=True)
class Swept:
    """The answer to :class:`Sweep`. *more*: the batch was full. *woke*: jobs moved to pending."""

    chore: Chore
    more: bool = False
    woke: int = 0


@dataclass(frozen=True, slots=True)
class Broke:
    """The command failed, or its answer was lost: it may or may not have taken effect."""

    command: DatabaseCommand
    error: str = ""
    cause: BaseException | None = field(default=None, compare=False, repr=False)


@dataclass(slots=True, unsafe_hash=True)  # see the module's docstring
class Finished:
    """A handler ended."""

    outcome: Outcome


@dataclass(frozen=True, slots=True)
class StopRequested:
    """Take no more jobs, let the running ones end, then stop."""


@dataclass(frozen=True, slots=True)
class TasksChanged:
    """A task was registered; a worker that rests is not marked for it yet."""


@dataclass(frozen=True, slots=True)
class Rested:
    """The answer to :class:`Rest`.

    *quiet*: whoever enqueues from now on notifies, and nobody is left who looked for the mark
    before it was there and has not committed yet.
    """

    quiet: bool


Event: TypeAlias = (
    Tick
    | Notified
    | ListenerChanged
    | Claimed
    | Settled
    | Renewed
    | Swept
    | Broke
    | Finished
    | StopRequested
)
