"""Measure and print. See the package's docstring, and ``--help``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

from . import draining
from .bench import Bench
from .peers import PEERS, Peer
from .processes import ProgramError
from .report import Results, as_json, figures_table, number, surroundings

if TYPE_CHECKING:
    from .figures import Figure, Scenario

SCENARIOS: tuple[Scenario, ...] = (*draining.SCENARIOS,)


def main() -> int:
    """Measure what the command line asks for."""
    arguments = _arguments()
    scenarios = [s for s in SCENARIOS if any(fnmatch(s.name, p) for p in arguments.only)]
    figures = [figure for scenario in scenarios for figure in scenario.figures]
    if arguments.list:
        _define(figures)
        return 0
    peers = _installed(arguments.peers)
    scale = arguments.scale or (1.0 if arguments.full else 0.5)
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
    if arguments.json:
        more = {
            "surroundings": around,
            "scale": scale,
            "repeats": arguments.repeats,
            "settings": {peer: told["settings"] for peer, told in about.items()},
            "failures": failures,
        }
        text = json.dumps(as_json(results, figures, more), indent=2)
        arguments.json.write_text(text + "\n")
    print(f"\n{time.monotonic() - begun:.0f} s")
    return 1 if failures else 0


def _measure(bench: Bench, scenarios: list[Scenario], repeats: int) -> tuple[Results, list[str]]:
    """Measure every scenario, all of them before any again: noise then falls on all alike."""
    results = Results()
    failures: list[str] = []
    for repeat in range(repeats):
        for scenario in scenarios:
            begun = time.monotonic()
            shown: dict[str, list[str]] = {}
            for peer in scenario.peers(bench):
                try:
                    for measured in scenario.run(bench, peer):
                        results.add(measured, repeat)
                        line = shown.setdefault(measured.figure, [])
                        line.append(f"{measured.peer} {number(measured.value)}")
                except ProgramError as error:
                    failures.append(f"{scenario.name}, {peer.name}, repeat {repeat + 1}: {error}")
                    print(f"FAILED {failures[-1]}", file=sys.stderr)
            spent = time.monotonic() - begun
            print(f"[{repeat + 1}/{repeats}] {scenario.name} ({spent:.0f} s)")
            for figure, values in shown.items():
                print(f"    {figure}: {', '.join(values)}", flush=True)
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

    parser.add_argument("--only", type=several, default=["*"], help=f"patterns of: {names}")
    known = ", ".join(peer.name for peer in PEERS)
    parser.add_argument("--peers", type=several, default=["*"], help=f"patterns of: {known}")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--scale", type=float, help="of the sizes in the definitions (0.5)")
    parser.add_argument("--full", action="store_true", help="scale 1, for all peers alike")
    parser.add_argument("--postgres", type=int, help="major version (the newest that is found)")
    parser.add_argument("--uvloop", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="also write everything to this file")
    parser.add_argument("--list", action="store_true", help="define the figures and end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
