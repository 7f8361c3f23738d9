"""Commands for developers of Baton: `baton test`, `simulate` and `chaos`."""

from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from baton.cli.options import flags_of

if TYPE_CHECKING:
    from baton.lab.simulation.campaign import FoundViolation


def test(
    context: typer.Context,
    no_skips: Annotated[
        bool, typer.Option("--no-skips", help="Fail if a test is skipped, except for lack of a GPU or AVX-512.")
    ] = False,
) -> None:
    """Check style and types and run the tests. With arguments, only pytest runs, and gets them."""
    from baton.lab.checks import run_checks

    raise typer.Exit(run_checks(context.args, no_skips))


PLANTS = (
    "all-taken",
    "announced-once",
    "best-by-sum",
    "doubled-adoption",
    "dropped-pin",
    "early-confirm",
    "granted-twice",
    "kept-draft",
    "kept-unconfirmed",
    "off-by-one-offset",
    "passed-over",
    "published-draft",
    "reused-transfer-id",
    "stale-copy",
    "unseen-change",
    "unseen-damage",
    "unseen-flip",
    "wrong-place",
)


def simulate(
    seeds: Annotated[int, typer.Option(min=1, help="Number of simulated worlds.")] = 200,
    first: Annotated[int, typer.Option("--from", min=0, help="The first seed.")] = 0,
    requests: Annotated[int, typer.Option(min=1, max=1000, help="Requests in each world.")] = 6,
    faults: Annotated[
        int | None, typer.Option(min=0, help="Faults in each world; default: drawn from its seed.")
    ] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="Simulate this seed only.")] = None,
    trace: Annotated[bool, typer.Option("--trace", help="Print every event, in order.")] = False,
    plant: Annotated[str | None, typer.Option(help=f"Plant a bug, which must be found: {', '.join(PLANTS)}.")] = None,
    go_on: Annotated[bool, typer.Option("--go-on", help="Continue after a violation.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Number of parallel processes.")] = 2,
) -> None:
    """Simulate routers, workers and clients in virtual time, with faults, and check their invariants.

    Every event is also checked against the specification of the hand-over (`lab/protocol`). A seed decides everything:
    when messages arrive, which process runs next, what breaks. Exits with 1 if an invariant was violated or an event
    refused, and names the seed that reproduces it.
    """
    from baton.lab.simulation.campaign import Clock, SeedCampaign, Tally, run

    if plant is not None and plant not in PLANTS:
        raise typer.BadParameter(f"{plant!r} is none of {', '.join(PLANTS)}", param_hint="--plant")
    if seed is not None:
        first, seeds, jobs = seed, 1, 1
    campaign = SeedCampaign(first, seeds, jobs, requests, faults, plant, trace, go_on)
    clock, tally, said_s, violations = Clock(), Tally(), 0.0, 0
    with closing(run(campaign)) as results:
        for each in results:
            match each:
                case str():
                    print(each)
                case Tally():
                    tally.merge(each)
                case found:
                    _print_found(found, requests, faults, plant)
                    violations += 1
                    print(f"found after {clock.elapsed_s:.1f} s and {tally.seeds + violations} seeds")
                    if not go_on:
                        raise typer.Exit(1)
            if clock.elapsed_s - said_s > 5.0:
                said_s = clock.elapsed_s
                print(f"{tally.seeds:,} seeds, {tally.requests:,} requests, {60 * tally.seeds / said_s:,.0f} seeds/min")
    print("\n".join(tally.lines()))
    print(f"{violations or 'no'} seeds violated an invariant; {clock.elapsed_s:.1f} s")
    raise typer.Exit(int(violations > 0))


def _print_found(found: "FoundViolation", requests: int, faults: int | None, plant: str | None) -> None:
    print("\n".join(found.last))
    print(f"\nseed {found.seed}: {found.violation}")
    print("faults: " + ("; ".join(found.faults) or "none"))
    more = f" --faults {faults}" if faults is not None else ""
    more += f" --plant {plant}" if plant is not None else ""
    print(f"again: ./baton simulate --seed {found.seed} --requests {requests}{more} --trace")


@dataclass(frozen=True, kw_only=True)
class ChaosFlags:
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes of load and faults.")] = 5.0
    seed: Annotated[int, typer.Option(help="Seed of faults and requests.")] = 0
    streams: Annotated[int, typer.Option(min=1, max=256, help="Clients, each with one stream at a time.")] = 12
    faults: Annotated[
        int | None, typer.Option(min=1, help="Number of proven faults to reach, then stop; default: as time allows.")
    ] = None
    speculate: Annotated[
        Literal["off", "ngram"], typer.Option(help="Speculative decoding in the workers, as with `baton up`.")
    ] = "off"
    tier: Annotated[bool, typer.Option(help="Keep KV in files below small pools, and inject disk and file faults.")] = (
        True
    )
    routers: Annotated[
        int | None,
        typer.Option(
            min=2, max=4, help="Number of routers on one port; default: 2 with a port each. Not with --hosts."
        ),
    ] = None
    hosts: Annotated[
        int | None,
        typer.Option(
            min=3,
            max=5,
            help="Number of hosts (network namespaces; needs root) that run the processes; links and hosts fail too. "
            "Without KV files and clock jumps.",
        ),
    ] = None
    out: Annotated[
        Path | None,
        typer.Option(help="Folder for report, charts and logs; default: a new one, kept if the run fails."),
    ] = None


chaos_app = typer.Typer(invoke_without_command=True)
FAULTS_PER_MINUTE = 60  # planned faults: more than fit, since processes take seconds to restart


@chaos_app.callback()
@flags_of
def chaos(context: typer.Context, flags: ChaosFlags) -> None:
    """Inject faults into the processes of a real stack under load, and check every token that clients received.

    2 routers, 2 prefill and 2 decode workers and Redis serve a tiny random model; transformers computes every answer
    beforehand. Exit code 0 if nothing was lost, repeated or wrong and every kind of fault was proven.
    """
    if context.invoked_subcommand is not None:
        return
    from baton.lab.chaos.disk.injections import FILE_KINDS, SHIM_KINDS
    from baton.lab.chaos.faults import FaultKind, plan_faults
    from baton.lab.chaos.report import run_chaos
    from baton.lab.chaos.run import ChaosOptions
    from baton.lab.chaos.stack import Layout, find_compiler

    if flags.routers is not None and flags.hosts is not None:
        raise typer.BadParameter("cannot be combined with --hosts", param_hint="--routers")
    layout = Layout.with_routers(flags.routers)
    without = frozenset[FaultKind]() if find_compiler() else frozenset({FaultKind.CLOCK}) | SHIM_KINDS
    without |= frozenset[FaultKind]() if flags.tier else FILE_KINDS | SHIM_KINDS
    most_faults = int(flags.minutes * FAULTS_PER_MINUTE) + 1
    asked = ChaosOptions(
        flags.minutes,
        flags.seed,
        flags.streams,
        tuple(plan_faults(flags.seed, most_faults, flags.hosts, without, layout.routers)),
        wanted=flags.faults,
        layout=layout,
        speculate=flags.speculate,
        tier=flags.tier and flags.hosts is None,
        hosts=flags.hosts,
    )
    raise typer.Exit(0 if run_chaos(asked, flags.out) else 1)


@chaos_app.command()
def cancels(
    singles: Annotated[int, typer.Option(min=1, help="Streams cancelled one by one, each at a random time.")] = 700,
    bursts: Annotated[int, typer.Option(min=0, help="Number of bursts, each cancelled together.")] = 10,
    burst: Annotated[int, typer.Option(min=2, max=512, help="Streams per burst.")] = 30,
    prefill: Annotated[int, typer.Option(min=1, max=8, help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=8, help="Number of decode workers.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of prompts and cancel times.")] = 0,
) -> None:
    """Cancel streams in any phase; measure how long blocks stay in use, and check later answers."""
    import asyncio

    from baton.lab.chaos.load import run_cancels
    from baton.lab.chaos.stack import Layout
    from baton.lab.report.statistics import percentile

    layout = Layout(routers=1, prefill=prefill, decode=decode)
    found = asyncio.run(run_cancels(singles, bursts, burst, seed, layout, lambda line: print(line, flush=True)))
    print(f"{found.count} streams cancelled, {found.before_first_token} of them before their first token")
    for name, sides in (("one by one", found.single_s), (f"bursts of {found.burst}", found.burst_s)):
        for role, seconds in sides.items():
            if seconds:
                p50, p99, longest = (1e3 * percentile(seconds, share) for share in (50, 99, 100))
                print(f"{name}, {role}: blocks free after {p50:.0f} ms (p50), {p99:.0f} (p99), {longest:.0f} (longest)")
    for role, step_s in found.longest_step_s.items():
        print(
            f"{role}: longest step {1e3 * step_s:.0f} ms; bound until blocks are free {1e3 * found.bound_s(role):.0f}"
        )
    print(f"{found.nothing_held} cancels after which no worker held a block")
    print(f"{found.exact} checked answers exact, {found.inexact} wrong")
    raise typer.Exit(0 if found.is_good else 1)
