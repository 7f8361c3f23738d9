"""Process that runs trials: reads one per line from standard input, and writes its figures as a line of JSON.

It also writes a line with a dot whenever a simulated call has ended.
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
    os._exit(0)  # skips the interpreter's clean-up for the reason given in lab/simulation/__main__.py
