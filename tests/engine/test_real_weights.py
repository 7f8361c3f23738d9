"""Answers of two published models: SmolLM2-135M-Instruct (Q4_1) and Gemma 3 270M (Q4_K_M)."""

import json
import math
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from baton.engine import LLM, SamplingParams, StructuredOutputsParams
from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig
from baton.engine.offline.prompts import TokensPrompt
from baton.engine.weights.read import GgufWeights
from tests.fixtures.real_models import real_model

NAMES = ("smollm2", "gemma3-270m")
PROMPT = "The three laws of thermodynamics are"
TEXT = Path(__file__).parents[2] / "LICENSE"
TEXT_TOKENS = 128
LOGPROB_ERROR = 0.02
PERPLEXITY_ERROR = 0.002
COUNTRY = {"type": "object", "properties": {"capital": {"type": "string"}}, "required": ["capital"]}
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
REPEATED = "one two three four five six seven eight nine ten one two three four five six"


@dataclass(frozen=True)
class Published:
    folder: Path
    llm: LLM

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer.from_file(str(self.folder / "tokenizer.json"))

    @cached_property
    def exact(self) -> torch.nn.Module:
        """The model of transformers with the file's dequantised weights."""
        config = read_model_config(self.folder)
        assert isinstance(config, DecoderConfig)
        with no_init_weights():
            made = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(self.folder), dtype=torch.float32).eval()
        made.tie_weights()
        weights = GgufWeights(next(self.folder.glob("*.gguf")), config, torch.float32, torch.device("cpu"))
        made.load_state_dict(
            {name: weights.tensor(name, *p.shape) for name, p in made.named_parameters()}, strict=False
        )
        return made

    @torch.inference_mode()
    def exact_logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """Log-probabilities of the next tokens: `[tokens, vocabulary]`."""
        logprobs: torch.Tensor = self.exact(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        return logprobs

    def tokens(self, text: str) -> TokensPrompt:
        return TokensPrompt(prompt_token_ids=self.tokenizer.encode(text).ids)


@cache
def loaded(name: str) -> Published:
    folder = real_model(name)
    return Published(folder, LLM(str(folder), dtype="float32", max_model_len=512))


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> Published:
    return loaded(request.param)


@pytest.fixture
def smollm2() -> LLM:
    return loaded("smollm2").llm


def test_chat_is_answered_and_ends(smollm2: LLM) -> None:
    question = {"role": "user", "content": "What is the capital of France?"}
    (output,) = smollm2.chat([[question]], SamplingParams(temperature=0.0, max_tokens=32))
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_logprobs_equal_those_of_exact_numbers(model: Published) -> None:
    prompt = model.tokens(PROMPT)
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True, logprobs=0)
    (output,) = model.llm.generate([prompt], params)
    answer, ids = output.outputs[0], prompt["prompt_token_ids"]
    assert answer.logprobs is not None
    exact = model.exact_logprobs([*ids, *answer.token_ids])[len(ids) - 1 : -1]
    assert exact.argmax(-1).tolist() == list(answer.token_ids)
    for step, token_id, logprobs in zip(exact, answer.token_ids, answer.logprobs, strict=True):
        assert abs(logprobs[token_id].logprob - float(step[token_id])) < LOGPROB_ERROR


def test_perplexity_is_that_of_the_exact_numbers(model: Published) -> None:
    ids = model.tokenizer.encode(TEXT.read_text()).ids[:TEXT_TOKENS]
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    (output,) = model.llm.generate([TokensPrompt(prompt_token_ids=ids)], params)
    assert output.prompt_logprobs is not None
    found = [each[token].logprob for each, token in zip(output.prompt_logprobs, ids, strict=True) if each]
    exact = model.exact_logprobs(ids)[:-1].gather(1, torch.tensor(ids[1:])[:, None])
    assert len(found) == len(ids) - 1
    assert math.exp(float(exact.mean()) - sum(found) / len(found)) == pytest.approx(1.0, abs=PERPLEXITY_ERROR)


def test_answer_has_the_form_of_a_schema(model: Published) -> None:
    form = StructuredOutputsParams(json=COUNTRY)
    params = SamplingParams(temperature=0.0, max_tokens=64, structured_outputs=form)
    (output,) = model.llm.generate([model.tokens("Name the capital of France as JSON: ")], params)
    answer = output.outputs[0]
    assert answer.finish_reason == "length" or isinstance(json.loads(answer.text)["capital"], str)


def test_prompt_in_the_prefix_cache_has_the_same_answer(model: Published) -> None:
    prompt = model.tokens(TEXT.read_text()[:1000])
    (first,) = model.llm.generate([prompt], GREEDY)
    (again,) = model.llm.generate([prompt], GREEDY)
    assert again.num_cached_tokens > 0
    assert again.outputs[0].token_ids == first.outputs[0].token_ids


def test_speculation_changes_no_token(smollm2: LLM) -> None:
    speculates = {"method": "ngram", "num_speculative_tokens": 4}
    drafting = LLM(str(real_model("smollm2")), dtype="float32", max_model_len=512, speculative_config=speculates)
    (plain,), (drafted,) = (llm.generate([REPEATED], GREEDY) for llm in (smollm2, drafting))
    assert drafted.outputs[0].token_ids == plain.outputs[0].token_ids
    assert drafting.speculated.accepted_tokens > 0
