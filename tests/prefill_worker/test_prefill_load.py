"""The load that a prefill worker reports."""

from collections.abc import Iterable, Sequence

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.runner.loop import EngineLoad
from tests.engine.test_prefill_scheduler import BLOCK, prompt, step
from tests.fixtures.prefill import prefill_scheduler


class CountingPool(BlockPool):
    walks = 0

    def held_only_by(self, owners: Iterable[Sequence[int]]) -> int:
        self.walks += 1
        return super().held_only_by(owners)


def test_pinned_blocks_are_counted_once_per_step() -> None:
    pool = CountingPool(8)
    scheduler = prefill_scheduler(pool, BLOCK, chunk_tokens=8)
    scheduler.add(prompt(1, 6))
    step(scheduler)
    scheduler.add(prompt(2, 3))
    step(scheduler)
    pool.walks = 0
    load = EngineLoad.of(scheduler)
    assert pool.walks == 1
    assert (load.held_by_sequences, load.held_by_transfers, load.pages.held) == (0, 3, 3)
