"""Fields of config.json of GGUF files of encoders, and the pooling of any GGUF file."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.text.gguf.header import GgufHeader, GgufRefused
from baton.text.gguf.metadata import DEFAULT_ROPE_THETA, EMBEDDING, GgufMetadata, dtype_of, norm_epsilon
from baton.text.pooler_files import IDENTITY

POSITIONS, TYPES, HEAD = "position_embd.weight", "token_types.weight", "cls.output.weight"
BERT_FAMILIES = {"bert": "bert", "gpt2": "roberta", "t5": "xlm-roberta"}
"""Kinds of tokenizers of files that name the architecture bert, and the family with such a tokenizer."""
HEADS = {
    "roberta": "RobertaForSequenceClassification",
    "xlm-roberta": "XLMRobertaForSequenceClassification",
}
"""Architecture of a file with a classification head, by family."""
DEFAULT_PADDING = 1  # of RoBERTa; other families do not use it
GLOBAL_EVERY = 3  # every third layer of ModernBERT has no window unless the file says otherwise
POOLING = {1: "mean", 2: "cls", 3: "lasttoken"}  # values of pooling_type
DENSE = {"2_Dense": "dense_2.weight", "3_Dense": "dense_3.weight"}
"""Folders of linear layers after the pooling in sentence-transformers, and their tensors in GGUF files."""


def bert_fields(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of BERT, RoBERTa or XLM-RoBERTa.

    Files of the latter two have no rows for the positions up to the padding token's id, which no token has.
    """
    family = BERT_FAMILIES.get(str(data.header.metadata.get("tokenizer.ggml.model")), "bert")
    if family == "bert" and data.has(HEAD):
        raise GgufRefused(f"{HEAD} of a BERT is not supported: converters leave out the pooler that it reads")
    return {
        **_sizes(data, family),
        "max_position_embeddings": data.rows(POSITIONS) + (0 if family == "bert" else _padding(data) + 1),
        "type_vocab_size": data.rows(TYPES),
        "layer_norm_eps": norm_epsilon(data),
        "hidden_act": "gelu",
    }


def nomic_bert_fields(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of Nomic's BERT."""
    return {
        **_sizes(data, "nomic_bert"),
        "max_position_embeddings": int(data["context_length"]),
        "type_vocab_size": data.rows(TYPES),
        "layer_norm_eps": norm_epsilon(data),
        "hidden_act": "silu",
        "rope_parameters": _rope(data, "rope.freq_base"),
    }


def modern_bert_fields(data: GgufMetadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of ModernBERT."""
    every = int(data.get("attention.sliding_window_pattern") or GLOBAL_EVERY)
    kinds = ["sliding_attention" if layer % every else "full_attention" for layer in range(data.block_count)]
    return {
        **_sizes(data, "modernbert"),
        "max_position_embeddings": int(data["context_length"]),
        "norm_eps": norm_epsilon(data),
        "hidden_activation": data.get("hidden_activation") or "gelu",
        "local_attention": int(data["attention.sliding_window"]),
        "layer_types": kinds,
        "rope_parameters": {
            "full_attention": _rope(data, "rope.freq_base"),
            "sliding_attention": _rope(data, "rope.freq_base_swa"),
        },
    }


def _sizes(data: GgufMetadata, family: str) -> dict[str, Any]:
    fields = {
        "model_type": family,
        "vocab_size": data.rows(EMBEDDING),
        "hidden_size": int(data["embedding_length"]),
        "intermediate_size": int(data["feed_forward_length"]),
        "num_hidden_layers": data.block_count,
        "num_attention_heads": data.positive("attention.head_count"),
        "pad_token_id": _padding(data),
        "dtype": dtype_of(data.header),
    }
    if not data.has(HEAD):
        return fields
    if family not in HEADS:
        raise GgufRefused(
            f"{HEAD} of a {family} is not supported; give a file without it, or one of {', '.join(HEADS)}"
        )
    labels = {str(index): f"LABEL_{index}" for index in range(data.rows(HEAD))}
    return {**fields, "architectures": [HEADS[family]], "id2label": labels}


def _padding(data: GgufMetadata) -> int:
    stated = data.header.metadata.get("tokenizer.ggml.padding_token_id")
    return stated if isinstance(stated, int) else DEFAULT_PADDING


def _rope(data: GgufMetadata, key: str) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": float(data.get(key) or DEFAULT_ROPE_THETA)}


def write_pooling(header: GgufHeader, folder: Path) -> None:
    """Write the files of sentence-transformers if the file states a pooling. Raises: GgufRefused.

    Vectors are normalised, as llama.cpp does: the file does not say.
    """
    stated = header.metadata.get(f"{header.architecture}.pooling_type")
    if stated is None or HEAD in header.tensors:
        return
    if not isinstance(stated, int) or stated not in POOLING:
        known = ", ".join(f"{value} ({name})" for value, name in POOLING.items())
        raise GgufRefused(f"{header.architecture}.pooling_type {stated} is not supported; supported are {known}")
    dense = {path: header.tensors[name] for path, name in DENSE.items() if name in header.tensors}
    paths = ("", "1_Pooling", *dense, f"{len(dense) + 2}_Normalize")
    kinds = ("Transformer", *(path.partition("_")[2] for path in paths[1:]))
    modules = [
        {"idx": index, "name": str(index), "path": path, "type": f"models.{kind}"}
        for index, (path, kind) in enumerate(zip(paths, kinds, strict=True))
    ]
    settings: dict[str, dict[str, Any]] = {"1_Pooling": {"pooling_mode": POOLING[stated]}}
    for path, tensor in dense.items():
        outputs, inputs = tensor.shape
        sizes = {"in_features": inputs, "out_features": outputs, "bias": False}
        settings[path] = {**sizes, "activation_function": IDENTITY}
    (folder / "modules.json").write_text(json.dumps(modules))
    for path, content in settings.items():
        (folder / path).mkdir()
        (folder / path / "config.json").write_text(json.dumps(content))
