"""Baton: prefill and decode of large language models in separate processes.

    from baton import BatonClient                 talks to a server; needs grpcio and protobuf alone
    from baton import LLM, SamplingParams         the engine in this process, with the names of vLLM

Importing the package loads its version alone. The folders next to this file are links to the folders at the top of the
repository.
"""

import os
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from baton.versions import RELEASE as __version__

if TYPE_CHECKING:
    from baton.client import AsyncBatonClient, BatonClient
    from baton.engine import LLM, AsyncLLM, SamplingParams

__all__ = [
    "IMPORT_PATH",
    "LLM",
    "AsyncBatonClient",
    "AsyncLLM",
    "BatonClient",
    "SamplingParams",
    "__version__",
    "child_environment",
]

IMPORT_PATH = Path(__file__).parents[1]
"""PYTHONPATH entry with which another process imports this code."""


def child_environment(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return `environment` with a PYTHONPATH from which another Python imports this code."""
    paths = [str(IMPORT_PATH), *filter(None, [environment.get("PYTHONPATH")])]
    return {**environment, "PYTHONPATH": os.pathsep.join(paths)}


_HOMES = {
    "BatonClient": "baton.client",
    "AsyncBatonClient": "baton.client",
    "LLM": "baton.engine",
    "AsyncLLM": "baton.engine",
    "SamplingParams": "baton.engine",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'baton' has no attribute {name!r}")
    try:
        return getattr(import_module(home), name)
    except ModuleNotFoundError as error:
        package = "baton-client" if home == "baton.client" else "baton-serve"
        raise ImportError(f"{name} needs {error.name}: pip install {package}") from error
