"""Loaded draft model, with its own weights and pool on the target model's device."""

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from baton.engine.drafting.model_drafter import ModelDrafter
from baton.engine.on_device import made_on, mib
from baton.engine.prepare import ModelOptions, PreparedModel
from baton.engine.runner.runner import Runner
from baton.engine.weights.formats import MADE_WHILE_LOADING, WeightFormat, stored_format


@dataclass(frozen=True, slots=True)
class DraftModel:
    """Draft model in memory. It outlives its drafter, for example when the worker changes its role."""

    prepared: PreparedModel
    runner: Runner

    def drafter(self) -> ModelDrafter:
        """Return a drafter with an empty pool. The previous drafter must not be used any more."""
        prepared = self.prepared
        positions = prepared.config.max_positions
        layout = prepared.layout
        return ModelDrafter(
            self.runner.run, prepared.total_blocks, layout.block_tokens, positions, groups=layout.groups
        )

    def warm_up(self, drafter: ModelDrafter) -> None:
        """Warm up the draft model, on the thread that will use the drafter and before the drafter's first answer."""
        self.runner.warm_up()
        drafter.measure()


def draft_options(target: ModelOptions, folder: Path, kv_memory_bytes: int) -> ModelOptions:
    """Return `target` with a draft model in `folder`, of the same dtype; plain weights are quantised like the target's.

    Raises: ModelError.
    """
    made = target.quantize in MADE_WHILE_LOADING and stored_format(folder) is WeightFormat.PLAIN
    draft = replace(
        target,
        folder=folder,
        kv_memory_bytes=kv_memory_bytes,
        max_model_len=None,
        kv_cache_dtype="auto",
        quantize=target.quantize if made else WeightFormat.PLAIN,
    )
    return replace(target, draft=draft)


def load_draft_model(prepared: PreparedModel, decode_rows: int) -> DraftModel | None:
    """Load the draft model of `prepared`, if it has one. `decode_rows`: see PreparedModel.load.

    Raises: ModelError.
    """
    draft = prepared.draft
    if draft is None:
        return None
    device = draft.options.device
    with made_on(device, f"the draft model's KV pool of {mib(draft.storage_bytes)}"):
        storage = torch.zeros(draft.storage_bytes, dtype=torch.uint8, device=device)
    return DraftModel(draft, draft.load(storage, progress=False, decode_rows=decode_rows))
