"""Drafter with a small model that drafts all answers of a step together.

The drafter samples each token as the target model will: with the same parameters and the same random number, which
depends on seed, choice and position. So drafts of sampled answers are accepted as often as both models' distributions
agree.

The draft model has its own pool with a prefix cache. An answer's table covers its tokens and its drafts; KV of a wrong
draft is overwritten. If the pool is short, answers release their blocks and recompute their KV later: first answers
that are not in the step, least recently used first; then the newest answers of the step. The drafter decides which
passes to compute; `run` computes them.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.block_table import BlockTable, acquire
from baton.engine.request import Chunk, ChunkResult, Computed, Plan, Sample, blocks_for
from baton.engine.sampling.params import SamplingParams
from baton.engine.scheduler.drafts import AnswerSoFar, Offer
from baton.engine.scheduler.speculation import EWMA_WEIGHT, OUTLIER_RATIO, RowCost
from baton.text.block_groups import ONE_GROUP, BlockGroups

DECAY = 0.98  # factor by which a step without drafts reduces the mean extra time of first passes
MAX_FIRST_TOKENS = 8  # maximum number of uncomputed tokens in a draft's first pass; usually one or two
CATCH_UP_TOKENS = (256, 128, 64, 32, 16, 8, 4, 2, 1)  # sizes of a pass that computes an answer's missing KV, in tokens
MIN_CATCH_UP_TOKENS = 8  # smallest catch-up pass that gains on a growing answer, in tokens
MEASURED_TOKENS = (1, 4, 16, 64)  # sizes of the passes measured at start, in tokens
MEASUREMENTS = 3  # measurements per size

Run = Callable[[Plan], Sequence[ChunkResult]]
"""Function that computes a plan with the draft model."""


class KnownAnswer:
    """Draft state of an answer. The blocks of `table` have KV of its first `settled` tokens, then of `drafted`."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self.table = BlockTable(pool, ())
        self.settled = self._published_blocks = 0
        self.drafted: list[int] = []

    def begin(self, hashes: Sequence[bytes], columns: int, block_tokens: int) -> None:
        """Allocate `columns` columns of blocks, reusing cached ones. Raises: OutOfBlocks."""
        acquired = acquire(self._pool, hashes, columns)
        self.table.release()
        self.table = acquired.table
        self._published_blocks = acquired.cached_columns
        self.settled = acquired.cached_columns * block_tokens

    def settle(self, token_ids: Sequence[int]) -> None:
        """Mark correct drafts as settled, except the newest token of the answer, whose logits are still needed."""
        newest = len(token_ids) - 1
        for token_id in self.drafted:
            if self.settled >= newest or token_ids[self.settled] != token_id:
                break
            self.settled += 1
        self.settled = min(self.settled, newest)
        self.drafted.clear()

    def publish(self, answer: AnswerSoFar, block_tokens: int) -> None:
        """Publish the blocks of settled tokens, which are not written again."""
        complete = self.settled // block_tokens
        if complete > self._published_blocks:
            self.table.publish(answer.reusable_hashes(block_tokens)[:complete], self._published_blocks)
            self._published_blocks = complete
        self.table.pass_over(self.table.groups.first_live(self.settled))

    def give_up(self) -> None:
        """Release all blocks."""
        self.table.release()
        self.table = BlockTable(self._pool, ())
        self.settled = self._published_blocks = 0
        self.drafted.clear()


class ModelDrafter:
    """`CostlyDrafter` that runs a draft model. Only the engine's thread may use it."""

    def __init__(
        self,
        run: Run,
        total_blocks: int,
        block_tokens: int,
        most_tokens: int,
        clock: Callable[[], float] = time.monotonic,
        groups: BlockGroups = ONE_GROUP,
    ) -> None:
        """Start with an empty pool. `run`: computes passes. `most_tokens`: context length of the draft model."""
        self.pool = BlockPool(total_blocks, groups)
        self._run = run
        self._block_tokens = block_tokens
        self._most_tokens = min(most_tokens, total_blocks // groups.count * block_tokens)
        self._clock = clock
        self._known: dict[AnswerSoFar, KnownAnswer] = {}  # in the order in which answers release their blocks
        self._spoilt = set[AnswerSoFar]()  # answers with non-finite results
        # Cost of passes with one token per answer, which a GPU replays from CUDA graphs, and of other passes.
        self._cost, self._chunk_cost = RowCost(), RowCost()
        self._longer_s = 0.0  # mean extra time of a draft's first pass
        self._has_drafted = False  # whether drafts were computed since the last `offers`

    def measure(self) -> None:
        """Measure the cost of passes of several sizes, over block 0. Raises: ValueError after the first answer."""
        if self._known:
            raise ValueError("passes must be measured before the first answer")
        for tokens in (each for each in MEASURED_TOKENS if each <= self._most_tokens):
            rows = tuple(self._measured_chunk(number, 1) for number in range(tokens))
            for cost, chunks in ((self._cost, rows), (self._chunk_cost, (self._measured_chunk(0, tokens),))):
                cost.observe(tokens, min(self._timed(chunks)[1] for _ in range(MEASUREMENTS)))

    def offers(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> list[Offer]:
        if not self._has_drafted:  # decay: the cause of slow first passes may be gone
            self._longer_s *= DECAY
        self._has_drafted = False
        for answer in reversed(answers):
            known = self._known.pop(answer, None)
            self._known[answer] = known or KnownAnswer(self.pool)
        return [self._offer(answer, count) for answer, count in zip(answers, most, strict=True)]

    def seconds(self, tokens: int) -> float:
        return self._cost.expected_s(tokens) or 0.0

    @property
    def begin_s(self) -> float:
        return max(0.0, self._longer_s)

    def drafts_of(self, answers: Sequence[AnswerSoFar], most: Sequence[int]) -> list[list[int]]:
        """Draft at most `most` tokens per answer, only for answers that `offers` reported as known."""
        drafted: list[list[int]] = [[] for _ in answers]
        drafting = [index for index, count in enumerate(most) if count > 0]
        while drafting:
            chunks = tuple(self._next_chunk(answers[index], drafted[index]) for index in drafting)
            going_on = []
            results, seconds = self._computed(chunks)
            if not any(drafted):
                self._note_first_pass(len(chunks), seconds)
            for index, chunk, result in zip(drafting, chunks, results, strict=True):
                if not isinstance(result, Computed):
                    drafted[index].clear()
                    self._spoil(answers[index])
                    continue
                known, token_id = self._known[answers[index]], result.drawn[0].token_id
                self._note(known, chunk, is_draft=bool(drafted[index]))
                drafted[index].append(token_id)
                if len(drafted[index]) < most[index] and token_id not in chunk.samples[0].params.stop_token_ids:
                    going_on.append(index)
            drafting = going_on
        return drafted

    def _note_first_pass(self, answers: int, seconds: float) -> None:
        """Update the mean extra time of first passes; times are capped at OUTLIER_RATIO times the usual one."""
        self._has_drafted = True
        usual_s = self.seconds(answers)
        longer_s = min(seconds, OUTLIER_RATIO * (usual_s + self.begin_s)) - usual_s if usual_s else 0.0
        self._longer_s += EWMA_WEIGHT * (longer_s - self._longer_s)

    @property
    def least_room_s(self) -> float:
        return self._chunk_s(MIN_CATCH_UP_TOKENS)

    def catch_up(self, answers: Sequence[AnswerSoFar], room_s: float) -> float:
        left = next((tokens for tokens in CATCH_UP_TOKENS if self._chunk_s(tokens) <= room_s), 0)
        chunks: list[Chunk] = []
        for answer in answers:
            known = self._known[answer]
            token_ids = answer.token_ids[known.settled : min(known.settled + left, len(answer.token_ids) - 1)]
            if not token_ids:
                break
            chunks.append(Chunk(len(chunks), token_ids, known.settled, known.table.numbers))
            left -= len(token_ids)
        if not chunks:
            return 0.0
        began = self._clock()
        results, _ = self._computed(tuple(chunks))
        for answer, chunk, result in zip(answers, chunks, results, strict=False):
            if isinstance(result, Computed):
                self._note(self._known[answer], chunk, is_draft=False)
            else:
                self._spoil(answer)
        return self._clock() - began

    def forget(self, answer: AnswerSoFar) -> None:
        self._spoilt.discard(answer)
        if (known := self._known.pop(answer, None)) is not None:
            known.table.release()

    def _offer(self, answer: AnswerSoFar, most: int) -> Offer:
        tokens = len(answer.token_ids)
        most = min(most, self._most_tokens - tokens)
        if most < 1 or answer in self._spoilt or not self._hold(answer, tokens + most):
            return Offer(0)
        known = self._known[answer]
        known.settle(answer.token_ids)
        known.publish(answer, self._block_tokens)
        return Offer(most, is_known=tokens - known.settled <= MAX_FIRST_TOKENS)

    def _hold(self, answer: AnswerSoFar, tokens: int) -> bool:
        """Extend an answer's table to `tokens` tokens, if needed with other answers' blocks; return whether it fits."""
        own, columns = self._known[answer], blocks_for(tokens, self._block_tokens)
        lacking = columns - own.table.columns
        needed = self.pool.groups.blocks(lacking)
        for other, known in self._known.items():
            if needed <= self.pool.available or other is answer:
                break
            known.give_up()
        if needed > self.pool.available:
            return False
        if not own.table.columns:
            own.begin(answer.reusable_hashes(self._block_tokens), columns, self._block_tokens)
        elif lacking > 0:
            own.table.append(lacking)
        return True

    def _spoil(self, answer: AnswerSoFar) -> None:
        """Stop drafting for an answer with non-finite results, and discard its KV."""
        known = self._known[answer]
        self.pool.distrust(known.table.blocks)
        known.give_up()
        self._spoilt.add(answer)

    def _next_chunk(self, answer: AnswerSoFar, drafted: list[int]) -> Chunk:
        """Return the uncomputed tokens of an answer, with a sample after the last one."""
        known = self._known[answer]
        start = known.settled + len(known.drafted)
        token_ids = drafted[-1:] or answer.token_ids[start:]
        samples = tuple(each._replace(params=drawn_alike(each.params)) for each in answer.samples(drafted))
        return Chunk(0, token_ids, start, known.table.numbers, samples)

    @staticmethod
    def _note(known: KnownAnswer, chunk: Chunk, is_draft: bool) -> None:
        """Record that the chunk's KV is written."""
        if is_draft:
            known.drafted += chunk.token_ids
        else:
            known.settled = chunk.end

    def _chunk_s(self, tokens: int) -> float:
        """Return the expected time of a catch-up pass over `tokens` tokens."""
        return self._chunk_cost.expected_s(tokens) or 0.0

    def _measured_chunk(self, number: int, tokens: int) -> Chunk:
        table = [0] * self.pool.groups.blocks(blocks_for(tokens, self._block_tokens))
        return Chunk(number, [0] * tokens, 0, table, (LIKELIEST,))

    def _computed(self, chunks: tuple[Chunk, ...]) -> tuple[Sequence[ChunkResult], float]:
        """Compute the chunks; return the results and the seconds taken."""
        results, seconds = self._timed(chunks)
        tokens = sum(len(chunk.token_ids) for chunk in chunks)
        cost = self._cost if tokens == len(chunks) else self._chunk_cost
        cost.observe(tokens, seconds)
        return results, seconds

    def _timed(self, chunks: tuple[Chunk, ...]) -> tuple[Sequence[ChunkResult], float]:
        began = self._clock()
        results = self._run(Plan(chunks))
        return results, self._clock() - began


LIKELIEST = Sample(0, SamplingParams(max_tokens=1))


def drawn_alike(params: SamplingParams) -> SamplingParams:
    """Return `params` without log-probabilities and grammar; sampling is otherwise the same."""
    if params.constraint is None and params.logprobs == 0 and params.prompt_logprobs is None:
        return params
    return replace(params, constraint=None, logprobs=0, prompt_logprobs=None)
