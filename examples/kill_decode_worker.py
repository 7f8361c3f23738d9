"""Kills -9 the decode worker that is writing an answer, as the tutorial does. Run it with .venv/bin/python."""

import os
import signal
import sys
import time

from baton.client import AdminClient

WAIT_S, POLL_S = 30.0, 0.1


def main() -> None:
    until = time.monotonic() + WAIT_S
    with AdminClient() as admin:
        while time.monotonic() < until:
            for worker in admin.status().workers:
                if worker.role == "decode" and worker.connected and worker.load and worker.load.running_sequences:
                    os.kill(worker.pid, signal.SIGKILL)
                    sys.stdout.write(f"killed {worker.worker_id}, process {worker.pid}, in the middle of an answer\n")
                    return
            time.sleep(POLL_S)
    raise SystemExit(f"no decode worker wrote an answer within {WAIT_S:.0f} s")


if __name__ == "__main__":
    main()
