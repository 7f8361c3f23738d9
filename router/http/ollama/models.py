"""Descriptions of served models in Ollama's format. Values that are unknown here are empty or omitted. Pure."""

from collections.abc import Iterator
from typing import Any

from baton.router.model.chat_template import ChatTemplate
from baton.router.model.served_model import ChosenModel
from baton.text.output.thoughts import thoughts_of

_PARAMETERS = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_PARAMETERS |= {"typical_p": "typical_p", "repetition_penalty": "repeat_penalty"}
"""Ollama's names of the sampling defaults of a checkpoint, by the router's names."""
_NAME_COLUMN = 30


def listed(chosen: ChosenModel, served_since: str) -> dict[str, Any]:
    """Return a model's entry in the list of models. `served_since`: time in RFC 3339 format."""
    return {**_named(chosen), "modified_at": served_since}


def running(chosen: ChosenModel) -> dict[str, Any]:
    """Return a model's entry in the list of loaded models. It has no expiry time: models are not unloaded."""
    return {**_named(chosen), "context_length": chosen.served.max_model_len}


def shown(chosen: ChosenModel) -> dict[str, Any]:
    served = chosen.served
    template = served.tokenizer.chat_template
    family = served.family or "general"
    return {
        "template": template.source if template is not None else "",
        "parameters": "\n".join(_parameters(chosen)),
        "details": _details(chosen),
        "model_info": {
            "general.architecture": served.family,
            f"{family}.context_length": served.max_model_len,
            f"{family}.vocab_size": served.vocab_size,
        },
        "capabilities": list(_capabilities(template)),
    }


def _named(chosen: ChosenModel) -> dict[str, Any]:
    digest = chosen.served.fingerprint.hex() if chosen.adapter is None else chosen.adapter.digest.rpartition(":")[2]
    return {"name": chosen.name, "model": chosen.name, "digest": digest, "details": _details(chosen)}


def _details(chosen: ChosenModel) -> dict[str, Any]:
    """Return a model's object `details` with all fields, since Ollama's clients require them."""
    family = chosen.served.family
    return {
        "parent_model": chosen.served.name if chosen.lora is not None else "",
        "format": "",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": "",
    }


def _parameters(chosen: ChosenModel) -> Iterator[str]:
    for ours, theirs in _PARAMETERS.items():
        yield f"{theirs:<{_NAME_COLUMN}} {getattr(chosen.served.defaults, ours):g}"


def _capabilities(template: ChatTemplate | None) -> Iterator[str]:
    yield "completion"
    if template is not None:
        yield "tools"
    if template is not None and thoughts_of(template.source, "") is not None:
        yield "thinking"
