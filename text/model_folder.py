"""Find the checkpoint folder of a model given as folder, GGUF file or Hugging Face id, for server, planner and offline.

A Hugging Face id may name one of several GGUF files, as for llama.cpp and Ollama: `owner/name:Q4_K_M`, or
`owner/name:file.gguf`. A path may also be in the caches of the hub and of Ollama. Formats of weights that run code when
they are loaded are never downloaded.
"""

import glob
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from baton.text.gguf.folder import folder_of
from baton.text.gguf.header import PART, PATTERN, SUFFIX, begins_as_gguf, has_gguf_suffix
from baton.text.host.files import FileRefused, read_file, read_json, reading
from baton.text.named_models import NAMED, fetch_named
from baton.text.tokenizer.checkpoint_tokenizer import read_tokenizer
from baton.text.tokenizer.convert import has_tokenizer
from baton.text.weight_files import (
    CONVERT,
    INDEX_FILE,
    NOT_READ,
    PICKLED,
    SAFETENSORS,
    SINGLE_FILE,
    gguf_files,
    indexed_names,
    is_gguf,
    is_index,
    is_model,
    stored_file,
    weight_files,
)

IDENTIFYING_FILES = ("config.json", "adapter_config.json", "params.json")
"""Files of a checkpoint, of a LoRA adapter and of Mistral's own format."""
DESCRIBING_FILES = (
    *IDENTIFYING_FILES,
    *("generation_config.json", "hf_quant_config.json", "quantize_config.json", "quant_config.json"),
    *("tokenizer*.json", "special_tokens_map.json", "added_tokens.json", "vocab.json", "vocab.txt", "merges.txt"),
    *("tokenizer.model", "spiece.model", "sentencepiece*.model", "tiktoken.model", "tekken.json", "*.tiktoken"),
    *("chat_template.jinja", "additional_chat_templates/*.jinja", "chat_template.json"),
    *("modules.json", "config_sentence_transformers.json", "sentence_*_config.json", "[0-9]_*/*config.json"),
)
"""Patterns of files to download that describe a model: configuration and tokenizer."""
MODEL_FILES = (*DESCRIBING_FILES, SINGLE_FILE, INDEX_FILE, f"[0-9]_Dense/{SINGLE_FILE}")
"""Patterns of files to download of a model; the files that its index names follow.

Other files are never loaded: weights in other formats (`*.bin`, `*.pth`, `original/`, `onnx/`, `openvino/`), and the
same weights under other names (`consolidated.safetensors`, `model.fp16.safetensors`).
"""
ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
"""Files to download of a LoRA adapter."""
FILE_KINDS = {SAFETENSORS: "a file of weights", **dict.fromkeys(PICKLED, "a file of pickled weights")}
USUAL_QUANTS = ("Q4_K_M", "Q8_0")  # taken if the id names no file, in this order
HUB_FOLDER = "models--"  # beginning of the name of a repository's folder in the hub's cache
MANIFESTS, BLOBS = "manifests", "blobs"  # folders of Ollama's models
OLLAMA_WEIGHTS, OLLAMA_ADAPTER = "application/vnd.ollama.image.model", "application/vnd.ollama.image.adapter"
OLLAMA_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


class NoSuchModel(FileRefused):
    """Error: no usable model has that name; the message has the reason and the remedy."""


def find_model_folder(given: str, with_weights: bool = True) -> Path:
    """Return the folder of a model. Raises: NoSuchModel, WeightsRefused, GgufRefused, NotFetched.

    `with_weights`: whether to download weights, besides configuration and tokenizer, of a Hugging Face id. GGUF files
    are always downloaded.
    """
    path = Path(given).expanduser()
    if given in NAMED and not path.exists():
        return folder_of(fetch_named(given))
    if path.is_file() and (file := _gguf_file(path)) is not None:
        return folder_of(file)
    if path.is_dir():
        path = _snapshot(path)
        return _gguf_folder(path) or path.resolve()
    if path.exists():
        raise NoSuchModel(_file_instead(path))
    hub_id, _, chosen = given.partition(":")
    if not _may_be_hub_id(hub_id):
        named = ", ".join(NAMED)
        raise NoSuchModel(f"there is no such folder, a hub id looks like owner/name, and named models are {named}")
    return _download(hub_id, chosen, with_weights)


def name_of_model(given: str) -> str:
    """Return the name of a model in requests: of a file or folder its name, in a cache the one by which it was fetched.

    A name of the hub, and any other text, is returned as it is.
    """
    path = Path(given).expanduser()
    if path.is_file():
        if MANIFESTS in path.parts:
            return f"{path.parent.name}:{path.name}"
        return path.stem if has_gguf_suffix(path.name) else path.name
    if not path.is_dir():
        return given
    path = path.resolve()
    cached = [each.name for each in (path, *path.parents[:2]) if each.name.startswith(HUB_FOLDER)]
    return cached[0].removeprefix(HUB_FOLDER).replace("--", "/", 1) if cached else path.name


def find_adapter_folder(given: str) -> Path:
    """Return the folder of a LoRA adapter, given as a folder or a Hugging Face id. Raises: NoSuchModel."""
    path = Path(given).expanduser()
    if path.is_dir():
        return path.resolve()
    if path.exists() or not _may_be_hub_id(given):
        raise NoSuchModel("there is no such folder, and a hub id looks like owner/name")
    from huggingface_hub import snapshot_download

    with _reaching_hub():
        return Path(snapshot_download(given, allow_patterns=list(ADAPTER_FILES)))


def _may_be_hub_id(given: str) -> bool:
    return not given.startswith(("/", ".", "~")) and given.count("/") == 1


def check_complete(folder: Path) -> None:
    """Check that a folder has the files of a checkpoint, and a tokenizer.

    Raises: NoSuchModel, WeightsRefused, TokenizerRefused.
    """
    if not any(folder.iterdir()):
        raise NoSuchModel(f"{folder} is empty; give the folder of a checkpoint")
    check_config(folder)
    weight_files(folder)
    read_tokenizer(folder)


def check_config(folder: Path) -> None:
    """Check that a folder has a config.json. Raises: NoSuchModel, which says what the folder is instead."""
    if (folder / "config.json").is_file():
        return
    if (folder / "adapter_config.json").is_file():
        raise NoSuchModel(f"{folder} is a LoRA adapter; give its base model, and --adapter NAME={folder}")
    if (folder / "params.json").is_file():
        raise NoSuchModel(
            f"{folder} is in Mistral's own format (params.json); give the checkpoint in Hugging Face's format"
        )
    raise NoSuchModel(f"{folder} is not a checkpoint: it has no config.json")


def _gguf_file(path: Path) -> Path | None:
    """Return the GGUF file at a path, or that of a manifest of Ollama's; None for another file. Raises: NoSuchModel."""
    with reading(path, NoSuchModel):
        if has_gguf_suffix(path.name) or begins_as_gguf(path):
            return path
        root = next((parent.parent for parent in path.parents if parent.name == MANIFESTS), None)
        if root is None:
            return None
        layers = read_json(path, NoSuchModel, dict)["layers"]
        digests = {layer["mediaType"]: layer["digest"] for layer in layers}
        if OLLAMA_ADAPTER in digests:
            raise NoSuchModel("has an adapter, which is not read; give the model without it, as a GGUF file")
        digest: str = digests[OLLAMA_WEIGHTS]
        if OLLAMA_DIGEST.fullmatch(digest) is None:
            raise NoSuchModel(f"{OLLAMA_WEIGHTS} has the digest {digest!r}, which names no file")
        return root / BLOBS / digest.replace(":", "-")


def _snapshot(folder: Path) -> Path:
    """Return the snapshot that `refs/main` names if `folder` is a repository's in the hub's cache, else `folder`."""
    main = folder / "refs" / "main"
    if not main.is_file() or not (folder / "snapshots").is_dir():
        return folder
    with reading(main, NoSuchModel):
        snapshot = folder / "snapshots" / Path(read_file(main).decode().strip()).name
    if not snapshot.is_dir():
        raise NoSuchModel(f"{main}: names a snapshot that is not in {folder}; fetch the model again")
    return snapshot


def _gguf_folder(folder: Path) -> Path | None:
    """Return the checkpoint folder of the GGUF file in `folder`; None without one, or if the folder is a checkpoint."""
    if (folder / "config.json").exists() and (has_tokenizer(folder) or not is_gguf(folder)):
        return None
    files = gguf_files(folder)
    return folder_of(files[0]) if files else None


def _file_instead(path: Path) -> str:
    """Describe a file that was given instead of a folder, and name the remedy."""
    kind = FILE_KINDS.get(path.suffix.lower())
    if kind is None or not path.is_file():
        return "not a folder; give the folder of a checkpoint, with its config.json"
    if path.suffix.lower() in PICKLED:
        return f"{kind}, {NOT_READ}; {CONVERT}"
    if (path.parent / "config.json").is_file():
        return f"{kind}, and a model is its folder; give {path.parent}"
    return f"{kind} without config.json in its folder; give the folder of a complete checkpoint"


def _download(hub_id: str, chosen: str, with_weights: bool) -> Path:
    """Download into the cache of huggingface_hub; use the cache alone if the hub cannot be reached."""
    from huggingface_hub import snapshot_download

    with _reaching_hub():
        if not chosen and (checkpoint := _checkpoint(hub_id, with_weights)) is not None:
            return checkpoint
        wanted = choose_gguf(_files_of(hub_id), chosen)
        folder = Path(snapshot_download(hub_id, allow_patterns=list(wanted)))
    return folder_of(folder / wanted[0])


@contextmanager
def _reaching_hub() -> Iterator[None]:
    """Raise errors of huggingface_hub as NoSuchModel."""
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise NoSuchModel(f"neither a folder nor a hub id: {error}") from error
    except RepositoryNotFoundError as error:
        raise NoSuchModel("the hub has no such model, or it needs `hf auth login`") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise NoSuchModel(
            f"there is no such folder, and the Hugging Face hub cannot be reached ({type(error).__name__}); "
            "give the folder of a checkpoint"
        ) from error


def _checkpoint(hub_id: str, with_weights: bool) -> Path | None:
    """Download the files of a checkpoint; None if its weights are in GGUF files."""
    from huggingface_hub import snapshot_download

    folder = Path(snapshot_download(hub_id, allow_patterns=[*(MODEL_FILES if with_weights else DESCRIBING_FILES)]))
    stored = stored_file(folder)
    if stored is not None and with_weights:

        def fetch(names: Iterable[str]) -> None:
            """Download files of the same commit, which names the folder."""
            snapshot_download(hub_id, revision=folder.name, allow_patterns=[glob.escape(name) for name in names])

        if not stored.exists():
            fetch([stored.relative_to(folder).as_posix()])
        if is_index(stored):
            fetch(name for name in indexed_names(folder, stored) if name.endswith(SAFETENSORS))
    if stored is not None:
        return folder
    if not any((folder / name).exists() for name in IDENTIFYING_FILES):
        return None
    if not with_weights and (folder / "config.json").exists() and has_tokenizer(folder):
        return folder
    files = _files_of(hub_id)
    has_gguf = any(map(has_gguf_suffix, files))
    return None if has_gguf and not {SINGLE_FILE, INDEX_FILE} & set(files) else folder


def _files_of(hub_id: str) -> list[str]:
    """Return the files of a model on the hub; those in the cache if the hub cannot be reached."""
    from huggingface_hub import HfApi, snapshot_download

    # HTTPError is that of the library for HTTP, which depends on the release.
    from huggingface_hub.errors import HTTPError, RepositoryNotFoundError  # type: ignore[attr-defined]

    try:
        return HfApi().list_repo_files(hub_id)
    except RepositoryNotFoundError:
        raise
    except (OSError, HTTPError):
        folder = Path(snapshot_download(hub_id, allow_patterns=[PATTERN], local_files_only=True))
        return [str(path.relative_to(folder)) for path in folder.rglob(PATTERN)]


def choose_gguf(files: Sequence[str], chosen: str) -> tuple[str, ...]:
    """Return the GGUF file, or all parts of the split one, that `chosen` names by file or type, such as Q4_K_M.

    An empty `chosen` takes the first one of USUAL_QUANTS, or the only model. Raises: NoSuchModel.
    """
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        name = Path(file).name
        if has_gguf_suffix(name) and is_model(name):
            part = PART.fullmatch(name)
            models.setdefault(f"{part[1]}{SUFFIX}" if part else name, []).append(file)
    if not models:
        raise NoSuchModel("has neither config.json nor a GGUF file")
    names = [name for name in models if name == chosen or chosen in models[name]]
    for quant in (chosen,) if chosen else USUAL_QUANTS:
        names += [name for name in models if re.search(rf"[-._]{re.escape(quant)}\.gguf$", name, re.IGNORECASE)]
    if not chosen and len(models) == 1:
        names += models
    if not names:
        wish = f"no file {chosen!r}" if chosen else "several models"
        raise NoSuchModel(f"has {wish}; add one of these after a colon: {', '.join(models)}")
    return tuple(models[names[0]])
