"""Broken machines, tables and databases: what shows that the laws have teeth.

    python -m tests.mutants                 # try them all, and say which law caught each, and when
    python -m tests.mutants snooze          # those whose name has this word in it

A mutant replaces one passage of a module's source, which must stand there exactly once: when the
source changes, the mutant fails loudly and asks to be adapted. The mutated source is loaded as a
module of its own, beside the sound one. It is caught if the laws that it names find it wrong, by
an assertion, not by a crash; and the sound modules must pass the very same laws.
"""

from __future__ import annotations

import inspect
import sys
import time
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Final

import pytest

from sqlalchemy_jobs import _machine, lifecycle
from tests import simulated, test_lifecycle, test_machine
from tests.test_machine_stateful import fleet_of, walk


class Laws(Enum):
    """Who is to catch a mutant."""

    HISTORIES = "test_machine_stateful"
    EXAMPLES = "test_machine"
    TABLE = "test_lifecycle"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A defect: in *module*, the passage *sound* becomes *broken*, which *laws* must catch."""

    name: str
    module: ModuleType
    sound: str
    broken: str
    laws: Laws = Laws.HISTORIES

    def load(self) -> ModuleType:
        """Return the module with the defect in it; LookupError if there is no such passage."""
        assert self.module.__file__ is not None
        source = Path(self.module.__file__).read_text("utf-8")
        if source.count(self.sound) != 1:
            message = (
                f"mutant {self.name!r}: the passage must stand once in {self.module.__name__}, "
                f"not {source.count(self.sound)} times; adapt the mutant:\n{self.sound}"
            )
            raise LookupError(message)
        name = f"{self.module.__name__}__{self.name.replace(' ', '_').replace('-', '_')}"
        module = ModuleType(name)
        module.__package__ = self.module.__package__
        module.__file__ = self.module.__file__
        sys.modules[name] = module  # dataclasses look their module up
        try:
            code = compile(source.replace(self.sound, self.broken), name, "exec")
            exec(code, module.__dict__)  # noqa: S102 - our own source, with one passage changed
        finally:
            del sys.modules[name]
        return module


def machine(name: str, sound: str, broken: str, laws: Laws = Laws.HISTORIES) -> Mutant:
    """A defect of the machine."""
    return Mutant(name, _machine, sound, broken, laws)


def database(name: str, sound: str, broken: str) -> Mutant:
    """A defect of what the statements do, put into the simulated database."""
    return Mutant(name, simulated, sound, broken)


def table(name: str, sound: str, broken: str) -> Mutant:
    """A defect of the table of a job's life."""
    return Mutant(name, lifecycle, sound, broken, Laws.TABLE)


MUTANTS: Final = (
    # --- the fence and the leases
    database(
        "fence without attempts",
        "return row.locked_by == by and row.attempts == attempt",
        "return row.locked_by == by",
    ),
    database(
        "attempts go down when an attempt is given back",
        "                row.max_attempts += 1\n",
        "                row.attempts -= 1\n",
    ),
    database(
        "a claim is not counted",
        "        row.attempts += move.counts\n",
        "",
    ),
    database(
        "live leases are recovered",
        "return row.lease_expires_at is not None and row.lease_expires_at <= self.now",
        "return row.lease_expires_at is not None",
    ),
    database(
        "a lease is shorter than the worker thinks",
        "                row.lease_expires_at = self.now + lease\n            case Hold.EXTEND:",
        "                row.lease_expires_at = self.now + lease / 2\n"
        "            case Hold.EXTEND:",
    ),
    database(
        "a claim takes more than its limit",
        "for row in free[: command.limit]:",
        "for row in free:",
    ),
    database(
        "a job without attempts stays for ever",
        "if row.id not in self.locked and self.allows(row, Life.EXHAUST):",
        "if False:",
    ),
    machine(
        "lease counted from the answer to the claim",
        "lease_until = flight.issued + self.timing.visibility_timeout\n        for lease in event",
        "lease_until = now + self.timing.visibility_timeout\n        for lease in event",
    ),
    machine(
        "lease counted from after the issue of the renewal",
        "            issued = flight.issued\n",
        "            issued = flight.issued + 1.0\n",
    ),
    machine(
        "handlers start although their leases are over",
        "if self.phase is Phase.RUNNING and now < lease_until:",
        "if self.phase is Phase.RUNNING:",
    ),
    machine(
        "the newest lease decides when to renew",
        "self._renew_at = min(untils) - two_thirds",
        "self._renew_at = max(untils) - two_thirds",
    ),
    machine(
        "no renewal while stopping",
        "        self._plan_renew(now, commands)\n",
        "        if self.phase is Phase.RUNNING:\n            self._plan_renew(now, commands)\n",
    ),
    machine(
        "ended outcomes are not renewed",
        "self._launch(Renew(self.held), now, commands)",
        "self._launch(Renew(self.running), now, commands)",
    ),
    machine(
        "a lost lease keeps its slot",
        "                del self._running[lease.key]\n                commands.append(Abort(lease",
        "                commands.append(Abort(lease",
    ),
    # --- outcomes
    machine(
        "an outcome is dropped when its lease is over",
        "        ready = [end for end in self._ended.values()",
        "        self._ended = {k: e for k, e in self._ended.items() if now < e.lease_until}\n"
        "        ready = [end for end in self._ended.values()",
    ),
    machine(
        "outcomes are dropped when their Settle breaks",
        '        if kind == "claim":\n            self._look_at',
        '        if kind == "settle":\n            self._ended.clear()\n'
        '        if kind == "claim":\n            self._look_at',
    ),
    machine(
        "a late end is recorded",
        "        if attempt is not None:  # else it had ended before, and this is too late\n"
        "            self._ended[outcome.lease.key] = _Ended(outcome, attempt.lease_until)\n",
        "        until = attempt.lease_until if attempt else 0.0\n"
        "        self._ended[outcome.lease.key] = _Ended(outcome, until)\n",
    ),
    machine(
        "outcomes are recorded one by one",
        "            outcomes = tuple(end.outcome for end in ready)\n",
        "            outcomes = tuple(end.outcome for end in ready[:1])\n",
    ),
    machine(
        "a postponed outcome is sent again at once",
        "                end.not_before = now + self._backoff(end.refusals)\n",
        "                end.not_before = now\n",
    ),
    machine(
        "a postponed outcome is forgotten",
        "                end.not_before = now + self._backoff(end.refusals)\n",
        "                del self._ended[key]\n",
    ),
    # --- slots and deadlines
    machine(
        "a claim ignores the slots that are taken",
        "self._launch(Claim(self.free, full=full), now, commands)",
        "self._launch(Claim(self.timing.concurrency, full=full), now, commands)",
    ),
    machine(
        "a timeout does not free the slot",
        "                del self._running[key]\n                self._ended[key] =",
        "                attempt.deadline = None\n                self._ended[key] =",
    ),
    machine(
        "a timeout leaves no outcome",
        "                self._ended[key] = _Ended(self._timed_out(attempt.lease), "
        "attempt.lease_until)\n",
        "",
    ),
    # --- commands
    machine(
        "two claims in flight",
        '            "claim" in self._flights\n            or now < self._look_at\n',
        "            now < self._look_at\n",
    ),
    machine(
        "two sweeps in flight",
        "        if any(chore in self._flights for chore in _CHORES):\n            return\n",
        "",
    ),
    machine(
        "a failing command stops the others",
        "        self._not_before[kind] = now + self._backoff(failures, longest)\n",
        "        pause = self._backoff(failures, longest)\n"
        '        for each in ("claim", "settle", "renew", *Chore):\n'
        "            self._not_before[each] = now + pause\n",
    ),
    machine(
        "a failing command does not back off",
        "        self._not_before[kind] = now + self._backoff(failures, longest)\n",
        "",
    ),
    machine(
        "a failing renewal waits longer than its lease",
        "            longest = min(longest, self.timing.visibility_timeout / 6)\n",
        "            pass\n",
    ),
    machine(
        "a hanging command is never interrupted",
        "                commands.append(Interrupt(flight.command))\n",
        "",
    ),
    # --- looking for work
    machine(
        "a notification during a claim is forgotten",
        "            self._look_again = True\n",
        "            pass\n",
    ),
    machine(
        "a job put back during a claim is forgotten",
        "                    self._due_at = min(self._due_at, now + outcome.delay)\n",
        "",
        Laws.EXAMPLES,
    ),
    machine(
        "a job put back is forgotten",
        "                    self._look_at = min(self._look_at, now + outcome.delay)\n",
        "",
    ),
    machine(
        "recovered jobs are not looked for",
        "        if event.woke:\n",
        "        if False:\n",
    ),
    machine(
        "the next due time is ignored",
        "                wait = min(wait, max(event.next_due, SHORTEST_LOOK))\n",
        "                pass\n",
    ),
    machine(
        "an empty answer from memory is believed",
        "        if self._look_again or (not event.more and not (full and event.sure)):\n",
        "        if self._look_again:\n",
    ),
    machine(
        "memory is trusted when woken",
        "        full = self._fresh or now >= self._full_at + FULL_LOOK_EVERY\n",
        "        full = now >= self._full_at + FULL_LOOK_EVERY\n",
    ),
    machine(
        "memory is trusted for ever",
        "        full = self._fresh or now >= self._full_at + FULL_LOOK_EVERY\n",
        "        full = self._fresh\n",
        Laws.EXAMPLES,
    ),
    machine(
        "locked jobs make it spin",
        "            self._look_at = now if event.leases else now + SHORTEST_LOOK\n",
        "            self._look_at = now\n",
    ),
    machine(
        "polling never backs off",
        "                    self._pause = min(2 * self._pause, self.timing.max_poll_interval)\n",
        "                    pass\n",
        Laws.EXAMPLES,
    ),
    machine(
        "idle workers look in step",
        "                wait = self._pause * (1 + self._jitter() / 10)\n",
        "                wait = self._pause\n",
        Laws.EXAMPLES,
    ),
    machine(
        "failing workers try again in step",
        "        return pause * (0.5 + self._jitter() / 2)\n",
        "        return pause\n",
        Laws.EXAMPLES,
    ),
    machine(
        "a wait is infinite",
        "        until = min(now + LONGEST_WAIT, self._check_at)\n",
        "        until = self._check_at\n",
        Laws.EXAMPLES,
    ),
    machine(
        "until idle stops after a failed look",
        "            self._found_nothing\n            and now < self._look_at\n",
        "            now < self._look_at or bool(self._not_before)\n",
        Laws.EXAMPLES,
    ),
    # --- stopping
    machine(
        "a claim answered while stopping starts handlers",
        "if self.phase is Phase.RUNNING and now < lease_until:",
        "if now < lease_until:",
    ),
    machine(
        "it stops before outcomes are recorded",
        "        done = not self._running and not self._ended and not self._flights\n",
        "        done = not self._running\n",
    ),
    machine(
        "it never gives up waiting",
        "        if done or now >= self._stop_at:\n",
        "        if done:\n",
    ),
    machine(
        "handlers are not told to stop",
        "            commands.extend(Abort(lease, Reason.SHUTDOWN) for lease in self.running)\n",
        "",
    ),
    machine(
        "handlers are told to stop at the very end",
        "            self._abort_at = now + self.timing.shutdown_timeout * DRAIN_SHARE\n",
        "            self._abort_at = now + self.timing.shutdown_timeout\n",
    ),
    machine(
        "outcomes left behind are not named",
        "            commands.append(Stop(self.held))\n",
        "            commands.append(Stop(self.running))\n",
    ),
    # --- the table
    table(
        "releasing costs an attempt",
        "            allowance=Allowance.GIVE_BACK,\n            lease=Hold.DROP,\n"
        "            run_at=RunAt.NOW,\n            wakes=True,\n",
        "            lease=Hold.DROP,\n            run_at=RunAt.NOW,\n            wakes=True,\n",
    ),
    table(
        "a recovered job wakes nobody",
        "            run_at=RunAt.NOW,\n            errors=Errors.APPEND,\n"
        "            wakes=True,\n",
        "            run_at=RunAt.NOW,\n            errors=Errors.APPEND,\n",
    ),
    table(
        "a cancelled job keeps its lease",
        '_move("pending running", Status.CANCELLED, lease=Hold.DROP)',
        '_move("pending running", Status.CANCELLED)',
    ),
    table(
        "anybody may report success",
        "Status.SUCCEEDED, guard=Guard.HOLDER, lease=Hold.DROP)",
        "Status.SUCCEEDED, lease=Hold.DROP)",
    ),
    table(
        "what succeeded may be requeued",
        '            "failed cancelled",\n',
        '            "failed cancelled succeeded",\n',
    ),
    table(
        "unfinished jobs are pruned",
        '_move("succeeded failed cancelled", None, guard=Guard.AGED)',
        '_move("pending succeeded failed cancelled", None, guard=Guard.AGED)',
    ),
    table(
        "a dead letter does not say why",
        "guard=Guard.SPENT, errors=Errors.APPEND)",
        "guard=Guard.SPENT)",
    ),
)

BUDGET: Final = 400
"""Walks at most in which a mutant must show itself; most need fewer than ten."""


def histories(machine_module: ModuleType, simulated_module: ModuleType) -> None:
    """Walk until a law breaks, the same walks each time."""
    fleet = fleet_of(machine_module, simulated_module)
    for seed in range(BUDGET):
        walk(fleet, seed)


def ask(tests: ModuleType, subject: object) -> None:
    """Hand *subject* to each test of a module, whose only argument is what it judges."""
    for name, test in inspect.getmembers(tests, inspect.isfunction):
        if name.startswith("test_") and test.__module__ == tests.__name__:
            try:
                test(subject)
            except (AssertionError, pytest.fail.Exception) as complaint:
                message = f"{name}: {complaint}"
                raise AssertionError(message) from complaint


def judge(laws: Laws, module: ModuleType) -> str | None:
    """Return what *laws* say against *module*; None if it keeps them all."""
    try:
        match laws:
            case Laws.HISTORIES if hasattr(module, "Machine"):
                histories(module, simulated)
            case Laws.HISTORIES:
                histories(_machine, module)
            case Laws.EXAMPLES:
                ask(test_machine, partial(test_machine.Rig, module))
            case Laws.TABLE:
                ask(test_lifecycle, module)
    except AssertionError as complaint:
        return str(complaint).partition("\n")[0]
    return None


def main(words: list[str]) -> int:
    """Try the mutants whose names contain one of *words*, or all."""
    escaped = 0
    for mutant in MUTANTS:
        if words and not any(word in mutant.name for word in words):
            continue
        start = time.perf_counter()
        try:
            complaint = judge(mutant.laws, mutant.load()) or "ESCAPED"
        except Exception as error:  # noqa: BLE001 - a crash is not a catch; on with the others
            complaint = f"CRASHED, {error!r}"
        escaped += complaint.startswith(("ESCAPED", "CRASHED"))
        taken = time.perf_counter() - start
        sys.stdout.write(f"{taken:6.1f} s  {mutant.name}: {complaint}\n")
    return escaped


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
