"""The load that a prefill worker reports."""

from collections.abc import Iterable, Sequence

from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.runner.sharing import DeviceShare
from baton.engine.scheduler.prefill import PrefillScheduler
from baton.worker.prefill.loop import PrefillLoop
from tests.engine.test_prefill_scheduler import BLOCK, prompt, step
from tests.fixtures.held_runner import HeldRunner


class CountingPool(BlockPool):
    walks = 0

    def held_only_by(self, owners: Iterable[Sequence[int]]) -> int:
        self.walks += 1
        return super().held_only_by(owners)


async def test_pinned_blocks_are_looked_at_once_for_each_step() -> None:
    pool = CountingPool(8)
    scheduler = PrefillScheduler(pool, BLOCK, chunk_tokens=8)
    scheduler.add(prompt(1, 6))
    step(scheduler)
    scheduler.add(prompt(2, 3))
    step(scheduler)
    loop = PrefillLoop(HeldRunner(), scheduler, lambda *_: None, lambda _: None, lambda: None, DeviceShare(8, 1.5))
    pool.walks = 0
    load = loop._observe()
    assert pool.walks == 1
    assert (load.held_by_sequences, load.held_by_transfers, load.pages.held) == (0, 3, 3)
