"""Roll a cluster from the last release to this tree and back, under load: `python -m baton.lab.chaos.rolling`.

2 routers, 2 prefill and 2 decode workers and Redis serve a tiny random model. Each process in turn gets SIGTERM,
drains, and restarts with the other release's code, while clients read and cancel streams. With --abruptly it gets
SIGKILL, and its streams continue on processes of either release. Every token is compared with transformers. Exit code
0 if no stream failed and no token was lost, repeated or wrong.

With --routers N, N routers share one port, and clients know that address alone. Routers of release 0.1.0 share no port:
--commit must then name a later commit, such as fb114b76.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from baton import IMPORT_PATH
from baton.lab.chaos.checker import FindingKind
from baton.lab.chaos.rolling.checkout import PastRelease, ReleaseMissing, can_share_ports, check_out, last_release
from baton.lab.chaos.rolling.roll import Mixture, NotRolled, Rolled, RollingOptions, RollingOutcome, RollingRun, Side
from baton.lab.chaos.stack import Layout, NotWhole
from baton.lab.report.result import SERVICE, Columns, judge_rounds, make_result, read_arguments, table, write_result
from baton.launch import CommandFailed
from baton.versions import RELEASE


def figures(outcome: RollingOutcome) -> Mapping[str, Any]:
    return {
        "before": outcome.before,
        "after": outcome.after,
        "streams": len(outcome.histories),
        "tokens": outcome.tokens,
        "failed": outcome.of_kind(
            FindingKind.FAILED, FindingKind.HANG, FindingKind.NO_END, FindingKind.WRONG_END, FindingKind.TWO_ENDS
        ),
        "lost": outcome.of_kind(FindingKind.LOST),
        "repeated": outcome.of_kind(FindingKind.REPEATED, FindingKind.REORDERED),
        "wrong": outcome.of_kind(FindingKind.WRONG_TOKEN, FindingKind.WRONG_TEXT, FindingKind.WRONG_LOGPROB),
        "went_on_elsewhere": outcome.went_on_elsewhere,
        "unclean_ends": outcome.unclean,
        "rolled": [
            {
                "process": each.process,
                "to": each.version,
                "seconds": round(each.seconds, 1),
                "open_streams": outcome.open_at(each),
                "longest_pause_s": round(outcome.longest_pause_s(each), 2),
            }
            for each in outcome.rolled
        ],
        "mixtures": [
            {
                "routers": each.routers,
                "prefill": each.prefill,
                "decode": each.decode,
                "streams": len(outcome.streams_in(each)),
                "handed_over": outcome.handed_over_in(each),
            }
            for each in outcome.mixtures
        ],
    }


def show(outcome: RollingOutcome) -> None:
    rolled: Columns[Rolled] = {
        "process": lambda each: each.process,
        "to release": lambda each: each.version,
        "s": lambda each: f"{each.seconds:.1f}",
        "open streams": lambda each: outcome.open_at(each),
        "longest pause s": lambda each: f"{outcome.longest_pause_s(each):.2f}",
    }
    mixtures: Columns[Mixture] = {
        "routers": lambda each: each.routers,
        "prefill": lambda each: each.prefill,
        "decode": lambda each: each.decode,
        "streams": lambda each: len(outcome.streams_in(each)),
        "handed over": lambda each: outcome.handed_over_in(each),
    }
    print(f"{table(outcome.rolled, rolled)}\n\n{table(outcome.mixtures, mixtures)}\n")
    found = figures(outcome)
    counts = ", ".join(f"{found[name]} {name}" for name in ("failed", "lost", "repeated", "wrong"))
    moved = f"{found['went_on_elsewhere']} of them continued on another worker"
    print(f"{found['streams']} streams, {moved}, {found['tokens']:,} tokens: {counts}")
    for finding in outcome.faults:
        print(f"  stream {finding.stream}: {finding.kind}, {finding.detail}")
    for event in outcome.unclean:
        print(f"  {event}")


def main() -> None:
    usual = RollingOptions()
    given = read_arguments(
        __doc__,
        dwell_s=(usual.dwell_s, "seconds of load between two restarts"),
        clients=(usual.clients, "number of concurrent streams"),
        seed=usual.seed,
        abruptly=(False, "end processes by SIGKILL"),
        routers=(0, "number of routers on one port; default: 2 with a port each"),
        commit=("", "commit of the old release; default: the one that pyproject.toml names"),
        logs=(None, "folder for the logs of all processes"),
    )
    named = last_release()
    release = PastRelease(given.commit, given.commit) if given.commit else named
    if given.logs is not None:
        given.logs.mkdir(parents=True, exist_ok=True)
    layout = Layout.with_routers(given.routers or None)
    try:
        before, after = Side(release.version, check_out(release)), Side(RELEASE, IMPORT_PATH)
        if layout.shares_ports and not can_share_ports(before.code):
            raise CommandFailed(f"--routers: {release.version} cannot share a port; name a later commit by --commit")
        options = RollingOptions(given.dwell_s, given.clients, given.seed, abruptly=given.abruptly, layout=layout)
        run = RollingRun(before, after, options, lambda line: print(line, flush=True))
        outcome = asyncio.run(run.run(given.logs))
    except (ReleaseMissing, NotWhole, NotRolled) as error:
        raise CommandFailed(str(error)) from error
    show(outcome)
    verdict = judge_rounds("no stream fails, no token is lost, repeated or wrong", [outcome.is_good])
    write_result(given.json, make_result(SERVICE, [figures(outcome)], verdict, options=asdict(options)))
    if not outcome.is_good:
        raise CommandFailed("the rolling upgrade failed: see the findings above")


if __name__ == "__main__":
    main()
