"""Words for causes of stalls and for the fates of cached blocks."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType

from baton.cli.layout import ms, seconds, wrapped
from baton.client import BlockRun, CacheAutopsy, RequestStall, StallCausePart
from baton.text.causes import StallCause

CAUSES: Mapping[str, str] = MappingProxyType(
    {
        StallCause.PROMPTS: "computing prompt tokens",
        StallCause.BATCH: "a larger batch",
        StallCause.CONTEXTS: "longer contexts",
        StallCause.DRAFTS: "computing drafted tokens",
        StallCause.COPIES: "copies of KV blocks",
        StallCause.PREEMPTION: "preemption",
        StallCause.MASK: "a late grammar mask",
        StallCause.COLLECTION: "garbage collection",
        StallCause.LOCK: "another thread in the interpreter",
        StallCause.CPU_WAIT: "waiting for a processor core",
        StallCause.STOPPED: "a stopped process",
        StallCause.SLOWER: "slower computation",
        StallCause.IDLE: "an idle engine",
        StallCause.LENT: "cores lent to a prefill worker",
        StallCause.WORKER_LOOP: "the worker's busy event loop",
        StallCause.ROUTER_LOOP: "the router's busy event loop",
        StallCause.NETWORK: "the network",
        StallCause.RECOVERY: "recovery from a lost worker",
        StallCause.UNKNOWN: "an unknown cause",
    }
)


SHOWN_SHARE = 0.02
"""A cause is shown if it is at least this fraction of a stall, an overlap if it is of a sum; --json has all."""


def stall_lines(stalls: Sequence[RequestStall], own_id: str, width: int) -> Iterator[str]:
    """Yield each stall with its causes and the requests to blame."""
    for stall in stalls:
        parts = [part for part in stall.causes if part.ms >= SHOWN_SHARE * stall.gap_ms]
        causes = "".join(f"{cause(part, own_id)}, {ms(part.ms)}{_in_brackets(part.detail)}; " for part in parts)
        head = f"  {ms(stall.gap_ms):>8} until {seconds(stall.at_ms / 1e3)} after the arrival: "
        yield from wrapped([f"{head}{causes}usual {ms(stall.usual_ms)}"], width, "    ", break_ids=True)


def _in_brackets(detail: str) -> str:
    return f" ({detail})" if detail else ""


def cause(part: StallCausePart, own_id: str) -> str:
    """Format a cause and the request to blame, if any."""
    words = CAUSES.get(part.cause, part.cause.replace("_", " "))
    if not part.culprit:
        return words
    return f"{words} for this request itself" if part.culprit == own_id else f"{words} for request {part.culprit}"


def age(least_s: float, most_s: float) -> str:
    """Format an age between two bounds; as one number if they are equal when rounded."""
    least, most = seconds(least_s), seconds(most_s)
    return least if least == most else f"{least.removesuffix(' s')}–{most}"


def fate(run: BlockRun, cache: CacheAutopsy) -> str:
    """Describe the fate of consecutive blocks in words that complete the sentence `16 blocks were ...`."""
    match run.fate:
        case "cached":
            return "cached"
        case "expected":
            return "cached, as far as known; the prompt was not computed"
        case "fetched":
            return f"fetched from {run.worker_id or 'another worker'}"
        case "loaded":
            return "loaded from files"
        case "gone":
            return "evicted before the prompt's turn, though expected at the placement"
        case "evicted":
            there = f" ({run.worker_id} had them, not fetched)" if run.worker_id else ""
            return f"evicted {age(run.least_age_s, run.most_age_s)} before{there}"
        case "elsewhere":
            return f"on {run.worker_id}, not fetched"
        case "other_salt":
            return f"on {run.worker_id} under another cache salt or none"
        case "never":
            return f"not cached in the {seconds(cache.known_s)} that are known"
        case "unknown":
            return f"unknown, as {cache.worker_id} does not report its cache"
        case "unused":
            return "computed: all log-probabilities of the prompt were requested"
        case other:
            return other
