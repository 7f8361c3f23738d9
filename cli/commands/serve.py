"""`baton up`: its flags."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from cli import options
from cli.devices import DeviceChoice


def up(
    model: Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the demo model.")] = None,
    prefill: Annotated[
        int | None,
        typer.Option(min=0, max=64, help="Number of prefill workers; default: 1. 0: decode workers compute prompts."),
    ] = None,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Number of decode workers.")] = 1,
    colocated: Annotated[
        bool, typer.Option("--colocated", help="No prefill workers: each decode worker computes its prompts itself.")
    ] = False,
    host: Annotated[
        str, typer.Option(help="Address of the public ports; beyond loopback it takes --api-keys, or --insecure.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65534, help="Public port; 0 takes a free one.")] = 50051,
    admin_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Admin port, on loopback; default: --port plus 1.")
    ] = None,
    http_port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            help="Port of OpenAI's HTTP API, on --host; 0 takes a free one. Default: 8000, or a free one where that is "
            "taken. Further routers have those after it.",
        ),
    ] = None,
    routers: Annotated[
        int,
        typer.Option(
            min=1,
            max=16,
            help="Number of routers, which share what they know; the second listens two ports after the first. Clients "
            "take any: with --target ipv4:127.0.0.1:50051,127.0.0.1:50053 one that answers.",
        ),
    ] = 1,
    placement: Annotated[
        Literal["cache_aware", "prefix_hash", "least_tokens", "round_robin"],
        typer.Option(help="How workers are chosen for a request (docs/routing.md)."),
    ] = "cache_aware",
    planner: Annotated[
        Literal["off", "propose", "act"],
        typer.Option(help="Whether workers change between prefill and decode as the load does; propose: only says so."),
    ] = "propose",
    device: Annotated[DeviceChoice, typer.Option(help="What workers compute on.")] = DeviceChoice.AUTO,
    dtype: Annotated[
        Literal["auto", "float32", "bfloat16"],
        typer.Option(
            help="What the model computes in. auto: the checkpoint's own, but float32 on a CPU without bf16 arithmetic."
        ),
    ] = "auto",
    adapter: options.Adapters = None,
    quantize: options.Quantize = "none",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    block_size: Annotated[int, typer.Option(min=1, max=1024, help="Tokens per KV block.")] = 32,
    max_model_len: Annotated[
        int | None, typer.Option(min=2, help="Longest prompt plus answer, in tokens; default: the model's.")
    ] = None,
    kv_memory: options.KvMemory = None,
    swap_memory: options.SwapMemory = None,
    step_budget_ms: options.StepBudgetMs = None,
    transport: Annotated[
        Literal["auto", "shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "grpc"],
        typer.Option(help="How KV goes from prefill to decode. auto: the fastest way there is."),
    ] = "auto",
    tensor_parallel: options.TensorParallel = 1,
    log_format: Annotated[Literal["plain", "json"], typer.Option(help="How the processes log.")] = "plain",
    namespace: Annotated[
        str | None, typer.Option(help="Which cluster on a Redis that several share; default: baton-PORT.")
    ] = None,
    trace_file: Annotated[
        Path | None, typer.Option(help="Where traces are appended; default: a new file in runtime/.")
    ] = None,
    api_keys: Annotated[
        Path | None,
        typer.Option(
            envvar="BATON_API_KEYS",
            exists=True,
            dir_okay=False,
            help="File of API keys (baton keys new): nobody is served without one. Read again when it changes.",
        ),
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", envvar="BATON_INSECURE", help="Allow --host beyond loopback without keys.")
    ] = False,
    tls_cert: Annotated[
        Path | None,
        typer.Option(
            envvar="BATON_TLS_CERT",
            exists=True,
            dir_okay=False,
            help="Certificate of the public ports (PEM; baton certs): they speak TLS only. Needs --tls-key.",
        ),
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option(envvar="BATON_TLS_KEY", exists=True, dir_okay=False, help="Its key (PEM).")
    ] = None,
    startup_timeout: Annotated[float, typer.Option(min=1, help="Seconds to wait until it serves.")] = 600,
) -> None:
    """Start router, workers and Redis on this machine; Ctrl-C drains and stops them."""
    from cli.process_plan import Exposure
    from cli.up import UpOptions, run_up

    if colocated and prefill:
        raise typer.BadParameter("--colocated means that there are none", param_hint="--prefill")
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("goes together with --tls-key", param_hint="--tls-cert")
    code = run_up(
        UpOptions(
            model=model,
            prefill=0 if colocated else 1 if prefill is None else prefill,
            decode=decode,
            host=host,
            port=port,
            admin_port=admin_port,
            http_port=http_port,
            routers=routers,
            placement=placement,
            planner=planner,
            device=device,
            dtype=dtype,
            adapters=tuple(adapter or ()),
            kv_cache_dtype=kv_cache_dtype,
            quantize=quantize,
            block_size=block_size,
            max_model_len=max_model_len,
            kv_memory_bytes=kv_memory,
            swap_memory_bytes=swap_memory,
            step_budget_ms=step_budget_ms,
            transport=transport,
            tensor_parallel=tensor_parallel,
            log_format=log_format,
            namespace=namespace,
            trace_file=trace_file,
            exposure=Exposure(api_keys, insecure, tls_cert, tls_key),
            startup_timeout_s=startup_timeout,
        )
    )
    raise typer.Exit(code)
