"""Numbers in README and docs/: a measurement is in a generated section; any other number with a unit is a setting of
the code, or is listed here with the constant that it states.
"""

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from baton.cli.__main__ import app
from baton.engine.kv_cache.sessions import MIN_PATIENCE_RATIO
from baton.lab.benchmarks.isolation.figures import P99_OVER_FLOOR, P99_OVER_QUIET
from baton.lab.commands.bench_options import GoodputOptions
from baton.lab.report.documents import CITATION, SECTION, SECTIONS, documents
from baton.launch.paths import ROOT
from baton.router.placement.policies import REUSE_PREMIUM, SHARED_REUSE_PREMIUM
from baton.router.placement.rates import ASSUMED_LOAD_BYTES_PER_S

CODE = (
    "router", "prefill_worker", "decode_worker", "elastic_worker", "worker", "engine", "text", "kvtransfer", "process",
    "launch", "cli", "client", "lab/sizing", "lab/commands", "lab/benchmarks/isolation",
)  # fmt: skip
SECONDS = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "second": 1.0, "seconds": 1.0, "min": 60.0, "minutes": 60.0}
RATE = r"(?:tokens|requests|req|answers|prompts)(?:/s| (?:per|a) second)"
UNIT = rf"(?:[mµu]s|s|min|seconds?|minutes|%|(?<=\d)x|times|[KMG]B/s|[MG]bit/s|{RATE})"
QUANTITY = re.compile(rf"(?<![\w.,/-])(\d[\d., ]*) ?({UNIT})(?![\w/])")
DECIMAL = re.compile(r"(?<![\w./:-])(\d+\.\d+)(?![\w./])")
VERSION = re.compile(r"\b(?:Llama|HTTP/1\.0 and|TLS|Kubernetes|podman) \d+\.\d+")
SHARE = re.compile(r"share|fraction|utilization|throughput|quantile|spare|longer|expected")
MEASURED = re.compile(r"\bp(?:50|90|95|99)\b|\bmeasured\b|\btook\b")
"""Words of a measurement: a setting that happens to have the same number is no excuse on such a line."""

RATES = GoodputOptions().rate_values
STATED = {
    ("README.md", "0.3"): RATES[0],
    ("README.md", "0.6 requests a second"): RATES[1],
    ("performance.md", "0.3"): RATES[0],
    ("performance.md", "0.6"): RATES[1],
    ("performance.md", "1.15 times"): P99_OVER_QUIET,
    ("performance.md", "1.05 times"): P99_OVER_FLOOR,
    ("memory.md", "4 times"): MIN_PATIENCE_RATIO,
    ("memory.md", "52 %"): round(100 * (128 + 4) / (2 * 128)),  # 8 bits a number and a scale, instead of 16
    ("routing.md", "39 times"): REUSE_PREMIUM - 1,
    ("routing.md", "3 times"): SHARED_REUSE_PREMIUM - 1,
    ("routing.md", "1 GB/s"): ASSUMED_LOAD_BYTES_PER_S / 1e9,
}
"""Settings of benchmarks, and numbers whose constant has another unit in its name."""

WINDOWED = {"Gemma 3 1B": "gemma-3-1b-it", "gpt-oss-20b": "gpt-oss-20b", "Gemma 2 9B": "gemma-2-9b"}
"""Published configurations of the models in the table of docs/memory.md about windows."""
WINDOW_ROW = re.compile(r"\| ([\w .-]+), ([\d ]+) tokens \| (\d+) GiB \| ([\d.]+) \| ([\d.]+) \|")


def settings() -> tuple[frozenset[float], frozenset[float]]:
    """Return all durations, in seconds, and all shares that the code gives a name."""
    durations, shares = set(), set()
    for name, value in _named_numbers():
        if name.endswith("_ms"):
            durations.add(round(value / 1e3, 9))
        elif name.endswith(("_s", "seconds")):
            durations.add(round(value, 9))
        elif SHARE.search(name):
            shares.add(value)
    for path in (ROOT / "deploy" / "kubernetes").rglob("*.yaml"):
        text = path.read_text()
        durations |= {float(value) for value in re.findall(r"Seconds: (\d+)", text)}
        shares |= {int(value) / 100 for value in re.findall(r"averageUtilization: (\d+)", text)}
    return frozenset(durations), frozenset(shares)


def _named_numbers() -> Iterator[tuple[str, float]]:
    for folder in CODE:
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                for name, value in _pairs(node):
                    yield from ((name.lower(), number) for number in _numbers(value))


def _pairs(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield names with the values that assignments, keywords, defaults and pairs (of channel options) give them."""
    match node:
        case ast.Assign(targets=[ast.Tuple(elts=names)], value=ast.Tuple(elts=values)):
            yield from (
                (name.id, value) for name, value in zip(names, values, strict=True) if isinstance(name, ast.Name)
            )
        case ast.Assign(targets=[ast.Name(id=name)], value=value):
            yield name, value
        case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
            yield name, value
        case ast.keyword(arg=str(name), value=value):
            yield name, value
        case ast.arguments(posonlyargs=first, args=names, defaults=values, kwonlyargs=more, kw_defaults=of_more):
            pairs = [*zip(reversed([*first, *names]), reversed(values), strict=False), *zip(more, of_more, strict=True)]
            yield from ((each.arg, value) for each, value in pairs if value is not None)
        case ast.Tuple(elts=[ast.Constant(value=str(name)), value]):
            yield name, value


def _numbers(value: ast.expr) -> list[float]:
    match value:
        case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
            return [float(number)]
        case ast.BinOp(left=left, op=ast.Mult() | ast.Div() as operator, right=right):
            parts = [*_numbers(left), *_numbers(right)]
            if len(parts) == 2 and (isinstance(operator, ast.Mult) or parts[1]):
                return [parts[0] * parts[1] if isinstance(operator, ast.Mult) else parts[0] / parts[1]]
        case ast.Call(args=arguments, keywords=keywords):
            defaults = [each.value for each in keywords if each.arg == "default"]
            return [number for each in (*arguments[:1], *defaults) for number in _numbers(each)]
    return []


DURATIONS, SHARES = settings()


def prose(text: str) -> list[str]:
    """Return a document's lines without code, link targets and cited figures."""

    def template(found: re.Match[str]) -> str:
        return CITATION.sub("", (SECTIONS / f"{found[2]}.md").read_text())

    text = re.sub(r"```.*?```|^    [^\n]*$", "", SECTION.sub(template, text), flags=re.DOTALL | re.MULTILINE)
    text = WINDOW_ROW.sub("", text)
    return [VERSION.sub("", re.sub(r"\]\([^)]*\)|`[^`]*`", "", line)) for line in text.splitlines()]


def unchecked(name: str, text: str) -> list[str]:
    """Return the numbers of a document that are neither settings of the code nor listed."""
    found = []
    for line in prose(text):
        for quantity in QUANTITY.finditer(line):
            digits, unit = quantity[1].replace(" ", "").rsplit(",", 1)[-1], quantity[2]
            stated = STATED.get((name, quantity[0]))
            if stated is not None:
                is_known = stated == float(digits)
            elif MEASURED.search(line):
                is_known = False
            elif unit in SECONDS:
                is_known = round(float(digits) * SECONDS[unit], 9) in DURATIONS
            else:
                is_known = unit == "%" and float(digits) / 100 in SHARES
            found += [] if is_known else [f"{quantity[0]}: {line.strip()}"]
        if line.startswith("|"):
            rest = QUANTITY.sub("", line)
            decimals = [number[1] for number in DECIMAL.finditer(rest)]
            found += [f"{each}: {line}" for each in decimals if float(each) not in SHARES | {STATED.get((name, each))}]
    return found


@pytest.mark.parametrize("document", documents(), ids=lambda path: path.name)
def test_document_has_no_unchecked_number(document: Path) -> None:
    assert unchecked(document.name, document.read_text()) == []


@pytest.mark.parametrize(
    "text",
    [
        "The first token comes after 1.37 s.",
        "It is 2.6 times as fast.",
        "| prefill | 1 470 tokens/s |",
        "p99 between tokens: 50 ms",
        "the answer took 30 s when measured",
        "| cache_aware | 0.9957 | 3,904 |",
        "0.37 % of the CPU time",
        "<!-- figures: peers -->\nold text\n<!-- end of figures -->\nIt reads 7.3 GB/s.",
    ],
)
def test_unchecked_measurement_is_found(text: str) -> None:
    assert len(unchecked("page.md", text)) == 1


def test_setting_of_the_code_is_no_measurement() -> None:
    assert unchecked("page.md", "lost after 1.4 s of silence; 60 s at most; `took 1.37 s`; 95 % of all pauses") == []
    assert unchecked("page.md", "| podman 4.3 or newer | TLS 1.3 |") == []


def test_listed_number_that_the_code_no_longer_has_is_found() -> None:
    assert len(unchecked("routing.md", "38 times the compute time, at least 3 times")) == 1


@pytest.mark.parametrize("row", WINDOW_ROW.findall((ROOT / "docs" / "memory.md").read_text()), ids=lambda row: row[0])
def test_table_of_windows_is_what_plan_computes(row: tuple[str, ...], tmp_path: Path) -> None:
    model, tokens, pool_gib, without, with_windows = row
    config = (ROOT / "tests" / "fixtures" / "configs" / f"{WINDOWED[model]}.json").read_text()
    (tmp_path / "config.json").write_text(config)
    asked = ["plan", "--model", str(tmp_path), "--dtype", "bfloat16", "--max-model-len", tokens.replace(" ", "")]
    found = json.loads(CliRunner().invoke(app, [*asked, "--kv-memory", f"{pool_gib}GiB", "--json"]).stdout)
    assert f"{found['max_concurrency']:.1f}" == with_windows
    sizes = json.loads(config)
    token_bytes = 4 * sizes["num_hidden_layers"] * sizes["num_key_value_heads"] * sizes["head_dim"]
    assert f"{int(pool_gib) * 2**30 / (int(tokens.replace(' ', '')) * token_bytes):.1f}" == without


def test_every_listed_number_is_in_its_document() -> None:
    texts = {path.name: "\n".join(prose(path.read_text())) for path in documents()}
    assert [key for key in STATED if key[1] not in texts[key[0]]] == []
