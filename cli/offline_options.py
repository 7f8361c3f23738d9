"""Options of `baton plan` and `baton batch`, which need no server."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from baton.cli.options import KV_MEMORY_NOTE, Adapters, Json, ModelFolder, of_field
from baton.launch.devices import DeviceChoice
from baton.worker.config import WorkerConfig


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    model: Annotated[
        str, typer.Option(help="Folder with config.json (no weights are needed), GGUF file or Hugging Face id.")
    ]
    max_model_len: Annotated[
        int | None, typer.Option(min=1, help="Maximum tokens of prompt plus answer; default: the model's context.")
    ] = None
    kv_memory: int | None = of_field(WorkerConfig, "kv_memory", note=KV_MEMORY_NOTE)
    dtype: str = of_field(WorkerConfig, "dtype")
    device: Annotated[DeviceChoice, typer.Option(help="Device of the model; auto: a GPU if there is one.")] = (
        DeviceChoice.AUTO
    )
    kv_cache_dtype: str = of_field(WorkerConfig, "kv_cache_dtype")
    quantize: str = of_field(WorkerConfig, "quantize")
    batch: Annotated[int | None, typer.Option(min=1, help="Number of concurrent requests; default: 1.")] = None
    block_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=16384,
            help="Tokens per KV block; default: 32, or more if a model's state needs over half of a block.",
        ),
    ] = None
    json: Json = False


@dataclass(frozen=True, kw_only=True)
class BatchOptions:
    source: Annotated[Path, typer.Argument(help="Requests, a JSON object per line as in OpenAI's batch API.")]
    target: Annotated[Path, typer.Argument(help="File for the answers; requests answered in it are skipped.")]
    model: ModelFolder = None
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = "auto"
    dtype: str = of_field(WorkerConfig, "dtype")
    max_model_len: int | None = of_field(WorkerConfig, "max_model_len")
    kv_memory: int | None = of_field(WorkerConfig, "kv_memory", note=KV_MEMORY_NOTE)
    kv_cache_dtype: str = of_field(WorkerConfig, "kv_cache_dtype")
    quantize: str = of_field(WorkerConfig, "quantize")
    adapter: Adapters = None
