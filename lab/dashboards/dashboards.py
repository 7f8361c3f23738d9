"""The five dashboards: what each shows, as queries over declared metrics."""

from collections.abc import Mapping
from typing import TypeVar

from baton.lab.dashboards.grafana import Dashboard, Panel, PanelKind, Unit
from baton.lab.dashboards.promql import WINDOW, Query, growth, mean, quantile, rate, selector, share, value
from baton.router.http import metric_families as m
from baton.router.http.metric_families import CounterFamily, GaugeFamily, HistogramFamily, MetricFamily

NOT_SHOWN: Mapping[str, str] = {
    "vllm:gpu_cache_usage_perc": "the same as vllm:kv_cache_usage_perc, for dashboards made for an older vLLM",
}
"""Metrics that are on no panel, with the reason."""
NEEDS_A_FAILURE = frozenset({"Gap where an answer went on elsewhere"})
"""Titles of panels that are empty until an answer continues on another worker after a failure."""


def histogram(name: str) -> HistogramFamily:
    """Return the declared histogram of this name. Raises: KeyError, TypeError for a metric of another kind."""
    return _of_kind(name, HistogramFamily)


def counter(name: str) -> CounterFamily:
    """Return the declared counter of this name. Raises: KeyError, TypeError for a metric of another kind."""
    return _of_kind(name, CounterFamily)


def gauge(name: str) -> GaugeFamily:
    """Return the declared gauge of this name. Raises: KeyError, TypeError for a metric of another kind."""
    return _of_kind(name, GaugeFamily)


_Family = TypeVar("_Family", bound=MetricFamily)


def _of_kind(name: str, kind: type[_Family]) -> _Family:
    family = m.FAMILIES[name]
    if not isinstance(family, kind):
        raise TypeError(f"{name} is no {kind.__name__}")
    return family


def _number(title: str, shows: str, unit: Unit, *queries: Query) -> Panel:
    return Panel(title, shows, queries, unit, PanelKind.NUMBER)


def _lines(title: str, shows: str, unit: Unit, *queries: Query) -> Panel:
    return Panel(title, shows, queries, unit)


def _quantiles(title: str, shows: str, name: str, unit: Unit = Unit.SECONDS) -> Panel:
    family = histogram(name)
    queries = tuple(Query(quantile(part, family), f"p{part * 100:g}") for part in (0.5, 0.9, 0.99))
    return Panel(title, shows, queries, unit, links_traces=unit is Unit.SECONDS)


TTFT = _quantiles(
    "Time to first token", "From arrival to the first token. A dot is a request: it opens its trace.",
    "vllm:time_to_first_token_seconds",
)  # fmt: skip
TOKEN_GAPS = _quantiles(
    "Time between tokens", "Between two tokens of one answer. A long one is a stall; its dot opens the trace.",
    "vllm:inter_token_latency_seconds",
)  # fmt: skip
PREFIX_HITS = _lines(
    "Prompt tokens found in a cache", "Of the tokens that each worker looked up, the share that it had.", Unit.SHARE,
    Query(
        share(
            rate(counter("vllm:prefix_cache_hits"), ("engine",)),
            rate(counter("vllm:prefix_cache_queries"), ("engine",)),
        ),
        "{{engine}}",
    ),
)  # fmt: skip
_STAGES = {
    "queue": "vllm:request_queue_time_seconds",
    "prefill": "vllm:request_prefill_time_seconds",
    "KV transfer, as waited for": "baton:kv_transfer_exposed_seconds",
    "decode": "vllm:request_decode_time_seconds",
}

OVERVIEW = Dashboard(
    "overview",
    "overview",
    "Whether the service serves, how fast, and what fails.",
    (
        _number("Ready", "No where a router's last readiness probe did not come back.", Unit.YES_NO,
                Query(f"min({m.READY.name})")),
        _number("Alerts", "Alerts of Baton that are firing.", Unit.COUNT,
                Query('count(ALERTS{alertname=~"Baton.*",alertstate="firing"}) or vector(0)')),
        _number("Workers", "With a session, by role.", Unit.COUNT,
                Query(f"max by (role) ({m.WORKERS.name})", "{{role}}")),
        _number("Active requests", "Accepted and not yet ended.", Unit.COUNT, Query(value(m.ACTIVE_REQUESTS))),
        _number("Waiting requests", "In the routers, for room.", Unit.COUNT, Query(value(m.QUEUED_REQUESTS))),
        _number("Requests", "That came, per second.", Unit.PER_SECOND, Query(rate(m.REQUESTS_STARTED))),
        TTFT,
        TOKEN_GAPS,
        _quantiles("Time of a request", "From arrival to the end of the last answer.",
                   "vllm:e2e_request_latency_seconds"),
        _lines("Requests by their end", "Every request is answered, cancelled, refused or failed.", Unit.PER_SECOND,
               Query(rate(m.REQUESTS_ENDED, ("outcome",)), "{{outcome}}")),
        _lines("Failed and refused requests", "By reason.", Unit.PER_SECOND,
               Query(rate(m.REQUESTS_ENDED, ("outcome", "reason"), {"outcome": "~failed|refused"}),
                     "{{outcome}}: {{reason}}")),
        _lines("Tokens", "Of prompts that were given to workers, and of answers as they go out.", Unit.PER_SECOND,
               Query(rate(m.PROMPT_TOKENS), "prompts"), Query(rate(m.GENERATED_TOKENS), "answers")),
        Panel("Where the time goes", "The mean time of a request in each stage.",
              tuple(Query(mean(histogram(name)), stage) for stage, name in _STAGES.items()), Unit.SECONDS),
        _lines("Stalls", "Gaps between tokens that stood out, by their longest cause.", Unit.PER_SECOND,
               Query(rate(m.STALLS, ("cause",)), "{{cause}}")),
        _lines("Time lost in stalls", "Seconds of all answers per second, by cause.", Unit.COUNT,
               Query(rate(m.STALL_SECONDS, ("cause",)), "{{cause}}")),
        _quantiles("Mean time per token of a request", "After the first token.",
                   "vllm:request_time_per_output_token_seconds"),
        _lines("How choices end", "stop, length, abort and others.", Unit.PER_SECOND,
               Query(rate(m.CHOICES_ENDED, ("finished_reason",)), "{{finished_reason}}")),
        _quantiles("Prompts", "Tokens of a prompt.", "vllm:request_prompt_tokens", Unit.COUNT),
        _quantiles("Answers", "Tokens of the answers to a request.", "vllm:request_generation_tokens", Unit.COUNT),
        _lines("Asked for", "Choices of a request, and the most tokens of a choice.", Unit.COUNT,
               Query(mean(histogram("vllm:request_params_n")), "choices, mean"),
               Query(quantile(0.9, histogram("vllm:request_params_max_tokens")), "max_tokens, p90")),
    ),
)  # fmt: skip

WORKERS = Dashboard(
    "workers",
    "workers",
    "What each worker does, holds and waits for.",
    (
        _lines("Sequences in the batch", "By worker.", Unit.COUNT,
               Query(value(gauge("vllm:num_requests_running"), ("engine",)), "{{engine}}")),
        _lines("Requests that wait in a worker", "By worker.", Unit.COUNT,
               Query(value(gauge("vllm:num_requests_waiting"), ("engine",)), "{{engine}}")),
        _lines("Prompt tokens to be computed", "By worker.", Unit.COUNT,
               Query(value(gauge("baton:pending_tokens"), ("engine",)), "{{engine}}")),
        _lines("Steps of the engine", "By worker. None while requests wait means that the engine hangs.",
               Unit.PER_SECOND, Query(rate(counter("baton:steps"), ("engine",)), "{{engine}}")),
        _lines("KV blocks held", "Share of each pool.", Unit.SHARE,
               Query(value(gauge("vllm:kv_cache_usage_perc"), ("engine",)), "{{engine}}")),
        _lines("Preemptions", "Answers that had to wait for KV blocks.", Unit.PER_SECOND,
               Query(rate(counter("vllm:num_preemptions"), ("engine",)), "{{engine}}")),
        _lines("Drafted tokens", "Computed beside the newest token of an answer; of those the ones that were drawn.",
               Unit.PER_SECOND,
               Query(rate(counter("vllm:spec_decode_num_draft_tokens"), ("engine",)), "drafted: {{engine}}"),
               Query(rate(counter("vllm:spec_decode_num_accepted_tokens"), ("engine",)), "drawn: {{engine}}")),
        _lines("Drawn tokens by place", "Of drafts, by their place in the draft, from 0, beside the number of drafts.",
               Unit.PER_SECOND,
               Query(rate(counter("vllm:spec_decode_num_drafts"), ("engine",)), "drafts: {{engine}}"),
               Query(rate(counter("vllm:spec_decode_num_accepted_tokens_per_pos"), ("engine", "position")),
                     "{{engine}}, place {{position}}")),
        _lines("Time that drafts save", "Seconds by which answers come sooner, of each second, added up over answers. "
               "Below 0 drafts cost more than they save.", Unit.COUNT,
               Query(f"{rate(counter('baton:spec_decode_gained_seconds'), ('engine',))} - "
                     f"{rate(counter('baton:spec_decode_lost_seconds'), ('engine',))}", "{{engine}}")),
        PREFIX_HITS,
        _lines("Workers with a session", "By role.", Unit.COUNT,
               Query(f"max by (role) ({m.WORKERS.name})", "{{role}}")),
        _lines("Processes by release", "Routers count once. Two releases are there while a cluster is rolled.",
               Unit.COUNT,
               Query(f"count by (version) (max by (engine, version) ({m.BUILD_INFO.name}))", "{{version}}")),
        _lines("Refused workers", "Their processes answer and get no requests: another protocol, other weights or "
               "another layout of KV. `baton status` names what differs.", Unit.COUNT,
               Query(f"max({m.REFUSED_WORKERS.name})", "refused")),
        _lines("Workers that there should be", "By role, for the SLOs (docs/sizing.md): an autoscaler may follow it.",
               Unit.COUNT, Query(f"max by (role) ({m.DESIRED_REPLICAS.name})", "{{role}}")),
        _lines("Departures", "How sessions with workers ended, within the interval. Deaths are found gone without "
               "a drain.", Unit.COUNT,
               *(Query(growth(family, ("engine",)), f"{name.replace('_', ' ')}: {{{{engine}}}}")
                 for name, family in m.DEPARTURES.items())),
        _number("Blocks of a pool", "By worker; the tokens of a block are in the name.", Unit.COUNT,
                Query(f"sum by (engine, block_size) ({value(m.KV_BLOCKS, ('engine',))} * on (engine) "
                      f"group_left (block_size) max by (engine, block_size) ({m.CACHE_CONFIG.name}))",
                      "{{engine}}, of {{block_size}}")),
    ),
)  # fmt: skip

TRANSFER = Dashboard(
    "transfer",
    "KV and transfer",
    "Where KV is, how it moves from prefill to decode, and whether it arrives whole.",
    (
        _quantiles("KV transfer that a client waits for", "The part that no computing hides.",
                   "baton:kv_transfer_exposed_seconds"),
        _lines("KV pulled by decode workers", "", Unit.BYTES_PER_SECOND,
               Query(rate(counter("baton:kv_transfer_bytes")), "all")),
        _lines("Links", "The rate that was measured when two workers met, by the way that KV takes.",
               Unit.GIGABYTES_PER_SECOND,
               Query(value(m.LINKS, ("engine", "to", "transport")), "{{engine}} from {{to}}: {{transport}}")),
        _lines("KV blocks by state", "Of all workers. Cached ones are free for others when they are needed.",
               Unit.COUNT, Query(value(m.KV_BLOCKS, ("state",)), "{{state}}")),
        _lines("Free and cached blocks", "By worker.", Unit.COUNT,
               Query(value(m.KV_BLOCKS, ("engine",), {"state": "~free|cached"}), "{{engine}}")),
        _lines("Blocks held for transfers", "By worker. They are free again once decode has them.", Unit.COUNT,
               Query(value(m.KV_BLOCKS, ("engine",), {"state": "held_by_transfers"}), "{{engine}}")),
        _lines("Prompt tokens from a cache", "Of all tokens of prompts.", Unit.SHARE,
               Query(share(rate(counter("vllm:prompt_tokens_cached")), rate(m.PROMPT_TOKENS)), "cached")),
        PREFIX_HITS,
        _lines("Blocks checked", "Compared with their source's checksum, and those that differed.", Unit.PER_SECOND,
               Query(rate(counter("baton:kv_blocks_checked"), ("engine",)), "{{engine}}"),
               Query(rate(counter("baton:kv_checksum_mismatches"), ("engine",)), "{{engine}}: differ")),
        _lines("Sessions", "Conversations of clients that each worker knows.", Unit.COUNT,
               Query(value(gauge("baton:kv_sessions"), ("engine",)), "{{engine}}")),
        _lines("Protected blocks", "Cached for sessions that are expected back; half of a pool at most.", Unit.COUNT,
               Query(value(gauge("baton:kv_protected_blocks"), ("engine",)), "{{engine}}")),
        _lines("Evicted blocks", "Of sessions that were done, other ones, and protected ones. Many of "
               "these mean that the pools are too small for the sessions.", Unit.PER_SECOND,
               Query(rate(m.EVICTED_BLOCKS, ("kind",)), "{{kind}}")),
        _lines("Blocks brought for sessions", "Before their next turn: from files, and from workers that left.",
               Unit.PER_SECOND,
               Query(rate(counter("baton:kv_prefetched_blocks"), ("engine",)), "{{engine}}: from files"),
               Query(rate(counter("baton:kv_prefetched_used_blocks"), ("engine",)), "{{engine}}: from files, used"),
               Query(rate(counter("baton:kv_taken_over_blocks"), ("engine",)), "{{engine}}: from workers")),
        _lines("Cached blocks checked", "Compared before prompts used them, and those that had changed.",
               Unit.PER_SECOND,
               Query(rate(counter("baton:kv_at_rest_checked_blocks"), ("engine",)), "{{engine}}"),
               Query(rate(counter("baton:kv_at_rest_corrupt_blocks"), ("engine",)), "{{engine}}: had changed")),
        _lines("Blocks from files", "Of the blocks of prompts that a pool lacked (--kv-tier-dir).", Unit.SHARE,
               Query(share(rate(counter("baton:kv_tier_hits"), ("engine",)),
                           rate(counter("baton:kv_tier_queries"), ("engine",))), "{{engine}}")),
        _lines("Blocks in files", "That each worker can find, in its own files and in others'.", Unit.COUNT,
               Query(value(gauge("baton:kv_tier_blocks"), ("engine",)), "{{engine}}"),
               Query(value(gauge("baton:kv_tier_memory_blocks"), ("engine",)), "{{engine}}: host memory")),
        _lines("Blocks in files that routers know of", "In each worker's own files.", Unit.COUNT,
               Query(value(m.TIER_KNOWN, ("engine",)), "{{engine}}")),
        _lines("Prompt tokens from pools and files", "Of all tokens of prompts: as expected, and as it came.",
               Unit.SHARE,
               Query(share(rate(counter("baton:placed_pool_tokens")), rate(m.PROMPT_TOKENS)), "in the pool, expected"),
               Query(share(rate(counter("baton:placed_file_tokens")), rate(m.PROMPT_TOKENS)), "from files, expected"),
               Query(share(rate(counter("baton:restored_tokens")), rate(m.PROMPT_TOKENS)), "from files")),
        _lines("KV in files", "Size of each worker's files.", Unit.BYTES,
               Query(value(gauge("baton:kv_tier_bytes"), ("engine",)), "{{engine}}"),
               Query(value(gauge("baton:kv_tier_memory_bytes"), ("engine",)), "{{engine}}: host memory")),
        _lines("KV written to files and read", "By worker.", Unit.BYTES_PER_SECOND,
               Query(rate(counter("baton:kv_tier_stored_bytes"), ("engine",)), "{{engine}}: written"),
               Query(rate(counter("baton:kv_tier_loaded_bytes"), ("engine",)), "{{engine}}: read")),
        _lines("Files that fail", "1: not read, or not written, by that worker now.", Unit.COUNT,
               Query(value(gauge("baton:kv_tier_reads"), ("engine",)), "{{engine}}: is read"),
               Query(value(gauge("baton:kv_tier_writes"), ("engine",)), "{{engine}}: is written")),
        _lines("Blocks lost to files", "Damaged ones, which are never used; not written; and evicted for new ones.",
               Unit.PER_SECOND,
               Query(rate(counter("baton:kv_tier_corrupt_blocks"), ("engine",)), "{{engine}}: damaged"),
               Query(rate(counter("baton:kv_tier_dropped_blocks"), ("engine",)), "{{engine}}: not written"),
               Query(rate(counter("baton:kv_tier_evicted_blocks"), ("engine",)), "{{engine}}: evicted")),
    ),
)  # fmt: skip

ROUTER = Dashboard(
    "router",
    "router",
    "The routers themselves: admission, attempts, resumed streams, and their ties to Redis and clients.",
    (
        _lines("Requests", "Per second: came, and ended.", Unit.PER_SECOND,
               Query(rate(m.REQUESTS_STARTED), "came"), Query(rate(m.REQUESTS_ENDED), "ended")),
        _lines("Requests now", "Active ones are accepted and not yet ended; waiting ones wait for room.", Unit.COUNT,
               Query(value(m.ACTIVE_REQUESTS), "active"), Query(value(m.QUEUED_REQUESTS), "waiting")),
        _lines("Prompts as text", "Tokens that the routers made of them, and those that were known from an earlier "
               "prompt.", Unit.PER_SECOND,
               Query(rate(m.TOKENS_READ), "read"), Query(rate(m.TOKENS_KNOWN), "known")),
        _quantiles("Waiting", "In the router and in the prefill worker.", "vllm:request_queue_time_seconds"),
        _quantiles("Prefill", "Computing the prompt.", "vllm:request_prefill_time_seconds"),
        _quantiles("Decode", "From the first token to the last.", "vllm:request_decode_time_seconds"),
        _quantiles("Prefill and decode", "A request without its waiting.", "vllm:request_inference_time_seconds"),
        _lines("Failed attempts", "By reason. Another attempt follows most of them.", Unit.PER_SECOND,
               Query(rate(m.ATTEMPTS_FAILED, ("reason",)), "{{reason}}")),
        _lines("Answers that went on elsewhere", "With another attempt, and at this router after another one was "
               "gone.", Unit.PER_SECOND,
               Query(rate(counter("baton:streams_resumed")), "another attempt"),
               Query(rate(m.CLIENT_RESUMES), "another router")),
        _quantiles("Gap where an answer went on elsewhere", "What its reader saw.", "baton:resume_gap_seconds"),
        _lines("Journal", "Records of streams, by what became of writing them to Redis.", Unit.PER_SECOND,
               Query(rate(m.JOURNAL_RECORDS, ("outcome",)), "{{outcome}}")),
        _lines("Event loop", "Share of the time in which a router was too busy to take things in.", Unit.SHARE,
               Query(f"sum by (instance) (rate({m.LOOP_BUSY.series[0]}[{WINDOW}]))", "{{instance}}")),
        _lines("HTTP connections", "Open now, by router.", Unit.COUNT,
               Query(f"sum by (instance) ({m.HTTP_CONNECTIONS.name})", "{{instance}}")),
        _lines("HTTP connections without room", "Refused or closed at the limit, by reason.", Unit.PER_SECOND,
               Query(rate(m.HTTP_WITHOUT_ROOM, ("reason",)), "{{reason}}")),
        _lines("Ready, and connected to Redis", "1 or 0, by router.", Unit.COUNT,
               Query(f"min by (instance) ({m.READY.name})", "{{instance}}: ready"),
               Query(f"min by (instance) ({m.REGISTRY_CONNECTED.name})", "{{instance}}: Redis")),
    ),
)  # fmt: skip

_KEY_TOKENS = " + ".join(rate(each, ("key",), window="1m") for each in (m.KEY_PROMPT_TOKENS, m.KEY_GENERATED_TOKENS))
_TOKEN_LIMIT = selector(m.KEY_LIMITS.name, m.KEY_LIMITS, {"limit": "tokens_per_minute"})
KEYS = Dashboard(
    "keys",
    "API keys",
    "Who sends the load, and how near each key is to its limits. Empty for a router without keys.",
    (
        _lines("Requests", "By key.", Unit.PER_SECOND, Query(rate(m.KEY_REQUESTS, ("key",)), "{{key}}")),
        _lines("Requests that were not answered", "By key and end.", Unit.PER_SECOND,
               Query(rate(m.KEY_REQUESTS, ("key", "outcome"), {"outcome": "~cancelled|refused|failed"}),
                     "{{key}}: {{outcome}}")),
        _lines("Refused by a limit", "By key and limit.", Unit.PER_SECOND,
               Query(rate(m.KEY_LIMITED, ("key", "limit")), "{{key}}: {{limit}}")),
        _lines("Tokens of prompts", "By key.", Unit.PER_SECOND,
               Query(rate(m.KEY_PROMPT_TOKENS, ("key",)), "{{key}}")),
        _lines("Tokens of answers", "By key.", Unit.PER_SECOND,
               Query(rate(m.KEY_GENERATED_TOKENS, ("key",)), "{{key}}")),
        _lines("Requests now", "By key.", Unit.COUNT, Query(value(m.KEY_ACTIVE, ("key",)), "{{key}}")),
        Panel("Time to first token", "By key, p90.", (Query(quantile(0.9, m.KEY_TTFT, ("key",)), "{{key}}"),),
              Unit.SECONDS, links_traces=True),
        _lines("Share of the tokens of a minute", "That a key has used of its limit; 1 is all.", Unit.SHARE,
               Query(share(f"60 * ({_KEY_TOKENS})", f"max by (key) ({_TOKEN_LIMIT})"), "{{key}}")),
        _lines("Limits", "Of each key, as its file has them.", Unit.COUNT,
               Query(f"max by (key, limit) ({m.KEY_LIMITS.name})", "{{key}}: {{limit}}")),
    ),
)  # fmt: skip

DASHBOARDS = (OVERVIEW, WORKERS, TRANSFER, ROUTER, KEYS)
