"""Read single experts from a checkpoint that stacks all experts in one tensor per projection (gpt-oss, Granite 4).

For example, `experts.3.up_proj.weight` is read from `experts.gate_up_proj`, `[experts, inputs, outputs]`, in which gate
and up outputs alternate. Biases, and blocks and scales of MXFP4, are stacked as `[experts, outputs, ...]`. Granite's
`experts.3.input_linear.weight` is read from `input_linear.weight`, `[experts, outputs, inputs]`.
"""

import re
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from baton.engine.config.model_config import ModelError

_NAME = re.compile(r"(?P<module>.+\.experts\.)(?P<expert>\d+)\.(?P<part>\w+_proj)\.(?P<kind>weight|bias|blocks|scales)")
_GRANITE = re.compile(r"(?P<module>.+\.)experts\.(?P<expert>\d+)\.(?P<part>(?:in|out)put_linear\.weight)")
_SUFFIXES = {"weight": "", "bias": "_bias", "blocks": "_blocks", "scales": "_scales"}
_PLACES = {"gate_proj": ("gate_up_proj", 0, 2), "up_proj": ("gate_up_proj", 1, 2), "down_proj": ("down_proj", 0, 1)}


class StoredTensors(Protocol):
    """Tensors of safetensors files by name, in any dtype."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape. Raises: ModelError if the tensor is missing."""

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        """Return the tensor as stored, on the compute device. Raises: ModelError if it is missing or does not fit."""


class _Place(NamedTuple):
    """Location of an expert's tensor in the stacked tensor `name`."""

    name: str
    expert: int
    first: int  # index of the expert tensor's first output; its outputs are `step` apart
    step: int
    is_transposed: bool


@dataclass(slots=True)
class _Whole:
    tensor: torch.Tensor
    left: int  # number of expert tensors not yet taken from `tensor`


@dataclass(frozen=True, slots=True)
class ExpertsApart:
    """Stored tensors, but with one tensor per expert instead of stacked ones.

    A stacked tensor stays in memory until the tensors of all its experts are taken.
    """

    stored: StoredTensors
    count: int  # number of experts
    _held: dict[str, _Whole] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        place = _place(name)
        return self.stored.has(name) if place is None else place.name in self._held or self.stored.has(place.name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored.shape(name)

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        place = _place(name)
        if place is None:
            return self.stored.take(name, dtypes, *shape)
        if place.expert >= self.count:
            raise ModelError(f"the checkpoint has no tensor {name}")
        whole = self._held.get(place.name)
        if whole is None:
            of_all = (shape[0] * place.step, *shape[1:])
            of_all = of_all[::-1] if place.is_transposed else of_all
            tensor = self.stored.take(place.name, dtypes, self.count, *of_all)
            whole = self._held[place.name] = _Whole(tensor, self.count * place.step)
        whole.left -= 1
        if not whole.left:
            del self._held[place.name]
        own = whole.tensor[place.expert]
        own = own.T if place.is_transposed else own
        return own[place.first :: place.step].clone(memory_format=torch.contiguous_format)


def _place(name: str) -> _Place | None:
    """Return the location of an expert's tensor, or None if the tensor is not an expert's."""
    if (found := _GRANITE.fullmatch(name)) is not None:
        return _Place(found["module"] + found["part"], int(found["expert"]), 0, 1, is_transposed=False)
    found = _NAME.fullmatch(name)
    if found is None:
        return None
    module, first, step = _PLACES[found["part"]]
    whole = f"{found['module']}{module}{_SUFFIXES[found['kind']]}"
    return _Place(whole, int(found["expert"]), first, step, found["kind"] == "weight")
