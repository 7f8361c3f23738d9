"""Generated sections of documents, and the rules for the results that they cite."""

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from baton.lab.report.documents import (
    MOST_COMMITS,
    OUTDATED,
    SECTIONS,
    WrongCitation,
    cited_in,
    commits_since,
    documents,
    faults_of,
    read_result,
    render,
    update,
)
from baton.launch.paths import ROOT

CITED = sorted({name for path in SECTIONS.glob("*.md") for name in cited_in(path.read_text())})
PRESENT = [name for name in CITED if read_result(name) is not None]
RESULT: dict[str, Any] = {
    "commit": "0123456789abcdef", "changed": [], "command": "./baton bench x", "measures": ["engine"],
    "machine": {"date": "2026-11-29", "cpu": "a CPU", "cores": "2"},
    "verdict": {"text": "fast", "held": 2, "missed": 1, "of": "rounds"},
    "rounds": [{"a": {"ms": 1500.0}}, {"a": {"ms": 4000.0}}, {"a": {"ms": 2000.0}}],
}  # fmt: skip


def shown(template: str, result: Mapping[str, Any] | None = RESULT) -> str:
    return render(template, lambda name: result if name == "x" else None, ROOT / "docs" / "page.md")


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_sections_of_document_equal_the_results(document: Path) -> None:
    assert update(document, read_result) == document.read_text(), "run .venv/bin/python -m baton.lab.report.documents"


def test_each_template_has_a_section() -> None:
    used = {name for path in documents() for name in re.findall(r"<!-- figures: (\S+) -->", path.read_text())}
    assert used == {path.stem for path in SECTIONS.glob("*.md")}


@pytest.mark.parametrize("name", PRESENT)
def test_cited_result_names_its_origin_and_its_rounds(name: str) -> None:
    result = read_result(name)
    assert result is not None and faults_of(result) == []


@pytest.mark.parametrize("name", PRESENT)
def test_cited_result_is_not_outdated(name: str) -> None:
    result = read_result(name)
    assert result is not None
    shallow = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "--is-shallow-repository"], capture_output=True, text=True, timeout=60
    )
    if shallow.stdout.strip() != "false":
        pytest.skip("this checkout has no complete history")
    commits = commits_since(result["commit"], result["measures"])
    assert commits is not None, f"{name}: commit {result['commit']} is not in the history; measure at a pushed commit"
    if name in OUTDATED:
        assert commits > MOST_COMMITS, f"{name} was measured again: remove it from OUTDATED"
    else:
        assert commits <= MOST_COMMITS, f"{name}: {commits} commits to {result['measures']} since; measure again"


def test_citation_is_the_median_of_all_rounds() -> None:
    assert shown("{{x a/ms .0f}} ms").startswith("2000 ms\n")
    assert shown("{{x a/ms .1f s}} s").startswith("2.0 s\n")
    assert shown("{{x a/ms ,.0f}}").startswith("2 000\n")
    assert shown("{{x a/ms .0%}}").startswith("200000 %\n")


def test_one_of_several_rounds_cannot_be_cited() -> None:
    for path in ("0/a/ms", "rounds/0/a/ms", "a/best", "a"):
        with pytest.raises(WrongCitation):
            shown(f"{{{{x {path} .1f}}}}")


def test_section_names_verdict_and_origin() -> None:
    text = shown("kept in {{x verdict}}")
    assert text.startswith("kept in 2 of 3 rounds\n")
    origin = "[x](../lab/benchmarks/results/x.json): 2026-11-29, a CPU, medians of 3 rounds, commit 01234567:"
    assert f"{origin} `./baton bench x`." in text


def test_row_of_a_missing_result_is_left_out() -> None:
    assert shown("| a | {{absent a/ms .1f}} |\n| b | {{x a/ms .1f}} |").startswith("| b | 2000.0 |\n")
    assert shown("| a | b |\n| c | {{x a/ms .1f}} |", None) == "", "a head without rows"


def test_commit_outside_the_history_has_no_age() -> None:
    assert commits_since("0" * 40, ["engine"]) is None


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        ({"commit": None}, "no commit"),
        ({"rounds": []}, "no rounds"),
        ({"changed": ["engine/x.py"]}, "measured code was changed: engine/x.py"),
        ({"measures": ["no/such/folder"]}, "measured path is gone: no/such/folder"),
        ({"machine": {"date": "2026-11-29", "cores": "2"}}, "no cpu of the machine"),
        ({"verdict": {"text": "fast", "held": 0, "missed": 0, "of": "rounds"}}, "a verdict that counts nothing"),
    ],
)
def test_result_without_provenance_cannot_be_cited(change: dict[str, Any], fault: str) -> None:
    assert faults_of(RESULT) == []
    assert faults_of(RESULT | change) == [fault]
    assert faults_of({"rounds": []})[0] == "no commit"
