"""vLLM's OpenAI server on CPUs, from an environment of its own."""

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from baton.lab.harness.processes import HOST, Program
from baton.launch.devices import write_cores

PROBE_TIMEOUT_S = 1.0


def vllm_server(
    python: Path, model: Path, flags: Sequence[str], kv_gib: int, cores: Sequence[int], port: int, log: Path
) -> Program:
    """Return the vLLM server with one thread per core. `flags`: more flags of the server."""
    command = [str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--host", HOST, "--port", str(port), "--served-model-name", model.name, *flags]
    environment = {
        **os.environ,
        "VLLM_CPU_OMP_THREADS_BIND": write_cores(cores),
        "VLLM_CPU_KVCACHE_SPACE": str(kv_gib),
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
    }
    return Program("vLLM", tuple(command), tuple(cores), log, environment)


async def is_healthy(port: int) -> bool:
    """Return whether the HTTP server on this port of this machine answers /health."""

    def answers() -> bool:
        try:
            with urlopen(f"http://{HOST}:{port}/health", timeout=PROBE_TIMEOUT_S) as response:
                return int(response.status) == 200
        except (URLError, OSError):
            return False

    return await asyncio.to_thread(answers)
