"""Rerankers among the GGUF files of decoders: their score as sentence-transformers stores it, and their chat template.

llama.cpp's converter stores the rows of "yes" and "no" of the output head as a classifier, and a template with
`{query}` and `{document}`: conversion/qwen.py. It leaves out a head that is not tied to the embedding.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from baton.text.gguf.header import GgufHeader, GgufRefused, GgufTensor
from baton.text.gguf.metadata import EMBEDDING
from baton.text.gguf.metadata import HEAD as OUTPUT
from baton.text.pooler_files import CLASSIFIER

HEAD = "cls.output.weight"
TEMPLATE = "tokenizer.chat_template.rerank"
ANSWERS = ("yes", "no")


def write_reranker(header: GgufHeader, folder: Path, tokenizer: Any) -> dict[str, Any]:
    """Write the score of a file with a classifier, and set the template. Return further fields of config.json.

    Unless the classifier's rows are also in the output head, its only label is their difference. Raises: GgufRefused
    for another classifier.
    """
    template, vocabulary, shape = header.metadata.get(TEMPLATE), tokenizer.get_vocab(), header.tensors[HEAD].shape
    if not isinstance(template, str) or shape != (len(ANSWERS), header.tensors[EMBEDDING].shape[-1]):
        raise GgufRefused(
            f"{HEAD} of a {header.architecture} is supported only with {TEMPLATE}, and with the rows of "
            f"{' and '.join(ANSWERS)}; give the checkpoint in safetensors"
        )
    ids, fields = [vocabulary.get(answer) for answer in ANSWERS], dict[str, Any]()
    if None in ids or not _are_rows(header.tensors, ids):
        ids, fields = [0], {"architectures": [CLASSIFIER], "id2label": {"0": ANSWERS[0]}}
    tokenizer.chat_template = _jinja(template)
    path = folder / "1_LogitScore"
    path.mkdir()
    (path / "config.json").write_text(json.dumps(dict(zip(("true_token_id", "false_token_id"), ids, strict=False))))
    modules = [("", "models.Transformer"), (path.name, "models.LogitScore")]
    described = [{"idx": idx, "name": str(idx), "path": at, "type": kind} for idx, (at, kind) in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(described))
    return fields


def _are_rows(tensors: Mapping[str, GgufTensor], ids: list[int]) -> bool:
    """Return whether the classifier's rows are these rows of the output head, which may be the embedding."""
    head, output = tensors[HEAD], tensors.get(OUTPUT, tensors[EMBEDDING])
    if head.type != output.type:
        return False
    return all(_row(head, index) == _row(output, token_id) for index, token_id in enumerate(ids))


def _row(tensor: GgufTensor, index: int) -> bytes:
    with tensor.path.open("rb") as file:
        file.seek(tensor.start + index * tensor.row_bytes)
        return file.read(tensor.row_bytes)


def _jinja(template: str) -> str:
    """Convert a template with `{query}` and `{document}` to one of messages of these roles."""
    parts = re.split(r"\{(query|document)\}", template)
    contents = "(messages | selectattr('role', 'equalto', '{}') | first)['content']"
    values = [
        contents.format(part) if index % 2 else json.dumps(part, ensure_ascii=False) for index, part in enumerate(parts)
    ]
    return "".join(f"{{{{ {value} }}}}" for value in values)
