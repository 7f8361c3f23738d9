"""Simulated policies side by side: a table for a terminal, and pictures. Pure."""

from collections.abc import Sequence

from cli.bench.picture import BarChart, Bars, draw_bars
from cli.bench.route_figures import RouteFigures
from cli.bench.scale import Axis

HEAD = (
    f"{'policy':>15}  {'hit rate':>8}  {'of pooled':>9}  {'imbalance, 1 minute':>19}"
    f"  {'TTFT ms':>27}  {'decision us':>13}"
)
UNITS = (
    f"{'':>15}  {'':>8}  {'LRU':>9}  {'p50':>9} {'p95':>9}  {'mean':>8} {'p50':>8} {'p99':>9}  {'p50':>6} {'p99':>6}"
)


def as_table(figures: Sequence[RouteFigures]) -> str:
    first = figures[0]
    lines = [
        f"{first.requests:,} prompts, {first.workers} workers; one LRU cache of the same size together hits "
        f"{first.pooled_lru_bound:.2%} of blocks, one without end {first.infinite_bound:.2%}",
        HEAD,
        UNITS,
    ]
    for each in figures:
        share = f"{each.of_pooled_lru:.4f}" if each.of_pooled_lru is not None else "-"
        lines.append(
            f"{each.policy:>15}  {each.hit_rate:>8.4f}  {share:>9}  {each.imbalance_1min_p50:>9.2f} "
            f"{each.imbalance_1min_p95:>9.2f}  {each.ttft_mean_ms:>8,.0f} {each.ttft_p50_ms:>8,.0f} "
            f"{each.ttft_p99_ms:>9,.0f}  {each.decision_us_p50:>6.0f} {each.decision_us_p99:>6.0f}"
        )
    return "\n".join(lines)


def pictures(figures: Sequence[RouteFigures], trace: str) -> dict[str, str]:
    """SVG by name: hits beside possible ones, balance, and time to first token."""
    names = tuple(each.policy.replace("_", " ") for each in figures)

    def bars(title: str, axis: Axis, values: Sequence[float], mark: float | None = None) -> str:
        return draw_bars(BarChart(f"{title}: {trace}", axis, names, (Bars("", tuple(values)),), mark))

    hits = [100 * each.hit_rate for each in figures]
    return {
        "route-hits": bars("Blocks found in the cache", Axis("percent"), hits, 100 * figures[0].pooled_lru_bound),
        "route-imbalance": bars(
            "Busiest worker over the mean, by minute, p95", Axis("ratio"), [e.imbalance_1min_p95 for e in figures], 1.0
        ),
        "route-ttft": bars("Mean time to first token", Axis("ms", is_log=True), [e.ttft_mean_ms for e in figures]),
    }
