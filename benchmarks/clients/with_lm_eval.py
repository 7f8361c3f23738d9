"""lm-eval's multiple choice over /v1/completions: its log-likelihoods against transformers' own, to 1e-3.

It sends context and choice as token ids, with `echo`, `logprobs` 1 and `max_tokens` 1, and sums up what it gets.
"""

import json
import random
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from baton.benchmarks.clients.run import Run, program

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


def run_lm_eval(run: Run) -> dict[str, Any]:
    """Raises: RuntimeError where a log-likelihood differs by more than 1e-3."""
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
