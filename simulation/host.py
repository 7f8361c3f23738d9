"""A simulated worker's substitute for a checkpoint and memory: a pool of numbers, and the runner over it."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch

from engine.kv_layout import KvLayout
from engine.model_config import ModelConfig
from engine.pages import BlockPool
from engine.prepare import ModelOptions, PreparedModel
from engine.quantization.formats import WeightFormat
from engine.runner import Runner
from kvtransfer.description import POOL_ID_BYTES, PoolDescription
from simulation.copying import SharedMemories
from simulation.model import CONTEXT_TOKENS, END_TOKEN, VOCABULARY, KvNumbers
from simulation.runner import SimulatedRunner
from worker.host import EngineHost
from worker.pool import PoolMemory

FINGERPRINT = b"simulated model, 32 bytes of it."
FOLDER = Path("/nowhere/simulated")


@dataclass(frozen=True, slots=True)
class _Config:
    vocab_size: int = VOCABULARY
    eos_token_ids: tuple[int, ...] = (END_TOKEN,)


def prepared_model(total_blocks: int, block_tokens: int) -> PreparedModel:
    """A layout of one head of one number, so that a token's keys and values are 8 bytes together."""
    layout = KvLayout(1, 1, block_tokens, 1, torch.float32)
    options = ModelOptions(
        FOLDER, torch.device("cpu"), "float32", block_tokens, total_blocks * layout.block_bytes, CONTEXT_TOKENS
    )
    return PreparedModel(
        options,
        cast(ModelConfig, _Config()),
        torch.float32,
        layout,
        total_blocks,
        CONTEXT_TOKENS,
        WeightFormat.PLAIN,
        weight_bytes=0,
        looked_up_bytes=0,
        fingerprint=FINGERPRINT,
    )


class SimulatedHost:
    """In place of an EngineHost: of one process, gone with it."""

    def __init__(
        self,
        prepared: PreparedModel,
        memories: SharedMemories,
        make_runner: Callable[[KvNumbers], SimulatedRunner],
    ) -> None:
        self.prepared = prepared
        self.blocks = BlockPool(prepared.total_blocks)
        self.used = False
        self.grammars = None
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

    async def load(self, on_fault: Callable[[BaseException], None]) -> Runner:
        return cast(Runner, self.runner)

    async def close(self) -> None:
        """Nothing is open."""

    def as_host(self) -> EngineHost:
        """For callers that need the real type."""
        return cast(EngineHost, cast(Any, self))
