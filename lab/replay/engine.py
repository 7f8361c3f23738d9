"""Real engine of a replay: a checkpoint computes the planned steps on this CPU, and must sample the recorded tokens.

Each worker is replayed alone. KV that it received from another worker, or had cached before the record, is computed
here from the recorded prompt: the same KV, since it does not depend on how a prompt is divided into steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.client.timelines import ProcessTimeline, TimelineStep
from baton.engine.config.model_config import ModelError
from baton.engine.kv_cache.memory import ANY_BYTES
from baton.engine.prepare import HandedOver, ModelOptions, prepare_model
from baton.engine.request import Chunk, ChunkResult, Computed, FirstToken, Plan, end_reason
from baton.engine.runner.runner import Runner
from baton.engine.runner.step_records import results_digest
from baton.engine.sampling.params import SamplingParams
from baton.lab.replay.record import IncidentRecord, RecordedTokens
from baton.lab.replay.steps import KnownRequests, ResultDifference, StepCheck, check_steps
from baton.launch import CommandFailed
from baton.router.fleet.wire import sampling_message
from baton.worker.wire import sampling_params


@dataclass(frozen=True, slots=True)
class RecordedModel:
    """Options of the recorded workers' model, with the values of their flags."""

    model: Path
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantize: str = "none"

    def at(self, block_tokens: int) -> ModelOptions:
        device = torch.device("cpu")
        return ModelOptions(
            self.model, device, self.dtype, block_tokens, ANY_BYTES, None, self.kv_cache_dtype, self.quantize
        )


@dataclass(frozen=True, slots=True)
class EngineCheck:
    """Result of a replay through the engine. `is_model`: whether the model's fingerprint is the recorded one."""

    is_model: bool
    workers: tuple[StepCheck, ...]


def check_results(record: IncidentRecord, options: RecordedModel) -> EngineCheck:
    """Compute the recorded steps of all workers again. Raises: CommandFailed."""
    sizes = [int(each.scheduler["block_tokens"]) for each in record.workers if each.scheduler]
    if not sizes:
        raise CommandFailed("--model: the record has no worker whose steps could be computed")
    try:
        prepared = prepare_model(options.at(sizes[0]))
        model = prepared.load_model(progress=False)
    except ModelError as error:
        raise CommandFailed(f"--model: {error}") from error

    def computing(worker: ProcessTimeline, known: KnownRequests) -> EngineModel:
        settings = {name: int(value) for name, value in worker.scheduler.items()}
        own = replace(prepared, total_blocks=settings["total_blocks"], model=HandedOver(model))
        storage = torch.empty(own.storage_bytes, dtype=torch.uint8)
        runner = own.load(storage, progress=False, host_slots=settings["swap_slots"])
        return EngineModel(runner, known, settings["max_step_tokens"])

    checks = (check_steps(worker, record.requests, computing) for worker in record.workers)
    return EngineCheck(prepared.fingerprint == record.fingerprint, tuple(checks))


class EngineModel:
    """Model of one worker, over a KV pool of its own, with the recorded prompts. `chunk_tokens`: see `fill`."""

    def __init__(self, runner: Runner, known: KnownRequests, chunk_tokens: int) -> None:
        self._runner = runner
        self._known = known
        self._chunk_tokens = chunk_tokens

    def prompt(self, number: int) -> tuple[Sequence[int], SamplingParams]:
        tokens = self._tokens(number)
        return tokens.prompt, sampling_params(sampling_message(tokens.sampling, computes_prompt=True))

    def first(self, number: int) -> FirstToken:
        first = self._tokens(number).answers[0][0]
        return FirstToken(0, first, 0.0, end_reason(self.prompt(number)[1], first, 0))

    def fill(self, number: int, start: int, end: int, blocks: Sequence[int]) -> None:
        """Compute the KV of prompt tokens [start, end), in chunks of at most `chunk_tokens`."""
        prompt = self._tokens(number).prompt
        for begin in range(start, end, self._chunk_tokens):
            chunk = Chunk(number, prompt[begin : min(end, begin + self._chunk_tokens)], begin, blocks)
            self._runner.run(Plan((chunk,)))

    def run(self, plan: Plan) -> Sequence[ChunkResult]:
        return self._runner.run(plan)

    def difference(self, step: TimelineStep, plan: Plan, results: Sequence[ChunkResult]) -> ResultDifference | None:
        for chunk, result in zip(plan.chunks, results, strict=True):
            tokens = self._tokens(chunk.request_id)
            position, answer = chunk.end - len(tokens.prompt), tokens.answers[0]
            for drawn in result.drawn if isinstance(result, Computed) else ():
                if position < len(answer) and drawn.token_id != answer[position]:
                    name = self._known.both(chunk.request_id)[1].request_id
                    return ResultDifference(name, position, answer[position], drawn.token_id)
        return ResultDifference() if step.digest and results_digest(results) != step.digest else None

    def _tokens(self, number: int) -> RecordedTokens:
        """Return the recorded tokens of a request, which has some: see `KnownRequests.obstacle`."""
        tokens = self._known.both(number)[1].tokens
        if tokens is None:
            raise KeyError(number)
        return tokens
