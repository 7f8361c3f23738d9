"""Step runner and KV copier that compute nothing, and take as long in virtual time as was measured."""

import asyncio
import random
from collections.abc import Sequence

from baton.engine.request import Chunk, ChunkResult, Computed, Drawn, Plan
from baton.kvtransfer.transport import BlockPair, LinkRate, Transport
from baton.lab.simulation.host import Pace, SimulatedPullThread, SimulatedRunner
from baton.lab.simulation.model import KvNumbers
from baton.lab.simulation.network.loop import SimulatedLoop
from baton.lab.sizing.costs import Overheads, StepCosts

TOKEN = 1  # id of every generated token: the content of answers does not matter
TOKEN_BYTES = 8  # simulated KV of one token


class CostRunner(SimulatedRunner):
    """Step runner that takes as long as the curves say. It writes no KV, since nothing reads it."""

    def __init__(self, loop: SimulatedLoop, draw: random.Random, numbers: KvNumbers, costs: StepCosts, step_s: float):
        super().__init__(loop, draw, numbers, Pace(0.0, 0.0, 0.0))
        self._costs = costs
        self._step_s = step_s

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]:
        self._loop.ahead_s = (self._step_s + self._costs.seconds(plan)) * self.slowness
        return tuple([_drawn(chunk) for chunk in plan.chunks])


def _drawn(chunk: Chunk) -> ChunkResult:
    return Computed(tuple([Drawn(TOKEN, 0.0, ()) for _ in chunk.samples]))


class TimedPullThread(SimulatedPullThread):
    """Copier whose copies take as long as on the measured link."""

    def __init__(self, draw: random.Random, overheads: Overheads, block_tokens: int) -> None:
        super().__init__(draw, overheads.copy_s)
        self._overheads = overheads
        self._block_tokens = block_tokens

    async def _copy(self, transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> LinkRate:
        overheads = self._overheads
        tokens = len(pairs) * self._block_tokens
        seconds = overheads.copy_s + tokens * overheads.kv_bytes_per_token / overheads.kv_bytes_per_s
        await asyncio.sleep(seconds)
        return LinkRate(transport.copy(transfer_id, pairs), seconds)

    async def measure(self, transport: Transport, nbytes: int) -> LinkRate:
        """Return the rate at which copying a simulated token's small KV takes as long as copying a real token's KV."""
        overheads = self._overheads
        return LinkRate(nbytes, nbytes / TOKEN_BYTES * overheads.kv_bytes_per_token / overheads.kv_bytes_per_s)
