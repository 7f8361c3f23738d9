"""Blocks that n answers to one prompt take, against n copies, and against the formula of the PagedAttention paper.

    python lab/benchmarks/engine/parallel_sampling.py [--prompt-tokens 512] [--answer-tokens 64] [--json FILE]

Blocks are shared through the scheduler alone, so no model is needed: what it decides is what a model would do. The
paper (Kwon et al., SOSP 2023, section 6.3) counts what sharing saves as (blocks without - blocks with sharing) / blocks
without. Its sharing is by logical block: whatever lies wholly within the prompt is held once, and every sample has its
own blocks behind that, the prompt's part-filled last block among them: P // B + n * (ceil((P + A) / B) - P // B).
"""

from dataclasses import asdict, dataclass

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.request import Computed, Drawn, Plan, Request, blocks_for
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.scheduler import Scheduler
from baton.lab.benchmarks.report.result import Columns, read_arguments, table, write_result

COUNTS = (1, 2, 4, 6, 8, 16)


@dataclass(frozen=True, slots=True)
class Case:
    n: int
    prompt_tokens: int
    answer_tokens: int
    block_tokens: int


@dataclass(frozen=True, slots=True)
class Use:
    n: int
    most_blocks: int  # held at once, at any time
    blocks_of_copies: int
    blocks_by_formula: int
    saving: float  # as the paper counts it
    copied_blocks: int  # on write, of all steps
    prefill_tokens: int  # computed of the prompt, for all answers together
    unfilled_share: float  # of the token slots held before the last step


COLUMNS: Columns[Use] = {
    "n": lambda use: use.n,
    "blocks": lambda use: use.most_blocks,
    "n copies": lambda use: use.blocks_of_copies,
    "formula": lambda use: use.blocks_by_formula,
    "saving": lambda use: f"{use.saving:.1%}",
    "copied": lambda use: use.copied_blocks,
    "prefilled": lambda use: use.prefill_tokens,
    "unfilled": lambda use: f"{use.unfilled_share:.1%}",
}


def main() -> None:
    arguments = read_arguments(__doc__, prompt_tokens=512, answer_tokens=64, block_tokens=32)
    cases = [Case(n, arguments.prompt_tokens, arguments.answer_tokens, arguments.block_tokens) for n in COUNTS]
    uses = [measure(case) for case in cases]
    print(f"prompt of {arguments.prompt_tokens} tokens, answers of {arguments.answer_tokens}")
    print(table(uses, COLUMNS))
    write_result(arguments.json, {"uses": [asdict(use) for use in uses]})


def measure(case: Case) -> Use:
    """Runs n answers to their end; the "model" says 1 all the time."""
    # One token more is drawn than KV is kept of: that of the last one is never needed.
    params = SamplingParams(max_tokens=case.answer_tokens + 1, n=case.n)
    pool = BlockPool(case.n * blocks_for(case.prompt_tokens + case.answer_tokens, case.block_tokens) + case.n)
    scheduler = Scheduler(pool, case.block_tokens, max_step_tokens=512, max_sequences=case.n)
    scheduler.add(Request(1, tuple(range(case.prompt_tokens)), params, ()))
    most = copied = prefilled = 0
    unfilled = 0.0
    while (plan := scheduler.plan()) is not None:
        most = max(most, pool.counts.held)
        copied += len(plan.copies)
        prefilled += sum(len(chunk.token_ids) for chunk in plan.chunks if chunk.start < case.prompt_tokens)
        unfilled = scheduler.batch.unfilled_slots / (pool.counts.held * case.block_tokens)
        scheduler.commit(plan, _drawn(plan))
    copies = case.n * blocks_for(case.prompt_tokens + case.answer_tokens, case.block_tokens)
    return Use(case.n, most, copies, formula(case), 1 - most / copies, copied, prefilled, unfilled)


def formula(case: Case) -> int:
    shared = case.prompt_tokens // case.block_tokens
    return shared + case.n * (blocks_for(case.prompt_tokens + case.answer_tokens, case.block_tokens) - shared)


def _drawn(plan: Plan) -> list[Computed]:
    return [Computed(tuple(Drawn(1, 0.0) for _ in chunk.samples)) for chunk in plan.chunks]


if __name__ == "__main__":
    main()
