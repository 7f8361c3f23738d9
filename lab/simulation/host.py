"""Substitutes for a worker's checkpoint, memory, threads and copies."""

import asyncio
import hashlib
import random
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import grpc
import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.engine.config.model_config import ModelConfig
from baton.engine.kv_cache.block_pool import BlockPool
from baton.engine.kv_cache.layout import KvLayout
from baton.engine.prepare import ModelOptions, PreparedModel
from baton.engine.request import Chunk, ChunkResult, Computed, Drawn, NonFinite, Plan, Sample, TokenLogprob
from baton.engine.runner.core_use import CoreUse
from baton.engine.runner.launched import Launched, launched_with
from baton.engine.runner.runner import Runner
from baton.engine.runner.step_records import StepTiming
from baton.engine.runner.thread import EngineThread, Steps
from baton.engine.runner.thread_meter import ThreadTimes
from baton.engine.weights.formats import WeightFormat
from baton.kvtransfer.checksum import BlockChecksum, Checksums
from baton.kvtransfer.description import POOL_ID_BYTES, PoolDescription, SharedMemoryHandle
from baton.kvtransfer.shared_memory import PeerMemory
from baton.kvtransfer.transport import BlockPair, ChecksumDiffers, CopyBroken, LinkRate, PeerUnreachable, Transport
from baton.lab.simulation.model import (
    CONTEXT_TOKENS,
    END_TOKEN,
    VOCABULARY,
    KvNumbers,
    ModelDraw,
    add,
    attend,
    kv_number,
    next_token,
    of_group,
)
from baton.lab.simulation.network.loop import PlannedCall, SimulatedLoop
from baton.process.serving.grpc_options import INTERNAL_CHANNEL_OPTIONS
from baton.process.serving.watchdog import Watchdog
from baton.process.telemetry.loop_lag import Delay
from baton.protos import kv_transfer_pb2, kv_transfer_pb2_grpc
from baton.router.model.defaults import GenerationDefaults
from baton.router.model.form_checker import FormChecker
from baton.router.model.form_process import Setup
from baton.router.model.served_model import ServedModel, ServedModelSettings, TokenizerWorker
from baton.router.types.worker import WorkerDescription
from baton.text.block_groups import ONE_GROUP, BlockGroups
from baton.text.detokenizer import Detokenizer
from baton.worker.at_rest.checker import RestChecker
from baton.worker.host import EngineHost, LoadedModel
from baton.worker.tier.tier import KvTier
from baton.worker.tier.writer import IGNORE_SUMS, SumListener
from baton.worker.transfer.peers import READ_TIMEOUT_S
from baton.worker.transfer.pool import PoolMemory

CHECKPOINT = b"simulated model, 32 bytes of it."
FINGERPRINT = hashlib.sha256(CHECKPOINT).digest()
FOLDER = Path("/nowhere/simulated")


@cache
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    return made


def text_of(token_ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(token_ids), skip_special_tokens=True))


@cache
def _reader() -> TokenizerWorker:
    """Return the tokenizer worker with which clients decode text."""
    return TokenizerWorker(tokenizer(), None)


def detokenizer() -> Detokenizer:
    return _reader().detokenizer()


def served_model(description: WorkerDescription, source: ServedModelSettings) -> ServedModel:
    """Create the served model without reading files; replaces `load_served_model`.

    Each model has its own tokenizer worker: a killed process would keep a shared one busy forever.
    """
    model = description.model
    defaults = GenerationDefaults(eos_token_ids=frozenset({END_TOKEN}))
    return ServedModel(
        name=model.name,
        fingerprint=description.fingerprint,
        max_model_len=model.max_model_len,
        vocab_size=model.vocab_size,
        dtype=model.dtype,
        block_tokens=model.block_tokens,
        groups=model.groups,
        tokenizer=TokenizerWorker(tokenizer(), None),
        defaults=defaults,
        forms=FormChecker(Setup(str(FOLDER.resolve()), model.vocab_size, tuple(sorted(defaults.eos_token_ids)))),
    )


POISON = 0xDEAD
FLIPPED = 0.3  # share of cached blocks in which `flip_cached` flips a bit


@dataclass(frozen=True, slots=True)
class Pace:
    """Parameters of the simulated duration of a step."""

    fixed_s: float
    token_s: float
    jitter: float  # maximum random extension, as a share of the duration


@dataclass(slots=True)
class Poison:
    """Counters of poisoned steps, whose results are NaN. A fault increases `steps`."""

    steps: int = 0  # steps still to be poisoned
    done: int = 0


class SimulatedRunner:
    """`StepRunner` of the simulated model. `numbers`: KV of the pool, `[block][token]`."""

    launches_ahead = False
    other_ranks = None
    replays_steps = False

    def __init__(
        self,
        loop: SimulatedLoop,
        draw: random.Random,
        numbers: KvNumbers,
        pace: Pace,
        groups: BlockGroups = ONE_GROUP,
    ) -> None:
        self._loop = loop
        self._groups = groups
        self._draw = draw
        self._numbers = numbers
        self._block_tokens = numbers.shape[1]
        self._pace = pace
        self._swapped: dict[int, KvNumbers] = {}
        self.poison = Poison()
        self.slowness = 1.0

    def warm_up(self) -> None:
        """Do nothing: simulated steps need no warm-up."""

    def close(self) -> None:
        """Do nothing: no resources are held."""

    def run(self, plan: Plan) -> tuple[ChunkResult, ...]:
        self._move(plan)
        written: dict[tuple[int, int], int] = {}
        results = tuple([self._compute(chunk, written) for chunk in plan.chunks])
        pace = self._pace
        step_s = (pace.fixed_s + pace.token_s * plan.tokens) * (1.0 + pace.jitter * self._draw.random())
        self._loop.ahead_s = step_s * self.slowness
        self._loop.call_at(self._loop.time(), self._write, written)
        return results

    def launch(self, plan: Plan, after: Launched | None = None) -> Launched:
        return launched_with(self.run(plan))

    def _move(self, plan: Plan) -> None:
        numbers = self._numbers
        for swap in plan.swaps_out:
            self._swapped[swap.host_slot] = numbers[swap.block].copy()
        for swap in plan.swaps_in:
            numbers[swap.block] = self._swapped[swap.host_slot]
        for copy in plan.copies:
            numbers[copy.destination] = numbers[copy.source]

    def _compute(self, chunk: Chunk, written: dict[tuple[int, int], int]) -> ChunkResult:
        """Compute one chunk. `written`: KV that this step has computed so far, by block and position in the block."""
        poisoned = self.poison.steps > 0
        self.poison.steps -= poisoned
        self.poison.done += poisoned
        attended = self._attended(chunk, written)
        for position, token_id in enumerate(chunk.token_ids, start=chunk.start):
            number = POISON if poisoned else kv_number(attended, token_id, position)
            attended = add(attended, number, position)
            for group in range(self._groups.count):
                written[self._place(chunk, position, group)] = of_group(number, group)
        drawn = tuple([_drawn(attended, chunk.end, sample) for sample in chunk.samples])
        return NonFinite() if poisoned else Computed(drawn)

    def _attended(self, chunk: Chunk, written: Mapping[tuple[int, int], int]) -> int:
        """Return the hash of all KV before the chunk, read from the chunk's blocks or, for drafts, from `written`."""
        if chunk.start == 0:
            return 0
        numbers = self._read(chunk, written, group=0)
        attended, groups = attend(numbers), self._groups
        first_seen = max(0, chunk.start + 1 - groups.window_tokens)
        for group in range(1, groups.count):
            seen = slice(0 if group < groups.whole else first_seen, None)
            if not np.array_equal(self._read(chunk, written, group)[seen] ^ np.uint64(group << 1), numbers[seen]):
                return attended ^ POISON  # another group's KV differs: the answer must become wrong
        return attended

    def _read(self, chunk: Chunk, written: Mapping[tuple[int, int], int], group: int) -> KvNumbers:
        """Return the KV of the tokens before the chunk, as stored in the blocks of one group."""
        table = chunk.block_table[group :: self._groups.count]
        blocks = np.array(table[: -(-chunk.start // self._block_tokens)])
        numbers: KvNumbers = self._numbers[blocks].reshape(-1)[: chunk.start]
        position = chunk.start - 1
        while position >= 0 and (number := written.get(self._place(chunk, position, group))) is not None:
            numbers[position] = number
            position -= 1
        return numbers

    def _place(self, chunk: Chunk, position: int, group: int) -> tuple[int, int]:
        column = position // self._block_tokens
        return chunk.block_table[column * self._groups.count + group], position % self._block_tokens

    def _write(self, written: Mapping[tuple[int, int], int]) -> None:
        for place, number in written.items():
            self._numbers[place] = number


def _drawn(attended: int, position: int, sample: Sample) -> Drawn:
    params = sample.params
    history = sample.history[:position] if params.needs_history else None
    prompt_tokens = sample.prompt_tokens if params.needs_history else 0
    draw = ModelDraw(params.temperature, params.seed, sample.choice, history, prompt_tokens)
    token_id, logprob = next_token(attended, position, draw)
    return Drawn(token_id, logprob, (TokenLogprob(token_id, logprob),) * min(1, params.logprobs))


class SimulatedPullThread:
    """Replacement of PullThread: one copy at a time. The caller of a cancelled copy waits until the copy has ended."""

    def __init__(self, draw: random.Random, block_s: float, numbers: KvNumbers | None = None) -> None:
        """Create the replacement. `numbers`: destination pool, in which bits may flip."""
        self._draw = draw
        self._block_s = block_s
        self._numbers = numbers
        self._turn = asyncio.Lock()
        self.flips = 0  # bit flips still to be done, one per copied block; increased by a fault
        self.flipped = 0

    async def copy(self, transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> LinkRate:
        async with self._turn:
            copying = asyncio.ensure_future(self._copy(transport, transfer_id, pairs))
            try:
                return await asyncio.shield(copying)
            except asyncio.CancelledError:
                while not copying.done():
                    await _outlast(copying)
                if not copying.cancelled():
                    copying.exception()  # marks the exception as retrieved: no caller awaits it
                raise

    async def check(self, checksums: Checksums, wanted: Sequence[BlockChecksum]) -> None:
        await asyncio.sleep(self._block_s)
        for block, value in wanted:
            if checksums.of(block) != value:
                raise ChecksumDiffers(f"the checksum of block {block} differs from its source's")

    async def measure(self, transport: Transport, nbytes: int) -> LinkRate:
        await asyncio.sleep(self._block_s)
        return LinkRate(nbytes, 0.001)

    def close(self) -> None:
        """Do nothing: there is no thread."""

    async def _copy(self, transport: Transport, transfer_id: bytes, pairs: Sequence[BlockPair]) -> LinkRate:
        copied, seconds = 0, 0.0
        for pair in pairs:
            block_s = self._block_s * (0.5 + self._draw.random())
            await asyncio.sleep(block_s)
            link = getattr(transport, "_link", None)
            if isinstance(link, SimulatedLink):
                await link.fetch(transfer_id, pair.logical)
            copied += transport.copy(transfer_id, [pair])
            if self.flips and self._numbers is not None:
                self.flips -= 1
                self.flipped += 1
                self._numbers[pair.destination, 0] ^= np.uint64(1 << self._draw.randrange(64))
            seconds += block_s
        return LinkRate(copied, seconds)


async def _outlast(copying: "asyncio.Future[LinkRate]") -> None:
    try:
        await asyncio.wait([copying])
    except asyncio.CancelledError:
        return


class SharedMemories:
    """Pools that other workers can map, by inode. As with a memfd, a mapping outlives the pool's owner."""

    def __init__(self) -> None:
        self._pools: dict[int, KvNumbers] = {}

    def add(self, numbers: KvNumbers, size_bytes: int) -> SharedMemoryHandle:
        inode = len(self._pools) + 1
        self._pools[inode] = numbers
        return SharedMemoryHandle(pid=inode, fd=0, inode=inode, size_bytes=size_bytes)

    def open(self, handle: SharedMemoryHandle, pool_id: bytes) -> PeerMemory:
        """Open a peer's memory; replaces `open_peer`."""
        if handle.inode not in self._pools:
            raise PeerUnreachable("the peer's memory does not exist")
        return PeerMemory(self._pools[handle.inode].view("uint8").reshape(-1))


class SimulatedLink:
    """Replacement of the blocking channel to a peer. `fetch` runs before `read`, so that `read` never waits."""

    def __init__(self, endpoint: str, tls: object = None, secret: object = None) -> None:
        self._channel = grpc.aio.insecure_channel(endpoint, INTERNAL_CHANNEL_OPTIONS)
        self.stub = kv_transfer_pb2_grpc.KvTransferServiceStub(self._channel)
        self._fetched: list[bytes] = []

    async def fetch(self, transfer_id: bytes, logical: int) -> None:
        """Fetch block `logical` of a transfer, so that `read` can return it. Raises: CopyBroken."""
        asked = kv_transfer_pb2.TransferRange(transfer_id=transfer_id, first_block=logical, num_blocks=1)
        request = kv_transfer_pb2.ReadRequest(range=asked)
        try:
            pieces = self.stub.Read(request, timeout=READ_TIMEOUT_S)
            self._fetched = [piece.data async for piece in pieces]
        except grpc.aio.AioRpcError as error:
            raise CopyBroken(f"reading failed: {error.code().name}") from error

    def read(self, transfer_id: bytes, first_block: int, num_blocks: int) -> Sequence[bytes]:
        """Return the data that was fetched last; implements `BlockLink`."""
        return self._fetched

    def close(self) -> None:
        """Do nothing: timeouts bound running calls."""


class SimulatedLag:
    """Lag meter that always reports no lag: sampling virtual time would be expensive."""

    def __init__(self, *sources: object) -> None:
        """Create a meter that measures nothing."""

    def start(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def between(self, began_s: float, ended_s: float) -> Delay:
        return Delay(0.0, 0.0)


class SimulatedQueue:
    """Run-queue meter that always reports that threads do not wait for a core."""

    def share(self) -> float:
        return 0.0

    def close(self) -> None:
        """Do nothing: there are no files."""


class SimulatedMeter:
    """Thread meter that attributes the complete time of a step to computing."""

    def __init__(self, beside: int | None = None) -> None:
        """Create a meter. `beside`, the id of another thread, is ignored."""

    def read(self) -> ThreadTimes:
        return ThreadTimes(time.monotonic(), 0.0, 0.0, 0.0, 0.0)

    def close(self) -> None:
        """Do nothing."""


class SimulatedEngineThread(EngineThread[Any, Any]):
    """Engine thread that runs as callbacks of the event loop instead of in a thread.

    A step computes immediately, and the engine's clock moves ahead of the loop's clock by the step's duration. Other
    code sees the step's posts, writes and reports only when the loop's clock reaches that time.
    """

    def __init__(
        self,
        engine: Steps[Any],
        on_step: Callable[[Sequence[Any], StepTiming], None],
        on_fault: Callable[[BaseException], None],
        observe: Callable[[], Any],
        prepare: Callable[[], None] = lambda: None,
        cores: CoreUse | None = None,
        spare_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        super().__init__(engine, on_step, on_fault, observe, prepare, cores, spare_s)
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimulatedLoop):
            raise TypeError("a simulated thread needs a simulated loop")
        self._loop = loop
        self._sleeps = True

    def start(self) -> None:
        self._prepare()
        self._sleeps = False
        self._loop.call_soon(self._turn)

    def stop(self, timeout_s: float) -> bool:
        """Stop the engine. If a step is in progress, its outcome is never delivered."""
        self._stopped = True
        self._refuse_calls()
        return True

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        future = super().call(function, *arguments)
        self._wake()
        return future

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        super().post(function, *arguments)
        self._wake()

    def _wake(self) -> None:
        if self._sleeps and not self._stopped:
            self._sleeps = False
            self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        """Run posted calls, then a step; schedule the next turn for the end of the step."""
        if self._stopped:
            return
        try:
            self._carry_out_calls(0.0)
            computes = self._step()
            self.observed = self._observe()
        except Exception as fault:  # noqa: BLE001 -- reported like the real thread does
            self._on_fault(fault)
            self._stopped = True
            return
        finally:
            step_s, self._loop.ahead_s = self._loop.ahead_s, 0.0
        self._sleeps = not computes
        if computes:
            self._loop.call_later(step_s, self._turn)


class SimulatedWatchdog(Watchdog):
    """Watchdog that runs as callbacks of its process instead of in a thread. Callbacks wait while the process hangs."""

    def __init__(self, bound_s: float, end_process: Callable[[str, float], None]) -> None:
        loop = asyncio.get_running_loop()
        if not isinstance(loop, SimulatedLoop):
            raise TypeError("a simulated watchdog needs a simulated loop")
        super().__init__(bound_s, end_process, loop.time)
        self._loop = loop
        self._next: PlannedCall | None = None

    def start(self) -> None:
        self._next = self._loop.call_later(self._period_s, self._look_again)

    def close(self) -> None:
        if self._next is not None:
            self._next.cancel()

    def _look_again(self) -> None:
        self.look()
        self.start()


@dataclass(frozen=True, slots=True)
class _Config:
    vocab_size: int = VOCABULARY
    eos_token_ids: tuple[int, ...] = (END_TOKEN,)
    makes_answers: bool = True


def prepared_model(
    total_blocks: int, block_tokens: int, context_tokens: int = CONTEXT_TOKENS, groups: BlockGroups = ONE_GROUP
) -> PreparedModel:
    """Create a model whose KV has one head of one number: in each group, a token's key and value have 8 bytes."""
    layout = KvLayout(1, 1, block_tokens, 1, torch.float32, groups=groups)
    options = ModelOptions(
        FOLDER, torch.device("cpu"), "float32", block_tokens, total_blocks * layout.block_bytes, context_tokens
    )
    return PreparedModel(
        options,
        cast(ModelConfig, _Config()),
        torch.float32,
        layout,
        total_blocks,
        context_tokens,
        WeightFormat.PLAIN,
        weight_bytes=0,
        looked_up_bytes=0,
        checkpoint=CHECKPOINT,
        kv_description="",
    )


class SimulatedHost:
    """Replacement of an EngineHost. It belongs to one simulated process and ends with it."""

    def __init__(
        self,
        prepared: PreparedModel,
        memories: SharedMemories,
        make_runner: Callable[[KvNumbers], SimulatedRunner],
        make_tier: Callable[[PoolMemory, SumListener], KvTier | None] = lambda memory, on_sums: None,
        kv_check_share: float = 0.0,
        draw: random.Random | None = None,
    ) -> None:
        """Create a host. `kv_check_share`: share of cached blocks whose checksums are checked; `draw` chooses them."""
        self.prepared = prepared
        self.blocks = BlockPool(prepared.total_blocks, prepared.layout.groups)
        self.used = False
        self.grammars = self.adapter_table = None
        storage = torch.zeros(prepared.pool_bytes, dtype=torch.uint8)
        self.numbers: KvNumbers = storage.numpy().view(np.uint64).reshape(prepared.total_blocks, -1)
        self.runner = make_runner(self.numbers)
        description = PoolDescription(
            prepared.fingerprint,
            prepared.layout.block_bytes,
            prepared.total_blocks,
            "simulated host",
            secrets.token_bytes(POOL_ID_BYTES),
            memories.add(self.numbers, prepared.pool_bytes),
            rows=2,
        )
        self.memory = PoolMemory(storage, description, None, None, None, ())
        sums = Checksums(storage, description.shape)
        self.at_rest = RestChecker(sums, kv_check_share, draws=draw) if kv_check_share else None
        self.tier = make_tier(self.memory, IGNORE_SUMS if self.at_rest is None else self.at_rest.take_sums)
        self.flipped = 0  # number of bits flipped in cached blocks

    async def load(self, on_fault: Callable[[BaseException], None]) -> LoadedModel:
        if self.tier is not None:
            self.tier.start()
            await self.tier.opened()
        return LoadedModel(cast(Runner, self.runner), adapters=None, draft=None)

    pass_on = EngineHost.pass_on

    async def close(self) -> None:
        if self.tier is not None:
            await self.tier.close()
        if self.at_rest is not None:
            self.at_rest.close()

    def flip_cached(self, draw: random.Random) -> None:
        """Flip a bit in some cached blocks whose checksum is known; do nothing while any block is held or watched."""
        if self.at_rest is None or self.blocks.counts.held or self.blocks._watches:
            return
        for block, published in self.blocks._published.items():
            if published.block_hash in self.at_rest._known and draw.random() < FLIPPED:
                self.numbers[block, draw.randrange(self.numbers.shape[1])] ^= np.uint64(1 << draw.randrange(64))
                self.flipped += 1

    def as_host(self) -> EngineHost:
        """Return this object as an EngineHost, for callers that need the real type."""
        return cast(EngineHost, cast(Any, self))
