"""Plain checkpoint of a GGUF file: the same model in float32, to be quantised in other ways."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from baton.engine.config.config_file import read_model_config
from baton.engine.config.model_config import DecoderConfig
from baton.engine.load import DecoderParts
from baton.engine.models.linear import MatmulBackend
from baton.engine.weights.gguf_file import dequantise
from baton.engine.weights.read import GgufWeights
from baton.text.gguf.folder import folder_of
from baton.text.gguf.header import GgufTensor
from baton.text.weight_files import SINGLE_FILE, gguf_files

CPU = torch.device("cpu")


class _Recorder(GgufWeights):
    """Source of weights that records every tensor read from it, in float32."""

    def __init__(self, path: Path, config: DecoderConfig) -> None:
        super().__init__(path, config, torch.float32, CPU)
        self.read: dict[str, torch.Tensor] = {}

    def tensor(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        self.read[name] = super().tensor(name, *shape, dtype=dtype)
        return self.read[name]

    def _stored(self, tensor: GgufTensor, name: str) -> torch.Tensor:
        stored = super()._stored(tensor, name)
        self.read[name] = dequantise(stored, tensor.type).view(-1, tensor.shape[-1])
        return stored


def plain_copy(file: Path, folder: Path) -> Path:
    """Write the checkpoint of a model without experts and recurrent layers to `folder`, which is created; return it.

    Raises: GgufRefused, ModelError.
    """
    source = folder_of(file)
    config = read_model_config(source)
    if not isinstance(config, DecoderConfig) or config.recurrent is not None:
        raise TypeError(f"{file}: only decoders without recurrent layers can be copied")
    recorder = _Recorder(gguf_files(source)[0], config)
    DecoderParts(recorder, MatmulBackend(CPU, torch.float32)).decoder(config)
    folder.mkdir(parents=True)
    for each in (*source.glob("*.json"), *source.glob("*.jinja")):
        shutil.copy(each, folder)
    fields = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields | {"dtype": "float32", "torch_dtype": "float32"}))
    save_file({name: tensor.contiguous() for name, tensor in recorder.read.items()}, folder / SINGLE_FILE)
    return folder
