"""`baton simulate`: its flags, and what it prints."""

from contextlib import closing
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from baton.simulation.campaign import Found

PLANTS = (
    "announced-once",
    "best-by-sum",
    "dropped-pin",
    "kept-unconfirmed",
    "off-by-one-offset",
    "reused-transfer-id",
    "unseen-flip",
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
    jobs: Annotated[int, typer.Option(min=1, help="Processes at once.")] = 2,
) -> None:
    """Runs routers, workers and clients in virtual time, with faults, and holds them to their promises.

    A seed decides everything: when messages arrive, who goes first, what breaks. Exits with 1 where a promise was
    broken, and names the seed that does it again.
    """
    from baton.simulation.campaign import Campaign, Clock, Tally, run

    if plant is not None and plant not in PLANTS:
        raise typer.BadParameter(f"there are {', '.join(PLANTS)}", param_hint="--plant")
    if seed is not None:
        first, seeds, jobs = seed, 1, 1
    campaign = Campaign(first, seeds, jobs, requests, faults, plant, trace, go_on)
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


def _print_found(found: "Found", requests: int, faults: int | None, plant: str | None) -> None:
    print("\n".join(found.last))
    print(f"\nseed {found.seed}: {found.violation}")
    print("faults: " + ("; ".join(found.faults) or "none"))
    more = f" --faults {faults}" if faults is not None else ""
    more += f" --plant {plant}" if plant is not None else ""
    print(f"again: ./baton simulate --seed {found.seed} --requests {requests}{more} --trace")
