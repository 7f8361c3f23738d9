"""vLLM's own server on a CPU, for `baton bench isolation`: how it is started, and whether it serves."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from cli.bench.isolation_stack import Program
from cli.core_plan import write_cores

HOST = "127.0.0.1"
KV_GIB = "1"  # as `baton up` takes at most
PROBE_TIMEOUT_S = 1.0


def vllm_server(python: Path, model: Path, max_model_len: int, cores: Sequence[int], port: int, log: Path) -> Program:
    """One thread per core, bfloat16, no prefix cache (no prompt comes twice), the rest as vLLM has it."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", HOST, "--port", str(port), "--max-model-len", str(max_model_len)]
    command += ["--dtype", "bfloat16", "--no-enable-prefix-caching", "--served-model-name", model.name]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": write_cores(cores),
        "VLLM_CPU_KVCACHE_SPACE": KV_GIB,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    return Program("vLLM", tuple(command), tuple(cores), log, environment)


async def vllm_serves(port: int) -> bool:
    return await asyncio.to_thread(_serves, port)


def _serves(port: int) -> bool:
    try:
        with urlopen(f"http://{HOST}:{port}/health", timeout=PROBE_TIMEOUT_S) as response:
            return int(response.status) == 200
    except (URLError, OSError):
        return False
