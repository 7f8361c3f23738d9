"""One device's model and its pages. Knows no network, no other process and no protobuf.

`from engine import LLM, AsyncLLM, SamplingParams` is for offline use; importing the package alone loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.offline.async_llm import AsyncLLM
    from engine.offline.beam_search import BeamSearchOutput, BeamSearchParams
    from engine.offline.llm import LLM
    from engine.offline.lora import LoRARequest
    from engine.offline.params import SamplingParams
    from engine.offline.request_output import CompletionOutput, RequestOutput
    from engine.offline.structured import StructuredOutputsParams

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "LoRARequest",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "engine.offline.llm",
    "AsyncLLM": "engine.offline.async_llm",
    "BeamSearchOutput": "engine.offline.beam_search",
    "BeamSearchParams": "engine.offline.beam_search",
    "LoRARequest": "engine.offline.lora",
    "SamplingParams": "engine.offline.params",
    "CompletionOutput": "engine.offline.request_output",
    "RequestOutput": "engine.offline.request_output",
    "StructuredOutputsParams": "engine.offline.structured",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
