"""Controllers of the played cluster: numbers of pods, rolling updates, and the routers behind a Service."""

import asyncio
import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.deploy.play.podman import ADDRESSES, Node, PlayFailed
from tests.deploy.play.pods import Pod, pod_of
from tests.fixtures.kubernetes import Object, name_of, of_kind

REDIS, ROUTER, PREFILL, DECODE = "baton-redis", "baton-router", "baton-prefill", "baton-decode"


@dataclass(frozen=True, slots=True)
class Replaced:
    """Pod that was stopped and replaced."""

    pod: str
    exit_code: int
    drained_s: float
    ready_s: float


class KubernetesCluster:
    """Pods by set. Each pod gets a new address, as in Kubernetes."""

    def __init__(self, node: Node, objects: tuple[Object, ...], secrets: Mapping[str, Path]) -> None:
        self._node, self._objects, self._secrets = node, objects, secrets
        self._addresses = iter(ADDRESSES)
        self._suffixes = itertools.count(1)
        self._sets = {name_of(each): each for each in of_kind(objects, "Deployment", "StatefulSet")}
        self.pods: dict[str, list[Pod]] = {name: [] for name in self._sets}
        """Pods by set, in the order of their start."""
        self._unused: set[str] = set()
        """Pods that are not ready or are stopping, to which no Service sends new requests."""

    async def start(self, owner: str, pods: int | None = None) -> float:
        """Start all pods of a set; return the seconds until the last is ready. Raises: PlayFailed."""
        wanted = self._sets[owner]["spec"]["replicas"] if pods is None else pods
        started = [await self._begin(owner) for _ in range(wanted)]
        return max([await self._ready(pod) for pod in started])

    async def roll(self, owner: str) -> list[Replaced]:
        """Replace all pods of a set like `kubectl rollout restart`. Raises: PlayFailed."""
        is_stateful = self._sets[owner]["kind"] == "StatefulSet"
        before = sorted(self.pods[owner], key=lambda pod: pod.name, reverse=is_stateful)
        surge = self._sets[owner]["spec"].get("strategy", {}).get("rollingUpdate", {}).get("maxSurge", 0)
        return [await (self._surge(pod) if surge else self._replace(pod)) for pod in before]

    async def end_last(self, owner: str) -> tuple[int, float]:
        """Stop the pod of the highest number; return its exit code and the seconds of its drain."""
        return await self._end(max(self.pods[owner], key=lambda pod: pod.name))

    def http_addresses(self) -> list[str]:
        """Return the addresses to which the Service `baton` would send a new connection."""
        serving = [pod for pod in self.pods[ROUTER] if pod.name not in self._unused]
        return [f"{pod.address}:{pod.ports['http']}" for pod in serving]

    async def status(self) -> dict[str, Any]:
        """Return `baton status --json` of a router. Raises: PlayFailed."""
        pod = self.pods[ROUTER][-1]
        text = await asyncio.to_thread(
            self._node.run_in, pod, "python", "-m", "baton.cli", "status", "--json", "--target", "127.0.0.1:50051"
        )
        read: dict[str, Any] = json.loads(text)
        return read

    async def look(self, owner: str, command: str) -> str:
        """Return the output of a shell command in the first pod of a set. Raises: PlayFailed."""
        return await asyncio.to_thread(self._node.run_in, self.pods[owner][0], "sh", "-c", command)

    async def _begin(self, owner: str) -> Pod:
        taken = {pod.name for pod in self.pods[owner]}
        if self._sets[owner]["kind"] == "StatefulSet":
            name = next(each for number in itertools.count() if (each := f"{owner}-{number}") not in taken)
        else:
            name = f"{owner}-{next(self._suffixes):05d}"
        pod = pod_of(self._objects, owner, name, next(self._addresses), self._secrets)
        await asyncio.to_thread(self._node.start, pod)
        self._unused.add(name)
        self.pods[owner].append(pod)
        return pod

    async def _replace(self, pod: Pod) -> Replaced:
        code, drained_s = await self._end(pod)
        return Replaced(pod.name, code, drained_s, await self._ready(await self._begin(pod.owner)))

    async def _surge(self, pod: Pod) -> Replaced:
        new = await self._begin(pod.owner)
        ready_s = await self._ready(new)
        code, drained_s = await self._end(pod)
        return Replaced(pod.name, code, drained_s, ready_s)

    async def _ready(self, pod: Pod) -> float:
        took_s = await asyncio.to_thread(self._node.wait_ready, pod)
        self._unused.discard(pod.name)
        await asyncio.sleep(self._sets[pod.owner]["spec"].get("minReadySeconds", 0))
        return took_s

    async def _end(self, pod: Pod) -> tuple[int, float]:
        self._unused.add(pod.name)
        code, drained_s = await asyncio.to_thread(self._node.stop, pod)
        self.pods[pod.owner].remove(pod)
        self._unused.discard(pod.name)
        if code != 0:
            raise PlayFailed(f"{pod.name} ended with exit code {code}")
        return code, drained_s
