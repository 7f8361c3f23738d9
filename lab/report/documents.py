"""Sections of documents that are generated from results, and the rules for a result that a document cites.

    .venv/bin/python -m baton.lab.report.documents       rewrite the generated sections

A section is between `<!-- figures: NAME -->` and `<!-- end of figures -->`; its template is
lab/report/sections/NAME.md. A template cites `{{RESULT PATH FORMAT}}`: the median over all rounds of the number at
PATH, in Python's format; `s` after the format shows milliseconds as seconds. `{{RESULT verdict}}` counts the rounds
that kept the promise. A line that cites a missing result is left out, and a section without any result is empty. At the
end of the section are machine, date, rounds and command of each result.
"""

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from baton.cli.installed import output_of
from baton.launch.paths import ROOT

MOST_COMMITS = 30  # commits to the measured code after which a result is outdated
OUTDATED: frozenset[str] = frozenset()
"""Cited results that are older than MOST_COMMITS, until they are measured again. Their documents say so."""

RESULTS, SECTIONS = ROOT / "lab" / "benchmarks" / "results", ROOT / "lab" / "report" / "sections"
SECTION = re.compile(r"(<!-- figures: (\S+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
CITATION = re.compile(r"\{\{(\w[\w.-]*) (.+?)(?: (,?\.\d[f%])( s)?)?\}\}")
REQUIRED = ("commit", "changed", "machine", "command", "measures", "verdict", "rounds")

Results = Callable[[str], Mapping[str, Any] | None]
"""Function that returns a result by name, None if it does not exist."""


class WrongCitation(Exception):
    """A template cites what is not in the result."""


def read_result(name: str) -> Mapping[str, Any] | None:
    path = RESULTS / f"{name}.json"
    found: Mapping[str, Any] | None = json.loads(path.read_text()) if path.exists() else None
    return found


def cited_in(template: str) -> list[str]:
    """Return the names of the results that a template cites, each once, in order."""
    return list(dict.fromkeys(name for name, *_ in CITATION.findall(template)))


def cite(result: Mapping[str, Any], path: str, form: str, in_seconds: bool) -> str:
    """Return the text of a citation. Raises: WrongCitation."""
    if path == "verdict":
        verdict = result["verdict"]
        return f"{verdict['held']} of {verdict['held'] + verdict['missed']} {verdict['of']}"
    values = [value for each in result["rounds"] if (value := _at(each, path)) is not None]
    if not values or not all(isinstance(value, int | float) for value in values):
        raise WrongCitation(f"{path}: no round has this number")
    return format(median(values) / (1e3 if in_seconds else 1), form or "").replace(",", " ").replace("%", " %")


def _at(figures: Any, path: str) -> Any:
    for name in path.split("/"):
        figures = figures.get(name) if isinstance(figures, Mapping) else None
    return figures


def render(template: str, results: Results, document: Path) -> str:
    """Return a section's text. `document`: the path that links are relative to. Raises: WrongCitation."""
    lines = [line for line in template.splitlines() if all(results(name) is not None for name in cited_in(line))]

    def shown(found: re.Match[str]) -> str:
        result = results(found[1])
        return cite(result, found[2], found[3], found[4] is not None) if result is not None else ""

    cited = [(name, result) for name in cited_in("\n".join(lines)) if (result := results(name)) is not None]
    if not cited:
        return ""
    text = "\n".join(CITATION.sub(shown, line) for line in lines)
    return f"{text}\n" + "".join(_origin(name, result, document) for name, result in cited)


def _origin(name: str, result: Mapping[str, Any], document: Path) -> str:
    machine, count = result["machine"], len(result["rounds"])
    link = os.path.relpath(RESULTS / f"{name}.json", document.parent)
    old = f" **More than {MOST_COMMITS} commits old; to be measured again.**" if name in OUTDATED else ""
    rounds = "one round" if count == 1 else f"medians of {count} rounds"
    described = f"{machine['date']}, {machine['cpu']}, {rounds}, commit {result['commit'][:8]}"
    return f"\n[{name}]({link}): {described}: `{result['command']}`.{old}\n"


def update(document: Path, results: Results) -> str:
    """Return a document's text with its sections generated again. Raises: WrongCitation."""

    def generated(found: re.Match[str]) -> str:
        return found[1] + render((SECTIONS / f"{found[2]}.md").read_text(), results, document) + found[3]

    return SECTION.sub(generated, document.read_text())


def documents() -> list[Path]:
    """Return the documents whose figures are checked."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def faults_of(result: Mapping[str, Any]) -> list[str]:
    """Return the reasons why a document may not cite a result; empty if it may."""
    faults = [f"no {name}" for name in REQUIRED if name not in result]
    if faults:
        return faults
    verdict, machine = result["verdict"], result["machine"]
    faults += [f"no {name} of the machine" for name in ("date", "cpu", "cores") if not machine.get(name)]
    faults += [f"no {name}" for name in ("commit", "command", "measures", "rounds") if not result[name]]
    faults += [f"measured code was changed: {path}" for path in result["changed"] or ()]
    faults += [f"measured path is gone: {path}" for path in result["measures"] if not (ROOT / path).exists()]
    if verdict is not None and not (verdict["text"] and verdict["held"] + verdict["missed"] > 0):
        faults.append("a verdict that counts nothing")
    return faults


def commits_since(commit: str, measures: Sequence[str]) -> int | None:
    """Return the number of commits to the measured code; None if the history does not contain the commit."""
    if output_of(["git", "-C", str(ROOT), "merge-base", "--is-ancestor", commit, "HEAD"]) is None:
        return None
    counted = output_of(["git", "-C", str(ROOT), "rev-list", "--count", f"{commit}..HEAD", "--", *measures])
    return None if counted is None else int(counted)


def main() -> int:
    for document in documents():
        if (text := update(document, read_result)) != document.read_text():
            document.write_text(text)
            print(document.relative_to(ROOT))
    cited = {name for path in SECTIONS.glob("*.md") for name in cited_in(path.read_text())}
    for name in sorted(name for name in cited if read_result(name) is None):
        print(f"left out: lab/benchmarks/results/{name}.json does not exist", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
