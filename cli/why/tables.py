"""Report of one request: sentences, stages, stalls, placement, cached blocks, and the cost of prefill on decode."""

from collections.abc import Iterator, Sequence

from baton.cli.layout import Column, count, ms, percent, seconds, table, wrapped
from baton.cli.why.placement import placement_lines
from baton.cli.why.sentences import sentences
from baton.cli.why.waterfall import TO_FIRST_TOKEN, TO_SECOND_TOKEN
from baton.cli.why.words import SHOWN_SHARE, fate, stall_lines
from baton.client import BlockRun, CacheAutopsy, ColocatedPrefill, RequestWhy

WIDTH = 80


def lines(found: RequestWhy) -> Iterator[str]:
    """Yield the report, WIDTH columns wide unless an id is longer."""
    placed = found.placed
    yield from wrapped([f"{placed.request_id}: {placed.status}"], WIDTH)
    size = f"{count(placed.prompt_tokens, 'prompt token')}, {ms(found.stages.total_ms)}"
    yield f"{size}, arrived {seconds(placed.age_s)} ago"
    yield ""
    for sentence in sentences(found):
        yield from wrapped([sentence], WIDTH, "")
    yield from _stages(found)
    if found.stalls:
        yield ""
        yield "stalls" if found.stall_count <= len(found.stalls) else f"the longest of {found.stall_count} stalls"
        yield from stall_lines(found.stalls, placed.request_id, WIDTH)
    yield ""
    yield from placement_lines(found.placed, WIDTH)
    if found.cache is not None:
        yield from _cache(found.cache)
    if found.colocated is not None:
        yield from _colocated(found.colocated)


def _stages(found: RequestWhy) -> Iterator[str]:
    stages = found.stages
    for title, total_ms, names in (
        ("time to the first token", stages.ttft_ms, TO_FIRST_TOKEN),
        ("first token to second", stages.token_gap_ms, TO_SECOND_TOKEN),
    ):
        if total_ms <= 0.0:
            continue
        parts: dict[str, float] = {name: getattr(stages, name) for name in names}
        overlap_ms = sum(parts.values()) - total_ms
        if overlap_ms > SHOWN_SHARE * total_ms:
            parts["overlap_ms"] = -overlap_ms
        rows = [
            (f"  {name.removesuffix('_ms').replace('_', ' ')}", ms(value), percent(value / total_ms))
            for name, value in parts.items()
            if value
        ]
        columns: tuple[Column[tuple[str, str, str]], ...] = (
            Column(title, lambda row: row[0], is_number=False),
            Column(ms(total_ms), lambda row: row[1]),
            Column("", lambda row: row[2]),
        )
        yield ""
        yield from table(columns, rows)


def _cache(cache: CacheAutopsy) -> Iterator[str]:
    if not cache.runs:
        return
    yield ""
    yield from wrapped(
        [f"blocks of {cache.block_tokens} tokens in the cache of {cache.worker_id} at the placement"], WIDTH
    )
    width = max(len(_indices(run)) for run in cache.runs)
    for run in cache.runs:
        yield from wrapped([f"  {_indices(run):<{width}}  {fate(run, cache)}"], WIDTH, " " * (width + 4))


def _indices(run: BlockRun) -> str:
    last = run.first_block + run.blocks - 1
    return f"{run.first_block}" if run.blocks == 1 else f"{run.first_block}–{last}"


def _colocated(cost: ColocatedPrefill) -> Iterator[str]:
    yield ""
    yield f"the prompt on {cost.worker_id}{'' if cost.is_local else ' instead'}"
    for sentence in colocated_sentences(cost):
        yield from wrapped([f"  {sentence}"], WIDTH)


def colocated_sentences(cost: ColocatedPrefill) -> Sequence[str]:
    """Return sentences on what prefill on the decode worker would have cost, and on the error of such predictions."""
    if not cost.basis:
        return [f"Its cost on {cost.worker_id} is unknown: no worker has reported its prefill rate."]
    came = f"after {ms(cost.measured_ttft_ms)}" if cost.measured_ttft_ms else "not at all"
    predicted = ms(cost.ttft_ms) + (f", {ms(cost.wait_ms)} of it for other prompts" if cost.wait_ms else "")
    tokens = count(cost.prompt_tokens, "token")
    if cost.is_local:
        said = [f"It computed {tokens} itself: first token predicted after {predicted}, came {came}."]
    else:
        said = [
            f"Computing {tokens} there: first token predicted after {predicted}; "
            f"with the prefill worker it came {came} (from the dispatch)."
        ]
        if cost.answers:
            gap = f"with about {ms(cost.answers_gap_ms)} between their tokens"
            said.append(f"It would have slowed the steps of {count(cost.answers, 'answer')} there, {gap}.")
    if cost.basis != "measured":
        said.append("The rate is assumed, from other workers or from prompts without concurrent answers.")
    return [*said, _error(cost)]


def _error(cost: ColocatedPrefill) -> str:
    if not cost.checked_requests:
        return "The error of this prediction is unknown: no decode worker has computed a prompt yet."
    tokens, off, ratio = count(cost.checked_tokens, "token"), percent(cost.median_error), cost.median_ratio
    prompts = f"one prompt of {tokens}" if cost.checked_requests == 1 else f"{cost.checked_requests} of about {tokens}"
    return (
        f"Such predictions were off by {off} for prompts that decode workers computed ({prompts}; median): "
        f"the first token took {ratio:.2f} times as long as predicted."
    )
