"""Split of text before byte-level BPE, by the name that a GGUF file gives it.

A file names the split instead of storing it. The patterns are those of the tokenizers that the models were published
with, as in llama.cpp's llama-vocab.cpp (llm_tokenizer_bpe). In a file with another name, texts would get other tokens
than in training, so it is refused. Files from before April 2024 have no name; llama.cpp calls it "default" then.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from baton.text.gguf.header import GgufHeader, GgufRefused

CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
ENDS = r"\s*[\r\n]+|\s+(?!\S)|\s+"
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE_WORD = r"[^\r\n\p{L}\p{N}]?"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{CONTRACTIONS}|{BEFORE_WORD}\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
QWEN2 = rf"{CONTRACTIONS}|{BEFORE_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{ENDS}"
QWEN35 = rf"{CONTRACTIONS}|{BEFORE_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{ENDS}"
TEKKEN = rf"{BEFORE_WORD}{UPPER}*{LOWER}+|{BEFORE_WORD}{UPPER}+{LOWER}*|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDS}"
GPT4O = (
    rf"{BEFORE_WORD}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE_WORD}{UPPER}+{LOWER}*{CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{ENDS}"
)
SEED = rf"{CONTRACTIONS}|{BEFORE_WORD}\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{ENDS}"
DEEPSEEK3 = (
    r"\p{N}{1,3}",
    "[一-龥\u3040-\u309f\u30a0-\u30ff]+",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|"""
    rf"{ENDS}",
)
FALCON = (r"[\p{P}\$\+<=>\^~\|`]+", GPT2, r"[0-9][0-9][0-9]")
DEFAULT = (r"[\p{P}\$\+<=>\^~\|]+", GPT2.removesuffix(r"|\s+"), r"\p{N}+", r"[0-9][0-9][0-9]")


@dataclass(frozen=True, slots=True)
class Split:
    """Patterns of a split, each applied to the pieces of the one before.

    ignores_merges: a piece that is a token remains whole. begins: texts begin with BOS unless the file says no.
    """

    patterns: tuple[str, ...]
    ignores_merges: bool = False
    begins: bool = False


SPLITS: Mapping[str, Split] = {
    **dict.fromkeys(("gpt-2", "phi-2", "mpt", "olmo", "exaone4", "modern-bert", "mellum"), Split((GPT2,))),
    **dict.fromkeys(("jina-v1-en", "jina-v2-code", "roberta-bpe", "trillion", "granite-docling"), Split((GPT2,))),
    **dict.fromkeys(
        ("starcoder", "refact", "command-r", "smollm", "codeshell", "exaone", "minerva-7b"), Split((r"\p{N}", GPT2))
    ),
    **dict.fromkeys(
        ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"),
        Split((LLAMA3,), ignores_merges=True, begins=True),
    ),
    **dict.fromkeys(("dbrx", "smaug-bpe", "chatglm-bpe"), Split((LLAMA3,))),
    **dict.fromkeys(("glm4", "glm5"), Split((LLAMA3,), ignores_merges=True)),
    **dict.fromkeys(
        ("qwen2", "deepseek-r1-qwen", "kormo", "f2llmv2", "stablelm2", "megrez", "hunyuan", "solar-open", "grok-2"),
        Split((QWEN2,)),
    ),
    "qwen35": Split((QWEN35,)),
    "tekken": Split((TEKKEN,), ignores_merges=True, begins=True),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2", "minimax-m2"), Split((GPT4O,))),
    "seed-coder": Split((SEED,)),
    **dict.fromkeys(("deepseek-v3", "hunyuan-dense", "joyai-llm"), Split(DEEPSEEK3)),
    "falcon": Split(FALCON),
    "default": Split(DEFAULT),
}


LLAMA3_TOKENS = 128256  # size of Llama 3's vocabulary, whose first files have no name


def split_of(header: GgufHeader) -> Split:
    """Return the split that a file names or, if it names none, that of its model; else llama.cpp's default.

    Raises: GgufRefused for an unknown name.
    """
    name = header.metadata.get("tokenizer.ggml.pre")
    if name is None and header.architecture.startswith("qwen2"):
        return SPLITS["qwen2"]
    if name is None:
        embeddings = header.tensors.get("token_embd.weight")
        is_llama3 = embeddings is not None and embeddings.shape[0] == LLAMA3_TOKENS
        return SPLITS["llama-bpe" if is_llama3 else "default"]
    split = SPLITS.get(str(name))
    if split is None:
        raise GgufRefused(f"tokenizer.ggml.pre {name!r} is not supported; supported are {', '.join(sorted(SPLITS))}")
    return split


def apply_split(tokenizer: Any, split: Split) -> None:
    """Let a tokenizer of the package `tokenizers`, with a byte-level BPE model, split text in this way."""
    from tokenizers import Regex, pre_tokenizers

    steps = [pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in split.patterns]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*steps, byte_level])
    tokenizer.model.ignore_merges = split.ignores_merges
