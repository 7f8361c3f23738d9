"""aiperf's profile over /v1/chat/completions, streaming."""

import json
from typing import Any

from baton.benchmarks.clients.run import Run, program

REQUESTS = 40


def run_aiperf(run: Run) -> dict[str, Any]:
    """Raises: RuntimeError where a request failed."""
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
