"""What a worker imports before it can serve: nothing that costs seconds and that most models do without."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SLOW = {"transformers", "huggingface_hub", "tokenizers"}
"""transformers reads thousands of its own sources when it is imported."""


def imported_at_once(path: Path) -> Iterator[str]:
    """Dotted names that a module imports when it is imported itself, so none from inside its functions."""
    waiting: list[ast.AST] = [ast.parse(path.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and not is_for_types(node):
            waiting.extend(ast.iter_child_nodes(node))


def is_for_types(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def source_of(module: str) -> Path | None:
    """None where the module is not ours."""
    path = ROOT.joinpath("src", *module.split("."))
    return next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)


def slow_imports(start: str) -> dict[str, str]:
    """The slow packages that come along with a module, and one of ours that imports each."""
    seen, waiting, found = {start}, [start], {}
    while waiting:
        module = waiting.pop()
        path = source_of(module)
        for name in imported_at_once(path) if path is not None else ():
            if name.partition(".")[0] in SLOW:
                found[name.partition(".")[0]] = module
            parents = [name.rpartition(".")[0]] if "." in name else []
            fresh = {name, *parents} - seen
            seen |= fresh
            waiting.extend(fresh)
    return found


@pytest.mark.parametrize("worker", ["prefill_worker", "decode_worker", "worker"])
def test_worker_imports_no_slow_package(worker: str) -> None:
    assert slow_imports(f"baton.{worker}.__main__") == {}


def test_slow_import_through_other_modules_is_found() -> None:
    assert slow_imports("baton.engine.weights.model_shape").keys() == {"transformers"}
