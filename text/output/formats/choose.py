"""Tool call formats by name, and the choice of a model's format, which its chat template teaches."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from baton.text.output.formats import deepseek, glm, harmony, hermes, llama, mistral, pythonic, qwen_coder
from baton.text.output.formats.deepseek import DeepseekReader
from baton.text.output.formats.glm import GlmReader
from baton.text.output.formats.harmony import HarmonyReader
from baton.text.output.formats.hermes import HermesReader
from baton.text.output.formats.llama import LlamaReader
from baton.text.output.formats.mistral import MistralReader
from baton.text.output.formats.pythonic import PythonicReader
from baton.text.output.formats.qwen_coder import QwenCoderReader
from baton.text.output.pieces import Schemas, ToolParser


class Template(Protocol):
    """Chat template: its source, and the name of its tool call format if the router's flag states one."""

    @property
    def source(self) -> str: ...

    @property
    def tool_format(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Format:
    """Format of tool calls.

    `marks`: texts by which a template that teaches the format is recognised. `special`: special tokens that
    the reader needs as text. `begins`: tags with which calls begin; empty if the reader itself distinguishes calls from
    text.
    """

    name: str
    reader: Callable[[Schemas], ToolParser]
    marks: tuple[str, ...]
    special: frozenset[str] = frozenset()
    begins: tuple[str, ...] = ()
    has_channels: bool = False  # whether all answers and their reasoning are in channels


_KNOWN = (
    Format("harmony", HarmonyReader, ("<|channel|>",), harmony.TOKENS, has_channels=True),
    Format("deepseek", DeepseekReader, ("<｜tool▁call▁begin｜>",), deepseek.TOKENS, (deepseek.CALLS, deepseek.CALL)),
    Format("mistral", MistralReader, ("[TOOL_CALLS]",), mistral.TOKENS, (mistral.OPEN,)),
    Format("pythonic", PythonicReader, ("[func_name1(", "[func1("), pythonic.TOKENS),
    Format("glm", GlmReader, ("<arg_key>",), begins=(glm.OPEN,)),
    Format("qwen_coder", QwenCoderReader, ("<function=",), begins=(qwen_coder.OPEN, qwen_coder.FUNCTION)),
    Format("hermes", HermesReader, ("<tool_call>",), begins=(hermes.OPEN,)),
    Format("llama", LlamaReader, (llama.PYTHON_TAG, '"parameters"'), llama.TOKENS),
)
FORMATS: Mapping[str, Format] = {each.name: each for each in _KNOWN}
"""Formats by their names in `--tool-format`. The first format that has a mark in a template is chosen for the model."""


def format_of(template: Template | None) -> Format | None:
    """Return the format that the router's flag names or that the template teaches; None if neither is known."""
    if template is not None and template.tool_format:
        return FORMATS[template.tool_format]
    source = template.source if template is not None else ""
    return next((each for each in FORMATS.values() if any(mark in source for mark in each.marks)), None)
