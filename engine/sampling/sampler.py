"""Sampling of tokens from logits for a batch. A row's tokens do not depend on other rows.

First, rows with structured output get their masks, if these are ready. Then tokens are sampled. Finally, the
log-probabilities of sampled and prompt tokens are computed from the model's logits, without penalties, temperature and
filters.
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from baton.engine.request import Chunk, Drawn, NonFinite, Sample, Scored, TokenLogprob, uniform
from baton.engine.sampling.constraint import Constraint, StepClock, wait_for
from baton.engine.sampling.logits import HistoryMissing, adjust, filtered, likeliest, pick
from baton.engine.sampling.mask_threads import Allowed, Mask
from baton.kernels.sampling import masked_rows, row_statistics, sample_tokens, samples_natively

logger = logging.getLogger(__name__)
Constrained = tuple[Constraint, Sample]
"""Constraint of structured output, and the sample that it restricts."""
RowResult = tuple[Drawn, ...] | NonFinite | None
"""Tokens of a row, one per sample in order; NonFinite if it failed; None if its mask was not ready in time."""


@dataclass(slots=True)
class Distribution:
    """Samples of one row from the same distribution: same parameters, same preceding tokens."""

    row: int
    sample: Sample  # any one of the samples
    places: list[int] = field(default_factory=list)  # indexes of the samples in the row
    numbers: list[float] = field(default_factory=list)  # random numbers in [0, 1), one per sample; empty if greedy
    token_ids: list[int] = field(default_factory=list)  # sampled tokens, one per sample; empty if none can be sampled
    allowed: Allowed | None = None  # mask of the answer's grammar, if it has one


Undrawn = dict[int, NonFinite | None]
"""Rows without a sampled token, each with its failure; None if only its mask is late."""


def constrained_samples(chunks: Iterable[Chunk]) -> list[Constrained]:
    return [
        (constraint, sample)
        for chunk in chunks
        for sample in chunk.samples
        if (constraint := sample.params.constraint) is not None
    ]


def ask_for_masks(constrained: Iterable[Constrained]) -> None:
    """Request the masks of a step, those of drafts last, to be computed during its forward pass.

    Call it just before the layers start, since they release the interpreter's lock for long. After an earlier call,
    mask threads would only compete for the lock.
    """
    for constraint, sample in sorted(constrained, key=lambda each: each[1].drafted_tokens):
        _asked(constraint, sample)


def _asked(constraint: Constraint, sample: Sample) -> Mask:
    """Request the mask of a sample. If the constraint raises, return a mask that fails only this answer."""
    try:
        return constraint.mask(sample.choice, sample.history, sample.prompt_tokens, sample.drafted_tokens)
    except Exception as failure:  # noqa: BLE001 -- any fault of one grammar fails only its request
        return Mask.failed(failure)


def settle(distributions: Sequence[Distribution], has_neighbours: bool, clock: StepClock) -> Undrawn:
    """Give the rows with structured output their masks, and return the rows that cannot be sampled.

    `has_neighbours`: whether there are rows without structured output. `clock`: clock of the step. Raises:
    HistoryMissing.
    """
    undrawn: Undrawn = {}
    masks = [
        (each, _mask(constraint, each.sample))
        for each in distributions
        if (constraint := each.sample.params.constraint) is not None
    ]
    if not masks:
        return undrawn
    of_drafts = [mask for each, mask in masks if each.sample.drafted_tokens]
    wait_for([mask for each, mask in masks if not each.sample.drafted_tokens], clock, has_neighbours, of_drafts)
    for each, mask in masks:
        if not mask.is_ready:
            undrawn[each.row] = None
            continue
        try:
            each.allowed = mask.result()
        except BaseException as error:  # noqa: BLE001 -- GrammarFailed, or a panic of the library on its own thread
            failed = NonFinite(f"the answer cannot keep to the structured output asked for: {error}")
            undrawn[each.row] = None if each.sample.drafted_tokens else failed  # the answer's own failure recurs
    return undrawn


def put_grammar_first(
    adjusted: torch.Tensor, logits: torch.Tensor, distributions: Sequence[Distribution], alive: Sequence[bool]
) -> bool:
    """Mask rows by grammar alone if other rules ban all tokens that the grammar allows; return whether a row changed.

    `logits`: the model's logits. `alive`: for each row of `adjusted`, whether any token is left.
    """
    rows = [row for row, each in enumerate(distributions) if each.allowed is not None and not alive[row]]
    if rows:
        alone = [distributions[row] for row in rows]
        adjusted[rows] = masked_rows(logits, [each.row for each in alone], [each.allowed for each in alone])
    return bool(rows)


def _mask(constraint: Constraint, sample: Sample) -> Mask:
    if not sample.history:
        raise HistoryMissing("structured output needs Sample.history")
    return _asked(constraint, sample)


# Maximum elements of one float64 tensor of the filters; a single row may have more.
CPU_SCRATCH_ELEMENTS = 1 << 18  # 2 MiB: stays in the cache between operations
DEVICE_SCRATCH_ELEMENTS = 1 << 22  # 32 MiB: needs few launches, and is small compared with the KV pool


MASK_BYTES = 10  # memory per logit: a copy of all rows, a copy of the masked rows, and two copies of their masks
FILTER_BYTES = 104  # memory per filtered logit: nine 8-byte tensors of typical-p, and 32 bytes of scratch of its sort


def draw_bytes(rows: int, vocab_size: int) -> int:
    """Return the maximum GPU memory in bytes that `sample` needs in addition to the logits."""
    filtered_at_once = min(rows * vocab_size, max(DEVICE_SCRATCH_ELEMENTS, vocab_size))
    return max(MASK_BYTES * rows * vocab_size, FILTER_BYTES * filtered_at_once)


@dataclass(frozen=True, slots=True)
class Row:
    """Samples of one row of logits. `position`: absolute position of the sampled token."""

    samples: tuple[Sample, ...]
    position: int


def sample(logits: torch.Tensor, rows: Sequence[Row], clock: StepClock | None = None) -> list[RowResult]:
    """Sample one result per row of `logits`, float32 `[rows, vocab]`.

    A row with non-finite logits does not affect the other rows. If all rows lack their mask of structured
    output, wait for a mask. Otherwise wait for late masks at most a fraction of the step's time so far (by `clock`, the
    step's clock), or not at all without a clock. Raises: HistoryMissing.
    """
    special = [each for index, row in enumerate(rows) for each in _distributions(index, row)]
    undrawn = settle(special, any(_draws_freely(row) for row in rows), clock or StepClock(math.inf))
    alone = {each.row: each.allowed for each in special if _is_best_allowed(each, rows[each.row])}
    statistics = row_statistics(logits, [alone.get(index) for index in range(len(rows))] if alone else None)
    finite: list[bool] = statistics.finite.tolist()
    best = statistics.best.tolist()
    drawn = [[best[index]] * len(row.samples) if finite[index] else None for index, row in enumerate(rows)]
    if undrawn:
        undrawn = {index: why for index, why in undrawn.items() if finite[index]}
        for index in undrawn:
            drawn[index] = None
    special = [each for each in special if drawn[each.row] is not None and each.row not in alone]
    _draw(logits, special)
    for distribution in special:
        token_ids = drawn[distribution.row]
        if not distribution.token_ids:
            drawn[distribution.row] = None
        elif token_ids is not None:
            for place, token_id in zip(distribution.places, distribution.token_ids, strict=True):
                token_ids[place] = token_id
    results = _results(logits, statistics.log_totals, rows, drawn)
    return [undrawn.get(index, result) for index, result in enumerate(results)] if undrawn else results


def sample_each(logits: torch.Tensor, rows: Sequence[Row], clock: StepClock | None = None) -> list[RowResult]:
    """Sample all rows; if that fails, sample each row alone, so that a failing row fails only its own request.

    Raises the first exception if device or scheduler caused it, or if all of several rows fail.
    """
    try:
        return sample(logits, rows, clock)
    except Exception as fault:
        if isinstance(fault, HistoryMissing) or (logits.is_cuda and isinstance(fault, RuntimeError)):
            raise
        results = [_alone(logits[index : index + 1], row, clock) for index, row in enumerate(rows)]
        if len(rows) > 1 and all(isinstance(result, NonFinite) for result in results):
            raise
        return results


def _alone(logits: torch.Tensor, row: Row, clock: StepClock | None) -> RowResult:
    try:
        return sample(logits, [row], clock)[0]
    except Exception as fault:  # reported to the request
        logger.exception("sampling failed; failing this request")
        return NonFinite(f"no token can be drawn: {type(fault).__name__}: {fault}")


def _is_best_allowed(distribution: Distribution, row: Row) -> bool:
    """Return whether all samples of a row need only the most likely token that the grammar allows."""
    params = distribution.sample.params
    is_plain = params.greedy and not params.adjusts_logits
    return is_plain and distribution.allowed is not None and len(distribution.places) == len(row.samples)


def _draws_freely(row: Row) -> bool:
    return any(wanted.params.constraint is None for wanted in row.samples)


def _distributions(index: int, row: Row) -> Iterator[Distribution]:
    """Yield the distributions of a row, except for samples that only take the most likely token.

    Samples of one distribution must be adjacent.
    """
    current: Distribution | None = None
    for place, wanted in enumerate(row.samples):
        params = wanted.params
        if params.greedy and params.takes_any_token:
            continue
        if current is None or params is not current.sample.params or wanted.history is not current.sample.history:
            if current is not None:
                yield current
            current = Distribution(index, wanted)
        current.places.append(place)
        if not params.greedy:
            current.numbers.append(uniform(params.seed, wanted.choice, row.position))
    if current is not None:
        yield current


def _draw(logits: torch.Tensor, distributions: Sequence[Distribution]) -> None:
    """Sample all distributions, grouped by kind of filter, in bounded scratch memory.

    The group depends only on a distribution's own parameters, so that other rows cannot change its tokens: sums in
    different groups may differ in the last bit.
    """
    elements = CPU_SCRATCH_ELEMENTS if logits.device.type == "cpu" else DEVICE_SCRATCH_ELEMENTS
    at_once = max(1, elements // logits.shape[-1])
    ways: dict[tuple[bool, bool, bool], list[Distribution]] = {}
    for each in distributions:
        params = each.sample.params
        ways.setdefault((params.greedy, params.is_narrow, params.filters_by_rank_alone), []).append(each)
    for alike in ways.values():
        for start in range(0, len(alike), at_once):
            _draw_alike(logits, alike[start : start + at_once])


def _draw_alike(logits: torch.Tensor, distributions: Sequence[Distribution]) -> None:
    adjusted = masked_rows(logits, [each.row for each in distributions], [each.allowed for each in distributions])
    if any(each.sample.params.adjusts_logits for each in distributions):
        adjust(adjusted, [each.sample for each in distributions])
    largest = adjusted.max(-1)
    alive = largest.values.isfinite().tolist()  # false if every token is banned, or a bias exceeded float32
    if not all(alive) and put_grammar_first(adjusted, logits, distributions, alive):
        largest = adjusted.max(-1)
        alive = largest.values.isfinite().tolist()
    if distributions[0].sample.params.greedy:
        for each, token_id, lives in zip(distributions, largest.indices.tolist(), alive, strict=True):
            each.token_ids = [token_id] * len(each.places) if lives else []
        return
    living = [each for each, lives in zip(distributions, alive, strict=True) if lives]
    if not living:
        return
    if len(living) < len(distributions):
        adjusted = adjusted[torch.tensor(alive, device=logits.device)]
    if samples_natively(adjusted) and living[0].sample.params.filters_by_rank_alone:
        _draw_natively(adjusted, living)
        return
    most = max(len(each.numbers) for each in living)
    numbers = [each.numbers + [0.0] * (most - len(each.numbers)) for each in living]
    candidates = filtered(adjusted, [each.sample.params for each in living])
    picked = pick(candidates, torch.tensor(numbers, dtype=torch.float64, device=logits.device))
    for each, token_ids in zip(living, picked.tolist(), strict=True):
        each.token_ids = token_ids[: len(each.numbers)]


def _draw_natively(adjusted: torch.Tensor, distributions: Sequence[Distribution]) -> None:
    """Sample from one row of `adjusted` per distribution; rows with several samples are repeated."""
    params = [each.sample.params for each in distributions for _ in each.places]
    if len(params) > len(distributions):
        counts = torch.tensor([len(each.places) for each in distributions])
        adjusted = adjusted.repeat_interleave(counts, dim=0)
    drawn = sample_tokens(
        adjusted,
        torch.tensor([each.temperature for each in params]),
        torch.tensor([each.top_k for each in params]),
        torch.tensor([each.top_p for each in params]),
        torch.tensor([number for each in distributions for number in each.numbers], dtype=torch.float64),
    )
    token_ids = iter(drawn.token_ids.tolist())
    for each in distributions:
        each.token_ids = [next(token_ids) for _ in each.places]


def _results(
    logits: torch.Tensor, log_totals: torch.Tensor, rows: Sequence[Row], drawn: Sequence[list[int] | None]
) -> list[RowResult]:
    of_rows = [index for index, token_ids in enumerate(drawn) for _ in token_ids or ()]
    token_ids = [token_id for of_row in drawn for token_id in of_row or ()]
    counts = [
        wanted.params.logprobs for row, of_row in zip(rows, drawn, strict=True) if of_row for wanted in row.samples
    ]
    results: Iterator[Drawn] = iter(described(logits, log_totals, of_rows, token_ids, counts))
    return [NonFinite() if of_row is None else tuple(next(results) for _ in of_row) for of_row in drawn]


def described(
    logits: torch.Tensor,
    log_totals: torch.Tensor,
    rows: Sequence[int],
    token_ids: Sequence[int],
    counts: Sequence[int],
) -> list[Drawn]:
    """Return each of `token_ids` with its log-probability in its row, and with the row's `counts` most likely tokens.

    `logits`: float32 `[rows, vocab]`. `log_totals`: `[rows]`, from kernels/sampling.py. `rows`: row of each token; a
    row may have any number of tokens. In prompt scoring, the token at position p + 1 belongs to the row of position p.
    """
    if not rows:
        return []
    of_rows = torch.tensor(rows, device=logits.device)
    chosen = logits[of_rows, torch.tensor(token_ids, device=logits.device)]
    of_tokens = (chosen - log_totals[of_rows]).tolist()
    most: dict[int, int] = {}
    for row, count in zip(rows, counts, strict=True):
        if count:
            most[row] = max(count, most.get(row, 0))
    top = dict(zip(most, _top(logits, log_totals, most), strict=True)) if most else {}
    return [
        Drawn(token_id, logprob, top[row][:count] if count else ())
        for row, token_id, logprob, count in zip(rows, token_ids, of_tokens, counts, strict=True)
    ]


def _top(logits: torch.Tensor, log_totals: torch.Tensor, most: dict[int, int]) -> list[tuple[TokenLogprob, ...]]:
    """Return the most likely tokens of the rows in `most`, by logit and then by id. `most`: number of tokens by row."""
    rows = list(most)
    found = likeliest(logits[rows], list(most.values()))
    width = min(max(most.values()), logits.shape[-1])
    order = found.logits.sort(dim=-1, descending=True, stable=True).indices[:, :width]
    token_ids = found.token_ids.gather(-1, order)
    values = found.logits.gather(-1, order) - log_totals[rows][:, None]
    return [
        tuple(TokenLogprob(*pair) for pair in list(zip(ids, of_row, strict=True))[:count])
        for ids, of_row, count in zip(token_ids.tolist(), values.tolist(), most.values(), strict=True)
    ]


ROWS_AT_ONCE = 64  # rows whose float32 logits and log-probabilities are in memory together


def prompt_scores(
    logits: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, scored: Scored
) -> tuple[Drawn, ...] | None:
    """Return the scores of all tokens of `scored`, or None if any of their logits are not finite.

    Row i of a chunk's `hidden`, `[tokens, hidden size]`, predicts token i of `scored`. `logits`: function from rows of
    `hidden` to their logits, float32 `[rows, vocab]`.
    """
    scores: list[Drawn] = []
    for start in range(0, len(scored.token_ids), ROWS_AT_ONCE):
        token_ids = scored.token_ids[start : start + ROWS_AT_ONCE]
        rows = logits(hidden[start : start + len(token_ids)])
        statistics = row_statistics(rows)
        if not bool(statistics.finite.all()):
            return None
        places = range(len(token_ids))
        scores += described(rows, statistics.log_totals, places, token_ids, [scored.top] * len(token_ids))
    return tuple(scores)
