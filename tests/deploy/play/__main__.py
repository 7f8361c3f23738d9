"""Run the overlay `cpu` with podman instead of Kubernetes: .venv/bin/python -m tests.deploy.play

Each pod is one `podman kube play` of its rendered template, on a network with the names of the Services. This program
replaces the controllers: it keeps the numbers of pods, runs probes and preStop hooks, and stops pods like a kubelet.
Under streams over gRPC and HTTP it replaces every pod, and adds and removes a third decode pod. It needs root, podman
4.3 or newer with netavark, and the images:

    podman build --target router -t baton-router:0.1.0 .
    podman build --target worker --build-arg TORCH=cpu -t baton-worker-cpu:0.1.0 .
"""

import argparse
import asyncio
import re
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from baton.client import BatonClientError
from baton.lab.report.result import DEMO, SERVICE, judge_rounds, make_result, write_result
from tests.deploy.play.cluster import DECODE, PREFILL, REDIS, ROUTER, KubernetesCluster, Replaced
from tests.deploy.play.entry import Entry, secure_entry
from tests.deploy.play.load import TOKENS, Compared, Load, Stream
from tests.deploy.play.podman import GATEWAY, Node, PlayFailed, podman
from tests.deploy.play.pods import kinds_not_run
from tests.fixtures.kubernetes import containers, rendered

QUESTION = "What is a block table?"
NAME = f"dns://{GATEWAY}:53/baton-grpc:50051"
"""Target for dns:///baton-grpc:50051 of the cluster, resolved by the DNS server of the network."""
WARM_S, TAKES_PART_S, POLL_S = 5.0, 120.0, 0.5
LOOK = "echo user $(id -u); grep -E '^(CapEff|NoNewPrivs|Seccomp):' /proc/self/status; touch /x 2>&1 || true"


@dataclass(frozen=True, slots=True)
class Seen:
    step: str
    seen: str


async def play(cluster: KubernetesCluster, entry: Entry) -> tuple[list[Seen], dict[str, Any]]:
    """Run all steps and return what was seen, with figures. Raises: PlayFailed."""
    seen = [await _started(cluster), await _answered(cluster, entry), await _locked(cluster)]
    load = Load(entry, NAME, cluster.http_addresses)
    load.start()
    try:
        await asyncio.sleep(WARM_S)
        replaced: list[Replaced] = []
        for owner in (PREFILL, DECODE, ROUTER, REDIS):
            begun, before = time.monotonic(), len(load.streams)
            rolled = await cluster.roll(owner)
            replaced += rolled
            seen.append(_rolled(owner, rolled, load.streams[before:], time.monotonic() - begun))
        seen += await _scaled(cluster, entry)
    finally:
        await load.stop()
    compared = await load.compare()
    seen.append(_totals(load.streams, compared))
    failures = [each.failure for each in load.streams if each.failure]
    figures = {"replaced": [asdict(each) for each in replaced], "streams": len(load.streams), "failures": failures}
    return seen, figures | asdict(compared)


async def _started(cluster: KubernetesCluster) -> Seen:
    begun = time.monotonic()
    for owner in (REDIS, PREFILL, DECODE, ROUTER):
        await cluster.start(owner)
    count = sum(map(len, cluster.pods.values()))
    return Seen("start", f"{count} pods ready after {time.monotonic() - begun:.0f} s, one set after another")


async def _answered(cluster: KubernetesCluster, entry: Entry) -> Seen:
    async with entry.http() as http:
        body = {"model": "tableqa", "messages": [{"role": "user", "content": QUESTION}], "max_tokens": 60}
        answer = await http.post(entry.address(cluster.http_addresses()[0], "/v1/chat/completions"), json=body)
        answer.raise_for_status()
    async with entry.grpc(NAME) as baton:
        said = await baton.complete_chat([{"role": "user", "content": QUESTION}], max_tokens=60)
    over_http = answer.json()["choices"][0]["message"]["content"]
    if said.choices[0].text != over_http:
        raise PlayFailed(f"gRPC says {said.choices[0].text!r}, HTTP {over_http!r}")
    return Seen("one request", f"{QUESTION!r}, over HTTP and gRPC: {over_http.strip()!r}")


async def _locked(cluster: KubernetesCluster) -> Seen:
    return Seen("a worker's container", " ".join((await cluster.look(DECODE, LOOK)).split()))


def _rolled(owner: str, replaced: Sequence[Replaced], streams: Sequence[Stream], took_s: float) -> Seen:
    failed = sum(1 for each in streams if each.failure)
    drained = ", ".join(f"{each.drained_s:.1f}" for each in replaced)
    ready = ", ".join(f"{each.ready_s:.0f}" for each in replaced)
    gap_s = max((each.longest_gap_s for each in streams), default=0.0)
    pods = f"{len(replaced)} pods in {took_s:.0f} s (drained in {drained} s, ready after {ready} s)"
    counted = f"{len(streams)} streams ended meanwhile, {failed} failed, longest gap {gap_s:.1f} s"
    return Seen(f"every pod of {owner} replaced", f"{pods}; {counted}")


async def _scaled(cluster: KubernetesCluster, entry: Entry) -> list[Seen]:
    ready_s = await cluster.start(DECODE, 1)
    name = cluster.pods[DECODE][-1].name
    begun = time.monotonic()
    before, steps = None, 0
    while before is None or steps < before + TOKENS:
        if time.monotonic() - begun > TAKES_PART_S:
            raise PlayFailed(f"{name} made {steps - (before or 0)} steps in {TAKES_PART_S:g} s")
        await asyncio.sleep(POLL_S)
        steps = await _steps(cluster, entry, name)
        before = before or steps or None  # those of its start are not of requests
    took_s = time.monotonic() - begun
    status = await cluster.status()
    links = sorted({link["transport"] for each in status["workers"] if each["load"] for link in each["load"]["links"]})
    _, drained_s = await cluster.end_last(DECODE)
    return [
        Seen("KV between pods", f"by {', '.join(links)}"),
        Seen(
            "a third decode pod", f"ready after {ready_s:.0f} s, had made {steps - before} steps {took_s:.0f} s later"
        ),
        Seen("and away again", f"{name} drained in {drained_s:.1f} s"),
    ]


async def _steps(cluster: KubernetesCluster, entry: Entry, worker: str) -> int:
    """Return the number of a worker's steps, from a router's metrics; an answer takes one step per token."""
    async with entry.http() as http:
        text = (await http.get(entry.address(cluster.http_addresses()[0], "/metrics"))).raise_for_status().text
    found = re.search(rf'^baton:steps_total{{[^}}]*engine="{worker}"[^}}]*}} (\S+)', text, re.MULTILINE)
    return int(float(found[1])) if found else 0


def _totals(streams: Sequence[Stream], compared: Compared) -> Seen:
    by_way = {way: sum(1 for each in streams if each.way == way) for way in ("gRPC", "HTTP")}
    failed = sum(1 for each in streams if each.failure)
    counted = ", ".join(f"{count} over {way}" for way, count in by_way.items())
    agreed = f"{compared.different} of {compared.compared} that were made again without load differ"
    return Seen("all streams", f"{counted}; {failed} failed; {agreed}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--secure", action="store_true", help="with the components api-keys, public-tls, internal-tls")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all figures here")
    arguments = parser.parse_args()
    node = Node(DEMO)
    with tempfile.TemporaryDirectory() as folder:
        entry = secure_entry(Path(folder)) if arguments.secure else Entry()
        objects = rendered("cpu", entry.components)
        try:
            for image in sorted({container["image"] for _, _, container in containers(objects)}):
                podman("image", "exists", image)
            node.open()
            seen, figures = asyncio.run(play(KubernetesCluster(node, objects, entry.secrets), entry))
        except (PlayFailed, BatonClientError) as failure:
            print(f"failed: {failure}", file=sys.stderr)
            return 1
        finally:
            node.close()
    width = max(len(each.step) for each in seen)
    for each in seen:
        print(f"{each.step.ljust(width)}  {each.seen}")
    print(f"not run here: {', '.join(kinds_not_run(objects))}")
    is_good = not (figures["failures"] or figures["different"])
    rounds = [{"steps": [asdict(each) for each in seen], **figures}]
    verdict = judge_rounds("no stream fails and no answer differs", [is_good])
    measures = (*SERVICE, "deploy/kubernetes")
    write_result(arguments.json, make_result(measures, rounds, verdict, components=entry.components))
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main())
