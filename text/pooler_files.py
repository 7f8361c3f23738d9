"""Pooling and scores of a checkpoint, read from `config.json`, `modules.json` and the folders named in `modules.json`.

If files do not define the pooling, a decoder pools its last token and normalises the vector, as in training. An encoder
pools the mean of all tokens, the default of sentence-transformers.
https://sbert.net/docs/package_reference/sentence_transformer/modules.html and .../cross_encoder/modules.html.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

from baton.text.host.files import FileRefused, read_json, reads
from baton.text.pooling import Pooling, PoolingKind, sigmoid

MODES = {"cls": PoolingKind.FIRST, "mean": PoolingKind.MEAN, "lasttoken": PoolingKind.LAST}
FLAGS = {"pooling_mode_cls_token": "cls", "pooling_mode_mean_tokens": "mean", "pooling_mode_lasttoken": "lasttoken"}
FLAG_PREFIX = "pooling_mode_"
LAST_TOKEN = Pooling()
ENCODERS = frozenset({"bert", "camembert", "modernbert", "nomic_bert", "roberta", "xlm-roberta"})
"""Values of `model_type` of encoders, whose tokens attend to all tokens of the input."""
ENCODERS_IF_STATED = frozenset({"gemma3_text"})
"""Values of `model_type` of decoders that are encoders with `use_bidirectional_attention`, such as EmbeddingGemma."""
ENCODERS_WITH_HEADS = ENCODERS - {"modernbert", "nomic_bert"}
BEHIND_PADDING = frozenset({"camembert", "roberta", "xlm-roberta"})
"""Encoders whose first position is the padding token's id plus one."""
CLASSIFIER = "ForSequenceClassification"
IDENTITY = "torch.nn.modules.linear.Identity"
ACTIVATIONS = {"torch.nn.modules.activation.Sigmoid": True, IDENTITY: False}


class ModelKind(StrEnum):
    """Purpose of a checkpoint. Only a language model generates answers."""

    LANGUAGE_MODEL = "a language model"
    ENCODER = "an encoder, which makes vectors and no answers"
    RERANKER = "a reranker with a classification head, which gives scores and no answers"


def model_kind(config: Mapping[str, Any]) -> ModelKind:
    """Return the kind of a checkpoint from the content of config.json."""
    if any(str(name).endswith(CLASSIFIER) for name in config.get("architectures") or ()):
        return ModelKind.RERANKER
    return ModelKind.ENCODER if is_encoder(config) else ModelKind.LANGUAGE_MODEL


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Return whether config.json describes an encoder."""
    family, stated = config.get("model_type"), config.get("use_bidirectional_attention")
    return family in ENCODERS or (family in ENCODERS_IF_STATED and stated is True)


def kind_of(folder: Path) -> ModelKind:
    """Return the kind of a checkpoint: LANGUAGE_MODEL if config.json is unreadable, since loading reports the fault."""
    try:
        return _kind_of(folder)
    except PoolingRefused:
        return ModelKind.LANGUAGE_MODEL


class PoolingRefused(FileRefused, ValueError):
    """Error: the pooling of a checkpoint is not supported. The message names file and field."""


@dataclass(frozen=True, slots=True)
class LogitScore:
    """Score of a reranker: the logit of one token after query and document, or the difference of two tokens' logits.

    With a classification head, `token_ids` has one entry, the head's only label, and query and document are tokenised
    as a `pair`.
    """

    token_ids: tuple[int, ...]
    kind: PoolingKind = PoolingKind.LAST
    pair: bool = False  # False: the chat template joins query and document
    is_probability: bool = True  # False: the score is the logit

    @property
    def pooling(self) -> Pooling:
        return Pooling(self.kind, self.token_ids)

    def value(self, logits: tuple[float, ...]) -> float:
        """Return the score from the logits of `token_ids`."""
        log_odds = logits[0] - (logits[1] if len(logits) > 1 else 0.0)
        return sigmoid(log_odds) if self.is_probability else log_odds


@dataclass(frozen=True, slots=True)
class Prompts:
    """Prefixes of inputs, by their names in config_sentence_transformers.json."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None  # name of the default text
    refusal: str = ""  # reason why the texts cannot be used; empty if they can

    def text(self, name: str | None) -> str:
        """Return the prefix with this name; None: the default prefix. Raises: ValueError, which names the field."""
        chosen = self.default if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.texts:
            known = ", ".join(sorted(self.texts)) or "none"
            raise ValueError(f"prompt_name: the model has no prompt of that name; it has {known}")
        if self.texts[chosen] and self.refusal:
            raise ValueError(f"prompt_name: {self.refusal}")
        return self.texts[chosen]


class DenseModule(NamedTuple):
    """Linear layer after the pooling. `folder`: name of its folder in that of the checkpoint."""

    folder: str
    inputs: int
    outputs: int
    has_bias: bool


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pooling of one checkpoint. A checkpoint with a `score` is a reranker and computes no vectors."""

    pooling: Pooling = LAST_TOKEN
    normalises: bool = True
    dimensions: tuple[int, ...] = ()  # supported sizes of shortened vectors; empty: any
    score: LogitScore | None = None
    size: int | None = None  # size of the full vector, if config.json has the usual field
    prompts: Prompts = Prompts()
    kind: ModelKind = ModelKind.LANGUAGE_MODEL
    dense: tuple[DenseModule, ...] = ()

    def check_dimensions(self, dimensions: int, size: int | None) -> None:
        """Check the size of a shortened vector. `size`: size of the full vector, if known. Raises: ValueError."""
        if dimensions < 1 or (size is not None and dimensions > size):
            allowed = "at least 1" if size is None else f"from 1 to {size}"
            raise ValueError(f"dimensions: must be {allowed}, not {dimensions}")
        if self.dimensions and dimensions not in self.dimensions and dimensions != size:
            known = ", ".join(map(str, self.dimensions))
            raise ValueError(f"dimensions: this model's vectors can be cut to {known}, not to {dimensions}")


@reads(PoolingRefused, "config.json")
def _kind_of(folder: Path) -> ModelKind:
    return model_kind(_read(folder / "config.json"))


@reads(PoolingRefused)
def read_pooler(folder: Path) -> Pooler:
    """Read the pooling of a checkpoint. Raises: PoolingRefused."""
    config = _read(folder / "config.json")
    kind, stated = model_kind(config), config.get("hidden_size")
    size = stated if isinstance(stated, int) else None
    if kind is ModelKind.RERANKER:
        return Pooler(score=replace(head_score(config), pair=not _has_template(folder)), size=size, kind=kind)
    bare = Pooler(dimensions=tuple(config.get("matryoshka_dimensions") or ()), size=size, kind=kind)
    modules, prompts = folder / "modules.json", _prompts(folder)
    if modules.exists():
        return _read_modules(folder, replace(bare, prompts=prompts))
    if kind is ModelKind.ENCODER:
        return replace(bare, pooling=Pooling(PoolingKind.MEAN), normalises=False, prompts=prompts)
    return replace(bare, prompts=prompts)


def _read_modules(folder: Path, bare: Pooler) -> Pooler:
    pooling, score, normalises, prompts, dense = LAST_TOKEN, None, False, bare.prompts, list[DenseModule]()
    for module in read_modules(folder / "modules.json"):
        kind, at = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if not at.resolve().is_relative_to(folder.resolve()):
            raise PoolingRefused(f"{folder / 'modules.json'}: path {str(module['path'])!r} is outside the folder")
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                config = _read(at / "config.json")
                pooling = Pooling(_mode(config, at.name))
                if config.get("include_prompt") is False:
                    prompts = replace(prompts, refusal=f"{at.name}/config.json: include_prompt false is not served")
            case "Normalize":
                normalises = True
            case "LogitScore":
                score = _logit_score(_read(at / "config.json"), at.name)
            case "Dense" if bare.kind is ModelKind.ENCODER and not normalises:
                inputs = dense[-1].outputs if dense else bare.size
                dense.append(_dense(_read(at / "config.json"), str(at.relative_to(folder)), inputs))
            case _:
                raise PoolingRefused(f"modules.json: the module {kind} of the checkpoint is not served")
    made = replace(bare, pooling=pooling, normalises=normalises, score=score, prompts=prompts, dense=tuple(dense))
    return replace(made, size=dense[-1].outputs) if dense else made


def _has_template(folder: Path) -> bool:
    """Return whether a chat template joins query and document, as in rerankers that were made from a GGUF file."""
    path = folder / "modules.json"
    return path.exists() and any(str(each.get("type")).endswith("LogitScore") for each in read_modules(path))


def _dense(config: Mapping[str, Any], folder: str, inputs: int | None) -> DenseModule:
    """Return a linear layer that reads `inputs` numbers. Raises: PoolingRefused."""
    stated, outputs, activation = (config.get(name) for name in ("in_features", "out_features", "activation_function"))
    if stated != inputs or not isinstance(inputs, int) or not isinstance(outputs, int) or outputs < 1:
        raise PoolingRefused(f"{folder}/config.json: in_features {stated!r} and out_features {outputs!r} do not fit")
    if activation != IDENTITY:
        raise PoolingRefused(f"{folder}/config.json: activation_function {activation!r} is not served, only {IDENTITY}")
    return DenseModule(folder, inputs, outputs, config.get("bias", True) is True)


def read_modules(path: Path) -> list[dict[str, Any]]:
    """Return the modules of a checkpoint of sentence-transformers. Raises: PoolingRefused."""
    modules = read_json(path, PoolingRefused, list)
    if not all(isinstance(each, dict) for each in modules):
        raise PoolingRefused(f"{path}: must be an array of objects")
    return modules


def _prompts(folder: Path) -> Prompts:
    path = folder / "config_sentence_transformers.json"
    if not path.exists():
        return Prompts()
    config = _read(path)
    texts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str) for text in texts.values()):
        raise PoolingRefused(f"{path.name}: prompts must be an object of name: text")
    if default is not None and default not in texts:
        raise PoolingRefused(f"{path.name}: default_prompt_name {default!r} is not the name of one of its prompts")
    return Prompts(texts, default)


def head_score(config: Mapping[str, Any]) -> LogitScore:
    """Return the score that a classification head computes, as sentence-transformers' CrossEncoder reads config.json.

    Raises: PoolingRefused.
    """
    family = config.get("model_type")
    labels = len(config["id2label"]) if config.get("id2label") else config.get("num_labels", 2)
    if labels != 1:
        raise PoolingRefused(f"config.json: a classification head of {labels} labels is not served; it must have 1")
    if is_encoder(config) and family not in ENCODERS_WITH_HEADS:
        raise PoolingRefused(f"config.json: a classification head of model_type {family!r} is not served")
    own = config.get("sentence_transformers")
    stated = own.get("activation_fn") if isinstance(own, dict) else None
    stated = stated or config.get("sbert_ce_default_activation_function")
    if stated is not None and stated not in ACTIVATIONS:
        raise PoolingRefused(f"config.json: the activation {stated} of scores is not served; known: Sigmoid, Identity")
    kind = PoolingKind.FIRST if is_encoder(config) else PoolingKind.LAST
    return LogitScore((0,), kind, pair=True, is_probability=stated is None or ACTIVATIONS[stated])


def _mode(config: Mapping[str, Any], folder: str) -> PoolingKind:
    stated = config.get("pooling_mode")
    modes = [stated] if stated else [FLAGS.get(name, name) for name in config if _is_set(config, name)]
    if len(modes) != 1 or modes[0] not in MODES:
        said = " and ".join(map(str, modes)) or "none"
        raise PoolingRefused(f"{folder}/config.json: pooling {said} is not served; supported: {', '.join(MODES)}")
    return MODES[modes[0]]


def _is_set(config: Mapping[str, Any], name: str) -> bool:
    return name.startswith(FLAG_PREFIX) and config[name] is True


def _logit_score(config: Mapping[str, Any], folder: str) -> LogitScore:
    given = (config.get("true_token_id"), config.get("false_token_id"))
    token_ids = tuple(each for each in given if each is not None)
    if given[0] is None or not all(isinstance(each, int) and each >= 0 for each in token_ids):
        raise PoolingRefused(f"{folder}/config.json: true_token_id and false_token_id must be token ids")
    return LogitScore(token_ids)


def _read(path: Path) -> dict[str, Any]:
    return read_json(path, PoolingRefused, dict)
