"""What drafts are worth: tokens per second with them and without, in turns, on one engine in this process.

    .venv/bin/python -m baton.lab.benchmarks.engine.speculation --model FOLDER [--streams 1 4] [--rounds 5]
                                                        [--draft-model FOLDER] [--temperature 0]
                                                        [--threads 1] [--json FILE]

The answers are made once without drafts. Then drafts are right with a given chance, by those answers: 0.8, and never.
A third row looks drafts up in prompt and answer, as workers do: what it gains depends on the model's text. A fourth has
them drafted by a small model, whose passes and catching up take their time. The demo model is also asked for tables,
all rows as they are and one as JSON: there drafts are looked up. What is known of prices and rates is kept from one
round to the next, as in a worker. All answers are compared, token for token. Times begin when all prompts are computed.
"""

import argparse
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoTokenizer

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
from baton.lab.benchmarks.engine.speed import CACHE_ROOT, EngineSetup, LoadedEngine, load_engine, random_prompts
from baton.lab.benchmarks.report.result import DEMO, Columns, read_arguments, write_result
from baton.lab.benchmarks.report.result import table as result_table
from baton.lab.tableqa.train_data import people, table
from baton.launch import CommandFailed

PROMPT_TOKENS, NEW_TOKENS, MOST_DRAFTED = 128, 160, 8
CHANCES = {"right with 0.8": 0.8, "never right": 0.0}
TABLES, TABLE_ROWS = 8, 12  # of a round: as many requests one after another for each answer at once
TABLE_TOKENS = 1024  # of such a prompt and answer at most


class TableQuestion(NamedTuple):
    copied: str  # into the answer
    text: str
    answer_tokens: int  # at most


TABLE_QUESTIONS = (
    TableQuestion("all rows of tables", "List everyone in the table.", 400),
    TableQuestion("rows of tables as JSON", "Give me {name} as JSON.", 64),
)


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
    tokens: int  # since every prompt was computed
    seconds: float


def answer(
    loaded: LoadedEngine, prompts: Sequence[Sequence[int]], params: SamplingParams, speculation: Speculation | None
) -> Answered:
    """Each with a seed of its own. None: without drafts."""
    prepared = loaded.prepared
    scheduler = Scheduler(
        BlockPool(prepared.total_blocks, prepared.layout.groups),
        prepared.layout.block_tokens,
        loaded.setup.step_tokens,
        64,
        speculation=speculation,
    )
    engine = Engine(loaded.runner, scheduler)
    for number, prompt in enumerate(prompts):
        scheduler.add(Request(number, tuple(prompt), replace(params, seed=number), ()), CACHE_ROOT)
    whole = [list(prompt) for prompt in prompts]
    began_s, before = 0.0, 0
    while (outcomes := engine.step()) is not None:
        for made in outcomes:
            if isinstance(made, TokenMade):
                whole[made.request_id].append(made.drawn.token_id)
        lengths = [len(tokens) - len(prompt) for tokens, prompt in zip(whole, prompts, strict=True)]
        if before == 0 and min(lengths) > 0:
            began_s, before = time.perf_counter(), sum(lengths)
    tokens = sum(map(len, whole)) - sum(map(len, prompts)) - before
    return Answered(whole, tokens, time.perf_counter() - began_s)


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


@dataclass(slots=True)
class Turns:
    """Rounds of one kind of drafts, each with and without."""

    drafts: str
    plain_per_s: list[float] = field(default_factory=list)
    drafted_per_s: list[float] = field(default_factory=list)
    speculated: Speculated = field(default_factory=Speculated)  # of all rounds

    def add(self, plain: Sequence[Answered], drafted: Sequence[Answered], speculated: Speculated) -> None:
        """A round. Raises: CommandFailed where a token differs."""
        if [each.whole for each in plain] != [each.whole for each in drafted]:
            raise CommandFailed(f"drafts that are {self.drafts} changed an answer")
        self.plain_per_s.append(_tokens_per_s(plain))
        self.drafted_per_s.append(_tokens_per_s(drafted))
        self.speculated = speculated

    def gain(self, streams: int) -> Gain:
        ratios = [drafted / plain for drafted, plain in zip(self.drafted_per_s, self.plain_per_s, strict=True)]
        return Gain(
            streams,
            self.drafts,
            round(statistics.median(self.plain_per_s), 1),
            round(statistics.median(ratios), 3),
            round(min(ratios), 3),
            round(max(ratios), 3),
            round(self.speculated.accepted_tokens / max(1, self.speculated.drafted_tokens), 3),
        )


def _tokens_per_s(answered: Sequence[Answered]) -> float:
    return sum(each.tokens for each in answered) / sum(each.seconds for each in answered)


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
    """On random tokens. Raises: CommandFailed where a token differs."""
    turns: dict[str, Turns] = {}
    speculations: dict[str, Speculation] = {}
    of_model = {} if draft is None else {"by a model": model_drafter(draft)}
    params = SamplingParams(max_tokens=NEW_TOKENS, temperature=temperature)
    for seed in range(rounds):
        prompts = random_prompts(loaded.prepared.config.vocab_size, streams, PROMPT_TOKENS, seed)
        plain = answer(loaded, prompts, params, None)
        drafters: dict[str, Drafter] = {"looked up": EachAlone(PromptLookup), **of_model}
        for name, chance in CHANCES.items():
            drafters[name] = EachAlone(partial(Knows, plain.whole, chance, seed))
        for name, drafter in drafters.items():
            speculation = speculations.setdefault(name, Speculation(MOST_DRAFTED, drafter=drafter))
            speculation.drafter = drafter
            drafted = answer(loaded, prompts, params, speculation)
            turns.setdefault(name, Turns(name)).add([plain], [drafted], speculation.done)
    return [each.gain(streams) for each in turns.values()]


def table_prompts(folder: Path, question: TableQuestion, streams: int, seed: int) -> Iterator[list[list[int]]]:
    """Of requests at once, each about a table of its own."""
    draw, tokenizer = random.Random(seed), AutoTokenizer.from_pretrained(folder)
    for _ in range(TABLES):
        prompts = []
        for _ in range(streams):
            persons = people(draw, TABLE_ROWS)
            asked = question.text.format(name=draw.choice(persons).name)
            messages = [{"role": "system", "content": table(persons)}, {"role": "user", "content": asked}]
            text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
            prompts.append(list(tokenizer(text, add_special_tokens=False).input_ids))
        yield prompts


def measure_tables(loaded: LoadedEngine, question: TableQuestion, streams: int, rounds: int) -> Gain:
    """Of the demo model. Raises: CommandFailed where a token differs."""
    turns, speculation = Turns(f"looked up, {question.copied}"), Speculation(MOST_DRAFTED)
    ends = frozenset(loaded.prepared.config.eos_token_ids)
    params = SamplingParams(max_tokens=question.answer_tokens, stop_token_ids=ends)
    for seed in range(rounds):
        plain, drafted = [], []
        for prompts in table_prompts(loaded.setup.folder, question, streams, seed):
            plain.append(answer(loaded, prompts, params, None))
            drafted.append(answer(loaded, prompts, params, speculation))
        turns.add(plain, drafted, speculation.done)
    return turns.gain(streams)


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
    is_demo = arguments.model.resolve() == DEMO
    tokens = max(PROMPT_TOKENS + NEW_TOKENS, TABLE_TOKENS if is_demo else 0)
    loaded = load_engine(EngineSetup(arguments.model, arguments.dtype, "none", "auto", max(streams), tokens))
    draft = None if arguments.draft_model is None else load_draft(arguments, loaded, max(streams))
    temperature = arguments.temperature
    gains = [gain for each in streams for gain in measure(loaded, each, arguments.rounds, temperature, draft)]
    if is_demo:
        gains += [
            measure_tables(loaded, question, each, arguments.rounds) for question in TABLE_QUESTIONS for each in streams
        ]
    print(result_table(gains, COLUMNS))
    figures = {"rounds": arguments.rounds, "temperature": temperature, "gains": [asdict(gain) for gain in gains]}
    write_result(arguments.json, figures)


if __name__ == "__main__":
    main()
