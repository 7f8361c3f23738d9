"""Tokenizer of a checkpoint as transformers reads it, without importing transformers. Conversions are cached.

The cache is keyed by the content of all files that transformers may read, and by the versions of the libraries.
"""

import hashlib
import importlib.util
import json
import logging
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from baton import child_environment
from baton.text.host.cache import cache_folder
from baton.text.host.files import MAX_TOKENIZER_BYTES, FileRefused, check_file, reads
from baton.text.tokenizer import convert as converter

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

CONVERTER = "baton.text.tokenizer.convert"
CONVERT_S = 300.0  # maximum time of a conversion; Gemma's takes 10 s on a busy machine
DEFAULT, WITH_TOOLS = "default", "tool_use"
"""Names of chat templates. The second one is rendered if the request has tools."""

logger = logging.getLogger(__name__)


class TokenizerRefused(FileRefused, ValueError):
    """Error: the tokenizer of a checkpoint cannot be read. The message names the folder and the reason."""


@dataclass(frozen=True, slots=True)
class CheckpointTokenizer:
    """Tokenizer, chat templates and end tokens of a checkpoint."""

    json: str  # content of a tokenizer.json
    special_tokens: Mapping[str, str]  # text of each token that templates refer to by a name such as `bos_token`
    templates: Mapping[str, str]  # sources of chat templates by name
    end_token_ids: frozenset[int]  # of config.json, generation_config.json and the tokenizer
    cleans_spaces: bool  # whether decoding removes spaces before punctuation
    splits_special_tokens: bool  # whether texts of special tokens in a prompt are split like other text
    max_text_tokens: int | None  # number of tokens to which sentence-transformers cuts a text to embed
    max_pair_tokens: int | None  # number of tokens to which sentence-transformers cuts a reranker's pair of texts
    truncation_side: str  # end of the text at which it is cut: left or right

    def tokenizer(self) -> "Tokenizer":
        """Return a new tokenizer without truncation and padding."""
        from tokenizers import Tokenizer  # takes long to import, and not every process needs it

        made = Tokenizer.from_str(self.json)
        made.encode_special_tokens = self.splits_special_tokens
        return made

    def cut(self, tokenizer: "Tokenizer", text: str) -> tuple[int, ...]:
        """Return the token ids of a text to embed, with special tokens; at most `max_text_tokens`."""
        encoding = tokenizer.encode(text, add_special_tokens=False)
        if self.max_text_tokens is not None:
            room = max(self.max_text_tokens - tokenizer.num_special_tokens_to_add(False), 0)
            encoding.truncate(room, direction=self.truncation_side)
        return tuple(tokenizer.post_process(encoding, None, True).ids)

    def pair(self, tokenizer: "Tokenizer", query: str, document: str) -> "Encoding":
        """Return the tokens of a reranker's pair of texts, with special tokens; at most `max_pair_tokens`."""
        whole = tokenizer.encode(query, document)
        if self.max_pair_tokens is None or len(whole) <= self.max_pair_tokens:
            return whole
        first, second = (tokenizer.encode(text, add_special_tokens=False) for text in (query, document))
        room = max(self.max_pair_tokens - tokenizer.num_special_tokens_to_add(True), 0)
        for text, tokens in zip((first, second), longest_first(len(first), len(second), room), strict=True):
            text.truncate(tokens, direction=self.truncation_side)
        return tokenizer.post_process(first, second, True)


def longest_first(first: int, second: int, room: int) -> tuple[int, int]:
    """Return the tokens of two texts that stay if the longer one loses its last token until both fit into `room`.

    An odd token stays with the longer text, or with the second of equally long ones, as in the package `tokenizers`.
    """
    shorter = min(first, second, room // 2)
    longer = min(max(first, second), room - shorter)
    return (longer, shorter) if first > second else (shorter, longer)


@reads(TokenizerRefused)
def read_tokenizer(folder: Path) -> CheckpointTokenizer:
    """Return the tokenizer of the checkpoint in `folder`. A first call blocks for seconds. Raises: TokenizerRefused."""
    if (folder / "tokenizer.json").exists():
        check_file(folder / "tokenizer.json", MAX_TOKENIZER_BYTES)
    if converter.MODULE in sys.modules:  # transformers is here: a conversion takes milliseconds
        return _parsed(converter.convert(folder))
    cached = cache_folder("tokenizers") / _digest(folder)
    with suppress(OSError, ValueError, KeyError):
        return _parsed(cached.read_bytes())
    converted = _converted(folder)
    _store(cached, converted)
    return _parsed(converted)


def _parsed(converted: bytes) -> CheckpointTokenizer:
    facts, _, tokenizer_json = converted.partition(b"\n")
    fields = json.loads(facts)
    return CheckpointTokenizer(
        json=tokenizer_json.decode(),
        special_tokens=fields["special_tokens"],
        templates=fields["templates"],
        end_token_ids=frozenset(fields["end_token_ids"]),
        cleans_spaces=fields["cleans_spaces"],
        splits_special_tokens=fields["splits_special_tokens"],
        max_text_tokens=fields["max_text_tokens"],
        max_pair_tokens=fields["max_pair_tokens"],
        truncation_side=fields["truncation_side"],
    )


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for text in (version("transformers"), version("tokenizers"), Path(converter.__file__).read_text(encoding="utf-8")):
        digest.update(f"{len(text)} {text}".encode())
    for path in converter.read_files(folder):
        status = path.stat()
        is_large = status.st_size > MAX_TOKENIZER_BYTES
        content = f"{status.st_size} {status.st_mtime_ns}".encode() if is_large else path.read_bytes()
        digest.update(f"{len(content)} {path.relative_to(folder)} ".encode(errors="surrogateescape") + content)
    return digest.hexdigest()


def _converted(folder: Path) -> bytes:
    """Convert in another process, since this one may have to do without torch. Raises: TokenizerRefused."""
    if importlib.util.find_spec("transformers") is None:
        raise TokenizerRefused(f"{folder}: reading its tokenizer needs transformers; pip install transformers")
    environment = child_environment() | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-P", "-m", CONVERTER, str(folder.resolve())]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, timeout=CONVERT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise TokenizerRefused(f"{folder}: reading its tokenizer takes more than {CONVERT_S:g} s") from error
    if done.returncode != 0:
        reason = done.stdout.decode(errors="replace") or done.stderr.decode(errors="replace").strip()[-500:]
        if reason.startswith(str(folder.resolve())):  # it names the file
            raise TokenizerRefused(reason)
        raise TokenizerRefused(f"{folder}: its tokenizer cannot be read: {reason or f'exit code {done.returncode}'}")
    return done.stdout


def _store(path: Path, converted: bytes) -> None:
    """Write a cache entry. A failure only makes the next start slower."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as scratch:
            scratch.write(converted)
        Path(scratch.name).rename(path)
    except OSError as error:
        logger.warning("tokenizer not cached: %s: %s; the next start converts it again", path.parent, error.strerror)
