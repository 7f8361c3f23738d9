"""The placement request of a request, or of the part of one that an attempt makes. Pure."""

from router.pairs import Pair
from router.placement import PlacementRequest
from router.policies.prefix_hash import early_block
from router.request import PreparedRequest


def placement_request(
    request: PreparedRequest,
    attempt_id: int,
    avoided_prefill: frozenset[str] = frozenset(),
    apart: frozenset[Pair] = frozenset(),
    preferred_decode: str | None = None,
) -> PlacementRequest:
    return PlacementRequest(
        fingerprint=request.fingerprint,
        block_tokens=request.block_tokens,
        prompt_tokens=len(request.token_ids),
        max_tokens=request.sampling.max_tokens - request.answered_tokens,
        choices=request.sampling.places,
        turn=attempt_id,
        avoided_prefill=avoided_prefill,
        apart=apart,
        preferred_decode=preferred_decode,
        adapter=request.adapter,
        prefix=early_block(request.block_hashes, request.block_tokens),
        session=request.valid.session or None,
    )
