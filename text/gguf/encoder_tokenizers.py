"""Tokenizers of GGUF files of encoders, with the special tokens around a text and around a pair of texts."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.text.gguf.header import GgufHeader, GgufRefused
from baton.text.gguf.pre_tokenizers import apply_split, split_of

WORD_PIECE, UNIGRAM, BYTE_LEVEL = "bert", "t5", "gpt2"  # values of tokenizer.ggml.model
SPECIAL = {
    "cls_token": "cls",
    "sep_token": "seperator",  # as the key is spelled
    "unk_token": "unknown",
    "pad_token": "padding",
    "mask_token": "mask",
}
"""Names of special tokens in transformers, and in keys of GGUF files."""
CONTROL = 3  # value of token_type
SPACE = "▁"
USES_TYPES = ["input_ids", "token_type_ids", "attention_mask"]


def encoder_tokenizer(file: Path, header: GgufHeader) -> Any:
    """Return transformers' tokenizer of a file. Raises: GgufRefused."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import get_gguf_tokenizer
    from transformers.integrations.gguf.gguf_tokenizer_mapping import add_gguf_special_tokens

    _, vocabulary, _ = get_gguf_tokenizer(str(file))
    kind = header.metadata.get("tokenizer.ggml.model")
    if kind not in _MAKERS:
        raise GgufRefused(f"tokenizer.ggml.model {kind!r} is not supported; supported are {', '.join(_MAKERS)}")
    if kind == WORD_PIECE:
        vocabulary = {**vocabulary, "tokens": _without_phantom_spaces(vocabulary)}
    special = _special_tokens(header, vocabulary["tokens"])
    made = add_gguf_special_tokens(_MAKERS[kind](header, vocabulary, special), vocabulary)
    return PreTrainedTokenizerFast(
        tokenizer_object=made.backend_tokenizer,
        **special,
        model_max_length=header.metadata.get(f"{header.architecture}.context_length"),
        model_input_names=USES_TYPES if kind == WORD_PIECE else [USES_TYPES[0], USES_TYPES[-1]],
    )


def _special_tokens(header: GgufHeader, tokens: list[str]) -> dict[str, str]:
    """Return the texts of special tokens by their names. BERT's, or a text's ends, stand in for missing ones."""
    ids = {name: header.metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in SPECIAL.items()}
    named = {name: f"[{name.partition('_')[0].upper()}]" for name, token_id in ids.items() if token_id is None}
    ids |= {name: tokens.index(text) for name, text in named.items() if text in tokens}
    for name, key in (("cls_token", "bos"), ("sep_token", "eos")):
        ids[name] = header.metadata.get(f"tokenizer.ggml.{key}_token_id") if ids[name] is None else ids[name]
        if ids[name] is None:
            raise GgufRefused(f"has neither tokenizer.ggml.{SPECIAL[name]}_token_id nor {key}_token_id")
    return {name: tokens[token_id] for name, token_id in ids.items() if isinstance(token_id, int)}


def _without_phantom_spaces(vocabulary: Mapping[str, Any]) -> list[str]:
    """Return the tokens as BERT spells them: `##` before those that continue a word, nothing before other ones."""
    tokens = vocabulary["tokens"]
    types = vocabulary.get("token_type") or [0] * len(tokens)
    return [
        token if kind == CONTROL else token[1:] if token.startswith(SPACE) and token != SPACE else f"##{token}"
        for token, kind in zip(tokens, types, strict=True)
    ]


def _word_piece(header: GgufHeader, vocabulary: Mapping[str, Any], special: Mapping[str, str]) -> Any:
    """Return BERT's tokenizer. A file that does not say so is of lower-cased text if no token has a capital letter."""
    from transformers.models.bert.tokenization_bert import BertTokenizer

    tokens = vocabulary["tokens"]
    words = [token for token in tokens if not token.startswith("[")]
    is_cased = any("A" <= letter <= "Z" for token in words for letter in token)
    return BertTokenizer(
        vocab={token: token_id for token_id, token in enumerate(tokens)},
        do_lower_case=header.metadata.get("tokenizer.ggml.normalizer.lowercase", not is_cased),
        strip_accents=header.metadata.get("tokenizer.ggml.normalizer.strip_accents"),
        **special,
    )


def _unigram(header: GgufHeader, vocabulary: Mapping[str, Any], special: Mapping[str, str]) -> Any:
    from transformers.models.xlm_roberta.tokenization_xlm_roberta import XLMRobertaTokenizer

    charsmap = vocabulary.get("precompiled_charsmap")
    return XLMRobertaTokenizer(
        vocab=list(zip(vocabulary["tokens"], vocabulary["scores"], strict=True)),
        add_prefix_space=bool(vocabulary.get("add_prefix_space", True)),
        _spm_precompiled_charsmap=None if charsmap is None else bytes(byte & 0xFF for byte in charsmap),
        bos_token=special["cls_token"],
        eos_token=special["sep_token"],
        **special,
    )


def _byte_level(header: GgufHeader, vocabulary: Mapping[str, Any], special: Mapping[str, str]) -> Any:
    """Return the tokenizer of RoBERTa, or of ModernBERT."""
    from tokenizers import processors
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer

    backend, _ = convert_gguf_tokenizer(header.architecture, dict(vocabulary))
    apply_split(backend, split_of(header))
    first, last = special["cls_token"], special["sep_token"]
    between = [last] if header.architecture == "modern-bert" else [last, last]
    backend.post_processor = processors.TemplateProcessing(
        single=[first, "$A", last],
        pair=[first, "$A", *between, "$B", last],
        special_tokens=[(token, backend.token_to_id(token)) for token in (first, last)],
    )
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


_MAKERS = {WORD_PIECE: _word_piece, UNIGRAM: _unigram, BYTE_LEVEL: _byte_level}
