"""How much work a step is, to be compared with limits. Counts, no measurement."""

from engine.model_config import DecoderConfig, ModelConfig
from engine.prepare import PreparedModel


def decode_step_bytes(prepared: PreparedModel, batch: int, context_tokens: float) -> int:
    """Read at least: every weight once, and the KV of each sequence. All experts count, though few may be asked."""
    weights = prepared.weight_bytes - prepared.looked_up_bytes
    return weights + int(batch * context_tokens * prepared.layout.token_bytes)


def prefill_flop(config: ModelConfig, tokens: int) -> int:
    """Of one prompt: a multiplication and an addition per weight and token, and attention to the tokens before.

    As if every feed-forward layer were gated; the head is left out, since it is for the last token alone.
    """
    heads_size, kv_size = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    experts = config.experts if isinstance(config, DecoderConfig) else None
    inner = config.intermediate_size if experts is None else experts.inner_size * experts.per_token
    weights = config.hidden_size * (2 * heads_size + 2 * kv_size + 3 * inner)
    attention = 2 * heads_size * tokens * (tokens + 1) // 2  # products with keys, and with values
    return 2 * config.num_layers * (weights * tokens + attention)


def decode_step_flop(config: ModelConfig, batch: int, context_tokens: int) -> int:
    """One more token for each sequence, and its logits."""
    layers = prefill_flop(config, context_tokens + 1) - prefill_flop(config, context_tokens)
    return batch * (layers + 2 * config.hidden_size * config.vocab_size)
