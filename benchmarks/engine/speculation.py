"""What drafts are worth: tokens per second with them and without, in turns, on one engine in this process.

    .venv/bin/python -m baton.benchmarks.engine.speculation --model FOLDER [--streams 1 4] [--rounds 5]
                                                        [--draft-model FOLDER] [--temperature 0]
                                                        [--threads 1] [--json FILE]

The answers are made once without drafts. Then drafts are right with a given chance, by those answers: 0.8, and never.
A third row looks drafts up in prompt and answer, as workers do: what it gains depends on the model's text. A fourth has
them drafted by a small model, whose passes and catching up take their time. All answers are compared, token for token.
Times begin when every prompt is computed.
"""

import argparse
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from baton.benchmarks.engine.speed import CACHE_ROOT, EngineSetup, LoadedEngine, load_engine, random_prompts
from baton.benchmarks.report.result import DEMO, Columns, read_arguments, table, write_result
from baton.engine.config.model_config import ModelError
from baton.engine.drafting.model_drafter import ModelDrafter
from baton.engine.drafting.vocabulary import check_same_vocabulary
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Request
from baton.engine.runner.engine import Engine
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.drafts import Drafter, EachAlone, PromptLookup
from baton.engine.scheduler.scheduler import Scheduler
from baton.engine.scheduler.sequences import TokenMade
from baton.engine.scheduler.speculation import Speculated, Speculation
from baton.launch.errors import CommandFailed

PROMPT_TOKENS, NEW_TOKENS, MOST_DRAFTED = 128, 160, 8
CHANCES = {"right with 0.8": 0.8, "never right": 0.0}


class Knows:
    """Drafts an answer that is known, each token of it right with a chance of `right`."""

    def __init__(self, whole: Sequence[Sequence[int]], right: float, seed: int) -> None:
        """`whole`: prompts with their answers."""
        self._whole = whole
        self._right = right
        self._draw = random.Random(seed)

    def draft(self, token_ids: Sequence[int], most: int) -> Sequence[int]:
        length = len(token_ids)
        whole = next(each for each in self._whole if each[:length] == token_ids)
        return [each if self._draw.random() < self._right else each ^ 1 for each in whole[length : length + most]]


@dataclass(frozen=True, slots=True)
class Answered:
    whole: list[list[int]]  # prompts with their answers
    tokens_per_s: float
    speculated: Speculated


def answer(
    loaded: LoadedEngine, prompts: Sequence[Sequence[int]], temperature: float, drafter: Drafter | None
) -> Answered:
    """None: without drafts."""
    prepared = loaded.prepared
    speculation = None if drafter is None else Speculation(MOST_DRAFTED, drafter=drafter)
    scheduler = Scheduler(
        BlockPool(prepared.total_blocks),
        prepared.layout.block_tokens,
        loaded.setup.step_tokens,
        64,
        speculation=speculation,
    )
    engine = Engine(loaded.runner, scheduler)
    for number, prompt in enumerate(prompts):
        params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature, seed=number)
        scheduler.add(Request(number, tuple(prompt), params, ()), CACHE_ROOT)
    whole = [list(prompt) for prompt in prompts]
    began_s, before = time.perf_counter(), 0
    while (outcomes := engine.step()) is not None:
        for made in outcomes:
            if isinstance(made, TokenMade):
                whole[made.request_id].append(made.drawn.token_id)
        lengths = [len(tokens) - len(prompt) for tokens, prompt in zip(whole, prompts, strict=True)]
        if min(lengths) == 0:
            began_s, before = time.perf_counter(), sum(lengths)
    tokens = sum(map(len, whole)) - sum(map(len, prompts)) - before
    done = Speculated() if speculation is None else speculation.done
    return Answered(whole, tokens / (time.perf_counter() - began_s), done)


@dataclass(frozen=True, slots=True)
class Gain:
    """Of drafts, over the rounds."""

    streams: int
    drafts: str
    plain_tokens_per_s: float  # median
    times: float  # as many tokens per second with drafts: median
    least: float
    most: float
    accepted_share: float  # of drafted tokens


def load_draft(arguments: argparse.Namespace, loaded: LoadedEngine, streams: int) -> LoadedEngine:
    """Raises: CommandFailed."""
    folder, model = arguments.draft_model, loaded.prepared
    draft = load_engine(replace(loaded.setup, folder=folder, batch=streams))
    try:
        sizes = model.config.vocab_size, draft.prepared.config.vocab_size
        check_same_vocabulary(model.options.folder, sizes[0], folder, sizes[1])
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    return draft


def model_drafter(draft: LoadedEngine) -> ModelDrafter:
    """With an empty pool, and its passes measured."""
    prepared = draft.prepared
    block_tokens, positions = prepared.layout.block_tokens, prepared.config.max_positions
    drafter = ModelDrafter(draft.runner.run, prepared.total_blocks, block_tokens, positions)
    drafter.measure()
    return drafter


def measure(
    loaded: LoadedEngine, streams: int, rounds: int, temperature: float, draft: LoadedEngine | None
) -> list[Gain]:
    """Raises: CommandFailed where a token differs."""
    ratios: dict[str, list[float]] = {}
    accepted: dict[str, list[Speculated]] = {}
    plain_per_s = []
    for seed in range(rounds):
        prompts = random_prompts(loaded.prepared.config.vocab_size, streams, PROMPT_TOKENS, seed)
        plain = answer(loaded, prompts, temperature, None)
        plain_per_s.append(plain.tokens_per_s)
        drafters: dict[str, Drafter] = {"looked up": EachAlone(PromptLookup)}
        for name, chance in CHANCES.items():
            drafters[name] = EachAlone(partial(Knows, plain.whole, chance, seed))
        if draft is not None:
            drafters["by a model"] = model_drafter(draft)
        for name, drafter in drafters.items():
            drafted = answer(loaded, prompts, temperature, drafter)
            if drafted.whole != plain.whole:
                raise CommandFailed(f"drafts that are {name} changed an answer")
            ratios.setdefault(name, []).append(drafted.tokens_per_s / plain.tokens_per_s)
            accepted.setdefault(name, []).append(drafted.speculated)
    return [
        Gain(
            streams,
            name,
            round(statistics.median(plain_per_s), 1),
            round(statistics.median(each), 3),
            round(min(each), 3),
            round(max(each), 3),
            round(
                sum(done.accepted_tokens for done in accepted[name])
                / max(1, sum(done.drafted_tokens for done in accepted[name])),
                3,
            ),
        )
        for name, each in ratios.items()
    ]


COLUMNS: Columns[Gain] = {
    "streams": lambda gain: gain.streams,
    "drafts": lambda gain: gain.drafts,
    "tokens/s without": lambda gain: f"{gain.plain_tokens_per_s:,.0f}",
    "times": lambda gain: f"{gain.times:.2f} ({gain.least:.2f} to {gain.most:.2f})",
    "drawn": lambda gain: f"{gain.accepted_share:.0%}",
}


def main() -> None:
    arguments = read_arguments(
        __doc__,
        model=DEMO,
        draft_model=(None, "folder of a small model that drafts"),
        streams=([1, 4], "answers at once"),
        rounds=5,
        temperature=0.0,
        threads=1,
        dtype="auto",
    )
    torch.set_num_threads(arguments.threads)
    streams = [int(each) for each in arguments.streams]
    tokens = PROMPT_TOKENS + NEW_TOKENS
    loaded = load_engine(EngineSetup(arguments.model, arguments.dtype, "none", "auto", max(streams), tokens))
    draft = None if arguments.draft_model is None else load_draft(arguments, loaded, max(streams))
    temperature = arguments.temperature
    gains = [gain for each in streams for gain in measure(loaded, each, arguments.rounds, temperature, draft)]
    print(table(gains, COLUMNS))
    figures = {"rounds": arguments.rounds, "temperature": temperature, "gains": [asdict(gain) for gain in gains]}
    write_result(arguments.json, figures)


if __name__ == "__main__":
    main()
