"""Starts `baton up` with the demo model, or takes `--url`; then each client that is named has its turn."""

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from baton.benchmarks.clients.run import Run, served_model
from baton.benchmarks.clients.service import Service, started
from baton.benchmarks.clients.with_aiperf import run_aiperf
from baton.benchmarks.clients.with_guidellm import run_guidellm
from baton.benchmarks.clients.with_lm_eval import run_lm_eval
from baton.benchmarks.clients.with_locust import run_locust
from baton.benchmarks.clients.with_schemathesis import run_schemathesis
from baton.benchmarks.report.machine import describe_machine
from baton.launch.paths import ROOT

SHORT_CONTEXT = ("--max-model-len", "64")
CLIENTS: Mapping[str, Callable[[Run], dict[str, Any]]] = {
    "lm_eval": run_lm_eval,
    "guidellm": run_guidellm,
    "aiperf": run_aiperf,
    "locust": run_locust,
    "schemathesis": run_schemathesis,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clients", nargs="*", default=list(CLIENTS), help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--url", help="of a service that runs, with the model in --model and in float32")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tableqa", help="folder")
    parser.add_argument("--environments", type=Path, default=ROOT / ".cache" / "clients", help="where clients lie")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load; the soak: 600")
    parser.add_argument("--json", type=Path, help="where all figures go, those over time too")
    asked = parser.parse_args()
    failed, told = 0, {}
    for name in asked.clients:
        flags = SHORT_CONTEXT if name == "schemathesis" else ()
        running = nullcontext(Service(asked.url)) if asked.url else started(asked.model, flags)
        with running as service, tempfile.TemporaryDirectory(prefix=f"baton-{name}-") as scratch:
            run = Run(
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
            told[name] = figures
            print(json.dumps({"client": name, **_brief(figures)}), flush=True)
    if asked.json is not None:
        asked.json.write_text(json.dumps({"machine": describe_machine(), **told}, indent=1) + "\n")
    return min(failed, 1)


def _brief(figures: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name != "over_time"}


if __name__ == "__main__":
    sys.exit(main())
