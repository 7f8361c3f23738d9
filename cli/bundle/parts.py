"""The parts of a bundle. Another one is another line here, and a function that yields its files."""

import os
from collections.abc import Sequence
from pathlib import Path

from baton.cli.bundle import machine, recorded, running
from baton.cli.bundle.archive import Part, collect, now, write_archive
from baton.cli.bundle.redaction import redactor_for
from baton.cli.bundle.sources import PROC, find_sources
from baton.launch.paths import RUNTIME

PARTS = (
    Part("versions", machine.versions),
    Part("machine", machine.machine),
    Part("GPUs", machine.gpus),
    Part("configuration", running.configuration),
    Part("processes", running.processes),
    Part("status", running.status),
    Part("metrics", running.metrics),
    Part("traces", recorded.traces),
    Part("timelines", recorded.timelines),
    Part("logs", recorded.logs),
)


def make_bundle(
    out: Path | None,
    admin: Sequence[str] = (),
    http: Sequence[str] = (),
    runtime: Path = RUNTIME,
    proc: Path = PROC,
) -> int:
    """`out`: default is a name with the time, in the folder of the caller. Raises: CommandFailed."""
    made = now()
    path = out if out is not None else Path(f"baton-bundle-{made:%Y%m%d-%H%M%S}.tar.gz")
    sources = find_sources(runtime, os.environ, admin, http, proc)
    redactor = redactor_for(running.environments(sources), Path.home())
    bundle = collect(PARTS, sources, redactor)
    write_archive(bundle, path, made)
    print(f"{path}: {len(bundle.files)} files, {path.stat().st_size:,} bytes; README.txt in it lists them")
    for each in bundle.missing:
        print(f"  missing: {each}")
    print("It has no prompts, answers, keys or passwords. Look through it all the same before you send it.")
    return 0
