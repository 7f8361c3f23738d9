"""Count the repository: `.venv/bin/python -m baton.lab.sizes`.

Prints hand-written lines of the shipped folders, the lab and the tests, class names that several modules define,
docstrings that begin with a fragment, and the number of folders whose code serves a chat request.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

from baton.launch.paths import ROOT

SHIPPED = (
    *("router", "prefill_worker", "decode_worker", "elastic_worker", "worker", "engine", "kernels", "kvtransfer"),
    *("protos", "process", "text", "client", "cli", "launch", "src"),
)
SUFFIXES = frozenset({".py", ".cpp", ".h", ".c", ".js", ".css", ".html", ".sh", ".proto"})
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|sync_client\.py$")
LEFT_OUT = frozenset({"__pycache__", "node_modules", "built"})
FRAGMENT = re.compile(
    r"(Its?|They|Them|Those|These|This|That|There|Of|As|So|To|From|For|In|On|At|By|With|Without|Where|When|Whether|Which"
    r"|What|Who|Whose|How|Why|While|Until|Up|Such|Both|All|Any|Each|Every|None|No|Not|Nothing|Everything|Some|Most|Many"
    r"|More|Less|But|And|Or|Also|Only|Once|After|Before|Between|Behind|Beside|Is|Are|Was|Has|Have|Had|If|Then|Same|Another"
    r"|Others?|Ones?|Anew|Again|Raises|Made|Given|Taken|Told|Known|Nor|Among)\b"
)
ON_THE_WAY = (
    *("router/http", "router/http/edge", "router/http/routes", "router", "router/public", "router/model"),
    *("router/request", "router/admission", "router/placement", "router/fleet", "prefill_worker", "worker"),
    *("worker/transfer", "kvtransfer", "decode_worker", "engine/runner", "engine/scheduler", "engine/kv_cache"),
    *("engine/models", "engine/sampling", "kernels"),
)
"""Folders whose code serves a chat request over HTTP, in the order of docs/architecture.md."""


def sources(folders: Iterable[str], suffixes: frozenset[str] = SUFFIXES) -> Iterator[Path]:
    """Yield the hand-written files of these folders."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*")):
            inside = path.relative_to(ROOT).parts
            if folder == "src" and (len(inside) > 3 or path.parent.is_symlink()):
                continue  # symbolic links to folders that are counted already
            if path.suffix in suffixes and not LEFT_OUT & set(inside) and not GENERATED.search(path.name):
                yield path


def lines_of(folders: Iterable[str]) -> int:
    return sum(path.read_text().count("\n") for path in sources(folders))


def shared_class_names() -> dict[str, set[Path]]:
    """Return class names that two or more modules of product and lab define, with the modules."""
    found = defaultdict[str, set[Path]](set)
    for path in sources((*SHIPPED, "lab"), frozenset({".py"})):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].add(path)
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def docstrings() -> Iterator[tuple[Path, int, str]]:
    """Yield file, line and text of every docstring, those of attributes included."""
    for path in sources((*SHIPPED, "lab"), frozenset({".py"})):
        for node in ast.walk(ast.parse(path.read_text())):
            body = getattr(node, "body", None)
            if not isinstance(body, list):
                continue
            owner = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            for before, statement in zip([None, *body], body, strict=False):
                if (before is None and owner) or isinstance(before, ast.Assign | ast.AnnAssign):
                    match statement:
                        case ast.Expr(ast.Constant(str(text))):
                            yield path, statement.lineno, text


def main() -> None:
    texts = list(docstrings())
    fragments = [each for each in texts if FRAGMENT.match(each[2]) or not each[2][:1].isupper()]
    print(f"shipped lines           {lines_of(SHIPPED):>7,}")
    print(f"lab lines               {lines_of(('lab',)):>7,}")
    print(f"test lines              {lines_of(('tests',)):>7,}")
    print(f"shared class names      {len(shared_class_names()):>7,}")
    print(f"fragments of docstrings {len(fragments) / len(texts):>7.1%} of {len(texts):,}")
    print(f"folders on the way      {len(ON_THE_WAY):>7}")


if __name__ == "__main__":
    main()
