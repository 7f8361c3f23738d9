"""A prompt while it is computed: its next chunk, and the samples after its last one. Pure."""

from dataclasses import dataclass

from engine.block_table import BlockTable
from engine.plan import Chunk, Drawn, Sample, scored
from engine.sequence import FirstToken, Request, end_reason


@dataclass(slots=True)
class WaitingPrompt:
    """A prompt that was not admitted yet."""

    request: Request
    overtaken_tokens: int = 0  # see engine/overtaking.py

    @property
    def size_tokens(self) -> int:
        return len(self.request.token_ids)


@dataclass(slots=True)
class Prompt:
    """A prompt being computed. KV of its first `computed_tokens` tokens is written."""

    request: Request
    table: BlockTable  # of the whole prompt
    cached_tokens: int
    computed_tokens: int
    readable_blocks: int = 0  # reported in progress so far

    def makes(self, number: int, block_hash: bytes) -> bool:
        """Whether it computes this block, or read it from the cache."""
        return self.request.block_hashes[number : number + 1] == (block_hash,)


def next_chunk(prompt: Prompt, budget_tokens: int) -> Chunk:
    """The next at most `budget_tokens` tokens of a prompt; the last chunk draws a token for every choice."""
    request, start = prompt.request, prompt.computed_tokens
    token_ids = request.token_ids[start : start + budget_tokens]
    done = start + len(token_ids) == len(request.token_ids)
    samples = first_samples(request) if done else ()
    scores = scored(request.token_ids, start, start + len(token_ids), request.params.prompt_logprobs)
    return Chunk(request.request_id, token_ids, start, prompt.table.blocks, samples, scores, adapter=request.adapter)


def first_samples(request: Request) -> tuple[Sample, ...]:
    """The first token of every choice; they share one history, if the request's sampling looks back at all."""
    params = request.params
    history = request.token_ids if params.needs_history else ()
    return tuple(Sample(choice, params, history, request.prompt_tokens) for choice in request.first_choices)


def first_tokens(chunk: Chunk, drawn: tuple[Drawn, ...], offset: int = 0) -> tuple[FirstToken, ...]:
    """`offset`: of these tokens in the answer."""
    return tuple(
        FirstToken(
            sample.choice,
            token.token_id,
            token.logprob,
            end=end_reason(sample.params, token.token_id, offset) if sample.params.beam is None else None,
            top=token.top,
        )
        for sample, token in zip(chunk.samples, drawn, strict=True)
    )
