"""Run trials: each line of standard input is one; its figures are a line of output.

A dot on a line of its own is a simulated call that has ended.
"""

import json
import os
import sys
from dataclasses import asdict

from baton.lab.sizing.trials import Trial, run_trial


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    for line in sys.stdin:
        _say(json.dumps(asdict(run_trial(Trial.from_line(line), lambda: _say(".")))))


if __name__ == "__main__":
    main()
    os._exit(0)  # see baton.lab.simulation.__main__
