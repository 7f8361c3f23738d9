"""Write a GGUF file from a checkpoint of the Llama, Mistral, Qwen2 or Qwen3 family with any tokenizer.

    python -m baton.lab.benchmarks.peers.to_gguf CHECKPOINT OUTPUT bf16|q8_0|q4_0

Runs in llama.cpp's environment, whose own converter accepts only tokenizers with a known hash. Tokens are written by
name; only ids are used.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from baton.engine.weights.gguf_names import gguf_names, is_paired

ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
BLOCK = 32  # numbers that share a scale in Q8_0; rows that are not a multiple of it stay in bf16


def main() -> None:
    source, output, kind = Path(sys.argv[1]), sys.argv[2], sys.argv[3]
    if kind != "q4_0":
        write(source, output, kind)
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = f"{folder}/bf16.gguf"
        write(source, plain, "bf16")
        quantise(plain, output)


def quantise(plain: str, output: str) -> None:
    """Quantise to Q4_0 with llama.cpp itself, which uses more bits for the output head."""
    import llama_cpp  # type: ignore[import-not-found]

    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = llama_cpp.LLAMA_FTYPE_MOSTLY_Q4_0
    if llama_cpp.llama_model_quantize(plain.encode(), output.encode(), params) != 0:
        raise RuntimeError("llama_model_quantize failed")


def write(source: Path, output: str, kind: str) -> None:
    """Write a GGUF file. `kind`: bf16 or q8_0."""
    import gguf  # type: ignore[import-not-found]
    from safetensors.torch import load_file

    config = json.loads((source / "config.json").read_text())
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(output, architecture)
    _write_sizes(writer, config)
    _write_tokens(writer, json.loads((source / "tokenizer.json").read_text()), config["vocab_size"])
    quantised = {"bf16": gguf.GGMLQuantizationType.BF16, "q8_0": gguf.GGMLQuantizationType.Q8_0}[kind]
    for path in sorted(source.glob("*.safetensors")):
        for name, tensor in load_file(str(path)).items():
            numbers = tensor.float().numpy()
            if not (names := gguf_names(name)):
                raise ValueError(f"tensor {name} has no name in GGUF")
            new_name = names[-1]
            if is_paired(architecture, name):
                heads = config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"]
                numbers = _interleaved(numbers, heads)
            if numbers.ndim == 1:
                writer.add_tensor(new_name, numbers)
            else:
                fits = numbers.shape[-1] % BLOCK == 0
                to = quantised if fits else gguf.GGMLQuantizationType.BF16
                writer.add_tensor(new_name, gguf.quants.quantize(numbers, to), raw_dtype=to)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _write_sizes(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(float(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])


def _write_tokens(writer: Any, tokenizer: dict[str, Any], vocab_size: int) -> None:
    names = {token_id: name for name, token_id in tokenizer["model"]["vocab"].items()}
    names |= {added["id"]: added["content"] for added in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([names.get(token_id, f"<unused {token_id}>") for token_id in range(vocab_size)])
    writer.add_token_types([1] * vocab_size)
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)


def _interleaved(numbers: Any, heads: int) -> Any:
    """Reorder the rows of each head from 0, 1, 2, ... to 0, h, 1, h+1, ..., where h is half of the head."""
    rows = numbers.shape[0] // heads
    return numbers.reshape(heads, 2, rows // 2, *numbers.shape[1:]).swapaxes(1, 2).reshape(numbers.shape)


if __name__ == "__main__":
    main()
