"""Comparison of the same checkpoint and work on Baton's engine and on others, in alternating rounds: `baton bench
peers`.

Each engine is a process that loads once and is stopped (SIGSTOP) while another is measured. Ratios are computed within
a round, so that other load on the machine affects both engines. An engine that is not installed is reported as absent.
"""

import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from baton.lab.benchmarks.peers.lines import RoundWork
from baton.lab.benchmarks.peers.process import (
    OURS,
    PEERS,
    MeasuredRound,
    PeerEngine,
    PeerEngineFailed,
    PeerProcess,
    Precision,
    Room,
    find_python,
    start_peer,
)
from baton.lab.commands.bench_options import PeersOptions
from baton.lab.report.picture import Axis, BarChart, Bars, draw_bars
from baton.lab.report.result import ENGINE, Columns, Result, judge_rounds, make_result, table
from baton.lab.report.statistics import MeanEstimate, mean_ratio
from baton.launch import CommandFailed
from baton.launch.model_source import find_model
from baton.launch.paths import ROOT

AHEAD, BEHIND = 1.03, 0.97  # ratios between which two engines are on a par

FEWEST_ROUNDS = 3  # minimum for a verdict
Rounds = Mapping[tuple[str, Precision, int], Sequence[MeasuredRound]]


class PeerState(StrEnum):
    MEASURED = "measured"
    ABSENT = "absent"  # not installed
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Contestant:
    name: str
    precision: Precision
    state: PeerState
    version: str = ""
    reason: str = ""  # reason of a failure

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"


@dataclass(frozen=True, slots=True)
class PeerRow:
    """Medians over rounds. Ratios: Baton's speed over the peer's in the same rounds; None for Baton."""

    name: str
    precision: Precision
    batch: int
    prefill_tokens_per_s: float
    decode_step_ms: float
    prefill_ratio: MeanEstimate | None
    decode_ratio: MeanEstimate | None
    same_first_tokens: float  # fraction of prompts whose first token equals Baton's; 1 if the peer reports none

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"


def order_of(contestants: Sequence[Contestant], round_number: int) -> list[Contestant]:
    """Return the order of a round, alternating A B C and C B A, so that a drift affects all equally."""
    return list(reversed(contestants) if round_number % 2 else contestants)


def make_rows(rounds: Rounds, prompt_tokens: int) -> list[PeerRow]:
    """Return rows in the order of `rounds`, by precision and batch. Each peer is compared with Baton in the same
    precision.
    """
    rows = []
    for (name, precision, batch), measured in rounds.items():
        ours = () if name == OURS else rounds.get((OURS, precision, batch), ())
        paired = list(zip(ours, measured, strict=bool(ours)))
        agreed = [mine == theirs for pair in paired for mine, theirs in zip(*map(_first_tokens, pair), strict=False)]
        rows.append(
            PeerRow(
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


def _first_tokens(measured: MeasuredRound) -> tuple[int, ...]:
    return measured.first_tokens


def verdict(ratio: MeanEstimate, rounds: int) -> str:
    if rounds < FEWEST_ROUNDS:
        return "open"
    if ratio.low > AHEAD:
        return "ahead"
    if ratio.high < BEHIND:
        return "behind"
    return "par" if ratio.low >= BEHIND and ratio.high <= AHEAD else "open"


def as_picture(rows: Sequence[PeerRow], title: str) -> str:
    """Draw how many times as fast Baton is as each peer. Raises: ValueError without a peer."""
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


FASTEST = "fastest"
PROMISE = "prefill and decode at least as fast as the fastest peer, with every precision and batch"


def as_json(
    work: Mapping[str, Any], contestants: Sequence[Contestant], rows: Sequence[PeerRow], rounds: Rounds
) -> Result:
    """Return all results. A round holds times and Baton's speed over each peer's, by precision, batch and engine."""
    count = max(map(len, rounds.values()), default=0)
    by_number = [_round(rounds, number) for number in range(count)]
    verdict = (
        judge_rounds(PROMISE, (_keeps_up(each) for each in by_number)) if len({row.name for row in rows}) > 1 else None
    )
    engines, summaries = [asdict(each) for each in contestants], [asdict(row) for row in rows]
    return make_result(ENGINE, by_number, verdict, **work, engines=engines, rows=summaries)


def _round(rounds: Rounds, number: int) -> dict[str, Any]:
    """Return the times of a round in seconds, and each peer's times divided by Baton's."""
    found: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
    for (name, precision, batch), measured in rounds.items():
        each, ours = measured[number], rounds.get((OURS, precision, batch))
        of_engine = {"prefill_s": each.prefill_s, "decode_step_s": each.decode_step_s}
        if name != OURS and ours:
            of_engine |= {
                "prefill_ratio": each.prefill_s / ours[number].prefill_s,
                "decode_ratio": each.decode_step_s / ours[number].decode_step_s,
            }
        found[precision][str(batch)][name] = of_engine
    for of_batches in found.values():
        for of_engines in of_batches.values():
            peers = [each for each in of_engines.values() if "decode_ratio" in each]
            if peers:
                of_engines[FASTEST] = {
                    what: min(each[what] for each in peers) for what in ("prefill_ratio", "decode_ratio")
                }
    return found


def _keeps_up(of_round: Mapping[str, Any]) -> bool:
    of_batches = [of_engines for batches in of_round.values() for of_engines in batches.values()]
    return all(ratio >= 1.0 for each in of_batches for ratio in each.get(FASTEST, {}).values())


def run_peers_bench(options: PeersOptions) -> int:
    """Run the benchmark and print it. Raises: CommandFailed."""
    note = Console(stderr=True, highlight=False).print
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="baton-peers-")))
        checkpoint = find_model(options.model, ROOT, scratch).folder
        comparison = EngineComparison(stack, note)
        comparison.start(options, checkpoint, scratch)
        rounds = comparison.measure(options, vocab_size(checkpoint))
    rows = make_rows(rounds, options.prompt_tokens)
    if options.picture is not None and all(row.name == OURS for row in rows):
        note("no peer was measured: there is no ratio to draw")
    elif options.picture is not None:
        options.picture.write_text(as_picture(rows, _title(options, checkpoint)))
    if options.json:
        report = as_json(_work(options, checkpoint), comparison.contestants, rows, rounds)
        print(json.dumps(report, indent=2))
    else:
        _print_table(options, checkpoint, comparison.contestants, rows)
    return 0


class EngineComparison:
    """Comparison of engines. `contestants`: engines with their states. `stack` ends their processes when it exits."""

    def __init__(self, stack: ExitStack, note: Callable[[str], None]) -> None:
        self.contestants: list[Contestant] = []
        self._processes: dict[tuple[str, Precision], PeerProcess] = {}
        self._stack = stack
        self._note = note

    def start(self, options: PeersOptions, checkpoint: Path, scratch: Path) -> None:
        """Start the engines of the options. Raises: CommandFailed if Baton itself cannot start."""
        tokens = options.prompt_tokens + options.new_tokens + max(options.batches)
        room = Room(checkpoint, options.folder, scratch, options.thread_count, max(options.batches), tokens)
        for precision in Precision if options.precision == "all" else (Precision(options.precision),):
            for peer in PEERS:
                asked = peer.name == OURS or not options.only or peer.name in options.only
                if asked and precision in peer.precisions:
                    self.contestants.append(self._started(peer, precision, room))

    def measure(self, options: PeersOptions, vocab: int) -> dict[tuple[str, Precision, int], list[MeasuredRound]]:
        """Measure rounds; all results of an engine that fails are dropped. Raises: CommandFailed if Baton itself
        fails.
        """
        found: dict[tuple[str, Precision, int], list[MeasuredRound]] = {}
        for batch in options.batches:
            for number in range(-1, options.rounds):  # round -1 is a warm-up and not counted
                work = RoundWork(batch, options.prompt_tokens, options.new_tokens, batch * 1000 + number, vocab)
                able = [each for each in self.contestants if each.state is PeerState.MEASURED]
                for each in order_of(able, number):
                    try:
                        measured = self._processes[each.name, each.precision].measure(work)
                    except PeerEngineFailed as error:
                        self.contestants[self.contestants.index(each)] = self._failed(each, error)
                        continue
                    if number >= 0:
                        found.setdefault((each.name, each.precision, batch), []).append(measured)
                        self._note(f"batch {batch}, round {number + 1}: {each.label} {_speed(work, measured)}")
        failed = {(each.name, each.precision) for each in self.contestants if each.state is PeerState.FAILED}
        return {key: measured for key, measured in found.items() if key[:2] not in failed}

    def _started(self, peer: PeerEngine, precision: Precision, room: Room) -> Contestant:
        python = find_python(peer, room.folder, sys.executable)
        if python is None:
            return Contestant(peer.name, precision, PeerState.ABSENT)
        try:
            process = start_peer(peer, precision, python, room, self._note)
        except PeerEngineFailed as error:
            return self._failed(Contestant(peer.name, precision, PeerState.FAILED), error)
        self._stack.callback(process.close)
        self._processes[peer.name, precision] = process
        return Contestant(peer.name, precision, PeerState.MEASURED, process.version)

    def _failed(self, contestant: Contestant, error: PeerEngineFailed) -> Contestant:
        if contestant.name == OURS:
            raise CommandFailed(f"{contestant.label}: {error}") from error
        self._note(f"{contestant.label}: {error}")
        return replace(contestant, state=PeerState.FAILED, reason=str(error))


def vocab_size(checkpoint: Path) -> int:
    """Return the vocabulary size. Raises: CommandFailed."""
    try:
        config = json.loads((checkpoint / "config.json").read_text(encoding="utf-8"))
        return int(config.get("text_config", config)["vocab_size"])
    except (OSError, ValueError, KeyError) as error:
        raise CommandFailed(f"{checkpoint / 'config.json'} names no vocab_size") from error


def _print_table(
    options: PeersOptions, checkpoint: Path, contestants: Sequence[Contestant], rows: Sequence[PeerRow]
) -> None:
    versions = {each.label: each.version for each in contestants}
    columns: Columns[PeerRow] = {
        "engine": lambda row: row.label,
        "version": lambda row: versions[row.label],
        "batch": lambda row: row.batch,
        "prefill tokens/s": lambda row: f"{row.prefill_tokens_per_s:,.0f}",
        "Baton's prefill speed over it": lambda row: _ratio(row.prefill_ratio, options.rounds),
        "decode step ms": lambda row: f"{row.decode_step_ms:.2f}",
        "Baton's decode speed over it": lambda row: _ratio(row.decode_ratio, options.rounds),
        "same first tokens": lambda row: "" if row.name == OURS else f"{row.same_first_tokens:.0%}",
    }
    print(_title(options, checkpoint), table(rows, columns), sep="\n")
    for each in contestants:
        if each.state is not PeerState.MEASURED:
            print(f"{each.label}: {each.state}" + (f": {each.reason}" if each.reason else ""))
    print(f"{options.rounds} rounds in turn; ratios of each round, geometric mean and 95 % interval")


def _ratio(ratio: MeanEstimate | None, rounds: int) -> str:
    if ratio is None:
        return ""
    return f"{ratio.middle:.2f} ({ratio.low:.2f}-{ratio.high:.2f}) {verdict(ratio, rounds)}"


def _title(options: PeersOptions, checkpoint: Path) -> str:
    return f"{checkpoint.name}, prompts of {options.prompt_tokens} tokens, threads: {options.thread_count}"


def _work(options: PeersOptions, checkpoint: Path) -> dict[str, Any]:
    return {
        "model": checkpoint.name,
        "prompt_tokens": options.prompt_tokens,
        "new_tokens": options.new_tokens,
        "threads": options.thread_count,
    }


def _speed(work: RoundWork, measured: MeasuredRound) -> str:
    tokens_per_s = work.batch * work.prompt_tokens / measured.prefill_s
    return f"{tokens_per_s:,.0f} tokens/s, {measured.decode_step_s * 1e3:.2f} ms"
