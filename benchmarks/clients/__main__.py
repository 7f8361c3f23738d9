"""Starts `baton up` with the demo model, or takes `--url`; then each client that is named has its turn.

.venv/bin/python -m baton.benchmarks.clients [NAME ...] [--seconds 20] [--json FILE]
"""

import json
import re
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from baton.benchmarks.clients.run import Run, Service, program, served_model, started
from baton.benchmarks.clients.with_lm_eval import run_lm_eval
from baton.benchmarks.clients.with_locust import run_locust
from baton.benchmarks.report.result import make_parser, write_result
from baton.launch.paths import ROOT

SHORT_CONTEXT = ("--max-model-len", "64")
REQUESTS = 40  # of aiperf
EXAMPLES = 20  # of schemathesis, of each route, beside those that cover the schemas
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"


def run_aiperf(run: Run) -> dict[str, Any]:
    """Its profile over /v1/chat/completions, streaming. Raises: RuntimeError where a request failed."""
    command = [str(program(run.environments, "aiperf", "aiperf")), "profile", "--model", run.model, "--url", run.url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(run.model_folder)]
    command += ["--concurrency", "4", "--request-count", str(REQUESTS)]
    command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
    command += ["--artifact-dir", str(run.results / "out"), "--ui", "simple"]
    run.client(command, 300)
    (summary,) = (run.results / "out").rglob("profile_export_aiperf.json")
    told = json.loads(summary.read_text())
    names = ("request_count", "time_to_first_token", "inter_token_latency", "output_sequence_length")
    return {name: told[name].get("avg") for name in names if name in told} | {"errors": told.get("error_summary") or []}


def run_guidellm(run: Run) -> dict[str, Any]:
    """Over /v1/chat/completions, streaming, at a constant rate. Raises: RuntimeError where a request failed."""
    command = [str(program(run.environments, "guidellm", "guidellm")), "run"]
    command += ["--backend", f"kind=openai_http,target={run.url}"]
    command += ["--profile", "kind=constant,rate=4", "--tokenizer", f"kind=hf_auto,model={run.model_folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--constraint", f"kind=max_duration,seconds={run.seconds:g}"]
    command += ["--output", f"kind=json,path={run.results / 'out.json'}", "--disable-console-interactive"]
    run.client(command, run.seconds + 300, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    (benchmark,) = json.loads((run.results / "out.json").read_text())["benchmarks"]
    totals: dict[str, Any] = benchmark["metrics"]["request_totals"]
    if totals["errored"]:
        raise RuntimeError(f"requests failed: {totals}")
    return {"requests": totals}


def run_schemathesis(run: Run) -> dict[str, Any]:
    """Over /openapi.json: whatever it thinks of, nothing ends with a 5xx, and answers are as described.

    Its chats name no length: the service should have a short context. Raises: RuntimeError where a check failed.
    """
    command = [str(program(run.environments, "schemathesis", "schemathesis")), "run", f"{run.url}/openapi.json"]
    command += ["--url", run.url, "--checks", CHECKS, "--max-examples", str(EXAMPLES), "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--seed", "7"]
    output = run.client(command, 900)
    counted = re.search(r"Test cases:\s*(.*)", output)
    return {"test_cases": counted[1] if counted else output[-500:]}


CLIENTS: Mapping[str, Callable[[Run], dict[str, Any]]] = {
    "lm_eval": run_lm_eval,
    "guidellm": run_guidellm,
    "aiperf": run_aiperf,
    "locust": run_locust,
    "schemathesis": run_schemathesis,
}


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("clients", nargs="*", default=list(CLIENTS), help=f"of {', '.join(CLIENTS)}; default: all")
    parser.add_argument("--url", help="of a service that runs, with the model in --model and in float32")
    parser.add_argument("--model", type=Path, default=ROOT / "models" / "tableqa", help="folder")
    parser.add_argument("--environments", type=Path, default=ROOT / ".cache" / "clients", help="where clients lie")
    parser.add_argument("--seconds", type=float, default=20.0, help="of load; the soak: 600")
    asked = parser.parse_args()
    failed, told = 0, dict[str, Any]()
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
            brief = {name: value for name, value in figures.items() if name != "over_time"}
            print(json.dumps({"client": name, **brief}), flush=True)
    write_result(asked.json, told)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
