"""guidellm's benchmark over /v1/chat/completions, streaming, at a constant rate."""

import json
from typing import Any

from baton.benchmarks.clients.run import Run, program


def run_guidellm(run: Run) -> dict[str, Any]:
    """Raises: RuntimeError where a request failed."""
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
