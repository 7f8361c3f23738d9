"""Commands in the documents work when they are pasted: our modules need the python of `.venv`."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ELSEWHERE = ("docker compose exec", "kubectl exec", "entrypoint:")
"""Lines that speak of an image, whose python is ours."""
BARE = re.compile(r"(?<![/\w])python3? (?:-\w+ )*-m (?:baton\.)?(\w+)")


def documents() -> list[str]:
    return sorted(str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *ROOT.glob("[a-z]*/*.md")))


def bare(text: str) -> list[str]:
    """Lines with a module of ours behind a bare `python -m`."""
    return [
        line
        for line in text.splitlines()
        for module in BARE.findall(line)
        if (ROOT / module).is_dir() and not any(mark in line for mark in ELSEWHERE)
    ]


@pytest.mark.parametrize("name", documents())
def test_document_runs_modules_with_venv_python(name: str) -> None:
    assert bare((ROOT / name).read_text(encoding="utf-8")) == []


def test_usage_of_the_processes_names_our_python() -> None:
    for path in ROOT.glob("*/__main__.py"):
        assert bare(path.read_text(encoding="utf-8")) == [], path


def test_bare_python_in_document_is_found() -> None:
    assert bare("run `python -m baton.router --help`") and bare("python3 -P -m baton.router")
    assert not bare(
        "`.venv/bin/python -m baton.router`, python -m pip, docker compose exec router python -m baton.cli status"
    )


NAMED = re.compile(r"`([\w-][\w./-]*/[\w.-]+\.(?:py|proto|sh|yaml|cpp|js|mjs|json|md))`")
"""A file of ours by its path: one folder at least stands before it."""


def missing(text: str, folder: Path) -> list[str]:
    """Files that a text names, from the top of the repository, from its own folder or by the end of a path."""
    ends = ["*/" + name for name in NAMED.findall(text) if not (ROOT / name).exists() and not (folder / name).exists()]
    return [end for end in ends if not any(ROOT.glob(end)) and not any(ROOT.glob("*/" + end))]


@pytest.mark.parametrize("name", documents())
def test_document_names_existing_files(name: str) -> None:
    path = ROOT / name
    assert missing(path.read_text(encoding="utf-8"), path.parent) == []


def test_missing_file_in_document_is_found() -> None:
    text = "`router/config.py`, `docs/none.md`, `routes/chat.py`, `pages/none.py`"
    assert missing(text, ROOT / "docs") == ["*/docs/none.md", "*/pages/none.py"]
