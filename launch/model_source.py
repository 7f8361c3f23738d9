"""Choice of the checkpoint folder: a given folder or hub id, else the demo model or a tiny random one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from baton.launch import CommandFailed
from baton.process.registry.worker_record import AdapterFolder, parse_adapters
from baton.text.host.files import FileRefused
from baton.text.model_folder import check_complete, find_model_folder, name_of_model
from baton.text.tokenizer.checkpoint_tokenizer import TokenizerRefused, read_tokenizer


class ModelNotUsable(CommandFailed):
    """Error: no usable checkpoint has that name; the message has the reason and the remedy."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    folder: Path
    name: str  # name of the model in requests
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
    folder = find_folder(given, flag=flag)
    try:
        check_complete(folder)
    except FileRefused as error:
        raise ModelNotUsable(str(error)) from error
    return ModelSource(folder, name_of_model(given))


def find_folder(given: str, with_weights: bool = True, flag: str = "--model") -> Path:
    """Return a model's folder, see find_model_folder. Raises: ModelNotUsable."""
    try:
        return find_model_folder(given, with_weights)
    except FileRefused as error:
        raise ModelNotUsable(f"{flag} {given}: {error}") from error


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
    try:
        return bool(read_tokenizer(folder).templates)
    except TokenizerRefused:
        return False


def _demo_model(root: Path, scratch: Path) -> ModelSource:
    demo = root / "models" / "tableqa"
    if (demo / "model.safetensors").is_file():
        return ModelSource(demo, demo.name)

    from baton.launch.tiny_checkpoint import write_tiny_checkpoint

    folder = scratch / "tiny-random"
    write_tiny_checkpoint(folder)
    return ModelSource(folder, folder.name, is_random=True)
