"""Simulate seeds one after another and print a JSON object per line: `.venv/bin/python -m baton.lab.simulation`.

A seed repeats its events only with a fixed PYTHONHASHSEED, which `campaign.py` sets.
"""

import argparse
import gc
import json
import os
import sys
import time
from collections.abc import Mapping

from baton.lab.simulation.campaign import Tally
from baton.lab.simulation.planted import PLANTS, planted
from baton.lab.simulation.world import WorldOptions, WorldResult, run_seed

TELL_EVERY_S = 1.0


def main() -> int:
    """Run the seeds; return 1 if an invariant was violated or an event refused."""
    arguments = _parser().parse_args()
    options = WorldOptions(arguments.requests, arguments.faults)
    show = _show if arguments.trace else None
    gc.collect()
    gc.freeze()  # without this, the collection after each seed would scan all imported objects
    tally, printed_s, violated = Tally(), time.monotonic(), False
    with planted(arguments.plant):
        for seed in range(arguments.first, arguments.first + arguments.count * arguments.stride, arguments.stride):
            result = run_seed(seed, options, show)
            if result.found is not None:
                _tell_violation(result)
                violated = True
                if not arguments.go_on:
                    break
            else:
                tally.add(result)
            if time.monotonic() - printed_s > TELL_EVERY_S:
                _tell({"tally": tally.to_plain()})
                tally, printed_s = Tally(), time.monotonic()
    _tell({"tally": tally.to_plain()})
    return int(violated)


def _tell_violation(result: WorldResult) -> None:
    last = [] if result.trace is None else list(result.trace.last)
    faults = [str(fault) for fault in result.faults]
    digest = "" if result.trace is None else result.trace.digest
    line = {"seed": result.seed, "violation": result.found, "faults": faults, "last": last, "digest": digest}
    _tell(line)


def _tell(line: Mapping[str, object]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


def _show(line: str) -> None:
    _tell({"event": line})


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=".venv/bin/python -m baton.lab.simulation", description=__doc__)
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--count", type=int, default=1, help="number of seeds")
    parser.add_argument("--stride", type=int, default=1, help="difference between two seeds")
    parser.add_argument("--requests", type=int, default=6, help="requests per seed")
    parser.add_argument("--faults", type=int, default=None, help="faults per seed; default: drawn from the seed")
    parser.add_argument("--go-on", action="store_true", help="continue after a violation")
    parser.add_argument("--trace", action="store_true", help="print every event")
    parser.add_argument("--plant", choices=sorted(PLANTS), default=None, help="planted bug, which must be found")
    return parser


if __name__ == "__main__":
    # Exit without the interpreter's final collection: in Python 3.11 it crashes on a future whose loop is gone.
    os._exit(main())
