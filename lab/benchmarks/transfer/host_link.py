"""How fast KV goes between two hosts, beside what one plain TCP stream moves on the same link in the same run.

    python -m baton.lab.benchmarks.transfer.host_link [--model FOLDER] [--links 1,10,0] [--rounds 7] [--json FILE]

Needs Linux, root and iproute2: the hosts are two network namespaces of this machine, joined by a link of so many Gbit/s
(0: unlimited). A prefill worker runs in the one; in the other a decode worker for each transport, and this process as
their router. Each host has its own core. Once without and once with mutual TLS. In each round, one after the other:

* stream: a plain TCP stream, of as many bytes as the prompt's KV has.
* KV: a prompt that is computed already, pulled at once over each transport, over the time of the copies.
* hidden: a prompt that is pulled while it is computed; the share of the copying that was over before its last chunk.

The figures are medians. An encrypted stream, or one that no link limits, is bound by those two cores.
"""

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from baton.lab.benchmarks.report.result import DEMO, Columns, read_arguments, table, write_result
from baton.lab.benchmarks.transfer.hand_over import stages_of
from baton.lab.benchmarks.transfer.plain_stream import gb_per_s
from baton.lab.benchmarks.transfer.two_hosts import Host, two_hosts
from baton.lab.benchmarks.transfer.worker_pair import Workers, WorkerSession, make_command, new_prompt, worker_process
from baton.lab.benchmarks.wrapped_process import Marks
from baton.launch.paths import ROOT
from baton.process.registry.redis_server import free_port
from baton.process.security.tls import InternalTls
from baton.protos import session_pb2

WARM_UP_ROUNDS = 1
ANSWER_TOKENS = 4
LEASE_S = 60  # the prompt is computed before a worker reads it


@dataclass(frozen=True, slots=True)
class Row:
    link: str
    tls: bool
    transport: str
    kv_bytes: int
    stream_gb_per_s: float
    kv_gb_per_s: float
    of_stream: float  # median of the rounds' ratios
    hidden: float  # share


COLUMNS: Columns[Row] = {
    "link": lambda row: row.link,
    "TLS": lambda row: "mutual" if row.tls else "none",
    "transport": lambda row: row.transport,
    "MB": lambda row: f"{row.kv_bytes / 1e6:.0f}",
    "stream GB/s": lambda row: f"{row.stream_gb_per_s:.3f}",
    "KV GB/s": lambda row: f"{row.kv_gb_per_s:.3f}",
    "KV of stream": lambda row: f"{row.of_stream:.0%}",
    "hidden": lambda row: f"{row.hidden:.0%}",
}


@dataclass(frozen=True, slots=True)
class Reader:
    """A decode worker, and the source that it reads."""

    transport: str
    source: WorkerSession
    session: WorkerSession
    marks: tuple[Marks, Marks]

    async def pull(self, prompt: list[int]) -> session_pb2.Landed:
        """Of a prompt that the source has computed or cached, whole: this worker has no block of it."""
        common = make_command(prompt, ANSWER_TOKENS)
        await self.source.send(prefill=session_pb2.Prefill(**common))
        await self.source.hear("first_step", common["attempt_id"])
        unhashed = common | {"block_hashes": []}
        await self.session.send(start=session_pb2.Start(**unhashed, prefill_endpoint=self.source.endpoint))
        landed: session_pb2.Landed = (await self.session.hear("landed", common["attempt_id"])).event
        tokens = 1
        while tokens < ANSWER_TOKENS:  # nothing else runs during the next measurement
            output = (await self.session.hear("output", common["attempt_id"])).event
            tokens = output.offset + len(output.token_ids)
        if landed.transport != self.transport:
            raise RuntimeError(f"{landed.transport} was measured, not {self.transport}")
        return landed

    async def hidden(self, prompt_tokens: int) -> float:
        began = time.monotonic()
        await Workers(self.session, self.source).answer(prompt_tokens, ANSWER_TOKENS)
        return stages_of(*self.marks, began)[1]


@asynccontextmanager
async def started(options: argparse.Namespace, tls: InternalTls | None) -> AsyncIterator[list[Reader]]:
    """Inside of the readers' host."""
    source, own = (Host(*text.split("@")) for text in options.inside.split(","))
    cores = sorted(os.sched_getaffinity(0))
    of_source, of_readers = (("--cores", core, "--transfer-cores", core) for core in (cores[-1], cores[0]))
    flags: tuple[object, ...] = ("--dtype", "bfloat16", "--kv-memory", "1GiB")
    if tls is not None:
        flags += ("--internal-tls-ca", tls.authority, "--internal-tls-cert", tls.certificate)
        flags += ("--internal-tls-key", tls.key)
    async with AsyncExitStack() as undo:
        scratch = Path(undo.enter_context(tempfile.TemporaryDirectory(prefix="baton-host-link-")))

        def start(host: Host, role: str, name: str, *own_flags: object) -> str:
            within = host.command() if host is source else ()
            worker = worker_process(
                role,
                options.model,
                *flags,
                *own_flags,
                marks=scratch / name,
                threads=1,
                host=host.address,
                within=within,
            )
            return undo.enter_context(worker).endpoint

        wanted = options.transports.split(",")
        named = ("--transfer-interface", "wire") if {"nixl", "gloo"} & set(wanted) else ()
        endpoint = start(source, "prefill", "prefill", *of_source, *named, "--lease-s", LEASE_S)
        endpoints = []
        for transport in wanted:
            interface = named if transport in ("nixl", "gloo") else ()
            own_flags = (*of_readers, "--transport", transport, *interface)
            endpoints.append((transport, start(own, "decode", transport, *own_flags)))
        session = await undo.enter_async_context(WorkerSession(endpoint, tls))
        readers = []
        for transport, decode_endpoint in endpoints:
            reader = await undo.enter_async_context(WorkerSession(decode_endpoint, tls))
            readers.append(Reader(transport, session, reader, (Marks(scratch / "prefill"), Marks(scratch / transport))))
        yield readers


async def measure(options: argparse.Namespace, port: int) -> list[Row]:
    """Inside of the readers' host."""
    source = Host(*options.inside.split(",")[0].split("@"))
    tls = None
    if options.certificates:
        folder = Path(options.certificates)
        tls = InternalTls(folder / "internal-ca.pem", folder / "internal.pem", folder / "internal-key.pem")
    async with started(options, tls) as readers:
        prompt = new_prompt(readers[0].session, options.pulled_tokens)
        streams: list[float] = []
        rates: dict[str, list[float]] = {reader.transport: [] for reader in readers}
        hidden: dict[str, list[float]] = {reader.transport: [] for reader in readers}
        nbytes = 0
        for number in range(WARM_UP_ROUNDS + options.rounds):
            found = {}
            for reader in readers:
                landed = await reader.pull(prompt)
                nbytes = landed.bytes
                found[reader.transport] = nbytes / 1e6 / landed.copy_ms
            stream = await asyncio.to_thread(gb_per_s, source.address, port, nbytes)
            shares = {reader.transport: await reader.hidden(options.prompt_tokens) for reader in readers}
            if number >= WARM_UP_ROUNDS:
                streams.append(stream)
                for name, rate in found.items():
                    rates[name].append(rate)
                    hidden[name].append(shares[name])
            note(f"round {number}: stream {stream:.3f}, KV {found}, hidden {shares}")
    return [
        Row(
            options.link,
            tls is not None,
            name,
            nbytes,
            statistics.median(streams),
            statistics.median(rates[name]),
            statistics.median(rate / stream for rate, stream in zip(rates[name], streams, strict=True)),
            statistics.median(hidden[name]),
        )
        for name in rates
    ]


def note(progress: str) -> None:
    print(progress, file=sys.stderr, flush=True)


def run_inside(options: argparse.Namespace) -> None:
    source = Host(*options.inside.split(",")[0].split("@"))
    port = free_port()
    command = source.command(
        sys.executable, "-P", "-m", "baton.lab.benchmarks.transfer.plain_stream", source.address, port
    )
    sender = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT)
    try:
        assert sender.stdout is not None
        sender.stdout.readline()  # it listens
        print(json.dumps([asdict(row) for row in asyncio.run(measure(options, port))]))
    finally:
        sender.terminate()
        sender.wait()


def measure_link(options: argparse.Namespace, gbit_per_s: float, certificates: Path | None) -> Sequence[Row]:
    """By this file in a process of its own, which belongs to one host from its first thread on."""
    link = f"{gbit_per_s:g} Gbit/s" if gbit_per_s else "unlimited"
    note(f"{link}, {'no' if certificates is None else 'mutual'} TLS")
    with two_hosts(gbit_per_s or None) as (source, own):
        inside = ",".join(f"{host.namespace}@{host.address}" for host in (source, own))
        flags: list[object] = ["--inside", inside, "--link", link, "--certificates", certificates or ""]
        for name in ("model", "transports", "rounds", "prompt_tokens", "pulled_tokens"):
            flags += [f"--{name.replace('_', '-')}", getattr(options, name)]
        command = own.command(sys.executable, "-P", "-m", "baton.lab.benchmarks.transfer.host_link", *flags)
        done = subprocess.run(command, stdout=subprocess.PIPE, check=True, cwd=ROOT)
        return [Row(**row) for row in json.loads(done.stdout)]


def main() -> None:
    options = read_arguments(
        __doc__,
        model=DEMO,
        links=("1,10,0", "Gbit/s of each link; 0: unlimited"),
        tls=("none,mutual", "with and without"),
        transports=("tcp,grpc", "each with a decode worker of its own"),
        rounds=7,
        prompt_tokens=(2048, "of prompts that are pulled while they are computed"),
        pulled_tokens=(4096, "of the prompt that is pulled at once"),
        inside=("", "given by this benchmark to itself: both hosts"),
        link=("", "likewise: its name"),
        certificates=("", "likewise: their folder"),
    )
    if options.inside:
        run_inside(options)
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="baton-certificates-") as folder:
        subprocess.run(
            [sys.executable, "-P", "-m", "baton.cli", "certs", folder], check=True, stdout=subprocess.DEVNULL
        )
        for gbit_per_s in map(float, options.links.split(",")):
            for tls in options.tls.split(","):
                rows += measure_link(options, gbit_per_s, Path(folder) if tls == "mutual" else None)
    print(table(rows, COLUMNS))
    write_result(options.json, {"model": options.model.name, "rows": [asdict(row) for row in rows]})


if __name__ == "__main__":
    main()
