"""Names of the language model's tensors in checkpoints, which may also have parts for images or sound."""

import re

ELSEWHERE = ("backbone.", "model.language_model.")
"""Prefixes in place of `model.`: of Nemotron-H, and of text parts with a config.json of their own."""
_BODY = re.compile(
    r"(?:thinker\.)?(?:model\.)?(?:(?:language_model|text_model|llm)\.)?(?:(?:model|backbone)\.)?(?P<name>.+)"
)
_PARTS = re.compile(r"(?:embed_tokens|embeddings|layers|norm|norm_f|embedding_norm|\w*per_layer\w*|altup_\w+)\..+")
_HEAD = re.compile(r"lm_head\..+")


def text_name(name: str) -> str | None:
    """Return a tensor's name in a checkpoint of the language model alone; None if it belongs to another part.

    `language_model.model.norm.weight` (LLaVA), `model.language_model.norm.weight` (transformers 5) and
    `model.text_model.norm.weight` (Idefics) are all `model.norm.weight`.
    """
    found = _BODY.fullmatch(name)
    inner = "" if found is None else found["name"]
    if _HEAD.fullmatch(inner):
        return inner
    return f"model.{inner}" if _PARTS.fullmatch(inner) else None


def other_part(name: str) -> str:
    """Return the module outside the language model to which a tensor belongs, such as `vision_tower`."""
    return name.removeprefix("model.").partition(".")[0]
