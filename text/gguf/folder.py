"""Checkpoint folder of a GGUF file: config.json, tokenizer and chat template from its metadata, and links to weights.

Folders are kept in a cache, by name of the file and digest of its path, size and time, so that transformers, which
converts the tokenizer, is imported only the first time.
"""

import contextlib
import hashlib
import json
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from baton.text.gguf.config import ENCODERS, config_of
from baton.text.gguf.encoder_tokenizers import BYTE_LEVEL, encoder_tokenizer
from baton.text.gguf.encoders import write_pooling
from baton.text.gguf.header import SUFFIX, GgufHeader, GgufRefused, has_gguf_suffix, parts_of, read_model_header
from baton.text.gguf.pre_tokenizers import apply_split, split_of
from baton.text.gguf.rerankers import HEAD, write_reranker
from baton.text.host.cache import cache_folder
from baton.text.host.files import reading

FORMAT = 4  # number of the folders' format, to be increased whenever their content changes
ENDS = ("eos_token_id", "eot_token_id", "eom_token_id")
NAMED_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>"),
    *("<|endoftext|>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>"),
    *("<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<｜end▁of▁sentence｜>", "[e~["),
)
"""Texts of tokens that end an answer even if the metadata do not name them, as in llama.cpp's llama-vocab.cpp."""
SENTENCE_PIECE = "llama"  # value of tokenizer.ggml.model
TOKENIZERS_OF = {"gemma3n": "gemma3", "gemma-embedding": "gemma3"}
"""Architectures whose SentencePiece vocabulary transformers would read as Llama's, and one that it reads rightly."""


def folder_of(file: Path, cache: Path | None = None) -> Path:
    """Return the checkpoint folder of a GGUF file, or of the split model that it is a part of. Raises: GgufRefused.

    `cache`: folder in which it is created; None: the cache of GGUF files.
    """
    file = file.expanduser().absolute()  # not resolved: the hub's cache has links to files without suffix
    with reading(file, GgufRefused):
        parts = parts_of(file)
        folder = (cache or cache_folder("gguf")) / f"{file.stem}-{_digest(parts)}"
        if (folder / "config.json").is_file() and all((folder / _link(part)).exists() for part in parts):
            return folder
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".making-") as scratch:
            made = Path(scratch) / folder.name
            made.mkdir()
            _write(parts, made)
            _put(made, folder)
        _remove_outdated(folder, parts)
        return folder


def _link(part: Path) -> str:
    """Return the name of the link to a file: its own name, with the usual suffix."""
    return part.with_suffix(SUFFIX).name if has_gguf_suffix(part.name) else f"{part.name}{SUFFIX}"


def _digest(parts: Iterable[Path]) -> str:
    digest = hashlib.sha256(f"{FORMAT}".encode())
    for part in parts:
        status = part.stat()
        digest.update(f"{part} {status.st_size} {status.st_mtime_ns}".encode())
    return digest.hexdigest()[:12]


def _put(made: Path, folder: Path) -> None:
    """Move a finished folder to its place, unless another process was faster."""
    try:
        made.rename(folder)
    except OSError:
        if not (folder / "config.json").is_file():
            raise


def _remove_outdated(new: Path, parts: Iterable[Path]) -> None:
    """Remove the other folders of earlier contents of `parts`, and of files that no longer exist."""
    given = set(parts)
    for folder in new.parent.iterdir():
        with contextlib.suppress(FileNotFoundError):  # another process removes folders too
            links = (
                [path for path in folder.iterdir() if path.is_symlink()] if folder.is_dir() and folder != new else []
            )
            if any(link.readlink() in given or not link.exists() for link in links):
                shutil.rmtree(folder)


def _write(parts: tuple[Path, ...], folder: Path) -> None:
    header = read_model_header(parts[0])
    config, is_encoder = config_of(header), header.architecture in ENCODERS
    uses_own = header.architecture in TOKENIZERS_OF or not is_encoder
    for part in parts:
        (folder / _link(part)).symlink_to(part)
    first = folder / _link(parts[0])
    tokenizer = _tokenizer(first, header) if uses_own else encoder_tokenizer(first, header)
    tokenizer.chat_template = tokenizer.chat_template or None
    fields: dict[str, Any] = {}
    if HEAD in header.tensors and not is_encoder:
        fields = write_reranker(header, folder, tokenizer)
    else:
        write_pooling(header, folder)
    tokenizer.save_pretrained(folder)
    ids = {} if is_encoder else _token_ids(header, tokenizer)
    if ids:
        _write_json(folder / "generation_config.json", ids)
    _write_json(folder / "config.json", {**config, **ids, **fields})  # last, since it marks a complete folder


def _token_ids(header: GgufHeader, tokenizer: Any) -> dict[str, Any]:
    """Return the ids of padding, and of the tokens that begin a text and that end an answer."""
    stated = [header.metadata.get(f"tokenizer.ggml.{name}") for name in ENDS]
    vocabulary = tokenizer.get_vocab()
    named = [vocabulary.get(text) for text in NAMED_ENDS]
    ends = [token_id for token_id in dict.fromkeys([*stated, *named]) if isinstance(token_id, int)]
    begin, padding = (header.metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "padding"))
    return {"bos_token_id": begin, "eos_token_id": ends or None, "pad_token_id": padding}


def _tokenizer(file: Path, header: GgufHeader) -> Any:
    """Return transformers' tokenizer of a file. Raises: GgufRefused."""
    from transformers import PreTrainedTokenizerFast
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    kind = header.metadata.get("tokenizer.ggml.model")
    if kind == SENTENCE_PIECE and (known := TOKENIZERS_OF.get(header.architecture)) is not None:
        _, vocabulary, stated = get_gguf_tokenizer(str(file))
        backend, _ = convert_gguf_tokenizer(known, vocabulary)
        return PreTrainedTokenizerFast(tokenizer_object=backend, **stated)
    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(file.parent), gguf_file=file.name)
    if kind == BYTE_LEVEL:
        split = split_of(header)
        apply_split(tokenizer.backend_tokenizer, split)
        if "tokenizer.ggml.add_bos_token" not in header.metadata and split.begins:
            tokenizer.add_bos_token = True
    return tokenizer


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
