"""Who may import whom. Read from the sources, so that lazy imports count too."""

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

ALLOWED = {
    "client": {"protos"},
    "cli": {
        "client",
        "service",
        "engine",
        "kernels",
        "router",
        "gateway",
        "protos",
        "chaos",
        "simulation",
    },  # gateway and router where a batch is checked as the server checks; they and the others where measured
    "chaos": {"client", "cli", "engine", "kernels", "protos", "service"},  # of cli: processes, figures and pictures
    "simulation": {"client", "router", "prefill_worker", "decode_worker", "worker", "engine", "kvtransfer"}
    | {"protos", "service"},
    "router": {"protos", "service", "structured"},
    "gateway": {"router", "service", "structured"},
    "prefill_worker": {"worker", "protos", "service", "engine", "kvtransfer"},
    "decode_worker": {"worker", "protos", "service", "engine", "kvtransfer"},
    "elastic_worker": {"prefill_worker", "decode_worker", "worker", "protos", "service", "engine"},
    "worker": {"protos", "service", "engine", "kvtransfer", "structured"},
    "engine": {"kernels", "structured"},
    "kvtransfer": {"kernels"},
    "kernels": set[str](),
    "protos": set[str](),
    "service": set[str](),
    "structured": set[str](),
}
"""Each folder and those of ours that it may import."""

FORBIDDEN = {
    "client": {"torch", "transformers", "redis", "opentelemetry"},
    "router": {"torch", "safetensors", "triton"},
    "gateway": {"torch", "transformers", "safetensors", "triton"},
    "service": {"torch", "transformers"},
}
"""What else a folder must do without."""

BARE_MACHINE = {"torch", "triton", "transformers", "safetensors", "grpc"}
BARE_MACHINE |= {"numpy", "tokenizers", "tqdm", "huggingface_hub"}  # transformers needs them
BARE_FOLDERS = {"engine", "kvtransfer", "kernels"}
"""Folders that must import on a machine with nothing but BARE_MACHINE."""


def imported_packages(source: str) -> Iterator[str]:
    """Top-level names of all absolute imports of a module, wherever they stand in it."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module.partition(".")[0]


def violations(root: Path) -> list[str]:
    """`file imports package` for each import that the rules forbid."""
    found = []
    for folder, allowed in ALLOWED.items():
        for path in sorted((root / folder).rglob("*.py")):
            for package in imported_packages(path.read_text()):
                ours = package in ALLOWED
                bad = ours and package != folder and package not in allowed
                bad = bad or package in FORBIDDEN.get(folder, ())
                known = ours or package in BARE_MACHINE or package in sys.stdlib_module_names
                bad = bad or (folder in BARE_FOLDERS and not known)
                if bad:
                    found.append(f"{path.relative_to(root)} imports {package}")
    return found


def test_every_import_is_allowed() -> None:
    assert violations(ROOT) == []


def test_every_folder_of_the_rules_has_sources() -> None:
    assert [folder for folder in ALLOWED if not any((ROOT / folder).rglob("*.py"))] == []


def test_the_checker_finds_planted_violations(tmp_path: Path) -> None:
    planted = {
        "router/a.py": "def f():\n    import torch\n",
        "prefill_worker/b.py": "from decode_worker.loop import x\n",
        "engine/models/c.py": "import os, redis\n",
        "service/d.py": "from protos import session_pb2\n",
        "service/fine.py": "import redis\nimport service.errors\nfrom __future__ import annotations\n",
        "kvtransfer/fine.py": "import torch\nimport kernels.copy_blocks\nfrom kvtransfer.errors import X\n",
        "cli/e.py": "import decode_worker.loop\n",
    }
    for name, source in planted.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert sorted(violations(tmp_path)) == [
        "cli/e.py imports decode_worker",
        "engine/models/c.py imports redis",
        "prefill_worker/b.py imports decode_worker",
        "router/a.py imports torch",
        "service/d.py imports protos",
    ]


def test_kernels_is_a_folder_without_init_so_that_it_never_shadows_a_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_tests_are_no_package_and_have_unique_names() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == []
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
