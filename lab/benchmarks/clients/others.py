"""Unmodified clients of other projects: what each is asked to do, and what is made of its figures."""

import csv
import json
import random
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.lab.benchmarks.clients.run import ClientRun, MemoryWatch, growth_mib, program

REQUESTS = 40  # of aiperf
EXAMPLES = 20  # of schemathesis, of each route, beside those that cover the schemas
CHECKS = "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance"
USERS = 16
SAMPLES = 60  # of memory and latency, over the whole time
MOST_GROWTH_MIB = 24.0
"""Maximum growth of any process from the second quarter of the time to the last: allocators fluctuate."""


def run_aiperf(run: ClientRun) -> dict[str, Any]:
    """Run aiperf's profile over /v1/chat/completions, streaming. Raises: RuntimeError if a request failed."""
    command = [str(program(run.environments, "aiperf", "aiperf")), "profile", "--model", run.model, "--url", run.url]
    command += ["--endpoint-type", "chat", "--streaming", "--tokenizer", str(run.model_folder)]
    command += ["--concurrency", "4", "--request-count", str(REQUESTS)]
    command += ["--synthetic-input-tokens-mean", "64", "--output-tokens-mean", "16"]
    command += ["--artifact-dir", str(run.results / "out"), "--ui", "simple"]
    run.client(command, 300)
    (summary,) = (run.results / "out").rglob("profile_export_aiperf.json")
    found = json.loads(summary.read_text())
    names = ("request_count", "time_to_first_token", "inter_token_latency", "output_sequence_length")
    return {name: found[name].get("avg") for name in names if name in found} | {
        "errors": found.get("error_summary") or []
    }


def run_guidellm(run: ClientRun) -> dict[str, Any]:
    """Run guidellm over /v1/chat/completions, streaming, at a constant rate. Raises: RuntimeError if a request
    failed.
    """
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


def run_schemathesis(run: ClientRun) -> dict[str, Any]:
    """Run schemathesis over /openapi.json: no 5xx, and answers as described.

    Its chats name no length: the service should have a short context. Raises: RuntimeError if a check failed.
    """
    command = [str(program(run.environments, "schemathesis", "schemathesis")), "run", f"{run.url}/openapi.json"]
    command += ["--url", run.url, "--checks", CHECKS, "--max-examples", str(EXAMPLES), "--no-color"]
    command += ["--phases", "examples,coverage,fuzzing", "--request-timeout", "60", "--seed", "7"]
    output = run.client(command, 900)
    counted = re.search(r"Test cases:\s*(.*)", output)
    return {"test_cases": counted[1] if counted else output[-500:]}


QUESTIONS = 24
BOUND = 1e-3
TIMEOUT_S = 300.0
NAMES = ("Ann", "Ben", "Cleo", "Dan", "Eve", "Finn")
TASK = """task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{label}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""


def run_lm_eval(run: ClientRun) -> dict[str, Any]:
    """Run lm-eval's multiple choice over /v1/completions and compare its log-likelihoods with transformers' own.

    It sends context and choice as token ids, with `echo`, `logprobs` 1 and `max_tokens` 1, and sums up the result.
    Raises: RuntimeError if a log-likelihood differs by more than 1e-3.
    """
    (run.results / "questions.jsonl").write_text("".join(json.dumps(each) + "\n" for each in questions()))
    (run.results / "local_choice.yaml").write_text(TASK.format(file=run.results / "questions.jsonl"))
    arguments = {
        "model": run.model,
        "base_url": f"{run.url}/v1/completions",
        "tokenizer_backend": "huggingface",
        "tokenizer": str(run.model_folder),
        "tokenized_requests": "True",
        "num_concurrent": "4",
    }
    command = [str(program(run.environments, "lm_eval", "lm_eval")), "--model", "local-completions"]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    command += ["--tasks", "local_choice", "--include_path", str(run.results)]
    command += ["--output_path", str(run.results / "out"), "--log_samples"]
    run.client(command, TIMEOUT_S, HF_HUB_OFFLINE="1", HF_DATASETS_CACHE=str(run.results / "datasets"))
    scored = _scored(run.results / "out")
    expected = _expected(run.model_folder, [(context, choice) for context, choice, _, _ in scored])
    differences = [
        abs(loglikelihood - right[0]) for (_, _, loglikelihood, _), right in zip(scored, expected, strict=True)
    ]
    greedy = sum(is_greedy == right[1] for (_, _, _, is_greedy), right in zip(scored, expected, strict=True))
    figures = {"loglikelihoods": len(scored), "largest_difference": max(differences), "greedy_agrees": greedy}
    if max(differences) > BOUND or greedy < len(scored):
        raise RuntimeError(f"not transformers' log-likelihoods: {figures}")
    return figures


def questions() -> list[dict[str, Any]]:
    """Small tables and a question about them, from a seed."""
    draw = random.Random("lm-eval")
    found = []
    for _ in range(QUESTIONS):
        ages = {name: draw.randrange(10, 99) for name in draw.sample(NAMES, 4)}
        asked = draw.choice(list(ages))
        table = ", ".join(f"{name} is {age}" for name, age in ages.items())
        choices = [f" {age}" for age in ages.values()]
        found.append(
            {
                "question": f"{table}. How old is {asked}? Answer:",
                "choices": choices,
                "label": list(ages).index(asked),
            }
        )
    return found


def _scored(folder: Path) -> list[tuple[str, str, float, bool]]:
    """(context, choice, log-likelihood, whether it is what greedy decoding says), as lm-eval logged them."""
    (samples,) = folder.rglob("samples_local_choice_*.jsonl")
    found = []
    for line in samples.read_text().splitlines():
        sample = json.loads(line)
        for request, (response,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
            found.append((request["arg_0"], request["arg_1"], float(response[0]), str(response[1]) == "True"))
    return found


def _expected(folder: Path, pairs: list[tuple[str, str]]) -> list[tuple[float, bool]]:
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for context, choice in pairs:
        whole = tokenizer(context + choice, add_special_tokens=False).input_ids
        begin = len(tokenizer(context, add_special_tokens=False).input_ids)
        with torch.inference_mode():
            scores = model(torch.tensor([whole])).logits[0].log_softmax(-1)
        answer = torch.tensor(whole[begin:])
        scored = scores[begin - 1 : len(whole) - 1]
        found.append((scored.gather(1, answer[:, None]).sum().item(), bool((scored.argmax(-1) == answer).all())))
    return found


def run_locust(run: ClientRun) -> dict[str, Any]:
    """Run locust's soak for ten minutes: no request fails, latency stays, no process grows.

    Raises: RuntimeError if a request failed or a process grew.
    """
    file = Path(__file__).with_name("locustfile.py")
    command = [str(program(run.environments, "locust", "locust")), "--headless", "--host", run.url]
    command += ["--locustfile", str(file), "--users", str(USERS), "--spawn-rate", str(USERS)]
    command += ["--run-time", f"{run.seconds:g}s", "--csv", str(run.results / "out"), "--csv-full-history"]
    with MemoryWatch(run.pids, run.seconds / SAMPLES) as watch:
        run.client([*command, "--only-summary"], run.seconds + 60)
    rows = {row["Name"]: row for row in _rows(run.results / "out_stats.csv")}
    total = rows["Aggregated"]
    growth = {name: round(growth_mib(samples), 1) for name, samples in watch.samples.items()}
    figures: dict[str, Any] = {
        "users": USERS,
        "seconds": run.seconds,
        "requests": int(total["Request Count"]),
        "failures": int(total["Failure Count"]),
        "requests_per_s": round(float(total["Requests/s"]), 1),
        "p50_ms": int(total["50%"]),
        "p99_ms": int(total["99%"]),
        "growth_mib": growth,
        "over_time": {"at_s": watch.at_s, "own_mib": watch.samples, "latency": _history(run.results)},
    }
    if figures["failures"]:
        raise RuntimeError(f"{figures}\n{(run.results / 'out_failures.csv').read_text()}")
    if max(growth.values(), default=0.0) > MOST_GROWTH_MIB:
        raise RuntimeError(f"a process grew: {figures}")
    return figures


def _history(folder: Path) -> list[dict[str, float]]:
    """Return statistics of the ten seconds before each of at most SAMPLES moments, all routes together."""
    rows = [
        row for row in _rows(folder / "out_stats_history.csv") if row["Name"] == "Aggregated" and row["50%"] != "N/A"
    ]
    if not rows:
        return []
    began_s = int(rows[0]["Timestamp"])
    return [
        {
            "at_s": int(row["Timestamp"]) - began_s,
            "requests_per_s": round(float(row["Requests/s"]), 1),
            "p50_ms": int(row["50%"]),
            "p99_ms": int(row["99%"]),
            "failures": int(row["Total Failure Count"]),
        }
        for row in rows[:: max(1, len(rows) // SAMPLES)]
    ]


def _rows(file: Path) -> list[dict[str, str]]:
    with file.open() as lines:
        return list(csv.DictReader(lines))


CLIENTS: Mapping[str, Callable[[ClientRun], dict[str, Any]]] = {
    "lm_eval": run_lm_eval,
    "guidellm": run_guidellm,
    "aiperf": run_aiperf,
    "locust": run_locust,
    "schemathesis": run_schemathesis,
}
