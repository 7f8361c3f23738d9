"""`baton up`: which flags it has."""

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import typer

from baton.cli import options
from baton.cli.commands import up_options
from baton.launch.devices import DeviceChoice

if TYPE_CHECKING:
    from baton.cli.up import UpOptions


def up(
    model: up_options.Model = None,
    prefill: up_options.Prefill = None,
    decode: up_options.Decode = 1,
    colocated: up_options.Colocated = False,
    host: up_options.Host = "127.0.0.1",
    port: up_options.Port = 50051,
    admin_port: up_options.AdminPort = None,
    http_port: up_options.HttpPort = None,
    routers: up_options.Routers = 1,
    placement: up_options.Placement = "cache_aware",
    planner: up_options.Planner = "propose",
    device: up_options.Device = DeviceChoice.AUTO,
    dtype: up_options.Dtype = "auto",
    adapter: options.Adapters = None,
    quantize: options.Quantize = "none",
    kv_cache_dtype: options.KvCacheDtype = "auto",
    block_size: up_options.BlockSize = 32,
    max_model_len: up_options.MaxModelLen = None,
    kv_memory: options.KvMemory = None,
    swap_memory: options.SwapMemory = None,
    tbt_slo_ms: options.TbtSloMs = None,
    transport: up_options.Transport = "auto",
    tensor_parallel: options.TensorParallel = 1,
    log_format: up_options.LogFormat = "plain",
    namespace: up_options.Namespace = None,
    trace_file: up_options.TraceFile = None,
    api_keys: up_options.ApiKeys = None,
    insecure: up_options.Insecure = False,
    tls_cert: up_options.TlsCert = None,
    tls_key: up_options.TlsKey = None,
    startup_timeout: up_options.StartupTimeoutS = 600,
) -> None:
    """Start router, workers and Redis on this machine; Ctrl-C drains and stops them."""
    flags = dict(locals())  # as typer has read them: of no other variable
    if colocated and prefill:
        raise typer.BadParameter("--colocated allows no prefill workers", param_hint="--prefill")
    if (tls_cert is None) != (tls_key is None):
        raise typer.BadParameter("goes together with --tls-key", param_hint="--tls-cert")
    from baton.cli.up import run_up

    raise typer.Exit(run_up(_options(flags)))


def _options(flags: Mapping[str, Any]) -> "UpOptions":
    """Flags that only pass through have one name there and here."""
    from baton.cli.up import UpOptions, separated
    from baton.launch.process_plan import Exposure

    given = dict(flags)
    exposure = Exposure(*(given.pop(name) for name in ("api_keys", "insecure", "tls_cert", "tls_key")))
    prefill = given.pop("prefill")
    return UpOptions(
        prefill=0 if given.pop("colocated") else 1 if prefill is None else prefill,
        adapters=tuple(separated(given.pop("adapter") or (), "adapter", os.environ)),
        own_options=frozenset(flags),
        kv_memory_bytes=given.pop("kv_memory"),
        swap_memory_bytes=given.pop("swap_memory"),
        startup_timeout_s=given.pop("startup_timeout"),
        exposure=exposure,
        **given,
    )
