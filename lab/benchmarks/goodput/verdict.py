"""Verdict of `baton bench goodput`: what Baton promises against its peers, judged on the figures of rounds. Pure.

The reference of ratios is vLLM with its defaults, or without vLLM the first peer. The best peer setting is the best of
all settings of peers. Saturation is the highest output rate of any system, in requests per second.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from baton.lab.benchmarks.goodput.figures import GoodputFigures

LEAST_SHARE, FALLEN_SHARE = 0.95, 0.9  # minimum of our share, at rates where the best peer's is below FALLEN_SHARE
MAX_TTFT_RATIO, MAX_ITL_RATIO, PART_OF_SATURATION = 1.5, 1 / 8, 0.7
MIN_THROUGHPUT_RATIO, MAX_E2EL_RATIO = 1.1, 0.6


@dataclass(frozen=True, slots=True)
class Contest:
    """Figures of one setting of Baton and of all peers by name: those of one round, or medians over rounds."""

    ours: Mapping[float, GoodputFigures]  # by rate
    peers: Mapping[str, Mapping[float, GoodputFigures]]
    our_tokens_per_s: float | None  # at saturation; None if not measured
    peer_tokens_per_s: Mapping[str, float]
    tokens_per_request: float
    reference: str  # name of the peer that ratios compare with

    @property
    def rates(self) -> list[float]:
        """Rates that Baton and a peer were measured at, in ascending order."""
        return sorted(rate for rate in self.ours if any(rate in rates for rates in self.peers.values()))

    @property
    def saturation(self) -> float:
        """Requests per second at saturation; infinite if not measured."""
        measured = [each for each in (self.our_tokens_per_s, *self.peer_tokens_per_s.values()) if each is not None]
        return max(measured) / self.tokens_per_request if measured else float("inf")

    def at(self, rate: float) -> dict[str, GoodputFigures]:
        """Return the figures of all peer settings at a rate."""
        return {name: rates[rate] for name, rates in self.peers.items() if rate in rates}


@dataclass(frozen=True, slots=True)
class PromiseFinding:
    """Judgement of one promise. `holds`: None where it could not be judged."""

    promise: str
    holds: bool | None
    detail: str


def judge_contest(contest: Contest) -> list[PromiseFinding]:
    """Judge all promises."""
    return [
        _share_is_best(contest),
        _share_where_peers_fall(contest),
        _latency_below_saturation(contest),
        _throughput(contest),
        _time_to_answer(contest),
        _not_dominated(contest),
    ]


def _finding(promise: str, cases: Iterable[tuple[bool, str]]) -> PromiseFinding:
    """Return a finding that holds if all cases hold. Its detail lists the cases that do not hold, or else all."""
    found = list(cases)
    missed = [text for holds, text in found if not holds]
    if not found:
        return PromiseFinding(promise, None, "not measured")
    return PromiseFinding(promise, not missed, "; ".join(missed or [text for _, text in found]))


def _share_is_best(contest: Contest) -> PromiseFinding:
    """Judge the share of good requests at every rate up to saturation, against the best setting of a peer."""

    def cases() -> Iterable[tuple[bool, str]]:
        for rate in contest.rates:
            if rate <= contest.saturation:
                name, best = _best_share(contest.at(rate))
                share = contest.ours[rate].share_good
                yield share >= best, f"{rate:g}/s: {share:.2f}, {name} {best:.2f}"

    return _finding("share of good requests at least that of the best peer setting, at every rate", cases())


def _share_where_peers_fall(contest: Contest) -> PromiseFinding:
    promise = f"share at least {LEAST_SHARE:g} at the lowest rate where the best peer setting is below {FALLEN_SHARE:g}"
    for rate in contest.rates:
        name, best = _best_share(contest.at(rate))
        if best < FALLEN_SHARE:
            share = contest.ours[rate].share_good
            return _finding(promise, [(share >= LEAST_SHARE, f"{rate:g}/s: {share:.2f}, {name} {best:.2f}")])
    return PromiseFinding(promise, None, "no rate was that high")


def _latency_below_saturation(contest: Contest) -> PromiseFinding:
    """Judge TTFT and ITL against the reference, at rates up to PART_OF_SATURATION of saturation."""

    def cases() -> Iterable[tuple[bool, str]]:
        for rate, theirs in sorted(contest.peers.get(contest.reference, {}).items()):
            ours = contest.ours.get(rate)
            if ours is None or rate > PART_OF_SATURATION * contest.saturation:
                continue
            ttft, itl = _ratio(ours.ttft_p50, theirs.ttft_p50), _ratio(ours.itl_p99, theirs.itl_p99)
            if ttft is not None and itl is not None:
                holds = ttft <= MAX_TTFT_RATIO and itl <= MAX_ITL_RATIO
                yield holds, f"{rate:g}/s: TTFT p50 {ttft:.2f}, ITL p99 {itl:.3f}"

    return _finding(
        f"TTFT p50 at most {MAX_TTFT_RATIO:g} and ITL p99 at most {MAX_ITL_RATIO:g} of those of {contest.reference}, "
        f"up to {PART_OF_SATURATION:.0%} of saturation ({PART_OF_SATURATION * contest.saturation:.2f}/s)",
        cases(),
    )


def _throughput(contest: Contest) -> PromiseFinding:
    promise = f"output tokens/s at saturation at least {MIN_THROUGHPUT_RATIO:g} of those of {contest.reference}"
    theirs, best = contest.peer_tokens_per_s.get(contest.reference), max(contest.peer_tokens_per_s.values(), default=0)
    ratio = _ratio(contest.our_tokens_per_s, theirs)
    if ratio is None or contest.our_tokens_per_s is None:
        return PromiseFinding(promise, None, "not measured")
    against_best = contest.our_tokens_per_s / best
    return _finding(promise, [(ratio >= MIN_THROUGHPUT_RATIO, f"{ratio:.2f}, of the best setting {against_best:.2f}")])


def _time_to_answer(contest: Contest) -> PromiseFinding:
    """Judge the time to the complete answer at every rate up to saturation, against the reference."""

    def cases() -> Iterable[tuple[bool, str]]:
        for rate, theirs in sorted(contest.peers.get(contest.reference, {}).items()):
            ours = contest.ours.get(rate)
            if ours is None or rate > contest.saturation:
                continue
            best = min((each.e2el_p50 for each in contest.at(rate).values() if each.e2el_p50), default=None)
            ratio, against_best = _ratio(ours.e2el_p50, theirs.e2el_p50), _ratio(ours.e2el_p50, best)
            if ratio is not None:
                yield ratio <= MAX_E2EL_RATIO, f"{rate:g}/s: {ratio:.2f}, of the best setting {against_best:.2f}"

    return _finding(
        f"time to the complete answer (p50) at most {MAX_E2EL_RATIO:g} of that of {contest.reference}", cases()
    )


def _not_dominated(contest: Contest) -> PromiseFinding:
    """Judge that no setting of a peer is better in both TTFT and TBT at any rate."""

    def cases() -> Iterable[tuple[bool, str]]:
        for rate in contest.rates:
            ours = contest.ours[rate]
            above = [name for name, theirs in contest.at(rate).items() if dominates(theirs, ours)]
            yield not above, f"{rate:g}/s: {', '.join(above) or 'none'}"

    return _finding("no peer setting better in both TTFT p90 and TBT p99 at any rate", cases())


def dominates(one: GoodputFigures, other: GoodputFigures) -> bool:
    """Return whether `one` has the lower TTFT p90 and the lower p99 of the time between tokens."""
    pairs = ((one.ttft_p90, other.ttft_p90), (one.itl_p99, other.itl_p99))
    return all(ours is not None and theirs is not None and ours < theirs for ours, theirs in pairs)


def _best_share(peers: Mapping[str, GoodputFigures]) -> tuple[str, float]:
    name = max(peers, key=lambda each: peers[each].share_good)
    return name, peers[name].share_good


def _ratio(ours: float | None, theirs: float | None) -> float | None:
    return None if ours is None or not theirs else ours / theirs
