"""Systems under test of `baton bench goodput`: Baton, vLLM and other servers, each at several settings.

The same client sends requests to each system over HTTP (OpenAI's completions), with prompts as token ids.
"""

import json
import os
import shlex
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from baton.lab.benchmarks.serve.load import Target, TargetFailed
from baton.lab.benchmarks.serve.targets import make_target
from baton.lab.commands.bench_options import GoodputOptions, Variant
from baton.lab.harness.processes import HOST, Program, RunningCluster, RunningProgram, our_program, ports_of
from baton.lab.harness.vllm import is_healthy, vllm_server
from baton.launch import CommandFailed
from baton.process.registry.redis_server import free_port, free_ports

START_TIMEOUT_S, PEER_START_TIMEOUT_S, REQUEST_TIMEOUT_S = 600.0, 1800.0, 3600.0
VLLM = str(Variant.VLLM)  # name of vLLM with its own defaults for chunk size and number of sequences
VLLM_MAX_SEQS = 128  # vLLM's default on a CPU; a step's token budget may not be below it


@dataclass(frozen=True, slots=True)
class SystemUnderTest:
    """Server to measure. `serving`: starts it, if it does not run already, and stops it afterwards."""

    name: str
    is_baton: bool
    setting: str  # flags or URL, as one text
    serving: Callable[[], AbstractAsyncContextManager[Target]]


@dataclass(frozen=True, slots=True)
class Launch:
    """Model, folder of logs and cores of the servers that this process starts."""

    model: Path
    dtype: str
    logs: Path
    cores: tuple[int, ...]


def vocab_size_of(model: Path) -> int:
    """Return the vocabulary size of a checkpoint. Raises: CommandFailed."""
    try:
        return int(json.loads((model / "config.json").read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CommandFailed(f"{model}/config.json: vocab_size cannot be read: {error}") from error


def systems_of(options: GoodputOptions, launch: Launch) -> list[SystemUnderTest]:
    """Return the chosen systems. Raises: CommandFailed for an unknown name, two equal ones, or none."""
    promised = f"--ttft-slo-ms {options.ttft_slo_ms:g} --tbt-slo-ms {options.tbt_slo_ms:g}"
    found = []
    for name, more in options.baton_variants.items():
        up_flags = tuple(shlex.split(f"{promised} {more}"))
        shown = f"baton up {shlex.join(up_flags)}"
        found.append(SystemUnderTest(name, True, shown, partial(_baton, name, up_flags, launch)))
    python = options.vllm_interpreter
    if python.exists():
        for name, flags in vllm_settings(options).items():
            shown = f"vLLM {shlex.join(flags)}".strip()
            serving = partial(_vllm, name, python, flags, options.vllm_kv_gib, launch)
            found.append(SystemUnderTest(name, False, shown, serving))
    found += [
        SystemUnderTest(name, False, command, partial(_server, name, command, launch))
        for name, command in options.server_commands.items()
    ]
    found += [
        SystemUnderTest(name, url.startswith("grpc://"), url, partial(_reached, url))
        for name, url in options.running_targets.items()
    ]
    names = [each.name for each in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise CommandFailed(f"two systems are named {twice!r}; give each another name")
    chosen = options.chosen_systems
    if unknown := [name for name in chosen if name not in names]:
        absent = "" if python.exists() else f" (vLLM is not installed: {python} does not exist)"
        raise CommandFailed(f"--systems: {unknown[0]!r} is none of {', '.join(names)}{absent}")
    return [each for each in found if not chosen or each.name in chosen]


def vllm_settings(options: GoodputOptions) -> dict[str, tuple[str, ...]]:
    """Return the flags of each setting of vLLM by name: its defaults, then each pair of chunk and sequences."""
    more = tuple(shlex.split(options.vllm_flags))
    settings = {VLLM: more}
    for chunk, seqs in product(options.vllm_chunk_sizes or (None,), options.vllm_seq_counts or (None,)):
        if chunk is None and seqs is None:
            continue
        name, flags = VLLM, more
        if chunk is not None:
            name, flags = f"{name}-c{chunk}", (*flags, "--max-num-batched-tokens", str(chunk))
        if seqs is not None or (chunk is not None and chunk < VLLM_MAX_SEQS):
            most = min(each for each in (seqs, chunk) if each is not None)
            flags = (*flags, "--max-num-seqs", str(most))
        settings[name if seqs is None else f"{name}-s{seqs}"] = flags
    return settings


def usable_cores() -> tuple[int, ...]:
    return tuple(sorted(os.sched_getaffinity(0)))


@asynccontextmanager
async def _baton(name: str, flags: Sequence[str], launch: Launch) -> AsyncIterator[Target]:
    public, admin, http = free_ports(3)
    cluster = RunningCluster(f"{HOST}:{public}", f"{HOST}:{admin}", 0)
    command = ("up", "--device", "cpu", *ports_of(cluster), "--http-port", http, "--model", launch.model)
    command += ("--dtype", launch.dtype, "--trace-file", launch.logs / f"{name}.jsonl", *flags)
    program = our_program(name, launch.logs, "baton.cli", *command, cores=launch.cores, environment={})

    async def is_ready() -> bool:
        status = await cluster.status()
        return status is not None and status.ready and not status.detail

    async with RunningProgram(program) as running:
        await running.wait_until(is_ready, START_TIMEOUT_S)
        async with _reached(f"http://{HOST}:{http}/v1") as target:
            yield target


@asynccontextmanager
async def _peer(program: Program, port: int) -> AsyncIterator[Target]:
    async with RunningProgram(program) as running:
        await running.wait_until(lambda: is_healthy(port), PEER_START_TIMEOUT_S)
        async with _reached(f"http://{HOST}:{port}/v1") as target:
            yield target


def _vllm(
    name: str, python: Path, flags: Sequence[str], kv_gib: int, launch: Launch
) -> AbstractAsyncContextManager[Target]:
    port, log = free_port(), launch.logs / f"{name}.log"
    all_flags = ("--dtype", launch.dtype, *flags)
    return _peer(vllm_server(python, launch.model, all_flags, kv_gib, launch.cores, port, log), port)


def _server(name: str, command: str, launch: Launch) -> AbstractAsyncContextManager[Target]:
    """Start any server of OpenAI's API. `command`: a command line with the placeholders {port} and {model}."""
    port = free_port()
    parts = (part.replace("{port}", str(port)).replace("{model}", str(launch.model)) for part in shlex.split(command))
    return _peer(Program(name, tuple(parts), launch.cores, launch.logs / f"{name}.log", dict(os.environ)), port)


@asynccontextmanager
async def _reached(url: str) -> AsyncIterator[Target]:
    """Yield a running server as a target. Raises: CommandFailed."""
    target = make_target(url, "", "", REQUEST_TIMEOUT_S, None)
    try:
        await target.prepare()
        yield target
    except TargetFailed as error:
        raise CommandFailed(f"{url} does not answer: {error}") from error
    finally:
        await target.close()
