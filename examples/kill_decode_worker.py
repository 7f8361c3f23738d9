"""Kill the decode worker that generates an answer (SIGKILL), as in the tutorial. Run it with .venv/bin/python.

Exit code 1 if no worker was killed.
"""

import os
import signal
import sys
import time

from baton.client import AdminClient, BatonClientError
from baton.launch.paths import RUNTIME
from baton.launch.run_record import running_services

WAIT_S, POLL_S = 30.0, 0.1
RUNNING_S = 1.0  # running time of the answer before its worker is killed
DEFAULT_TARGET = "127.0.0.1:50052"


def main() -> None:
    services = running_services(RUNTIME)
    target = services[0].admin_targets[0] if services else DEFAULT_TARGET
    try:
        with AdminClient(target) as admin:
            kill_a_writer(admin)
    except BatonClientError as error:
        raise SystemExit(f"no service answers at {target} ({error}); start one with ./baton up") from error


def kill_a_writer(admin: AdminClient) -> None:
    """Kill a worker whose answer has run for RUNNING_S. Raises: SystemExit without one within WAIT_S."""
    until, since = time.monotonic() + WAIT_S, dict[str, float]()
    while time.monotonic() < until:
        now = time.monotonic()
        writing = {
            worker.worker_id: worker
            for worker in admin.status().workers
            if worker.role == "decode" and worker.connected and worker.load and worker.load.running_sequences
        }
        since = {name: since.get(name, now) for name in writing}
        for name, worker in writing.items():
            if now - since[name] >= RUNNING_S:
                os.kill(worker.pid, signal.SIGKILL)
                sys.stdout.write(f"killed {name}, process {worker.pid}, in the middle of an answer\n")
                return
        time.sleep(POLL_S)
    raise SystemExit(f"no decode worker wrote an answer for {RUNNING_S:.0f} s within {WAIT_S:.0f} s")


if __name__ == "__main__":
    main()
