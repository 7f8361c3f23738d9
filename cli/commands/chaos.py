"""`baton chaos`: its flags."""

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(invoke_without_command=True)
FAULTS_PER_MINUTE = 60  # more than fit: processes take seconds to come back


@app.callback()
def chaos(
    context: typer.Context,
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes of load and faults.")] = 5.0,
    seed: Annotated[int, typer.Option(help="Seed of faults and requests.")] = 0,
    streams: Annotated[int, typer.Option(min=1, max=256, help="Clients, each with one stream at a time.")] = 12,
    faults: Annotated[
        int | None, typer.Option(min=1, help="Faults after which it ends, and which it needs; default: as time allows.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for report.md, report.json, pictures and logs.")] = None,
) -> None:
    """Kill, stop, cut off and confuse the processes of a real stack under load, and check every token that clients saw.

    2 routers, 2 prefill and 2 decode workers and Redis on a tiny model of random weights; every answer is known from
    transformers beforehand. Exit code 0 where nothing was lost, repeated or wrong and every fault really happened.
    """
    if context.invoked_subcommand is not None:
        return
    import asyncio

    from baton.chaos.faults import FaultKind, plan_faults
    from baton.chaos.report import markdown, summary, write
    from baton.chaos.run import Options, Run
    from baton.chaos.stack import find_compiler

    count = int(minutes * FAULTS_PER_MINUTE) + 1
    without = frozenset[FaultKind]() if find_compiler() else frozenset({FaultKind.CLOCK})
    asked = Options(minutes, seed, streams, tuple(plan_faults(seed, count, without=without)), wanted=faults)
    if out is not None:
        (out / "logs").mkdir(parents=True, exist_ok=True)
    outcome = asyncio.run(Run(asked, lambda line: print(line, flush=True)).run(out / "logs" if out else None))
    if out is not None:
        write(outcome, out)
    print(markdown(summary(outcome)))
    raise typer.Exit(0 if outcome.is_good else 1)


@app.command()
def cancels(
    singles: Annotated[int, typer.Option(min=1, help="Streams cancelled one by one, each at a random moment.")] = 700,
    bursts: Annotated[int, typer.Option(min=0, help="How often many are cancelled at once.")] = 10,
    burst: Annotated[int, typer.Option(min=2, max=512, help="Streams of each such burst.")] = 30,
    prefill: Annotated[int, typer.Option(min=1, max=8, help="Prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=8, help="Decode workers.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the moments.")] = 0,
) -> None:
    """Cancel streams in any phase: how long blocks stay in use, and whether later answers are exact."""
    import asyncio

    from baton.benchmarks.report.statistics import percentile
    from baton.chaos.load import run_cancels
    from baton.chaos.stack import Layout

    layout = Layout(routers=1, prefill=prefill, decode=decode)
    found = asyncio.run(run_cancels(singles, bursts, burst, seed, layout, lambda line: print(line, flush=True)))
    print(f"{found.count} streams given up, {found.before_first_token} of them before their first token")
    for name, sides in (("one by one", found.single_s), (f"bursts of {found.burst}", found.burst_s)):
        for role, seconds in sides.items():
            if seconds:
                p50, p99, longest = (1e3 * percentile(seconds, share) for share in (50, 99, 100))
                print(f"{name}, {role}: pages free after {p50:.0f} ms (p50), {p99:.0f} (p99), {longest:.0f} (longest)")
    for role, step_s in found.longest_step_s.items():
        print(f"{role}: longest step {1e3 * step_s:.0f} ms, so that {1e3 * found.bound_s(role):.0f} ms are allowed")
    print(f"{found.nothing_held} times no worker held a page after the cancel")
    print(f"{found.exact} requests in between exact, {found.inexact} not")
    raise typer.Exit(0 if found.is_good else 1)
