"""Who may import whom. Read from the sources, so that lazy imports count too."""

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from graphlib import TopologicalSorter
from pathlib import Path

import baton
from tests.fixtures.layers_picture import PICTURE, picture
from tests.fixtures.sources import imports_of

ROOT = Path(__file__).parents[1]

ALLOWED = {
    "client": {"protos"},
    "launch": {"client", "text", "process", "worker"},  # of worker: config
    "cli": {"client", "engine", "kvtransfer", "launch", "router", "process", "text", "worker"}
    | {"decode_worker", "elastic_worker", "prefill_worker"}  # of them: config, whose fields `up` passes on
    | {"lab"},  # of it: commands, where it is installed
    "lab": {"cli", "client", "decode_worker", "elastic_worker", "engine", "kernels", "kvtransfer", "launch"}
    | {"prefill_worker", "process", "protos", "router", "text", "worker"},
    "router": {"protos", "process", "text"},
    "elastic_worker": {"decode_worker", "engine", "prefill_worker", "process", "protos", "worker"},
    "prefill_worker": {"engine", "kvtransfer", "process", "protos", "text", "worker"},
    "decode_worker": {"engine", "kvtransfer", "process", "protos", "text", "worker"},
    "worker": {"protos", "process", "engine", "kvtransfer", "text"},
    "engine": {"kernels", "text"},
    "kvtransfer": {"kernels"},
    "kernels": set[str](),
    "protos": set[str](),
    "process": set[str](),
    "text": set[str](),
}
"""Each folder and those of ours that it may import."""

ROUTER_LAYERS = (
    *("types", "cache", "placement", "admission", "model", "trace", "fleet", "request"),
    *("readiness", "dispatcher", "public", "roles", "admin", "config", "process", "http", "__main__"),
)
"""Packages and modules of the router: each imports only those before it."""

FORBIDDEN = {
    "client": {"torch", "transformers", "redis", "opentelemetry"},
    "router": {"torch", "safetensors", "triton"},
    "process": {"torch", "transformers"},
}
"""What else a folder must do without."""

BARE_MACHINE = {"torch", "triton", "transformers", "safetensors", "grpc"}
BARE_MACHINE |= {"numpy", "tokenizers", "tqdm", "huggingface_hub", "regex"}  # transformers needs them
BARE_FOLDERS = {"engine", "kvtransfer", "kernels"}
"""Folders that must import on a machine with nothing but BARE_MACHINE."""


def imported_packages(path: Path) -> Iterator[str]:
    """The package of each absolute import of a module, wherever it stands in it: ours without `baton.`.

    `own ` precedes a folder of ours that is imported without `baton.`: it would be loaded a second time.
    """
    for node in imports_of(path).anywhere:
        if isinstance(node, ast.Import):
            named = [alias.name for alias in node.names]
        elif node.module == "baton":
            named = [f"baton.{alias.name}" for alias in node.names]
        elif node.level == 0 and node.module:
            named = [node.module]
        else:
            continue
        for name in named:
            first, _, rest = name.partition(".")
            if first == "baton":
                yield rest.partition(".")[0] or first
            else:
                yield f"own {first}" if first in ALLOWED else first


def violations(root: Path) -> list[str]:
    """`file imports package` for each import that the rules forbid."""
    found = []
    for folder, allowed in ALLOWED.items():
        for path in sorted((root / folder).rglob("*.py")):
            for package in imported_packages(path):
                ours = package in ALLOWED
                bad = package.startswith("own ") or (ours and package != folder and package not in allowed)
                bad = bad or package in FORBIDDEN.get(folder, ())
                known = ours or package in BARE_MACHINE or package in dir(baton) or package in sys.stdlib_module_names
                bad = bad or (folder in BARE_FOLDERS and not known)
                if bad:
                    found.append(f"{path.relative_to(root)} imports {package}")
    return found


def test_imports_follow_the_rules() -> None:
    assert violations(ROOT) == []


def upward_imports(package: Path, layers: Sequence[str]) -> list[str]:
    """`file imports layer` for each import of a layer that comes later, or of none."""
    found = []
    for path in sorted(package.rglob("*.py")):
        own = path.relative_to(package).parts[0].removesuffix(".py")
        for node in imports_of(path).anywhere:
            if not isinstance(node, ast.ImportFrom) or not f"{node.module}.".startswith(f"baton.{package.name}."):
                continue
            for alias in node.names:
                layer = f"{node.module}.{alias.name}".split(".")[2]
                if own != "__init__" and layers.index(layer) > layers.index(own):
                    found.append(f"{path.relative_to(package)} imports {layer}")
    return found


def test_layers_of_the_router_import_only_downwards() -> None:
    assert upward_imports(ROOT / "router", ROUTER_LAYERS) == []


def test_upward_import_is_found(tmp_path: Path) -> None:
    for name, source in {
        "low/a.py": "from baton.things.high import b\n",
        "high/b.py": "from baton.things.low.a import x\nfrom baton.other.high import y\n",
    }.items():
        path = tmp_path / "things" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert upward_imports(tmp_path / "things", ("low", "high")) == ["low/a.py imports high"]


def modules() -> dict[str, Path]:
    """Every module of ours by its name behind `baton.`."""
    paths = (path for folder in ALLOWED for path in (ROOT / folder).rglob("*.py") if "node_modules" not in path.parts)
    return {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}


def imported_modules(path: Path, known: Set[str]) -> set[str]:
    """Modules of ours that a module imports, at load time or inside functions."""
    found = set[str]()
    for node in imports_of(path).at_run_time:
        if isinstance(node, ast.ImportFrom) and f"{node.module}.".startswith("baton."):
            own = (node.module or "").removeprefix("baton").removeprefix(".")
            found |= {name if (name := f"{own}.{alias.name}".lstrip(".")) in known else own for alias in node.names}
    return found & known


def test_imports_have_no_circle() -> None:
    known = modules()
    imports = {name: imported_modules(path, known.keys()) - {name} for name, path in known.items()}
    TopologicalSorter(imports).prepare()  # raises CycleError, which names the modules


def test_sources_allow_no_foreign_code_or_pickles() -> None:
    """ruff's rules S102, S307 and TID251 find other ways to run data."""
    flag = re.compile(r"\b(trust_remote_code|allow_pickle)=(?!False)")
    paths = [path for path in (*modules().values(), *(ROOT / "tests").rglob("*.py")) if path != Path(__file__)]
    assert [path for path in paths if flag.search(path.read_text())] == []


def test_import_rules_name_existing_folders() -> None:
    assert [folder for folder in ALLOWED if not any((ROOT / folder).rglob("*.py"))] == []


def test_planted_violations_are_found(tmp_path: Path) -> None:
    planted = {
        "router/a.py": "def f():\n    import torch\n",
        "prefill_worker/b.py": "from baton.decode_worker.loop import x\n",
        "engine/models/c.py": "import os, redis\n",
        "process/d.py": "from baton.protos import session_pb2\nfrom baton import protos\n",
        "process/f.py": "import process.errors\n",
        "process/fine.py": "import redis\nimport baton.process.errors\nfrom __future__ import annotations\n",
        "kvtransfer/fine.py": "import torch\nfrom baton import IMPORT_PATH\nfrom baton.kvtransfer.transport import X\n",
        "engine/e.py": "import baton.decode_worker.loop\n",
    }
    for name, source in planted.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    assert sorted(violations(tmp_path)) == [
        "engine/e.py imports decode_worker",
        "engine/models/c.py imports redis",
        "prefill_worker/b.py imports decode_worker",
        "process/d.py imports protos",
        "process/d.py imports protos",
        "process/f.py imports own process",
        "router/a.py imports torch",
    ]


def test_kernels_is_a_folder_without_init_so_that_it_never_shadows_a_package() -> None:
    assert not (ROOT / "kernels" / "__init__.py").exists()


def test_folders_of_tests_are_no_packages_and_names_are_unique() -> None:
    assert list((ROOT / "tests").rglob("__init__.py")) == [ROOT / "tests" / "__init__.py"]
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []


def test_layers_picture_is_up_to_date() -> None:
    assert PICTURE.read_text() == picture(), "run `.venv/bin/python -m tests.fixtures.layers_picture`"
