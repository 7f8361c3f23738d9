"""Comparisons of several engines: ratios within a round, their mean and interval. Pure."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from baton.benchmarks.peers.known import OURS, Precision
from baton.benchmarks.peers.process import Measured
from baton.benchmarks.report.picture import Axis, BarChart, Bars, draw_bars
from baton.benchmarks.report.statistics import Estimate, mean_ratio, median

AHEAD, BEHIND = 1.03, 0.97  # between them two engines are on a par

FEWEST_ROUNDS = 3  # that are meaningful


class State(StrEnum):
    MEASURED = "measured"
    ABSENT = "absent"  # not installed: neither beaten nor ahead
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    precision: Precision
    state: State
    version: str = ""
    reason: str = ""  # where it failed

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"


@dataclass(frozen=True, slots=True)
class Row:
    """Medians over rounds. Ratios: how many times as fast Baton is, of the rounds that both have; None of Baton."""

    name: str
    precision: Precision
    batch: int
    prefill_tokens_per_s: float
    decode_step_ms: float
    prefill_ratio: Estimate | None
    decode_ratio: Estimate | None
    same_first_tokens: float  # share of the prompts after which it makes the token that Baton makes

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"


Rounds = Mapping[tuple[str, Precision, int], Sequence[Measured]]


def order_of(contestants: Sequence[Contestant], round_number: int) -> list[Contestant]:
    """There and back again, so that a drift of the machine meets all alike: A B C, C B A, A B C, ..."""
    return list(reversed(contestants) if round_number % 2 else contestants)


def make_rows(rounds: Rounds, prompt_tokens: int) -> list[Row]:
    """In the order of `rounds`, by precision and batch. Each peer is held against Baton in the same precision."""
    rows = []
    for (name, precision, batch), measured in rounds.items():
        ours = () if name == OURS else rounds.get((OURS, precision, batch), ())
        paired = list(zip(ours, measured, strict=bool(ours)))
        agreed = [mine == theirs for pair in paired for mine, theirs in zip(*map(_first_tokens, pair), strict=True)]
        rows.append(
            Row(
                name,
                precision,
                batch,
                round(batch * prompt_tokens / median([each.prefill_s for each in measured]), 1),
                round(median([each.decode_step_s for each in measured]) * 1e3, 3),
                mean_ratio([theirs.prefill_s / mine.prefill_s for mine, theirs in paired]) if paired else None,
                mean_ratio([theirs.decode_step_s / mine.decode_step_s for mine, theirs in paired]) if paired else None,
                sum(agreed) / len(agreed) if agreed else 1.0,
            )
        )
    return sorted(rows, key=lambda row: (row.precision != Precision.BF16, row.batch))


def _first_tokens(measured: Measured) -> tuple[int, ...]:
    return measured.first_tokens


def verdict(ratio: Estimate, rounds: int) -> str:
    if rounds < FEWEST_ROUNDS:
        return "open"
    if ratio.low > AHEAD:
        return "ahead"
    if ratio.high < BEHIND:
        return "behind"
    return "par" if ratio.low >= BEHIND and ratio.high <= AHEAD else "open"


def as_picture(rows: Sequence[Row], title: str) -> str:
    """How many times as fast Baton is, of each peer. Raises: ValueError without a peer."""
    batches = sorted({row.batch for row in rows})
    groups = [(what, batch) for what in ("prefill", "decode") for batch in batches]
    series = []
    for label in dict.fromkeys(row.label for row in rows if row.name != OURS):
        of_peer = {row.batch: row for row in rows if row.label == label}
        values = []
        for what, batch in groups:
            row = of_peer.get(batch)
            values.append(None if row is None else row.prefill_ratio if what == "prefill" else row.decode_ratio)
        series.append(Bars(label, tuple(values)))
    names = tuple(f"{what}, batch {batch}" for what, batch in groups)
    return draw_bars(BarChart(title, Axis("Baton's speed over the peer's"), names, tuple(series), mark=1.0))


def as_json(
    machine: Mapping[str, str],
    work: Mapping[str, Any],
    contestants: Sequence[Contestant],
    rows: Sequence[Row],
    rounds: Rounds,
) -> dict[str, Any]:
    """Rounds too, so that a reader can compute the ratios again."""
    return {
        "machine": dict(machine),
        **work,
        "engines": [asdict(each) for each in contestants],
        "rows": [asdict(row) for row in rows],
        "rounds": [
            {
                "name": name,
                "precision": precision,
                "batch": batch,
                "prefill_s": [each.prefill_s for each in measured],
                "decode_step_s": [each.decode_step_s for each in measured],
            }
            for (name, precision, batch), measured in rounds.items()
        ],
    }
