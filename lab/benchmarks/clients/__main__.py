"""Starts `baton up` with the demo model, or takes `--url`; then each client that is named has its turn.

.venv/bin/python -m baton.lab.benchmarks.clients [NAME ...] [--seconds 20] [--json FILE]
"""

import json
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from baton.lab.benchmarks.clients.others import CLIENTS
from baton.lab.benchmarks.clients.run import ClientRun, Service, served_model, started
from baton.lab.report.result import DEMO, make_parser, write_result
from baton.launch.paths import ROOT

SHORT_CONTEXT = ("--max-model-len", "64")


def main() -> int:
    parser = make_parser(
        __doc__,
        url=("", "of a service that runs, with the model in --model and in float32"),
        model=(DEMO, "folder"),
        environments=(ROOT / ".cache" / "clients", "where clients lie"),
        seconds=(20.0, "of load; the soak: 600"),
    )
    parser.add_argument("clients", nargs="*", default=list(CLIENTS), help=f"of {', '.join(CLIENTS)}; default: all")
    asked = parser.parse_args()
    failed, found = 0, dict[str, Any]()
    for name in asked.clients:
        flags = SHORT_CONTEXT if name == "schemathesis" else ()
        running = nullcontext(Service(asked.url)) if asked.url else started(asked.model, flags)
        with running as service, tempfile.TemporaryDirectory(prefix=f"baton-{name}-") as scratch:
            run = ClientRun(
                service.url,
                served_model(service.url),
                asked.model.resolve(),
                asked.environments.resolve(),
                Path(scratch),
                asked.seconds,
                service.pids,
            )
            try:
                figures = CLIENTS[name](run)
            except RuntimeError as error:
                print(error, file=sys.stderr)
                failed, figures = failed + 1, {"failed": True}
            found[name] = figures
            brief = {name: value for name, value in figures.items() if name != "over_time"}
            print(json.dumps({"client": name, **brief}), flush=True)
    write_result(asked.json, found)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
