"""llama.cpp's names of the tensors that Hugging Face's checkpoints name otherwise, and the rows it moved."""

import torch

ARCHITECTURES = {"llama": ("llama",), "mistral": ("llama", "mistral3"), "qwen2": ("qwen2",), "qwen3": ("qwen3",)}
"""For each family of ours, the architectures under which its files go."""

TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
PARTS = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
UNUSED = {"rope_freqs.weight"}  # config.json has it
INTERLEAVED_ARCHITECTURES = ("llama",)
INTERLEAVED_MODULES = ("self_attn.q_proj", "self_attn.k_proj")


def gguf_name(name: str) -> str | None:
    """Of a tensor such as `model.layers.3.mlp.up_proj.weight`: `blk.3.ffn_up.weight`. None if it has none."""
    module, _, kind = name.rpartition(".")
    if module in TOP:
        return f"{TOP[module]}.{kind}"
    _, _, rest = module.partition("model.layers.")
    layer, _, part = rest.partition(".")
    return f"blk.{layer}.{PARTS[part]}.{kind}" if part in PARTS else None


def is_interleaved(architecture: str, name: str) -> bool:
    """Whether llama.cpp moved the rows of this tensor so that the two of a rotated pair are neighbours."""
    return architecture in INTERLEAVED_ARCHITECTURES and name.rpartition(".")[0].endswith(INTERLEAVED_MODULES)


def halves_again(rows: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Undoes that: in each head first the one half of all pairs, then the other. `[heads * head_dim, ...]`."""
    pairs = rows.view(-1, head_dim // 2, 2, *rows.shape[1:])
    return pairs.transpose(1, 2).reshape(rows.shape)
