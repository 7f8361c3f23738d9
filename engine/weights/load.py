"""A checkpoint's files to a model in memory. Files are mapped, never unpickled."""

import ctypes
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig, ModelError, read_json
from baton.engine.lora.adapters import AdapterSet
from baton.engine.models.batch import Model
from baton.engine.models.checkpoint import TensorSource, build_decoder, read_ends
from baton.engine.models.decoder import DecoderModel
from baton.engine.models.linear import DenseLinear, Linear
from baton.engine.models.packed import PackingTensors, packs, with_native_layers
from baton.engine.weights.files import weight_files
from baton.engine.weights.formats import MADE_WHILE_LOADING, WITH_INT8_HEAD, WeightFormat, packed_format, weight_format
from baton.engine.weights.gguf import GgufTensors
from baton.engine.weights.on_kernels import KernelTensors, has_kernels
from baton.engine.weights.sources import DenseTensors, PackedTensors, QuantisingTensors, Rows


def return_freed_memory() -> None:
    """Reading a checkpoint frees about as much as it keeps; glibc holds on to it, in case it were needed again.

    Milliseconds. Does nothing with another C library.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def load_model(
    folder: Path,
    dtype: torch.dtype,
    device: torch.device,
    progress: bool,
    adapters: AdapterSet | None = None,
    quantize: str = WeightFormat.PLAIN,
    packed: bool = False,
) -> Model:
    """Reads the checkpoint in `folder`; raises ModelError for missing or surplus tensors.

    `packed`: projections in the layout of the CPU's native kernels, where those are there.
    With `adapters`, those that are added there later may change the model's projections. `quantize` is a WeightFormat.

    A progress bar goes to stderr when that is a terminal, and with `progress` in any case.
    """
    config = read_model_config(folder)
    format = weight_format(folder, quantize)
    if not isinstance(config, DecoderConfig):
        if format is not WeightFormat.PLAIN:
            raise ModelError(f"{config.family} runs through transformers' own code, which takes plain weights only")
        from baton.engine.models.transformers_checkpoint import load_transformers_model  # slow to import, seldom needed

        plain = load_transformers_model(folder, config, dtype, device, progress)
        if adapters is None:
            return plain
        from baton.engine.lora.hooks import HookedModel

        hooked = HookedModel(plain, plain.causal)
        adapters.adopt(hooked.modules)
        return hooked
    files = weight_files(folder)
    total = sum(file.stat().st_size for file in files)
    ignored = {"lm_head.weight"} if config.tie_word_embeddings else set()
    with ExitStack() as stack:
        bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=False if progress else None)
        stack.enter_context(bar)
        stored: GgufTensors | CheckpointTensors
        if format is WeightFormat.GGUF:
            stored = GgufTensors(files[0], config, dtype, device)
        else:
            stored = CheckpointTensors(files, stack, dtype, device, bar)
        model = read_decoder(stored, config, KeptAs(folder, format, dtype, device, packed), adapters)
        bar.update(total - bar.n)  # headers
        stored.check_all_taken(ignored)
    return_freed_memory()
    return with_native_layers(model)


@dataclass(frozen=True, slots=True)
class KeptAs:
    """The form of a checkpoint's weights in memory."""

    folder: Path
    format: WeightFormat
    dtype: torch.dtype
    device: torch.device
    packed: bool  # as for load_model


def read_decoder(
    stored: GgufTensors | DenseTensors,
    config: DecoderConfig,
    kept_as: KeptAs,
    adapters: AdapterSet | None = None,
    head_rows: range | None = None,
) -> DecoderModel:
    """One rank's model, or the whole of it: they differ in the cuts of `stored`, and in `head_rows`, see read_ends."""
    device, format = kept_as.device, kept_as.format
    packing = kept_as.packed and packs(device)
    # Packed weights of 4 bits take activations of any dtype; those for torch's kernel could not be packed any more.
    activations = torch.float32 if packing else kept_as.dtype
    kept = stored if isinstance(stored, GgufTensors) else as_kept(stored, kept_as.folder, format, activations, device)
    source: TensorSource
    if packing:
        source = packing_source = PackingTensors(kept, format in WITH_INT8_HEAD)
        ends = packing_source.ends(config, head_rows)
    else:
        source, ends = kept, read_ends(config, kept, head_rows)
    if adapters is not None:
        source = adapters.adaptable(source, kept_as.dtype, device)
    return build_decoder(config, source, device, ends)


def as_kept(
    stored: DenseTensors, folder: Path, format: WeightFormat, dtype: torch.dtype, device: torch.device
) -> TensorSource:
    """The same tensors, with projections in the form that they will have in memory."""
    kept: QuantisingTensors | PackedTensors
    if format in MADE_WHILE_LOADING:
        kept = QuantisingTensors(stored, format, dtype)
    elif (packed := packed_format(read_json(folder / "config.json"))) is not None:
        kept = PackedTensors(stored, packed, dtype)
    else:
        return stored
    return KernelTensors(kept) if has_kernels(device) else kept


class CheckpointTensors:
    """Tensors of open safetensors files by name, each taken at most once. The files stay open as long as `stack`."""

    def __init__(
        self, files: tuple[Path, ...], stack: ExitStack, dtype: torch.dtype, device: torch.device, bar: "tqdm[Any]"
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._bar = bar
        self._files: dict[str, Any] = {}  # tensor name -> its open file; a name is removed when taken
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: {error}") from error
            self._files.update(dict.fromkeys(opened.keys(), opened))

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(name).get_slice(name).get_shape())

    def take(self, name: str, *shape: int) -> torch.Tensor:
        return self.take_stored(name, STORED_DTYPES, *shape).to(self._dtype)

    def take_stored(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        stored: torch.Tensor = self._open(name).get_tensor(name)
        if stored.shape != shape:
            raise ModelError(f"tensor {name} is {list(stored.shape)}, config.json implies {list(shape)}")
        if stored.dtype not in dtypes:
            raise ModelError(f"tensor {name} is {stored.dtype}; supported: {', '.join(map(str, dtypes))}")
        del self._files[name]
        self._bar.update(stored.nbytes)
        return stored.to(self._device)

    def linear(self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool = False) -> Linear:
        return DenseLinear(*self.take_parts(names, sizes, inputs, bias, self._dtype))

    def take_parts(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        weights = [
            self.take_stored(f"{name}.weight", STORED_DTYPES, size, inputs).to(dtype)
            for name, size in zip(names, sizes, strict=True)
        ]
        biases = [self.take(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True)] if bias else []
        return _stack(weights), _stack(biases) if bias else None

    def take_rows(
        self, names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool, dtype: torch.dtype
    ) -> Rows:
        weight, stacked_bias = self.take_parts(names, sizes, inputs, bias, dtype)
        return Rows(weight, None, stacked_bias)

    def _open(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"the checkpoint has no tensor {name}")
        return file

    def check_all_taken(self, ignore: set[str]) -> None:
        """An unused tensor means another architecture: refuse rather than compute something else."""
        left = sorted(name for name in self._files.keys() - ignore if not name.endswith("rotary_emb.inv_freq"))
        if left:
            raise ModelError(f"the checkpoint has {len(left)} tensors this model does not use, among them {left[0]}")


def _stack(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts)
