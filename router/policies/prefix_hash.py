"""Prompts that begin alike go to the same worker: rendezvous hashing of an early block, without any view of caches.

The hash covers the first PREFIX_TOKENS, so that prompts that share only a short instruction go to different workers. It
knows no load, so that a popular prefix makes a busy worker. Prompts of less than a block, and decode workers, are
chosen by tokens in flight.
"""

from collections.abc import Sequence

from router.candidates import PlacementRequest, WorkerView
from router.policies.least_tokens import LeastTokens
from router.policies.policy import Costs, Policy
from router.policies.rendezvous import home_of

PREFIX_TOKENS = 1024


def early_block(block_hashes: Sequence[bytes], block_tokens: int) -> bytes:
    """The hash that stands for a prompt's beginning: of the last block that ends within PREFIX_TOKENS, if any."""
    last = min(max(PREFIX_TOKENS // block_tokens, 1), len(block_hashes))
    return block_hashes[last - 1] if last else b""


class PrefixHash(Policy):
    def __init__(self) -> None:
        self._otherwise = LeastTokens()

    def prefill_costs(self, request: PlacementRequest, workers: Sequence[WorkerView]) -> Costs:
        if not request.prefix:
            return self._otherwise.prefill_costs(request, workers)
        home = home_of(request.prefix, workers)
        away = [int(worker is not home) for worker in workers]
        return Costs(away, {"homes_away": away})

    def decode_costs(
        self, request: PlacementRequest, workers: Sequence[WorkerView], prefill: WorkerView | None
    ) -> Costs:
        chosen_by = self if prefill is None else self._otherwise
        return chosen_by.prefill_costs(request, workers)
