"""Read the weights of a checkpoint, all of them or one rank's part, as stored or quantised while loading.

Files are mapped, never unpickled. Only projections are quantised. Embedding, norms and biases have the model's dtype,
as in vLLM. Routers of experts, which are small and sensitive, have it too. The head is quantised only if it is stored
so.

AWQ: https://arxiv.org/abs/2306.00978, its "gemm" packing. GPTQ: https://arxiv.org/abs/2210.17323. MXFP4:
https://arxiv.org/abs/2310.10537.
"""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from tqdm import tqdm

from baton.engine.config.model_config import DecoderConfig, LatentConfig, ModelError
from baton.engine.parallel.shard import Shard
from baton.engine.weights.compressed import UNUSED_ENDS, column_order, is_quantised_here, read_quantised
from baton.engine.weights.experts import ExpertsApart, StoredTensors
from baton.engine.weights.files import weight_files
from baton.engine.weights.formats import GROUPED, STORED_ALONE, PackedFormat, WeightFormat, packed_format
from baton.engine.weights.gguf_file import PLAIN_DTYPES, dequantise, map_file, mxfp4_codes
from baton.engine.weights.gguf_names import (
    SPLIT,
    UNUSED,
    expert_of,
    fused_rows,
    gguf_names,
    is_fused,
    stored_columns,
    stored_rows,
)
from baton.engine.weights.names import other_part, text_name
from baton.engine.weights.pairs import PairsApart
from baton.engine.weights.weight import (
    GROUP_INPUTS,
    QUANTISERS,
    Fp4Weight,
    GgufWeight,
    Int4Weight,
    PlainWeight,
    StackedWeight,
    Weight,
    is_quantisable,
    stack_weights,
    stacked,
    with_bias,
)
from baton.kernels.types import ZERO_PARTS
from baton.text.gguf.config import ARCHITECTURES
from baton.text.gguf.header import GgufTensor, TensorType, read_model_header

logger = logging.getLogger(__name__)
STORED_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DTYPES = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I8": torch.int8,
    "U8": torch.uint8,
    "I16": torch.int16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "I64": torch.int64,
    "BOOL": torch.bool,
}
"""Types by their names in safetensors files."""
BODY = "model."
EMBEDDING, HEAD = f"{BODY}embed_tokens.weight", "lm_head.weight"
PER_WORD = 8
# For each of the eight columns in an AWQ word: index of its nibble; index 0 is the lowest nibble.
AWQ_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
ONE_IN_EACH_NIBBLE = 0x11111111


Size = int | tuple[int, ...]
"""Number of rows of a module; several numbers for stacked projections."""


def parts_of(names: Sequence[str], sizes: Sequence[Size]) -> list[tuple[int, ...]]:
    """Return a tuple per module: the number of rows of each projection in the module.

    A single name with several sizes is one module that stacks several projections.
    """
    of_each = [(size,) if isinstance(size, int) else size for size in sizes]
    return [tuple(itertools.chain.from_iterable(of_each))] if len(names) == 1 else of_each


class WeightSource(Protocol):
    """Tensors of a checkpoint; each can be read once. Raises ModelError if a tensor is missing or has another shape."""

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """Return a tensor on the compute device, in `dtype`; None: in the compute dtype."""

    def number(self, name: str) -> float:
        """Return the only number of a tensor, rounded to the compute dtype, also if that is on the meta device."""

    def embedding(self, name: str, vocabulary: int, hidden: int) -> torch.Tensor | GgufWeight:
        """Return the embedding of tokens in the compute dtype, or as stored in a quantised GGUF type."""

    def weight(self, names: Sequence[str], sizes: Sequence[Size], inputs: int, bias: bool = False) -> Weight:
        """Return projections of the same input, stacked into one weight: module `names[i]` has `sizes[i]` rows.

        A single name with several sizes is a module that the checkpoint stores already stacked. Sizes are always those
        of the checkpoint, but with several ranks the result is only this rank's part.
        """


@contextmanager
def open_weights(
    folder: Path,
    config: DecoderConfig,
    format: WeightFormat,
    dtype: torch.dtype,
    device: torch.device,
    shard: Shard,
    progress: bool,
) -> Iterator[WeightSource]:
    """Open a checkpoint. Raises: ModelError, also on exit if the model left a tensor unread, except a tied head.

    A progress bar is shown on a terminal; with `progress`, also elsewhere. On the meta device, tensors are not read.
    """
    files, ignored = weight_files(folder), {HEAD} if config.tie_word_embeddings else set()
    total = sum(file.stat().st_size for file in files)
    is_hidden = True if device.type == "meta" else False if progress else None
    with ExitStack() as stack:
        bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading weights", disable=is_hidden)
        stack.enter_context(bar)
        if format is WeightFormat.GGUF:
            gguf = GgufWeights(files[0], config, dtype, device)
            yield gguf
            left = gguf.left.difference(*map(gguf_names, ignored))
        else:
            stored = CheckpointTensors(files, stack, device, bar, config.tensor_name)
            if config.tie_word_embeddings:
                stored.share(HEAD, f"{config.modules.embedding}.weight")
            others = [name for name in stored.unread if config.is_text_part and text_name(name) is None]
            if others:
                parts = ", ".join(sorted(set(map(other_part, others))))
                logger.info("reading the text part only: %d tensors of %s are left out", len(others), parts)
            packed = packed_format(folder)
            experts = config.experts
            tensors: StoredTensors = PairsApart(stored, config.head_dim) if config.rotates_pairs else stored
            if experts is not None:
                tensors = ExpertsApart(tensors, experts.count, experts.stacked)
            yield CheckpointWeights(tensors, format, packed, dtype, shard)
            left = {name for name in stored.left - ignored if not name.endswith("rotary_emb.inv_freq")}
            if format in STORED_ALONE:
                left = {name for name in left if not name.endswith(UNUSED_ENDS)}
        bar.update(total - bar.n)  # file headers complete the bar
        if left:  # such a checkpoint has another architecture, so results would be wrong
            where = "GGUF file" if format is WeightFormat.GGUF else "checkpoint"
            raise ModelError(f"the {where} has {len(left)} tensors this model does not use, among them {min(left)}")


class CheckpointTensors:
    """Tensors of safetensors files. The files stay open until `stack` is closed."""

    def __init__(
        self,
        files: tuple[Path, ...],
        stack: ExitStack,
        device: torch.device,
        bar: "tqdm[Any]",
        name_of: Callable[[str], str | None] = str,
    ) -> None:
        """Open the files. `name_of`: returns the name of a stored tensor in this class, None for one to leave out."""
        self._device = device
        self._bar = bar
        stored: dict[str, Any] = {}  # open file of each tensor
        for file in files:
            try:
                opened = stack.enter_context(safe_open(file, framework="pt", device="cpu"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: {error}") from error
            stored.update(dict.fromkeys(opened.keys(), opened))
        is_body = EMBEDDING not in stored and EMBEDDING.removeprefix(BODY) in stored  # names of a model without head
        names = {name: name_of(BODY + name if is_body and name != HEAD else name) for name in stored}
        self.unread = tuple(name for name, known in names.items() if known is None)
        self._stored_names = {known: name for name, known in names.items() if known is not None}
        self._files = {known: stored[name] for known, name in self._stored_names.items()}  # those not read yet

    @property
    def left(self) -> set[str]:
        return set(self._files)

    def share(self, name: str, other: str) -> None:
        """Let the tensor `name` be read as `other` if the checkpoint has only the first."""
        if name in self._files and other not in self._files:
            self._files[other], self._stored_names[other] = self._files.pop(name), self._stored_names[name]

    def has(self, name: str) -> bool:
        return name in self._files

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._open(name).get_slice(self._stored_names[name]).get_shape())

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        return self._checked(name, self._stored(name), dtypes, shape).to(self._device)

    def read(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        content = self._checked(name, self._content(name), dtypes, shape)
        return content if self._device.type == "meta" else content.to(self._device)

    def _checked(
        self, name: str, stored: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        if stored.shape != shape:
            raise ModelError(f"tensor {name} is {list(stored.shape)}, config.json implies {list(shape)}")
        if stored.dtype not in dtypes:
            raise ModelError(f"tensor {name} is {stored.dtype}; supported: {', '.join(map(str, dtypes))}")
        del self._files[name]
        self._bar.update(stored.nbytes)
        return stored

    def _stored(self, name: str) -> torch.Tensor:
        if self._device.type != "meta":
            return self._content(name)
        described = self._open(name).get_slice(self._stored_names[name])
        return torch.empty(described.get_shape(), dtype=DTYPES[described.get_dtype()], device=self._device)

    def _content(self, name: str) -> torch.Tensor:
        content: torch.Tensor = self._open(name).get_tensor(self._stored_names[name])
        return content

    def _open(self, name: str) -> Any:
        file = self._files.get(name)
        if file is None:
            raise ModelError(f"the checkpoint has no tensor {name}")
        return file


class Cut(Enum):
    OUTPUTS = "outputs"  # each rank computes some of the outputs: query, key, value, gate and up projections
    INPUTS = "inputs"  # each rank has some of the inputs, and outputs are summed: output and down projections
    VOCABULARY = "vocabulary"


CUTS = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "w1", "w3"), Cut.OUTPUTS),
    **dict.fromkeys(("qkv_proj", "gate_up_proj", "q_b_proj", "kv_b_proj"), Cut.OUTPUTS),
    **dict.fromkeys(("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba"), Cut.OUTPUTS),
    "in_proj": Cut.OUTPUTS,
    **dict.fromkeys(("o_proj", "down_proj", "w2", "out_proj"), Cut.INPUTS),
    "lm_head": Cut.VOCABULARY,
}


class CheckpointWeights:
    """Weights of safetensors files. A rank reads complete tensors, since scales are per row, and keeps its part."""

    def __init__(
        self,
        tensors: StoredTensors,
        format: WeightFormat,
        packed: PackedFormat | None,
        dtype: torch.dtype,
        shard: Shard,
    ) -> None:
        """Prepare to read. `format`: format in memory. `packed`: quantisation that the checkpoint states, or None."""
        self._tensors = tensors
        self._quantise = QUANTISERS.get(format)
        self._format = format
        self._group_inputs = GROUP_INPUTS if format in GROUPED else 1
        self._packed = packed
        self._block = (1, 1) if packed is None else packed.block
        self._dtype = dtype
        self._shard = shard

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self._tensors.take(name, STORED_DTYPES, *shape).to(dtype or self._dtype)

    def number(self, name: str) -> float:
        return float(self._tensors.read(name, STORED_DTYPES, 1).to(self._dtype))

    def embedding(self, name: str, vocabulary: int, hidden: int) -> torch.Tensor:
        return self.tensor(name, vocabulary, hidden)

    def weight(self, names: Sequence[str], sizes: Sequence[Size], inputs: int, bias: bool = False) -> Weight:
        """Return a weight, unquantised if its number of inputs is not a multiple of the group size."""
        modules = list(zip(names, parts_of(names, sizes), strict=True))
        if self._packed is not None and any(map(self._is_quantised, names)):
            return stack_weights([self._read_alone(name, sum(parts), inputs, bias) for name, parts in modules])
        cut = self._cut(names[0])
        if self._format is WeightFormat.MXFP4 and all(self._tensors.has(f"{name}.blocks") for name in names):
            return self._read_fp4(modules, inputs, bias, cut)
        is_quantised = (
            self._quantise is not None and inputs % self._group_inputs == 0 and all(map(is_quantisable, names))
        )
        dtype = torch.float32 if is_quantised else self._dtype
        weights, biases = [], []
        for name, parts in modules:
            rows = self._rows(parts, self._cut(name))
            stored = self._tensors.take(f"{name}.weight", STORED_DTYPES, sum(parts), inputs)
            weights.append(_part(stored.to(dtype), rows))
            biases.append(_part(self.tensor(f"{name}.bias", sum(parts)), rows) if bias else None)
        weight = weights[0] if len(weights) == 1 else torch.cat(weights)
        columns = self._columns(names[0], inputs, cut, is_quantised)
        own_bias = self._own_bias(biases, cut)
        if self._quantise is not None and is_quantised:
            return self._quantise(weight, own_bias, columns)
        return PlainWeight(weight if cut is not Cut.INPUTS else weight[:, columns].clone(), own_bias)

    def _cut(self, name: str) -> Cut | None:
        return CUTS.get(name.rpartition(".")[2]) if self._shard.degree > 1 else None

    def _rows(self, parts: Sequence[int], cut: Cut | None) -> Sequence[slice]:
        """Return this rank's rows of a module; empty: all rows. `parts`: rows of each projection in the module."""
        if cut is Cut.VOCABULARY:
            own = self._shard.vocabulary(sum(parts))
            return [slice(own.start, own.stop)]
        return self._shard.equal_parts(parts) if cut is Cut.OUTPUTS else ()

    def _own_bias(self, biases: list[torch.Tensor | None], cut: Cut | None) -> torch.Tensor | None:
        """Return this rank's bias. If the ranks' outputs are summed, only rank 0 has the bias."""
        return None if cut is Cut.INPUTS and self._shard.rank else stacked(biases)

    def _columns(self, name: str, inputs: int, cut: Cut | None, is_quantised: bool) -> slice:
        if cut is not Cut.INPUTS:
            return slice(None)
        columns = self._shard.equal_part(inputs)
        own = columns.stop - columns.start
        if is_quantised and own % self._group_inputs:
            raise ModelError(
                f"{name} has {own} inputs on each rank, and {self._format} needs a multiple of {self._group_inputs}: "
                "use fewer ranks (tensor-parallel) or another format (quantize)"
            )
        return columns

    def _read_fp4(
        self, modules: Sequence[tuple[str, Sequence[int]]], inputs: int, bias: bool, cut: Cut | None
    ) -> Fp4Weight:
        """Read MXFP4: blocks of 32 codes, two per byte, and their exponents. Raises: ModelError."""
        if inputs % GROUP_INPUTS:
            raise ModelError(f"{modules[0][0]} has {inputs} inputs; MXFP4 needs a multiple of {GROUP_INPUTS}")
        columns, groups = self._columns(modules[0][0], inputs, cut, is_quantised=True), inputs // GROUP_INPUTS
        codes, exponents, biases = [], [], []
        for name, parts in modules:
            outputs, rows = sum(parts), self._rows(parts, self._cut(name))
            blocks = self._tensors.take(f"{name}.blocks", (torch.uint8,), outputs, groups, GROUP_INPUTS // 2)
            scales = self._tensors.take(f"{name}.scales", (torch.uint8,), outputs, groups)
            codes.append(_part(torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(1), rows)[:, columns])
            own_groups = slice(*(edge and edge // GROUP_INPUTS for edge in (columns.start, columns.stop)))
            exponents.append(_part(scales, rows)[:, own_groups])
            biases.append(_part(self.tensor(f"{name}.bias", outputs), rows) if bias else None)
        return Fp4Weight(torch.cat(codes), torch.cat(exponents), self._own_bias(biases, cut))

    def _read_packed(self, module: str, outputs: int, inputs: int, bias: bool) -> Int4Weight:
        """Read qweight, qzeros, scales and, for GPTQ, g_idx. Raises: ModelError."""
        tensors = self._tensors
        groups = tensors.shape(f"{module}.scales")[0]
        if inputs % PER_WORD or outputs % PER_WORD or not groups or inputs % groups:
            raise ModelError(f"{module} of {outputs} x {inputs} in {groups} groups cannot be read as 4-bit weights")
        own_bias = self._packed_bias(f"{module}.bias", outputs, bias)
        scales = tensors.take(f"{module}.scales", STORED_DTYPES, groups, outputs).T.contiguous()
        qzeros = tensors.take(f"{module}.qzeros", (torch.int32,), groups, outputs // PER_WORD)
        if self._packed is not None and self._packed.format is WeightFormat.AWQ:
            qweight = tensors.take(f"{module}.qweight", (torch.int32,), inputs, outputs // PER_WORD)
            codes, zeros = (_nibbles(words)[..., AWQ_NIBBLES].flatten(1) for words in (qweight, qzeros))
            return Int4Weight(codes.T.contiguous(), scales, zeros.T.contiguous() * ZERO_PARTS, bias=own_bias)
        qweight = tensors.take(f"{module}.qweight", (torch.int32,), inputs // PER_WORD, outputs)
        if self._packed is not None and self._packed.zeros_less_one:
            # Add 1 to all zero points of a word by one addition. GPTQModel subtracted 1 by one subtraction, in which
            # nibbles may borrow from one another. The addition undoes that too.
            qzeros = qzeros + ONE_IN_EACH_NIBBLE
        codes = _nibbles(qweight.T).flatten(1)  # [out, in]
        zeros = _nibbles(qzeros).flatten(1).T.contiguous() * ZERO_PARTS
        order = column_order(self._tensors, f"{module}.g_idx", inputs, groups)
        return Int4Weight(codes if order is None else codes[:, order], scales, zeros, order, own_bias)

    def _is_quantised(self, module: str) -> bool:
        return self._tensors.has(f"{module}.qweight") or is_quantised_here(self._tensors, module)

    def _read_alone(self, module: str, outputs: int, inputs: int, bias: bool) -> Weight:
        """Read a projection that the checkpoint stores quantised or plain. Raises: ModelError."""
        if self._tensors.has(f"{module}.qweight"):
            return self._read_packed(module, outputs, inputs, bias)
        own_bias = self.tensor(f"{module}.bias", outputs) if bias else None
        if not is_quantised_here(self._tensors, module):
            numbers = self._tensors.take(f"{module}.weight", STORED_DTYPES, outputs, inputs)
            return PlainWeight(numbers.to(self._dtype), own_bias)
        return with_bias(read_quantised(self._tensors, module, outputs, inputs, self._dtype, self._block), own_bias)

    def _packed_bias(self, name: str, size: int, wanted: bool) -> torch.Tensor | None:
        """Read a bias; None if not `wanted`.

        Raises: ModelError for an unwanted bias, unless it is zero: some quantisers write zeros.
        """
        if wanted:
            return self.tensor(name, size)
        if self._tensors.has(name) and self._tensors.read(name, STORED_DTYPES, size).any():
            raise ModelError(f"the checkpoint has {name}, which this model does not use")
        return None


def _part(tensor: torch.Tensor, rows: Sequence[slice]) -> torch.Tensor:
    """Return a copy of these rows, so that the complete tensor can be freed. Without `rows`, return the tensor."""
    return torch.cat([tensor[each] for each in rows]) if rows else tensor


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """Unpack int32 [...] to its nibbles, uint8 [..., 8], the lowest nibble first."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & 15).to(torch.uint8)


class GgufWeights:
    """Weights of a GGUF file, by their names in Hugging Face checkpoints.

    Projections and embeddings stay as stored, unless their numbers are plain.
    """

    def __init__(self, path: Path, config: DecoderConfig, dtype: torch.dtype, device: torch.device) -> None:
        """Open the file, or all parts of the model that begins with it. Raises: GgufRefused, ModelError."""
        header = read_model_header(path)
        architecture = ARCHITECTURES.get(header.architecture)
        if architecture is None or config.family not in architecture.families:
            raise ModelError(
                f"{path}: architecture {header.architecture!r} does not fit config.json's {config.family!r}"
            )
        self._architecture = header.architecture
        self._tensors = header.used_tensors
        self._left = dict.fromkeys(self._tensors)  # names of tensors that were not read yet
        self._parts_left: dict[str, int] = {}  # for a tensor of several modules, how many were not read yet
        self._files = {part: map_file(part) for part in dict.fromkeys(each.path for each in self._tensors.values())}
        self._config = config
        self._dtype = dtype
        self._device = device

    @property
    def left(self) -> set[str]:
        unread = [f"{each}weight" for each in self._config.unused_projections]
        unused = UNUSED.union(*map(gguf_names, unread))
        return {name for name in self._left if name not in unused}

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        tensor = self._find(name, shape)
        numbers = dequantise(self._stored(tensor, name), tensor.type).view(shape)
        if self._config.norm_offset and name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
            numbers = numbers - self._config.norm_offset  # llama.cpp stores the sum
        if name.endswith(".A_log"):
            numbers = (-numbers).log()  # llama.cpp stores the rate
        return numbers.to(dtype or self._dtype)

    def number(self, name: str) -> float:
        tensor = self._find(name, (1,))
        return float(dequantise(self._mapped(tensor).clone(), tensor.type).to(self._dtype))

    def embedding(self, name: str, vocabulary: int, hidden: int) -> torch.Tensor | GgufWeight:
        tensor = self._find(name, (vocabulary, hidden))
        weight = GgufWeight(self._stored(tensor, name), tensor.type)
        if tensor.type not in PLAIN_DTYPES:
            return weight
        return dequantise(weight.rows, weight.type).to(self._dtype)

    def weight(self, names: Sequence[str], sizes: Sequence[Size], inputs: int, bias: bool = False) -> Weight:
        """Return projections of the same input: one weight if all have the same GGUF type, else a StackedWeight."""
        parts = []
        latent = self._config.latent
        if latent is not None and names[0].endswith("kv_b_proj") and not self._has(f"{names[0]}.weight"):
            return self._expanded_latent(names[0], latent)
        if names[0] == "score":  # of one label: the rows of "yes" and "no" are one number, see gguf/rerankers.py
            yes, no = self.tensor("score.weight", 2, inputs, dtype=torch.float32)
            return PlainWeight((yes - no)[None].to(self._dtype), None)
        for name, size in _split(names, sizes):
            tensor = self._find(f"{name}.weight", (size, inputs))
            own_bias = self.tensor(f"{name}.bias", size) if bias else None
            parts.append(GgufWeight(self._stored(tensor, f"{name}.weight"), tensor.type, own_bias))
        if len({part.type for part in parts}) > 1:
            return StackedWeight(tuple(parts))
        rows, own_bias = torch.cat([part.rows for part in parts]), stacked([part.bias for part in parts])
        order = stored_columns(self._architecture, f"{names[0]}.weight", self._config)
        if parts[0].type is TensorType.MXFP4 and order is None:
            return Fp4Weight(*mxfp4_codes(rows), own_bias)
        return GgufWeight(rows, parts[0].type, own_bias, None if order is None else order.to(rows.device))

    def _has(self, name: str) -> bool:
        return any(each in self._left for each in gguf_names(name))

    def _find(self, name: str, shape: tuple[int, ...]) -> GgufTensor:
        """Return the description of a tensor, or of the tensor of several modules of which it is one."""
        known = gguf_names(name)
        found = next((each for each in known if each in self._left), None)
        if found is None:
            raise ModelError(f"the GGUF file has no tensor {' or '.join(known) or name}")
        tensor, modules = self._tensors[found], 1
        if is_fused(name, found):
            modules, shape = 2, (fused_rows(name, shape[0], self._config), *shape[1:])
        if expert_of(name) is not None:
            count = self._stacked(found)
            modules, shape = modules * count, (count, *shape)
        if not _holds(tensor.shape, shape):
            raise ModelError(f"tensor {found} is {list(tensor.shape)}, config.json implies {list(shape)}")
        left = self._parts_left.get(found, modules) - 1
        self._parts_left[found] = left
        if not left:
            del self._left[found]
        return tensor

    def _stacked(self, found: str) -> int:
        """Return the number of tensors that the GGUF tensor `found` stacks."""
        experts, gemma = self._config.experts, self._config.gemma
        if gemma is not None and gemma.altup is not None and found.startswith("altup_"):
            return gemma.altup.streams - 1
        return 1 if experts is None else experts.count

    def _expanded_latent(self, name: str, latent: LatentConfig) -> PlainWeight:
        """Read `kv_b_proj`, which newer files store as keys `[heads, rank, nope]` and values `[heads, value, rank]`."""
        heads, module = self._config.num_heads, name.removesuffix("kv_b_proj")
        keys = self.tensor(f"{module}k_b_proj.weight", heads, latent.rank, latent.nope_dim)
        values = self.tensor(f"{module}v_b_proj.weight", heads, latent.value_dim, latent.rank)
        return PlainWeight(torch.cat((keys.transpose(1, 2), values), dim=1).flatten(0, 1).contiguous())

    def _stored(self, tensor: GgufTensor, name: str) -> torch.Tensor:
        """Copy a tensor's rows, uint8 [rows, bytes of a row], into the row order of Hugging Face's checkpoints."""
        stored, expert, rows = self._mapped(tensor), expert_of(name), tensor.shape[0]
        if expert is not None:
            stored, rows = stored.view(rows, -1, tensor.row_bytes)[expert], tensor.shape[1]
        if self._device.type == "meta":
            stored = torch.empty_like(stored, device=self._device)
        order = stored_rows(self._architecture, name, tensor.name, rows, self._config)
        if order is not None:
            # A vector is stored as one row, so its numbers, not its rows, are reordered.
            stored = stored.reshape(rows, -1)[order].reshape(-1, tensor.row_bytes)
        return stored.to(self._device, copy=True)

    def _mapped(self, tensor: GgufTensor) -> torch.Tensor:
        stored = self._files[tensor.path][tensor.start : tensor.start + tensor.stored_bytes]
        return stored.view(-1, tensor.row_bytes)


def _split(names: Sequence[str], sizes: Sequence[Size]) -> Iterator[tuple[str, int]]:
    """Yield the modules of a GGUF file, and the number of their rows, of modules of a Hugging Face checkpoint."""
    for name, parts in zip(names, parts_of(names, sizes), strict=True):
        prefix, _, module = name.rpartition(".")
        if module in SPLIT:
            yield from zip((f"{prefix}.{part}" for part in SPLIT[module]), parts, strict=True)
        else:
            yield name, sum(parts)


def _holds(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Return whether a tensor of shape `stored` has the numbers of one of `shape`: GGUF files shape vectors freely."""
    if len(shape) == 1:
        return math.prod(stored) == shape[0]
    return [size for size in stored if size != 1] == [size for size in shape if size != 1]
