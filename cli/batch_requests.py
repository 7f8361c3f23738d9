"""Check the requests of a batch as the server does, and convert them into requests of the engine."""

import asyncio
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic_core import to_json

from baton.process.errors import BatonError
from baton.router.http.batches.lines import CHAT, BatchRequest, LineRefused
from baton.router.http.dialects import Body, Unserved
from baton.router.http.edge.problem import Problem, problem_of, refused
from baton.router.http.messages import ChatRequest, CompletionRequest
from baton.router.http.parse import parse
from baton.router.http.requests import HttpCall, chat_request, completion_requests, names_of, prompts_of
from baton.router.http.routes.chat import ended_by, whole_message
from baton.router.http.vectors.answer import base64_of, usage_of
from baton.router.http.vectors.bodies import EmbeddingRequest
from baton.router.model.defaults import GenerationDefaults
from baton.router.model.served_model import TokenizerWorker, load_tokenizer
from baton.router.model.validation import DrawnValues, fit_to_context, validate
from baton.router.public.access import Caller
from baton.router.public.vectors import prompted
from baton.router.types.request import GenerationRequest, Operation, PairPrompt, RequestedSampling, ValidRequest
from baton.router.types.request import Prompt as AskedPrompt
from baton.router.types.response import Usage
from baton.text.output.thoughts import MakeParser
from baton.text.pooler_files import Pooler, read_pooler
from baton.text.pooling import MAX_INPUTS, Pooling

if TYPE_CHECKING:
    from baton.engine import LLM, EmbeddingRequestOutput, LoRARequest, SamplingParams
    from baton.engine.offline.prompts import Prompt

_STREAMED = "a batch has complete answers only"
_CONTENT = "a batch returns texts only"
_CALL = HttpCall("", Caller(), "", None)
_SAME = ("seed", "n", "best_of", "ignore_eos")
"""Fields with the same name in the server's request and in the engine's parameters; None if the request omits them."""
_LISTS = ("stop", "stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias")


class BatchFields(Body):
    """Fields of a request that `baton batch` treats differently from the server."""

    skip_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    stream: Annotated[Any, Unserved(_STREAMED, (False,))] = None
    prompt_logprobs: Annotated[Any, Unserved(_CONTENT)] = None
    return_token_ids: Annotated[Any, Unserved(_CONTENT, (False,))] = None


class BatchChat(BatchFields, ChatRequest):
    logprobs: Annotated[Any, Unserved(_CONTENT, (False,))] = None


class BatchCompletion(BatchFields, CompletionRequest):
    echo: Annotated[Any, Unserved(_CONTENT, (False,))] = None
    logprobs: Annotated[Any, Unserved(_CONTENT)] = None


@dataclass(frozen=True, slots=True)
class Ready:
    """Valid request for text. `model`: the model name in the line, else the default one."""

    request: BatchRequest
    prompt: "Prompt"
    params: "SamplingParams"
    model: str
    lora: "LoRARequest | None"
    parser: MakeParser | None = None  # separates reasoning and tool calls from a chat's text; None: all is text

    def answer(self, text: str, reason: str | None) -> dict[str, Any]:
        """Return a chat's message and finish reason."""
        if self.parser is None:
            return {"message": {"role": "assistant", "content": text}, "finish_reason": reason}
        message = whole_message([(text, 0)], self.parser())
        return {"message": message, "finish_reason": ended_by(message, reason)}


MAX_INPUTS_TOGETHER = 256  # maximum number of inputs in one call of the engine


@dataclass(frozen=True, slots=True)
class ReadyInputs:
    """Valid request for vectors. `model`: the model name in the line, else the default one."""

    request: BatchRequest
    prompts: "tuple[Prompt, ...]"
    dimensions: int | None
    as_base64: bool
    model: str
    lora: "LoRARequest | None"

    def body(self, vectors: "Sequence[EmbeddingRequestOutput]") -> dict[str, Any]:
        """Return the response body, the same as the server's embeddings API returns."""
        numbers = [each.outputs.embedding for each in vectors]
        usage = Usage(sum(map(_tokens, self.prompts)), 0, sum(each.num_cached_tokens for each in vectors))
        shown = [base64_of(each) if self.as_base64 else each for each in numbers]
        data = [{"object": "embedding", "index": index, "embedding": each} for index, each in enumerate(shown)]
        return {"object": "list", "data": data, "model": self.model, "usage": usage_of(usage)}


def _tokens(prompt: "Prompt") -> int:
    return len(prompt.token_ids)


def embedded(
    llm: "LLM", lines: Sequence[ReadyInputs]
) -> "Iterator[tuple[ReadyInputs, Sequence[EmbeddingRequestOutput]]]":
    """Yield each line with its vectors; consecutive lines with equal options are computed together."""
    from baton.engine import PoolingParams

    for together in _together(lines):
        first = together[0]
        prompts = [list(prompt.token_ids) for line in together for prompt in line.prompts]
        made = iter(llm.embed(prompts, PoolingParams(first.dimensions), use_tqdm=False, lora_request=first.lora))
        for line in together:
            yield line, list(islice(made, len(line.prompts)))


def _together(lines: Sequence[ReadyInputs]) -> Iterator[list[ReadyInputs]]:
    group: list[ReadyInputs] = []
    for line in lines:
        inputs = sum(len(each.prompts) for each in group) + len(line.prompts)
        if group and (
            inputs > MAX_INPUTS_TOGETHER or (line.dimensions, line.lora) != (group[0].dimensions, group[0].lora)
        ):
            yield group
            group = []
        group.append(line)
    if group:
        yield group


class Validator:
    """Checks requests; close it after use. `models`: model names that a line may give, the default first."""

    def __init__(self, llm: "LLM", folder: Path, models: Mapping[str, "LoRARequest | None"]) -> None:
        """Load the tokenizer. Raises: ModelFolderError."""
        self._llm = llm
        self._models = models
        self._tokenizer: TokenizerWorker = load_tokenizer(folder)
        self._defaults = GenerationDefaults(
            temperature=1.0, eos_token_ids=llm.eos_token_ids
        )  # defaults of SamplingParams
        self._runner = asyncio.Runner()
        self._folder = folder

    def close(self) -> None:
        self._tokenizer.close()
        self._runner.close()

    def ready(self, request: BatchRequest) -> Ready:
        """Check a chat or completion. Raises: LineRefused, naming the field."""
        if request.fault is not None:
            raise request.fault
        with _refusing():
            return self._chat(request) if request.url == CHAT else self._completion(request)

    def _chat(self, request: BatchRequest) -> Ready:
        message = parse(BatchChat, _json(request.body))
        try:
            read = self._runner.run(chat_request(message, _CALL, self._tokenizer))
            return replace(self._made(request, message, read.request), parser=read.parser)
        except BatonError as error:
            raise problem_of(error, names_of(message)) from error

    def _completion(self, request: BatchRequest) -> Ready:
        message = parse(BatchCompletion, _json(_with_prompt(request.body)))
        try:
            asked, *others = completion_requests(message, _CALL)
            if others:
                raise refused("prompt", "has several prompts; give each a line of its own")
            return self._made(request, message, asked)
        except BatonError as error:
            raise problem_of(error, names_of(message)) from error

    def inputs(self, request: BatchRequest) -> ReadyInputs:
        """Check a request for vectors. Raises: LineRefused, naming the field."""
        with _refusing():
            message = parse(EmbeddingRequest, _json(request.body))
            pooler = read_pooler(self._folder)
            if pooler.score is not None:
                raise refused("model", "is a reranker, which computes scores but no vectors")
            if message.dimensions is not None:
                pooler.check_dimensions(message.dimensions, pooler.size)
            given = _prompted(message, pooler)
            if len(given) > MAX_INPUTS:
                raise refused("input", f"has {len(given)} inputs; give at most {MAX_INPUTS}")
            name = self._name(message.model or "")
            prompts = tuple(self._input(index, each, pooler.pooling) for index, each in enumerate(given))
            as_base64 = message.encoding_format == "base64"
            return ReadyInputs(request, prompts, message.dimensions, as_base64, name, self._models[name])

    def _input(self, index: int, prompt: AskedPrompt, pooling: Pooling) -> "Prompt":
        """Check one input and return its prompt. Raises: Problem, ValueError."""
        asked = GenerationRequest(Operation.EMBED, prompt, pooling=pooling)
        try:
            token_ids = self._token_ids(validate(asked, self._defaults, *self._limits, DrawnValues("", 0)))
        except BatonError as error:
            raise problem_of(error, dict.fromkeys(("text", "token_ids", "token_ids.ids"), f"input[{index}]")) from error
        return self._llm.read({"prompt_token_ids": list(token_ids)})

    @property
    def _limits(self) -> tuple[int, int]:
        """Vocabulary size and context length."""
        return self._llm.vocab_size, self._llm.max_model_len

    def _name(self, model: str) -> str:
        """Return the model's name. Raises: Problem."""
        name = model or next(iter(self._models))
        if name not in self._models:
            raise refused("model", f"{name!r} is not loaded, only {', '.join(self._models)}", "model_not_found")
        return name

    def _token_ids(self, valid: ValidRequest) -> tuple[int, ...]:
        """Tokenise a prompt. Raises: BatonError."""
        vocab_size, most = self._limits
        prompt = valid.prompt
        if valid.pooling is not None and not isinstance(prompt, PairPrompt):
            prompt = self._runner.run(self._tokenizer.cut(prompt))
        token_ids = self._runner.run(self._tokenizer.prompt_tokens(prompt, None, vocab_size))
        fit_to_context(len(token_ids), valid, most)
        return token_ids

    def _made(self, request: BatchRequest, message: BatchChat | BatchCompletion, asked: GenerationRequest) -> Ready:
        """Return the checked request. Raises: Problem, BatonError, ValueError."""
        llm, name = self._llm, self._name(asked.model)
        valid = validate(asked, self._defaults, *self._limits, DrawnValues("", seed_of(request.custom_id)))
        token_ids = self._token_ids(valid)
        params = replace(
            sampling_params(replace(asked.sampling, seed=valid.sampling.seed)),
            # Special tokens delimit reasoning and tool calls: keep them if the parser needs them.
            skip_special_tokens=message.skip_special_tokens is not False and not asked.shown_tokens,
            include_stop_str_in_output=bool(message.include_stop_str_in_output),
        )
        prompt = llm.read({"prompt_token_ids": list(token_ids)})
        llm.check(prompt, params)
        return Ready(request, prompt, params, name, self._models[name])


def seed_of(custom_id: str) -> int:
    """Return a seed derived from the id, for a request that gives no seed."""
    return int.from_bytes(hashlib.sha256(custom_id.encode()).digest()[:8], "little")


def sampling_params(asked: RequestedSampling) -> "SamplingParams":
    """Return the engine's sampling parameters."""
    from baton.engine import SamplingParams, StructuredOutputsParams

    given: dict[str, Any] = {name: value for name in _SAME if (value := getattr(asked, name)) is not None}
    given |= asked.numbers
    given |= {name: value for name in _LISTS if (value := getattr(asked, name))}
    form = StructuredOutputsParams.from_output(asked.structured) if asked.structured is not None else None
    speculative = asked.speculative and asked.speculative._asdict()
    return SamplingParams(**given, max_tokens=asked.max_tokens, structured_outputs=form, speculative=speculative)


def _json(body: Mapping[str, Any]) -> bytes:
    return to_json(body, inf_nan_mode="constants")  # keeps NaN and Infinity, since null would count as an absent field


def _with_prompt(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the body with `prompt_token_ids` renamed to `prompt`. Raises: Problem."""
    if "prompt_token_ids" not in body:
        return body
    if "prompt" in body:
        raise refused("prompt_token_ids", "is another name of prompt; give only one of them")
    return {"prompt" if name == "prompt_token_ids" else name: value for name, value in body.items()}


def _prompted(message: EmbeddingRequest, pooler: Pooler) -> list[AskedPrompt]:
    """Return the prompts of a request for vectors. Raises: Problem."""
    try:
        return prompted(prompts_of(message.input, "input"), pooler, message.prompt_name)
    except BatonError as error:
        raise problem_of(error, {}) from error


@contextmanager
def _refusing() -> Iterator[None]:
    """Convert errors of an invalid request, raised in the block. Raises: LineRefused."""
    try:
        yield
    except Problem as problem:
        raise LineRefused(problem.message, problem.param) from problem
    except ValueError as error:  # raised by checks that only the engine can make
        raise LineRefused(str(error)) from error
