"""The canary: one short greedy request all the way, under a cache salt of its own.

The way is prefill, transfer and decode, or a decode worker that computes the prompt itself.
"""

import itertools
import secrets
import time

from router.answer import Delta
from router.generation import Generation
from router.placement import Placement
from router.request import Operation, TokenPrompt, ValidRequest
from router.scheduling import Scheduling
from router.served_model import ServedModel
from router.timeline import Timeline

_TOKENS = 2  # the second one is decode's own


class CanaryFailed(Exception):
    """The path does not work, though its workers are there."""


async def sing(served: ServedModel, scheduling: Scheduling, time_left_s: float) -> Placement:
    """Returns which way, once the request went all of it. Raises: CanaryFailed, BatonError."""
    # One complete block and one token: KV of a whole block travels.
    prompt_tokens = max(1, min(served.block_tokens + 1, served.max_model_len - _TOKENS))
    token_ids = tuple(itertools.islice(itertools.cycle(range(served.vocab_size)), prompt_tokens))
    valid = ValidRequest(
        operation=Operation.GENERATE,
        prompt=TokenPrompt(token_ids),
        request_id="canary",
        max_tokens=_TOKENS,
        temperature=0.0,
        top_k=0,
        top_p=1.0,
        min_p=0.0,
        seed=0,
        stop=(),
        stop_token_ids=(),
        n=1,
        cache_salt=f"canary-{secrets.token_hex(8)}",
    )
    now = time.monotonic()
    timeline = Timeline(arrived_s=now)
    generation = Generation(
        await served.prepare(valid),
        scheduling,
        timeline,
        served.tokenizer.detokenizer,
        deadline_s=now + time_left_s,
        is_usual=False,  # it is short, and may warm a worker up
    )
    tokens = 0
    async for event in generation.events():
        tokens += len(event.token_ids) if isinstance(event, Delta) else 0
    if tokens != _TOKENS:
        raise CanaryFailed(f"{tokens} tokens came back, not {_TOKENS}")
    placement = timeline.placement
    if placement is None:
        raise RuntimeError("a request that was answered was placed")
    if placement.prefill is not None and timeline.landed is None:
        raise CanaryFailed("the decode worker did not report the transfer")
    return placement
