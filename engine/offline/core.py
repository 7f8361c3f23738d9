"""Engine that LLM and AsyncLLM share: model, KV blocks, scheduler and tokenizer of one device."""

import hashlib
import sys
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from baton.engine.config.model_config import CONFIG_FILE, EncoderConfig, ModelError, read_json
from baton.engine.drafting.draft_model import DraftModel, draft_options, load_draft_model
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.memory import ANY_BYTES, LargestStep, cpu_kv_bytes, prepare_with_spare_memory
from baton.engine.kv_cache.sizing import KvSizing
from baton.engine.offline.answer import LlmAnswer
from baton.engine.offline.engine_args import EngineArgs, checkpoint_folder, model_folder
from baton.engine.offline.lora import (
    NO_ADAPTER,
    USUAL_RANK,
    ChosenAdapter,
    LoRARequest,
    OfflineAdapters,
    ReadAdapter,
    adapter_bytes,
)
from baton.engine.offline.params import ModelLimits, SamplingParams, resolve
from baton.engine.offline.pooled import pooled_request
from baton.engine.offline.prompts import Prompt, PromptEncoder
from baton.engine.on_device import made_on, mib
from baton.engine.parallel.other_ranks import threads_of
from baton.engine.parallel.shard import Shard
from baton.engine.prepare import ModelOptions, PreparedModel, prepare_model
from baton.engine.request import Request
from baton.engine.runner.engine import Engine
from baton.engine.runner.runner import Runner
from baton.engine.sampling import params as sampling_params
from baton.engine.sampling.constraint import Constraint, Grammars
from baton.engine.sampling.thoughts import ThoughtConstraint, thought_constraint
from baton.engine.scheduler.drafts import Drafter
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import PromptComputed, RequestFailed, SchedulerOutcome
from baton.engine.scheduler.speculation import Speculation
from baton.engine.weights.formats import WeightFormat
from baton.text.block_hash import root_hash
from baton.text.host.memory import shortage, total_bytes
from baton.text.model_options import DRAFT_KV_BYTES
from baton.text.output.bounds import NoThoughts, thoughts_before
from baton.text.pooler_files import ModelKind, Pooler, model_kind, read_pooler
from baton.text.pooling import Pooling
from baton.text.structured.library import LibraryMissing
from baton.text.structured.output import FormRefused, StructuredKind, StructuredOutput, enforceable_form


def request_seed(engine_seed: int, number: int) -> int:
    """Return the 64-bit seed of the engine's `number`th request: different for each request, equal in every run."""
    return int.from_bytes(hashlib.sha256(f"{engine_seed}:{number}".encode()).digest()[:8], "little")


@dataclass(frozen=True, slots=True)
class OfflineModel:
    prepared: PreparedModel
    runner: Runner  # not warmed up yet
    draft: DraftModel | None


class OfflineEngine:
    """Engine of LLM and AsyncLLM: queues requests, returns the outcomes of steps. One thread at a time may use it."""

    def __init__(self, args: EngineArgs) -> None:
        """Load the model. Raises: ValueError, ModelError, naming the sizes that fit."""
        self._adapters = OfflineAdapters(args.max_lora_rank) if args.enable_lora else None
        loaded = load(args, self._adapters)
        prepared = loaded.prepared
        self.runner = loaded.runner
        self._draft = loaded.draft
        self._drafter = None if loaded.draft is None else loaded.draft.drafter()
        self.sizing = sizing_of(prepared)
        folder = model_folder(args.tokenizer, with_weights=False) if args.tokenizer else prepared.options.folder
        self.reader = PromptEncoder(folder, prepared.config.vocab_size)
        ends = prepared.config.eos_token_ids | self.reader.end_token_ids
        ends = frozenset(each for each in ends if each < prepared.config.vocab_size)
        self.limits = ModelLimits(prepared.max_model_len, args.max_num_seqs, ends)
        self.vocab_size = prepared.config.vocab_size
        self.folder = prepared.options.folder
        self.device = prepared.options.device
        self.scheduler = Scheduler(
            BlockPool(prepared.total_blocks, prepared.layout.groups),
            prepared.layout.block_tokens,
            args.step_tokens(prepared.options.device),
            args.max_num_seqs,
            speculation=_speculation(args, self._drafter, not self.runner.replays_steps),
            whole_prompts=isinstance(prepared.config, EncoderConfig),
        )
        self._kind = model_kind(read_json(self.folder / CONFIG_FILE))
        self._prepared = prepared
        self._caches_prefixes = args.enable_prefix_caching
        self._roots: dict[int, bytes] = {}  # root hashes of block names, by adapter number
        self._engine = Engine(self.runner, self.scheduler)
        self.close = weakref.finalize(self, self.runner.close)
        """Stop the other ranks, at the latest when this engine is garbage-collected."""
        self._seed = args.seed
        self._requests = 0
        self._grammars = Grammars(self.folder, prepared.config.vocab_size, ends)

    def warm_up_drafts(self) -> None:
        """Warm up the draft model, if any. Call it on the thread that executes steps, before the first step."""
        if self._draft is not None and self._drafter is not None:
            self._draft.warm_up(self._drafter)

    def read_adapter(self, lora: LoRARequest) -> ReadAdapter:
        """Read an adapter's files. Not thread-safe. Raises: ValueError, ModelError."""
        if self._adapters is None:
            raise ValueError("lora_request: needs an engine with enable_lora=True")
        return self._adapters.read(lora)

    def add_adapter(self, read: ReadAdapter) -> ChosenAdapter:
        """Add an adapter to the model. Raises: ModelError if it does not fit the model."""
        if self._adapters is None:
            raise ValueError("lora_request: needs an engine with enable_lora=True")
        return self._adapters.add(read)

    def request(self, prompt: Prompt, params: SamplingParams, adapter: ChosenAdapter = NO_ADAPTER) -> Request:
        """Create a request with a new id, without queueing it. Raises: ValueError."""
        self._refuse_to_answer()
        number = self._next_number(adapter)
        resolved = self._resolved(prompt, params, request_seed(self._seed, number))
        return Request(number, prompt.token_ids, resolved, block_hashes=(), adapter=adapter.number)

    def _refuse_to_answer(self) -> None:
        """Check that the model generates text. Raises: ValueError for an encoder or a reranker."""
        if self._kind is not ModelKind.LANGUAGE_MODEL:
            raise ValueError(f"{self.folder.name} is {self._kind}: use embed or score")

    def pooled(self, prompt: Prompt, pooling: Pooling, adapter: ChosenAdapter = NO_ADAPTER) -> Request:
        """Create a request that computes a vector, without queueing it. Raises: ValueError."""
        number, most_tokens = self._next_number(adapter), self.limits.max_model_len
        return pooled_request(number, prompt, pooling, adapter.number, most_tokens)

    def pooler(self) -> Pooler:
        """Return the checkpoint's rules for pooling hidden states to vectors or scores. Raises: ValueError."""
        return read_pooler(self.folder)

    def _next_number(self, adapter: ChosenAdapter) -> int:
        """Return a new request id. Compute the root hash of the adapter's KV block names on the adapter's first use."""
        number = self._requests
        self._requests += 1
        if self._caches_prefixes and adapter.number not in self._roots:
            prepared = self._prepared
            self._roots[adapter.number] = root_hash(prepared.fingerprint, prepared.dtype_name, adapter.digest)
        return number

    def check(self, prompt: Prompt, params: SamplingParams) -> None:
        """Check a request. Raises: ValueError if it can never run."""
        self._resolved(prompt, params, seed=0)

    def _resolved(self, prompt: Prompt, params: SamplingParams, seed: int) -> sampling_params.SamplingParams:
        """Return the engine's parameters, with the compiled constraint of structured output. Raises: ValueError."""
        resolved = resolve(params, len(prompt.token_ids), self.limits, seed, self.reader.encode)
        form, budget = params.structured_outputs, params.thinking_token_budget
        try:
            asked = None if form is None else enforceable_form(form.output())
        except FormRefused as error:
            raise ValueError(f"structured_outputs: {error}") from error
        if budget is not None:
            asked = self._bounded(asked, budget, prompt)
        if asked is None:
            return resolved
        try:
            constraint = self._constraint(asked, resolved.stop_token_ids)
        except (FormRefused, LibraryMissing) as error:
            raise ValueError(f"{'structured_outputs' if form else 'thinking_token_budget'}: {error}") from error
        return replace(resolved, constraint=constraint)

    def _constraint(self, asked: StructuredOutput, stop_token_ids: frozenset[int]) -> Constraint | ThoughtConstraint:
        """Compile the constraint of structured output. Raises: FormRefused, LibraryMissing."""
        if asked.kind is StructuredKind.THOUGHTS:
            return thought_constraint(asked, stop_token_ids, self._grammars)
        return self._grammars.constraint(asked, stop_token_ids)

    def _bounded(self, form: StructuredOutput | None, budget: int, prompt: Prompt) -> StructuredOutput | None:
        """Return the structured output `form` preceded by at most `budget` reasoning tokens.

        Return `form` itself if the prompt ends the reasoning. Raises: ValueError.
        """
        try:
            thoughts = thoughts_before(form, budget, self.reader.template, self.reader.ending(prompt))
        except NoThoughts as error:
            raise ValueError(f"thinking_token_budget: {error}") from error
        return form if thoughts is None else thoughts.output()

    def add(self, request: Request) -> None:
        """Queue a request. Raises: ValueError (RequestRefused)."""
        self.scheduler.add(request, self._roots.get(request.adapter))

    def step(self) -> Sequence[SchedulerOutcome] | None:
        return self._engine.step()


def load(args: EngineArgs, adapters: OfflineAdapters | None = None) -> OfflineModel:
    """Size the KV pool, load the weights, and print a summary on stderr. Raises: ValueError, ModelError."""
    folder, device = checkpoint_folder(args.model), args.torch_device()
    asked = ModelOptions(
        folder,
        device,
        args.dtype,
        args.block_size,
        args.stated_kv_bytes or 0,
        args.max_model_len,
        args.kv_cache_dtype,
        args.quantization or WeightFormat.PLAIN,
        args.tensor_parallel_size,
        speculates=args.speculative_tokens is not None,
    )
    if args.draft_model is not None:
        asked = draft_options(asked, checkpoint_folder(args.draft_model), DRAFT_KV_BYTES)
    started = time.monotonic()
    prepared = _prepared(args, asked, adapters)
    with made_on(device, f"a KV pool of {mib(prepared.storage_bytes)}"):
        storage = torch.empty(prepared.storage_bytes, dtype=torch.uint8, device=device)
    rows = 0 if args.enforce_eager else args.max_num_seqs
    runner = prepared.load(
        storage,
        progress=False,
        adapters=None if adapters is None else adapters.adapters,
        decode_rows=rows,
    )
    draft = load_draft_model(prepared, rows)
    if args.tensor_parallel_size > 1 and device.type == "cpu":
        # The other ranks use the remaining cores.
        torch.set_num_threads(threads_of(Shard(0, args.tensor_parallel_size), None))
    if not args.quiet:
        sys.stderr.write(summary(prepared, time.monotonic() - started))
        sys.stderr.flush()
    return OfflineModel(prepared, runner, draft)


def _speculation(args: EngineArgs, drafter: Drafter | None, computes_alike: bool) -> Speculation | None:
    if args.speculative_tokens is None:
        return None
    return Speculation(args.speculative_tokens, drafter=drafter, computes_alike=computes_alike)


def _prepared(args: EngineArgs, asked: ModelOptions, adapters: OfflineAdapters | None) -> PreparedModel:
    """Size the KV pool as the arguments say, or by the device's memory if they give no size. Raises: ModelError."""
    if args.stated_kv_bytes is not None:
        prepared = prepare_model(asked)
        amounts = {"kv_cache_memory_bytes": prepared.pool_bytes, "weights": prepared.weight_bytes}
        if asked.device.type == "cpu" and (why := shortage(amounts, total_bytes())):
            raise ModelError(why)
        return prepared
    if asked.device.type == "cpu":
        return prepare_model(replace(asked, kv_memory_bytes=cpu_kv_bytes()))
    step = LargestStep(args.step_tokens(asked.device), args.max_num_seqs)
    if adapters is None:
        return prepare_with_spare_memory(asked, step, args.gpu_memory_utilization)
    set_aside = set_aside_bytes(args, prepare_model(replace(asked, kv_memory_bytes=ANY_BYTES)))
    return prepare_with_spare_memory(asked, step, args.gpu_memory_utilization, adapters.adapters, set_aside)


def set_aside_bytes(args: EngineArgs, prepared: PreparedModel) -> int:
    """Return the number of bytes to reserve for adapters, because adapters are loaded after the pool is sized."""
    return args.max_loras * adapter_bytes(prepared.config, args.max_lora_rank or USUAL_RANK, prepared.dtype)


def sizing_of(prepared: PreparedModel) -> KvSizing:
    return KvSizing.of(prepared.layout, prepared.pool_bytes // prepared.copies, prepared.max_model_len)


def summary(prepared: PreparedModel, load_s: float) -> str:
    """Return the lines printed at start: size of weights and KV cache, and how many requests fit."""
    sizing, mib = sizing_of(prepared), 1 << 20
    kept = "" if prepared.weight_format is WeightFormat.PLAIN else f"{prepared.weight_format} and "
    kept += f"{prepared.dtype_name} "
    return (
        f"Model weights: {prepared.weight_bytes / mib:,.1f} MiB, {kept}on {prepared.options.device}, "
        f"loaded in {load_s:.2f} s\n"
        f"KV cache: {sizing.blocks:,} blocks of {sizing.block_tokens} tokens = {sizing.tokens:,} tokens, "
        f"{sizing.kv_memory_bytes / mib:,.1f} MiB, {prepared.kv_dtype_name}\n"
        f"{sizing.concurrency_text}\n"
    )


def deliver(
    answers: Mapping[int, LlmAnswer],
    outcomes: Sequence[SchedulerOutcome],
    stop_choice: Callable[[int, int], object],
) -> list[int]:
    """Pass a step's outcomes to the requests' answers. Return the ids of requests whose answers changed, once each.

    `stop_choice`: called with request id and choice index when a stop string ends a choice.
    """
    touched: dict[int, None] = {}
    for outcome in outcomes:
        answer = answers.get(outcome.request_id)
        if answer is None:
            continue  # the request was aborted during the step
        if isinstance(outcome, PromptComputed):
            answer.take_prompt(outcome.prompt)
            continue
        touched[outcome.request_id] = None
        if isinstance(outcome, RequestFailed):
            answer.fail()
        elif answer.take(outcome):
            stop_choice(outcome.request_id, outcome.choice)
    return list(touched)
