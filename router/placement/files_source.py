"""Decision whether a prefill worker fetches blocks from files in a directory that it cannot read. Pure.

Another worker, which can read the directory, loads the blocks into its pool, and the prefill worker fetches them.
"""

from collections.abc import Sequence
from typing import NamedTuple

from baton.router.placement.rates import known_tokens, load_costs
from baton.router.types.placement import PlacementRequest, WorkerView


class FetchSource(NamedTuple):
    """Worker from which a prefill worker may fetch the first `blocks` of a prompt."""

    worker: WorkerView
    blocks: int
    loaded_blocks: int = 0  # number of the last blocks that the worker must first load from files
    load_bytes_per_s: float = 0.0


def files_source(
    request: PlacementRequest, suited: Sequence[WorkerView], prefill: WorkerView, more_than_blocks: int
) -> FetchSource | None:
    """Return the worker with the longest prefix including files, if loading and fetching are faster than computing.

    Workers whose hits include blocks of a prompt in flight are skipped, because those blocks may not be in files.
    """
    best, reusable = None, request.reusable_blocks
    had_blocks = known_tokens(request, prefill) // request.block_tokens
    for worker in suited:
        if worker is not prefill and worker.tier_blocks and worker.ready_blocks >= worker.hit_blocks:
            blocks = min(worker.hit_blocks + worker.tier_blocks, reusable)
            if blocks > max(had_blocks, more_than_blocks, best.blocks if best else 0, worker.hit_blocks):
                best = FetchSource(worker, blocks, blocks - worker.hit_blocks)
    if best is None:
        return None
    source, rates = best.worker, prefill.rates
    costs = load_costs(request, source, rates.prefill_tokens_per_s)
    load_s, compute_s = costs.load_s(best.loaded_blocks), costs.compute_s(best.blocks - had_blocks)
    fetched_bytes = (best.blocks - min(prefill.hit_blocks, reusable)) * costs.block_bytes
    link_s = fetched_bytes / (1e9 * rates.links_gb_per_s.get(source.endpoint, rates.link_gb_per_s))
    if load_s is None or compute_s is None or load_s + link_s >= compute_s:
        return None
    return best._replace(load_bytes_per_s=costs.load_bytes_per_s or 0.0)
