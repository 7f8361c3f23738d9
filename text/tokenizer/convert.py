"""Conversion of a checkpoint's tokenizer files by transformers to one tokenizer.json and the facts around it.

`python -m baton.text.tokenizer.convert FOLDER` writes the conversion to its standard output, or exits with 1 and writes
the reason. It does without torch, whose import would take seconds.
"""

import base64
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from baton.text.generation_config import read_generation_config
from baton.text.host.files import MAX_TOKENIZER_BYTES, FileRefused, parse_json, read_file, read_json, reading
from baton.text.pooler_files import BEHIND_PADDING, ModelKind, model_kind, read_modules

MODULE = "transformers.models.auto.tokenization_auto"
"""Module that a conversion imports. Where it is loaded already, a conversion takes no new process."""
READ_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})
VOCABULARIES = frozenset({".model", ".tiktoken"})
TEXT_FILES = frozenset({"vocab.txt", "merges.txt"})
TEMPLATE, TEMPLATES = "chat_template.jinja", "additional_chat_templates"
COMMON_FILES = ("tokenizer.json", "tekken.json", "tokenizer.model", "tiktoken.model")
"""Files with a vocabulary that every tokenizer class of transformers reads, in addition to its own files."""


DEFAULT_PADDING = 1  # id of the padding token of encoders in BEHIND_PADDING
NO_LIMIT = 1 << 31
"""Number of tokens that no text has. transformers takes 1e30 for no limit."""


class TokenizerUnusable(FileRefused):
    """Error: transformers cannot read the tokenizer, or only by code of the checkpoint."""


def convert(folder: Path) -> bytes:
    """Return a line of JSON with the fields of `CheckpointTokenizer`, followed by the text of a tokenizer.json.

    Raises: TokenizerUnusable, and whatever transformers and tokenizers raise for malformed files.
    """
    if not has_tokenizer(folder):
        raise TokenizerUnusable(f"there is no tokenizer: no {', '.join(COMMON_FILES)}, vocab.json or vocab.txt")
    try:
        tokenizer = load(folder)
    except TokenizerUnusable:
        raise
    except Exception:  # foreign files are read here; a damaged one explains the error better than its consequence
        check_files(folder)
        raise
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise TokenizerUnusable(f"{type(tokenizer).__name__} is not supported: it has no tokenizer.json; save one")
    own = {name for name in type(tokenizer).vocab_files_names.values() if isinstance(name, str)}
    names = sorted({*COMMON_FILES, *own, *_json(folder / "tokenizer_config.json").get("fast_tokenizer_files", ())})
    if not any((folder / name).is_file() for name in names):
        raise TokenizerUnusable(f"there is no tokenizer: none of {', '.join(names)}")
    backend.no_truncation()
    backend.no_padding()
    max_text_tokens = _apply_sentence_transformers(tokenizer, folder)
    facts = {
        "special_tokens": tokenizer.special_tokens_map,
        "templates": _checked(_templates(tokenizer.chat_template, folder), folder),
        "end_token_ids": sorted(_end_token_ids(tokenizer, folder)),
        "cleans_spaces": _cleans_spaces(tokenizer),
        "splits_special_tokens": bool(tokenizer.split_special_tokens),
        "max_text_tokens": max_text_tokens,
        "max_pair_tokens": _pair_limit(tokenizer, _json(folder / "config.json")),
        "truncation_side": tokenizer.truncation_side,
    }
    tokenizer_json: str = backend.to_str()
    return json.dumps(facts).encode() + b"\n" + tokenizer_json.encode()


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a file with a vocabulary."""
    names = (*COMMON_FILES, "vocab.json", "vocab.txt")
    return any(path.suffix in VOCABULARIES or path.name in names for path in folder.iterdir())


def read_files(folder: Path) -> list[Path]:
    """Return the files of a folder that transformers may read for a tokenizer. Indexes of weights are not among them.

    Those of its own folders are the chat templates and the settings of sentence-transformers.
    """
    paths = [*folder.iterdir(), *(folder / TEMPLATES).glob("*.jinja"), *folder.glob("*/sentence_bert_config.json")]
    wanted = (path for path in paths if path.suffix in READ_SUFFIXES and not path.name.endswith(".index.json"))
    return sorted(path for path in wanted if path.is_file())


def check_files(folder: Path) -> None:
    """Raise TokenizerUnusable, which names the file, if one of a folder's files is empty or cut short."""
    from tokenizers import Tokenizer

    for path in read_files(folder):
        if path.suffix == ".txt" and path.name not in TEXT_FILES:
            continue
        with reading(path, TokenizerUnusable):
            content = _content(path)
            if path.suffix == ".json":
                parse_json(path, content)
            elif path.suffix in (".jinja", ".txt"):
                content.decode()
            if path.name == "tokenizer.json":
                Tokenizer.from_file(str(path))


def _content(path: Path) -> bytes:
    content = read_file(path, MAX_TOKENIZER_BYTES)
    if not content.strip():
        raise TokenizerUnusable(f"{path}: is empty")
    return content


def load(folder: Path) -> Any:
    """Return transformers' tokenizer. A tokenizer.json suffices if its class is code of the checkpoint.

    Raises: TokenizerUnusable, and whatever transformers and tokenizers raise for malformed files.
    """
    with _without_packages():
        return _load(folder)


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    try:
        return AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False)
    except ValueError as error:
        if "trust_remote_code" not in str(error):
            raise
        if not (folder / "tokenizer.json").is_file():
            raise TokenizerUnusable(
                "its class is code of the checkpoint, which never runs; save a tokenizer.json"
            ) from error
        return PreTrainedTokenizerFast.from_pretrained(str(folder))


def _templates(stated: Any, folder: Path) -> dict[str, str]:
    """Return the chat templates by name. A processor's chat_template.json counts if the tokenizer has no template."""
    if stated is None:
        stated = _json(folder / "chat_template.json").get("chat_template")
    if isinstance(stated, list):
        return {each["name"]: each["template"] for each in stated}
    return dict(stated) if isinstance(stated, dict) else {} if stated is None else {"default": stated}


def _checked(templates: dict[str, str], folder: Path) -> dict[str, str]:
    """Check the syntax of chat templates. Raises: TokenizerUnusable, which names the file of a broken one.

    They are not compiled, since that computes constants, without a limit.
    """
    environment = import_module("transformers.utils.chat_template_utils")._compile_jinja_template("").environment
    for name, source in templates.items():
        own = TEMPLATE if name == "default" else f"{TEMPLATES}/{name}.jinja"
        stating = [each for each in (own, "tokenizer_config.json", "chat_template.json") if (folder / each).is_file()]
        with reading(folder / (stating[0] if stating else own), TokenizerUnusable):
            if own in stating and not source.strip():
                raise TokenizerUnusable("is empty")
            environment.parse(source)
    return templates


def _end_token_ids(tokenizer: Any, folder: Path) -> Iterator[int]:
    """Yield the end tokens of config.json, generation_config.json and the tokenizer.

    If neither file states one, that of transformers' configuration class counts, as for `generate`.
    """
    if (own := tokenizer.eos_token_id) is not None and tokenizer.convert_ids_to_tokens(own) == tokenizer.eos_token:
        yield own
    config, generation = _json(folder / "config.json"), read_generation_config(folder, TokenizerUnusable)
    own, text = config.get("eos_token_id"), config.get("text_config")
    if own is None and isinstance(text, dict):
        own = text.get("eos_token_id")
    yield from [*_ids(own), *_ids(generation.get("eos_token_id"))] or _ids(_default_end(folder))


def _default_end(folder: Path) -> Any:
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=False)
    except (ValueError, OSError, KeyError):
        return None
    return getattr(config.get_text_config(decoder=True), "eos_token_id", None)


def _ids(value: Any) -> list[int]:
    return [each for each in (value if isinstance(value, list) else [value]) if type(each) is int and each >= 0]


def _apply_sentence_transformers(tokenizer: Any, folder: Path) -> int | None:
    """Let the tokenizer of a folder of sentence-transformers lower-case texts if its file says so.

    Return the number of tokens, including special tokens, to which that library cuts texts; None for no limit.
    """
    from tokenizers import normalizers

    path = folder / "modules.json"
    modules = read_modules(path) if path.is_file() else []
    module = next((each for each in modules if str(each.get("type")).endswith("Transformer")), None)
    if module is None:
        return None
    stated = _json(folder / str(module.get("path") or "") / "sentence_bert_config.json")
    backend = tokenizer.backend_tokenizer
    if stated.get("do_lower_case"):
        rest = [] if backend.normalizer is None else [backend.normalizer]
        backend.normalizer = normalizers.Sequence([normalizers.Lowercase(), *rest])
    limit = stated.get("max_seq_length")
    return _limit(tokenizer, _json(folder / "config.json")) if limit is None else _known(limit)


def _pair_limit(tokenizer: Any, config: dict[str, Any]) -> int | None:
    """Return the number of tokens to which sentence-transformers' CrossEncoder cuts a pair; None for no limit."""
    return _limit(tokenizer, config) if model_kind(config) is ModelKind.RERANKER else None


def _limit(tokenizer: Any, config: dict[str, Any]) -> int | None:
    positions, padding = config.get("max_position_embeddings"), config.get("pad_token_id", DEFAULT_PADDING)
    if not isinstance(positions, int) or positions <= 0:
        return _known(tokenizer.model_max_length)
    if config.get("model_type") in BEHIND_PADDING and isinstance(padding, int):
        positions -= padding + 1
    return _known(min(tokenizer.model_max_length, positions))


def _known(limit: float) -> int | None:
    return int(limit) if 0 < limit < NO_LIMIT else None


def _cleans_spaces(tokenizer: Any) -> bool:
    """Return whether transformers removes spaces before punctuation from decoded text."""
    forced = getattr(tokenizer, "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output", False)
    is_bpe = type(tokenizer.backend_tokenizer.model).__name__ == "BPE"
    return bool(tokenizer.clean_up_tokenization_spaces and (forced or not is_bpe))


def _json(path: Path) -> dict[str, Any]:
    return read_json(path, TokenizerUnusable, dict) if path.is_file() else {}


@contextmanager
def _without_packages() -> Iterator[None]:
    """Let transformers read SentencePiece's and tiktoken's files without these packages, which it needs for no more."""
    slow = import_module("transformers.convert_slow_tokenizer")

    def open_model(self: Any, model: str) -> None:
        self.proto = slow.import_protobuf().ModelProto()
        with reading(Path(model), TokenizerUnusable):
            self.proto.ParseFromString(_content(Path(model)))

    own: list[tuple[type, str, Callable[..., Any]]] = [
        (slow.SentencePieceExtractor, "__init__", open_model),
        (slow.TikTokenConverter, "load_tiktoken_bpe", staticmethod(_tiktoken_ranks)),
    ]
    theirs = [(owner, name, vars(owner)[name]) for owner, name, _ in own]
    try:
        for each in own:
            setattr(*each)
        yield
    finally:
        for each in theirs:
            setattr(*each)


def _tiktoken_ranks(path: str) -> dict[bytes, int]:
    """Return tokens and their ranks. A line has a token in base64, a space and its rank."""
    with reading(Path(path), TokenizerUnusable):
        pairs = (line.split() for line in _content(Path(path)).splitlines() if line)
        return {base64.b64decode(token): int(rank) for token, rank in pairs}


def _main(folder: str) -> int:
    # transformers takes modules that cannot be imported for absent. mistral_common would read tekken.json by itself.
    for name in ("torch", "mistral_common"):
        sys.modules[name] = None  # type: ignore[assignment]
    try:
        sys.stdout.buffer.write(convert(Path(folder)))
    except Exception as error:  # noqa: BLE001 -- of a foreign file, and reported to the process that asked
        sys.stdout.write(f"{error}" if isinstance(error, FileRefused) else f"{type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1]))
