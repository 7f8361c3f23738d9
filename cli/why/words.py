"""Words for causes of stalls and for the fates of cached blocks."""

from collections.abc import Mapping
from types import MappingProxyType

from baton.cli.layout import ms, seconds
from baton.client import BlockRun, CacheAutopsy, StallCausePart
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
        StallCause.WORKER_LOOP: "the worker's busy event loop",
        StallCause.ROUTER_LOOP: "the router's busy event loop",
        StallCause.NETWORK: "the network",
        StallCause.RECOVERY: "recovery from a lost worker",
        StallCause.UNKNOWN: "an unknown cause",
    }
)


def cause(part: StallCausePart, own_id: str) -> str:
    """Format a cause, the request to blame, and its time."""
    words = CAUSES.get(part.cause, part.cause.replace("_", " "))
    return f"{words}{culprit(part.culprit, own_id)}, {ms(part.ms)}"


def culprit(request_id: str, own_id: str) -> str:
    """Format the request to blame; empty where there is none."""
    if not request_id:
        return ""
    return " for this request itself" if request_id == own_id else f" for request {request_id}"


def age(least_s: float, most_s: float) -> str:
    """Format an age, as a range if its ends differ when rounded."""
    least, most = seconds(least_s), seconds(most_s)
    return least if least == most else f"{least.removesuffix(' s')}–{most}"


def fate(run: BlockRun, cache: CacheAutopsy) -> str:
    """Format the fate of a run of blocks."""
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
            return "expected at the placement, evicted before the prompt's turn"
        case "evicted":
            there = f"; {run.worker_id} had them, not fetched" if run.worker_id else ""
            return f"evicted {age(run.least_age_s, run.most_age_s)} before{there}"
        case "elsewhere":
            return f"on {run.worker_id}, not fetched"
        case "other_salt":
            return f"on {run.worker_id} under another cache salt or none"
        case "never":
            return f"not cached in the {seconds(cache.known_s)} that are known"
        case "unknown":
            return f"unknown: {cache.worker_id} does not report its cache"
        case "unused":
            return "computed: all log-probabilities of the prompt were requested"
        case other:
            return other
