"""Check whether transformers' code of a model can run on paged attention. The model's attention calls decide.

The model is built without weights and run once on the meta device, with an attention function that records the calls.
"""

import copy
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from baton.engine.config.model_config import ModelConfig, ModelError
from baton.engine.config.rope import per_sequence_fault
from baton.engine.models.transformers_model import (
    KEYWORD,
    NAME,
    AttentionCall,
    UnsupportedAttentionError,
    register_attention,
)

FULL, WINDOWED = "full_attention", "sliding_attention"
NO_INTERFACE = "its attention does not go through transformers' attention interface"
ON_META = {"experts_implementation": "batched_mm"}  # other implementations read values: meta tensors have none


def transformers_config(config: PretrainedConfig, eos_token_ids: frozenset[int]) -> ModelConfig:
    """Convert the configuration of a model. Raises: ModelError with the reason why paged attention cannot serve it."""
    text: Any = config.get_text_config(decoder=True)
    refusal = _refusal(config, text)
    if refusal is None:
        calls = _attention_calls(config)
        refusal = _refusal_of_calls(calls, text)
    if refusal is not None:
        raise _cannot(config, refusal)
    first = calls[0]
    hidden = int(text.hidden_size)
    return ModelConfig(
        family=config.model_type,
        vocab_size=int(text.vocab_size),
        hidden_size=hidden,
        intermediate_size=_widest(getattr(text, "intermediate_size", None) or 4 * hidden),
        num_layers=len(calls),
        num_heads=first.query.shape[1],
        num_kv_heads=first.key.shape[1],
        head_dim=max(first.key.shape[2], first.value.shape[2]),
        max_positions=int(text.max_position_embeddings),
        eos_token_ids=eos_token_ids,
    )


def forget_padding(config: PretrainedConfig) -> None:
    """Clear the padding token: batches have no padding, but some models would search every batch for it."""
    with suppress(StrictDataclassError):  # some configurations require a padding token
        config.get_text_config(decoder=True).pad_token_id = None


def _has_window(text: Any) -> bool:
    """Return whether a model without `layer_types` has a sliding window shorter than its context."""
    if getattr(text, "layer_types", None) or not hasattr(type(text), "sliding_window"):
        return False
    return text.sliding_window is not None and text.sliding_window < text.max_position_embeddings


def _cannot(config: PretrainedConfig, reason: str) -> ModelError:
    return ModelError(f"config.json: model_type {config.model_type!r} cannot be served: {reason}")


def _widest(sizes: int | list[int]) -> int:
    """Return the largest size; some configurations list one size per layer."""
    return max(sizes) if isinstance(sizes, list) else int(sizes)


def _refusal(config: PretrainedConfig, text: Any) -> str | None:
    """Return the reason why a model's configuration or class cannot be served; None if it can."""
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        return "it is no causal language model of transformers"
    if config.is_encoder_decoder:
        return "it has an encoder"
    model: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model, "_is_stateful", False):
        return "it keeps a state besides keys and values"
    if not model._can_set_attn_implementation():
        return NO_INTERFACE
    if shared := getattr(text, "num_kv_shared_layers", 0):
        return f"its last {shared} layers read the keys and values of others"
    return per_sequence_fault(getattr(text, "rope_parameters", None))


def _attention_calls(config: PretrainedConfig) -> list[AttentionCall]:
    """Return the attention calls of a model's layers, in order of the layers. Raises: ModelError if its code fails."""
    register_attention()
    calls: list[AttentionCall] = []

    def note(call: AttentionCall) -> torch.Tensor:
        calls.append(call)
        return call.query.new_empty(*call.query.shape[:2], call.value.shape[2])

    probed = copy.deepcopy(config)
    forget_padding(probed)
    try:
        with torch.device("meta"), torch.inference_mode():
            causal: Any = AutoModelForCausalLM.from_config(probed, attn_implementation=NAME, **ON_META)
            ids = torch.zeros(1, 2, dtype=torch.int64)
            causal.eval().base_model(input_ids=ids, position_ids=ids, use_cache=False, **{KEYWORD: note})
    except UnsupportedAttentionError as error:
        raise _cannot(config, str(error)) from error
    except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, AssertionError) as error:
        first_line = str(error).partition("\n")[0]  # torch's further lines list every signature of the operation
        raise _cannot(config, f"its code fails without a cache: {type(error).__name__}: {first_line}") from error
    return sorted(calls, key=lambda call: call.layer)


def _refusal_of_calls(calls: Sequence[AttentionCall], text: Any) -> str | None:
    if not calls:
        return NO_INTERFACE
    if [call.layer for call in calls] != list(range(text.num_hidden_layers)):
        return "not every layer attends exactly once"
    if len({(call.key.shape, call.value.shape) for call in calls}) > 1:
        return "its keys and values differ in shape by layer"
    if calls[0].query.shape[2] != calls[0].key.shape[2] or calls[0].value.shape[2] > calls[0].key.shape[2]:
        return "its queries, keys and values differ in size"
    kinds = getattr(text, "layer_types", None) or [FULL] * len(calls)
    if not set(kinds) <= {FULL, WINDOWED}:
        return f"it has layers of kind {', '.join(sorted(set(kinds) - {FULL, WINDOWED}))}"
    if not isinstance(getattr(text, "max_position_embeddings", None), int):
        return "it does not say how many positions it has"
    if any(kind == WINDOWED and call.window is None for kind, call in zip(kinds, calls, strict=True)):
        return "its sliding windows are not passed to attention"
    if _has_window(text) and not any(call.window for call in calls):
        return "its sliding window is not passed to attention"
    return None
