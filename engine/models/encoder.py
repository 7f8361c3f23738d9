"""Run encoders through transformers' code without padding: a step's prompts are concatenated as one sequence.

Only attention separates the prompts. Their lengths are passed as a keyword argument to a registered attention function,
as in transformers_model.py.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AttentionInterface, AutoModel, AutoModelForSequenceClassification
from transformers.initialization import no_init_weights

from baton.engine.config.model_config import EncoderConfig, ModelError
from baton.engine.config.resolved_config import read_transformers_config
from baton.engine.models.batch import Batch, make_batch
from baton.engine.models.transformers_checkpoint import check_whole, load_whole
from baton.engine.request import Chunk
from baton.engine.weights.files import read_safetensors_header
from baton.engine.weights.gguf_encoder import GgufEncoderWeights, read_dense
from baton.kernels.types import KvPages
from baton.text.host.files import check_file, reading
from baton.text.pooler_files import DenseModule, read_pooler
from baton.text.weight_files import SINGLE_FILE, gguf_files, is_gguf

logger = logging.getLogger(__name__)

NAME, KEYWORD = "baton_encoder", "prompt_lengths"
DENSE_PREFIX = "linear."  # of tensors in files of linear layers
UNUSED = ("pooler.",)  # parts that checkpoints may lack, since no vector needs them
CHECKED_LENGTHS = (11, 5)
MOST_EXACT, MOST_ROUNDED = 0.001, 0.2  # maximum relative error in float32, and in shorter dtypes


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    *,
    prompt_lengths: Sequence[int] | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention for transformers: inputs `[1, heads, tokens, head_dim]`, result `[1, tokens, heads, head_dim]`.

    `sliding_window`: visible tokens on each side, including the token itself. Raises: ModelError.
    """
    if prompt_lengths is None or attention_mask is not None or getattr(module, "is_causal", False):
        raise ModelError("its layers do not pass keyword arguments to attention, or build their own mask")
    lengths, is_grouped = list(prompt_lengths), query.shape[1] != key.shape[1]
    per_prompt = zip(query.split(lengths, 2), key.split(lengths, 2), value.split(lengths, 2), strict=True)
    parts = [
        F.scaled_dot_product_attention(
            own, keys, values, attn_mask=_near(own, sliding_window), scale=scaling, enable_gqa=is_grouped
        )
        for own, keys, values in per_prompt
    ]
    return torch.cat(parts, dim=2).transpose(1, 2), None


def _near(query: torch.Tensor, window: int | None) -> torch.Tensor | None:
    """Return the mask of the tokens within the window of each token, or None if all are visible."""
    tokens = query.shape[2]
    if window is None or window >= tokens:
        return None
    places = torch.arange(tokens, device=query.device)
    return (places[:, None] - places).abs() < window


class EncoderModel:
    """Encoder without KV. `loaded`: transformers' model, on its device, with the attention function NAME.

    `dense`: linear layers that sentence-transformers applies to pooled vectors. They are applied to the hidden states
    of pooled tokens, of which a vector is the mean.
    """

    def __init__(self, config: EncoderConfig, loaded: Any, dense: Sequence[torch.nn.Linear] = ()) -> None:
        self.config = config
        self.dtype: torch.dtype = loaded.dtype
        self.device: torch.device = loaded.device
        self._loaded = loaded
        self._body = loaded.base_model
        self._dense = torch.nn.Sequential(*dense)

    def hidden(self, batch: Batch, kv: KvPages | None = None) -> torch.Tensor:
        """Compute hidden states of complete prompts. Raises: ValueError for a chunk that does not begin its prompt."""
        batch.on_layers_start()
        lengths = [rows.stop - rows.start for rows in sorted(batch.chunk_rows, key=lambda rows: rows.start)]
        begins = batch.positions.new_tensor([0, *lengths[:-1]]).cumsum(0)
        if batch.positions[begins].any():
            raise ValueError(f"{self.config.family}: a chunk must begin at the first token of its prompt")
        return self._hidden(batch.token_ids, self._positions(batch, lengths), self._types(batch), lengths)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return float32 `[rows, labels]` of the classification head, which reads the hidden states of first tokens."""
        if self.config.labels is None:
            raise ValueError(f"{self.config.family}: the model has no classification head")
        first, model = hidden[:, None], self._loaded
        pooler = getattr(self._body, "pooler", None)
        logits: torch.Tensor = model.classifier(first if pooler is None else pooler(first))
        return logits.float()

    def normal(self, hidden: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self._dense(hidden.float())
        return made

    def check_against_itself(self) -> None:
        """Compare results of two concatenated prompts with transformers' for each prompt alone. Raises: ModelError."""
        ids = [[(7 + 5 * place) % self.config.vocab_size for place in range(length)] for length in CHECKED_LENGTHS]
        chunks = [Chunk(index, each, 0, range(len(each))) for index, each in enumerate(ids)]
        made = self.hidden(make_batch(chunks, 1, self.device)).float()
        self._loaded.set_attn_implementation("eager")
        try:
            alone = [self._body(input_ids=torch.tensor([each], device=self.device))[0][0] for each in ids]
        finally:
            self._loaded.set_attn_implementation(NAME)
        own = torch.cat(alone).float()
        error = (made - own).norm() / own.norm().clamp_min(1e-6)
        if not error <= (MOST_EXACT if self.dtype == torch.float32 else MOST_ROUNDED):
            raise ModelError(
                f"{self.config.family} cannot be served: concatenated prompts give other results (relative error "
                f"{error:.2g})"
            )

    def _hidden(
        self, token_ids: torch.Tensor, positions: torch.Tensor, types: torch.Tensor | None, lengths: Sequence[int]
    ) -> torch.Tensor:
        given = {} if types is None else {"token_type_ids": types[None]}
        output = self._body(
            input_ids=token_ids[None], position_ids=positions[None], **given, **{KEYWORD: tuple(lengths)}
        )
        hidden: torch.Tensor = output[0][0]
        return hidden

    def _positions(self, batch: Batch, lengths: Sequence[int]) -> torch.Tensor:
        """Return the positions of tokens; padding tokens in a client's prompt do not count, as in transformers."""
        padding_id = self.config.padding_id
        if padding_id is None:
            return batch.positions
        counted = (batch.token_ids != padding_id).long()
        return torch.cat([each.cumsum(0) for each in counted.split(list(lengths))]) * counted + padding_id

    def _types(self, batch: Batch) -> torch.Tensor | None:
        if not self.config.text_types:
            return None
        types = torch.zeros_like(batch.token_ids)
        if self.config.text_types > 1:
            for rows in batch.second_rows:
                types[rows] = 1
        return types


def load_encoder(
    folder: Path, config: EncoderConfig, dtype: torch.dtype, device: torch.device, progress: bool
) -> EncoderModel:
    """Load an encoder. Raises: ModelError for missing or surplus tensors, and if results differ from transformers'."""
    from baton.engine.models.transformers_checkpoint import progress_bar

    AttentionInterface.register(NAME, _attention)
    with progress_bar(progress):
        loaded = _load(folder, config, dtype)
    dense = [_dense(folder, each, device) for each in read_pooler(folder).dense]
    model = EncoderModel(config, loaded.to(device).eval(), dense)
    try:
        with torch.inference_mode():
            model.check_against_itself()
    except (RuntimeError, TypeError) as error:
        raise ModelError(f"{config.family} does not run: {error}") from error
    logger.info("%s is an encoder: running transformers' code, in batches without padding", config.family)
    return model


def _dense(folder: Path, module: DenseModule, device: torch.device) -> torch.nn.Linear:
    """Read a linear layer, in float32. Raises: ModelError."""
    path = folder / module.folder / SINGLE_FILE
    made = torch.nn.Linear(module.inputs, module.outputs, module.has_bias, device="meta")
    with reading(path, ModelError):
        if is_gguf(folder):
            stored = {"weight": read_dense(gguf_files(folder)[0], module.folder).to(device)}
        else:
            _check_dense(path, module)
            stored = load_file(path, str(device))
        state = {name.removeprefix(DENSE_PREFIX): each.float() for name, each in stored.items()}
        made.load_state_dict(state, assign=True)
    return made


def _load(folder: Path, config: EncoderConfig, dtype: torch.dtype) -> Any:
    if is_gguf(folder):
        return _load_gguf(folder, config, dtype)
    return load_whole(_kind(config), folder, dtype, NAME, _optional(config))


def check_encoder(folder: Path, config: EncoderConfig) -> None:
    """Check the tensors of the encoder and of linear layers as loading does, by headers only. Raises: ModelError."""
    if is_gguf(folder):
        _gguf_weights(folder, config)
        return
    check_whole(_kind(config), folder, _optional(config))
    for each in read_pooler(folder).dense:
        _check_dense(folder / each.folder / SINGLE_FILE, each)


def _check_dense(path: Path, module: DenseModule) -> None:
    """Raises: ModelError for a missing file, and for tensors other than those of the linear layer."""
    if not path.exists():
        raise ModelError(f"{path}: is missing; pickled weights are not read")
    check_file(path)
    stored = read_safetensors_header(path)
    found = {name.removeprefix(DENSE_PREFIX): tuple(each.shape) for name, each in stored.items()}
    bias = {"bias": (module.outputs,)} if module.has_bias else {}
    implied = {"weight": (module.outputs, module.inputs), **bias}
    if found != implied:
        raise ModelError(f"{path}: has tensors {found}, config.json implies {implied}")


def _kind(config: EncoderConfig) -> Any:
    return AutoModel if config.labels is None else AutoModelForSequenceClassification


def _gguf_weights(folder: Path, config: EncoderConfig) -> GgufEncoderWeights:
    with no_init_weights(), torch.device("meta"):
        described = _kind(config).from_config(read_transformers_config(folder))
    shapes = {name: tensor.shape for name, tensor in described.state_dict().items()}
    return GgufEncoderWeights(gguf_files(folder)[0], shapes, _optional(config))


def _load_gguf(folder: Path, config: EncoderConfig, dtype: torch.dtype) -> Any:
    state = _gguf_weights(folder, config).state()
    with no_init_weights():
        made = _kind(config).from_config(read_transformers_config(folder), dtype=dtype, attn_implementation=NAME)
    with torch.no_grad():
        made.load_state_dict(state, strict=False)
    return made


def _optional(config: EncoderConfig) -> tuple[str, ...]:
    return UNUSED if config.labels is None else ()
