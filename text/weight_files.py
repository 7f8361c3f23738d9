"""Choice of the files with a checkpoint's weights among all files of its folder, as transformers chooses."""

import os
from pathlib import Path

from baton.text.gguf.header import SUFFIX, has_gguf_suffix, parts_of
from baton.text.host.files import FileRefused, check_fetched, read_json, reads

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SAFETENSORS, INDEX = ".safetensors", ".safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt")
NOT_READ = "which is not read, since loading it would run code"
CONVERT = "convert it to safetensors, or give the folder or Hugging Face id of the original checkpoint"
NO_MODELS = ("mmproj", "imatrix")  # parts of names of GGUF files that contain no language model


class WeightsRefused(FileRefused):
    """Error: a folder has no weights that are read, or weights of several models; the message has the remedy."""


def has_weights(folder: Path) -> bool:
    """Return whether a folder has weights that are read, with all files of their index. Raises: WeightsRefused."""
    stored = stored_file(folder)
    if stored is not None and is_index(stored):
        return stored.exists() and all((folder / name).exists() for name in indexed_names(folder, stored))
    return is_gguf(folder) if stored is None else stored.exists()


def stored_file(folder: Path) -> Path | None:
    """Return the safetensors file or index that config.json names (`transformers_weights`), else `model.safetensors`,
    else its index; None without one of these. Raises: WeightsRefused.
    """
    config = folder / "config.json"
    named = read_json(config, WeightsRefused, dict).get("transformers_weights") if config.is_file() else None
    if named is None:
        return next((folder / name for name in (SINGLE_FILE, INDEX_FILE) if (folder / name).exists()), None)
    if not isinstance(named, str) or not named.endswith((SAFETENSORS, INDEX)) or _is_outside(named):
        raise WeightsRefused(f"{config}: transformers_weights {named!r} names no safetensors file in this folder")
    return folder / named


def is_index(stored: Path) -> bool:
    """Return whether `stored` is an index, which names the files of the weights."""
    return stored.name.endswith(INDEX)


def _is_outside(name: str) -> bool:
    return Path(os.path.normpath(name)).parts[:1] in ((os.pardir,), (os.sep,))


def stores_weights(folder: Path) -> bool:
    """Return whether a folder has a file of weights, also one that is not read, or an index."""
    return (folder / INDEX_FILE).exists() or any(
        path.suffix.lower() in (SAFETENSORS, SUFFIX, *PICKLED) for path in folder.iterdir()
    )


def is_gguf(folder: Path) -> bool:
    """Return whether the weights are in a GGUF file; safetensors files take precedence."""
    return stored_file(folder) is None and bool(_gguf_models(folder))


def gguf_files(folder: Path) -> tuple[Path, ...]:
    """Return the GGUF file in `folder`, or all parts of a split one; none without such a file.

    Projectors of images and importance matrices do not count. Raises: WeightsRefused if there are several models.
    """
    files = _gguf_models(folder)
    parts = parts_of(files[0]) if files else ()
    if set(files) != set(parts):
        names = ", ".join(file.name for file in files)
        raise WeightsRefused(f"{folder}: has several models ({names}); give one of these files")
    return parts


def _gguf_models(folder: Path) -> list[Path]:
    files = sorted(path for path in folder.glob("*") if has_gguf_suffix(path.name))
    return [path for path in files if is_model(path.name)] or files


def is_model(name: str) -> bool:
    """Return whether a GGUF file with this name may contain a language model."""
    return not any(part in name.lower() for part in NO_MODELS)


@reads(WeightsRefused)
def weight_files(folder: Path) -> tuple[Path, ...]:
    """Return the safetensors file (`stored_file`), or all files that its index names, or else the GGUF file.

    Raises: WeightsRefused, which says what the folder has instead.
    """
    files = _weight_files(folder)
    for path in files:
        check_fetched(path)
    return files


def _weight_files(folder: Path) -> tuple[Path, ...]:
    index = stored_file(folder)
    if index is None:
        if found := gguf_files(folder):
            return found
        raise WeightsRefused(_instead(folder))
    if not is_index(index):
        if not index.is_file():
            raise WeightsRefused(f"{index}: is not a file")
        return (index,)
    names = indexed_names(folder, index)
    for name in names:
        if not (folder / name).is_file():
            raise WeightsRefused(f"{index}: names {name!r}, which is not a file in this folder")
        if Path(name).suffix.lower() in PICKLED:
            raise WeightsRefused(f"{index}: names {name!r}, a file of pickled weights, {NOT_READ}; {CONVERT}")
    return tuple(folder / name for name in names)


def indexed_names(folder: Path, index: Path) -> list[str]:
    """Return the paths, relative to the folder, of the files that an index names. Raises: WeightsRefused."""
    weight_map = read_json(index, WeightsRefused, dict).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsRefused(f"{index}: weight_map is missing or empty")
    names = {os.path.relpath(folder / str(name), folder) for name in weight_map.values()}
    if outside := [name for name in sorted(names) if _is_outside(name)]:
        raise WeightsRefused(f"{index}: names {outside[0]!r}, which is not a file in this folder")
    return sorted(names)


def _instead(folder: Path) -> str:
    """Describe the files of weights of a folder without a readable model."""
    files = sorted(folder.iterdir())
    pickled = [path for path in files if path.suffix.lower() in PICKLED]
    named = [path.name for path in files if path.suffix.lower() in (SAFETENSORS, SUFFIX)]
    if pickled and not named:
        return f"{pickled[0]}: a file of pickled weights, {NOT_READ}; {CONVERT}"
    found = f"of {', '.join(named)} none is read" if named else f"other formats are not read; {CONVERT}"
    return f"{folder}: has neither {SINGLE_FILE}, {INDEX_FILE}, which lists all parts, nor a *{SUFFIX}; {found}"
