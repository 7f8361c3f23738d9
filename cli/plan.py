"""`baton plan`: what a model needs and how much fits, before any weight is loaded."""

import json
import warnings
from dataclasses import dataclass
from pathlib import Path

from cli.errors import CommandFailed
from cli.sizes import format_bytes
from engine.sizing import KvSizing

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class PlanOptions:
    model: str
    dtype: str  # auto, or a key of DTYPE_BYTES
    block_tokens: int
    max_model_len: int | None  # tokens; None: the model's positions
    kv_memory_bytes: int | None
    batch: int | None  # requests at their longest


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """`needed_bytes`: KV of `batch` requests of `max_model_len` tokens, without rounding up to blocks."""

    dtype: str
    parameters: int
    weight_bytes: int
    sizing: KvSizing
    batch: int
    needed_bytes: int


def run_plan(options: PlanOptions, as_json: bool) -> int:
    """Prints the plan. Raises: CommandFailed."""
    plan = make_plan(options)
    print(json.dumps(as_dict(plan)) if as_json else describe(plan))
    return 0


def make_plan(options: PlanOptions) -> MemoryPlan:
    """Raises: CommandFailed."""
    from engine.model_config import ModelError
    from engine.model_shape import read_model_shape

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of configurations: nothing is run
            shape = read_model_shape(config_folder(options.model))
    except ModelError as error:
        raise CommandFailed(str(error)) from error
    dtype = str(shape.stated_dtype or "bfloat16").removeprefix("torch.") if options.dtype == "auto" else options.dtype
    if dtype not in DTYPE_BYTES:
        raise CommandFailed(f"dtype {dtype} is not known; known are auto, {', '.join(DTYPE_BYTES)}")
    token_bytes = shape.kv.token_bytes(DTYPE_BYTES[dtype])
    tokens = options.max_model_len or shape.kv.max_positions
    if tokens > shape.kv.max_positions:
        raise CommandFailed(f"--max-model-len is {tokens} tokens; the model has positions for {shape.kv.max_positions}")
    batch = options.batch or 1
    least = KvSizing(token_bytes, options.block_tokens, 0, tokens)
    needed_blocks = batch * least.request_blocks
    kv_bytes = options.kv_memory_bytes or needed_blocks * least.block_bytes
    sizing = KvSizing(token_bytes, options.block_tokens, kv_bytes, tokens)
    weight_bytes = shape.parameters * DTYPE_BYTES[dtype]
    return MemoryPlan(dtype, shape.parameters, weight_bytes, sizing, batch, batch * tokens * token_bytes)


def config_folder(model: str) -> Path:
    """A folder with config.json; of a Hugging Face model only that file is fetched. Raises: CommandFailed."""
    given = Path(model).expanduser()
    if given.is_file():
        given = given.parent
    if given.is_dir():
        if not (given / "config.json").is_file():
            raise CommandFailed(f"{given} has no config.json")
        return given
    if given.is_absolute() or model.startswith((".", "~")) or model.count("/") != 1:
        raise CommandFailed(f"--model {model}: there is no such folder, and a hub id looks like owner/name")
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(hf_hub_download(model, "config.json")).parent
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CommandFailed(f"--model {model}: the Hugging Face hub does not give its config.json: {error}") from error


def describe(plan: MemoryPlan) -> str:
    """For people. An amount that fits is followed by the one that would, where it does not."""
    sizing = plan.sizing
    lines = [
        f"weights            {format_bytes(plan.weight_bytes)} ({plan.parameters:,} parameters, {plan.dtype})",
        f"KV per token       {format_bytes(sizing.token_bytes)} ({sizing.token_bytes:,} bytes)",
        f"KV per block       {format_bytes(sizing.block_bytes)} ({sizing.block_tokens} tokens)",
        f"KV pool            {format_bytes(sizing.kv_memory_bytes)}",
        f"                   {sizing.blocks:,} blocks, {sizing.tokens:,} tokens",
        sizing.concurrency_text,
        f"{plan.batch} x {sizing.max_model_len:,} tokens need {format_bytes(plan.needed_bytes)} of KV",
    ]
    needed_blocks = plan.batch * sizing.request_blocks
    if needed_blocks > sizing.blocks:
        lines.append(f"does not fit: --kv-memory {needed_blocks * sizing.block_bytes} would do")
    return "\n".join(lines)


def as_dict(plan: MemoryPlan) -> dict[str, object]:
    sizing = plan.sizing
    return {
        "dtype": plan.dtype,
        "parameters": plan.parameters,
        "weight_bytes": plan.weight_bytes,
        "kv_token_bytes": sizing.token_bytes,
        "kv_block_bytes": sizing.block_bytes,
        "block_tokens": sizing.block_tokens,
        "kv_memory_bytes": sizing.kv_memory_bytes,
        "blocks": sizing.blocks,
        "max_model_len": sizing.max_model_len,
        "max_concurrency": sizing.concurrency,
        "batch": plan.batch,
        "batch_kv_bytes": plan.needed_bytes,
    }
