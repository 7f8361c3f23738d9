"""The tables below the sentences: stages, stalls, placement, blocks, and the prompt on its decode worker instead."""

import re
import textwrap
from collections.abc import Iterator, Sequence

from baton.cli.why.sentences import sentences
from baton.cli.why.words import cause, count, fate, ms, percent, seconds
from baton.client import BlockRun, CacheAutopsy, ColocatedPrefill, RequestWhy

WIDTH = 80
SHOWN_SHARE = 0.02
"""Causes with a smaller share of a stall, and a smaller overlap of stages, are left to --json."""
_UNIT = re.compile(r"(?<=\d) (?=(?:ms|s|%)(?!\w))")
TTFT = ("router_queue_ms", "route_ms", "prefill_fetch_ms", "prefill_queue_ms", "prefill_ms", "return_ms")
TOKEN_GAP = ("recovery_ms", "transfer_exposed_ms", "decode_admission_ms", "first_step_ms")


def lines(found: RequestWhy) -> Iterator[str]:
    """All that is printed, at most WIDTH columns wide; only an id that is longer itself is wider."""
    placed = found.placed
    yield from _wrapped(f"{placed.request_id}: {placed.status}")
    whole = f"{count(placed.prompt_tokens, 'prompt token')}, {ms(found.stages.total_ms)}"
    yield f"{whole}, arrived {seconds(placed.age_s)} ago"
    yield ""
    for sentence in sentences(found):
        yield from _wrapped(sentence)
    yield from _stages(found)
    yield from _stalls(found)
    yield from _placement(found)
    if found.cache is not None:
        yield from _cache(found.cache)
    if found.colocated is not None:
        yield from _colocated(found.colocated)


def _stages(found: RequestWhy) -> Iterator[str]:
    stages = found.stages
    for title, whole_ms, names in (
        ("time to the first token", stages.ttft_ms, TTFT),
        ("first token to second", stages.token_gap_ms, TOKEN_GAP),
    ):
        if whole_ms <= 0.0:
            continue
        yield ""
        yield f"{title:<26}{ms(whole_ms):>10}"
        parts: dict[str, float] = {name: getattr(stages, name) for name in names}
        overlap_ms = sum(parts.values()) - whole_ms
        if overlap_ms > SHOWN_SHARE * whole_ms:
            parts["overlap_ms"] = -overlap_ms
        for name, value in parts.items():
            if value:
                label = name.removesuffix("_ms").replace("_", " ")
                yield f"  {label:<24}{ms(value):>10}{percent(value / whole_ms):>7}"


def _stalls(found: RequestWhy) -> Iterator[str]:
    if not found.stalls:
        return
    yield ""
    yield "stalls" if found.stall_count <= len(found.stalls) else f"the longest of {found.stall_count} stalls"
    for stall in found.stalls:
        worth = [part for part in stall.causes if part.ms >= SHOWN_SHARE * stall.gap_ms]
        causes = "; ".join(cause(part, found.placed.request_id) + _detail(part.detail) for part in worth)
        usual = f"usual {ms(stall.usual_ms)}"
        head = f"  {ms(stall.gap_ms):>8} until {seconds(stall.at_ms / 1e3)} after the arrival: "
        yield from _wrapped(head + (f"{causes}; {usual}" if causes else usual), "    ")


def _detail(detail: str) -> str:
    return f" ({detail})" if detail else ""


def _placement(found: RequestWhy) -> Iterator[str]:
    yield ""
    yield "placement"
    for number, attempt in enumerate(found.placed.attempts, 1):
        title = f"attempt {number}: " if len(found.placed.attempts) > 1 else ""
        yield from _wrapped(f"  {title}{attempt.reason}", "    ")
        if attempt.failure:
            yield from _wrapped(f"  it failed: {attempt.failure}", "    ")
        expected_ms, came_ms = attempt.predicted.get("expected_ttft_ms"), attempt.actual.get("ttft_ms")
        if expected_ms and came_ms is not None:
            yield f"  first token after the dispatch: expected {ms(expected_ms)}, came after {ms(came_ms)}"


def _cache(cache: CacheAutopsy) -> Iterator[str]:
    if not cache.runs:
        return
    yield ""
    yield from _wrapped(
        f"blocks of {cache.block_tokens} tokens in the cache of {cache.worker_id}, when the prompt was placed"
    )
    width = max(len(_places(run)) for run in cache.runs)
    for run in cache.runs:
        yield from _wrapped(f"  {_places(run):<{width}}  {fate(run, cache)}", " " * (width + 4))


def _places(run: BlockRun) -> str:
    last = run.first_block + run.blocks - 1
    return f"{run.first_block}" if run.blocks == 1 else f"{run.first_block}–{last}"


def _colocated(cost: ColocatedPrefill) -> Iterator[str]:
    yield ""
    yield f"the prompt on {cost.worker_id}{'' if cost.is_local else ' instead'}"
    for sentence in colocated_sentences(cost):
        yield from _wrapped(f"  {sentence}", "  ")


def colocated_sentences(cost: ColocatedPrefill) -> Sequence[str]:
    """What the decode worker would have needed, with the error that such predictions have had."""
    if not cost.basis:
        return [f"What it costs on {cost.worker_id} is not known: no worker had reported a rate of prompts."]
    came = f"after {ms(cost.measured_ttft_ms)}" if cost.measured_ttft_ms else "not at all"
    predicted = ms(cost.ttft_ms) + (f", {ms(cost.wait_ms)} of it for other prompts" if cost.wait_ms else "")
    tokens = count(cost.prompt_tokens, "token")
    if cost.is_local:
        said = [f"It computed {tokens} itself: the first token was predicted after {predicted}, and came {came}."]
    else:
        said = [
            f"Computing {tokens} there: first token predicted after {predicted}; "
            f"over the prefill worker it came {came} (from the dispatch)."
        ]
        if cost.answers:
            gap = f"with about {ms(cost.answers_gap_ms)} between their tokens"
            said.append(f"The steps of {count(cost.answers, 'answer')} there, {gap}, would have had parts of it.")
    if cost.basis != "measured":
        said.append("The rate is assumed, from other workers or from prompts without answers beside them.")
    return [*said, _error(cost)]


def _error(cost: ColocatedPrefill) -> str:
    if not cost.checked_requests:
        return "No decode worker has computed a prompt so far: the error of this prediction is not known."
    tokens, off, ratio = count(cost.checked_tokens, "token"), percent(cost.median_error), cost.median_ratio
    prompts = f"one prompt of {tokens}" if cost.checked_requests == 1 else f"{cost.checked_requests} of about {tokens}"
    return (
        f"Of the prompts that decode workers did compute ({prompts}), such predictions were off by {off} (median): "
        f"the first token took {ratio:.2f} times as long as predicted."
    )


def _wrapped(text: str, indent: str = "") -> list[str]:
    """`text` may begin with blanks, which stay. A number and its unit stay on one line."""
    bound = _UNIT.sub("\N{NO-BREAK SPACE}", text)
    wrapped = textwrap.wrap(bound, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in wrapped]
