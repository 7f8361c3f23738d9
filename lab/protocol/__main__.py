"""Explore the specification exhaustively: `.venv/bin/python -m baton.lab.protocol`.

Prints the number of states and the ends of all runs. Exits with 1 and the steps that lead there if a participant makes
a step that the specification does not enable, or if a run stops before its requests have ended.
"""

import argparse
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, replace
from graphlib import CycleError

from baton.lab.protocol.cluster import ClusterStates
from baton.lab.protocol.explorer import RequestGraph, Violated
from baton.lab.protocol.participants import ClusterSize

SHAPES = {
    "small": ClusterSize(deaths=1, blocks=1),
    "full": ClusterSize(),
    "long": ClusterSize(routers=1, prefill=1, decode=1, tokens=3),
    "mishaps": ClusterSize(routers=1, prefill=1, decode=1, deaths=1, mishaps=1, blocks=1),
}
"""Explored sizes.

`full`: two of each process, two requests with prompts of two blocks, two deaths. `long`: answers of three tokens.
`mishaps`: also early leases, prompts that fail in the engine and broken connections of clients.
"""


def main() -> int:
    """Explore one size; return 1 if a property is violated."""
    parser = argparse.ArgumentParser(prog=".venv/bin/python -m baton.lab.protocol", description=__doc__)
    parser.add_argument("size", nargs="?", choices=SHAPES, default="small", help="size to explore")
    shape, began_s = SHAPES[parser.parse_args().size], time.process_time()
    try:
        explored = ClusterStates(RequestGraph(shape)).explore()
    except (Violated, CycleError) as found:
        print(found, file=sys.stderr)
        return 1
    result = {**asdict(replace(explored, ends=Counter())), "ends": dict(explored.ends)}
    cpu_s = round(time.process_time() - began_s, 1)
    print(json.dumps({"shape": asdict(shape), **result, "cpu_s": cpu_s}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
