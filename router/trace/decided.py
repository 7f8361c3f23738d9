"""Inputs and results of the decisions about a request, as JSON values: the source of `baton replay`.

Contains lengths, block ids, sampling parameters and the inputs of each placement, but no prompt and no answer: their
token ids are in token_records.py.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from baton.router.placement.policies import Strategy
from baton.router.trace.record import AttemptNote
from baton.router.types.plain import to_plain
from baton.router.types.request import PreparedRequest

if TYPE_CHECKING:
    from baton.router.trace.report import RequestReport

BLOCK_ID_BYTES = 8
"""Kept bytes of a block's hash: enough to compare the blocks of a router's newest requests."""


@dataclass(frozen=True, slots=True)
class RequestInputs:
    """Properties of a request on which admission, placement, steps and sampling depend."""

    block_tokens: int
    blocks: str  # ids of the prompt's complete blocks, of 2 * BLOCK_ID_BYTES hexadecimal digits each
    max_tokens: int
    choices: int  # number of sequences that run at the same time
    priority: int
    seed: int
    temperature: float
    top_k: int
    top_p: float
    pooled: bool
    needs_every_token: bool  # no block of the prompt may come from a cache


def inputs_of(prepared: PreparedRequest) -> RequestInputs:
    sampling = prepared.sampling
    return RequestInputs(
        block_tokens=prepared.block_tokens,
        blocks=b"".join(each[:BLOCK_ID_BYTES] for each in prepared.block_hashes).hex(),
        max_tokens=sampling.max_tokens,
        choices=sampling.places,
        priority=prepared.priority,
        seed=sampling.seed,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        pooled=prepared.pooling is not None,
        needs_every_token=bool(prepared.block_hashes) and not prepared.cacheable,
    )


def decided(report: "RequestReport") -> Mapping[str, Any]:
    """Return what decided about a completed request and what was decided; empty if it was rejected before that."""
    if report.inputs is None:
        return {}
    return {
        **asdict(report.inputs),
        "prompt_tokens": report.prompt_tokens,
        "answer_tokens": report.generated_tokens,
        "cached_tokens": report.cached_tokens,
        "outcome": report.phase,
        "ttft_ms": report.stages.ttft_ms,
        "return_ms": report.stages.return_ms,
        "placements": [_placement(note, report) for note in report.notes],
    }


def _placement(note: AttemptNote, report: "RequestReport") -> Mapping[str, Any]:
    decision, request = note.decision, to_plain(note.request)
    if note.placement.policy != Strategy.PREFIX_HASH.value:
        request.pop("prefix", None)  # hash of the prompt's beginning, on which no other policy depends
    return {
        "placed_us": report.clock.at(note.placed_s) // 1000,
        "answered_tokens": note.answered_tokens,
        "failure": "" if note.failed is None else note.failed.reason.name,
        "request": request,
        "workers": None if decision is None else to_plain(tuple(decision.workers)),
        "first_token_in_ms": None if decision is None else decision.first_token_in_ms,
        "placement": to_plain(note.placement),
    }
