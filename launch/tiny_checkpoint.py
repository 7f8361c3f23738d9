"""Tiny checkpoint with random weights, for tests and for machines without a model.

It is a Llama; its output is noise. Its tokenizer has one token per byte, and more if it learns from texts.
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy

HIDDEN, INTERMEDIATE, LAYERS, HEADS, KV_HEADS, HEAD_DIM, CONTEXT_TOKENS = 64, 176, 4, 4, 2, 16, 2048
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = len(SPECIAL) + 256
LEARNED_VOCABULARY = 4096
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_checkpoint(
    folder: Path,
    seed: int = 0,
    context_tokens: int = CONTEXT_TOKENS,
    layers: int = LAYERS,
    texts: Iterable[str] = (),
) -> None:
    """Write config, weights and tokenizer; equal arguments give equal files. `texts`: for the tokenizer to learn."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(folder / "tokenizer.json", texts)
    weights = dict(_weights(numpy.random.default_rng(seed), layers, vocabulary))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    end = SPECIAL.index("<|im_end|>")
    _write_json(folder / "config.json", _config(end, context_tokens, layers, vocabulary))
    _write_json(folder / "generation_config.json", {"eos_token_id": end, "pad_token_id": 0})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": SPECIAL[end],
            "pad_token": SPECIAL[0],
            "model_max_length": context_tokens,
            "chat_template": CHAT_TEMPLATE,
            "clean_up_tokenization_spaces": False,
        },
    )


def _config(end: int, context_tokens: int, layers: int, vocabulary: int) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "float32",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": context_tokens,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": True,
        "vocab_size": vocabulary,
        "bos_token_id": None,
        "eos_token_id": end,
        "pad_token_id": 0,
    }


def _weights(random: numpy.random.Generator, layers: int, vocabulary: int) -> Iterator[tuple[str, numpy.ndarray]]:
    def normal(rows: int, columns: int, spread: float | None = None) -> numpy.ndarray:
        # A wider spread than in trained models, so that the likeliest token leads by a margin.
        spread = (2.0 / (rows + columns)) ** 0.5 * 1.6 if spread is None else spread
        return random.normal(0.0, spread, (rows, columns)).astype(numpy.float32)

    ones = numpy.ones(HIDDEN, numpy.float32)
    yield "model.embed_tokens.weight", normal(vocabulary, HIDDEN, 0.3)
    yield "model.norm.weight", ones
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        yield f"{prefix}.input_layernorm.weight", ones
        yield f"{prefix}.post_attention_layernorm.weight", ones
        yield f"{prefix}.self_attn.q_proj.weight", normal(HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.k_proj.weight", normal(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.v_proj.weight", normal(KV_HEADS * HEAD_DIM, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", normal(HIDDEN, HEADS * HEAD_DIM)
        yield f"{prefix}.mlp.gate_proj.weight", normal(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.up_proj.weight", normal(INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", normal(HIDDEN, INTERMEDIATE)


def _write_tokenizer(path: Path, texts: Iterable[str]) -> int:
    """Write the tokenizer; return the size of its vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *alphabet))}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    if learned := list(texts):
        special, single = list(SPECIAL), pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(
            vocab_size=LEARNED_VOCABULARY, special_tokens=special, initial_alphabet=single, show_progress=False
        )
        tokenizer.train_from_iterator(learned, trainer)
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
