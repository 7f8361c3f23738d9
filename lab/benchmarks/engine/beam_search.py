"""Blocks that a beam search takes, against beams that share nothing.

    python -m baton.lab.benchmarks.engine.beam_search --model FOLDER [--prompt-tokens 256] [--answer-tokens 64]
                                             [--json FILE]

After every step the blocks held are counted, and the blocks that all tables list: what copies would hold. The saving is
counted as in the PagedAttention paper (Kwon et al., SOSP 2023, section 6.3): (blocks without - blocks with sharing) /
blocks without, averaged over the steps of the answers. Prompts are pieces of Python's own library: text that is always
there.
"""

import argparse
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from baton.engine.offline.beam_search import BeamSearchParams
from baton.engine.offline.core import OfflineEngine
from baton.engine.offline.engine_args import EngineArgs
from baton.engine.offline.prompts import Prompt
from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_result

WIDTHS = (1, 2, 4, 6, 8)
PROMPTS = 4


@dataclass(frozen=True, slots=True)
class Step:
    held_blocks: int
    listed_blocks: int  # by the tables of all beams
    copied_blocks: int  # on write


@dataclass(frozen=True, slots=True)
class Use:
    width: int
    most_blocks: int
    most_blocks_of_copies: int
    saving: float  # as the paper counts it, averaged over steps and prompts
    copied_blocks: int  # on write, per prompt


COLUMNS: Columns[Use] = {
    "width": lambda use: use.width,
    "blocks": lambda use: use.most_blocks,
    "copies": lambda use: use.most_blocks_of_copies,
    "saving": lambda use: f"{use.saving:.1%}",
    "copied": lambda use: use.copied_blocks,
}


def main() -> None:
    model = (str, "folder of a checkpoint, or a Hugging Face id")
    arguments = read_arguments(__doc__, model=model, prompt_tokens=256, answer_tokens=64, block_tokens=16)
    engine = OfflineEngine(
        EngineArgs(model=arguments.model, block_size=arguments.block_tokens, quiet=True, enable_prefix_caching=False)
    )
    engine.runner.warm_up()
    prompts = list(_prompts(engine, arguments.prompt_tokens))
    uses = [measure(engine, prompts, width, arguments.answer_tokens) for width in WIDTHS]
    print(f"prompts of {arguments.prompt_tokens} tokens, answers of {arguments.answer_tokens}")
    print(table(uses, COLUMNS))
    sizes = {name: getattr(arguments, name) for name in ("prompt_tokens", "answer_tokens", "block_tokens")}
    found = {"model": Path(arguments.model).name, **sizes, "uses": [asdict(use) for use in uses]}
    write_result(arguments.json, found)


def measure(engine: OfflineEngine, prompts: list[Prompt], width: int, answer_tokens: int) -> Use:
    searches = [list(search(engine, prompt, width, answer_tokens)) for prompt in prompts]
    steps = [step for steps in searches for step in steps]
    return Use(
        width,
        max(step.held_blocks for step in steps),
        max(step.listed_blocks for step in steps),
        sum(1 - step.held_blocks / step.listed_blocks for step in steps) / len(steps),
        sum(step.copied_blocks for step in steps) // len(prompts),
    )


def search(engine: OfflineEngine, prompt: Prompt, width: int, answer_tokens: int) -> Iterator[Step]:
    """The steps of one search while its beams run."""
    params = BeamSearchParams(beam_width=width, max_tokens=answer_tokens + 1, ignore_eos=True)
    request = engine.request(prompt, params.sampling())
    scheduler = engine.scheduler
    scheduler.add(replace(request, params=params.searching(request.params)))
    while (plan := scheduler.plan()) is not None:
        beams = [sequence for sequence in scheduler.batch.running if sequence.answer_tokens]
        if beams:
            listed = sum(len(beam.held().blocks) for beam in beams)
            yield Step(scheduler.pool.counts.held, listed, len(plan.copies))
        scheduler.commit(plan, engine.runner.run(plan))


def _prompts(engine: OfflineEngine, tokens: int) -> Iterator[Prompt]:
    text = Path(argparse.__file__).read_text()
    share = len(text) // PROMPTS
    for number in range(PROMPTS):
        yield Prompt(None, tuple(engine.reader.encode(text[number * share :][: 16 * tokens])[:tokens]))


if __name__ == "__main__":
    main()
