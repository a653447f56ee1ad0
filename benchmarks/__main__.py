"""Measure and print. See the package's docstring, and ``--help``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from . import claims, draining, enqueueing, latency, notify, snapshot, upkeep
from .bench import Bench
from .peers import PEERS, Peer
from .processes import ProgramError
from .report import Results, as_json, figures_table, number, surroundings
from .targets import targets_table

if TYPE_CHECKING:
    from .figures import Figure, Measured, Scenario

SCENARIOS: tuple[Scenario, ...] = (
    *enqueueing.SCENARIOS,
    *draining.SCENARIOS,
    *latency.SCENARIOS,
    *claims.SCENARIOS,
    *notify.SCENARIOS,
    *upkeep.SCENARIOS,
    *snapshot.SCENARIOS,
)

QUICK = ["enqueue1", "bulk", "drain*", "pickup-idle", "claims", "notify-slow"]
SMOKE = [*QUICK, "memory", "idle", "snapshot"]
QUICK_SCALE = 0.25
SMOKE_BELOW = 0.1
SMOKE_THREADS = 6


def main() -> int:
    """Measure what the command line asks for."""
    arguments = _arguments()
    scale = arguments.scale or (1.0 if arguments.full else QUICK_SCALE)
    only = arguments.only
    if only is None:
        everything = arguments.full or arguments.list
        only = ["*"] if everything else SMOKE if scale < SMOKE_BELOW else QUICK
    scenarios = [s for s in SCENARIOS if any(fnmatch(s.name, p) for p in only)]
    figures = [figure for scenario in scenarios for figure in scenario.figures]
    if arguments.list:
        _define(figures)
        return 0
    peers = _installed(arguments.peers)
    begun = time.monotonic()
    with Bench(
        peers,
        scale=scale,
        full=arguments.full,
        uvloop=arguments.uvloop,
        version=arguments.postgres,
    ) as bench:
        ((server,),) = bench.cluster.psql("SELECT version()")
        around = surroundings(server)
        print(f"{server}\nPython {around['python']}, {around['packages']}")
        print(f"scale {scale:g}, {arguments.repeats} repeats\n", flush=True)
        results, failures = _measure(bench, scenarios, arguments.repeats)
        about = bench.about
    print(f"\nMedians of {arguments.repeats}:\n")
    print(figures_table(results, figures, [peer.name for peer in peers]))
    judged, targets = targets_table(results)
    if judged:
        print(f"\nTargets (ratio: median of the ratios in each repeat):\n\n{judged}")
    if arguments.json:
        more = {
            "surroundings": around,
            "scale": scale,
            "repeats": arguments.repeats,
            "settings": {peer: told.settings for peer, told in about.items()},
            "failures": failures,
            "targets": targets,
        }
        text = json.dumps(as_json(results, figures, more), indent=2)
        arguments.json.write_text(text + "\n")
    print(f"\n{time.monotonic() - begun:.0f} s")
    return 1 if failures else 0


def _measure(bench: Bench, scenarios: list[Scenario], repeats: int) -> tuple[Results, list[str]]:
    """Measure every scenario, all of them before any again: noise then falls on all alike."""
    results = Results()
    failures: list[str] = []

    def measure(scenario: Scenario, peer: Peer, repeat: int) -> list[Measured]:
        try:
            found = list(scenario.run(bench, peer))
        except Exception as error:  # noqa: BLE001 - reported, and the others are measured
            said = error if isinstance(error, ProgramError) else repr(error)
            failures.append(f"{scenario.name}, {peer.name}, repeat {repeat + 1}: {said}")
            print(f"FAILED {failures[-1]}", file=sys.stderr)
            return []
        for measured in found:
            results.add(measured, repeat)
        return found

    # A smoke asks only whether everything works, so it may be done all at once.
    threads = ThreadPoolExecutor(SMOKE_THREADS if bench.scale < SMOKE_BELOW else 1)
    try:
        for repeat in range(repeats):
            started = [
                (scenario, [threads.submit(measure, scenario, peer, repeat) for peer in peers])
                for scenario in scenarios
                for peers in [scenario.peers(bench)]
            ]
            for scenario, measuring in started:
                shown: dict[str, list[str]] = {}
                for measured in chain.from_iterable(one.result() for one in measuring):
                    line = shown.setdefault(measured.figure, [])
                    line.append(f"{measured.peer} {number(measured.value)}")
                print(f"[{repeat + 1}/{repeats}] {scenario.name}")
                for figure, values in shown.items():
                    print(f"    {figure}: {', '.join(values)}", flush=True)
    finally:
        threads.shutdown(cancel_futures=True)
    return results, failures


def _define(figures: list[Figure]) -> None:
    for figure in figures:
        print(f"{figure.key} [{figure.unit}]\n    {figure.definition}")


def _installed(names: list[str]) -> list[Peer]:
    peers: list[Peer] = []
    for peer in PEERS:
        if not any(fnmatch(peer.name, name) for name in names):
            continue
        if peer.missing:
            print(f"{peer.name} is left out: {', '.join(peer.missing)} is not installed")
        else:
            peers.append(peer)
    return peers


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    names = ", ".join(scenario.name for scenario in SCENARIOS)

    def several(text: str) -> list[str]:
        return text.split(",")

    parser.add_argument("--only", type=several, help=f"patterns of: {names}")
    known = ", ".join(peer.name for peer in PEERS)
    parser.add_argument("--peers", type=several, default=["*"], help=f"patterns of: {known}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--scale",
        type=float,
        help=f"of the sizes in the definitions ({QUICK_SCALE}); below {SMOKE_BELOW} much is "
        "measured at once, which shows that it works and no more",
    )
    parser.add_argument("--full", action="store_true", help="every scenario at scale 1")
    parser.add_argument("--postgres", type=int, help="major version (the newest that is found)")
    parser.add_argument("--uvloop", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--list", action="store_true", help="define the figures and end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
