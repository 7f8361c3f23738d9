"""Load of a record as calls with invented prompts: equal recorded blocks have equal tokens, all others differ. Pure."""

import random
from collections.abc import Iterator, Sequence

from baton.lab.replay.record import RecordedRequest
from baton.lab.sizing.cluster import SizingCall
from baton.lab.sizing.runner import TOKEN

WARM_GAP_S = 0.1


class InventedPrompts:
    """Prompts, one byte per token, for the requests of a record in the order of their arrival.

    A prompt that found more cached blocks than any earlier prompt has continues an earlier request: its tokens after
    that prompt are those that the simulated model answers.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, bytes] = {}
        self._answered: dict[tuple[int, ...], bytes] = {}  # prompt and answer of the last request with these blocks

    def prompt(self, request: RecordedRequest) -> bytes:
        known = self._continued(request)
        size = request.block_tokens
        for index, block in enumerate(request.blocks):
            if block not in self._blocks:
                own = random.Random(f"block {block}").randbytes(size)
                begun = known[index * size : (index + 1) * size]
                self._blocks[block] = begun + own[len(begun) :]
        tokens = b"".join(map(self._blocks.__getitem__, request.blocks))
        rest = random.Random(f"request {request.request_id}").randbytes(request.prompt_tokens - len(tokens))
        begun = known[len(tokens) : request.prompt_tokens]
        prompt = tokens + begun + rest[len(begun) :]
        self._answered[request.blocks] = prompt + bytes([TOKEN]) * request.answer_tokens
        return prompt

    def cached_before(self, request: RecordedRequest) -> int:
        """Return the number of leading blocks that the request found although no earlier prompt has all of them."""
        found = _found_blocks(request)
        known = sum(block in self._blocks for block in request.blocks[:found])
        return 0 if known == found or self._continued(request) else found

    def _continued(self, request: RecordedRequest) -> bytes:
        """Return prompt and answer of the request that this one continues; empty if it continues none."""
        found = _found_blocks(request)
        for count in range(found - 1, 0, -1):
            known = self._answered.get(request.blocks[:count])
            if known is not None and len(known) >= found * request.block_tokens:
                return known
        return b""


def _found_blocks(request: RecordedRequest) -> int:
    """Return the number of blocks that the computing worker found in its cache."""
    return min(request.cached_tokens // request.block_tokens, len(request.blocks))


def calls_of(requests: Sequence[RecordedRequest], seconds_per_token: float) -> Iterator[SizingCall]:
    """Yield the calls of a record: first, one by one, those that fill the caches as before the record, then the load.

    `seconds_per_token`: time in which a worker computes a prompt token.
    """
    invented, warm, load = InventedPrompts(), list[SizingCall](), list[SizingCall]()
    began_us, now_s = min((each.began_us for each in requests), default=0), 0.0
    for request in requests:
        blocks = invented.cached_before(request)
        prompt = invented.prompt(request)
        if blocks:
            warm.append(SizingCall(now_s, prompt[: blocks * request.block_tokens + 1], 1, f"warm-{len(warm)}"))
            now_s += WARM_GAP_S + 2.0 * blocks * request.block_tokens * seconds_per_token
        at_s = (request.began_us - began_us) / 1e6
        load.append(SizingCall(at_s, prompt, max(1, request.answer_tokens), request.request_id, request.priority))
    yield from warm
    begin_s = now_s + 1.0 if warm else 0.0
    yield from (
        SizingCall(begin_s + each.at_s, each.prompt, each.answer_tokens, each.request_id, each.priority)
        for each in load
    )
