"""Flags of `baton up` alone; those of other commands too are in `options`."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from baton.launch.devices import DeviceChoice

Model = Annotated[str | None, typer.Option(help="Folder or Hugging Face id; default: the demo model.")]
Prefill = Annotated[
    int | None,
    typer.Option(min=0, max=64, help="Number of prefill workers; default: 1. 0: decode workers compute prompts."),
]
Decode = Annotated[int, typer.Option(min=1, max=64, help="Number of decode workers.")]
Colocated = Annotated[
    bool,
    typer.Option(
        "--colocated",
        help="No prefill workers: each decode worker computes its prompts itself, between the steps of its answers; "
        "--tbt-slo-ms bounds how long answers wait for prompts.",
    ),
]
Host = Annotated[
    str, typer.Option(help="Address of the public ports; one beyond loopback needs --api-keys or --insecure.")
]
Port = Annotated[int, typer.Option(min=0, max=65534, help="Public port; 0 takes a free one.")]
AdminPort = Annotated[
    int | None, typer.Option(min=0, max=65535, help="Admin port, on loopback; default: --port plus 1.")
]
HttpPort = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=65535,
        help="Port of OpenAI's HTTP API, on --host; 0 takes a free one. Default: 8000, or a free one if that is "
        "taken. Further routers take the ports after it.",
    ),
]
Routers = Annotated[
    int,
    typer.Option(
        min=1,
        max=16,
        help="Number of routers, which share what they know; the second listens two ports after the first. Clients "
        "may name several: --target 127.0.0.1:50051,127.0.0.1:50053.",
    ),
]
Placement = Annotated[
    Literal["cache_aware", "prefix_hash", "least_tokens", "round_robin"],
    typer.Option(help="Placement policy: how workers are chosen for a request (docs/routing.md)."),
]
Planner = Annotated[
    Literal["off", "propose", "act"],
    typer.Option(
        help="Role planner. act: workers change between prefill and decode with the load; propose: only shows it."
    ),
]
Device = Annotated[DeviceChoice, typer.Option(help="Device that workers compute on.")]
Dtype = Annotated[
    Literal["auto", "float32", "bfloat16"],
    typer.Option(
        help="What the model computes in. auto: the checkpoint's own, but float32 on a CPU without bf16 arithmetic."
    ),
]
BlockSize = Annotated[int, typer.Option(min=1, max=1024, help="Tokens per KV block.")]
MaxModelLen = Annotated[
    int | None, typer.Option(min=2, help="Longest prompt plus answer, in tokens; default: the model's.")
]
Transport = Annotated[
    Literal["auto", "shared_memory", "cuda_ipc", "nixl", "nccl", "gloo", "grpc"],
    typer.Option(help="Transport of KV from prefill to decode. auto: the fastest available."),
]
LogFormat = Annotated[Literal["plain", "json"], typer.Option(help="Format of log lines.")]
Namespace = Annotated[str | None, typer.Option(help="Name of the cluster on a shared Redis; default: baton-PORT.")]
TraceFile = Annotated[
    Path | None, typer.Option(help="File that traces are appended to; default: a new one in runtime/.")
]
ApiKeys = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_API_KEYS",
        exists=True,
        dir_okay=False,
        help="File of API keys (baton keys new); requests without a valid key are refused. Reloaded when it changes.",
    ),
]
Insecure = Annotated[
    bool, typer.Option("--insecure", envvar="BATON_INSECURE", help="Allow --host beyond loopback without keys.")
]
TlsCert = Annotated[
    Path | None,
    typer.Option(
        envvar="BATON_TLS_CERT",
        exists=True,
        dir_okay=False,
        help="Certificate (PEM) of the public ports, which then accept TLS only (baton certs). Needs --tls-key.",
    ),
]
TlsKey = Annotated[
    Path | None,
    typer.Option(envvar="BATON_TLS_KEY", exists=True, dir_okay=False, help="Private key (PEM) of --tls-cert."),
]
StartupTimeoutS = Annotated[float, typer.Option(min=1, help="Seconds to wait until the service is ready.")]
