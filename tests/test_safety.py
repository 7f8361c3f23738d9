"""Not in the sources: code that runs data, ports that listen everywhere, files and packages too large to read."""

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_OURS = {"node_modules", "build", "__pycache__", "runtime"}

UNSAFE_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
UNSAFE_BUILTINS = {"eval", "exec"}
UNSAFE_ATTRIBUTES = {
    ("torch", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("numpy", "load"),
    ("np", "load"),
    ("dist", "recv_object_list"),
    ("dist", "all_gather_object"),
    ("dist", "broadcast_object_list"),
}
UNSAFE_NAMES = {"TCPStore"}  # listens on every interface, whatever address it is given
UNSAFE_KEYWORDS = {"trust_remote_code", "allow_pickle"}
UNSAFE_WORD = re.compile(
    r"\b({})\b".format(
        "|".join(
            UNSAFE_MODULES | UNSAFE_BUILTINS | UNSAFE_NAMES | UNSAFE_KEYWORDS | {name for _, name in UNSAFE_ATTRIBUTES}
        )
    )
)


def unsafe_uses(source: str) -> Iterator[str]:
    """What a module must not use, as `line: what`. `model.eval()` and Redis' EVAL are methods, and fine."""
    if source.isascii() and not UNSAFE_WORD.search(source):  # other letters can spell the same name
        return
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = node.module if isinstance(node, ast.ImportFrom) else None
            names = {alias.name for alias in node.names}
            used = {name.partition(".")[0] for name in ({module} if module else names)} & UNSAFE_MODULES
            used |= names & UNSAFE_NAMES
            used |= {name for name in names if (module, name) in UNSAFE_ATTRIBUTES}
            yield from (f"{node.lineno}: {name}" for name in sorted(used))
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in UNSAFE_BUILTINS:
                yield f"{node.lineno}: {node.func.id}"
            for keyword in node.keywords:
                off = isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                if keyword.arg in UNSAFE_KEYWORDS and not off:
                    yield f"{node.lineno}: {keyword.arg}"
        elif isinstance(node, ast.Attribute):
            owner = node.value.id if isinstance(node.value, ast.Name) else None
            if node.attr in UNSAFE_NAMES or (owner, node.attr) in UNSAFE_ATTRIBUTES:
                yield f"{node.lineno}: {node.attr}"


def source_files(*suffixes: str) -> Iterator[Path]:
    """Files of the repository with one of the suffixes; hidden folders, builds and generated code left out."""
    for folder, folders, names in os.walk(ROOT):
        folders[:] = sorted(name for name in folders if not name.startswith(".") and name not in NOT_OURS)
        for path in (Path(folder, name) for name in sorted(names) if not name.startswith(".")):
            if path.suffix in suffixes and path.is_file() and "_pb2" not in path.name:
                yield path


def test_sources_run_no_data_as_code() -> None:
    uses = [f"{path.relative_to(ROOT)}:{use}" for path in source_files(".py") for use in unsafe_uses(path.read_text())]
    assert uses == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from marshal import loads",
        "import torch\ntorch.load('x')",
        "from torch import load",
        "eval('1')",
        "import yaml\nyaml.load(x)",
        "from torch.distributed import TCPStore",
        "torch.distributed.TCPStore('h', 1)",
        "\uff45val('1')",  # Python reads the wide letter as e
        "AutoModel.from_pretrained('x', trust_remote_code=True)",
    ],
)
def test_the_checker_finds(source: str) -> None:
    assert list(unsafe_uses(source))


@pytest.mark.parametrize("source", ["model.eval()", "json.load(f)", "redis.eval(script)", "f(trust_remote_code=False)"])
def test_the_checker_allows(source: str) -> None:
    assert not list(unsafe_uses(source))
