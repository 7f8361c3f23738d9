"""KV that a worker already has for a prompt: cached blocks, checked before use, and blocks in its KV tier."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.worker.at_rest.checker import RestChecker
from baton.worker.at_rest.sums import RestCounters
from baton.worker.tier.restorer import Restored, TierRestorer
from baton.worker.tier.tier import KvTier
from baton.worker.times import RequestTimes, RestoreTime


@dataclass(frozen=True, slots=True)
class LocalKv:
    """Checks and loads of KV for prompts that are not queued yet. Lives on the event loop."""

    groups: BlockGroups = ONE_GROUP
    tier: KvTier | None = None  # None: no KV tier
    at_rest: RestChecker | None = None  # None: no checks of cached blocks

    def to_check(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return a random sample of a prompt's cached blocks, which must be checked before the prompt uses them.

        Call it once per prompt.
        """
        return [] if self.at_rest is None else self.at_rest.drawn(hashes)

    async def check(self, names: Sequence[bytes]) -> None:
        """Compare blocks with their known checksums; remove corrupt ones from the cache."""
        if self.at_rest is not None and names:
            await self.at_rest.check(names)

    async def check_drawn(self, hashes: Sequence[bytes]) -> None:
        """Draw cached blocks of `hashes` at random and check them; remove corrupt ones from the cache."""
        await self.check(self.to_check(hashes))

    @property
    def rest_counters(self) -> RestCounters:
        return RestCounters() if self.at_rest is None else self.at_rest.counters

    def restorer_of(self, hashes: Sequence[bytes]) -> TierRestorer | None:
        """Return the restorer if the KV tier has blocks of a prompt that the pool lacks, else None. Call it once per
        prompt.
        """
        if self.tier is None or not hashes or not self.tier.restorer.has_more(hashes):
            return None
        return self.tier.restorer

    async def restore(self, times: RequestTimes, restorer: TierRestorer, hashes: Sequence[bytes]) -> Restored:
        """Load a prompt's blocks from the KV tier and record the time in `times`."""
        began_s = time.monotonic()
        restored = await restorer.restore(hashes)
        if restored.tokens:
            times.restore = RestoreTime(began_s, time.monotonic(), restored.tokens, restored.bytes)
        return restored

    async def prepare_for_reader(self, names: Sequence[bytes], restore: bool) -> None:
        """Prepare blocks for a fetch by another worker: load missing blocks if `restore`, then check a random sample.

        Missing blocks are loaded from the KV tier. Takes a bounded time, even if it must wait for other loads.
        """
        if restore:
            hashes = self.groups.chain_of(names)
            restorer = self.restorer_of(hashes)
            if restorer is not None:
                await restorer.restore(hashes)
        await self.check_drawn(names)
