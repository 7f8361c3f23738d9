"""Memory that a model needs and requests that fit, without loading weights (`baton plan`)."""

import json
import warnings
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from baton.cli.offline_options import PlanOptions
from baton.cli.options import format_bytes
from baton.engine.kv_cache.sizing import KvSizing
from baton.launch import CommandFailed
from baton.launch.devices import DeviceChoice
from baton.launch.model_source import find_folder
from baton.text.host.files import FileRefused
from baton.text.model_folder import check_config

if TYPE_CHECKING:
    import torch

    from baton.engine.kv_cache.layout import KvLayout
    from baton.engine.weights.model_shape import ModelShape


def run_plan(options: PlanOptions) -> int:
    """Print the plan; return the exit code. Raises: CommandFailed."""
    plan, sizing = make_plan(options)
    print(json.dumps(plan) if options.json else describe(plan, sizing))
    return 0


class MemoryPlan(TypedDict):
    """Memory that a model needs, as --json prints it."""

    dtype: str
    kv_dtype: str
    parameters: int
    weights: str  # format of the weights
    weight_bytes: int
    keeps_kv: bool  # False: the model needs no KV, and the pool only bounds the tokens of a step
    kv_token_bytes: int
    kv_block_bytes: int
    state_bytes: int
    block_tokens: int
    kv_memory_bytes: int
    blocks: int
    max_model_len: int
    max_concurrency: float
    batch: int
    batch_kv_bytes: int  # KV and states of `batch` requests of `max_model_len` tokens, not rounded up to blocks


class _Sizes(NamedTuple):
    """Sizes of a model as the engine would load it."""

    shape: "ModelShape"
    dtype: "torch.dtype"
    layout: "KvLayout"
    format: str  # format of the weights
    weight_bytes: int


def _sizes(options: PlanOptions) -> _Sizes:
    """Read configuration and headers of a checkpoint. Raises: CommandFailed."""
    import torch

    from baton.engine.config.model_config import ModelError
    from baton.engine.load import check_format, check_tensors
    from baton.engine.prepare import ModelOptions, resolve_dtype, resolve_layout, weights_of
    from baton.engine.weights.files import planned_weights
    from baton.engine.weights.formats import weight_format
    from baton.engine.weights.model_shape import read_model_shape
    from baton.text.tokenizer.checkpoint_tokenizer import TokenizerRefused, read_tokenizer
    from baton.text.tokenizer.convert import has_tokenizer
    from baton.text.weight_files import has_weights, stores_weights

    folder = config_folder(options.model)
    on_gpu = options.device is DeviceChoice.CUDA or (options.device is DeviceChoice.AUTO and torch.cuda.is_available())
    asked = ModelOptions(
        folder,
        torch.device("cuda", 0) if on_gpu else torch.device("cpu"),
        options.dtype,
        options.block_size,
        options.kv_memory or 0,
        options.max_model_len,
        options.kv_cache_dtype,
        options.quantize,
    )
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # hides warnings about model configurations
            shape = read_model_shape(folder)
        dtype = resolve_dtype(asked)
        layout = resolve_layout(asked, shape.config)
        format = weight_format(folder, options.quantize)
        check_format(shape.config, format)
        # In a folder that the user did not name, files that are not read may be anything.
        stores = stores_weights(folder) if Path(options.model).expanduser().is_dir() else has_weights(folder)
        if stores or has_tokenizer(folder):
            read_tokenizer(folder)  # the server would refuse the checkpoint
        if stores:
            weight_bytes = weights_of(asked, shape.config, format, dtype).size_bytes
            check_tensors(folder, shape.config)
        else:
            weight_bytes = planned_weights(folder, shape.tensors, options.quantize, dtype.itemsize).size_bytes
    except (ModelError, TokenizerRefused) as error:
        raise CommandFailed(str(error)) from error
    return _Sizes(shape, dtype, layout, format, weight_bytes)


def make_plan(options: PlanOptions) -> tuple[MemoryPlan, KvSizing]:
    """Compute the memory plan, and the KV sizing that it is based on. Raises: CommandFailed."""
    from baton.engine.config.model_config import EncoderConfig

    shape, dtype, layout, format, weight_bytes = _sizes(options)
    tokens = options.max_model_len or shape.config.max_positions
    if tokens > shape.config.max_positions:
        raise CommandFailed(
            f"--max-model-len: {tokens} exceeds the model's context of {shape.config.max_positions} tokens"
        )
    batch = options.batch or 1
    least = KvSizing.of(layout, 0, tokens)
    sizing = replace(least, kv_memory_bytes=options.kv_memory or least.bytes_for(batch))
    plan = MemoryPlan(
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=layout.dtype_name,
        parameters=shape.parameters,
        weights=format,
        weight_bytes=weight_bytes,
        keeps_kv=not isinstance(shape.config, EncoderConfig),
        kv_token_bytes=sizing.token_bytes,
        kv_block_bytes=sizing.block_bytes,
        state_bytes=sizing.state_bytes,
        block_tokens=sizing.block_tokens,
        kv_memory_bytes=sizing.kv_memory_bytes,
        blocks=sizing.blocks,
        max_model_len=sizing.max_model_len,
        max_concurrency=sizing.concurrency,
        batch=batch,
        batch_kv_bytes=_needed_bytes(least, batch),
    )
    return plan, sizing


def _needed_bytes(sizing: KvSizing, batch: int) -> int:
    """Return `MemoryPlan.batch_kv_bytes`."""
    if sizing.groups.windowed:
        return sizing.bytes_for(batch)
    return batch * (sizing.max_model_len * sizing.token_bytes + sizing.request_blocks * sizing.state_bytes)


def config_folder(model: str) -> Path:
    """Return the folder with config.json, fetching configuration and tokenizer from the hub. Raises: CommandFailed."""
    given = Path(model).expanduser()
    is_config = given.is_file() and given.suffix == ".json"
    folder = given.parent if is_config else find_folder(model, with_weights=False)
    try:
        check_config(folder)
    except FileRefused as error:
        raise CommandFailed(str(error)) from error
    return folder


def describe(plan: MemoryPlan, sizing: KvSizing) -> str:
    """Format the plan for people; if the KV does not fit, name a --kv-memory that suffices."""
    kept = plan["dtype"] if plan["weights"] == "none" else f"{plan['weights']} and {plan['dtype']}"
    weights = f"weights            {format_bytes(plan['weight_bytes'])} ({plan['parameters']:,} parameters, {kept})"
    if not plan["keeps_kv"]:
        most = f"each prompt is computed in one step, of at most {sizing.max_model_len:,} tokens"
        return f"{weights}\nKV                 none: {most}"
    batch, groups = plan["batch"], sizing.groups
    lines = [
        weights,
        f"KV per token       {format_bytes(sizing.token_bytes)} ({sizing.token_bytes:,} bytes, {plan['kv_dtype']})",
        f"KV per block       {format_bytes(sizing.block_bytes)} ({sizing.block_tokens} tokens)",
        f"KV pool            {format_bytes(sizing.kv_memory_bytes)}",
        f"                   {sizing.blocks:,} blocks, {sizing.tokens:,} tokens",
        sizing.concurrency_text,
        f"{batch} x {sizing.max_model_len:,} tokens need {format_bytes(plan['batch_kv_bytes'])} of KV",
    ]
    if sizing.state_bytes:
        share = sizing.state_bytes / sizing.block_bytes
        lines.insert(3, f"of that a state    {format_bytes(sizing.state_bytes)} ({share:.0%} of a block)")
    if groups.windowed:
        windows = f"{groups.windowed} of which stay for {groups.window_tokens:,} tokens"
        lines.insert(3, f"                   {groups.count} of them for as many tokens, {windows}")
    if (would_do := sizing.bytes_for(batch)) > sizing.kv_memory_bytes:
        lines.append(f"does not fit: --kv-memory {would_do} would do")
    return "\n".join(lines)
