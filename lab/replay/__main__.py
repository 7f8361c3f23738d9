"""Process that simulates a record: reads bundle and changes from standard input, and writes the predictions. JSON."""

import json
import os
import sys
from pathlib import Path

from baton.lab.replay.predict import WhatIf, predict, scenario_of
from baton.lab.replay.record import read_record
from baton.router.types.plain import from_plain, to_plain


def main() -> None:
    plain = json.loads(sys.stdin.readline())
    scenario = scenario_of(read_record(Path(plain["bundle"])), from_plain(WhatIf, plain["what_if"]))
    sys.stdout.write(json.dumps([] if scenario is None else to_plain(predict(scenario))) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
    os._exit(0)  # skips the interpreter's clean-up for the reason given in lab/simulation/__main__.py
