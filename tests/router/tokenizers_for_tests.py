"""Tokenizers small enough to predict: every byte is a token of its own, in the two ways that real ones spell bytes."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from baton.router.model.chat_template import ChatTemplate
from baton.router.types.request import Message

END = "<|end|>"
TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'bad' %}"
    "{{ raise_exception('no such role: ' ~ message['content']) }}{% endif %}"
    "[{{ message['role'] }}]{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def byte_level() -> Tokenizer:
    """As GPT-2: a byte is written as one printable character. 256 bytes, then one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return tokenizer


def byte_fallback() -> Tokenizer:
    """As SentencePiece: words begin with ▁, and what has no token of its own is spelled <0xNN>."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)}
    for token in ("▁", "a", "b", "▁a", "▁b", "é", "<unk>"):
        vocab[token] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens([END])
    return tokenizer


def write_model_folder(folder: Path) -> Path:
    """What a router needs of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "chat_template": TEMPLATE}))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "eos_token_id": tokenizer.token_to_id(END)}))
    return folder


def rendered(template: ChatTemplate, messages: Sequence[Message], *arguments: Any, **named: Any) -> str:
    """The prompt, for tests that have no event loop."""
    return asyncio.run(template.render(messages, *arguments, **named))
