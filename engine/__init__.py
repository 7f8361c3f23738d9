"""Model and KV blocks of one device. Does not depend on the server's network code or protobuf.

For offline use: `from baton import LLM, AsyncLLM, SamplingParams`. Importing the package alone loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from baton.engine.offline.answer import CompletionOutput, RequestOutput
    from baton.engine.offline.async_llm import AsyncLLM
    from baton.engine.offline.beam_search import BeamSearchOutput, BeamSearchParams
    from baton.engine.offline.llm import LLM
    from baton.engine.offline.lora import LoRARequest
    from baton.engine.offline.params import SamplingParams, StructuredOutputsParams
    from baton.engine.offline.pooled import EmbeddingRequestOutput, PoolingParams, ScoringRequestOutput

__all__ = [
    "LLM",
    "AsyncLLM",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "EmbeddingRequestOutput",
    "LoRARequest",
    "PoolingParams",
    "RequestOutput",
    "SamplingParams",
    "ScoringRequestOutput",
    "StructuredOutputsParams",
]

_HOMES = {
    "LLM": "baton.engine.offline.llm",
    "AsyncLLM": "baton.engine.offline.async_llm",
    "BeamSearchOutput": "baton.engine.offline.beam_search",
    "BeamSearchParams": "baton.engine.offline.beam_search",
    "LoRARequest": "baton.engine.offline.lora",
    "SamplingParams": "baton.engine.offline.params",
    "CompletionOutput": "baton.engine.offline.answer",
    "RequestOutput": "baton.engine.offline.answer",
    "StructuredOutputsParams": "baton.engine.offline.params",
    "EmbeddingRequestOutput": "baton.engine.offline.pooled",
    "PoolingParams": "baton.engine.offline.pooled",
    "ScoringRequestOutput": "baton.engine.offline.pooled",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module 'baton.engine' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
