"""Offline batch inference in a script (`LLM`)."""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, Unpack, cast

from tqdm import tqdm

from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.sizing import KvSizing
from baton.engine.offline.answer import LlmAnswer, RequestOutput
from baton.engine.offline.beam_search import BeamSearchOutput, BeamSearchParams, beam_search_output
from baton.engine.offline.core import OfflineEngine, deliver
from baton.engine.offline.engine_args import EngineArgs, EngineOptions
from baton.engine.offline.lora import NO_ADAPTER, ChosenAdapter, LoRARequest
from baton.engine.offline.params import SamplingParams
from baton.engine.offline.pooled import (
    EmbeddingRequestOutput,
    PoolingParams,
    ScoringRequestOutput,
    Vector,
    cosine_score,
    embedding,
    logit_score,
    pairs_of,
    vectors_of,
    with_prompt,
)
from baton.engine.offline.prompts import Message, Prompt, PromptType, as_list
from baton.engine.request import Request
from baton.engine.scheduler.speculation import Speculated
from baton.text.generation_config import read_generation_config
from baton.text.pooling import Pooling
from baton.text.sampling import NUMBERS
from baton.text.tokenizer.convert import load

LoRARequests: TypeAlias = LoRARequest | Sequence[LoRARequest | None] | None


class LLM:
    """Model on one device, with vLLM's arguments and outputs. Not thread-safe."""

    def __init__(self, model: str, **options: Unpack[EngineOptions]) -> None:
        """Load the model; EngineArgs lists the options. Raises: ValueError, ModelError."""
        self._engine = OfflineEngine(EngineArgs(model=model, **options))
        self._engine.runner.warm_up()
        self._engine.warm_up_drafts()

    def shutdown(self) -> None:
        """Stop the other ranks, if any. Without this call they stop when the engine is garbage-collected."""
        self._engine.close()

    def generate(
        self,
        prompts: PromptType | Sequence[PromptType],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
    ) -> list[RequestOutput]:
        """Return the prompts' answers in order. A prompt is a string, token ids, or {"prompt_token_ids": [...]}.

        Default parameters are those of the model's generation_config.json. `lora_request`: one adapter for all
        prompts, or a list with an adapter or None for each prompt.

        Raises: ValueError, ModelError, before anything is computed.
        """
        return self._in_order(self._engine.reader.read(as_list(prompts)), sampling_params, use_tqdm, lora_request)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequests = None,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Return the answers to one conversation or several; the model's chat template formats the prompts.

        The template gets `tools` and the variables in `chat_template_kwargs`, such as enable_thinking. Raises:
        ValueError, ModelError.
        """
        several = bool(messages) and not isinstance(messages[0], dict)
        conversations = cast("Sequence[Sequence[Message]]", messages if several else [messages])
        read = self._engine.reader.read_chat
        prompts = [read(each, add_generation_prompt, tools, chat_template_kwargs) for each in conversations]
        return self._in_order(prompts, sampling_params, use_tqdm, lora_request)

    def finished(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        use_tqdm: bool = False,
        loras: Sequence[LoRARequest | None] | None = None,
    ) -> Iterator[RequestOutput]:
        """Yield answers as they finish. `request_id`: the prompt's index. Closing the iterator aborts running requests.

        Raises: ValueError, ModelError, before anything is computed.
        """
        adapters = [self._adapter(lora) for lora in loras or [None] * len(prompts)]
        requests = [self._engine.request(*each) for each in zip(prompts, params, adapters, strict=True)]
        yield from self._finished(requests, prompts, params, use_tqdm)

    def beam_search(
        self,
        prompts: PromptType | Sequence[PromptType],
        params: BeamSearchParams,
        lora_request: LoRARequest | None = None,
        use_tqdm: bool = False,
    ) -> list[BeamSearchOutput]:
        """Return the best sequences of each prompt. All beams of a prompt run together.

        Raises: ValueError, ModelError, before anything is computed.
        """
        reader, sampling, adapter = self._engine.reader, params.sampling(), self._adapter(lora_request)
        read = reader.read(as_list(prompts))
        drafts = [self._engine.request(prompt, sampling, adapter) for prompt in read]
        requests = [replace(request, params=params.searching(request.params)) for request in drafts]
        outputs = list(self._finished(requests, read, [sampling] * len(read), use_tqdm))
        return [beam_search_output(output, params, reader.decoder.decode) for output in sorted(outputs, key=_place)]

    def embed(
        self,
        prompts: PromptType | Sequence[PromptType],
        pooling_params: PoolingParams | None = None,
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Return a vector per prompt, pooled as the checkpoint's files say. Raises: ValueError, ModelError."""
        engine, params = self._engine, pooling_params or PoolingParams()
        pooler = engine.pooler()
        if pooler.score is not None:
            raise ValueError("the model is a reranker and computes no vectors: use score")
        read = engine.reader.read_cut([with_prompt(each, pooler, params.prompt_name) for each in as_list(prompts)])
        vectors = self._pooled(read, pooler.pooling, self._adapter(lora_request), use_tqdm)
        return [embedding(index, vector, pooler, params) for index, vector in enumerate(vectors)]

    def score(
        self,
        data_1: PromptType | Sequence[PromptType],
        data_2: PromptType | Sequence[PromptType],
        use_tqdm: bool = True,
        lora_request: LoRARequest | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score each text of `data_2` against the `data_1` text of the same index, or against the only `data_1` text.

        A reranker returns a probability, other models the cosine of two vectors. Raises: ValueError, ModelError.
        """
        engine, pairs, adapter = self._engine, pairs_of(data_1, data_2), self._adapter(lora_request)
        pooler, reader = engine.pooler(), engine.reader
        if (score := pooler.score) is not None:
            read = [reader.read_pair(*pair, as_pair=score.pair) for pair in pairs]
            vectors = self._pooled(read, score.pooling, adapter, use_tqdm)
            return [logit_score(index, vector, score) for index, vector in enumerate(vectors)]
        read = reader.read_cut([with_prompt(text, pooler) for pair in pairs for text in pair])
        vectors = self._pooled(read, pooler.pooling, adapter, use_tqdm)
        return [cosine_score(index, *vectors[2 * index : 2 * index + 2]) for index in range(len(pairs))]

    def _pooled(
        self, prompts: Sequence[Prompt], pooling: Pooling, adapter: ChosenAdapter, use_tqdm: bool
    ) -> list[Vector]:
        """Return the pooled vectors in the order of the prompts. Raises: ValueError."""
        engine = self._engine
        requests = [engine.pooled(prompt, pooling, adapter) for prompt in prompts]
        waiting, made = dict[int, Prompt](), dict[int, Vector]()
        try:
            for request, prompt in zip(requests, prompts, strict=True):
                engine.add(request)
                waiting[request.request_id] = prompt
            with ProgressBar(len(prompts), shown=use_tqdm) as progress:
                while waiting:
                    for request_id, vector in vectors_of(engine.step() or (), waiting):
                        made[request_id] = vector
                        progress.ended(len(vector.prompt.token_ids), 0)
        finally:
            for request_id in reversed(waiting):
                engine.scheduler.abort(request_id)
        return [made[request.request_id] for request in requests]

    def _finished(
        self, requests: Sequence[Request], prompts: Sequence[Prompt], params: Sequence[SamplingParams], use_tqdm: bool
    ) -> Iterator[RequestOutput]:
        engine, answers = self._engine, dict[int, LlmAnswer]()
        try:
            for index, (request, prompt, each) in enumerate(zip(requests, prompts, params, strict=True)):
                engine.add(request)
                answers[request.request_id] = LlmAnswer(str(index), prompt, each, engine.reader.decoder, streams=False)
            with ProgressBar(len(requests), shown=use_tqdm) as progress:
                while answers:
                    for request_id in deliver(answers, engine.step() or (), engine.scheduler.stop_choice):
                        if answers[request_id].finished:
                            answer = answers.pop(request_id)
                            progress.ended(len(answer.prompt.token_ids), answer.made_tokens)
                            yield answer.output()
        finally:
            for request_id in reversed(answers):
                engine.scheduler.abort(request_id)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return vLLM's defaults, overridden by the model's generation_config.json."""
        stated = read_generation_config(self._engine.folder, ModelError)
        given: dict[str, Any] = {
            name: stated[name] for name, number in NUMBERS.items() if number.stated and stated.get(name) is not None
        }
        if stated.get("max_new_tokens") is not None:
            given["max_tokens"] = stated["max_new_tokens"]
        return SamplingParams(**given)

    def get_tokenizer(self) -> Any:
        """Return a tokenizer of transformers that has read the same files."""
        return load(self._engine.reader.folder)

    @property
    def preemptions(self) -> int:
        """Return the number of preemptions since the start; many mean that KV memory is short."""
        return self._engine.scheduler.counters.preemptions

    @property
    def speculated(self) -> Speculated:
        """Return the numbers of drafted and accepted tokens since the start; zero without a `speculative_config`."""
        speculation = self._engine.scheduler.speculation
        return Speculated() if speculation is None else speculation.done

    @property
    def max_model_len(self) -> int:
        """Return the maximum number of tokens of a prompt and its answer together."""
        return self._engine.limits.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        return self._engine.limits.eos_token_ids

    @property
    def vocab_size(self) -> int:
        return self._engine.vocab_size

    @property
    def sizing(self) -> KvSizing:
        return self._engine.sizing

    def read(self, prompt: PromptType) -> Prompt:
        """Convert a prompt to the form that `finished` accepts. Raises: ValueError."""
        return self._engine.reader.read([prompt])[0]

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Check a prompt and its parameters before a call of `finished`. Raises: ValueError."""
        self._engine.check(prompt, params)

    def _adapter(self, lora: LoRARequest | None) -> ChosenAdapter:
        return NO_ADAPTER if lora is None else self._engine.add_adapter(self._engine.read_adapter(lora))

    def _in_order(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        lora: LoRARequests,
    ) -> list[RequestOutput]:
        if params is None:
            params = self.get_default_sampling_params()
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"{len(each)} sampling_params for {len(prompts)} prompts: give one, or one per prompt")
        loras = [lora] * len(prompts) if lora is None or isinstance(lora, LoRARequest) else list(lora)
        if len(loras) != len(prompts):
            raise ValueError(f"{len(loras)} lora_requests for {len(prompts)} prompts: give one, or one per prompt")
        return sorted(self.finished(prompts, each, use_tqdm, loras), key=_place)


def _place(output: RequestOutput) -> int:
    return int(output.request_id)


class ProgressBar:
    """Progress bar of requests, with input and output tokens per second."""

    def __init__(self, requests: int, shown: bool) -> None:
        self._bar = tqdm(total=requests, desc="Processed prompts", disable=not shown, dynamic_ncols=True)
        self._started = time.monotonic()
        self._input_tokens = 0
        self._output_tokens = 0

    def __enter__(self) -> "ProgressBar":
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def ended(self, input_tokens: int, output_tokens: int) -> None:
        self._input_tokens += input_tokens
        self._output_tokens += output_tokens
        elapsed_s = max(time.monotonic() - self._started, 1e-9)
        self._bar.set_postfix_str(
            f"input: {self._input_tokens / elapsed_s:.2f} toks/s, output: {self._output_tokens / elapsed_s:.2f} toks/s",
            refresh=False,
        )
        self._bar.update(1)
