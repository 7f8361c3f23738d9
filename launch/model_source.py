"""Choice of the checkpoint folder: a given folder or hub id, else the demo model or a tiny random one."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from baton.launch import CommandFailed
from baton.process.registry.worker_record import AdapterFolder, parse_adapters
from baton.text.gguf.folder import folder_of
from baton.text.gguf.header import SUFFIX, GgufRefused, parts_of

# Formats of weights that are never loaded, since loading them runs code.
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
FILE_KINDS = {
    ".safetensors": "a file of weights",
    **dict.fromkeys(PICKLED, "a file of pickled weights"),
}
CONVERT = "convert it to safetensors, or give the folder or Hugging Face id of the original checkpoint"
HUB_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "*.txt", "*.model")


class ModelNotUsable(CommandFailed):
    """Error: no usable checkpoint has that name; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    folder: Path
    name: str  # name of the model in requests
    is_demo: bool = False
    is_random: bool = False  # random weights, whose output is noise

    def called(self, name: str | None) -> "ModelSource":
        """Return the model with `name` as its name in requests: the last part of a path; None keeps the name."""
        if not name:
            return self
        return replace(self, name=Path(name).name if name.startswith(("/", ".", "~")) else name)


def find_model(given: str | None, root: Path, scratch: Path, flag: str = "--model") -> ModelSource:
    """Return the model `given`; if that is None, the demo model or a tiny random one. Raises: ModelNotUsable.

    `root`: folder of the repository. `scratch`: folder for a random checkpoint. `flag`: name of the option, for errors.
    """
    if given is None:
        return _demo_model(root, scratch)
    folder = find_folder(given, HUB_PATTERNS, flag)
    _check(folder)
    return ModelSource(folder, _name_of(given, folder))


def _name_of(given: str, folder: Path) -> str:
    path = Path(given).expanduser()
    if path.suffix.lower() == SUFFIX and path.is_file():
        return path.name[: -len(SUFFIX)]
    return path.resolve().name if path.is_dir() else given


def find_folder(given: str, patterns: Sequence[str], flag: str = "--model") -> Path:
    """Return a local folder, or the cache folder of a Hugging Face model with its files that match `patterns`.

    Raises: ModelNotUsable.
    """
    folder = Path(given).expanduser()
    if folder.is_dir():
        return _gguf_folder(folder, flag) or folder.resolve()
    if folder.suffix.lower() == SUFFIX and folder.is_file():
        return _made_folder(folder, flag)
    if folder.exists():
        raise ModelNotUsable(f"{flag} {given}: {_file_instead(folder)}")
    if folder.is_absolute() or given.startswith((".", "~")) or given.count("/") != 1:
        raise ModelNotUsable(f"{flag} {given}: there is no such folder, and a hub id looks like owner/name")
    return _download(given, patterns, flag)


def _gguf_folder(folder: Path, flag: str) -> Path | None:
    """Return the checkpoint folder of the GGUF file in `folder`; None if it has a config.json or no GGUF file."""
    files = sorted(folder.glob(f"*{SUFFIX}"))
    if not files or (folder / "config.json").exists():
        return None
    with refused(flag, folder):
        parts = parts_of(files[0])
    if set(files) != set(parts):
        names = ", ".join(file.name for file in files)
        raise ModelNotUsable(f"{flag} {folder}: has several models ({names}); give one of these files")
    return _made_folder(files[0], flag)


def _made_folder(file: Path, flag: str) -> Path:
    with refused(flag, file):
        return folder_of(file)


@contextmanager
def refused(flag: str, given: Path) -> Iterator[None]:
    try:
        yield
    except GgufRefused as error:
        raise ModelNotUsable(f"{flag} {given}: {error}") from error


def _file_instead(path: Path) -> str:
    """Describe a file that was given instead of a folder, and name the remedy."""
    kind = FILE_KINDS.get(path.suffix.lower())
    if kind is None or not path.is_file():
        return "not a folder; give the folder of a checkpoint, with its config.json"
    if path.suffix.lower() in PICKLED:
        return f"{kind}, which is not read, since loading it would run code; {CONVERT}"
    if (path.parent / "config.json").is_file():
        return f"{kind}, and a model is its folder; give {path.parent}"
    return f"{kind} without config.json and tokenizer.json in its folder; give the folder of a complete checkpoint"


def find_adapters(given: Sequence[str], model_name: str) -> tuple[AdapterFolder, ...]:
    """Parse `NAME=FOLDER` for each adapter. Raises: CommandFailed."""
    try:
        adapters = parse_adapters(given)
    except ValueError as error:
        raise CommandFailed(f"--adapter: {error}") from error
    for adapter in adapters:
        if adapter.name == model_name:
            raise CommandFailed(f"--adapter {adapter}: {model_name} is the name of the model; choose another name")
        if not (adapter.folder / "adapter_config.json").is_file():
            raise CommandFailed(f"--adapter {adapter}: the folder has no adapter_config.json; give one saved by PEFT")
    return tuple(AdapterFolder(adapter.name, adapter.folder.resolve()) for adapter in adapters)


def has_chat_template(folder: Path) -> bool:
    """Return whether a checkpoint has a chat template. False if its files cannot be read: the router reports that."""
    if (folder / "chat_template.jinja").is_file():
        return True
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(config, dict) and bool(config.get("chat_template"))


def _demo_model(root: Path, scratch: Path) -> ModelSource:
    demo = root / "models" / "tableqa"
    if (demo / "model.safetensors").is_file():
        return ModelSource(demo, demo.name, is_demo=True)

    from baton.launch.tiny_checkpoint import write_tiny_checkpoint

    folder = scratch / "tiny-random"
    write_tiny_checkpoint(folder)
    return ModelSource(folder, folder.name, is_random=True)


def _check(folder: Path) -> None:
    names = {path.name: path.suffix.lower() for path in folder.iterdir()}
    suffixes, pickled = set(names.values()), [name for name, suffix in names.items() if suffix in PICKLED]
    if not names:
        raise ModelNotUsable(f"{folder} is empty; give the folder of a checkpoint")
    if pickled and not suffixes & {".safetensors", ".gguf"}:
        raise ModelNotUsable(f"{folder / pickled[0]}: {_file_instead(folder / pickled[0])}")
    if not (folder / "config.json").is_file():
        raise ModelNotUsable(f"{folder} is not a checkpoint: it has no config.json")
    if not suffixes & {".safetensors", ".gguf"}:
        raise ModelNotUsable(f"{folder} has no *.safetensors and no *.gguf; other formats are not read")
    if not (folder / "tokenizer.json").is_file():
        raise ModelNotUsable(f"{folder} has no tokenizer.json")


def _download(hub_id: str, patterns: Sequence[str], flag: str) -> Path:
    """Download into the cache of huggingface_hub; use the cache alone if the hub cannot be reached."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        return Path(snapshot_download(hub_id, allow_patterns=list(patterns)))
    except HFValidationError as error:
        raise ModelNotUsable(f"{flag} {hub_id}: neither a folder nor a hub id: {error}") from error
    except RepositoryNotFoundError as error:
        raise ModelNotUsable(f"{flag} {hub_id}: the hub has no such model, or it needs `hf auth login`") from error
    except (LocalEntryNotFoundError, HfHubHTTPError, OSError) as error:
        raise ModelNotUsable(
            f"{flag} {hub_id}: there is no such folder, and the Hugging Face hub cannot be reached "
            f"({type(error).__name__}); give the folder of a checkpoint"
        ) from error
