"""Sentences on one request: first token, stalls, drafts if any, cached blocks."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import replace

from baton.cli.layout import count, ms, percent
from baton.cli.why.words import cause, fate
from baton.client import CacheAutopsy, RequestDrafts, RequestWhy

NAMED_SHARE = 0.05
NAMED = 2
"""Most parts of a sum that a sentence names: the largest, each at least NAMED_SHARE of the sum."""


def sentences(found: RequestWhy) -> tuple[str, ...]:
    """Return the sentences on first token, stalls, drafts and cache."""
    further = [drafts(found.drafts)] if found.drafts else []
    return first_token(found), stalls(found), *further, cached(found), *changed(found), *ignored(found)


def changed(found: RequestWhy) -> Sequence[str]:
    """Say where the prompt of a session changed, if it did: KV from there on cannot be reused."""
    change = found.prompt_change
    if change is None:
        return ()
    text = f"Its prompt differs from the last turn at token {change.token}: {change.text!r}"
    return (f"{text}; no KV of the session from there on could be reused.",)


def ignored(found: RequestWhy) -> Sequence[str]:
    """Say what the client sent that was accepted without effect."""
    return (f"Accepted, but not acted upon: {listed(found.not_acted_upon)}.",) if found.not_acted_upon else ()


def first_token(found: RequestWhy) -> str:
    """Say where the time to the first token went."""
    stages = found.stages
    if stages.ttft_ms <= 0.0:
        queued = f", {ms(stages.router_queue_ms)} of it in the router's queue" if stages.router_queue_ms else ""
        return f"No token came: the request ended with {found.placed.status} after {ms(stages.total_ms)}{queued}."
    worker, source = _computing(found)
    parts = {
        "in the router's queue": stages.router_queue_ms,
        "to choose and reach workers": stages.route_ms,
        f"to fetch blocks from {source}": stages.prefill_fetch_ms,
        f"waiting on {worker}": stages.prefill_queue_ms,
        f"to compute {_computed_tokens(found)} on {worker}": stages.prefill_ms,
        "in transit": stages.return_ms,
    }
    largest = sorted(parts.items(), key=lambda part: -part[1])[:NAMED]
    named = [part for part in largest if part[1] >= NAMED_SHARE * stages.ttft_ms]
    texts = [f"{ms(value)} ({percent(value / stages.ttft_ms)}) {words}" for words, value in named]
    rest_ms = max(0.0, stages.ttft_ms - sum(value for _, value in named))
    if rest_ms >= NAMED_SHARE * stages.ttft_ms:
        texts.append(f"{ms(rest_ms)} for the rest")
    return f"The first token came after {ms(stages.ttft_ms)}: {listed(texts)}."


def stalls(found: RequestWhy) -> str:
    """Say which gaps were stalls and what caused them."""
    placed, shown = found.placed, found.stalls
    if not found.longest_gap_ms:
        return "The answer was too short to have gaps between later tokens."
    usual = f"{ms(placed.tbt_p50_ms)} at the median, {ms(found.longest_gap_ms)} at most"
    if not shown:
        return f"No gap between its tokens was a stall: {usual}."
    total_ms = sum(stall.gap_ms for stall in shown)
    of = f"the longest {len(shown)} of {found.stall_count} stalls" if found.stall_count > len(shown) else None
    head = of or count(found.stall_count, "stall")
    blamed: defaultdict[str, float] = defaultdict(float)
    for stall in shown:
        for part in stall.causes:
            blamed[cause(part, placed.request_id)] += part.ms
    text = f"{head[0].upper()}{head[1:]} between its tokens took {ms(total_ms)} ({usual})"
    if not blamed:
        return f"{text}, of unknown cause."
    words, largest_ms = max(blamed.items(), key=lambda item: item[1])
    return f"{text}, {ms(largest_ms)} of it because of {words}."


def drafts(found: RequestDrafts) -> str:
    """Say what speculative decoding gained."""
    time = f"about {ms(abs(found.saved_ms))} {'sooner' if found.saved_ms >= 0.0 else 'later'} than without drafts"
    if not found.drafted_tokens:
        return f"Tokens were drafted for other answers only: its own came {time}."
    were = "was" if found.accepted_tokens == 1 else "were"
    drafted = count(found.drafted_tokens, "drafted token")
    return f"Of {drafted} {found.accepted_tokens or 'none'} {were} accepted: its answer came {time}."


def cached(found: RequestWhy) -> str:
    """Say what the placement knew of the cache, and why blocks were missed."""
    cache = found.cache
    if cache is None:
        return "Another router placed its prompt: what was cached is not known here."
    if not cache.runs:
        return f"Its prompt has no reusable block of {cache.block_tokens} tokens: none could be cached."
    blocks = Counter[str]()
    for run in cache.runs:
        blocks[run.fate] += run.blocks
    if blocks["unused"]:
        return "Its prompt was computed without the cache: all of its log-probabilities were requested."
    total, hits = blocks.total(), blocks["cached"] + blocks["expected"]
    text = f"Of the {count(total, 'block')} of its prompt, {cache.worker_id} had {hits or 'none'} in its cache"
    text += ", as predicted" if cache.expected_blocks == hits else f" ({cache.expected_blocks} were predicted)"
    missed = [_missed(name, number, cache) for name, number in blocks.most_common() if name not in _HITS]
    return f"{text}; {listed(missed)}." if missed else f"{text}."


_HITS = ("cached", "expected")


def _missed(fate_name: str, number: int, cache: CacheAutopsy) -> str:
    """Return the clause on all prompt blocks with the same fate."""
    runs = [run for run in cache.runs if run.fate == fate_name]
    together = replace(
        runs[0],
        worker_id=next((run.worker_id for run in runs if run.worker_id), ""),
        least_age_s=min(run.least_age_s for run in runs),
        most_age_s=max(run.most_age_s for run in runs),
    )
    return f"{number} {'was' if number == 1 else 'were'} {fate(together, cache)}"


def listed(parts: Sequence[str]) -> str:
    """Join parts as `a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def _computing(found: RequestWhy) -> tuple[str, str]:
    """Return the name of the worker that computed the prompt, and of the one from which blocks were fetched."""
    cache = found.cache
    if cache is None:
        return "its worker", "another worker"
    fetched = next((run.worker_id for run in cache.runs if run.fate == "fetched"), "another worker")
    return cache.worker_id, fetched


def _computed_tokens(found: RequestWhy) -> str:
    """Format the number of prompt tokens that were computed."""
    tokens, cache = found.placed.prompt_tokens, found.cache
    if cache is None:
        return "its prompt"
    known = sum(run.blocks for run in cache.runs if run.fate in ("cached", "fetched", "loaded")) * cache.block_tokens
    return f"{tokens - known:,} of {count(tokens, 'prompt token')}" if known else count(tokens, "prompt token")
