"""Read single experts from a checkpoint that stacks all experts in one tensor per projection.

For example, `experts.3.up_proj.weight` is read from `experts.gate_up_proj`. StackedExperts lists the layouts of
weights. Biases, and blocks and scales of MXFP4, are stacked as `[experts, outputs, ...]`. Granite's
`experts.3.input_linear.weight` is read from `input_linear.weight`.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from baton.engine.config.model_config import ModelError, StackedExperts

_NAME = re.compile(r"(?P<module>.+\.experts\.)(?P<expert>\d+)\.(?P<part>\w+_proj)\.(?P<kind>weight|bias|blocks|scales)")
_GRANITE = re.compile(r"(?P<module>.+\.)experts\.(?P<expert>\d+)\.(?P<part>(?:in|out)put_linear\.weight)")
_SUFFIXES = {"weight": "", "bias": "_bias", "blocks": "_blocks", "scales": "_scales"}
_Load = Callable[..., torch.Tensor]  # `take` or `read` of StoredTensors
_PLACES = {"gate_proj": ("gate_up_proj", 0), "up_proj": ("gate_up_proj", 1), "down_proj": ("down_proj", 0)}


class StoredTensors(Protocol):
    """Tensors of safetensors files by name, in any dtype."""

    def has(self, name: str) -> bool: ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape. Raises: ModelError if the tensor is missing."""

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        """Return the tensor as stored, on the compute device. Raises: ModelError if it is missing or does not fit."""

    def read(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        """Return a tensor whose content decides: as `take`, but instead of on the meta device on the CPU."""


class _ExpertPart(NamedTuple):
    """Location of an expert's tensor in the stacked tensor `name`."""

    name: str
    expert: int
    part: int  # index of the projection in the stacked tensor
    parts: int  # number of projections in the stacked tensor
    is_weight: bool


@dataclass(slots=True)
class _Whole:
    tensor: torch.Tensor
    left: int  # number of expert tensors not yet taken from `tensor`


@dataclass(frozen=True, slots=True)
class ExpertsApart:
    """Stored tensors, but with one tensor per expert also where the checkpoint has stacked ones.

    A stacked tensor stays in memory until the tensors of all its experts are taken.
    """

    stored: StoredTensors
    count: int  # number of experts
    layout: StackedExperts
    _held: dict[str, _Whole] = field(default_factory=dict)

    def has(self, name: str) -> bool:
        place = self._place(name)
        return self.stored.has(name) if place is None else place.name in self._held or self.stored.has(place.name)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.stored.shape(name)

    def read(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        return self._load(self.stored.read, name, dtypes, shape)

    def take(self, name: str, dtypes: tuple[torch.dtype, ...], *shape: int) -> torch.Tensor:
        return self._load(self.stored.take, name, dtypes, shape)

    def _load(self, load: _Load, name: str, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]) -> torch.Tensor:
        place = self._place(name)
        if place is None:
            return load(name, dtypes, *shape)
        if place.expert >= self.count:
            raise ModelError(f"the checkpoint has no tensor {name}")
        whole = self._held.get(place.name)
        if whole is None:
            tensor = self._whole(load, place, dtypes, (shape[0] * place.parts, *shape[1:]))
            whole = self._held[place.name] = _Whole(tensor, self.count * place.parts)
        whole.left -= 1
        if not whole.left:
            del self._held[place.name]
        own = whole.tensor[place.expert]
        if self.layout is StackedExperts.INTERLEAVED:
            own = own[place.part :: place.parts]
        else:
            own = own[place.part * shape[0] : (place.part + 1) * shape[0]]
        return own.clone(memory_format=torch.contiguous_format)

    def _whole(
        self, load: _Load, place: _ExpertPart, dtypes: tuple[torch.dtype, ...], shape: tuple[int, ...]
    ) -> torch.Tensor:
        """Return a stacked tensor as `[experts, outputs, ...]`. `shape`: shape of one expert's part."""
        rows, columns, stored = (self.count, *shape), (self.count, *shape[::-1]), self.stored.shape(place.name)
        is_turned = place.is_weight and self.layout is not StackedExperts.ROWS
        if place.is_weight and rows != columns and stored in (rows, columns):
            is_turned = stored == columns  # tools write some families in either layout
        if is_turned:
            return load(place.name, dtypes, *columns).transpose(1, 2)
        return load(place.name, dtypes, *rows)

    def _place(self, name: str) -> _ExpertPart | None:
        """Return the location of an expert's tensor; None if it is stored alone, or is not an expert's."""
        if self.stored.has(name):
            return None
        if (found := _GRANITE.fullmatch(name)) is not None:
            return _ExpertPart(found["module"] + found["part"], int(found["expert"]), 0, 1, is_weight=True)
        found = _NAME.fullmatch(name)
        if found is None:
            return None
        module, part = _PLACES[found["part"]]
        whole = f"{found['module']}{module}{_SUFFIXES[found['kind']]}"
        parts = sum(name == module for name, _ in _PLACES.values())
        return _ExpertPart(whole, int(found["expert"]), part, parts, found["kind"] == "weight")
