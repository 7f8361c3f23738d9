"""guidellm's benchmark over /v1/chat/completions and /v1/completions, at a constant rate."""

import json
from typing import Any

from benchmarks.clients.environments import program
from benchmarks.clients.run import Run


def run_guidellm(run: Run) -> dict[str, Any]:
    """Raises: RuntimeError where a request failed."""
    command = [str(program(run.environments, "guidellm", "guidellm")), "run"]
    command += ["--backend", f"kind=openai_http,target={run.url}"]
    command += ["--profile", "kind=constant,rate=4", "--tokenizer", f"kind=hf_auto,model={run.model_folder}"]
    command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
    command += ["--max-seconds", f"{run.seconds:g}", "--output-path", str(run.results / "out.json")]
    run.client(command, run.seconds + 300, HF_HUB_OFFLINE="1", CUDA_VISIBLE_DEVICES="")
    (benchmark,) = json.loads((run.results / "out.json").read_text())["benchmarks"]
    return {"metrics": sorted(benchmark)}
