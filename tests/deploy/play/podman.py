"""Node of the played cluster: starts, probes and stops pods with podman."""

import asyncio
import ssl
import subprocess
import time
import urllib.request
from contextlib import closing
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from baton.launch.readiness import HealthState, check_health
from tests.deploy.play.pods import Pod

NETWORK, SUBNET, GATEWAY = "baton-play", "10.91.7.0/24", "10.91.7.1"
ADDRESSES = tuple(f"10.91.7.{number}" for number in range(10, 100))
"""Addresses of pods, used in turn."""
VOLUME = "baton-model"
READY_S, CALL_S, POLL_S = 240.0, 2.0, 0.2


class PlayFailed(Exception):
    """A step did not do what it should; the message says which."""


def podman(*arguments: str, stdin: str | None = None, timeout_s: float = 120) -> str:
    """Run podman and return its output. Raises: PlayFailed."""
    done = subprocess.run(["podman", *arguments], input=stdin, capture_output=True, text=True, timeout=timeout_s)
    if done.returncode != 0:
        raise PlayFailed(f"podman {' '.join(arguments[:4])}: {done.stderr.strip()[-600:]}")
    return done.stdout


def _unchecked() -> ssl.SSLContext:
    """Return a TLS context without certificate checks, like a kubelet's."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


class Node:
    """Owner of a network, a volume with the model, and the started pods."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._running: dict[str, Pod] = {}

    def open(self) -> None:
        """Create network and volume. Raises: PlayFailed."""
        self.close()
        podman("network", "create", "--subnet", SUBNET, NETWORK)
        podman("volume", "create", VOLUME)
        inside = podman("volume", "inspect", "--format", "{{.Mountpoint}}", VOLUME).strip()
        subprocess.run(["cp", "--recursive", f"{self._model}/.", inside], check=True, timeout=60)
        subprocess.run(["chmod", "--recursive", "a+rX", inside], check=True, timeout=60)

    def start(self, pod: Pod) -> None:
        """Start a pod. Raises: PlayFailed."""
        text = yaml.safe_dump_all(pod.objects)
        names = "".join(f",alias={each}" for each in pod.services)
        network = f"{NETWORK}:ip={pod.address}{names}"
        podman("kube", "play", "--quiet", "--network", network, "-", stdin=text)
        self._running[pod.name] = pod

    def is_ready(self, pod: Pod) -> bool:
        """Run the readiness probe once."""
        if "httpGet" in pod.probe:
            wanted = pod.probe["httpGet"]
            scheme = wanted.get("scheme", "HTTP").lower()
            address = f"{scheme}://{pod.address}:{pod.ports[wanted['port']]}{wanted['path']}"
            context = _unchecked() if scheme == "https" else None
            try:
                with closing(urllib.request.urlopen(address, timeout=CALL_S, context=context)) as answer:
                    return bool(answer.status == 200)
            except OSError:  # urllib's own errors are among them
                return False
        if "grpc" in pod.probe:
            target = f"{pod.address}:{pod.probe['grpc']['port']}"
            return asyncio.run(check_health(target, CALL_S)) is HealthState.SERVING
        command = ["podman", "exec", pod.container, *pod.probe["exec"]["command"]]
        return subprocess.run(command, capture_output=True, timeout=30).returncode == 0

    def wait_ready(self, pod: Pod) -> float:
        """Wait until a pod is ready; return the seconds. Raises: PlayFailed."""
        started = time.monotonic()
        while not self.is_ready(pod):
            if time.monotonic() - started > READY_S:
                raise PlayFailed(f"{pod.name} is not ready after {READY_S:g} s:\n{self.log(pod)[-2000:]}")
            time.sleep(POLL_S)
        return time.monotonic() - started

    def stop(self, pod: Pod) -> tuple[int, float]:
        """Stop a pod; return its exit code and the seconds after SIGTERM. Raises: PlayFailed."""
        if pod.before_stop:
            podman("exec", pod.container, *pod.before_stop)
        started = time.monotonic()
        podman("stop", "--time", str(pod.grace_s), pod.container, timeout_s=pod.grace_s + 30)
        took_s = time.monotonic() - started
        code = int(podman("inspect", "--format", "{{.State.ExitCode}}", pod.container))
        podman("pod", "rm", "--force", pod.name)
        del self._running[pod.name]
        return code, took_s

    def log(self, pod: Pod) -> str:
        done = subprocess.run(["podman", "logs", pod.container], capture_output=True, text=True, timeout=30)
        return done.stdout + done.stderr

    def run_in(self, pod: Pod, *command: str) -> str:
        """Run a command in a pod and return its output. Raises: PlayFailed."""
        return podman("exec", pod.container, *command)

    def close(self) -> None:
        for pod in list(self._running.values()):
            subprocess.run(["podman", "pod", "rm", "--force", pod.name], capture_output=True, timeout=120)
        self._running.clear()
        for kind, name in (("network", NETWORK), ("volume", VOLUME)):
            subprocess.run(["podman", kind, "rm", "--force", name], capture_output=True, timeout=120)
